"""What reading a checkpoint of any format gives."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptconv.errors import CkptconvError
from ckptconv.storage.records import Records
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File

# What wrappers put before every name: Lightning, DistributedDataParallel and DeepSpeed's engine, torch.compile.
_WRAPPERS = ("_forward_module.", "module.", "_orig_mod.", "model.")


@dataclass
class Training:
    """What a DeepSpeed checkpoint holds beside weights and states, of which a universal checkpoint is made.

    `stage` is ZeRO's; `parameters` the names of the trained parameters; `common` what the optimizer's file says of all
    of them together; `copies` the model files.
    """

    stage: int | None
    parameters: list[str]
    common: dict[str, Any]
    copies: list[File]


class Parts(Protocol):
    """Reads what a source holds beside its weights, when it is asked for; adds to the source what it finds out."""

    def tree(self, key: str) -> Any:
        """The tree that has what is under the dotted `key`, which "." is all of, where it belongs."""

    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's state dict with names for parameters; None where there is none."""


@dataclass
class Source:
    """An opened checkpoint: a tree with `LazyTensor` leaves, and facts about it.

    - `format` names it for people; `family`, such as "torch" or "deepspeed", says which command converts it.
    - `weights` is the tree that is converted. `structured` says that its shape and order are the user's own and worth a
      record; otherwise it is a flat state dict whose order means nothing.
    - `optimizer` is the optimizer's state dict with names for parameters, where the checkpoint tells them.
    - `states_error` says why its states cannot be converted, where the weights can.
    - `parts` reads the optimizer, and what else a key leads to, where those are not read with the weights.
    - `training` is what else resuming the training needs.
    - `owners` are ties that the checkpoint itself names: alias → owner.
    - `unaccounted` are names whose data is nowhere: to be excluded by name, or an error.
    - `equal` are tensors that are stored twice, by name; if they differ, the checkpoint is corrupt. `equal_states` are
      such states of the optimizer, which matter where those are converted. `alike_states` are states that ranks keep
      each for itself: that they differ is worth a warning.
    - `counts` tells what the weights consist of, by kind.
    - `opaque` are the names of classes that were kept as inert data, `mentioned` all that its pickles mention.
    - `records` are the storages that files consist of, with their checksums, by the file's path.
    - `notes` are worth knowing and no cause for concern, as `warnings` are. `hints` are notes on what the names of the
      weights may be changed to, of no use to who has chosen some.
    - `inputs` identifies every file that was read, by a name relative to the source.
    - `pointers` are the paths of files that said only where the checkpoint is, as `latest` does.
    - `shards` are the paths of the files of a sharded set: the output keeps the grouping.
    - `model_rank` says which tensor-parallel rank this is, where each is a source of its own.
    - `pieces` finds the names of tensors that are pieces of parameters, and none themselves: they are not converted.
    - `metadata` is what files of safetensors say beside their tensors.
    - `default_dtype` and `default_shard_size` (bytes) apply where the user asks for nothing else.
    """

    format: str
    family: str
    path: str
    weights: Any
    optimizer: Any = None
    states_error: CkptconvError | None = None
    parts: Parts | None = None
    training: Training | None = None
    structured: bool = True
    owners: dict[str, str] = field(default_factory=dict)
    unaccounted: list[str] = field(default_factory=list)
    equal: list[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    equal_states: list[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    alike_states: list[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)
    mentioned: list[str] = field(default_factory=list)
    records: dict[str, Records] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    inputs: dict[str, Hashable] = field(default_factory=dict)
    bytes_read: int = 0
    hints: list[str] = field(default_factory=list)
    pointers: list[str] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    model_rank: int | None = None
    pieces: re.Pattern[str] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    default_dtype: str = "keep"
    default_shard_size: int | None = None

    def tree(self, key: str) -> Any:
        """The tree that has what is under `key`: the weights, or a greater one."""
        return self.parts.tree(key) if self.parts and key else self.weights

    def states(self) -> Any:
        """The optimizer's state dict with names for parameters; None where the checkpoint does not tell them.

        Raises the error that says why the states cannot be converted, if there is one.
        """
        if self.states_error:
            raise self.states_error
        if self.optimizer is None and self.parts:
            self.optimizer = self.parts.optimizer()
        return self.optimizer


def prefixed(names: Collection[str]) -> list[str]:
    """What to do about a prefix that all names share and no model asked for."""
    prefix = ""
    while names:
        more = next((w for w in _WRAPPERS if all(name.startswith(prefix + w) for name in names)), "")
        if not more:
            break
        prefix += more
    if not prefix:
        return []
    return [f"Every name begins with {prefix!r}, as wrappers of models have it; --strip-prefix {prefix} takes it off."]

"""What reading a checkpoint of any format gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.storage.records import Records
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File

# What wrappers put before every name: Lightning, DistributedDataParallel and DeepSpeed's engine, torch.compile.
_WRAPPERS = ("_forward_module.", "module.", "_orig_mod.", "model.")


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is to be read, beside its weights, and which of several is meant.

    `key` is a dotted path into the state, "." all of it; `states` asks for the optimizer's states. Formats that
    describe all of this in one place read it anyway. `tag`, `exclude_frozen` and `model_rank`, one tensor-parallel
    rank, are DeepSpeed's.
    """

    key: str = ""
    states: bool = False
    tag: str = ""
    exclude_frozen: bool = False
    model_rank: int | None = None


@dataclass(frozen=True)
class Training:
    """What a DeepSpeed checkpoint holds beside weights and states, of which a universal checkpoint is made.

    `stage` is ZeRO's; `parameters` the names of the trained parameters; `common` what the optimizer's file says of all
    of them together; `copies` the model files.
    """

    stage: int | None
    parameters: Sequence[str]
    common: Mapping[str, Any]
    copies: Sequence[File]


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: a tree with `LazyTensor` leaves, and facts about it. It is complete, and does not change.

    - `format` names it for people; `family`, such as "torch" or "deepspeed", says which command converts it.
    - `weights` is the tree that is converted. `structured` says that its shape and order are the user's own and worth a
      record; otherwise it is a flat state dict whose order means nothing.
    - `optimizer` is the optimizer's state dict with names for parameters, where the checkpoint tells them.
    - `states_error` says why its states cannot be converted, where the weights can.
    - `trees` are those that have what is under a key, by key, where that is not in `weights`.
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
    - `inputs` identifies every file that was read, by a name relative to the source. `state_inputs` does for what was
      read for the optimizer's states alone; of a file in both it tells more.
    - `wanted` is what was read. Where that was not everything, `reread` opens the checkpoint again for more.
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
    trees: Mapping[str, Any] = field(default_factory=dict)
    training: Training | None = None
    structured: bool = True
    owners: Mapping[str, str] = field(default_factory=dict)
    unaccounted: Sequence[str] = field(default_factory=list)
    equal: Sequence[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    equal_states: Sequence[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    alike_states: Sequence[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    counts: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    opaque: Sequence[str] = field(default_factory=list)
    mentioned: Sequence[str] = field(default_factory=list)
    records: Mapping[str, Records] = field(default_factory=dict)
    notes: Sequence[str] = field(default_factory=list)
    warnings: Sequence[str] = field(default_factory=list)
    inputs: Mapping[str, Hashable] = field(default_factory=dict)
    bytes_read: int = 0
    hints: Sequence[str] = field(default_factory=list)
    pointers: Sequence[str] = field(default_factory=list)
    shards: Sequence[str] = field(default_factory=list)
    model_rank: int | None = None
    pieces: re.Pattern[str] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    default_dtype: str = "keep"
    default_shard_size: int | None = None
    state_inputs: Mapping[str, Hashable] = field(default_factory=dict)
    wanted: Wanted = Wanted()
    reread: Callable[[Wanted], Source] | None = None

    def tree(self, key: str) -> Any:
        """The tree that has what is under `key`: the weights, or a greater one."""
        return self.trees.get(key, self.weights)

    def states(self) -> Any:
        """The optimizer's state dict with names for parameters; None where the checkpoint does not tell them.

        Raises the error that says why the states cannot be converted, if there is one.
        """
        if self.states_error:
            raise self.states_error
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

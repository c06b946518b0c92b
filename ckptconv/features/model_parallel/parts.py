"""Files of model-parallel ranks that do not say which parts of tensors they hold. A map joins the parts.

Rank 3's part of `layers.0.wq.weight` is called `3.layers.0.wq.weight`. A tensor that every rank has whole, such as a
norm, must be equal in all, and keeps its name. Tensors known to be split along a dimension are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.formats.model_files import TORCH
from ckptconv.formats.source import Defaults, Source, Wanted
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.file import read_torch
from ckptconv.formats.torch.input_log import InputLog
from ckptconv.storage.ahead import ahead
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import Concat, Equal, LazyTensor
from ckptconv.text import quoted, some


@dataclass
class Parts:
    """The tensors of all ranks, in the order of the files. `equal` are tensors that several files have whole."""

    where: str
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    equal: list[Equal] = field(default_factory=list)
    _whole: dict[str, LazyTensor] = field(default_factory=dict)

    def add(self, name: str, tensor: LazyTensor) -> None:
        """Add a rank's part, or the first copy of a whole tensor. Raise CorruptError if the name is taken."""
        if name in self.tensors:
            raise CorruptError(f"{self.where}: two files contain {quoted(name)}.")
        self.tensors[name] = tensor

    def add_whole(self, name: str, tensor: LazyTensor) -> None:
        """Add a tensor that each rank has whole: the first copy is taken, and the others must equal it."""
        first = self._whole.get(name)
        if first is None:
            self._whole[name] = tensor
            self.add(name, tensor)
            return
        if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
            raise CorruptError(
                f"{self.where}: {quoted(name)} is {tensor.dtype} of shape {list(tensor.shape)} in one file, but "
                f"{first.dtype} of shape {list(first.shape)} in another; each rank should have the same whole tensor.",
                "The files come from different saves.",
            )
        self.equal.append((name, first, tensor))

    def joined(self, name: str, shares: Sequence[LazyTensor], dim: int) -> LazyTensor:
        """Return the tensor that ranks split along `dim`. Raise CorruptError if their shares do not fit together."""
        first = shares[0]
        for share in shares:
            if (
                (share.dtype, len(share.shape)) != (first.dtype, len(first.shape))
                or dim >= len(share.shape)
                or any(
                    length != expected
                    for at, (length, expected) in enumerate(zip(share.shape, first.shape, strict=True))
                    if at != dim
                )
            ):
                raise CorruptError(
                    f"{self.where}: the ranks' parts of {quoted(name)} do not fit together: one is {first.dtype} of "
                    f"shape {list(first.shape)}, another is {share.dtype} of shape {list(share.shape)}.",
                    "The files come from different saves.",
                )
        return Concat(tuple(shares), dim)

    def check_same_names(self, ranks: Sequence[Mapping[str, Any]], files: Sequence[Location]) -> None:
        """Raise CorruptError if one rank has a tensor that another has not."""
        for names, file in zip(ranks[1:], files[1:], strict=True):
            lacking = [*(ranks[0].keys() - names.keys()), *(names.keys() - ranks[0].keys())]
            if lacking:
                raise CorruptError(
                    f"{files[0]} and {file} do not contain parts of the same tensors: only one contains "
                    f"{some(sorted(lacking))}.",
                    "The files come from different saves, or one is damaged.",
                )

    def source(self, place: Location, called: str, log: InputLog, facts: Mapping[str, Any], wanted: Wanted) -> Source:
        """Return a source of these parts: at `place`, in the format `called`, with the `log` of their files."""
        return Source(
            format=called,
            family=TORCH,
            path=place.path,
            weights=self.tensors,
            equal=self.equal,
            facts=dict(facts),
            wanted=wanted,
            structured=False,
            warnings=list(log.warnings),
            defaults=Defaults(shard_size=5 * 10**9),
            **log.fields(),
        )


def read_all(files: Mapping[str, Location]) -> tuple[list[TorchFile], InputLog]:
    """Read the descriptions of `files` (by their path relative to the source) ahead of one another. Return them, and
    the log of these files."""
    log, opened = InputLog(), list(ahead(read_torch, [*files.values()]))
    for name, file in zip(files, opened, strict=True):
        log.add(file, name)
    return opened, log

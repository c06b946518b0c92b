"""The plan: the exact list of output files, each as a list of parts. Pure; nothing here reads or writes.

A `FilePlan` stands alone: it holds all that is needed to make one output file, can be pickled, and can be carried out
in any process that sees the inputs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known already: a header."""

    offset: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class Data(NamedTuple):
    """The bytes of `tensor`, which the output calls `name`."""

    offset: int
    tensor: LazyTensor
    name: str

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True, slots=True)
class Trailer:
    """`nbytes` bytes that are known only when the data is: `make` gives them, from the CRC-32 of each tensor by name.

    It is a function of a module, or a `functools.partial` of one, so that it can be pickled.
    """

    offset: int
    nbytes: int
    make: Callable[[Mapping[str, int]], bytes]


@dataclass(frozen=True, slots=True)
class AssertZero:
    """A tensor that the output leaves out because all its bytes are zero: they are read, and that is checked.

    Where one is not, carrying the plan out raises `NotZeroError`.
    """

    offset: int
    tensor: LazyTensor
    name: str

    @property
    def nbytes(self) -> int:
        """What it takes up in the output: nothing."""
        return 0


class NotZeroError(CorruptError):
    """What a plan leaves out as zeros holds something else: another plan is needed, which keeps it."""


Part: TypeAlias = Literal | Data | Trailer | AssertZero


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One output file of `size` bytes; its parts cover it in order, without holes."""

    name: str
    size: int
    parts: tuple[Part, ...]

    @property
    def digested(self) -> bool:
        """Whether something in it depends on the CRC-32 of its data."""
        return any(isinstance(part, Trailer) for part in self.parts)

    @property
    def tensors(self) -> int:
        return sum(isinstance(part, Data) for part in self.parts)

    def inputs(self) -> list[File]:
        """Every input file its parts are read from, each once, in order of first use."""
        seen: dict[File, None] = {}
        before: tuple[File, ...] = ()
        for part in self.parts:
            if isinstance(part, (Data, AssertZero)):
                inputs = part.tensor.inputs()
                # Most tensors lie where the one before lies, and add nothing new.
                if inputs != before:
                    seen.update(dict.fromkeys(inputs))
                    before = inputs
        return list(seen)


@dataclass(frozen=True, slots=True)
class Plan:
    """All files of an output, in the order in which they are published."""

    files: tuple[FilePlan, ...]
    plan_id: str

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def inputs(self) -> list[File]:
        """Every input file the plan reads, each once, in order of first use."""
        return list(dict.fromkeys(itertools.chain.from_iterable(file.inputs() for file in self.files)))


def identify(files: Iterable[FilePlan], inputs: Mapping[str, Hashable], settings: object = None) -> str:
    """The plan id: a hash of the outputs' headers and of the inputs, by names relative to the source.

    Absolute paths stay out of it, because mounts differ between machines. `settings` are what else decides what is
    made, by its `repr`: two tensors of one shape that swap names leave every header as it is.
    """
    digest = hashlib.sha256(repr(settings).encode())
    for file in files:
        digest.update(repr((file.name, file.size)).encode())
        for part in file.parts:
            if isinstance(part, Literal):
                digest.update(part.data)
    for name in sorted(inputs):
        digest.update(repr((name, inputs[name])).encode())
    return digest.hexdigest()[:16]


def identity(found: Hashable) -> dict[str, Any]:
    """An entry of `Source.inputs` as a manifest has it: the size, and a hash of all that tells the content apart."""
    size = found[0] if isinstance(found, tuple) and found and isinstance(found[0], int) else None
    return {"size": size, "identity": hashlib.sha256(repr(found).encode()).hexdigest()[:16]}


def pack(sizes: Mapping[str, int], tied: Mapping[str, str], limit: int | None) -> list[list[str]]:
    """Names in groups, one for each shard, none over `limit` bytes unless by a single tensor.

    Greedy, in the order of `sizes` (bytes by name); a tensor over the limit gets a group of its own. `tied` maps a name
    to the name whose group it shares. Groups come in the order in which they are full, as huggingface_hub has them: a
    tensor over the limit comes before the group that was begun before it.
    """
    if limit is None:
        return [list(sizes)]
    groups: list[list[str]] = []
    place: dict[str, list[str]] = {}
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        owner = tied.get(name)
        if owner in place:
            place[owner].append(name)
            continue
        if size > limit:
            groups.append([name])
            place[name] = groups[-1]
            continue
        if current and filled + size > limit:
            groups.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
        place[name] = current
    return [*groups, current] if current or not groups else groups


def shard_names(stem: str, suffix: str, groups: Sequence[object]) -> list[str]:
    """`model.safetensors`, or `model-00001-of-00003.safetensors` and so on."""
    count = len(groups)
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]

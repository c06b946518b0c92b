"""The plan: the exact list of output files, each as a list of parts. Pure; nothing here reads or writes.

A `FilePlan` is self-contained: it has everything needed to make one output file, can be pickled, and can be carried out
in any process that sees the inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File

# An output larger than this many times its input plus this many bytes is refused: a tensor of a few bytes can have any
# size by repeating an element (stride 0).
MAX_GROWTH, ROOM_TO_GROW = 64, 256 << 20


class Literal(NamedTuple):
    """Bytes that are already known: a header."""

    offset: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class Data(NamedTuple):
    """The bytes of `tensor`, under the name `name` in the output."""

    offset: int
    tensor: LazyTensor
    name: str

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Trailer(NamedTuple):
    """`nbytes` bytes that depend on the data: `make` returns them, given the CRC-32 of each tensor by name.

    `make` is a function of a module, or a `functools.partial` of one, so that it can be pickled. `of` names the tensor
    before it if that is the only one whose CRC-32 it needs.
    """

    offset: int
    nbytes: int
    make: Callable[[Mapping[str, int]], bytes]
    of: str = ""


class Checked(NamedTuple):
    """A tensor that the output leaves out. Its bytes are read, and `check` raises if they may not be left out.

    `check` is a function of a module, so that it can be pickled; it gets them piece by piece.
    """

    offset: int
    tensor: LazyTensor
    check: Callable[[memoryview], None]

    @property
    def nbytes(self) -> int:
        """The size in the output: none."""
        return 0


class Copied(NamedTuple):
    """The bytes of a file, `tensor`, that is copied whole and holds no tensor."""

    offset: int
    tensor: LazyTensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Input(NamedTuple):
    """A file that was read, as an entry of `Source.inputs`: the file, and the identity of its content."""

    file: File
    content: Hashable

    @classmethod
    def stamped(cls, file: File) -> Input:
        """Return the entry of a file that its size and its stamp identify."""
        return cls(file, (file.size, file.stamp))


Part: TypeAlias = Literal | Data | Trailer | Checked | Copied


class FilePlan(NamedTuple):
    """One output file of `size` bytes; its parts cover it in order, without gaps."""

    name: str
    size: int
    parts: tuple[Part, ...]

    @property
    def digested(self) -> bool:
        """Whether a part depends on the CRC-32 of the data."""
        return Trailer in {*map(type, self.parts)}

    @property
    def tensors(self) -> int:
        return [*map(type, self.parts)].count(Data)

    def inputs(self) -> list[File]:
        """Return every input file that the parts are read from, each once, in order of first use."""
        seen: dict[File, None] = {}
        before = None
        for part in self.parts:
            if isinstance(part, (Data, Checked, Copied)):
                for file in part.tensor.inputs():
                    # Most tensors are in the same file as the one before.
                    if file is not before:
                        seen[file] = None
                        before = file
        return list(seen)


class Plan(NamedTuple):
    """The files of an output, in the order in which they are published."""

    files: tuple[FilePlan, ...]
    plan_id: str

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def inputs(self) -> list[File]:
        """Return every input file that the plan reads, each once, in order of first use."""
        return list(dict.fromkeys(itertools.chain.from_iterable(file.inputs() for file in self.files)))


def identify(files: Iterable[FilePlan], inputs: Mapping[str, Hashable], settings: object = None) -> str:
    """Return the plan id: a hash of the outputs' headers and of the inputs, by names relative to the source.

    Absolute paths are left out, because mounts differ between machines. `settings` are the other choices that affect
    the output, hashed by `repr`: headers alone do not tell if two tensors of one shape swap names.
    """
    import hashlib  # which starts OpenSSL: a checkpoint that is only opened has no use for it

    digest = hashlib.sha256(repr(settings).encode())
    for file in files:
        digest.update(repr((file.name, file.size)).encode())
        for part in file.parts:
            if isinstance(part, Literal):
                digest.update(part.data)
    for name in sorted(inputs):
        digest.update(repr((name, content_of(inputs[name]))).encode())
    return digest.hexdigest()[:16]


def content_of(entry: Hashable) -> Hashable:
    """Return the identity of the content of an entry of `Source.inputs`; an entry of another package is its own."""
    return entry.content if isinstance(entry, Input) else entry


def identity(content: Hashable) -> dict[str, Any]:
    """Return an entry of `Source.inputs` for a manifest: the size, and a hash of the content's identity."""
    import hashlib

    content = content_of(content)
    size = content[0] if isinstance(content, tuple) and content and isinstance(content[0], int) else None
    return {"size": size, "identity": hashlib.sha256(repr(content).encode()).hexdigest()[:16]}


# The part between stem and suffix of a shard's name, as a regular expression: its number, and the number of shards.
# `outputs.shards` writes five digits or as many as it takes; others more, as in model-00001-of-000163.safetensors.
NUMBERED = r"-(?P<number>\d{5,6})-of-(?P<of>\d{5,6})"

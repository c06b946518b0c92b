"""Compare the files of an output with the plan that a conversion makes of its source.

Literal bytes of the plan are compared as bytes, down to the checksums, and every tensor with the source's elements: so
no byte goes unchecked. A reader of the format may compare more, or describe a difference better.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ckptconv.errors import DifferenceError
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.verify import AGAIN
from ckptconv.outputs.targets import final_path
from ckptconv.plan import Copied, Data, FilePlan, Literal, Part, Trailer
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Reader
from ckptconv.tensors.lazy import Stored, untagged
from ckptconv.tensors.moves import BLOCK
from ckptconv.tensors.strides import contiguous_strides


@dataclass(eq=False, repr=False)
class Compared:
    """An output all of whose names, kinds and values are those of its source.

    `pairs` are the tensors whose elements are still to be compared, and `tensors` their number for people. `plans` are
    its files as a conversion plans them, `where` the places at which they are read. `crcs` are the CRC-32 of their data
    by file and name, as far as known. `aliases` {removed: kept} and `record` are those of its manifest. `form` says
    where its files lie, as `Target.form` does.
    """

    path: str
    tensors: int
    plans: Sequence[FilePlan]
    where: dict[str, Location]
    pairs: list[ExpectedPair] = field(default_factory=list)
    crcs: dict[str, dict[str, int]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    form: str = ""

    def path_of(self, name: str) -> str:
        """Return the final path of a file, which may be read elsewhere."""
        return final_path(self.path, self.form, name)

    def check_frames(self, known: Callable[[str], dict[str, int]]) -> list[str]:
        """Raise DifferenceError unless all bytes but the data are as planned. The chunks have been compared: `known`
        returns the CRC of those in the file of a path; other data is read for its CRC. Return no warning."""
        self.crcs = {name: known(place.path) for name, place in self.where.items()}
        for plan in self.plans:
            with self.where[plan.name].open_reader() as reader:
                self._check(plan, reader)
        return []

    def _check(self, plan: FilePlan, reader: Reader) -> None:
        path, known = self.path_of(plan.name), self.crcs.setdefault(plan.name, {})
        if reader.file.size != plan.size:
            differs(path, f"it has {reader.file.size} bytes, but {plan.size} were expected")
        for part in plan.parts:
            if isinstance(part, Data) and part.name not in known:
                known[part.name] = _crc(reader, part)
        for part in plan.parts:
            want = frame(part, known)
            if want and reader.read_at(part.offset, len(want)) != want:
                differs(path, f"its bytes between tensors differ from byte {part.offset} on")


def frame(part: Part, crcs: Mapping[str, int]) -> bytes:
    """Return the bytes of a part that holds no data."""
    if isinstance(part, Literal):
        return part.data
    return part.make(crcs) if isinstance(part, Trailer) else b""


def _crc(reader: Reader, part: Part) -> int:
    crc = 0
    for at in range(part.offset, part.offset + part.nbytes, BLOCK):
        crc = zlib.crc32(reader.read_at(at, min(BLOCK, part.offset + part.nbytes - at)), crc)
    return crc


def compare(
    path: str,
    plans: Sequence[FilePlan],
    where: Mapping[str, Location],
    record: Mapping[str, Any],
    form: str = "",
) -> Compared:
    """Pair every tensor of `plans` with the elements in its place in the files of an output of this `form`, which are
    read at `where`; `record` is that of its manifest. Raise DifferenceError for a file that is missing.

    Neither the elements nor the bytes between the tensors are compared yet: see `Compared`.
    """
    compared = Compared(path, sum(plan.tensors for plan in plans), plans, dict(where), record=record, form=form)
    for plan in plans:
        entry = where[plan.name].entry
        if entry.kind != "file":
            missing = compared.path_of(plan.name)
            raise DifferenceError(f"{missing} is missing.", AGAIN, what="missing", file=entry.file.path)
        for part in plan.parts:
            if isinstance(part, (Data, Copied)) and part.offset + part.nbytes <= entry.file.size:
                want = untagged(part.tensor)
                got = Stored(entry.file, part.offset, want.dtype, want.shape, contiguous_strides(want.shape))
                name = part.name if isinstance(part, Data) else plan.name
                compared.pairs.append(ExpectedPair(want, got, entry.file.path, name))
    return compared


def differs(path: str, reason: str, **more: Any) -> NoReturn:
    raise DifferenceError(
        f"{path} differs from the written output: {reason}.", AGAIN, **{"what": "file", "file": path, **more}
    )

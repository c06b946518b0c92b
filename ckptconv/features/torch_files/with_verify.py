"""Compares files for torch.load with the trees that they must hold: a `.pt` file, or a universal checkpoint."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, DifferenceError
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.torch_files.records import without_storages
from ckptconv.features.verify.names import Expected, check_structure, compare_names
from ckptconv.features.verify.output import Written
from ckptconv.features.verify.pairs import Differences
from ckptconv.features.verify.planned import Compared
from ckptconv.features.verify.provenance import Manifest, check, options_of
from ckptconv.features.verify.report import Verification
from ckptconv.formats.source import Source
from ckptconv.formats.torch.file import read as read_torch
from ckptconv.options.table import Options
from ckptconv.outputs.planning import planned
from ckptconv.outputs.targets import Target
from ckptconv.plan import Data, FilePlan
from ckptconv.result import OutputFile
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.archive import Archive
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.structure import keymap
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Stored, whole
from ckptconv.tensors.moves import BLOCK
from ckptconv.version import __version__


def compare_torch(
    source: Source, tree: Any, path: str, place: Location, options: Options, done: Verification, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare the `torch.load` file `path`, read at `place`, with `tree`, the value it must hold: yield the pairs of
    tensors.

    Both trees are flattened to tensors and a record in the same way, and these are compared.
    """
    try:
        opened = read_torch(place)
    except CkptconvError as error:
        raise _unreadable(path, error.message.replace(place.path, path)) from error
    want, want_record = keymap.flatten(tree)
    got, got_record = keymap.flatten(opened.weights)
    expected = Expected(want, lambda _: without_storages(want_record, want), flat=False, metadata=lambda aliases: {})
    written = Written(path, structure=without_storages(got_record, got), structure_path=path)
    written.tensors = got
    written.homes = dict.fromkeys(got, path)
    pairs = compare_names(source, expected, written, options, wrong)
    if not wrong:
        check_structure(expected, written)
    if not is_remote(place.path):
        _check_archive(path, place.path)
    done.outputs.append(OutputFile(path, int(opened.facts["size"]), len(got)))
    done.tensors += len(got)
    done.structure_records += 1
    yield from pairs


def _unreadable(path: str, why: str) -> DifferenceError:
    return DifferenceError(f"{path} cannot be read: {why}", "Convert again.", what="file", file=path)


def _check_archive(path: str, local_path: str) -> None:
    """Check the CRC-32 of every record of a zip archive."""
    if not zipfile.is_zipfile(local_path):
        return
    try:
        with zipfile.ZipFile(local_path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise _unreadable(path, f"{error}.") from error
    if damaged is not None:
        raise DifferenceError(
            f"{path}: the checksum of its record {damaged!r} is wrong.", "Convert it again.", what="file", file=path
        )


# ------------------------------------------------------------------------------------------------------- its manifest


def check_manifest(manifest: Manifest, source: Source, target: Target, where: Mapping[str, str]) -> list[str]:
    """Check the manifest of files for `torch.load`, and return warnings. `where` maps the name of each to the path at
    which it is read.

    Reading such a file does not give its layout: the heading is planned anew.
    """
    members = manifest.members
    output = Compared(target.path, 0, [], {name: manifest.place.at(path) for name, path in where.items()})
    plans = []
    for name, place in output.where.items():
        plan, output.crcs[name] = _as_planned(name, place, members["files"].get(name, {"tensors": ()})["tensors"])
        plans.append(plan)
    output.plans = plans

    def heading() -> Mapping[str, Any]:
        expected = planned(source, target, Options(**options_of(members))).heading
        if members["ckptconv"] == __version__:
            return expected
        # This is the plan of the current release: another release gave the same output another id.
        return {**expected, "plan": "" if expected["plan"] == members["plan"] else members["plan"]}

    return check(manifest, source, target, output, heading)


def _as_planned(name: str, place: Location, stated: Collection[str]) -> tuple[FilePlan, dict[str, int]]:
    """Return the plan of a file that tells of its data, and the CRC-32 of these: its storages by the names of their
    records, or, if `stated` are no such names, the file, which was copied whole."""
    with contextlib.closing(place.open_reader()) as reader:
        file = reader.file
        if "/" not in next(iter(stated), "/"):
            crc = 0
            for at in range(0, file.size, BLOCK):
                crc = zlib.crc32(reader.read_at(at, min(BLOCK, file.size - at)), crc)
            return FilePlan(name, file.size, (Data(0, whole(file), place.name),)), {place.name: crc}
        if reader.read_at(0, min(len(LOCAL_SIGNATURE), file.size)) != LOCAL_SIGNATURE:
            return FilePlan(name, file.size, ()), {}
        archive = Archive(reader)
        archive.locate_all()
        rows = {name: row for name, row in archive.rows.items() if archive.sizes[row] and "/data/" in name}
        sizes = {name: (archive.payloads[row], archive.sizes[row]) for name, row in rows.items()}
        data = (Data(at, Stored(file, at, DTYPES["uint8"], (size,), (1,)), name) for name, (at, size) in sizes.items())
        return FilePlan(name, file.size, tuple(data)), {name: archive.crcs[row] for name, row in rows.items()}

"""Compares files for torch.load with the trees that they must hold: a `.pt` file, or a universal checkpoint."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from ckptconv.errors import CkptconvError, DifferenceError
from ckptconv.features.torch_files.records import without_storages
from ckptconv.formats.source import Source
from ckptconv.formats.torch.file import read as read_torch
from ckptconv.options.table import Options
from ckptconv.result import OutputFile
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.structure import keymap
from ckptconv.verification.names import Expected, check_structure, compare_names
from ckptconv.verification.output import Written
from ckptconv.verification.pairs import Differences
from ckptconv.verification.report import Verification
from ckptconv.verification.runs import ExpectedPair


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

"""Compares a universal checkpoint of DeepSpeed with its source."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.errors import DifferenceError
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.torch_files.with_verify import check_manifest, compare_torch
from ckptconv.features.universal import trees as planned
from ckptconv.features.universal.resuming import resumable
from ckptconv.features.verify.names import other_kind, rename_of
from ckptconv.features.verify.pairs import Attested, Differences
from ckptconv.features.verify.report import CheckedOutput, Verification
from ckptconv.formats.run_names import LATEST_UNIVERSAL
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.targets import MANIFEST, pointer_of
from ckptconv.result import OutputFile
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, join
from ckptconv.tensors.lazy import whole
from ckptconv.text import some

_LONGEST_NAME = 4096


def pairs(
    source: Source, target: CheckedOutput, asked: Options, done: Verification, attested: Attested, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare a universal checkpoint: a file for each parameter's weights and each of its states, the common states,
    and copies of the model files."""
    checkpoint = resumable(source, asked, rename_of(asked))
    trees = {name: tree for name, tree, _ in planned.trees(checkpoint.training, checkpoint.weights, checkpoint.states)}
    copies = {basename(file.path): file for file in checkpoint.training.copies}
    names = [*trees, *copies, LATEST_UNIVERSAL]
    pointer = pointer_of(target.path)
    at = target.at or {name: join(target.path, name) for name in names} | {LATEST_UNIVERSAL: pointer}
    missing = [name for name in names if target.place.at(at[name]).kind != "file"] if target.at is None else []
    if missing:
        lacking = DifferenceError(f"{target.path} lacks {some(missing)}.", what="missing", file=at[missing[0]])
        raise lacking
    if target.at is None:
        _check_no_more(target.place, {*names, LATEST_UNIVERSAL, MANIFEST})
    for name, tree in trees.items():
        yield from compare_torch(source, tree, join(target.path, name), target.place.at(at[name]), asked, done, wrong)
    for name, file in copies.items():
        want, got = whole(file), whole(target.place.at(at[name]).entry.file)
        path = join(target.path, name)
        done.outputs.append(OutputFile(path, got.nbytes, 0))
        pair = ExpectedPair(want, got, path, name)
        error = other_kind(pair)
        if error:
            raise error
        yield pair
    text = target.place.at(at[LATEST_UNIVERSAL]).read_text(_LONGEST_NAME)
    if text != basename(target.path):
        raise DifferenceError(
            f"{pointer} contains {text!r}, not {basename(target.path)!r}.",
            what="file",
            file=pointer,
            expected=basename(target.path),
            found=text,
        )
    if target.manifest:
        as_planned = source._replace(inputs=source.inputs_of_all)
        attested.later(check_manifest, target.manifest, as_planned, target.planned, at)


def _check_no_more(directory: Location, names: set[str]) -> None:
    """Raise DifferenceError for what is in `directory` and not one of `names`, but for empty directories."""
    parents = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
    waiting = [""]
    while waiting:
        above = waiting.pop()
        place = directory.join(*above.split("/")) if above else directory
        for name, entry in place.names.items():
            inner = f"{above}/{name}" if above else name
            if entry.kind == "directory" and inner in parents:
                waiting.append(inner)
            elif inner not in names and (entry.kind != "directory" or place.join(name).names):
                path = place.join(name).path
                raise DifferenceError(f"{path} is not part of the output.", "Remove it.", what="file", file=path)

"""Compare a checkpoint of torch.distributed.checkpoint with its source.

The reader of that format says which chunks it holds and where. Every chunk is compared with the source's elements in
its box, every other value with the source's. The bytes between them in the files, down to the checksums, must be those
that a conversion plans: so no byte goes unchecked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, DifferenceError
from ckptconv.features.dcp.described import Described
from ckptconv.features.dcp.names import METADATA
from ckptconv.features.dcp_output.contents import SHARDS, contents, cut, entry_name, file_plans
from ckptconv.features.dcp_output.gathered import Gathered
from ckptconv.features.dcp_output.layout import layout_of
from ckptconv.features.dcp_output.options import GIVEN
from ckptconv.features.joining.chunks import Box
from ckptconv.features.joining.chunks import join as join_tiles
from ckptconv.features.joining.names import named, named_in
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.torch_files.records import without_storages
from ckptconv.features.verify import AGAIN, CONVERTED_SO
from ckptconv.features.verify.names import rename_of
from ckptconv.features.verify.paired import paired
from ckptconv.features.verify.pairs import Attested, Differences
from ckptconv.features.verify.planned import Compared, differs, frame
from ckptconv.features.verify.report import CheckedOutput, Verification
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.selection import Rename
from ckptconv.outputs.targets import MANIFEST, kind_of_directory
from ckptconv.pickles.children import ATOMS
from ckptconv.plan import FilePlan
from ckptconv.storage.location import Location
from ckptconv.storage.paths import join
from ckptconv.structure import keymap
from ckptconv.text import some

_STATES = "If the conversion read optimizer states with --states, give --states here too."


def pairs(
    source: Source, target: CheckedOutput, options: Options, done: Verification, attested: Attested, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare a checkpoint of torch.distributed.checkpoint with its source, and yield the pairs of its tensors."""
    if options.states:
        source = source._replace(inputs=source.inputs_of_all)
    compared = compare(source, place_of(target), target.path, options, rename_of(options))
    yield from paired(source, target, compared, done, attested)


def place_of(target: CheckedOutput) -> Location:
    """Return the directory in which an output is read, wherever its files are."""
    return target.place if target.at is None else Gathered(target.path, target.place.options, target.at)


def compare(source: Source, place: Location, path: str, options: Options, rename: Rename) -> Compared:
    """Compare the checkpoint `path`, read at `place`, with the source. Raise DifferenceError for the first difference.

    Neither the elements nor the bytes between the tensors are compared yet: see `Compared`.
    """
    want = contents(source, options, rename)
    try:
        got = Described.open(place)
        described = got.described
        chunks = got.entries.chunks(described.tensors)
        for key, saved in described.tensors.items():
            # They cover all of it, once.
            join_tiles(saved.dtype, saved.shape, chunks[key], functools.partial(named_in, path, key))
    except CkptconvError as error:
        message = error.message
        for name in place.names:
            message = message.replace(place.join(name).path, join(path, name))
        raise DifferenceError(f"{path} cannot be read: {message}", AGAIN, what="file", file=path) from error
    values = {} if options.to == SHARDS else want.values
    check_keys(path, {*want.tensors, *values}, {*described.tensors, *described.values}, options)
    plans = file_plans(want, options)
    if GIVEN.of(options).chunks is None and not _is_planned(plans[-1], place):
        plans = file_plans(want, options, layout_of(described, path))  # it was made like another checkpoint
    where = {plan.name: place.join(plan.name) for plan in plans}
    compared = Compared(path, len(want.tensors), plans, where, record=want.chosen.record)
    check_files(path, place, where, options)
    for key, (steps, tensor) in want.tensors.items():
        if key not in described.tensors:
            differs(join(path, METADATA), f"{named(key)} is described as a value, but is a tensor in the source")
        saved = described.tensors[key]
        if options.to != SHARDS and described.paths[key] != steps:
            differs(
                join(path, METADATA), f"{named(key)} has the path {described.paths[key]!r}, but {steps!r} was expected"
            )
        if saved.shape != tensor.shape:
            raise DifferenceError(
                f"{path}: {named(key)} has shape {list(saved.shape)}, but the source has shape {list(tensor.shape)}.",
                what="shape",
                tensor=key,
                file=path,
            )
        for tile in chunks[key]:
            box = Box(tile.offsets, tile.tensor.shape)
            home = next(iter(tile.tensor.inputs())).path
            name = key if options.to == SHARDS else entry_name(key, box.offsets)
            compared.pairs.append(ExpectedPair(cut(tensor, box), tile.tensor, home, name))
    for key, (steps, value) in values.items():
        if key not in described.values or described.paths[key] != steps:
            differs(join(path, METADATA), f"{named(key)} is not described as a value at {steps!r}")
        home = place.join(described.values[key].name).path
        compared.pairs.extend(_compare_values(path, key, value, got.values.get(key, got.hidden.get(key)), home))
    return compared


def _is_planned(plan: FilePlan, place: Location) -> bool:
    """Return whether the file that completes the checkpoint begins as planned: it states the division of tensors."""
    if place.join(plan.name).kind != "file":
        return False
    with place.join(plan.name).open_reader() as reader:
        head = frame(plan.parts[0], {})
        return reader.file.size == plan.size and reader.read_at(0, len(head)) == head


def check_keys(path: str, want: set[str], got: set[str], options: Options) -> None:
    """Raise DifferenceError unless the checkpoint holds the keys that the source gives, and no others."""
    missing, more = sorted(want - got), sorted(got - want)
    if missing:
        raise DifferenceError(
            f"{path} lacks {some(missing)}, which the source has.",
            CONVERTED_SO,
            what="missing",
            tensor=missing[0],
        )
    if more:
        raise DifferenceError(
            f"{path} contains {some(more)}, which the source lacks.",
            "" if options.states else _STATES,
            what="unexpected",
            tensor=more[0],
        )


def check_files(path: str, place: Location, where: Mapping[str, Location], options: Options) -> None:
    """Check that the files are those that a conversion writes, and no more."""
    present = {name for name in place.names if kind_of_directory(options.to).is_file(name)} - {MANIFEST}
    odd = sorted(present ^ where.keys())
    if odd:
        problem = "is not part of the output" if odd[0] in present else "is missing"
        raise DifferenceError(f"{join(path, odd[0])} {problem}.", AGAIN, what="file", file=join(path, odd[0]))


def _compare_values(path: str, key: str, want: Any, got: Any, home: str) -> Iterator[ExpectedPair]:
    """Yield the tensors in two values, which are equal but for the elements of these."""
    if type(want) in ATOMS and type(got) is type(want) and repr(want) == repr(got):
        return
    (wanted, want_record), (stored, got_record) = keymap.flatten({"": want}), keymap.flatten({"": got})
    kinds = [{name: (tensor.dtype, tensor.shape) for name, tensor in flat.items()} for flat in (wanted, stored)]
    if without_storages(want_record, wanted) != without_storages(got_record, stored) or kinds[0] != kinds[1]:
        differs(path, f"the value {named(key)} differs from the source", what="value", tensor=key)
    for number, name in enumerate(wanted):
        yield ExpectedPair(wanted[name], stored[name], home, f"{key} [{number}]")

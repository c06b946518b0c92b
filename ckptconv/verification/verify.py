"""Verify an output against its source, by a path of its own.

It shares with a conversion the code that reads descriptions (where bytes lie), that selects names, tensors and
structure, and that prefetches remote files. `output` reads the output strictly, and `evaluate` computes the expected
elements. No code that moves or casts the bytes of a conversion takes part.
"""

from __future__ import annotations

import functools
import os
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import CkptconvError, DifferenceError, MissingError, UsageError
from ckptconv.formats import diffusers
from ckptconv.formats.alone import kept_apart
from ckptconv.formats.companions import is_companion_name, together, with_files
from ckptconv.formats.configs import UNCHANGED, Change
from ckptconv.formats.detect import OtherFamilyError
from ckptconv.formats.model_files import INDEX_SUFFIX, SUFFIX
from ckptconv.formats.opening import all_opened, fitted
from ckptconv.formats.source import MODEL, Opened, Source, source_of
from ckptconv.formats.states import is_same
from ckptconv.formats.torch.file import read as read_torch
from ckptconv.options.kinds import Rules
from ckptconv.options.table import OPTIONS, Options, checked
from ckptconv.outputs import selection
from ckptconv.outputs.computed import COMPUTED
from ckptconv.outputs.kinds import KINDS, kind_of
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.selection import Rename
from ckptconv.outputs.targets import ACCELERATE, MANIFEST, kind_of_states, of_accelerate
from ckptconv.process import no_garbage, peak_rss
from ckptconv.result import OutputFile
from ckptconv.storage import progress as bars
from ckptconv.storage.gathered import Gathered
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname, is_remote, join, normalize, real_place, resolved_name
from ckptconv.structure import keymap
from ckptconv.structure.record import dump, parse, tensors_of
from ckptconv.tensors.lazy import LazyTensor, same_bytes, whole
from ckptconv.text import Shown, some
from ckptconv.verification import planned, renaming
from ckptconv.verification.output import Written, read_directory, read_file, recorded_map
from ckptconv.verification.pairs import Attested, Differences, compare_pairs
from ckptconv.verification.planned import Compared
from ckptconv.verification.provenance import (
    Manifest,
    check_compared,
    check_planned,
    check_safetensors,
    read_manifest,
)
from ckptconv.verification.records import without_storages
from ckptconv.verification.runs import ExpectedPair

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import ConvertOptions
    from ckptconv.storage.progress import AnyProgress, Progress
    from ckptconv.structure.maps.chosen import ChosenMap

# Metadata entries that are never aliases: a tensor with such a name is stored.
_RESERVED = ("format", "total_size", "ckptconv.structure", "ckptconv.map", "ckptconv.alone")
_AGAIN = "It was changed since it was written, or the source was; convert again."
_LONGEST_NAME = 4096


@dataclass
class Verification(Shown):
    """What was compared and found equal. Sizes are in bytes."""

    input: str
    """The source."""

    outputs: list[OutputFile]
    """The files of the output."""

    format: str
    """What the source is, in words."""

    tensors: int
    """Names of the source that were looked up."""

    aliases: dict[str, str]
    """Those of them that are stored under another name: {name: name that is stored}."""

    structure_records: int
    """How many structure records were compared."""

    bytes_compared: int
    """Bytes of the output's tensors; all are compared."""

    bytes_read: int
    """Bytes read."""

    warnings: list[str]
    """What may be wrong, each in a sentence."""

    options: dict[str, Any] = field(default_factory=dict)
    """The conversion's options that are not the default, as given or as the manifest says."""

    manifest: str = ""
    """The manifest that says so; empty if none was read."""

    deltas: list[str] = field(default_factory=list)
    """The deltas that were applied to the source, if `ckptconv patch` made the output, as its manifest says."""

    averaged: list[str] = field(default_factory=list)
    """The checkpoints that `ckptconv average` averaged the source with, as its manifest says."""

    adapters: list[str] = field(default_factory=list)
    """The adapters that `ckptconv merge` merged into the source, as its manifest says."""

    inert: bool = False
    """Whether the output has no tensor but in objects of classes known by name only: it is no model then."""

    seconds: float = 0.0
    """How long it took."""

    peak_rss_bytes: int = 0
    """The most memory that the process had."""


class CheckedOutput(NamedTuple):
    """An output to verify, its `place`, and which of `KINDS` it is.
    `at` maps the names of files that are not yet in their place to where they are read. `manifest` is None if there is
    none, and so are its own `options` if they are those of the conversion."""

    place: Location
    kind: str = "directory"
    at: Mapping[str, str] | None = None
    manifest: Manifest | None = None
    options: Options | None = None

    @property
    def path(self) -> str:
        return self.place.path

    @property
    def holds(self) -> str:
        """What is in it, as manifests call it."""
        return KINDS[self.kind].holds


@dataclass(eq=False, repr=False)
class _Expected:
    """What an output must hold: tensors by name, in order, and as functions of the aliases found, the structure record
    and the metadata of each file.

    `flat`: without a record, the order of names means nothing. `inert`: every
    tensor, if there is any, is part of an object known by name only. `change` is what a configuration is to
    say of the weights.
    """

    tensors: dict[str, LazyTensor]
    structure: Callable[[Mapping[str, str]], str | None]
    flat: bool
    metadata: Callable[[Mapping[str, str]], Mapping[str, str]]
    inert: bool = False
    change: Change = UNCHANGED


# Of an output that is companions alone.
_NOTHING = _Expected({}, lambda _: None, flat=True, metadata=lambda _: {})


@bars.shown
@checked(OPTIONS)
def verify(
    source: str | os.PathLike[str] | Source | Opened,
    output: str | os.PathLike[str] | None = None,
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    **options: Unpack[ConvertOptions],
) -> Verification:
    """Compare `output` with what converting `source`, a path or an opened checkpoint, gives with the same `options`.

    `options` are those of the conversion, the fields of `Options`. Options not given are taken from the output's
    manifest, in its directory or at the path `manifest`. `output` may be omitted if `optimizer` or `universal` is
    given. `progress` and `on_total` are those of `convert`, for the bytes compared.

    Return what was compared if every tensor, name, alias and structure record is equal, bit for bit. Raise
    DifferenceError with all tensors that differ, or with what else is wrong first, UsageError for a path that does not
    exist, and whatever opening the source raises.

    Examples:
        >>> report = ckptconv.convert("model.pt", "model.safetensors")
        >>> ckptconv.verify("model.pt", "model.safetensors").bytes_compared
        60
    """
    source = source_of(source)
    asked = Options(**options)
    given = {name for name, value in options.items() if value not in (None, OPTIONS[name].kind.unset)}
    targets = [] if output is None else _targets(_place(normalize(output)), asked, given)
    if targets and targets[-1].options:
        asked = targets[-1].options
    elif targets and targets[0].manifest:
        asked = _with(targets[0].manifest, asked, given)
    if asked.optimizer and not asked.to:
        path = _place(normalize(asked.optimizer))
        targets.append(_target(path, asked)._replace(kind=kind_of_states(path, kind_of(path))))
    if asked.universal:
        place = Location(real_place(normalize(asked.universal)), dict(asked.storage_options))
        told = read_manifest(place.join(MANIFEST), asked)
        asked = _with(told, asked, given) if told and not targets else asked
        targets.append(CheckedOutput(place, "universal", manifest=told))
    if not targets:
        raise UsageError("There is no OUTPUT to verify.", "Give the file or directory that the conversion wrote.")
    # A million small objects live until the end: a garbage collector would take longer to scan them than it takes to
    # make them.
    with no_garbage():
        told, where = _recorded_map(targets[0]) if not asked.map else (None, "")
        recorded = None
        if told:
            from ckptconv.structure.maps.chosen import of_record

            recorded = of_record(told, where)
        sources = _open(source, targets, asked, recorded)
        told_by = targets[0].manifest
        if told_by:
            sources = [told_by.computed(one, asked, targets[0].path) for one in sources]
        sources = fitted(sources, source, asked, {target.holds for target in targets})
    pairs = [(kept_apart(one, target.path), _of_part(one, target, asked)) for one in sources for target in targets]
    done = verify_outputs(pairs, asked, progress=bars.counter(progress), on_total=on_total)
    deciding = targets[-1 if asked.to else 0].manifest
    done.options = {name: getattr(asked, name) for name in asked.recorded()}
    if asked.like:
        done.options["like"] = asked.like
    done.manifest = deciding.place.path if deciding and deciding.options else ""
    for name, paths in deciding.others.items() if deciding else ():
        if again := COMPUTED[name].computing.again:
            setattr(done, again.field, [path for path in paths if path is not None])
    return done


def verify_outputs(
    outputs: Sequence[tuple[Source, CheckedOutput]],
    asked: Options,
    *,
    progress: Progress | None = None,
    on_total: Callable[[int], object] | None = None,
) -> Verification:
    """Verify as `verify` does, but pairs of an opened source and an output of it, which may still be staged."""
    started = time.monotonic()
    first, _ = outputs[0]
    done = Verification(first.path, [], first.format, 0, {}, 0, 0, 0, [])
    sources = {id(source): source for source, _ in outputs}.values()
    done.bytes_read = sum(source.bytes_read for source in sources)
    others = frozenset(target.path for _, target in outputs)
    attested, wrong = Attested(), Differences()
    with no_garbage():
        pairs = [
            pair
            for source, target in outputs
            for pair in _compare(source, target, asked, others, done, attested, wrong)
        ]
    # A source's warnings depend on what of it was asked for.
    done.warnings = [*(warning for source in sources for warning in source.warnings), *done.warnings]
    if done.inert:
        done.warnings.append(
            f"{first.path} has no tensor beside objects of classes that are known by name only: what is equal is no "
            "model."
        )
    if on_total:
        on_total(sum(pair.got.nbytes for pair in pairs))
    done.bytes_compared, read = compare_pairs(pairs, asked, progress or (lambda count: None), attested, wrong)
    done.bytes_read += read
    wrong.check()
    done.warnings.extend(attested.check())
    done.seconds = time.monotonic() - started
    done.peak_rss_bytes = peak_rss()
    return done


def _targets(path: str, asked: Options, given: Collection[str]) -> list[CheckedOutput]:
    """Return the output at `path`, or both of accelerate's in it, each with options of its own. `given` are the names
    of the options that the user gave."""
    halves = of_accelerate(path, asked)
    of_both = of_accelerate(path, asked.replaced(optimizer=path))
    there = [name for name in of_both if Location(join(name, MANIFEST), dict(asked.storage_options)).kind == "file"]
    if asked.to != ACCELERATE and (asked.to or not there):
        return [_target(path, asked)]
    if unasked := [name for name in there if name not in halves]:
        raise UsageError(
            f"{unasked[0]} holds optimizer states. Nothing was compared.", "Say what they come from: --optimizer PATH."
        )
    found = {name: _target(name, own) for name, own in halves.items()}
    return [
        one._replace(options=_with(one.manifest, halves[name], given) if one.manifest else halves[name])
        for name, one in found.items()
    ]


def _target(path: str, asked: Options) -> CheckedOutput:
    """Return the output at `path`; its manifest says what it is made of."""
    place = Location(path, dict(asked.storage_options))
    told = read_manifest(place.at(asked.manifest) if asked.manifest else place.join(MANIFEST), asked, path)
    if asked.manifest and told is None:
        raise MissingError(f"{asked.manifest} does not exist.")
    kind = asked.to or (told.options.get("to") if told else None)
    if not kind:
        kind = kind_of(path) if place.kind != "directory" else "directory"
        kind = "states" if told and told.kind == "optimizer" else kind
    return CheckedOutput(place, kind, manifest=told)


def _recorded_map(target: CheckedOutput) -> tuple[Any, str]:
    """Return the record of the map that an output was made with, None if there is none, and what has it."""
    if target.manifest:
        return target.manifest.told.get("map"), f"The manifest of {target.path}"
    try:
        return recorded_map(target.path, target.place), target.path
    except CkptconvError:  # what is wrong with the output is told when it is compared
        return None, ""


def _with(manifest: Manifest, asked: Options, given: Collection[str]) -> Options:
    """Fill in options that were not `given` with those of the manifest."""
    left = {
        name: value
        for name, value in manifest.options.items()
        if name not in given and getattr(asked, name) == OPTIONS[name].default
    }
    if "like" in manifest.told and not (asked.like or left["like"]):
        raise UsageError(
            f"{manifest.place} says that the conversion had a reference, and not where it is found from here.",
            "Name it: --like REF.",
        )
    return asked.replaced(**left, family=asked.family or manifest.family)


def _place(path: str) -> str:
    """Return the output that `path` names: for an index, its directory."""
    return dirname(path) if path.endswith(INDEX_SUFFIX) else path


def _open(
    given: str | Source, targets: Sequence[CheckedOutput], asked: Options, recorded: ChosenMap | None
) -> list[Source]:
    holds = {target.holds for target in targets}
    first, is_torch = targets[0].path, targets[0].kind == "torch"
    if isinstance(given, Source):
        return all_opened(given, asked, holds, recorded=recorded)
    if KINDS[kind_of(first)].form == "file" and is_same(given, first):
        raise UsageError(f"{given} is both SOURCE and OUTPUT.", "Give what was converted, then what was made of it.")
    try:
        sources = all_opened(given, asked, holds, recorded=recorded)
    except OtherFamilyError as error:
        if not targets[0].manifest:
            raise
        made = f"was made of another: {targets[0].manifest.told['source']['format']}"
        raise UsageError(
            f"{error.message.rstrip('.')}, and {first} {made}.",
            "Give the source first, then what a conversion made of it: ckptconv verify SOURCE OUTPUT.",
        ) from error
    # An output may lie in the directory of its source: then the source is the checkpoint of the other kind there.
    family = "torch" if sources[0].family == "safetensors" else "safetensors"
    if not asked.family and _is_in(first, given) and is_torch is (sources[0].family != "safetensors"):
        return all_opened(given, asked.replaced(family=family), holds, recorded=recorded)
    return sources


def _is_in(output: str, directory: str) -> bool:
    """Whether `output` is `directory`, or a file in it."""
    return resolved_name(directory) in (resolved_name(output), resolved_name(dirname(output)))


def _of_part(source: Source, target: CheckedOutput, asked: Options) -> CheckedOutput:
    """Return the output of one of several sources, a tensor-parallel rank's or a component's."""
    if not source.folder:
        return target
    place = target.place.join(source.folder)
    known = target.manifest if source.component is None else None
    return target._replace(place=place, manifest=known or read_manifest(place.join(MANIFEST), asked))


# ------------------------------------------------------------------------------------------- names, kinds, structure


def _compare(
    source: Source,
    target: CheckedOutput,
    asked: Options,
    others: frozenset[str],
    done: Verification,
    attested: Attested,
    wrong: Differences,
) -> Iterator[ExpectedPair]:
    """Compare everything but elements; yield the pairs of tensors whose elements are still to be compared."""
    asked = target.options or asked
    here = target.place if target.at is None else target.place.at(next(iter(target.at.values())))
    entry = here.entry
    if entry.kind == "missing":
        raise MissingError(f"{target.path} does not exist: there is no output to verify.")
    how = KINDS[target.kind].compared
    if how == "universal":
        yield from _compare_universal(source, target, asked, done, attested, wrong)
        return
    if how == "dcp" or (how == "plan" and (entry.kind == "file" or target.at is not None)):
        yield from (_compare_dcp if how == "dcp" else _compare_plan)(source, target, asked, done, attested)
        return
    if how == "torch" and entry.kind == "file":
        yield from _compare_torch(source, _expected_tree(source, asked), target.path, here, asked, done, wrong)
        if target.manifest and not is_remote(here.path):
            places = {target.place.name: here.path}
            of_torch = target.manifest, source, dict(source.inputs), "weights", target.path, places
            attested.checks.append(functools.partial(check_planned, *of_torch))
        return
    is_file = target.path.endswith(SUFFIX) and (entry.kind == "file" or target.at is not None)
    if not (is_file or entry.kind == "directory" or target.at is not None):
        known = [ending for kind in KINDS.values() if kind.compared for ending in kind.suffixes]
        raise UsageError(f"{target.path} is no output: a file ends in {', '.join(known)}, else it is a directory.")
    is_model = source.family != diffusers.FAMILY
    expected = _expected(source, asked, target.holds) if is_model else _NOTHING
    metadata = expected.metadata
    of_weights = target.holds == "weights"
    if is_file:
        found = read_file(target.path, here, metadata)
    elif not is_model:
        found = Written(target.path)
    else:
        stem = source.stem if of_weights else MODEL
        found = read_directory(target.place, metadata, at=target.at, others=others, stem=stem)
    pairs = _compare_names(source, expected, found, asked, wrong)
    if of_weights:
        copied = _copied(target, asked)
        source = _with_companions(source, target, copied)
        pairs.extend(_compare_companions(source, target, found, copied, expected.change))
    if not wrong:  # other names make another record
        _check_structure(expected, found)
        _check_shards(found, asked)
    if target.manifest:
        inputs = source.all_inputs() if of_weights else {**source.inputs, **source.state_inputs}
        told = target.manifest, source, inputs, target.holds, found
        attested.checks.append(functools.partial(check_safetensors, *told))
        attested.expect(target.manifest, found)
    counted = Counter(found.homes.values())
    done.outputs.extend(OutputFile(file.path, file.size, counted[file.path]) for file in found.files)
    done.tensors += len(expected.tensors)
    done.aliases.update(found.aliases)
    done.structure_records += found.structure is not None
    done.inert |= expected.inert
    yield from pairs


def _compare_names(
    source: Source, expected: _Expected, found: Written, asked: Options, wrong: Differences
) -> list[ExpectedPair]:
    """Compare names, dtypes and shapes; return the pairs of tensors whose elements can be compared."""
    _check_names(source, expected, found, asked, wrong)
    tensors, homes = expected.tensors, found.homes
    pairs = [
        ExpectedPair(tensors[name], got, homes[name], name) for name, got in found.tensors.items() if name in tensors
    ]
    for removed, kept in found.aliases.items():
        want, same = tensors[removed], tensors.get(kept)
        # Two names for the same bytes of the source need one comparison.
        if want is not same and (same is None or same_bytes(want) is None or same_bytes(want) != same_bytes(same)):
            pairs.append(ExpectedPair(want, found.tensors[kept], homes[kept], removed))
    alike = []
    for pair in pairs:
        error = _other_kind(pair)
        if error:
            wrong.add(error)
        else:
            alike.append(pair)
    return alike


def _copied(target: CheckedOutput, asked: Options) -> list[str]:
    """Return the names of the files of `target` that were copied whole: of one that is staged all, otherwise those in
    its manifest, or all that are there if it was to have none."""
    told: Iterable[str] = target.at or (target.manifest.told["files"] if target.manifest else ())
    if asked.for_hub and asked.copy_config and not told and target.place.kind == "directory":
        told = target.place.names
    return list(filter(is_companion_name, told))


def _with_companions(source: Source, target: CheckedOutput, copied: Sequence[str]) -> Source:
    """Return `source` with the companions that were `copied` to `target`, unless it was opened with some."""
    if not copied or source.companions:
        return source
    return with_files(source, together(source, target.place.options, copied), target.place.options)


def _compare_companions(
    source: Source, target: CheckedOutput, found: Written, copied: Iterable[str], change: Change
) -> Iterator[ExpectedPair]:
    """Yield the files that were `copied` whole, and those that they are copies of; add them to the files of `found`."""
    for name in copied:
        path = join(target.path, name)
        entry = target.place.at(target.at[name] if target.at else path).entry
        if entry.kind != "file" or name not in source.companions:
            where = target.path if entry.kind != "file" else f"{source.path}, of which it is a copy,"
            raise DifferenceError(f"{where} lacks {name}.", _AGAIN, what="missing", file=path)
        found.files.append(entry.file._replace(path=path))
        want, got = source.content(name, source.companions[name], change), whole(entry.file)
        if want.shape != got.shape:
            raise DifferenceError(
                f"{path} has {entry.file.size} bytes, and {source.companions[name].path} gives {want.nbytes}.",
                _AGAIN,
                what="file",
                file=path,
                expected=want.nbytes,
                found=entry.file.size,
            )
        yield ExpectedPair(want, got, path, name)


def _other_kind(pair: ExpectedPair) -> DifferenceError | None:
    """Return what is wrong if dtypes or shapes differ."""
    want, got, path, name = pair
    if want.dtype == got.dtype and want.shape == got.shape:
        return None
    for what, expected, found in (
        ("dtype", want.dtype.name, got.dtype.name),
        ("shape", list(want.shape), list(got.shape)),
    ):
        if expected != found:
            return DifferenceError(
                f"{path}: {name!r} has {what} {found}, and the source gives {what} {expected}.",
                "If it was converted with --dtype, say so here too." if what == "dtype" else "",
                what=what,
                tensor=name,
                file=path,
                expected=expected,
                found=found,
            )
    return None


def _expected(source: Source, asked: Options, holds: str) -> _Expected:
    """Return the weights or states that the options select, with every name, aliases included."""
    chosen = selected(source, asked, _rename(asked), holds)
    tensors = {name: chosen.cast(name) for name in chosen.tensors}
    if chosen.of_states:
        tensors.update((removed, tensors[kept]) for removed, kept in chosen.owners.items())
    inert, change = chosen.described.inert, chosen.change(source)
    return _Expected(tensors, chosen.structure, not chosen.structured, chosen.stated, inert=inert, change=change)


def _rename(asked: Options) -> Rename:
    """Return the function that renames. Rules that come from a file are applied in a process of their own."""
    if isinstance(asked.rename, Rules):
        return functools.partial(renaming.renamed, where="The manifest")
    return selection.renamed


def _check_names(source: Source, expected: _Expected, found: Written, asked: Options, wrong: Differences) -> None:
    """Compare the names: every name of the source is stored or an alias of a stored one, and there is no other."""
    for removed, kept in found.aliases.items():
        why = ""
        if asked.tied == "duplicate":
            why = "every name was to have its own bytes"
        elif removed not in expected.tensors or removed in _RESERVED:
            why = "no tensor of that name belongs there"
        elif removed in found.tensors:
            why = f"{removed!r} is stored itself"
        elif kept not in found.tensors:
            why = f"there is no tensor {kept!r}"
        if why:
            raise DifferenceError(
                f"{found.path}: its metadata says that {removed!r} is stored as {kept!r}, but {why}.",
                what="alias",
                tensor=removed,
                found=kept,
            )
    missing = [name for name in expected.tensors if name not in found.tensors and name not in found.aliases]
    if missing:
        error = DifferenceError(
            f"{found.path} lacks {_tensors(missing)} of {source.path}: {some(missing)}.",
            "If the conversion left them out (--exclude, --include, --key), say so here too.",
            what="missing",
            tensor=missing[0],
            tensors=[{"what": "missing", "tensor": name} for name in missing],
        )
        wrong.add(error)
    unexpected = [name for name in found.tensors if name not in expected.tensors]
    if unexpected:
        error = DifferenceError(
            f"{found.homes[unexpected[0]]} holds {_tensors(unexpected)} that {source.path} does not give: "
            f"{some(unexpected)}.",
            what="unexpected",
            tensor=unexpected[0],
            file=found.homes[unexpected[0]],
            tensors=[{"what": "unexpected", "tensor": name, "file": found.homes[name]} for name in unexpected],
        )
        wrong.add(error)


def _check_structure(expected: _Expected, found: Written) -> None:
    """Check that the record is the source's, or, without one, that the stored tensors are in the source's order."""
    want = expected.structure(found.aliases)
    if expected.flat and found.structure is None:
        return
    stored = [name for name in expected.tensors if name not in found.aliases]
    if want is None and expected.flat:
        raise DifferenceError(
            f"{found.structure_path}: there is a structure record, and there should be none.",
            "If it was converted without --no-structure, leave that out here too.",
            what="structure",
            file=found.structure_path,
        )
    if want is None:
        if found.structure is None and list(found.tensors) == stored:
            return
        want = keymap.plain_record(stored)
    if found.structure == want:
        return
    got = found.structure
    at = next(
        (i for i, (a, b) in enumerate(zip(want, got or "", strict=False)) if a != b), min(len(want), len(got or ""))
    )
    where = "is missing" if got is None else f"differs from character {at} on: {got[at : at + 60]!r}"
    raise DifferenceError(
        f"{found.structure_path}: the structure record {where}; expected {want[at : at + 60]!r}.",
        what="structure",
        file=found.structure_path,
        index=[at],
        expected=want[at : at + 60],
        found=None if got is None else got[at : at + 60],
    )


def _check_shards(found: Written, asked: Options) -> None:
    """Check that no file of several tensors exceeds `max_shard_size`."""
    if not asked.max_shard_size:
        return
    sizes: Counter[str] = Counter()
    for name, tensor in found.tensors.items():
        sizes[found.homes[name]] += tensor.nbytes
    counts = Counter(found.homes.values())
    for path, size in sizes.items():
        if counts[path] > 1 and size > asked.max_shard_size:
            raise DifferenceError(
                f"{path} holds {size} bytes of tensors, more than --max-shard-size allows ({asked.max_shard_size}).",
                what="file",
                file=path,
                expected=asked.max_shard_size,
                found=size,
            )


# -------------------------------------------------------------------------------------------------- files of torch


def _compare_torch(
    source: Source, tree: Any, path: str, here: Location, asked: Options, done: Verification, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare the `torch.load` file `path`, read at `here`, with `tree`, the value it must hold: yield the pairs of
    tensors.

    Both trees are flattened to tensors and a record in the same way, and these are compared.
    """
    try:
        opened = read_torch(here)
    except CkptconvError as error:
        raise _unreadable(path, error.message.replace(here.path, path)) from error
    want, want_record = keymap.flatten(tree)
    got, got_record = keymap.flatten(opened.weights)
    expected = _Expected(want, lambda _: without_storages(want_record, want), flat=False, metadata=lambda aliases: {})
    found = Written(path, structure=without_storages(got_record, got), structure_path=path)
    found.tensors = got
    found.homes = dict.fromkeys(got, path)
    pairs = _compare_names(source, expected, found, asked, wrong)
    if not wrong:
        _check_structure(expected, found)
    if not is_remote(here.path):
        _check_archive(path, here.path)
    done.outputs.append(OutputFile(path, int(opened.facts["size"]), len(got)))
    done.tensors += len(got)
    done.structure_records += 1
    yield from pairs


def _unreadable(path: str, why: str) -> DifferenceError:
    return DifferenceError(f"{path} cannot be read: {why}", "Convert again.", what="file", file=path)


def _compare_universal(
    source: Source, target: CheckedOutput, asked: Options, done: Verification, attested: Attested, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare a universal checkpoint: a file for each parameter's weights and each of its states, the common states,
    and copies of the model files."""
    from ckptconv.outputs import universal
    from ckptconv.outputs.training import resumable

    made = resumable(source, asked, _rename(asked))
    trees = {name: tree for name, tree, _ in universal.trees(made.training, made.weights, made.states)}
    copies = {basename(file.path): file for file in made.training.copies}
    names = [*trees, *copies, universal.LATEST]
    pointer = universal.pointer(target.path)
    at = target.at or {name: join(target.path, name) for name in names} | {universal.LATEST: pointer}
    missing = [name for name in names if target.place.at(at[name]).kind != "file"] if target.at is None else []
    if missing:
        lacking = DifferenceError(f"{target.path} lacks {some(missing)}.", what="missing", file=at[missing[0]])
        raise lacking
    if target.at is None:
        _check_no_more(target.place, {*names, universal.LATEST, MANIFEST})
    for name, tree in trees.items():
        yield from _compare_torch(source, tree, join(target.path, name), target.place.at(at[name]), asked, done, wrong)
    for name, file in copies.items():
        want, got = whole(file), whole(target.place.at(at[name]).entry.file)
        path = join(target.path, name)
        done.outputs.append(OutputFile(path, got.nbytes, 0))
        pair = ExpectedPair(want, got, path, name)
        error = _other_kind(pair)
        if error:
            raise error
        yield pair
    text = target.place.at(at[universal.LATEST]).read_text(_LONGEST_NAME)
    if text != basename(target.path):
        raise DifferenceError(
            f"{pointer} names {text!r}, and not {basename(target.path)!r}.",
            what="file",
            file=pointer,
            expected=basename(target.path),
            found=text,
        )
    if target.manifest:
        told = target.manifest, source, {**source.inputs, **source.state_inputs}, "universal", target.path, at
        attested.checks.append(functools.partial(check_planned, *told))


def _compare_dcp(
    source: Source, target: CheckedOutput, asked: Options, done: Verification, attested: Attested
) -> Iterator[ExpectedPair]:
    """Compare a checkpoint of torch.distributed.checkpoint."""
    from ckptconv.verification import dcp

    if asked.optimizer:
        source = source._replace(inputs={**source.inputs, **source.state_inputs})
    place = target.place if target.at is None else Gathered(target.path, target.place.options, target.at)
    yield from _paired(source, target, dcp.compare(source, place, target.path, asked, _rename(asked)), done, attested)


def _compare_plan(
    source: Source, target: CheckedOutput, asked: Options, done: Verification, attested: Attested
) -> Iterator[ExpectedPair]:
    """Compare an output whose format has no reader here with what a conversion plans."""
    from ckptconv.outputs import planning, targets

    files = planning.planned(source, targets.Target(target.path, target.kind), asked).plan.files
    above = dirname(target.path) if KINDS[target.kind].form == "file" else target.path
    where = {file.name: target.place.at((target.at or {}).get(file.name, join(above, file.name))) for file in files}
    yield from _paired(source, target, planned.compare(above, files, where), done, attested)


def _check_frames(found: Compared, attested: Attested) -> list[str]:
    """Check what is around the tensors of an output, which have been compared."""
    found.crcs = {name: attested.known(place.path) for name, place in found.where.items()}
    found.check_frames()
    return []


def _paired(
    source: Source, target: CheckedOutput, found: Compared, done: Verification, attested: Attested
) -> Iterator[ExpectedPair]:
    """Yield the pairs of an output that is compared with its plan."""
    done.outputs.extend(OutputFile(join(found.path, plan.name), plan.size, plan.tensors) for plan in found.plans)
    done.tensors += found.tensors
    attested.checks.append(functools.partial(_check_frames, found, attested))
    if target.manifest:
        told = target.manifest, source, dict(source.inputs), target.holds, found
        attested.checks.append(functools.partial(check_compared, *told))
    for pair in found.pairs:
        error = _other_kind(pair)
        if error:
            raise error
        attested.count(pair.path, pair.name)
        yield pair


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


def _expected_tree(source: Source, asked: Options) -> Any:
    """Return the tree that a `.pt` file must hold."""
    chosen = selected(source, asked, _rename(asked), "tree")
    tensors = {name: chosen.cast(name) for name in chosen.tensors}
    record = chosen.described.structure
    if record is not None and asked.opaque == "drop":
        record = _without_classes(record)
    return keymap.unflatten(tensors, record if asked.structure else None, live_values=False)


def _without_classes(record: str) -> str:
    """Return the record with tensors of unlisted subclasses made plain ones, as they are written."""
    from ckptconv.outputs import writable

    parsed = parse(record)
    for leaf, _ in tensors_of(parsed):
        kind = leaf.get("kind", "tensor")
        if type(kind) is not str or (kind not in writable.KINDS and writable.is_unlisted_kind(kind)):
            del leaf["kind"]
    return dump(parsed.root, parsed.nodes, parsed.storages)


def _check_archive(path: str, here: str) -> None:
    """Check the CRC-32 of every record of a zip archive."""
    if not zipfile.is_zipfile(here):
        return
    try:
        with zipfile.ZipFile(here) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise _unreadable(path, f"{error}.") from error
    if damaged is not None:
        raise DifferenceError(
            f"{path}: the checksum of its record {damaged!r} is wrong.", "Convert it again.", what="file", file=path
        )


# ----------------------------------------------------------------------------------------------------------- wording


def _tensors(names: Sequence[str]) -> str:
    return "a tensor" if len(names) == 1 else f"{len(names)} tensors"

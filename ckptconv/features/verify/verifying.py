"""Verify an output against its source, by a path of its own.

It shares with a conversion the code that reads descriptions (where bytes lie), that selects names, tensors and
structure, and that prefetches remote files. `output` reads the output strictly, and `evaluate` computes the expected
elements. No code that moves or casts the bytes of a conversion takes part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CkptconvError, DifferenceError, MissingError, UsageError
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.verify.keywords import VERIFYING
from ckptconv.features.verify.output import recorded_remark, unpublished
from ckptconv.features.verify.pairs import Attested, Differences, compare_pairs
from ckptconv.features.verify.provenance import Manifest, check_no_manifest, noting_changes, read_manifest, swapped
from ckptconv.features.verify.report import CheckedOutput, Verification
from ckptconv.formats.alone import kept_apart
from ckptconv.formats.detect import OtherFamilyError
from ckptconv.formats.model_files import INDEX_SUFFIX
from ckptconv.formats.opening import all_opened, fitted
from ckptconv.formats.source import NOT_CONVERTED, Opened, Source, source_of
from ckptconv.options.option import checked
from ckptconv.options.table import OPTIONS, Options
from ckptconv.outputs.computed import COMPUTED, Way, ways_in
from ckptconv.outputs.kinds import CHECKPOINTS, DIVIDED, FURTHER, KINDS, NAMED, entry_of, further, kind_of
from ckptconv.outputs.messages import are_weights_left
from ckptconv.outputs.targets import MANIFEST, check_directory, kind_of_states, named_outputs
from ckptconv.process import no_garbage, peak_rss
from ckptconv.storage import progress as bars
from ckptconv.storage.location import Location
from ckptconv.storage.paths import dirname, is_same, join, normalize, real_place, resolved_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import VerifyOptions
    from ckptconv.storage.progress import AnyProgress, Progress


# The module whose `compared` compares an output with the digests in its manifest, without a source.
ALONE: tuple[str, ...] = (
    "ckptconv.features.provenance.with_verify",
)  # fmt: skip
# The beginning of a source's notes on which of several checkpoints in it was read, and that of notes on parts that the
# output does not have.
_TAKEN = "Took "
_NOT_HELD = "Not in the output: "


@bars.shown
@checked(VERIFYING)
def verify(
    source: str | os.PathLike[str] | Source | Opened,
    output: str | os.PathLike[str] | None = None,
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    **options: Unpack[VerifyOptions],
) -> Verification:
    """Compare `output` with the result of converting `source`, a path or an opened checkpoint, with the same `options`.

    `options` are those of the conversion, the fields of `Options`. Options not given are taken from the output's
    manifest, in its directory or at the path `manifest`. `output` may be omitted if `states` or `universal` is
    given; without these, the files of `source`, an output, are compared with the digests in its manifest. `progress`
    and `on_total` are those of `convert`, for the bytes compared.

    Return a report if every tensor, name, alias and structure record is equal, bit for bit. Raise DifferenceError with
    all tensors that differ, or with the first other difference, UsageError for a path that does not exist, and the
    errors of opening the source.

    Examples:
        >>> report = ckptconv.convert("model.pt", "model.safetensors")
        >>> ckptconv.verify("model.pt", "model.safetensors").bytes_compared
        60
    """
    source = source_of(source, options)
    chosen = Options(**options)
    explicit = {name for name, value in options.items() if value not in (None, OPTIONS[name].kind.unset)}
    if chosen.to:
        named, chosen = named_outputs(None if output is None else os.fspath(output), chosen)
        output = named.get("weights")
        if output is not None:
            check_directory(Location(normalize(output), dict(chosen.storage_options)), chosen.to)
    targets = [] if output is None else _targets(_place(normalize(output)), chosen, explicit)
    if targets and targets[-1].options:
        chosen = targets[-1].options
    elif targets and targets[0].manifest:
        chosen = _with(targets[0].manifest, chosen, explicit)
    if chosen.states and chosen.to not in CHECKPOINTS:
        path, chosen = _place(normalize(chosen.states)), chosen.replaced(states="")
        targets.append(_target(path, chosen)._replace(kind=kind_of_states(path, kind_of(path))))
    for kind, tree in further(chosen).items():
        if kind not in KINDS:
            continue
        place = Location(real_place(normalize(tree)), dict(chosen.storage_options))
        manifest = read_manifest(place.join(MANIFEST), chosen)
        chosen = _with(manifest, chosen, explicit) if manifest and not targets else chosen
        targets.append(CheckedOutput(place, kind, manifest=manifest))
    if not targets:
        for module in () if isinstance(source, Source) or chosen.recorded() else ALONE:
            report: Verification = import_module(module).compared(
                normalize(source), chosen, bars.counter(progress), on_total
            )
            return report
        raise UsageError("OUTPUT is missing.", "Specify the output of the conversion, a file or directory.")
    # A million small objects live until the end: a garbage collector would take longer to scan them than it takes to
    # make them.
    with no_garbage():
        recorded = _recalled(targets[0], chosen)
        sources = _open(source, targets, chosen, recorded)
        first = targets[0].manifest
        if first:
            sources = [first.computed(part, chosen, targets[0].path) for part in sources]
        sources = fitted(sources, source, chosen, {target.holds for target in targets})
    pairs = [(kept_apart(part, target.path), _of_part(part, target, chosen)) for part in sources for target in targets]
    try:
        done = verify_outputs(pairs, chosen, progress=bars.counter(progress), on_total=on_total)
    except DifferenceError as error:
        if not first and isinstance(source, (str, os.PathLike)):
            error.hint = swapped(normalize(source), targets[0].path, chosen) or error.hint
        raise
    deciding = targets[-1 if chosen.to in CHECKPOINTS else 0].manifest
    shown = dict.fromkeys([*chosen.recorded(), *chosen.fitting(), *(deciding.options if deciding else ())])
    done.options = {name: value for name in shown if (value := getattr(chosen, name)) != OPTIONS[name].default}
    done.manifest = deciding.place.path if deciding and deciding.options else ""
    for name, paths in deciding.others.items() if deciding else ():
        if again := COMPUTED[name].computing.again:
            setattr(done, again.field, [path for path in paths if path is not None])
    return done


def verify_outputs(
    outputs: Sequence[tuple[Source, CheckedOutput]],
    options: Options,
    *,
    progress: Progress | None = None,
    on_total: Callable[[int], object] | None = None,
) -> Verification:
    """Verify pairs of an opened source and an output of it, which may still be staged, as `verify` does."""
    started = time.monotonic()
    first, _ = outputs[0]
    done = Verification(first.path, [], first.format, 0, {}, 0, 0, 0, [])
    sources = {id(source): source for source, _ in outputs}.values()
    done.bytes_read = sum(source.bytes_read for source in sources)
    notes = (note for source in sources for note in source.notes if note.startswith((_TAKEN, NOT_CONVERTED)))
    done.notes = list(dict.fromkeys(map(_not_held, notes)))
    if are_weights_left(sources, (target.holds for _, target in outputs)):
        done.notes.append(f"{_NOT_HELD}the weights.")
    others = frozenset(target.path for _, target in outputs)
    outputs = [(source, target._replace(others=others)) for source, target in outputs]
    attested, wrong = Attested(), Differences()
    stated = [(source, target.manifest, target.options or options) for source, target in outputs if target.manifest]
    with no_garbage(), noting_changes(stated):
        pairs = [
            pair for source, target in outputs for pair in _compare(source, target, options, done, attested, wrong)
        ]
    # A source's warnings depend on the parts of it that were read.
    of_sources = (_not_held(warning) for source in sources for warning in source.warnings)
    done.warnings = [*of_sources, *done.warnings]
    done.unchecked = any(source.files.has_checksums for source in sources)
    if done.inert:
        done.warnings.append(
            f"{first.path} has no tensors, only objects of classes that are known only by name: the comparison covers "
            "no model."
        )
    if on_total:
        on_total(sum(pair.got.nbytes for pair in pairs))
    done.bytes_compared, read = compare_pairs(pairs, options, progress or (lambda count: None), attested, wrong)
    done.bytes_read += read
    with noting_changes(stated):
        wrong.check()
    done.warnings.extend(attested.check())
    done.seconds = time.monotonic() - started
    done.peak_rss_bytes = peak_rss()
    return done


def _not_held(text: str) -> str:
    """Return a sentence about a part that conversions leave out, as it is true of their output; others unchanged."""
    is_left = text.startswith(NOT_CONVERTED)
    return text.replace(NOT_CONVERTED, _NOT_HELD).replace(". Use --", ". Use convert --") if is_left else text


def _targets(path: str, options: Options, explicit: Collection[str]) -> list[CheckedOutput]:
    """Return the output at `path`, or those that it consists of, each with options of its own. `explicit` are the names
    of the options that the user gave."""
    stores = dict(options.storage_options)
    inner = {name: [join(path, folder) for folder in kind.folders] for name, kind in DIVIDED.items()}
    stated = {
        name: [subfolder for subfolder in folders if Location(join(subfolder, MANIFEST), stores).kind == "file"]
        for name, folders in inner.items()
        if options.to in ("", DIVIDED[name].to)
    }
    kind = next((name for name, outputs in stated.items() if options.to or outputs), "")
    divided = entry_of(kind).divided if kind else None
    if divided is None:
        return [_target(path, options)]
    parts = divided(path, options)
    if unasked := [name for name in stated[kind] if name not in parts]:
        raise UsageError(
            f"{unasked[0]} contains optimizer states, which were not requested. Nothing was compared.",
            "Specify their source with --states PATH.",
        )
    outputs = {name: _target(name, part) for name, part in parts.items()}
    return [
        output._replace(options=_with(output.manifest, parts[name], explicit) if output.manifest else parts[name])
        for name, output in outputs.items()
    ]


def _target(path: str, options: Options) -> CheckedOutput:
    """Return the output at `path`; its manifest says how it was converted."""
    place = Location(path, dict(options.storage_options))
    manifest = read_manifest(place.at(options.manifest) if options.manifest else place.join(MANIFEST), options, path)
    if options.manifest and manifest is None:
        raise MissingError(f"{options.manifest} does not exist.")
    to = options.to or (manifest.options.get("to") if manifest else None)
    kind = NAMED[to][0] if to else kind_of(path) if place.kind != "directory" else "directory"
    if manifest and not to:
        kind = "states" if manifest.kind == "optimizer" else manifest.kind if manifest.kind in FURTHER else kind
    return CheckedOutput(place, kind, manifest=manifest)


def _recalled(target: CheckedOutput, options: Options) -> Any:
    """Return the entry in `Source.computed` of the way that the record of an output names, and `options` do not; None
    if there is none."""
    for way in COMPUTED.values():
        if way.remark and not any(options.asked(option) for option in way.options):
            record, where = _recorded(target, way)
            if record:
                return way.computing.recalled(record, where)
    return None


def _recorded(target: CheckedOutput, way: Way) -> tuple[Any, str]:
    """Return an output's record of a way to compute, None if it has none, and the place of the record."""
    if target.manifest:
        return target.manifest.members.get(way.members[0]), f"The manifest of {target.path}"
    try:
        return recorded_remark(target.path, target.place, way.remark), target.path
    except CkptconvError:  # a wrong output is reported when it is compared
        return None, ""


def _with(manifest: Manifest, options: Options, explicit: Collection[str]) -> Options:
    """Fill in options that are not `explicit` with those of the manifest."""
    left = {
        name: value
        for name, value in manifest.options.items()
        if name not in explicit and getattr(options, name) == OPTIONS[name].default
    }
    for name, way in ways_in(manifest.members).items():
        if way.lost and not (getattr(options, name) or left[name]):
            done, advice = way.lost
            raise UsageError(f"{manifest.place} records that {done}, but no usable path to it.", advice)
        if way.lost and left.get(name) and Location(left[name], dict(options.storage_options)).kind == "missing":
            done, advice = way.lost
            raise MissingError(f"{manifest.place} records that {done}: {left[name]}, which does not exist.", advice)
    return options.replaced(**left, family=options.family or manifest.family)


def _place(path: str) -> str:
    """Return the output that `path` names: for an index, its directory."""
    return dirname(path) if path.endswith(INDEX_SUFFIX) else path


def _open(source: str | Source, targets: Sequence[CheckedOutput], options: Options, recorded: Any) -> list[Source]:
    holds = {target.holds for target in targets}
    first, is_torch = targets[0].path, targets[0].kind == "torch"
    if isinstance(source, Source):
        return all_opened(source, options, holds, recorded=recorded)
    if is_same(source, first) and entry_of(kind_of(first)).form == "file":
        raise UsageError(
            f"{source} is both SOURCE and OUTPUT.", "Specify the source of the conversion, then its output."
        )
    if source.endswith(".json"):
        path = Location(source, dict(options.storage_options))
        check_no_manifest(path, options, f"Specify the source: ckptconv verify SOURCE {first} --manifest {source}")
    try:
        sources = all_opened(source, options, holds, recorded=recorded)
    except OtherFamilyError as error:
        if not targets[0].manifest:
            raise
        origin = f"was converted from another format: {targets[0].manifest.members['source']['format']}"
        raise UsageError(
            f"{error.message.rstrip('.')}, and {first} {origin}.",
            "Specify the source first, then the output: ckptconv verify SOURCE OUTPUT.",
        ) from error
    # An output may lie in the directory of its source: then the source is the checkpoint of the other kind there.
    family = "torch" if sources[0].family == "safetensors" else "safetensors"
    if not options.family and _is_in(first, source) and is_torch is (sources[0].family != "safetensors"):
        return all_opened(source, options.replaced(family=family), holds, recorded=recorded)
    return sources


def _is_in(output: str, directory: str) -> bool:
    """Return whether `output` is `directory`, or a file in it."""
    return resolved_name(directory) in (resolved_name(output), resolved_name(dirname(output)))


def _of_part(source: Source, target: CheckedOutput, options: Options) -> CheckedOutput:
    """Return the output of one of several sources, a tensor-parallel rank's or a component's."""
    if not source.folder:
        return target
    place = target.place.join(source.folder)
    known = target.manifest if source.component is None else None
    return target._replace(place=place, manifest=known or read_manifest(place.join(MANIFEST), options))


# ------------------------------------------------------------------------------------------- names, kinds, structure


def _compare(
    source: Source,
    target: CheckedOutput,
    options: Options,
    done: Verification,
    attested: Attested,
    wrong: Differences,
) -> Iterator[ExpectedPair]:
    """Compare everything but elements; yield the pairs of tensors whose elements are still to be compared."""
    options = target.options or options
    place = target.place if target.at is None else target.place.at(next(iter(target.at.values())))
    entry = place.entry
    if entry.kind == "missing":
        raise MissingError(f"{target.path} does not exist, so it cannot be verified.", unpublished(place))
    kind = entry_of(target.kind)
    is_of_kind = target.at is not None or (entry.kind == "file") == (kind.form == "file")
    # The first of all kinds says what is no output.
    module = kind.compared if kind.compared and is_of_kind else entry_of("file").compared
    yield from import_module(module, __package__).pairs(source, target, options, done, attested, wrong)

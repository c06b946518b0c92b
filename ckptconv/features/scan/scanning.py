"""The call `scan`: a verdict for each file in some paths, by what loading it would run. Nothing is run."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.errors import CkptconvError, MissingError, UnsafeError, UnsupportedError, UsageError
from ckptconv.features.attacks.tables import is_suspect
from ckptconv.features.scan.beginnings import CLOSED, HEAD
from ckptconv.features.scan.bounds import ENTRIES, LONGEST, SUFFIXES
from ckptconv.features.scan.contents import ScannedContents
from ckptconv.features.scan.options import SCANNING
from ckptconv.features.scan.report import RULES, VERDICTS, ScannedFile, ScanReport, worst
from ckptconv.formats import model_files
from ckptconv.formats.detect import open_source
from ckptconv.formats.model_files import SAFETENSORS
from ckptconv.formats.registered import DESCRIBING, FOREIGN
from ckptconv.formats.run_names import LATEST, LATEST_UNIVERSAL, MAX_TAG, tags_in
from ckptconv.formats.suggestions import nearby
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.formats.weight_map import read_index
from ckptconv.options.option import checked, filled
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.process import no_garbage
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.inside import check_inside
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, listed
from ckptconv.storage.stores import pinned
from ckptconv.text import brief, some

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import ScanOptions

# The end of the name of an index.
_INDEX = ".index.json"
# The beginning of git-lfs's pointer to a file.
_LFS = b"version https://git-lfs"
# The most files that are no checkpoints whose names are kept.
_MOST_OTHERS = 10_000
# The options that write a report, by the ending of its name.
_REPORTS = {".sarif": "--sarif FILE PATH", ".json": "--json PATH > FILE"}
_TO_A_FILE = "Write the data to a file, and scan that file."


@checked(SCANNING)
def scan(
    *paths: str | os.PathLike[str],
    **options: Unpack[ScanOptions],
) -> ScanReport:
    """Return a verdict for each file in `paths`, files or directories, by what loading it would run.

    The verdict on a file is "safe", "unknown", "suspicious", "attack" or "unreadable";
    `ckptconv.features.scan.report.RULES` describes the reasons. A file's content decides its kind, not its name. Those
    that are no checkpoints are counted and skipped. Directories are searched to any depth, hidden files too. Symbolic
    links to files are followed; a link to a directory that is not searched otherwise is "unknown".

    Pickles and descriptions are read, no tensor data, and nothing is run.

    Raise UsageError for a path that does not exist, or is a pipe or a device. A file that cannot be read is a verdict,
    not an error.

    Examples:
        >>> found = ckptconv.scan("model.pt")
        >>> found.verdict, [(each.path, each.verdict) for each in found.files]
        ('safe', [('model.pt', 'safe')])
    """
    stores = filled(SCANNING, options)["storage_options"]
    several = paths[0] if len(paths) == 1 and isinstance(paths[0], (list, tuple)) else paths
    given_paths = listed(several, "No path was given to scan.")
    if "-" in given_paths:
        raise UsageError("scan does not read standard input.", _TO_A_FILE)
    started = time.monotonic()
    report = ScanReport("safe", [], {})
    places = [Location(pinned(path, dict(stores)), dict(stores)) for path in given_paths]
    missing = next((place for place in places if place.kind == "missing"), None)
    if missing:
        flag = next((flag for ending, flag in _REPORTS.items() if missing.name.endswith(ending)), "")
        report_at = f"To write a report to FILE, use ckptconv scan {flag}." if flag and len(places) > 1 else ""
        raise MissingError(f"{missing} does not exist.", nearby(missing) or report_at)
    pipe = next((place for place in places if place.kind not in ("file", "directory")), None)
    if pipe:
        raise UsageError(f"{pipe} is neither a file nor a directory. scan does not read pipes or devices.", _TO_A_FILE)
    seen: set[str] = set()
    indices: dict[str, set[str]] = {}
    with refusing_attacks():
        named = {place.path for place in places}
        roots = [os.path.realpath(path) for path in named if not is_remote(path)]
        for item in (file for place in places for file in _files_in(place, roots, report)):
            if item.path in seen:
                continue
            seen.add(item.path)
            with no_garbage():
                scanned = item if isinstance(item, ScannedFile) else _scanned(item, item.path in named, indices)
            if scanned is None:
                _skip(report, item.path)
                continue
            report.files.append(scanned)
    counts = Counter(file.verdict for file in report.files)
    report.counts = {verdict: counts[verdict] for verdict in VERDICTS}
    report.verdict = worst([file.verdict for file in report.files])
    report.seconds = time.monotonic() - started
    return report


def _files_in(place: Location, roots: Collection[str], report: ScanReport) -> Iterator[Location | ScannedFile]:
    """Yield the files at or below `place`, in order; as verdicts, a directory that cannot be listed, and a link to one
    that lies below none of `roots`."""
    stack = [place]
    while stack:
        current = stack.pop()
        try:
            if current.kind != "directory":
                yield current
                continue
            names = current.names
        except CkptconvError as error:
            contents = ScannedContents()
            contents.add("unreadable", error.message)
            yield _verdict(current.path, "directory", 0, contents)
            continue
        below = []
        for name, entry in names.items():
            inside = current.join(name)
            is_link = not is_remote(inside.path) and os.path.islink(inside.path)
            if is_link and entry.kind != "file":
                report.links += 1
                if entry.kind == "directory" and not _is_below(inside.path, roots):
                    contents = ScannedContents()
                    contents.add(
                        "not-opened",
                        f"{inside} is a link to a directory, which was not searched. To scan it, specify its path.",
                    )
                    yield _verdict(inside.path, "symbolic link", 0, contents)
            elif entry.kind in ("file", "directory"):
                below.append(current.at(entry.file) if entry.kind == "file" else inside)
            else:
                _skip(report, inside.path)
        stack.extend(reversed(below))


def _skip(report: ScanReport, path: str) -> None:
    report.skipped += 1
    if len(report.others) < _MOST_OTHERS:
        report.others.append(path)


def _is_below(link: str, roots: Collection[str]) -> bool:
    """Return whether a link leads to or below one of `roots`, where all files are scanned anyway."""
    aim = os.path.realpath(link)
    return any(os.path.commonpath([root, aim]) == root for root in roots)


def _scanned(place: Location, is_named: bool, indices: dict[str, set[str]]) -> ScannedFile | None:
    """Return the verdict on a file; None if it is not a checkpoint, and neither was named itself, nor has the name of
    one. `indices` are the names of files in the indices of each directory, as far as they were read."""
    contents = ScannedContents(expected=place.name.endswith(SUFFIXES))
    size, head, kind = 0, b"", ""
    try:
        with place.open_reader() as reader:
            size = reader.file.size
            head = reader.read_at(0, min(HEAD, size))
            # A file's name alone does not decide its kind.
            if place.name.endswith(ENTRIES) and contents.archives(reader):
                kind = "torch.distributed.checkpoint data"
            elif not (place.name.endswith(ENTRIES) and head.startswith(tuple(CLOSED))):
                kind = contents.look(reader)
        special = next((special_kind for special_kind in _SPECIAL if special_kind.matches(place, head)), None)
        if special is not None and kind in ("", "safetensors", "pickle"):
            kind = special.look(contents, place) or kind
    except CkptconvError as error:
        contents.add("unreadable", error.message)
    other_model = "" if kind else _other_model(place, head)
    contents.expected |= not kind and _is_shard(place, indices)
    should_be_one = is_named or place.name.endswith(TORCH_SUFFIXES)
    is_odd = should_be_one and not (kind or contents.findings or contents.expected or head.startswith(_LFS))
    if other_model or is_odd:
        contents.add("not-opened", f"{place} is {other_model or 'a file of unknown format'}: it was not judged.")
        kind = kind or other_model or "other file"
    if not kind and not contents.findings:
        foreign = next((import_module(module).foreign_file(str(place), head, size) for module in FOREIGN), None)
        is_missing = contents.expected and not isinstance(foreign, UnsupportedError)
        if not (is_missing or head.startswith(_LFS)):
            return None
        unlike = f"{place} begins with {head[:16]!r}, unlike any checkpoint."
        contents.add("unreadable", f"{foreign.message} {foreign.hint}" if foreign else unlike)
    return _verdict(place.path, kind or "unknown", size, contents)


def _is_shard(place: Location, indices: dict[str, set[str]]) -> bool:
    """Return whether an index in the file's directory names the file."""
    directory = place.parent
    names = indices.get(directory.path)
    if names is None:
        names = indices[directory.path] = set()
        # Some stores list nothing; an index that cannot be read has a verdict of its own.
        with contextlib.suppress(CkptconvError):
            for name in filter(lambda name: name.endswith(_INDEX), directory.names):
                index = read_index(directory.join(name))
                names.update(index.weight_map.values() if index else ())
    return place.name in names


# Models that are not judged, by their first bytes, and by their names.
_OTHER_BEGINNINGS = {
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"PYTORCH1": "a TorchScript archive of torch 1.0",
}
_OTHER_NAMES = {
    ".h5": "an HDF5 file",
    ".hdf5": "an HDF5 file",
    ".keras": "a Keras model",
    ".mlmodel": "a Core ML model",
    ".onnx": "an ONNX model",
    ".pmml": "a PMML model",
    ".skops": "a skops model",
    ".tflite": "a TensorFlow Lite model",
    "saved_model.pb": "a TensorFlow model",
}


def _other_model(place: Location, head: bytes) -> str:
    """Return the kind in words of a model that is not judged here; "" for other files."""
    began = next((called for begin, called in _OTHER_BEGINNINGS.items() if head.startswith(begin)), "")
    return began or next((called for end, called in _OTHER_NAMES.items() if place.name.endswith(end)), "")


def _verdict(path: str, kind: str, size: int, contents: ScannedContents) -> ScannedFile:
    verdict = worst([RULES[finding.rule].verdict for finding in contents.findings])
    return ScannedFile(path, verdict, kind, size, list(contents.findings), list(contents.classes))


# ------------------------------------------------------------------------------------------- files that name others


def _safetensors(contents: ScannedContents, place: Location) -> str:
    def action() -> None:
        source = open_source(place.path, family=SAFETENSORS, storage_options=place.options)
        suspects = [name for name in source.files.opaque if is_suspect(Global(*name.rpartition(".")[::2]))]
        if suspects:
            contents.add(
                "dangerous-name", f"{place} contains a record of objects that refers to {some(suspects, 3, str)}."
            )

    contents.read(action)
    return "safetensors"


def _index(contents: ScannedContents, place: Location) -> str:
    return _only_unsafe(contents, "index", lambda: read_index(place))


def _virtual(contents: ScannedContents, place: Location, module: str) -> str:
    def action() -> None:
        roots = import_module(module).load(place, look=False).roots
        elsewhere = [root for root in roots if root != place.parent.path]
        if elsewhere:
            contents.add("reads-elsewhere", f"{place} reads from {some(elsewhere, 3, brief)}.")

    contents.read(action)
    return "virtual checkpoint"


def _pointer(contents: ScannedContents, place: Location) -> str:
    """Check the file `latest` of DeepSpeed, if this is one."""
    if not tags_in(place.parent):
        return ""

    def action() -> None:
        check_inside(place.read_text(MAX_TAG).strip(), place.path, place.parent.path, nested=False)

    return _only_unsafe(contents, "pointer", action)


def _only_unsafe(contents: ScannedContents, kind: str, action: Callable[[], object]) -> str:
    """Read a file that names others. If it is not a sound one of its kind, that shows nothing about code in it."""
    try:
        action()
    except UnsafeError as error:
        contents.add("path-outside", error.message)
    except CkptconvError:
        return ""
    return kind


def _describes(
    contents: ScannedContents, place: Location, *, kind: str, read: Callable[[Location, bytes], None]
) -> str:
    """Check the description in a directory, a file of a `kind` that names others. A long one was surveyed."""
    with place.open_reader() as reader:
        if reader.file.size > LONGEST:
            return kind
        data = reader.read_at(0, reader.file.size)
    contents.read(lambda: read(place, data))
    return kind


def _described(contents: ScannedContents, place: Location, *, kind: str) -> str:
    """Check entries that are not archives, of a file of a `kind` that its directory describes."""

    def action() -> None:
        source = open_source(place.parent.path, key=".", storage_options=place.options)
        if place.name not in source.inputs and place.entry.file.size:
            contents.add(
                "not-opened",
                f"{place} is not listed in any description in its directory, so its contents are not known.",
            )

    if not contents.findings:
        contents.read(action)
    return kind


class _Special(NamedTuple):
    """A file that names others, or that others describe."""

    matches: Callable[[Location, bytes], bool]
    look: Callable[[ScannedContents, Location], str]


def _describing(module: str) -> _Special:
    """Return the way to judge a file that describes others, as `module` reads it."""
    return _Special(
        lambda place, head: import_module(module).is_one(place.path, head), functools.partial(_virtual, module=module)
    )


def _of_feature(module: str) -> Iterator[_Special]:
    """Yield how the files are looked at that `module` of a feature has in `FILES`."""
    for kind, matches, read in import_module(module).FILES:
        how = functools.partial(_describes, read=read) if read else _described
        yield _Special(matches, functools.partial(how, kind=kind))


# Modules of features with files that describe others in their directory, or are described there.
_FEATURES: tuple[str, ...] = (
    "ckptconv.features.dcp.scanned",
)  # fmt: skip
# Modules of features with a way to judge other files beside a checkpoint: `is_one` and `look`.
_BESIDE: tuple[str, ...] = (
    "ckptconv.features.companions.with_scan",
)  # fmt: skip
_SPECIAL = (
    *(_Special(module.is_one, module.look) for module in map(import_module, _BESIDE)),
    *(special for module in _FEATURES for special in _of_feature(module)),
    _Special(
        lambda place, head: (
            not head.startswith(LOCAL_SIGNATURE)
            and (
                place.name.endswith(model_files.SUFFIX)
                or model_files.looks_like_safetensors(head, place.entry.file.size)
            )
        ),
        _safetensors,
    ),
    _Special(lambda place, head: place.name.endswith(_INDEX), _index),
    *map(_describing, DESCRIBING.values()),
    _Special(lambda place, head: place.name in (LATEST, LATEST_UNIVERSAL), _pointer),
)

"""Check that what a manifest says of a source and an output is true; verification trusts none of it.

A manifest's options are taken as the conversion's, unless others are given. They must be true as well: the plan id,
which is computed anew, depends on everything that decides an output.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import CorruptError, DifferenceError, UsageError
from ckptconv.formats.companions import is_companion_name
from ckptconv.formats.model_files import INDEX_SUFFIX, SUFFIX
from ckptconv.formats.source import Source
from ckptconv.options.kinds import Rules
from ckptconv.options.registered import missing
from ckptconv.options.table import NONE, OPTIONS, Options
from ckptconv.outputs.computed import COMPUTED, Elsewhere, ways_in
from ckptconv.outputs.planning import heading, planned
from ckptconv.outputs.schema import check_manifest, parse_json
from ckptconv.outputs.targets import Target, seen_path
from ckptconv.plan import Data, FilePlan, Literal, content_of, identity
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.archive import Archive
from ckptconv.storage.digests import NamedRange, digests_of
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, is_remote
from ckptconv.storage.reading import Reader
from ckptconv.structure.record import FILE_NAME
from ckptconv.tensors.moves import BLOCK
from ckptconv.verification import AGAIN, STALE
from ckptconv.verification.output import Written
from ckptconv.version import __version__

if TYPE_CHECKING:
    from ckptconv.verification.planned import Compared

_MAX_MANIFEST = 256 << 20
# Where a manifest may say that a reference is, beside this machine's disks: a request to any other place, such as a
# server in the same network, is not for a file to ask for.
_STORES = ("hf://", "s3://", "s3a://", "gs://", "gcs://", "az://", "abfs://", "abfss://", "memory://")
# A file has no say in whether attacks are accepted.
_IGNORED = frozenset({"inert"})
# The most patterns, and characters of each, that are taken from a file.
_MOST_PATTERNS, _LONGEST = 1000, 4096
# The most deltas, or checkpoints, that are read because a file names them.
_MOST_OTHERS = 1000
_YOURSELF = "Give the options of the conversion on the command line."


class Manifest(NamedTuple):
    """What an output says of how it was made. `place` is the manifest's own, by which source and output are reached
    too. `told` is the whole manifest; the other fields are taken from it: `kind` ("weights", "optimizer",
    "universal" or "dcp"), the source's family, the options that decided the output, and for each of `COMPUTED` by which
    a command made it, the paths of the `others` in order, None for the source."""

    place: Location
    told: dict[str, Any]
    kind: str
    family: str
    options: dict[str, Any]
    others: Mapping[str, tuple[str | None, ...]] = {}

    def computed(self, source: Source, asked: Options, output: str) -> Source:
        """Return `source` as one that is computed as this says, for an `output` of that path."""
        for name, paths in self.others.items():
            if again := COMPUTED[name].computing.again:
                source = again.source(source, self.told, paths, asked, output)
        return source


def read_manifest(place: Location, asked: Options, output: str = "") -> Manifest | None:
    """Return the manifest at `place`; None if there is none. A reference and deltas are found from the path `output` of
    the output. What its options say that `asked` say too is trusted.

    Raise DifferenceError for a damaged one, UsageError for one with unknown options, or with deltas that are not found.
    """
    if place.kind != "file":
        return None
    try:
        told = parse_json(place.read_text(_MAX_MANIFEST).encode(errors="surrogatepass"))
        check_manifest(told)
    except (CorruptError, ValueError) as error:
        message = f"{place} is not a valid manifest: {error}."
        raise DifferenceError(message, AGAIN, what="manifest", file=place.path) from error
    known = asked.recorded()
    for name, value in told["options"].items():
        if feature := missing(name):
            raise UsageError(
                f"{place} says that the conversion had the option {name!r}, which needs the feature {feature}.",
                "That feature is not here: verify where it is.",
            )
        if not _is_option(name, value) and (name not in known or known[name] != value):
            raise UsageError(
                f"{place} says that the conversion had the option {name!r}: {str(value)[:100]!r}, which is not known.",
                _YOURSELF,
            )
    given = {name: value for name, value in _options_of(told).items() if name not in _IGNORED}
    for way in ways_in(told).values():
        given.update(way.asked(told, lambda path: _reference(path, output)))
    others: dict[str, tuple[str | None, ...]] = {}
    for name, way in ways_in(told).items():
        if way.again is None:
            continue
        paths = tuple(None if path is None else _reference(path, output) for path in way.again.paths(told))
        if "" in paths or len(paths) > _MOST_OTHERS:
            done, advice = way.again.lost
            raise UsageError(f"{place} says that {done}, but not where to find them from here.", advice)
        others[name] = paths
    return Manifest(place, told, told["kind"], told["source"]["family"], given, others)


def _reference(path: str, output: str) -> str:
    """Return the path of the reference or delta that a manifest names for the output at the path `output`; "" if it may
    not name it."""
    is_elsewhere = is_remote(path) and ("::" in path or not path.startswith(_STORES))
    if not path or not output or is_elsewhere or len(path) > _LONGEST or not path.isprintable():
        return ""
    return seen_path(output, path)


def _is_option(name: str, value: Any) -> bool:
    option = OPTIONS.get(name)
    if option is None or not option.decides or type(value) is not option.kind.stored:
        return False
    texts: list[Any] = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    if len(texts) > _MOST_PATTERNS or not all(type(text) is str and len(text) <= _LONGEST for text in texts):
        return False
    try:
        option.parse(Rules(texts) if name == "rename" else value)
    except UsageError:
        return False
    return True


def _options_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's options as values for `Options`."""
    made = {name: tuple(value) if type(value) is list else value for name, value in told["options"].items()}
    made |= {way.options[0]: NONE for way in COMPUTED.values() if way.remark and told.get(way.members[0]) == {}}
    return {**made, "rename": Rules(made["rename"])} if "rename" in made else made


# --------------------------------------------------------------------------------------------- what it is checked with


class FoundFile(NamedTuple):
    """A file of an output: its `size` as planned, the `place` where it is read, where it has which tensors, and their
    CRC-32, as far as known."""

    size: int
    place: Location
    ranges: Sequence[NamedRange]
    crcs: Mapping[str, int]


def check(
    manifest: Manifest,
    source: Source,
    files: Mapping[str, FoundFile],
    planned_heading: Callable[[], Mapping[str, Any]],
) -> list[str]:
    """Return warnings. Raise DifferenceError if the manifest is wrong about `source` or its output, which has `files`
    by name.

    The inputs of `source` are as they were when this output was planned: reading more of it adds to them.
    `planned_heading` returns the heading of the manifest that its plan has; it is called once the files are known to be
    those.
    """
    told = manifest.told
    for name in sorted(told["files"].keys() | files.keys()):
        entry, file = told["files"].get(name), files.get(name)
        known = {tensor for *_, tensor in file.ranges} if file else set()
        if not (entry and file) or entry["size"] != file.size or entry["tensors"].keys() != known:
            raise _not_so(manifest, f"the file {name}", None if entry is None else f"{entry['size']} bytes")
        for tensor, crc in entry["tensors"].items():
            if crc is not None and int(crc, 16) != file.crcs.get(tensor):
                raise _not_so(manifest, f"the checksum of {tensor!r} in {name}", crc)
    # A conversion computes checksums for all tensors or for none, and for all if it does for one of several files.
    crcs = [crc for entry in told["files"].values() for crc in entry["tensors"].values()]
    if None in crcs and (any(crcs) or sum(bool(entry["tensors"]) for entry in told["files"].values()) > 1):
        raise _not_so(manifest, "the checksums", None)
    _check_digests(manifest, files)
    unsure = _check_inputs(manifest, source)
    _check_heading(manifest, planned_heading(), is_sure=not unsure)
    if unsure:
        since = f"{manifest.place} was written when {unsure} had another time of change"
        return [f"{since}: its description of the plan cannot be checked."]
    return []


def _heading(
    manifest: Manifest,
    source: Source,
    target: Target,
    files: Iterable[FilePlan],
    aliases: Mapping[str, str],
    record: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the heading of an output that consists of `files`, as the release and with the options that `manifest`
    names."""
    version, options = manifest.told["ckptconv"], manifest.told["options"]
    return heading(source, target, options, target.holds, files, aliases, record, version)


def check_safetensors(
    manifest: Manifest,
    source: Source,
    target: Target,
    found: Written,
    record: Mapping[str, Any],
    known: Callable[[str], Mapping[str, int]],
) -> list[str]:
    """Check the manifest of safetensors; `record` is what their selection says, and `known` returns the CRC-32 of the
    tensors in the file of a path, as far as they were computed."""
    ranges: dict[str, list[NamedRange]] = {file.path: [] for file in found.files}
    for name, tensor in found.tensors.items():
        ranges[found.homes[name]].append((getattr(tensor, "offset", 0), tensor.nbytes, name))
    literals = {file.path: _literal(manifest.place.at(file.path)) for file in found.files}
    files = {
        # The index was compared by content, so take its size as planned, not as found.
        basename(path): FoundFile(
            len(literals[path]) if path.endswith(INDEX_SUFFIX) else size,
            manifest.place.at(path),
            ranges[path],
            known(path),
        )
        for path, size, *_ in found.files
    }

    def planned_heading() -> dict[str, Any]:
        headers = {basename(path): literal for path, literal in literals.items()}
        plans = [FilePlan(name, files[name].size, (Literal(0, headers[name]),)) for name in manifest.told["files"]]
        return _heading(manifest, source, target, plans, found.aliases, record)

    return check(manifest, source, files, planned_heading)


def check_planned(manifest: Manifest, source: Source, target: Target, where: Mapping[str, str]) -> list[str]:
    """Check the manifest of files for `torch.load`. `where` maps the name of each to where it is read.

    Their plans are computed anew: reading such a file does not give its layout.
    """
    told = manifest.told
    examples = {name: next(iter(entry["tensors"]), "") for name, entry in told["files"].items()}
    files = {name: _members(manifest.place.at(path), examples.get(name, "")) for name, path in where.items()}

    def planned_heading() -> Mapping[str, Any]:
        found = planned(source, target, Options(**_options_of(told))).heading
        if told["ckptconv"] == __version__:
            return found
        # This is the plan of the current release: another release gave the same output another id.
        return {**found, "plan": "" if found["plan"] == told["plan"] else told["plan"]}

    return check(manifest, source, files, planned_heading)


def check_compared(manifest: Manifest, source: Source, target: Target, found: Compared) -> list[str]:
    """Check the manifest of an output whose files are as planned."""
    data = {plan.name: [part for part in plan.parts if isinstance(part, Data)] for plan in found.plans}
    ranges = {name: [(part.offset, part.nbytes, part.name) for part in parts] for name, parts in data.items()}
    files = {
        plan.name: FoundFile(plan.size, found.where[plan.name], ranges[plan.name], found.crcs.get(plan.name, {}))
        for plan in found.plans
    }
    return check(manifest, source, files, lambda: _heading(manifest, source, target, found.plans, {}, {}))


def _check_digests(manifest: Manifest, files: Mapping[str, FoundFile]) -> None:
    """Raise DifferenceError if a digest in the manifest, of a file or of a tensor, is not so. Every file is read
    once."""
    algorithm: str = manifest.told.get("digest", "")
    for name, entry in manifest.told["files"].items() if algorithm else ():
        with contextlib.closing(files[name].place.open_reader()) as reader:
            found = digests_of(reader.read_at, reader.file.size, files[name].ranges, algorithm)
        told = entry["digests"]
        wrong = [tensor for tensor, digest in told["tensors"].items() if found.tensors.get(tensor) != digest]
        if wrong or found.file != told["file"]:
            what = f"{wrong[0]!r} in {name}" if wrong else name
            raise _not_so(manifest, f"the {algorithm} of {what}", told["tensors"][wrong[0]] if wrong else told["file"])


def _check_inputs(manifest: Manifest, source: Source) -> str:
    """Return the first input that may be as it was, but for its time of change; "" if there is none. Raise
    DifferenceError for one that is another."""
    told = manifest.told["source"]["inputs"]
    place, known = manifest.place.at(source.path), {name: identity(found) for name, found in source.inputs.items()}
    unsure = [name for name in sorted(known.keys() | told.keys()) if known.get(name) != told.get(name)]
    for name in unsure:
        if name not in told or not _may_be(place, source.inputs, name, told[name]):
            raise _not_so(manifest, f"the input {name}", told.get(name))
    return unsure[0] if unsure else ""


# What a message calls members of a heading.
_CALLED = {
    "kind": "the kind of output",
    "aliases": "tied names",
    "like": "its reference",
    "plan": "its plan or options",
    "model_rank": "its source's rank",
    **{name: f"its source's {name}" for name in ("format", "family")},
}


def _check_heading(manifest: Manifest, want: Mapping[str, Any], is_sure: bool) -> None:
    """Raise DifferenceError if a member of the heading is not that of the plan, which is last: it depends on the
    release and the options. Inputs have been compared, and digests; another release may say less, or more."""
    told, is_ours = _members_of(manifest.told), manifest.told["ckptconv"] == __version__
    want = _members_of(want)
    names = told.keys() | want.keys() if is_ours else told.keys() & want.keys()
    for name in sorted(names, key=lambda name: (name == "plan", name)):
        if not _is_so(told.get(name), want.get(name)) and (is_sure or name != "plan"):
            raise _not_so(manifest, _CALLED.get(name, f"its {name}"), told.get(name))


def _members_of(heading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a heading that are compared, with those of its source among them."""
    apart = ("ckptconv", "options", "files", "digest", "source", "inputs")
    return {name: value for name, value in {**heading, **heading["source"]}.items() if name not in apart}


def _is_so(told: Any, want: Any) -> bool:
    """Whether a manifest says what is wanted. What says where something lay may say another place by now."""
    if isinstance(want, Elsewhere):
        return isinstance(told, str)
    if isinstance(want, dict):
        return (
            isinstance(told, dict) and told.keys() == want.keys() and all(_is_so(told[key], want[key]) for key in want)
        )
    if isinstance(want, list):
        return isinstance(told, list) and len(told) == len(want) and all(map(_is_so, told, want))
    return bool(told == want)


def _may_be(source: Location, inputs: Mapping[str, Hashable], name: str, told: Mapping[str, Any]) -> bool:
    """Return whether an input may be unchanged though its modification time differs: the time identifies only files
    without checksums of their own. An input that was not read now may have been read then."""
    found = inputs.get(name)
    if found is None:
        entries = (place.join(name).entry for place in (source, source.parent))
        return any(entry.kind == "file" and entry.file.size == told["size"] for entry in entries)
    content = content_of(found)
    by_time = isinstance(content, tuple) and any(isinstance(fact, str) for fact in content)
    return by_time and identity(found)["size"] == told["size"]


def _literal(place: Location) -> bytes:
    """Return the bytes of an output file that its plan holds as literals: its header, its record, or its index.

    Of a companion it holds none.
    """
    if is_companion_name(place.name):
        return b""
    with place.open_reader() as reader:
        if place.path.endswith(SUFFIX):
            return reader.read_at(0, 8 + int.from_bytes(reader.read_at(0, 8), "little"))
        data = reader.read_at(0, reader.file.size)
    return data if place.name == FILE_NAME else (json.dumps(parse_json(data), indent=2, sort_keys=True) + "\n").encode()


def _members(place: Location, example: str) -> FoundFile:
    """Return a torch file with each "tensor" that a manifest lists: its storages by the names of their zip records, or,
    for a file copied whole, the file. `example` is one that the manifest lists."""
    with contextlib.closing(place.open_reader()) as reader:
        size = reader.file.size
        if example and "/" not in example:
            crc = 0
            for at in range(0, size, BLOCK):
                crc = zlib.crc32(reader.read_at(at, min(BLOCK, size - at)), crc)
            return FoundFile(size, place, [(0, size, place.name)], {place.name: crc})
        archive = _archive(reader)
        if archive is None:
            return FoundFile(size, place, [], {})
        archive.locate_all()
        storages = list(_storages(archive))
        ranges = [(archive.payloads[row], archive.sizes[row], name) for name, row in storages]
        return FoundFile(size, place, ranges, {name: archive.crcs[row] for name, row in storages})


def _archive(reader: Reader) -> Archive | None:
    """Return a zip archive; None for another file."""
    head = reader.read_at(0, min(len(LOCAL_SIGNATURE), reader.file.size))
    return Archive(reader) if head == LOCAL_SIGNATURE else None


def _storages(archive: Archive) -> Iterator[tuple[str, int]]:
    """Yield the name and row of each storage that is not empty."""
    return ((name, row) for name, row in archive.rows.items() if archive.sizes[row] and "/data/" in name)


def _not_so(manifest: Manifest, what: str, told: Any) -> DifferenceError:
    return DifferenceError(
        f"{manifest.place} does not belong to this output: {what} in it is wrong.",
        STALE,
        what="manifest",
        file=manifest.place.path,
        found=told,
    )

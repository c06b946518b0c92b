"""Check that the statements of a manifest about a source and an output are true; verification trusts none of them.

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
from ckptconv.formats.model_directory import is_companion_name
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
# Stores on which a manifest may say that a reference is, apart from this machine's disks: a file must not cause a
# request to any other place, such as a server in the same network.
_STORES = ("hf://", "s3://", "s3a://", "gs://", "gcs://", "az://", "abfs://", "abfss://", "memory://")
# A file has no say in whether attacks are accepted.
_IGNORED = frozenset({"inert"})
# The most patterns, and characters of each, that are taken from a file.
_MOST_PATTERNS, _LONGEST = 1000, 4096
# The most deltas, or checkpoints, that are read because a file names them.
_MOST_OTHERS = 1000
_YOURSELF = "Give the options of the conversion on the command line."


class Manifest(NamedTuple):
    """The record of a conversion in its output. `place` is the manifest's own, by which source and output are reached
    too. `members` is the whole manifest; the other fields are taken from it: `kind` ("weights", "optimizer",
    "universal" or "dcp"), the source's family, the options that decided the output, and for each of `COMPUTED` by which
    a command computed it, the paths of the `others` in order, None for the source."""

    place: Location
    members: dict[str, Any]
    kind: str
    family: str
    options: dict[str, Any]
    others: Mapping[str, tuple[str | None, ...]] = {}

    def computed(self, source: Source, options: Options, output: str) -> Source:
        """Return `source` as one that is computed as this manifest says, for an `output` of that path."""
        for name, paths in self.others.items():
            if again := COMPUTED[name].computing.again:
                source = again.source(source, self.members, paths, options, output)
        return source


def read_manifest(place: Location, options: Options, output: str = "") -> Manifest | None:
    """Return the manifest at `place`; None if there is none. A reference and deltas are found from the path `output` of
    the output. An option in it that `options` have too, with the same value, is trusted.

    Raise DifferenceError for a damaged one, UsageError for one with unknown options, or with deltas that are not found.
    """
    if place.kind != "file":
        return None
    try:
        members = parse_json(place.read_text(_MAX_MANIFEST).encode(errors="surrogatepass"))
        check_manifest(members)
    except (CorruptError, ValueError) as error:
        message = f"{place} is not a valid manifest: {error}."
        raise DifferenceError(message, AGAIN, what="manifest", file=place.path) from error
    known = options.recorded()
    for name, value in members["options"].items():
        if feature := missing(name):
            raise UsageError(
                f"{place} says that the conversion had the option {name!r}, which needs the feature {feature}.",
                "Verify with an installation that has it.",
            )
        if not _is_option(name, value) and (name not in known or known[name] != value):
            raise UsageError(
                f"{place} says that the conversion had the option {name!r}: {str(value)[:100]!r}, which is not known.",
                _YOURSELF,
            )
    recorded = {name: value for name, value in _options_of(members).items() if name not in _IGNORED}
    for way in ways_in(members).values():
        recorded.update(way.asked(members, lambda path: _reference(path, output)))
    others: dict[str, tuple[str | None, ...]] = {}
    for name, way in ways_in(members).items():
        if way.again is None:
            continue
        paths = tuple(None if path is None else _reference(path, output) for path in way.again.paths(members))
        if "" in paths or len(paths) > _MOST_OTHERS:
            done, advice = way.again.lost
            raise UsageError(f"{place} says that {done}, but not where to find them from here.", advice)
        others[name] = paths
    return Manifest(place, members, members["kind"], members["source"]["family"], recorded, others)


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


def _options_of(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's options as values for `Options`."""
    values = {name: tuple(value) if type(value) is list else value for name, value in members["options"].items()}
    values |= {way.options[0]: NONE for way in COMPUTED.values() if way.remark and members.get(way.members[0]) == {}}
    return {**values, "rename": Rules(values["rename"])} if "rename" in values else values


# ------------------------------------------------------------------------------------------------- checks of manifests


class FoundFile(NamedTuple):
    """A file of an output: its `size` as planned, the `place` where it is read, the ranges of its tensors, and their
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
    members = manifest.members
    for name in sorted(members["files"].keys() | files.keys()):
        entry, file = members["files"].get(name), files.get(name)
        known = {tensor for *_, tensor in file.ranges} if file else set()
        if not (entry and file) or entry["size"] != file.size or entry["tensors"].keys() != known:
            raise _not_so(manifest, f"the file {name}", None if entry is None else f"{entry['size']} bytes")
        for tensor, crc in entry["tensors"].items():
            if crc is not None and int(crc, 16) != file.crcs.get(tensor):
                raise _not_so(manifest, f"the checksum of {tensor!r} in {name}", crc)
    # A conversion computes checksums for all tensors or for none, and for all if it does for one of several files.
    crcs = [crc for entry in members["files"].values() for crc in entry["tensors"].values()]
    if None in crcs and (any(crcs) or sum(bool(entry["tensors"]) for entry in members["files"].values()) > 1):
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
    version, options = manifest.members["ckptconv"], manifest.members["options"]
    return heading(source, target, options, target.holds, files, aliases, record, version)


def check_safetensors(
    manifest: Manifest,
    source: Source,
    target: Target,
    written: Written,
    record: Mapping[str, Any],
    known: Callable[[str], Mapping[str, int]],
) -> list[str]:
    """Check the manifest of safetensors; `record` is the record of their selection, and `known` returns the CRC-32 of
    the tensors in the file of a path, as far as they were computed."""
    ranges: dict[str, list[NamedRange]] = {file.path: [] for file in written.files}
    for name, tensor in written.tensors.items():
        ranges[written.homes[name]].append((getattr(tensor, "offset", 0), tensor.nbytes, name))
    literals = {file.path: _literal(manifest.place.at(file.path)) for file in written.files}
    files = {
        # The index was compared by content, so take its size as planned, not as found.
        basename(path): FoundFile(
            len(literals[path]) if path.endswith(INDEX_SUFFIX) else size,
            manifest.place.at(path),
            ranges[path],
            known(path),
        )
        for path, size, *_ in written.files
    }

    def planned_heading() -> dict[str, Any]:
        headers = {basename(path): literal for path, literal in literals.items()}
        plans = [FilePlan(name, files[name].size, (Literal(0, headers[name]),)) for name in manifest.members["files"]]
        return _heading(manifest, source, target, plans, written.aliases, record)

    return check(manifest, source, files, planned_heading)


def check_planned(manifest: Manifest, source: Source, target: Target, where: Mapping[str, str]) -> list[str]:
    """Check the manifest of files for `torch.load`. `where` maps the name of each to the path at which it is read.

    Their plans are computed anew: reading such a file does not give its layout.
    """
    members = manifest.members
    examples = {name: next(iter(entry["tensors"]), "") for name, entry in members["files"].items()}
    files = {name: _members(manifest.place.at(path), examples.get(name, "")) for name, path in where.items()}

    def planned_heading() -> Mapping[str, Any]:
        expected = planned(source, target, Options(**_options_of(members))).heading
        if members["ckptconv"] == __version__:
            return expected
        # This is the plan of the current release: another release gave the same output another id.
        return {**expected, "plan": "" if expected["plan"] == members["plan"] else members["plan"]}

    return check(manifest, source, files, planned_heading)


def check_compared(manifest: Manifest, source: Source, target: Target, compared: Compared) -> list[str]:
    """Check the manifest of an output whose files are as planned. `compared` has them."""
    data = {plan.name: [part for part in plan.parts if isinstance(part, Data)] for plan in compared.plans}
    ranges = {name: [(part.offset, part.nbytes, part.name) for part in parts] for name, parts in data.items()}
    files = {
        plan.name: FoundFile(plan.size, compared.where[plan.name], ranges[plan.name], compared.crcs.get(plan.name, {}))
        for plan in compared.plans
    }
    of = compared.plans, compared.aliases, compared.record
    return check(manifest, source, files, lambda: _heading(manifest, source, target, *of))


def _check_digests(manifest: Manifest, files: Mapping[str, FoundFile]) -> None:
    """Raise DifferenceError if a digest in the manifest, of a file or a tensor, is wrong. Each file is read once."""
    algorithm: str = manifest.members.get("digest", "")
    for name, entry in manifest.members["files"].items() if algorithm else ():
        with contextlib.closing(files[name].place.open_reader()) as reader:
            computed = digests_of(reader.read_at, reader.file.size, files[name].ranges, algorithm)
        stated = entry["digests"]
        wrong = [tensor for tensor, digest in stated["tensors"].items() if computed.tensors.get(tensor) != digest]
        if wrong or computed.file != stated["file"]:
            label = f"{wrong[0]!r} in {name}" if wrong else name
            digest = stated["tensors"][wrong[0]] if wrong else stated["file"]
            raise _not_so(manifest, f"the {algorithm} of {label}", digest)


def _check_inputs(manifest: Manifest, source: Source) -> str:
    """Return the first input that may be unchanged, but has another time of change; "" if there is none. Raise
    DifferenceError for an input that is another."""
    stated = manifest.members["source"]["inputs"]
    place, known = manifest.place.at(source.path), {name: identity(version) for name, version in source.inputs.items()}
    unsure = [name for name in sorted(known.keys() | stated.keys()) if known.get(name) != stated.get(name)]
    for name in unsure:
        if name not in stated or not _may_be(place, source.inputs, name, stated[name]):
            raise _not_so(manifest, f"the input {name}", stated.get(name))
    return unsure[0] if unsure else ""


# Names of members of a heading in messages.
_CALLED = {
    "kind": "the kind of output",
    "aliases": "tied names",
    "like": "its reference",
    "plan": "its plan or options",
    "model_rank": "its source's rank",
    **{name: f"its source's {name}" for name in ("format", "family")},
}


def _check_heading(manifest: Manifest, want: Mapping[str, Any], is_sure: bool) -> None:
    """Raise DifferenceError if a member of the heading differs from `want`. The plan is compared last: it depends on
    the release and the options. Inputs and digests have been compared; another release may record less, or more."""
    stated, is_ours = _members_of(manifest.members), manifest.members["ckptconv"] == __version__
    want = _members_of(want)
    names = stated.keys() | want.keys() if is_ours else stated.keys() & want.keys()
    for name in sorted(names, key=lambda name: (name == "plan", name)):
        if not _is_so(stated.get(name), want.get(name)) and (is_sure or name != "plan"):
            raise _not_so(manifest, _CALLED.get(name, f"its {name}"), stated.get(name))


def _members_of(heading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a heading that are compared, with those of its source among them."""
    apart = ("ckptconv", "options", "files", "digest", "source", "inputs")
    return {name: value for name, value in {**heading, **heading["source"]}.items() if name not in apart}


def _is_so(have: Any, want: Any) -> bool:
    """Whether the value in a manifest is the wanted one. The place of a file may have changed since."""
    if isinstance(want, Elsewhere):
        return isinstance(have, str)
    if isinstance(want, dict):
        return (
            isinstance(have, dict) and have.keys() == want.keys() and all(_is_so(have[key], want[key]) for key in want)
        )
    if isinstance(want, list):
        return isinstance(have, list) and len(have) == len(want) and all(map(_is_so, have, want))
    return bool(have == want)


def _may_be(source: Location, inputs: Mapping[str, Hashable], name: str, stated: Mapping[str, Any]) -> bool:
    """Whether an input may be unchanged though its modification time differs: the time identifies only files without
    checksums of their own. An input that was not read now may have been read then."""
    version = inputs.get(name)
    if version is None:
        entries = (place.join(name).entry for place in (source, source.parent))
        return any(entry.kind == "file" and entry.file.size == stated["size"] for entry in entries)
    content = content_of(version)
    by_time = isinstance(content, tuple) and any(isinstance(fact, str) for fact in content)
    return by_time and identity(version)["size"] == stated["size"]


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


def _not_so(manifest: Manifest, label: str, stated: Any) -> DifferenceError:
    return DifferenceError(
        f"{manifest.place} does not belong to this output: {label} in it is wrong.",
        STALE,
        what="manifest",
        file=manifest.place.path,
        found=stated,
    )

"""Check that what a manifest says of a source and an output is true; verification trusts none of it.

A manifest's options are taken as the conversion's, unless others are given. They must be true as well: the plan id,
which is computed anew, depends on everything that decides an output.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import CorruptError, DifferenceError, UsageError
from ckptconv.formats.companions import is_companion_name
from ckptconv.formats.model_files import INDEX_SUFFIX, SUFFIX
from ckptconv.formats.source import Source
from ckptconv.options.kinds import Rules
from ckptconv.options.table import NO_MAP, OPTIONS, Options
from ckptconv.outputs.computed import COMPUTED, command_of, ways_in, ways_of
from ckptconv.outputs.schema import check_manifest, parse_json
from ckptconv.outputs.targets import Target, seen_path
from ckptconv.plan import Data, FilePlan, Literal, content_of, identify, identity
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.archive import Archive
from ckptconv.storage.digests import NamedRange, digests_of
from ckptconv.storage.files import Reader
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, is_remote
from ckptconv.structure.record import FILE_NAME
from ckptconv.tensors.lazy import Stored
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
_YOURSELF = "Give the options of the conversion yourself."


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
        message = f"{place} is no sound manifest: {error}."
        raise DifferenceError(message, AGAIN, what="manifest", file=place.path) from error
    known = asked.recorded()
    for name, value in told["options"].items():
        if not _is_option(name, value) and (name not in known or known[name] != value):
            raise UsageError(
                f"{place} says that the conversion had the option {name!r}: {str(value)[:100]!r}, which is not known.",
                _YOURSELF,
            )
    given = {name: value for name, value in _options_of(told).items() if name not in _IGNORED}
    if "like" in told:
        given["like"] = _reference(told["like"], output)
    others: dict[str, tuple[str | None, ...]] = {}
    for name, way in ways_in(told).items():
        if way.again is None:
            continue
        paths = tuple(None if path is None else _reference(path, output) for path in way.again.paths(told))
        if "" in paths or len(paths) > _MOST_OTHERS:
            done, advice = way.again.lost
            raise UsageError(f"{place} says that {done}, and not where they are found from here.", advice)
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
    if told.get("map") == {}:
        made["map"] = NO_MAP
    return {**made, "rename": Rules(made["rename"])} if "rename" in made else made


# --------------------------------------------------------------------------------------------- what it is checked with


def check_safetensors(
    manifest: Manifest,
    source: Source,
    inputs: Mapping[str, Hashable],
    holds: str,
    found: Written,
) -> list[str]:
    """Return warnings. Raise DifferenceError if the manifest is wrong about `source` or its output; checksums are not
    checked.

    `inputs` are the source's as they were when this output was planned: reading more of a source adds to them.
    """
    names: dict[str, set[str]] = {basename(file.path): set() for file in found.files}
    for name, home in found.homes.items():
        names[basename(home)].add(name)
    literals = {basename(file.path): _literal(manifest.place.at(file.path)) for file in found.files}
    # The index was compared by content, so take its size as planned, not as found.
    sizes = {basename(file.path): file.size for file in found.files}
    sizes.update({name: len(data) for name, data in literals.items() if name.endswith(INDEX_SUFFIX)})
    told = manifest.told
    for name in sorted(told["files"].keys() | sizes.keys()):
        _check_file(manifest, name, sizes.get(name), names.get(name, set()))
    if told["aliases"] != found.aliases:
        raise _not_so(manifest, "tied names", told["aliases"])
    ranges: dict[str, list[NamedRange]] = {}
    for name, tensor in found.tensors.items():
        offset = tensor.offset if isinstance(tensor, Stored) else 0
        ranges.setdefault(basename(found.homes[name]), []).append((offset, tensor.nbytes, name))
    check_digests(manifest, {basename(file.path): manifest.place.at(file.path) for file in found.files}, ranges)

    def plan_id() -> str:
        files = [FilePlan(name, told["files"][name]["size"], (Literal(0, literals[name]),)) for name in told["files"]]
        plan_id = identify(files, inputs, (told["ckptconv"], told["kind"], source.model_rank, told["options"]))
        for way in ways_of(source):
            plan_id = way.identified(files, source, plan_id)
        return plan_id

    return _check_source(manifest, source, inputs, holds, plan_id)


def check_planned(
    manifest: Manifest,
    source: Source,
    inputs: Mapping[str, Hashable],
    holds: str,
    path: str,
    files: Mapping[str, str],
) -> list[str]:
    """Check the manifest of files for `torch.load` likewise, with checksums. `files` maps each name to where it is
    read.

    Their plans are computed anew: reading such a file does not give its layout.
    """
    for name in sorted(manifest.told["files"].keys() | files.keys()):
        entry = manifest.told["files"].get(name)
        if entry is None or name not in files:
            raise _not_so(manifest, f"the file {name}", None)
        place = manifest.place.at(files[name])
        crcs = _members(place, next(iter(entry["tensors"]), ""))
        _check_file(manifest, name, place.entry.file.size, set(crcs))
        check_checksums(manifest, name, crcs)
    if "digest" in manifest.told:
        places = {name: manifest.place.at(where) for name, where in files.items()}
        examples = {name: next(iter(entry["tensors"]), "") for name, entry in manifest.told["files"].items()}
        check_digests(manifest, places, {name: _ranges(places[name], each) for name, each in examples.items()})
    if manifest.told["aliases"]:
        raise _not_so(manifest, "tied names", manifest.told["aliases"])
    if name := command_of(manifest.others):
        raise _not_so(manifest, f"`ckptconv {name}`", None)

    def plan_id() -> str:
        from ckptconv.outputs.planning import planned

        target = Target(path, "universal" if holds == "universal" else "torch")
        as_it_was = source._replace(inputs=dict(inputs))
        found = planned(as_it_was, target, Options(**_options_of(manifest.told))).plan.plan_id
        if manifest.told["ckptconv"] == __version__:
            return found
        # This is the plan of the current release: another release gave the same output another id.
        return "" if found == manifest.told["plan"] else manifest.told["plan"]

    return _check_source(manifest, source, inputs, holds, plan_id)


def check_compared(
    manifest: Manifest, source: Source, inputs: Mapping[str, Hashable], holds: str, found: Compared
) -> list[str]:
    """Check the manifest of an output whose files are as planned likewise."""
    for name in sorted(manifest.told["files"].keys() | found.where.keys()):
        plan = next((plan for plan in found.plans if plan.name == name), None)
        parts = {part.name for part in plan.parts if isinstance(part, Data)} if plan else set()
        _check_file(manifest, name, plan.size if plan else None, parts)
        check_checksums(manifest, name, found.crcs.get(name, {}))
    data = {plan.name: [part for part in plan.parts if isinstance(part, Data)] for plan in found.plans}
    ranges = {name: [(part.offset, part.nbytes, part.name) for part in parts] for name, parts in data.items()}
    check_digests(manifest, found.where, ranges)
    if manifest.told["aliases"]:
        raise _not_so(manifest, "tied names", manifest.told["aliases"])

    def plan_id() -> str:
        settings = manifest.told["ckptconv"], manifest.told["kind"], source.model_rank, manifest.told["options"]
        return identify(found.plans, inputs, settings)

    return _check_source(manifest, source, inputs, holds, plan_id)


def check_checksums(manifest: Manifest, file: str, crcs: Mapping[str, int]) -> None:
    """Raise DifferenceError if a CRC-32 in the manifest for a tensor of `file` is not that in `crcs`."""
    for name, crc in manifest.told["files"][file]["tensors"].items():
        if crc is not None and int(crc, 16) != crcs.get(name):
            raise _not_so(manifest, f"the checksum of {name!r} in {file}", crc)


def check_digests(
    manifest: Manifest, places: Mapping[str, Location], ranges: Mapping[str, Iterable[NamedRange]]
) -> None:
    """Raise DifferenceError if a digest in the manifest, of a file or of a tensor, is not so.

    `places` are where the files are read, by name, and `ranges` where each has which tensors. Every file is read once.
    """
    algorithm: str = manifest.told.get("digest", "")
    for name, entry in manifest.told["files"].items() if algorithm else ():
        with contextlib.closing(places[name].open_reader()) as reader:
            found = digests_of(reader.read_at, reader.file.size, ranges.get(name, ()), algorithm)
        told = entry["digests"]
        wrong = [tensor for tensor, digest in told["tensors"].items() if found.tensors.get(tensor) != digest]
        if wrong or found.file != told["file"]:
            what = f"{wrong[0]!r} in {name}" if wrong else name
            raise _not_so(manifest, f"the {algorithm} of {what}", told["tensors"][wrong[0]] if wrong else told["file"])


def has_checksum(manifest: Manifest | None, file: str, name: str) -> bool:
    """Return whether a manifest has a CRC-32 for the tensor `name` in `file`."""
    entry = manifest.told["files"].get(file) if manifest else None
    return bool(entry and entry["tensors"].get(name) is not None)


def _check_file(manifest: Manifest, name: str, size: int | None, tensors: set[str]) -> None:
    entry = manifest.told["files"].get(name)
    if entry is None or entry["size"] != size or entry["tensors"].keys() != tensors:
        raise _not_so(manifest, f"the file {name}", None if entry is None else f"{entry['size']} bytes")


def _check_source(
    manifest: Manifest,
    source: Source,
    inputs: Mapping[str, Hashable],
    holds: str,
    plan_id: Callable[[], str],
) -> list[str]:
    told, files = manifest.told["source"], manifest.told["files"].values()
    # A conversion computes checksums for all tensors or for none, and for all if it does for one of several files.
    crcs = [crc for entry in files for crc in entry["tensors"].values()]
    if None in crcs and (any(crcs) or sum(bool(entry["tensors"]) for entry in files) > 1):
        raise _not_so(manifest, "the checksums", None)
    if ("like" in manifest.told) != bool(holds == "weights" and source.reference):
        raise _not_so(manifest, "its reference", manifest.told.get("like"))
    if command_of(manifest.others) != command_of(source.computed):
        raise _not_so(manifest, f"`ckptconv {command_of(manifest.others) or command_of(source.computed)}`", None)
    if manifest.kind != holds:
        raise _not_so(manifest, "the kind of output", manifest.kind)
    for what, one in (("format", source.format), ("family", source.family), ("model_rank", source.model_rank)):
        if told.get(what) != one:
            raise _not_so(manifest, f"its source's {what.replace('model_', '')}", told.get(what))
    place, known = manifest.place.at(source.path), {name: identity(found) for name, found in inputs.items()}
    unsure: list[str] = []
    for name in sorted(known.keys() | told["inputs"].keys()):
        if known.get(name) == told["inputs"].get(name):
            continue
        if name not in told["inputs"] or not _may_be(place, inputs, name, told["inputs"][name]):
            raise _not_so(manifest, f"the input {name}", told["inputs"].get(name))
        unsure.append(name)
    if unsure:
        since = f"{manifest.place} was written when {unsure[0]} had another time of change"
        return [f"{since}: what it says of its plan cannot be checked."]
    if plan_id() != manifest.told["plan"]:
        raise _not_so(manifest, "its plan or options", manifest.told["plan"])
    return []


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


def _members(place: Location, example: str) -> dict[str, int]:
    """Return the CRC-32 of each "tensor" that a manifest lists for a torch file: its storages by the names of their zip
    records, or, for a file copied whole, the file."""
    if example and "/" not in example:
        with place.open_reader() as reader:
            crc = 0
            for at in range(0, reader.file.size, BLOCK):
                crc = zlib.crc32(reader.read_at(at, min(BLOCK, reader.file.size - at)), crc)
        return {place.name: crc}
    with contextlib.closing(place.open_reader()) as reader:
        archive = _archive(reader)
        return {} if archive is None else {name: archive.crcs[row] for name, row in _storages(archive)}


def _ranges(place: Location, example: str) -> list[NamedRange]:
    """Return where a torch file has the "tensors" that `_members` gives."""
    with contextlib.closing(place.open_reader()) as reader:
        archive = None if example and "/" not in example else _archive(reader)
        if archive is None:
            return [(0, reader.file.size, place.name)]
        archive.locate_all()
        return [(archive.payloads[row], archive.sizes[row], name) for name, row in _storages(archive)]


def _archive(reader: Reader) -> Archive | None:
    """Return a zip archive; None for another file."""
    head = reader.read_at(0, min(len(LOCAL_SIGNATURE), reader.file.size))
    return Archive(reader) if head == LOCAL_SIGNATURE else None


def _storages(archive: Archive) -> Iterator[tuple[str, int]]:
    """Yield the name and row of each storage that is not empty."""
    return ((name, row) for name, row in archive.rows.items() if archive.sizes[row] and "/data/" in name)


def _not_so(manifest: Manifest, what: str, told: Any) -> DifferenceError:
    return DifferenceError(
        f"{manifest.place} is not of this output: what it says of {what} is not so.",
        STALE,
        what="manifest",
        file=manifest.place.path,
        found=told,
    )

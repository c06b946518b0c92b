"""Check that the statements of a manifest about a source and an output are true; verification trusts none of them.

A manifest's options are taken as the conversion's, unless others are given. They must be true as well: the plan id,
which is computed anew, depends on everything that decides an output.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, DifferenceError, UsageError
from ckptconv.features.verify import AGAIN, STALE
from ckptconv.features.verify.planned import Compared
from ckptconv.formats.model_files import INDEX_SUFFIX, SUFFIX
from ckptconv.formats.source import Source
from ckptconv.options.kinds import Rules
from ckptconv.options.registered import missing
from ckptconv.options.table import NONE, OPTIONS, Options
from ckptconv.outputs.computed import COMPUTED, Elsewhere, ways_in
from ckptconv.outputs.planning import heading
from ckptconv.outputs.schema import check_manifest, parse_json
from ckptconv.outputs.targets import MANIFEST, Target, seen_path
from ckptconv.plan import Data, FilePlan, content_of, identity
from ckptconv.storage.digests import digests_of
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.text import some
from ckptconv.version import __version__

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
_YOURSELF = "Specify the options of the conversion on the command line."


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
                f"{place} records the option {name!r}, which requires the feature {feature}.",
                "Use an installation with this feature.",
            )
        if not _is_option(name, value) and (name not in known or known[name] != value):
            raise UsageError(
                f"{place} records an unknown option or value: {name!r} = {str(value)[:100]!r}.",
                _YOURSELF,
            )
    recorded = {name: value for name, value in options_of(members).items() if name not in _IGNORED}
    for way in ways_in(members).values():
        recorded.update(way.asked(members, lambda path: _reference(path, output)))
    others: dict[str, tuple[str | None, ...]] = {}
    for name, way in ways_in(members).items():
        if way.again is None:
            continue
        paths = tuple(None if path is None else _reference(path, output) for path in way.again.paths(members))
        if "" in paths or len(paths) > _MOST_OTHERS:
            done, advice = way.again.lost
            raise UsageError(f"{place} records that {done}, but no usable path to them.", advice)
        others[name] = paths
    return Manifest(place, members, members["kind"], members["source"]["family"], recorded, others)


def check_no_manifest(place: Location, options: Options, hint: str) -> None:
    """Raise UsageError, with `hint`, if a manifest is at `place`, where a checkpoint is expected."""
    with contextlib.suppress(DifferenceError):  # it is no manifest
        if read_manifest(place, options):
            raise UsageError(f"{place} is a manifest, not a checkpoint.", hint)


def swapped(source: str, output: str, options: Options) -> str:
    """Return advice if the manifest of `source` says that it was converted from such files as `output`; else ""."""
    with contextlib.suppress(CkptconvError):
        known = dict(options.storage_options)
        manifest, place = read_manifest(Location(source, known).join(MANIFEST), options), Location(output, known)
        inputs = manifest.members["source"]["inputs"] if manifest else {}
        inside = place.parent if place.kind == "file" else place
        entries = {name: inside.join(name).entry for name in inputs}
        if inputs and all(
            entry.kind == "file" and entry.file.size == inputs[name]["size"] for name, entry in entries.items()
        ):
            is_from = f"By its manifest, {source} was converted from files of these names and sizes."
            return f"{is_from} If it is the output: ckptconv verify {shlex.join([output, source])}"
    return ""


def not_stated(place: Location, stated: Collection[str]) -> Iterator[str]:
    """Yield a warning about files in the directory of an output that are not `stated`, as its manifest's are. Raise
    DifferenceError for those that programs may load with it."""
    entries = {name.partition("/")[0] for name in stated}
    others = [name for name in place.names if name not in entries and not name.startswith(HIDDEN)]
    loaded = [name for name in others if name.endswith((SUFFIX, INDEX_SUFFIX))]
    if loaded:
        raise DifferenceError(
            f"{place} contains {some(loaded, 3, str)}, which its manifest does not list.",
            "Remove these files: programs may load them instead of the output, or in addition.",
            what="file",
            file=place.join(loaded[0]).path,
        )
    if others:
        yield f"{place} also contains {some(others, 3, str)}, which its manifest does not list: not compared."


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


def options_of(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's options as values for `Options`."""
    values = {name: tuple(value) if type(value) is list else value for name, value in members["options"].items()}
    values |= {way.options[0]: NONE for way in COMPUTED.values() if way.remark and members.get(way.members[0]) == {}}
    return {**values, "rename": Rules(values["rename"])} if "rename" in values else values


# ------------------------------------------------------------------------------------------------- checks of manifests


def check(
    manifest: Manifest,
    source: Source,
    target: Target,
    output: Compared,
    heading_again: Callable[[], Mapping[str, Any]] | None = None,
) -> list[str]:
    """Return warnings. Raise DifferenceError if the manifest is wrong about `source` or its `output` at `target`.

    The inputs of `source` are as they were when this output was planned: reading more of it adds to them.
    `heading_again` returns the heading of the manifest that its plan has, if the files of `output` do not tell it.
    """
    members = manifest.members
    plans = {plan.name: plan for plan in output.plans}
    for name in sorted(members["files"].keys() | plans.keys()):
        entry, plan = members["files"].get(name), plans.get(name)
        tensors = {part.name for part in _data(plan)} if plan else set()
        if not (entry and plan) or entry["size"] != plan.size or entry["tensors"].keys() != tensors:
            raise _not_so(manifest, f"the file {name}", None if entry is None else f"{entry['size']} bytes")
        for tensor, crc in entry["tensors"].items():
            if crc is not None and int(crc, 16) != output.crcs.get(name, {}).get(tensor):
                raise _not_so(manifest, f"the checksum of {tensor!r} in {name}", crc)
    # A conversion computes checksums for all tensors or for none, and for all if it does for one of several files.
    crcs = [crc for entry in members["files"].values() for crc in entry["tensors"].values()]
    if None in crcs and (any(crcs) or sum(bool(entry["tensors"]) for entry in members["files"].values()) > 1):
        raise _not_so(manifest, "the checksums", None)
    _check_digests(manifest, plans, output.where)
    unsure = _check_inputs(manifest, source)
    if heading_again:
        expected = heading_again()
    else:
        of = output.plans, output.aliases, output.record, members["ckptconv"]
        expected = heading(source, target, members["options"], target.holds, *of)
    _check_heading(manifest, expected, is_sure=not unsure)
    if unsure:
        since = f"{manifest.place} records another modification time of {_shown(unsure)}"
        return [f"{since}: the tensors are equal, but whether this version of the file was converted is unknown."]
    return []


@contextlib.contextmanager
def noting_changes(outputs: Iterable[tuple[Source, Manifest, Options]]) -> Iterator[None]:
    """Add to an error about an output that its source has changed since, if the manifest shows it. `outputs` are a
    source, the manifest of its output, and the options with which they are compared."""
    try:
        yield
    except DifferenceError as error:
        for source, manifest, options in outputs:
            if changed := list(_changed(source, manifest, options)):
                error.message += f" {manifest.place} records another version of {some(changed, 3, str)}."
        raise


def _changed(source: Source, manifest: Manifest, options: Options) -> Iterator[str]:
    """Yield the inputs, as messages show them, that have certainly changed since the manifest was written. Checksums
    may be those of the parts that were read, so they are comparable only if the same parts were."""
    stated = manifest.members["source"]["inputs"]
    same_parts = options.recorded() == manifest.members["options"]
    for name, version in sorted(stated.items()):
        known = [inputs[name] for inputs in (source.all_inputs(), source.inputs_of_all) if name in inputs]
        same_size = any(identity(other)["size"] == version["size"] for other in known)
        comparable = same_parts or not same_size or any(map(_is_by_time, known))
        if known and comparable and version not in map(identity, known):
            yield _shown(name)


def _shown(name: str) -> str:
    """Return an input's name in a manifest for a message: `--adapter/0/config.json` is that of a further checkpoint."""
    option, _, rest = name.partition("/") if name.startswith("--") else ("", "", name)
    number, _, file = rest.partition("/") if option else ("", "", rest)
    if number.isdecimal() and file:
        return f"{file} of further checkpoint {int(number) + 1}"
    return f"{rest} of the checkpoint of {option}" if option else name


def _data(plan: FilePlan) -> Iterator[Data]:
    return (part for part in plan.parts if isinstance(part, Data))


def _check_digests(manifest: Manifest, plans: Mapping[str, FilePlan], where: Mapping[str, Location]) -> None:
    """Raise DifferenceError if a digest in the manifest, of a file or a tensor, is wrong. Each file is read once."""
    algorithm: str = manifest.members.get("digest", "")
    for name, entry in manifest.members["files"].items() if algorithm else ():
        ranges = [(part.offset, part.nbytes, part.name) for part in _data(plans[name])]
        with contextlib.closing(where[name].open_reader()) as reader:
            computed = digests_of(reader.read_at, reader.file.size, ranges, algorithm)
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
    if stated and known.keys().isdisjoint(stated):
        names = some([_shown(name) for name in stated], 3, str)
        raise DifferenceError(
            f"{manifest.place} records that this output was converted from {names}, which is not in {source.path}.",
            "Specify the source first, then the output: ckptconv verify SOURCE OUTPUT.",
            what="manifest",
            file=manifest.place.path,
        )
    unsure = [name for name in sorted(known.keys() | stated.keys()) if known.get(name) != stated.get(name)]
    for name in unsure:
        if name not in stated or not _may_be(place, source.inputs, name, stated[name]):
            raise _not_so(manifest, f"the input {_shown(name)}", stated.get(name))
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
    """Return whether the value in a manifest equals the wanted one. The place of a file may have changed since."""
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
    """Return whether an input may be unchanged although its modification time differs: the time identifies only files
    without checksums of their own. An input that was not read now may have been read then."""
    version = inputs.get(name)
    if version is None:
        entries = (place.join(name).entry for place in (source, source.parent))
        return any(entry.kind == "file" and entry.file.size == stated["size"] for entry in entries)
    return _is_by_time(version) and identity(version)["size"] == stated["size"]


def _is_by_time(version: Hashable) -> bool:
    """Return whether the modification time identifies an input, not checksums."""
    content = content_of(version)
    return isinstance(content, tuple) and any(isinstance(fact, str) for fact in content)


def _not_so(manifest: Manifest, label: str, stated: Any) -> DifferenceError:
    return DifferenceError(
        f"{manifest.place} does not match this output: mismatch in {label}.",
        STALE,
        what="manifest",
        file=manifest.place.path,
        found=stated,
    )

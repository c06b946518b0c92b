"""Virtual checkpoints: safetensors files that are described and not written. `docs/virtual.md` has the format.

A description is a JSON object: the files with their headers, and for each tensor the expression of its bytes by ranges
of other files. `document` writes it, `load` reads it as plans of files, `read` as a checkpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import CorruptError, UnsafeError, UnsupportedError, UsageError
from ckptconv.formats.format import CERTAIN, POSSIBLE, Guess, Probe
from ckptconv.storage import strict_json
from ckptconv.storage.files import is_held
from ckptconv.storage.inside import check_inside, leads_out
from ckptconv.storage.location import Location
from ckptconv.storage.packed import check_ratio, unpacking
from ckptconv.storage.paths import dirname, is_quoted, is_remote, join
from ckptconv.storage.reading import Entry
from ckptconv.storage.strict_json import count_of, list_of, object_of, text_of
from ckptconv.tensors.moves import File, Packed

if TYPE_CHECKING:
    from ckptconv.features.virtual.expressions import Decoder
    from ckptconv.formats.source import Source, Wanted
    from ckptconv.plan import FilePlan
    from ckptconv.tensors.lazy import LazyTensor

SUFFIX = ".virtual.json"
VERSION = 1
# The first member, which has the version of the format.
_MARK = "ckptconv.virtual"
BEGINNING = f'{{"{_MARK}"'.encode()
_GUESS = Guess(CERTAIN, "a virtual checkpoint", "virtual {} OUTPUT.virtual.json", also=("torch", "deepspeed", "dcp"))
# The root of files below the directory of the description; the prefix of the root of files in a directory next to it.
_HERE, _BESIDE = ".", "../"
# Stores of fsspec inside other stores, which such a URL does not name.
_WITHIN = frozenset(
    {"blockcache", "cached", "dir", "filecache", "libarchive", "reference", "simplecache", "tar", "zip"}
)
# If there are more sources than this in a remote directory, it is listed once.
_FEW = 4
# The most times that a source is packed; and the most bytes that a delta overwrites, which are mostly zeros: two for
# each byte of a tensor, because no delta overwrites larger ones.
_MOST_PACKED, _MOST_OVERWRITTEN = 3, 1 << 33
_MISSING = Entry("missing", File("", 0))


def sniff(probe: Probe) -> Guess | None:
    """Recognize a description by its name, or by its first bytes; or a directory with one and no other checkpoint."""
    if probe.is_file:
        return _GUESS if is_one(probe.place.path, probe.head[0]) else None
    names = [name for name in probe.place.names if name.endswith(SUFFIX)] if probe.is_directory else []
    return _GUESS._replace(sure=POSSIBLE, place=probe.place.join(names[0])) if len(names) == 1 else None


def is_one(path: str, head: bytes) -> bool:
    """Return whether a file that begins with `head` is a description, or has the name of one."""
    return path.endswith(SUFFIX) or head.startswith(BEGINNING)


# ----------------------------------------------------------------------------------------------------------- writing


def document(path: str, files: Sequence[FilePlan], called: str, plan_id: str) -> bytes:
    """Return the description, to be written to `path`, of `files`, which are those of a safetensors output.

    `called` is the format of their source, for people. Sources below the directory of `path` are named relative to it.
    Raise UsageError for a source that cannot be named.
    """
    from ckptconv.features.virtual.expressions import Encoder
    from ckptconv.plan import Data

    encoder = Encoder()
    described = []
    for file in files:
        head, *parts = file.parts
        data = [encoder.encode(part.tensor) for part in parts if isinstance(part, Data)]
        assert len(data) == len(parts)
        raw: bytes = head.data  # type: ignore[union-attr]
        entry: dict[str, Any] = {"name": file.name, "size": file.size}
        if file.name.endswith(".safetensors"):
            described.append({**entry, "header": raw[8:].decode(), "tensors": _Lines(data)})
        else:
            described.append({**entry, "text": raw.decode()})
    roots: dict[str, int] = {}
    indices = {file: number for number, file in enumerate(encoder.files)}
    sources = [_source(path, file, roots, indices) for file in encoder.files]
    whole = {
        _MARK: VERSION,
        "format": called,
        "plan": plan_id,
        "roots": list(roots),
        "sources": _Lines(sources),
        "lists": _Lines(encoder.lists),
        "files": _Lines(described),
    }
    return (_json(whole) + "\n").encode()


class _Lines(list[Any]):
    """A list that is written with a line for each of its items."""


def _json(value: Any) -> str:
    if isinstance(value, _Lines):
        return "[\n" + ",\n".join(map(_json, value)) + "\n]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_json(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _source(path: str, file: File, roots: dict[str, int], indices: dict[File, int]) -> dict[str, Any]:
    """Return the entry of `file` in the description at `path`. Add its directory to `roots`, if it is new."""
    if file.packed:
        within, offset, nbytes, crc, method = file.packed
        packed = {"in": indices[within], "offset": offset, "nbytes": nbytes, "crc": crc, "method": method}
        # For messages: what lies below may be moved.
        name = file.path.removeprefix(f"{os.path.abspath(dirname(path))}/")
        return {**packed, "name": name, "size": file.size}
    if is_held(file.path) or "::" in file.path:
        raise UsageError(
            f"{file.path} cannot be used in a virtual checkpoint, which supports only files and plain URLs.",
            "Copy it to a file, and use that file.",
        )
    root, name = _divided(path, file.path)
    if leads_out(name, root):
        raise UsageError(
            f"{file.path} has a name that a virtual checkpoint cannot contain: {leads_out(name, root)}.",
            "Rename it.",
        )
    return {"root": roots.setdefault(root, len(roots)), "name": name, "size": file.size, "stamp": file.stamp}


def bound(text: str, directory: str, around: str) -> str:
    """Return the description `text`, which is written to `directory`, with relative names for the roots in `around`,
    the directory that contains it: they can be moved together. Both are absolute paths without links."""
    roots = json.loads(text)["roots"]
    named = [f"{_BESIDE}{root[len(around) + 1 :]}" if root.startswith(f"{around}/") else root for root in roots]
    place = Location(os.path.join(directory, SUFFIX))
    kept = [new if _root(place, new) == os.path.realpath(old) else old for old, new in zip(roots, named, strict=True)]
    return text.replace(f'"roots":{_json(roots)}', f'"roots":{_json(kept)}', 1)


def with_record(text: str, record: str) -> str:
    """Return the description `text` with the structure record `record`, or without one for ""."""
    from ckptconv.structure.record import FILE_NAME

    description = json.loads(text)
    files = [file for file in description["files"] if file["name"] != FILE_NAME]
    own = [{"name": FILE_NAME, "size": len(record.encode()), "text": record}] if record else []
    return _json({**description, "files": [*files, *own]})


def _divided(path: str, source: str) -> tuple[str, str]:
    """Return the root and the name of `source` in the description at `path`."""
    base = dirname(path)
    if not is_remote(path):
        base = os.path.abspath(base)
    if not is_remote(source):
        source = os.path.abspath(source)
    if source.startswith(base.rstrip("/") + "/"):
        root, name = _HERE, source[len(base.rstrip("/")) + 1 :]
    elif is_remote(path):
        raise UsageError(
            f"{path} cannot refer to {source}: on a store, a virtual checkpoint can refer only to files below its own "
            "directory.",
            "Write the virtual checkpoint next to the checkpoint, or to a local file.",
        )
    else:
        root = dirname(source)
        name = source[len(root.rstrip("/")) + 1 :]
    if not is_quoted(source):
        return root, name
    from urllib.parse import unquote

    return root, unquote(name)


# ----------------------------------------------------------------------------------------------------------- reading


class VirtualDescription(NamedTuple):
    """A description that was read: the plans of its files, the name of their source's format, the plan id, the
    directories from which it reads, and the identity of the description itself."""

    files: tuple[FilePlan, ...]
    called: str
    plan_id: str
    roots: tuple[str, ...]
    identity: Hashable
    size: int


def load(place: Location, *, look: bool = True) -> VirtualDescription:
    """Read a description, and check that its sources are unchanged since it was made. Without `look`, only the
    description is opened.

    Raise CorruptError for a description that contradicts itself and for a source that has changed, UnsafeError for one
    that names forbidden files, UnsupportedError for an unknown version of the format.
    """
    text = place.read_text(strict_json.MOST)
    try:
        description = object_of(strict_json.parse(text), "it")
        version = description.get(_MARK)
        if type(version) is int and version > VERSION:
            raise UnsupportedError(
                f"{place} is a virtual checkpoint of version {version}, but only versions up to {VERSION} are "
                "supported.",
                "Use a newer version of ckptconv.",
            )
        if version != VERSION:
            raise ValueError(f"it does not begin with {BEGINNING.decode()}: {VERSION}")
        roots = tuple(
            _root(place, text_of(root, "a root")) for root in list_of(description.get("roots"), "its 'roots'")
        )
        sources = _sources(place, roots, list_of(description.get("sources"), "its 'sources'"), look)
        files = _files(place, sources, description)
        called, plan_id = (text_of(description.get(key), f"its {key!r}") for key in ("format", "plan"))
    except ValueError as error:
        raise CorruptError(
            f"{place} is not a valid virtual checkpoint: {error}.", "Write the file again with ckptconv virtual."
        ) from error
    raw = text.encode()
    return VirtualDescription(files, called, plan_id, roots, (len(raw), zlib.crc32(raw)), len(raw))


def read(place: Location, wanted: Wanted) -> Source:
    """Open a virtual checkpoint as the safetensors files that it describes. Raise the errors of `load`."""
    from ckptconv.formats import model_files, safetensors
    from ckptconv.plan import Data, Input
    from ckptconv.structure.record import FILE_NAME, METADATA_KEY

    described = load(place)
    content = safetensors.TensorFiles(place.path, described.size)
    content.inputs[place.name] = Input(place.entry.file, described.identity)
    grouping: dict[str, str] = {}
    for file in described.files:
        raw: bytes = file.parts[0].data  # type: ignore[union-attr]
        content.size += file.size
        if file.name.endswith(model_files.SUFFIX):
            _, metadata = safetensors.described(raw[8:], _within(place, file.name))
            tensors = {part.name: part.tensor for part in file.parts if isinstance(part, Data)}
            content.tensors.update(tensors)
            grouping.update(dict.fromkeys(tensors, file.name))
            content.metadata.update(metadata)
            content.record = metadata.get(METADATA_KEY)
        elif file.name.endswith(model_files.INDEX_SUFFIX):
            content.metadata.update(_index_metadata(place, file.name, raw))
    _keep_apart(content.tensors)
    content.record_path = place.path
    for file in described.files:
        if file.name == FILE_NAME:
            content.record = file.parts[0].data.decode()  # type: ignore[union-attr]
    source = safetensors.source_of(place, content, [], wanted)
    facts = {**source.facts, "files": len(described.files), "reads": ", ".join(described.roots)}
    is_set = len({*grouping.values()}) > 1
    defaults = source.defaults._replace(grouping=grouping if is_set else {})
    return source._replace(format=f"virtual: {described.called}", facts=facts, defaults=defaults)


def _keep_apart(tensors: dict[str, LazyTensor]) -> None:
    """Make each of `tensors` a separate one. Tensors of the same bytes are stored twice in the files, where only an
    alias or a structure record ties tensors."""
    from ckptconv.tensors.lazy import Narrow, View, same_bytes

    seen: set[Hashable] = set()
    for name, tensor in tensors.items():
        key = same_bytes(tensor)
        if key in seen:
            of_one = Narrow(View(tensor, tensor.dtype, (1, *tensor.shape)), 0, 0, 1)
            tensors[name] = View(of_one, tensor.dtype, tensor.shape)
        elif key is not None:
            seen.add(key)


def _index_metadata(place: Location, name: str, raw: bytes) -> dict[str, str]:
    """Return the texts in the metadata of an index: aliases."""
    try:
        index = strict_json.parse(raw.decode())
        metadata = object_of(object_of(index, "it").get("metadata", {}), "its 'metadata'")
    except ValueError as error:
        raise CorruptError(f"{_within(place, name)} is not a valid index: {error}.") from error
    return {key: value for key, value in metadata.items() if type(value) is str}


def _root(place: Location, root: str) -> str:
    """Return the directory that a root names. Raise UnsafeError for a forbidden one."""
    if root == _HERE:
        return place.parent.path
    scheme, colon, after_scheme = root.partition("://")
    server = after_scheme.partition("/")[0]
    why = ""
    if is_remote(place.path):
        why = "on a store, a virtual checkpoint may refer only to its own directory"
    elif not root.isprintable() or "\\" in root or ".." in root.removeprefix(_BESIDE).split("/"):
        why = "it has parts or characters that such a path must not have"
    elif root.startswith(_BESIDE):
        return os.path.normpath(os.path.join(os.path.realpath(place.parent.path), root))
    elif is_remote(root):
        if scheme in _WITHIN or "::" in root or not colon or not server or any(mark in root for mark in "?#"):
            why = "it is not a plain URL"
        elif ":" in server.rpartition("@")[0]:
            why = "it contains a password"
    elif not os.path.isabs(root):
        why = "it is neither a URL, nor an absolute path, nor next to the virtual checkpoint"
    if why:
        raise UnsafeError(
            f"{place} reads from {root[:200]!r}, which is not allowed: {why}. Nothing was read from there.",
            "Do not trust its source.",
        )
    return root


def _sources(place: Location, roots: Sequence[str], entries: list[Any], look: bool) -> list[File]:
    """Return the files that the description reads; with `look`, check that they are unchanged."""
    sources: list[File] = []
    directories: Counter[str] = Counter()
    for item in entries:
        entry = object_of(item, "a source")
        name = text_of(entry.get("name"), "the name of a source")
        size = count_of(entry.get("size"), f"the size of {name[:100]!r}")
        if "in" in entry:
            sources.append(_packed(entry, name, size, sources))
            continue
        root = count_of(entry.get("root"), f"the root of {name[:100]!r}")
        if root >= len(roots):
            raise ValueError(f"a source refers to root {root}, but there are only {len(roots)}, from 0")
        check_inside(name, place.path, roots[root])
        path = join(roots[root], name)
        directories[dirname(path)] += 1
        sources.append(File(path, size, text_of(entry.get("stamp"), f"the stamp of {name[:100]!r}")))
    if not look:
        return sources
    listed = {path: place.at(path) for path, count in directories.items() if count > _FEW and is_remote(path)}
    for file in sources:
        if file.packed is None:
            directory, at = listed.get(dirname(file.path)), place.at(file.path)
            now = directory.names.get(at.name, _MISSING) if directory else at.entry
            _check_unchanged(place, file, now)
    return sources


def _packed(entry: dict[str, Any], name: str, size: int, sources: Sequence[File]) -> File:
    """Return a source that is packed in one of `sources`."""
    index, offset, nbytes = (
        count_of(entry.get(key), f"{key!r} of {name[:100]!r}") for key in ("in", "offset", "nbytes")
    )
    crc, method = entry.get("crc"), text_of(entry.get("method"), f"the method of {name[:100]!r}")
    if index >= len(sources) or _packings_of(sources[index]) >= _MOST_PACKED:
        few = f"a source before it, or is compressed more than {_MOST_PACKED} times"
        raise ValueError(f"{name[:100]!r} does not refer to {few}")
    if crc is not None:
        count_of(crc, f"the checksum of {name[:100]!r}")
    if offset + nbytes > sources[index].size:
        raise ValueError(f"{name[:100]!r} ends at byte {offset + nbytes}, but its file has {sources[index].size} bytes")
    if method == "deflate":
        check_ratio(name, nbytes, size)
    if method == "overwriting" and size > _MOST_OVERWRITTEN:
        raise ValueError(f"{name[:100]!r} has the invalid size {size}")
    if method not in unpacking(name[:100]).UNPACKING:
        raise ValueError(f"{name[:100]!r} uses the unknown compression {method[:100]!r}")
    return File(name, size, "", Packed(sources[index], offset, nbytes, crc, method))


def _packings_of(file: File) -> int:
    return 1 + _packings_of(file.packed.file) if file.packed else 0


def _check_unchanged(place: Location, file: File, now: Entry) -> None:
    if now.kind == "file" and (now.file.size, now.file.stamp) == (file.size, file.stamp):
        return
    if now.kind != "file":
        directory = place.parent.path
        is_below = file.path.startswith(directory if directory in ("", "/") else f"{directory}/")
        raise CorruptError(
            f"{file.path} has changed since {place} was written: it no longer exists."
            + (" The virtual checkpoint was moved without its source, or the source was removed." if is_below else ""),
            f"{'Move the virtual checkpoint back, or move its source next to it' if is_below else 'Restore the file'}; "
            "or write the virtual checkpoint again.",
        )
    present = f"it had {file.size} bytes, but now has {now.file.size}"
    if now.file.size == file.size:
        present = "it is now another version" if is_remote(file.path) else "its modification time is different"
    raise CorruptError(
        f"{file.path} has changed since {place} was written: {present}. Nothing was read from it.",
        "Write the virtual checkpoint again.",
    )


def _files(place: Location, sources: list[File], description: dict[str, Any]) -> tuple[FilePlan, ...]:
    from ckptconv.features.virtual.expressions import Decoder

    decoder = Decoder(sources, description.get("lists"))
    files: dict[str, FilePlan] = {}
    names: set[str] = set()
    for item in list_of(description.get("files"), "its 'files'"):
        file = _file(place, object_of(item, "a file"), decoder)
        tensors = [part.name for part in file.parts[1:]]  # type: ignore[union-attr]
        twice = next(itertools.chain((name for name in tensors if name in names), filter(files.get, [file.name])), None)
        if twice is not None:
            raise ValueError(f"it has {twice[:100]!r} twice")
        names.update(tensors)
        files[file.name] = file
    return tuple(files.values())


def _file(place: Location, entry: dict[str, Any], decoder: Decoder) -> FilePlan:
    """Return the plan of one file. Raise ValueError unless its header, its tensors and its size agree."""
    from ckptconv.formats import model_files, safetensors
    from ckptconv.plan import Data, FilePlan, Literal

    name, size = text_of(entry.get("name"), "the name of a file"), count_of(entry.get("size"), "the size of a file")
    check_inside(name, place.path, "", nested=False)
    if name.endswith(model_files.SUFFIX):
        raw = text_of(entry.get("header"), f"the header of {name[:100]!r}").encode()
        places, _ = safetensors.described(raw, _within(place, name))
        start = 8 + len(raw)
        stored = safetensors.tensors_of(places, File(_within(place, name), size), start)
        tensors = [
            decoder.decode(expression) for expression in list_of(entry.get("tensors"), "the expressions of its tensors")
        ]
        if len(tensors) != len(stored):
            raise ValueError(f"{name} has {len(stored)} tensors in its header, but {len(tensors)} expressions")
        for (key, expected), tensor in zip(stored.items(), tensors, strict=True):
            if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
                raise ValueError(
                    f"{key[:100]!r} is {expected.dtype} {list(expected.shape)} in the header, but its expression "
                    f"yields {tensor.dtype} {list(tensor.shape)}"
                )
        data = [Data(at.offset, tensor, key) for (key, at), tensor in zip(stored.items(), tensors, strict=True)]
        head = len(raw).to_bytes(8, "little") + raw
        return FilePlan(name, size, (Literal(0, head), *data))
    text = text_of(entry.get("text"), f"the text of {name[:100]!r}").encode()
    if len(text) != size:
        raise ValueError(f"{name} has {len(text)} bytes of text; expected {size}")
    return FilePlan(name, size, (Literal(0, text),))


def _within(place: Location, name: str) -> str:
    """Return the name of a described file in messages."""
    return f"{name} in {place}"

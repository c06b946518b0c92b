"""Read safetensors outputs strictly, for verification.

The safetensors library must read the same tensors in a file, and its header must be the exact text that the library
writes: so no byte of a file goes unchecked. The index of a sharded output must match the tensors in its shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeAlias

from ckptconv.errors import CorruptError, DifferenceError, LimitError, UnsafeError, UnsupportedError, UsageError
from ckptconv.features.verify import AGAIN, STALE
from ckptconv.features.verify.planned import Compared
from ckptconv.formats import model_files, safetensors
from ckptconv.formats.model_files import INDEX_SUFFIX, METADATA, SUFFIX
from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.source import MODEL
from ckptconv.formats.weight_map import read_index
from ckptconv.outputs.targets import MANIFEST
from ckptconv.plan import Data, FilePlan, Literal
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, is_remote, join
from ckptconv.structure.record import FILE_NAME, METADATA_KEY
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.tensors.moves import File
from ckptconv.text import brief, some

# The module whose `advice` says how to publish an output that is missing.
UNPUBLISHED: tuple[str, ...] = (
    "ckptconv.features.parts.with_verify",
)  # fmt: skip
# The most bytes of a structure record that are read.
_MAX_RECORD = 1 << 30


# The metadata of each file, by the aliases, {removed: kept}, that the output has.
Stated: TypeAlias = "Callable[[Mapping[str, str]], Mapping[str, str]]"


@dataclass(eq=False, repr=False)
class Written:
    """An output: its files, in order; its tensors by name, in the order of the files; `homes`, the path of each
    tensor's file; its aliases, {removed: kept}; the structure record, and the path of the file that holds it."""

    path: str
    files: list[File] = field(default_factory=list)
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    structure: str | None = None
    structure_path: str = ""


def unpublished(place: Location) -> str:
    """Return advice about an output that is not at `place`, but is made there; else ""."""
    return next(filter(None, (import_module(module).advice(place) for module in UNPUBLISHED)), "")


def read_file(path: str, place: Location, expected: Stated) -> Written:
    """Read an output of one file named `path`, from `place`. Its metadata has the `expected` members, and aliases and
    the record.

    Raise UsageError if the file does not exist, DifferenceError if it is no sound output.
    """
    written = Written(path, structure_path=path)
    metadata = _add(written, path, place, expected)
    written.structure = metadata.pop(METADATA_KEY, None)
    written.aliases = metadata
    return written


def recorded_remark(path: str, place: Location, key: str) -> str | None:
    """Return the remark under `key` in an output of one file; None if it has none, or is no such file.

    Only the metadata is parsed, which the library writes first: the output is checked when it is read.
    """
    entry = place.entry
    if not path.endswith(SUFFIX) or entry.kind != "file":
        return None
    _, raw = _raw_header(path, place.at(entry.file))
    try:
        first: dict[str, Any] = next(strict_json.members(raw), {})
    except ValueError:
        return None
    metadata = first.get(METADATA)
    record = metadata.get(key) if type(metadata) is dict else None
    return record if type(record) is str else None


def read_directory(
    directory: Location,
    expected: Stated,
    *,
    at: Mapping[str, str] | None = None,
    others: frozenset[str] = frozenset(),
    stem: str = MODEL,
) -> Written:
    """Read an output directory: a single file, or shards and their index, whose names begin with `stem`. Each file has
    the metadata `expected`. Raise as `read_file` does.

    `at` maps the names of an output's files to where they are read, if they are not in their place yet. Without it, the
    files of the directory are read, and a safetensors file that belongs neither to the output nor to `others` (paths)
    is a difference.
    """
    path, index, single = directory.path, stem + INDEX_SUFFIX, stem + SUFFIX
    if at is None:
        places = {name: directory.join(name) for name, entry in directory.names.items() if entry.kind == "file"}
    else:
        places = {name: directory.at(where) for name, where in at.items()}
    index_path = join(path, index)
    written = Written(path, structure_path=join(path, FILE_NAME))
    if index in places:
        shards, metadata = _index(index_path, places[index])
    else:
        shards, metadata = {single: frozenset()}, {}
        if single not in places:
            present = [name for name in sorted(places) if name.endswith(SUFFIX)]
            if not present:
                inner = [name for name, entry in directory.names.items() if entry.kind == "directory"]
                outputs = [name for name in inner if directory.child(name).has_file(MANIFEST)]
                named = f"Specify one of the outputs in it: {some(outputs, form=str)}." if outputs else ""
                hint = unpublished(directory) or named or "The order of arguments is: verify SOURCE OUTPUT."
                raise UsageError(f"{path} contains neither {single} nor {index}.", hint)
            fact = f"{path} contains {some(present, 3, str)}, but no {index}."
            raise _file(index_path, fact, "The output is not complete.")
    paths = {name: join(path, name) for name in (*places, *shards)}
    missing = [name for name in shards if name not in places]
    if missing:
        raise _file(paths[missing[0]], f"{path} lacks {some(missing, 3, str)}, which {index_path} lists.", STALE)
    extra = [name for name in sorted(places) if name.endswith((SUFFIX, INDEX_SUFFIX)) and name != index]
    extra = [name for name in extra if name not in shards and paths[name] not in others]
    if extra:
        raise _file(
            paths[extra[0]],
            f"{path} contains files that are not part of the output: {some(extra, 3, str)}.",
            "Remove these files: programs may load them instead of the output, or in addition.",
        )
    for name in sorted(shards):
        remaining = _add(written, paths[name], places[name], expected, metadata)
        if index not in places:
            metadata = remaining
        elif remaining:
            key = next(iter(remaining))
            raise _header(paths[name], f"its metadata has {key!r}, which a conversion does not write")
    if METADATA_KEY in metadata:
        where = index_path if index in places else paths[single]
        raise _header(
            where, f"it contains a structure record, but with several files the record belongs in {FILE_NAME}"
        )
    if index in places:
        _check_index(index_path, written, shards, metadata.pop("total_size", None))
        written.files.append(places[index].entry.file._replace(path=index_path))
    for key, value in metadata.items():
        if type(value) is not str:
            raise _in_index(index_path, f"its metadata has {key!r}: {value!r}, which a conversion does not write")
    written.aliases = metadata
    if FILE_NAME in places:
        try:
            written.structure = places[FILE_NAME].read_text(_MAX_RECORD)
        except CorruptError as error:
            raise _file(written.structure_path, error.message, AGAIN) from error
        written.files.append(places[FILE_NAME].entry.file._replace(path=written.structure_path))
    return written


def as_planned(
    written: Written,
    place: Location,
    names: Iterable[str],
    record: Mapping[str, Any],
    known: Callable[[str], dict[str, int]],
) -> Compared:
    """Return an output, read at `place`, with the plans that its files tell of, those of `names` in this order.

    `record` is the record of their selection, and `known` returns the CRC-32 of the tensors in the file of a path, as
    far as they were computed.
    """
    tensors: dict[str, list[Data]] = {file.path: [] for file in written.files}
    for name, tensor in written.tensors.items():
        tensors[written.homes[name]].append(Data(getattr(tensor, "offset", 0), tensor, name))
    where, plans, crcs = {}, {}, {}
    for path, size, *_ in written.files:
        name = basename(path)
        where[name], crcs[name] = place.at(path), known(path)
        literal = _literal(where[name])
        # The index was compared by content, so take its size as planned, not as found.
        size = len(literal) if path.endswith(INDEX_SUFFIX) else size
        plans[name] = FilePlan(name, size, (Literal(0, literal), *tensors[path]))
    ordered = [plans[name] for name in dict.fromkeys((*names, *plans)) if name in plans]
    return Compared(written.path, len(written.tensors), ordered, where, [], crcs, written.aliases, record)


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
    if place.name == FILE_NAME:
        return data
    index = strict_json.parse(data.decode(), surrogates=True)
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


# -------------------------------------------------------------------------------------------------------- the index


def _index(path: str, place: Location) -> tuple[dict[str, frozenset[str]], dict[str, Any]]:
    """Return the names of tensors by file, and the metadata."""
    try:
        index = read_index(place)
    except (CorruptError, UnsafeError) as error:
        raise _in_index(path, error.message) from error
    if index is None or index.members != {"metadata", "weight_map"}:
        raise _in_index(path, "it does not consist of metadata and a weight_map from tensors to files")
    shards: dict[str, set[str]] = {}
    for tensor, name in index.weight_map.items():
        shards.setdefault(name, set()).add(tensor)
    return {name: frozenset(tensors) for name, tensors in shards.items()}, index.metadata


def _check_index(path: str, written: Written, shards: Mapping[str, frozenset[str]], total: Any) -> None:
    where: dict[str, set[str]] = {name: set() for name in shards}
    for name, home in written.homes.items():
        where[basename(home)].add(name)
    for shard, names in shards.items():
        wrong = sorted(names ^ where[shard])
        if wrong:
            lists = "lists" if wrong[0] in names else "does not list"
            contains = "does not contain" if wrong[0] in names else "contains"
            raise _in_index(path, f"it {lists} {wrong[0]!r} in {shard}, which {contains} it", tensor=wrong[0])
    size = sum(tensor.nbytes for tensor in written.tensors.values())
    if type(total) is not int or total != size:
        raise _in_index(path, f"its total_size is {total!r}, but its files contain {size} bytes of tensors")


# ---------------------------------------------------------------------------------------------------------- a file


def _add(
    written: Written, path: str, place: Location, expected: Stated, indexed: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, str]:
    """Add the file `path`, read from `place`, to `written`; return its metadata without the `expected` members. Aliases
    are in it, or `indexed`."""
    place.check_file(path)
    tensors, metadata = _read_header(path, place.at(place.entry.file))
    if not is_remote(place.path):
        _check_with_library(path, place.path, tensors, metadata)
    for name in tensors:
        if name in written.tensors:
            raise _header(path, f"it contains {name!r}, which {written.homes[name]} also contains", tensor=name)
    written.tensors.update(tensors)
    written.homes.update(dict.fromkeys(tensors, path))
    aliases = indexed or {key: kept for key, kept in metadata.items() if kept in tensors}
    for key, text in expected(aliases).items():
        if metadata.pop(key, None) != text:
            purpose = ", which loaders require" if key == "format" else ""
            raise _header(path, f"its metadata does not set {key} to {brief(text)}{purpose}")
    written.files.append(place.entry.file._replace(path=path))
    return metadata


def _read_header(path: str, place: Location) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors of a file, in the order of their data, and its metadata. Raise DifferenceError unless the text
    of the header is exactly the one that the library writes."""
    file, raw = _raw_header(path, place)
    try:
        places, metadata = safetensors.described(raw, path)
        tensors = safetensors.tensors_of(places, file, 8 + len(raw))
    except (CorruptError, LimitError, UnsupportedError) as error:
        raise DifferenceError(error.message.replace(file.path, path), AGAIN, what="header", file=path) from error
    at = 0
    for piece in _text_of(tensors, metadata, 8 + len(raw)):
        if not raw.startswith(piece, at):
            raise _header(path, f"its header differs near byte {8 + at} from the header that the library writes")
        at += len(piece)
    if len(raw) % 8 or raw[at:] != b" " * (-at % 8):
        raise _header(path, "its header is not padded with spaces to a multiple of eight bytes")
    return tensors, metadata


def _raw_header(path: str, place: Location) -> tuple[File, bytes]:
    """Return a file and the text of its header. Raise DifferenceError if it has none of such a length."""
    with place.open_reader() as reader:
        file = reader.file
        try:
            length = int.from_bytes(reader.read_at(0, min(8, file.size)), "little")
            if file.size < 8 or length > min(file.size - 8, model_files.MAX_HEADER):
                most = f"the file has {file.size} bytes, and a header at most {model_files.MAX_HEADER}"
                raise _header(path, f"its header cannot have {length} bytes: {most}")
            return file, reader.read_at(8, length)
        except CorruptError as error:
            raise DifferenceError(error.message.replace(file.path, path), AGAIN, what="header", file=path) from error


def _text_of(tensors: Mapping[str, Stored], metadata: Mapping[str, str], start: int) -> Iterator[bytes]:
    """Yield, in pieces, the header as the library writes it, compact and in UTF-8; the data begins at byte `start`."""
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    separator = "{"
    # There are many tensors, but few distinct shapes, and json makes an encoder anew for each call.
    kinds: dict[tuple[str | None, tuple[int, ...]], str] = {}
    if metadata:
        yield f"{separator}{encode(METADATA)}:{encode(metadata)}".encode(errors="surrogatepass")
        separator = ","
    for name, tensor in tensors.items():
        begin = tensor.offset - start
        kind = kinds.get((tensor.dtype.code, tensor.shape))
        if kind is None:
            kind = encode({"dtype": tensor.dtype.code, "shape": _stated_shape(tensor)}).removesuffix("}")
            kinds[tensor.dtype.code, tensor.shape] = kind
        entry = f'{kind},"data_offsets":[{begin},{begin + tensor.nbytes}]}}'
        yield f"{separator}{encode(name)}:{entry}".encode(errors="surrogatepass")
        separator = ","
    yield b"}" if separator == "," else b"{}"


def _stated_shape(tensor: LazyTensor) -> list[int]:
    """Return the shape as the library counts it: F4 has two values in a byte, which torch counts as one element."""
    shape = list(tensor.shape)
    return [*shape[:-1], 2 * shape[-1]] if tensor.dtype.code == "F4" and shape else shape


def _check_with_library(path: str, at: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> None:
    """Raise DifferenceError if the safetensors library reads other tensors or metadata in a file than we did."""
    from safetensors import SafetensorError, safe_open

    def is_so(name: str, view: Any) -> bool:
        tensor = tensors.get(name)
        seen = view.get_shape(), view.get_dtype()
        return tensor is not None and (_stated_shape(tensor), tensor.dtype.code) == seen

    try:
        with safe_open(at, framework="numpy") as opened:
            names = opened.keys()
            same = (opened.metadata() or {}) == metadata and len(names) == len(tensors)
            same = same and all(is_so(name, opened.get_slice(name)) for name in names)
    except SafetensorError as error:
        _check_release(path, tensors)
        raise _header(path, f"the safetensors library cannot read it: {error}") from error
    if not same:
        raise _header(path, "the tensors that the safetensors library reads from it differ from its header")


# The releases of the library that were the first to know a dtype, by its code; all know the others.
_KNOWN_SINCE: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("F8_E4M3", "F8_E5M2"), (0, 4, 1)),
    **dict.fromkeys(("F8_E8M0", "F4"), (0, 6, 1)),
    "C64": (0, 7, 0),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), (0, 8, 0)),
}


def _check_release(path: str, tensors: Mapping[str, LazyTensor]) -> None:
    """Raise UnsupportedError if a tensor has a dtype that this release of the safetensors library does not know."""
    import safetensors as library

    release = tuple(int(digits) for digits in re.findall(r"\d+", library.__version__)[:3])
    for name, tensor in tensors.items():
        since = _KNOWN_SINCE.get(tensor.dtype.code or "", ())
        if since > release:
            needed = ".".join(map(str, since))
            raise UnsupportedError(
                f"{path} cannot be verified with safetensors {library.__version__}: {name!r} is {tensor.dtype}, which "
                f"the library supports since {needed}.",
                f"Install safetensors {needed} or later, and verify again.",
            )


# ------------------------------------------------------------------------------------------------------ differences


def _file(path: str, message: str, hint: str) -> DifferenceError:
    return DifferenceError(message, hint, what="file", file=path)


def _in_index(path: str, reason: str, **more: Any) -> DifferenceError:
    return DifferenceError(f"{path} does not describe the output: {reason}.", STALE, what="index", file=path, **more)


def _header(path: str, reason: str, **more: Any) -> DifferenceError:
    return DifferenceError(
        f"{path} differs from the written output: {reason}.", AGAIN, what="header", file=path, **more
    )

"""Reads safetensors files, and sharded sets of them, by their headers. No tensor data is read.

Source: https://huggingface.co/docs/safetensors and `safetensors/src/tensor.rs`. A file is the length of its header (8
bytes, little-endian), the header (a JSON object), and the data. A sharded set has an index that says which file holds
which tensor. If there is a structure record, in the metadata or next to the files, the tree it describes is rebuilt. A
tied name that is stored under another name is restored.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from importlib import import_module
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import (
    AGAIN,
    CkptconvError,
    CorruptError,
    LimitError,
    TruncatedError,
    UnsupportedError,
    UsageError,
    damaged,
)
from ckptconv.formats.model_files import INDEX_SUFFIX, MAX_HEADER, METADATA, SAFETENSORS, SUFFIX
from ckptconv.formats.registered import FOREIGN, NAMINGS, NO_WEIGHTS
from ckptconv.formats.source import STEMS, FileFacts, Source, StoredTensors, Wanted
from ckptconv.formats.weight_map import read_index
from ckptconv.pickles.children import walk
from ckptconv.pickles.nodes import Opaque
from ckptconv.plan import NUMBERED, Input
from ckptconv.process import needed
from ckptconv.storage import strict_json
from ckptconv.storage.ahead import ahead, entries_of
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, is_remote
from ckptconv.storage.reading import Reader
from ckptconv.structure import parted
from ckptconv.structure.reading import claimed_equal
from ckptconv.structure.record import FILE_NAME, METADATA_KEY, RESERVED
from ckptconv.tensors.dtypes import DTYPES_BY_CODE, DType
from ckptconv.tensors.lazy import Equal, LazyTensor, Stored
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import contiguous_strides
from ckptconv.text import quoted, some

# Names of the model in a directory, in the order of preference.
_MODELS = [(stem, suffix) for stem in STEMS for suffix in (INDEX_SUFFIX, SUFFIX)]
# The most tensors. Their descriptions take 1 GiB of memory.
MAX_TENSORS = 1 << 20
# The largest record, in bytes. A record takes some 100 bytes for a tensor, plus its other values.
MAX_RECORD = 1 << 30
# torch's limit.
MAX_DIMS = 64
# The feature that reads structure records: `decoder` in its folder has `unflatten`, which returns the tree of a record.
UNFLATTENING = "unflattening"
# Metadata that is not a user's remark: it describes one output, and another output gets its own.
_OF_THE_OUTPUT = frozenset({"total_size", METADATA_KEY})
# Dtypes with 6-bit elements, which torch lacks.
_SIX_BITS = frozenset({"F6_E2M3", "F6_E3M2"})
_MOST = 1 << 63
# The nesting, inside a tensor's object, that the library's parser accepts, of 127 levels in all; and the largest
# integer that rounds to a finite float64.
_LEVELS, _LARGEST = 125, (1 << 1024) - (1 << 970) - 1
# The most entries of the metadata that are shown.
_TOLD = 20
# The most bytes of the first request for a remote file, and those of an entry of a header beside its name.
_FAR, _ENTRY = 1 << 18, 160


def locate(directory: Location) -> Location | None:
    """Return the index, or the only file, of the safetensors output in `directory`; None if there is none."""
    names = [name for name, entry in directory.names.items() if entry.kind == "file"]
    for names_of_kind in (
        *([name for name in names if name == stem + suffix] for stem, suffix in _MODELS),
        [name for name in names if name.endswith(INDEX_SUFFIX)],
        [name for name in names if name.endswith(SUFFIX)],
    ):
        if len(names_of_kind) == 1:
            return directory.join(names_of_kind[0])
        if names_of_kind:
            for module in FOREIGN:
                import_module(module).check_directory(directory, names_of_kind)
            is_set = all(re.search(rf"{NUMBERED}{re.escape(SUFFIX)}$", name) for name in names_of_kind)
            raise UsageError(
                f"{directory} contains several safetensors files, but no index that lists the files of one checkpoint: "
                f"{some(names_of_kind)}.",
                f"Copy or download the index too, such as model{INDEX_SUFFIX}; or convert one of them with --alone."
                if is_set
                else "Give one of them.",
            )
    return None


def read(place: Location, wanted: Wanted | None = None) -> Source:
    """Open a safetensors file, a sharded set by its index, or either by its directory.

    Raise CorruptError for a file or set that contradicts itself or is incomplete, UnsafeError for an index that leads
    out of its directory, UnsupportedError for a dtype that torch lacks.
    """
    given_place = place
    warnings: list[str] = []
    if place.kind == "directory":
        if (located := locate(place)) is None:
            raise UsageError(f"{place} is a directory without safetensors files.")
        place = located
    if place.name.endswith(INDEX_SUFFIX):
        found_set = _read_set(place, warnings)
        beside = True
        single = given_place.join(f"{place.name.removesuffix(INDEX_SUFFIX)}{SUFFIX}")
        if given_place != place and single.kind == "file" and single.path not in found_set.shards:
            warnings.append(f"{single} was not read, because the directory has an index.")
    else:
        found_set = _read_single(place)
        beside = place.name == f"model{SUFFIX}" or given_place != place
    if found_set.record is None and beside:
        _add_record(found_set, place.parent if place == given_place else given_place)
    return source_of(given_place, found_set, warnings, wanted or Wanted())


class TensorFiles:
    """The content of an output's files together: tensors in order, metadata, the record, and the path of the record's
    file. `shards` are the paths of the files if there is an index."""

    def __init__(self, path: str, bytes_read: int = 0) -> None:
        self.path, self.bytes_read, self.size = path, bytes_read, 0
        self.tensors: dict[str, LazyTensor] = {}
        self.metadata: dict[str, str] = {}
        self.inputs: dict[str, Hashable] = {}
        self.record: str | None = None
        self.record_path = ""
        self.shards: list[str] = []


def source_of(place: Location, content: TensorFiles, warnings: list[str], wanted: Wanted) -> Source:
    """Return the source of the files at `place`, which have this `content`."""
    opaque: list[str] = []
    aliases = _aliases(content)
    flat: dict[str, LazyTensor] = {**content.tensors, **{name: content.tensors[kept] for name, kept in aliases.items()}}
    tree: Any = _restored(content, wanted, warnings) if content.record is not None else None
    name, structured = "safetensors", True
    equal: list[Equal] = []
    if content.record is not None:
        equal = list(claimed_equal(content.tensors, content.record))
        if '["opaque"' in content.record:
            opaque = list(dict.fromkeys(node.name for node in walk(tree) if type(node) is Opaque))
    elif naming := _naming_of(content):
        name = f"safetensors with {naming.CALLED}"
        tree, opaque = naming.restored(content, place)
    else:
        structured = False
        tree = flat
    quantized = parted.read(content.metadata, content.tensors)
    shown = parted.without(content.metadata) if quantized else content.metadata
    shown = {key: text[:200] for key, text in shown.items() if key != METADATA_KEY and key not in aliases}
    shown = dict(itertools.islice(shown.items(), _TOLD))
    left_out = {*aliases, *_OF_THE_OUTPUT}
    return Source(
        format=name,
        family=SAFETENSORS,
        path=place.path,
        weights=tree,
        weights_error=_no_weights(content, warnings),
        structured=structured,
        owners=aliases if not structured else {},
        stored=StoredTensors(flat, aliases, content.record) if content.record is not None else None,
        facts={
            "size": content.size,
            "files": len(content.shards) or 1,
            "structure record": content.record is not None,
            **({parted.called(quantized): len(quantized)} if quantized else {}),
            **({"metadata": shown} if shown else {}),
        },
        files=FileFacts(opaque),
        equal=equal,
        warnings=warnings,
        inputs=content.inputs,
        bytes_read=content.bytes_read,
        shards=content.shards,
        metadata=content.metadata,
        remarks={key: text for key, text in content.metadata.items() if key not in left_out},
    )


def _naming_of(content: TensorFiles) -> Any:
    """Return the module of the naming scheme whose names describe a tree; None if the names describe none."""
    first = next(iter(content.tensors), "")
    if not all(type(tensor) is Stored for tensor in content.tensors.values()):
        return None
    modules = (import_module(module) for beginning, module in NAMINGS.items() if first.startswith(beginning))
    return next((module for module in modules if module.is_used(content.tensors)), None)


def _no_weights(content: TensorFiles, warnings: list[str]) -> CkptconvError | None:
    """Add a warning if the metadata say that the tensors are no weights, and return the error for callers that take
    them for weights."""
    module = next((NO_WEIGHTS[key] for key in NO_WEIGHTS if key in content.metadata), None)
    if module is None:
        return None
    reason, how = import_module(module).no_weights(content.path)
    warnings.append(f"{reason} {how}")
    return UnsupportedError(reason, how)


def _restored(content: TensorFiles, wanted: Wanted, warnings: list[str]) -> Any:
    """Return the tree that the record describes. If it does not fit and no structure is wanted, drop the record."""
    try:
        decoder = needed(UNFLATTENING, "decoder", "A structure record", error=UnsupportedError)
        return decoder.unflatten(content.tensors, content.record, live_values=False)
    except CkptconvError as error:
        if not wanted.structure:
            warnings.append(f"{content.record_path}: its structure record was left out: {error.message}")
            content.record = None
            return None
        hint = f"{error.hint} Use --no-structure to convert the tensors without the record.".lstrip()
        raise type(error)(f"{content.record_path}: {error.message}", hint) from error


def _aliases(content: TensorFiles) -> dict[str, str]:
    """Return the aliases, {removed: kept}: metadata entries whose value names a tensor and whose key does not."""
    return {
        removed: kept
        for removed, kept in content.metadata.items()
        if removed not in RESERVED and removed not in content.tensors and kept in content.tensors
    }


# ------------------------------------------------------------------------------------------------- files and indices


def _read_single(place: Location) -> TensorFiles:
    header = header_of(place)
    content = TensorFiles(place.path, header.bytes_read)
    content.tensors = header.tensors  # type: ignore[assignment]  # this set's alone from here on
    content.metadata, content.record_path = header.metadata, place.path
    content.record = header.metadata.get(METADATA_KEY)
    content.inputs, content.size = {place.name: header.identity}, header.size
    return content


def _read_set(place: Location, warnings: list[str]) -> TensorFiles:
    index = read_index(place)
    if index is None:
        raise CorruptError(f"{place} is not an index: it has no weight_map from tensor names to file names.")
    wanted: dict[str, dict[str, None]] = {}
    for tensor, name in index.weight_map.items():
        wanted.setdefault(name, {})[tensor] = None
    names = sorted(wanted)
    entries = entries_of(place.parent, names)
    missing = [name for name, entry in entries.items() if entry.kind != "file"]
    if missing:
        raise CorruptError(
            f"{place} lists files that cannot be found ({len(missing)} of {len(names)}): {some(missing)}.",
            "Copy or download the missing files.",
        )
    content = TensorFiles(place.path, index.identity.file.size)
    content.shards = [place.parent.join(name).path for name in names]
    differing: dict[str, None] = {}
    members = {name: place.parent.at(entry.file) for name, entry in entries.items()}
    within = {members[name].path: wanted[name] for name in names}
    headers = ahead(lambda member: header_of(member, within[member.path]), [*members.values()])
    for name, header in zip(names, headers, strict=True):
        _check_contents(members[name].path, place.path, header.tensors, wanted.pop(name))
        content.tensors.update(header.tensors)
        known = content.metadata
        differing.update(dict.fromkeys(key for key, text in header.metadata.items() if known.get(key, text) != text))
        content.metadata.update(header.metadata)
        content.inputs[name] = header.identity
        content.size += header.size
        content.bytes_read += header.bytes_read
    # A record in one of several files says nothing of the others.
    if content.metadata.pop(METADATA_KEY, None) is not None:
        warnings.append(
            f"{place}: the structure record of one of its files was left out, because it does not cover the other "
            "files."
        )
        differing.pop(METADATA_KEY, None)
    if differing:
        warnings.append(
            f"{place}: the metadata of its files differs in {some(differing)}; the metadata of the last file is used."
        )
    content.inputs[place.name] = index.identity
    content.metadata.update({key: value for key, value in index.metadata.items() if type(value) is str})
    return content


def _check_contents(path: str, index: str, tensors: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    lacking = sorted(wanted.keys() - tensors.keys())
    if lacking:
        raise damaged(f"{path} lacks {_tensors(lacking)} that {basename(index)} lists for it: {some(lacking)}.")
    extra = sorted(tensors.keys() - wanted.keys())
    if extra:
        raise CorruptError(
            f"{path} contains {_tensors(extra)} that {basename(index)} does not list for it: {some(extra)}.",
            "The index belongs to another version of these files.",
        )


def _add_record(content: TensorFiles, directory: Location) -> None:
    """Add the structure record that is stored as a file in `directory`, if there is one."""
    beside = directory.join(FILE_NAME)
    if beside.kind == "file":
        content.record, content.record_path = beside.read_text(MAX_RECORD), beside.path
        content.inputs[FILE_NAME] = Input.stamped(beside.entry.file)


# ----------------------------------------------------------------------------------------------------------- headers


class Header(NamedTuple):
    """The content of a file's header: its tensors in the order of the data, and its metadata."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    identity: Input
    size: int
    bytes_read: int


_KEYS = "dtype", "shape", "data_offsets"


class _Entry(NamedTuple):
    """A header's entry for a tensor, not checked yet; `more` are the values of unknown keys, which mean nothing."""

    dtype: Any
    shape: Any
    offsets: Any
    more: tuple[Any, ...] = ()


class _Place(NamedTuple):
    """A tensor, and the range of the data that the header gives it."""

    begin: int
    stop: int
    name: str
    dtype: DType
    shape: tuple[int, ...]


def header_of(place: Location, names: Collection[str] = ()) -> Header:
    """Read the header of a file, which has tensors of these `names` if they are known."""
    with place.at(place.file or place.entry.file).open_reader() as reader:
        return read_header(reader, first=min(_FAR, sum(map(len, names)) + _ENTRY * len(names)) or _FAR)


def read_header(reader: Reader, base: int = 0, stop: int | None = None, first: int = _FAR) -> Header:
    """Read the header of the safetensors file in `reader`, from byte `base` to byte `stop`, or to its end. The `first`
    request for a remote file has that many bytes."""
    stop = reader.file.size if stop is None else stop
    raw, bytes_read = _raw_header(reader, base, stop, first)
    file = reader.file
    identity = Input(file, (file.size, file.stamp, zlib.crc32(raw)))
    places, metadata = described(raw, file.path)
    start = base + 8 + len(raw)
    del raw
    tensors = tensors_of(places, file, start, stop)
    return Header(tensors, metadata, identity, file.size, bytes_read)


def described(raw: bytes, path: str) -> tuple[list[_Place], dict[str, str]]:
    """Return the tensors that a header describes, each checked by itself, and the metadata."""
    places: list[_Place] = []
    metadata: dict[str, str] | None = None
    kinds: _Kinds = {}
    try:
        for members in strict_json.members(raw, _object):
            if type(members) is not dict:
                raise _corrupt(path, "its header is not a JSON object of tensors")
            if METADATA in members:
                if metadata is not None:
                    raise _corrupt(path, f"its header has {METADATA!r} twice")
                metadata = _metadata(path, members.pop(METADATA))
            for name, entry in members.items():
                places.append(_place(path, name, entry, kinds))
            if len(places) > MAX_TENSORS:
                raise LimitError(f"{path} describes more than {MAX_TENSORS} tensors, which is the limit.")
    except ValueError as error:
        raise _corrupt(path, f"its header is invalid: {error}") from None
    return places, metadata or {}


def _metadata(path: str, value_given: Any) -> dict[str, str]:
    if value_given is None:
        return {}
    if type(value_given) is not dict or not all(type(value) is str for value in value_given.values()):
        raise _corrupt(path, f"its {METADATA} is not a map from strings to strings")
    return value_given


def _raw_header(reader: Reader, base: int, stop: int, first: int) -> tuple[bytes, int]:
    """Return the bytes of the header, and the number of bytes read for it."""
    path, size = reader.file.path, stop - base
    head = reader.read_at(base, min(size, first if is_remote(path) else 512))
    length = int.from_bytes(head[:8], "little")
    for module in FOREIGN if head[8:9] != b"{" else ():
        import_module(module).check_file(path, head[:512], size)
    if len(head) < 8:
        raise _corrupt(path, f"it has {size} bytes, too few for the length of a header")
    if length > MAX_HEADER:
        raise LimitError(
            f"{path} is not a valid safetensors file: it begins with {head[:16]!r}, and so declares a header of "
            f"{length} bytes; at most {MAX_HEADER} are allowed."
        )
    if length > size - 8:
        raise _corrupt(path, f"its header of {length} bytes extends beyond the {size} bytes of the file")
    if head[8:9] != b"{":
        raise _corrupt(path, f"its header begins with {head[8:24]!r}, not with a JSON object")
    if len(head) < 8 + length:
        # Read it again, as one piece: joining the parts would hold a large header in memory twice.
        return reader.read_at(base + 8, length), len(head) + length
    return head[8 : 8 + length], len(head)


# {(dtype code, shape): (dtype, shape as torch counts it, bytes)}. There are many tensors and few such kinds.
_Kinds: TypeAlias = "dict[tuple[str, tuple[int, ...]], tuple[DType, tuple[int, ...], int]]"


def _place(path: str, name: str, entry: Any, kinds: _Kinds) -> _Place:
    """Check the header's `entry` for the tensor `name`. `kinds` caches the results for its dtype and shape."""
    if type(entry) is not _Entry:
        raise _corrupt(path, f"{quoted(name)} has no dtype, shape and data_offsets")
    code, stated_shape, offsets, more = entry
    for value in more:
        _check_skipped(path, value)
    if len(offsets) != 2 or not _are_counts(offsets):
        raise _corrupt(path, f"{quoted(name)} has data_offsets that are not two non-negative integers")
    if type(code) is not str:
        raise _corrupt(path, f"{quoted(name)} has a dtype that is not text")
    if not _are_counts(stated_shape):
        raise _corrupt(path, f"{quoted(name)} has a shape that is not a list of non-negative integers")
    key = code, tuple(stated_shape)
    kind = kinds.get(key)
    if kind is None:
        dtype = _dtype(path, name, code)
        kind = kinds[key] = (dtype, *_shape(path, name, stated_shape, dtype))
    dtype, shape, nbytes = kind
    begin, stop = offsets
    if stop - begin != nbytes:
        expected = f"{code} of shape {_brief(stated_shape)}"
        raise _corrupt(path, f"{quoted(name)} has {stop - begin} bytes, but {expected} requires {nbytes}")
    return _Place(begin, stop, name, dtype, shape)


def tensors_of(places: list[_Place], file: File, start: int, limit: int | None = None) -> dict[str, Stored]:
    """Return the tensors at `places`, in the order of the data, which begins at byte `start` of `file`. Raise
    CorruptError unless they cover the data to the last byte, or to byte `limit`."""
    places.sort(key=itemgetter(0, 1))
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    tensors: dict[str, Stored] = {}
    at = 0
    end = (file.size if limit is None else limit) - start
    for begin, stop, name, dtype, shape in places:
        if name in tensors:
            raise _corrupt(file.path, f"its header has {quoted(name)} twice")
        if begin != at:
            kind = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise _corrupt(
                file.path, f"{quoted(name)} begins at byte {begin} of the data and {kind}: byte {at} was expected"
            )
        if stop > end:
            raise _truncated(
                file.path, f"{quoted(name)} ends at byte {stop} of {max(end, 0)} bytes of data: the file was cut short"
            )
        steps = strides.get(shape)
        if steps is None:
            steps = strides[shape] = contiguous_strides(shape)
        tensors[name] = Stored(file, start + begin, dtype, shape, steps)
        at = stop
    if at != end:
        raise _corrupt(file.path, f"its tensors end at byte {at} of the data, but the data has {end} bytes")
    return tensors


def _dtype(path: str, name: str, code: str) -> DType:
    dtype = DTYPES_BY_CODE.get(code)
    if dtype is None:
        why = "has six bits, unlike any dtype of torch" if code in _SIX_BITS else "is not known"
        raise UnsupportedError(f"{path}: {quoted(name)} is of dtype {code[:40]!r}, which {why}.")
    return dtype


def _shape(path: str, name: str, shape: list[int], dtype: DType) -> tuple[tuple[int, ...], int]:
    """Return the shape as torch counts it, and its size in bytes."""
    if len(shape) > MAX_DIMS:
        raise UnsupportedError(
            f"{path}: {quoted(name)} has {len(shape)} dimensions; torch supports at most {MAX_DIMS}."
        )
    reach = 1
    for extent in shape:
        reach *= max(extent, 1)
        if reach >= _MOST:
            raise _corrupt(path, f"{quoted(name)} has a shape with too many elements: {_brief(shape)}")
    numel = math.prod(shape)
    if dtype.code == "F4":
        if numel % 2:
            raise _corrupt(path, f"{quoted(name)} has {numel} elements of four bits, which do not fill whole bytes")
        if shape[-1] % 2:
            raise UnsupportedError(
                f"{path}: {quoted(name)} has rows of {shape[-1]} elements of four bits, which torch cannot store."
            )
        shape, numel = [*shape[:-1], shape[-1] // 2], numel // 2
    return tuple(shape), numel * dtype.itemsize


# ----------------------------------------------------------------------------------------------------------- details


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """Return an object of a header. A tensor's entry takes the form that uses least memory."""
    if len(pairs) == 3:
        (first, dtype), (second, shape), (third, offsets) = pairs
        # The library writes this form. In a file of a million tensors, a dict for each takes time.
        if (first, second, third) == _KEYS and type(shape) is list and type(offsets) is list:
            return _Entry(dtype, shape, offsets)
    entry = strict_json.unique(pairs)
    if type(entry.get("shape")) is not list or type(entry.get("data_offsets")) is not list:
        return entry
    dtype, shape, offsets = entry.pop("dtype", None), entry.pop("shape"), entry.pop("data_offsets")
    return _Entry(dtype, shape, offsets, tuple(entry.values()))


def _check_skipped(path: str, value: Any) -> None:
    """Raise CorruptError if the library's parser does not accept an ignored value."""
    level = [value]
    for _ in range(_LEVELS + 1):
        if any(type(item) is int and abs(item) > _LARGEST for item in level):
            raise _corrupt(path, "its header has a number that is too large for any float")
        inner = [_INSIDE[type(item)](item) for item in level if type(item) in _INSIDE]
        if not inner:
            return
        level = list(itertools.chain.from_iterable(inner))
    raise _corrupt(path, f"the entry of a tensor in its header is nested more than {_LEVELS} levels deep")


# The direct children of a list or an object.
_INSIDE: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: lambda each: each,
    dict: lambda each: each.values(),
    _Entry: lambda each: (each.dtype, each.shape, each.offsets, *each.more),
}


def _corrupt(path: str, reason: str) -> CorruptError:
    return CorruptError(f"{path} is not a valid safetensors file: {reason}.")


def _truncated(path: str, reason: str) -> CorruptError:
    return TruncatedError(f"{path} is not a valid safetensors file: {reason}.", AGAIN)


def _are_counts(values: list[Any]) -> bool:
    for value in values:  # noqa: SIM110, as a generator takes twice as long
        if type(value) is not int or not 0 <= value < _MOST:
            return False
    return True


def _brief(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:8]))}, …]"


def _tensors(names: list[str]) -> str:
    return "a tensor" if len(names) == 1 else f"{len(names)} tensors"

"""Read the description of a torch.distributed.checkpoint: `.metadata`, or a `__R.metadata` of each rank.

Source: torch/distributed/checkpoint/{metadata,filesystem,planner}.py of torch 2.0 to 2.15, and OLMo-core's
distributed/checkpoint/filesystem.py. It is a plain pickle of dataclasses, which are read as data, from any module that
they had in a release. There may be an entry for each tensor on each rank. Each becomes a few tuples while the pickle is
read, and everything that follows is linear in their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, TypeAlias

from ckptconv.errors import CorruptError, LimitError, UnsupportedError
from ckptconv.features.dcp import MODULE
from ckptconv.features.joining.names import MAX_DEPTH, Path, named
from ckptconv.formats.registered import FOREIGN
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.pickles.machine import Loaded, load
from ckptconv.pickles.nodes import Global, Opaque, TorchConstant
from ckptconv.pickles.vocabulary import Builder, Constructor, MalformedError, Vocabulary
from ckptconv.storage.inside import check_inside
from ckptconv.storage.paths import dirname
from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.lazy import Stored
from ckptconv.tensors.strides import MAX_BYTES, MAX_DIMS
from ckptconv.text import brief, some

Shape: TypeAlias = tuple[int, ...]
_LONGEST_NAME = 200


class EntryPlace(NamedTuple):
    """`length` bytes from byte `offset` of the file `name`, to be decoded by `transforms` in turn."""

    name: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class Chunk(NamedTuple):
    """A box of a tensor: where it begins, its extent in each dimension, and where its data is."""

    offsets: Shape
    sizes: Shape
    place: EntryPlace | Stored


@dataclass
class SavedTensor:
    """A tensor as described: its chunks, in any order, not yet checked to fit together."""

    dtype: DType
    shape: Shape
    chunks: list[Chunk] = field(default_factory=list)
    _boxes: set[tuple[Shape, Shape]] = field(default_factory=set)

    def add_once(self, chunk: Chunk) -> None:
        """Add a chunk, unless there is one with the same offsets and sizes."""
        if chunk[:2] not in self._boxes:
            self._boxes.add(chunk[:2])
            self.chunks.append(chunk)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Description:
    """The description of a checkpoint by name: tensors, other values, and the path of each in the state dict.

    `nested`: the checkpoint gives the paths. `opaque` and `mentioned` are names of classes in the pickles.
    """

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    values: dict[str, EntryPlace] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    nested: bool = True
    version: str = ""
    opaque: dict[str, None] = field(default_factory=dict)
    mentioned: dict[str, None] = field(default_factory=dict)

    def places(self) -> Iterator[EntryPlace]:
        """Yield the places, in files, of all tensors and other values."""
        yield from self.values.values()
        for tensor in self.tensors.values():
            yield from (chunk.place for chunk in tensor.chunks if isinstance(chunk.place, EntryPlace))


# ------------------------------------------------------------------------------------------------- words of the pickle

# Up to torch 2.2.
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_STORAGE_INFO = "_StorageInfo"
_FILESYSTEMS = ("torch.distributed.checkpoint.filesystem", "olmo_core.distributed.checkpoint.filesystem")
_TENSOR, _VALUE = Global(MODULE, "TensorStorageMetadata"), Global(MODULE, "BytesStorageMetadata")


def _counts(value: Any, subject: str) -> Shape:
    """Return a torch.Size, tuple or list of counts as a tuple."""
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
        raise MalformedError(f"has {subject} that are not a valid list of dimensions")
    for number in value:
        if type(number) is not int or not 0 <= number < MAX_BYTES:
            raise MalformedError(f"has {subject} that are not non-negative integers")
    return value if type(value) is tuple else tuple(value)


def _sizes() -> Constructor:
    """Return a constructor that makes torch.Size a tuple. Equal ones share one tuple: ranks have many."""
    known: dict[Shape, Shape] = {}

    def construct(args: tuple[Any, ...]) -> Any:
        if len(args) != 1:
            return NotImplemented
        sizes = _counts(args[0], "sizes")
        return known.setdefault(sizes, sizes)

    return construct


def _path(args: tuple[Any, ...]) -> Any:
    return "/".join(args) if all(type(arg) is str for arg in args) else NotImplemented


def _number(args: tuple[Any, ...]) -> Any:
    """Return the number of an enum member."""
    return args[0] if len(args) == 1 and type(args[0]) is int else NotImplemented


def _kept(cls: Global) -> Constructor:
    """Return the constructor of an object that only its state completes."""
    return lambda args: Opaque(cls, args, call="newobj") if not args else NotImplemented


def _properties(_: Opaque, state: Any) -> Any:
    """(dtype, layout, requires_grad, memory format, pin_memory[, strides of the rank that saved it])"""
    if type(state) is not tuple or len(state) < 5:
        raise MalformedError("has properties of a tensor that are not a tuple of five or more")
    return state


def _chunk(_: Opaque, state: Any) -> Any:
    if type(state) is not dict or not {"offsets", "sizes"} <= state.keys():
        raise MalformedError("has a chunk without offsets and sizes")
    offsets, sizes = _counts(state["offsets"], "offsets of a chunk"), _counts(state["sizes"], "sizes of a chunk")
    state.clear()  # the memo keeps it until the pickle ends, and nothing refers to it
    return offsets, sizes


def _index(value: Opaque, state: Any) -> Any:
    """Return the key of an entry as an object: as a tuple, a duplicate key would silently replace the first."""
    if type(state) is not dict or type(state.get("fqn")) is not str:
        raise MalformedError("has an entry without a name")
    offset = state.get("offset")
    value.args = state["fqn"], None if offset is None else _counts(offset, "offsets of an entry")
    state.clear()
    return value


def _storage_info(_: Opaque | None, state: Any) -> Any:
    known = {"relative_path", "offset", "length", "transform_descriptors"}
    if type(state) is not dict or not {"relative_path", "offset", "length"} <= state.keys() <= known:
        raise MalformedError("has an entry whose location is not a file name, an offset and a length")
    name, offset, length = state["relative_path"], state["offset"], state["length"]
    if type(name) is not str:
        raise MalformedError("has a file name that is not text")
    for number in (offset, length):
        if type(number) is not int or not 0 <= number < MAX_BYTES:
            raise MalformedError(f"has an entry with the invalid offset {brief(offset)} or length {brief(length)}")
    transforms = state.get("transform_descriptors") or ()
    if not isinstance(transforms, (list, tuple)) or any(type(transform) is not str for transform in transforms):
        raise MalformedError("has transforms of an entry that are not text")
    state.clear()
    return EntryPlace(name, offset, length, tuple(transforms))


def _no_storage(_: Any) -> NoReturn:
    raise MalformedError("has a persistent id, although it contains no data")


def vocabulary_of() -> Vocabulary:
    torch = vocabulary(_no_storage)
    constructors: dict[tuple[str, str], Constructor] = {("torch", "Size"): _sizes()}
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"):
            constructors[module, name] = _path
    constructors[MODULE, "_MEM_FORMAT_ENCODING"] = constructors[_SHARDED, "MEM_FORMAT_ENCODING"] = _number
    builders: dict[tuple[str, str], Builder] = {
        (MODULE, "TensorProperties"): _properties,
        (_SHARDED, "TensorProperties"): _properties,
        (MODULE, "ChunkStorageMetadata"): _chunk,
        (MODULE, "MetadataIndex"): _index,
        **{(module, _STORAGE_INFO): _storage_info for module in _FILESYSTEMS},
    }
    plain = [_TENSOR, _VALUE, Global(MODULE, "Metadata"), Global(MODULE, "StorageMeta")]
    for cls in (*plain, *(Global(*key) for key in builders)):
        constructors[cls.module, cls.name] = _kept(cls)
    return torch._replace(constructors={**torch.constructors, **constructors}, builders=builders)


# ----------------------------------------------------------------------------------------------------------- reading


def read_description(pickles: Iterable[tuple[str, bytes]], *, of_ranks: bool) -> Description:
    """Return the description in the pickles, (path, data): one pickle, or with `of_ranks` each rank's, in order.

    Of entries that several ranks describe alike, take the first. Raise CorruptError if they contradict themselves or
    each other, UnsafeError for an attack, UnsupportedError for objects that no known release writes.
    """
    description = Description()
    words = vocabulary_of()
    where = ""
    for where, data in pickles:
        try:
            loaded = load(data, words, where=where)
        except CorruptError:
            for module in () if data.startswith(b"\x80") else FOREIGN:
                import_module(module).check_file(where, data[:512], len(data))
            raise
        del data
        description.opaque.update(dict.fromkeys(map(str, loaded.opaque)))
        description.mentioned.update(dict.fromkeys(map(str, loaded.globals)))
        _add(description, loaded, where, of_ranks)
    description.paths = {
        name: path
        for name, path in description.paths.items()
        if name in description.tensors or name in description.values
    }
    description.nested = bool(description.paths)
    for name in (*description.tensors, *description.values):
        description.paths.setdefault(name, (name,))
    leading: dict[Path, str] = {}
    for name, path in description.paths.items():
        first = leading.setdefault(path, name)
        if first != name:
            raise CorruptError(f"{where}: {named(name)} and {named(first)} have the same path in the state dict.")
    return description


def _add(description: Description, loaded: Loaded, where: str, of_rank: bool) -> None:
    """Add the description in one pickle: everything, or one rank's part."""
    root = _state(loaded.value, where)
    entries, places = root.get("state_dict_metadata"), root.get("storage_data")
    if type(entries) is not dict or type(places) is not dict:
        raise CorruptError(
            f"{where} is not the metadata of a checkpoint: it lacks state_dict_metadata or storage_data."
        )
    version = root.get("version")
    description.version = description.version or (version if type(version) is str else "")
    placed = _places(places, where)
    for name, entry in entries.items():
        if type(name) is not str:
            raise CorruptError(f"{where} has a tensor name that is not text.")
        locations = placed.pop(name, {})
        if type(entry) is Opaque and entry.cls == _TENSOR:
            _add_tensor(description, name, _state(entry, where, name), locations, where, of_rank)
        elif type(entry) is Opaque and entry.cls == _VALUE:
            _add_value(description, name, locations, where)
        else:
            kind = entry.name if type(entry) is Opaque else type(entry).__name__
            raise UnsupportedError(f"{where}: {named(name)} has the unknown type {kind[:_LONGEST_NAME]}.")
    if placed:
        raise CorruptError(f"{where} records locations for {some(placed, form=named)}, but no descriptions.")
    paths = root.get("planner_data")
    if type(paths) is dict:
        for name, path in paths.items():
            description.paths.setdefault(name, _checked_path(path, where))


def _state(value: Any, where: str, name: str | None = None, subject: str = "the content") -> dict[str, Any]:
    """Return the attributes of an object, of the tensor `name` or of the `subject`."""
    state = value.state[0] if type(value) is Opaque and len(value.state) == 1 else None
    if type(state) is not dict:
        kind = value.name if type(value) is Opaque else type(value).__name__
        subject = subject if name is None else named(name)
        raise UnsupportedError(
            f"{where}: {subject} is a {kind[:_LONGEST_NAME]}, but metadata of torch.distributed.checkpoint was "
            "expected."
        )
    return state


def _places(entries: Mapping[Any, Any], where: str) -> dict[str, dict[Shape | None, EntryPlace]]:
    """Return the places of the data, by name and offsets."""
    places: dict[str, dict[Shape | None, EntryPlace]] = {}
    safe: set[str] = set()
    for key, place in entries.items():
        if type(key) is not Opaque or type(key.args) is not tuple or len(key.args) != 2:
            kind = key.name if type(key) is Opaque else type(key).__name__
            raise UnsupportedError(f"{where}: the key of an entry has the unknown type {kind[:_LONGEST_NAME]}.")
        if type(place) is Opaque and place.name.endswith(_STORAGE_INFO):
            # Another writer's class: recognize it by its attributes.
            try:
                place = _storage_info(None, {**_state(place, where, subject="a location")})
            except MalformedError as reason:
                raise CorruptError(f"{where}: the pickle {reason}.") from None
        if type(place) is not EntryPlace:
            kind = place.name if type(place) is Opaque else type(place).__name__
            raise UnsupportedError(f"{where}: the location of an entry has the unknown type {kind[:_LONGEST_NAME]}.")
        name, offset = key.args
        if place.name not in safe:
            check_inside(place.name, where, dirname(where))
            safe.add(place.name)
        locations = places.setdefault(name, {})
        if offset in locations:
            at = f" at {list(offset)}" if offset else ""
            raise CorruptError(f"{where} records two locations for the data of {named(name)}{at}.")
        locations[offset] = place
    return places


def _add_tensor(
    description: Description,
    name: str,
    state: Mapping[str, Any],
    locations: dict[Shape | None, EntryPlace],
    where: str,
    of_rank: bool,
) -> None:
    properties, boxes = state.get("properties"), state.get("chunks")
    if type(properties) is not tuple or type(boxes) is not list or "size" not in state:
        raise CorruptError(
            f"{where}: the description of {named(name)} lacks valid properties, a size, or a list of chunks."
        )
    dtype = _dtype(properties[0], name, where)
    layout = properties[1]
    if type(layout) is not TorchConstant or layout != TorchConstant("layout", "strided"):
        kind = layout.name if type(layout) is TorchConstant else type(layout).__name__
        raise UnsupportedError(f"{where}: {named(name)} has the layout {kind}; only strided tensors are supported.")
    try:
        shape = _counts(state["size"], "sizes")
    except MalformedError as reason:
        raise CorruptError(f"{where}: {named(name)} {reason}.") from None
    known = description.tensors.get(name)
    if known is None:
        known = description.tensors[name] = SavedTensor(dtype, shape)
    elif (known.dtype, known.shape) != (dtype, shape):
        raise CorruptError(
            f"{where} describes {named(name)} as {dtype} of shape {list(shape)}, but another rank as {known.dtype} of "
            f"shape {list(known.shape)}: the files come from different saves."
        )
    if known.nbytes >= MAX_BYTES:
        raise LimitError(
            f"{where}: {named(name)} would have {known.nbytes} bytes; fewer than {MAX_BYTES} are supported."
        )
    if name in description.values:
        raise CorruptError(f"{where} describes {named(name)} as a tensor, but another rank as a value.")
    # Each rank that describes itself holds a copy of what is replicated.
    add = known.add_once if of_rank else known.chunks.append
    for box in boxes:
        if type(box) is not tuple or len(box) != 2:
            raise UnsupportedError(f"{where}: a chunk of {named(name)} has an unknown type.")
        offsets, sizes = box
        place = locations.pop(offsets, None)
        if not len(offsets) == len(sizes) == len(shape):
            raise CorruptError(
                f"{where}: {named(name)} has the shape {list(shape)}, but a chunk of {list(sizes)} at {list(offsets)}."
            )
        if 0 in sizes:
            continue
        if place is None:
            raise CorruptError(
                f"{where} records no location for the chunk of {named(name)} at {list(offsets)}, or describes that "
                "chunk twice."
            )
        add(Chunk(offsets, sizes, place))
    if locations:
        offset = next(iter(locations))
        raise CorruptError(
            f"{where} records a location for data of {named(name)} at {list(offset or ())}, but describes no chunk "
            "there."
        )


def _add_value(description: Description, name: str, locations: dict[Shape | None, EntryPlace], where: str) -> None:
    if len(locations) != 1:
        raise CorruptError(
            f"{where} records {len(locations)} locations for the value {named(name)}, but exactly one is required."
        )
    if name in description.tensors:
        raise CorruptError(f"{where} describes {named(name)} as a value, but another rank as a tensor.")
    description.values.setdefault(name, next(iter(locations.values())))


def _dtype(value: Any, name: str, where: str) -> DType:
    if type(value) is TorchConstant and value.kind == "dtype" and value.name in DTYPES:
        return DTYPES[value.name]
    kind = value if isinstance(value, (Global, TorchConstant)) else type(value).__name__
    shown = f"torch.{kind.name}" if isinstance(kind, TorchConstant) else str(kind)[:_LONGEST_NAME]
    raise UnsupportedError(f"{where}: {named(name)} has the dtype {shown}, which is not supported.")


def _checked_path(path: Any, where: str) -> Path:
    if type(path) is not tuple or not path or any(type(step) not in (str, int) for step in path):
        raise UnsupportedError(f"{where}: planner_data has a path with steps other than keys and positions.")
    if len(path) > MAX_DEPTH:
        raise LimitError(f"{where}: planner_data has a path of {len(path)} steps; at most {MAX_DEPTH} are supported.")
    return path


def agree(where: Callable[[], str], actual: tuple[Any, Shape], said: tuple[Any, Shape]) -> None:
    """Raise CorruptError, about a chunk, if its `actual` dtype and shape are not those that the metadata `said`."""
    if actual != said:
        raise CorruptError(
            f"{where()} is {actual[0]} of shape {list(actual[1])}, but the metadata records {said[0]} of shape "
            f"{list(said[1])}: the file belongs to another save, or is damaged."
        )

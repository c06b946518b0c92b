"""Plan checkpoints of torch.distributed.checkpoint (DCP): `.metadata` and `.distcp` files, or safetensors shards.

Source: torch/distributed/checkpoint/{filesystem,default_planner,_nested_dict,hf_storage}.py of torch 2.4 to 2.15. A
`.distcp` file is torch.save archives one after another: one for each chunk of a tensor, and one for each other value.
They hold the same entries that `dcp.save` writes for the state dict, so `dcp.load` reads them on any number of ranks.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from ckptconv.errors import LimitError, UnsupportedError, UsageError
from ckptconv.features.dcp.metadata import Shape
from ckptconv.features.dcp.names import METADATA, SHARDING, shard_name
from ckptconv.features.dcp_output import optimizer
from ckptconv.features.dcp_output.describing import Saved, SavedChunk, description
from ckptconv.features.dcp_output.kind import NO_WEIGHTS
from ckptconv.features.dcp_output.layout import Layout
from ckptconv.features.dcp_output.options import GIVEN
from ckptconv.features.joining.chunks import Box
from ckptconv.features.joining.names import MAX_DEPTH, Path, dotted, named
from ckptconv.features.optimizer_states.training import weights_in
from ckptconv.features.torch_files import writable
from ckptconv.features.torch_files.refusing import refusal
from ckptconv.features.torch_files.tree import STORAGE, TorchTree, plan_tree
from ckptconv.features.unflattening.decoder import unflatten
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import safetensors, selection
from ckptconv.outputs.kinds import entry_of
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.selected import METADATA as FORMAT
from ckptconv.outputs.selected import Selected
from ckptconv.outputs.selection import Rename
from ckptconv.pickles.children import ATOMS, MAPPINGS, is_tensor, walk
from ckptconv.pickles.nodes import Composite
from ckptconv.plan import Data, FilePlan, Literal, Part, Trailer
from ckptconv.structure.choice import Choice
from ckptconv.structure.reading import tensor_names
from ckptconv.tensors.lazy import Derived, Equal, LazyTensor, Narrow, Stored, Tagged, View, untagged
from ckptconv.text import some

# Values of `to`: archives of torch.save for each entry, or safetensors shards.
TORCH, SHARDS = "dcp", "dcp-hf"
# The largest `.distcp` file, in bytes, if the user names no size. A single entry may be larger.
DEFAULT_FILE_SIZE = 5 * 10**9
DEFAULT_OPTIMIZER_KEY = "optimizer"
# Metadata of the shards in addition to `SHARDING`, as torch.distributed.checkpoint._hf_utils names it.
_VERSION = {"DCP_VERSION": "1.0"}
# Where the record has values of Megatron-core: those that all ranks have alike, which are one object, and those that
# are parts of a tensor's state, and how the keys of these end. Its loader looks for them beside the tensors.
COMMON_STATE = "common_state/shard_0_1"
_COMMON, _OBJECTS, OBJECT = "common", "objects", re.compile(r".+/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*", re.DOTALL)
# Values of these types are written once for all keys that have an equal one.
_SHARED = frozenset({bool, int, float, str, type(None)})


class Leaf(NamedTuple):
    """A tensor, or another value, and its path in the state dict: keys of dicts, and indices of lists."""

    path: Path
    value: Any


@dataclass
class DcpContents:
    """The content of a checkpoint by key: the steps of a path joined by dots. `chosen` is the selection of the weights.

    Of tied tensors, `aliases` {removed: kept} have their data where another key has it. Of the values with objects of
    classes known by name only, {key: class}, some are `left_out` and others `kept`. `equal` are tensors of which one
    was kept: they have to be equal.
    """

    chosen: Selected
    tensors: dict[str, Leaf] = field(default_factory=dict)
    values: dict[str, Leaf] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    equal: list[Equal] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------- the state dict


def contents(source: Source, options: Options, rename: Rename = selection.renamed) -> DcpContents:
    """Return the state dict that the options select of `source`, and flatten it as torch does.

    Raise UsageError if two leaves get one key, UnsafeError for objects of classes that are not known to be data, and
    UnsupportedError for tensors that a checkpoint cannot hold.
    """
    chosen, dcp_options = selected(source, options, rename), GIVEN.of(options)
    content = DcpContents(chosen, equal=[*chosen.equal])
    empty: list[str] = []
    has_weights = dcp_options.model_key != NO_WEIGHTS
    leaves: Iterable[Leaf] = _weights(source, chosen, empty) if has_weights else ()
    usual = entry_of(options.to).key if options.to and options.key != "." else ""
    under = _path(dcp_options.model_key or usual)
    if under:
        leaves = (Leaf(under + path, value) for path, value in leaves)
    _add(content, leaves, source, options)
    if options.states:
        key = _path(dcp_options.optimizer_key or DEFAULT_OPTIMIZER_KEY)
        prefix = f"{dotted(key)}."
        present = next((name for name in chain(content.tensors, content.values) if f"{name}.".startswith(prefix)), "")
        if present:
            raise UsageError(
                f"{named(present)} is already used by the weights, but the optimizer states need this key.",
                "Leave out --states: --key . already selects the optimizer states of INPUT."
                if options.key == "."
                else "Give another --optimizer-key, or leave out the weights with --exclude.",
            )
        states = optimizer.arranged(
            _states(_filled(source, options, content), options, rename, content), flat=dcp_options.flat_optimizer
        )
        _add(content, flattened(states, key, empty), source, options)
    if options.tied == "alias" and options.to == TORCH:
        content.aliases = selection.untie({key: leaf.value for key, leaf in content.tensors.items()}, {})
    if empty:
        content.warnings.append(
            f"left out, because torch.distributed.checkpoint stores no empty dicts: {some(empty, form=named)}"
        )
    return content


def _path(key: str) -> Path:
    return () if key in ("", ".") else tuple(key.split("."))


def _weights(source: Source, chosen: Selected, empty: list[str]) -> Iterator[Leaf]:
    """Yield the weights with the values next to them, and the other values of a nested state."""
    record, aliases = chosen.structure({}) if chosen.structured else None, chosen.aliases()
    tensors = {name: chosen.cast(name) for name in chosen.tensors}
    tensors.update((removed, tensors[kept]) for removed, kept in aliases.items())
    if record is None:
        yield from (Leaf((name,), tensor) for name, tensor in tensors.items())
        return
    # A view for each name: what the tree has in a place tells by its identity which tensor that is.
    # The record of a file whose tensors were renamed names tied tensors once.
    known = tensor_names(record) if source.stored and chosen.owners else tensors.keys()
    views = {name: View(tensor, tensor.dtype, tensor.shape) for name, tensor in tensors.items() if name in known}
    names = {id(view): name for name, view in views.items()}
    # A tensor that is in the tree twice is there under one of its names: its other places have the others.
    ties: dict[str, list[str]] = {}
    for removed, kept in aliases.items():
        ties[removed] = ties.setdefault(kept, [kept])
        ties[removed].append(removed)
    tree = unflatten(views, record, live_values=False)
    is_renamed = source.stored or (type(tree) in MAPPINGS and tree.keys() == tensors.keys())
    keys = dict.fromkeys(tensors, "") if is_renamed else {new: old for old, new in chosen.names.items()}
    if _is_of_megatron_core(tree):
        tree = dict(tree)
        yield Leaf((COMMON_STATE,), [tree.pop(_COMMON)])
    for path, value in flattened(tree, (), empty):
        if isinstance(value, LazyTensor):
            name = _name_of(value, names)
            bare = untagged(value)
            if name is not None and bare is views[name]:
                value = value if _is_storage(value) else tensors[name]
            key = dotted(path)
            left = ties.get(name or "", [])
            if left:
                name = next((tied for tied in left if (keys[tied] or tied) == key), left[0])
                left.remove(name)
            # The file of a safetensors output, or the user, may give a tensor another name than its keys.
            if name is not None and name != (keys[name] or key):
                path = (name,)
        elif len(path) == 2 and path[0] == _OBJECTS and OBJECT.fullmatch(str(path[1])):
            path = path[1:]
        yield Leaf(path, value)


def _is_of_megatron_core(tree: Any) -> bool:
    """Return whether a state has Megatron-core's values under both of the keys of its record."""
    if type(tree) not in MAPPINGS or not all(type(tree.get(key)) in MAPPINGS for key in (_COMMON, _OBJECTS)):
        return False
    return all(OBJECT.fullmatch(str(key)) for key in tree[_OBJECTS])


def _name_of(tensor: LazyTensor, names: Mapping[int, str]) -> str | None:
    """Return the name of the view that `tensor` is, or is made from."""
    while id(tensor) not in names and isinstance(tensor, Derived):
        tensor = tensor.tensor
    return names.get(id(tensor))


def _filled(source: Source, options: Options, content: DcpContents) -> Source:
    """Return `source` with states for parameters that have none, if that is asked for, and warn of these. It is done
    under the names that the source has, because a map may need states of several parameters for one."""
    states = source.states()
    choice = Choice(options.include, options.exclude)
    lacking = [name for name in optimizer.unused(states or {}) if name in choice]
    if not lacking:
        return source
    if not GIVEN.of(options).fill_states:
        content.warnings.append(
            f"No optimizer states exist yet for {some(lacking)}. torch's strict load requires states for trained "
            "parameters; --fill-states writes zeros."
        )
        return source
    weights = dict(weights_in(source, options.key))
    weights |= {alias: weights[owner] for alias, owner in source.owners.items() if owner in weights}
    states = optimizer.filled(states, lacking, weights, source.path)
    content.warnings.append(f"Zeros were written as the missing optimizer states of {some(lacking)}.")
    return source._replace(optimizer=states)


def _states(source: Source, options: Options, rename: Rename, content: DcpContents) -> Any:
    """Return the optimizer's states and groups as torch nests them, with casts and names as the options say."""
    chosen = selected(source, options, rename, "optimizer")
    content.equal.extend(chosen.equal)
    tensors = {name: chosen.cast(name) for name in chosen.tensors}
    tree = unflatten(tensors, chosen.described.structure, live_values=False)
    # Of a tied parameter, torch asks for the states under one of its names, and which one depends on the model.
    states = dict(tree["state"])
    owned = {f"{owner}.{key}": (state, key) for owner, state in tree["state"].items() for key in state}
    for removed, kept in chosen.owners.items():
        state, key = owned[kept]
        states.setdefault(removed[: -len(key) - 1], {})[key] = state[key]
    return {**tree, "state": states}


def flattened(tree: Any, path: Path, empty: list[str]) -> Iterator[Leaf]:
    """Yield the leaves of `tree`, as torch's `traverse_state_dict` visits them.

    Dicts are entered, and lists with tensors or dicts in them; a tuple is one value, whatever it holds.
    """
    if type(tree) not in MAPPINGS:
        kind = "tensor" if is_tensor(tree) else type(tree).__name__
        raise UsageError(
            f"The selected value is a {kind}, but a checkpoint of torch.distributed.checkpoint requires a dict.",
            "Select a dict with --key.",
        )
    stack = [(path, tree)]
    while stack:
        path, node = stack.pop()
        if type(node) in MAPPINGS:
            if not node and path:
                empty.append(dotted(path))
            steps = [((*path, str(key)), value) for key, value in node.items()]
        elif type(node) is list and not _is_terminal(node):
            steps = [((*path, index), value) for index, value in enumerate(node)]
        else:
            yield Leaf(path, node)
            continue
        if steps and len(path) >= MAX_DEPTH:
            raise LimitError(
                f"{named(dotted(path))} is nested {len(path)} levels deep; at most {MAX_DEPTH} levels are supported."
            )
        stack.extend(reversed(steps))


def _is_terminal(values: Sequence[Any], depth: int = 0) -> bool:
    """Return whether a list is one value: it contains neither tensors nor dicts, nor a list with any."""
    if depth > MAX_DEPTH:
        raise LimitError(f"A list is nested more than {MAX_DEPTH} levels deep.")
    return not any(
        type(value) in MAPPINGS or is_tensor(value) or (type(value) is list and not _is_terminal(value, depth + 1))
        for value in values
    )


def _is_storage(value: Any) -> bool:
    return isinstance(value, Tagged) and value.facts.kind == STORAGE


def _add(content: DcpContents, leaves: Iterable[Leaf], source: Source, options: Options) -> None:
    """Add `leaves` to `content` under their keys."""
    refused: dict[str, str] = {}
    for path, value in leaves:
        key = dotted(path)
        if key in content.tensors or key in content.values:
            raise UsageError(
                f"{source.path}: two values would have the key {named(key)} in the checkpoint.",
                "Rename one of them with --rename, or leave one out with --exclude.",
            )
        if isinstance(value, Composite):
            raise UnsupportedError(
                f"{source.path}: {named(key)} is a {value.kind[:100]} tensor, but torch.distributed.checkpoint "
                "stores only dense tensors.",
                "Leave it out with --exclude.",
            )
        if isinstance(value, LazyTensor) and not _is_storage(value):
            content.tensors[key] = Leaf(path, untagged(value))
            continue
        if type(value) not in ATOMS and options.to != SHARDS:  # these hold no values
            cls = next((cls for node in walk(value) if (cls := writable.unlisted(node))), "")
            if cls and options.opaque == "drop":
                content.left_out[key] = cls
                continue
            if cls:
                (content.kept if options.opaque else refused)[key] = cls
        content.values[key] = Leaf(path, value)
    if refused:
        raise refusal(source.path, refused, "a checkpoint", [content.values[key].value for key in refused])


# --------------------------------------------------------------------------------------------------------- the chunks


@functools.lru_cache(maxsize=4096)
def boxes(shape: Shape, chunks: int) -> tuple[Box, ...]:
    """Divide a tensor along its first dimension as DTensor's Shard(0) does for `chunks` ranks, without empty boxes."""
    origin = (0,) * len(shape)
    if not shape or chunks == 1 or not math.prod(shape):
        return (Box(origin, shape),)
    step = -(-shape[0] // chunks)
    starts = range(0, shape[0], step)
    return tuple(Box((start, *origin[1:]), (min(step, shape[0] - start), *shape[1:])) for start in starts)


def cut(tensor: LazyTensor, box: Box) -> LazyTensor:
    """Return the part of `tensor` in `box`."""
    if box.sizes == tensor.shape:
        return tensor
    if isinstance(tensor, Stored):
        start = sum(offset * stride for offset, stride in zip(box.offsets, tensor.strides, strict=True))
        at = tensor.offset + start * tensor.dtype.itemsize
        return Stored(tensor.file, at, tensor.dtype, box.sizes, tensor.strides)
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = Narrow(tensor, dim, start, size)
    return tensor


def entry_name(key: str, offsets: Shape) -> str:
    """Return the manifest's name of the chunk of a tensor that begins at `offsets`. No two chunks have one name."""
    return f"{key} {list(offsets)}"


def _placed(tensors: Mapping[str, Leaf], options: Options, layout: Layout | None) -> Iterator[tuple[str, Box, str]]:
    """Yield each chunk: the key of its tensor, its box, and its file in the layout; without one, the rank's number."""
    chunks = GIVEN.of(options).chunks or 1
    for key, (_, tensor) in tensors.items():
        if layout is None:
            every = enumerate(boxes(tensor.shape, chunks))
            yield from ((key, box, str(rank)) for rank, box in every)
        elif layout.boxes.get(key) and layout.shapes[key] == tensor.shape:
            yield from ((key, box, layout.files[file]) for box, file in layout.boxes[key])
        else:
            yield from ((key, box, layout.first) for box in boxes(tensor.shape, 1))


# ------------------------------------------------------------------------------------------------------ the files


def file_plans(content: DcpContents, options: Options, layout: Layout | None = None) -> list[FilePlan]:
    """Plan the files that hold `content`: with `layout` the chunks lie as they do there, else as `options.chunks` says.

    The file that makes the others a checkpoint is the last one. Raise UnsupportedError for a value that a file cannot
    hold.
    """
    placed = _placed(content.tensors, options, layout)
    if options.to == SHARDS:
        return _shards(content.tensors, placed)
    files = _Files(None if layout else options.max_shard_size or DEFAULT_FILE_SIZE)
    templates = _Templates()
    saved: dict[str, Saved] = {}
    for key, leaf in content.values.items():
        home = (layout.files[layout.values[key]] if key in layout.values else layout.first) if layout else "0"
        place = files.add(home, templates.of_value(key, leaf.value, options.opaque))
        saved[key] = Saved(leaf.path, None, (), [SavedChunk((), (), *place)])
    for key, (path, tensor) in content.tensors.items():
        saved[key] = Saved(path, tensor.dtype.name, tensor.shape, [])
    kept = frozenset(content.aliases.values())
    written: dict[tuple[str, Box], tuple[str, int, int]] = {}
    for key, box, file in placed:
        owner = content.aliases.get(key, key)
        if (owner, box) in written:
            place = written[owner, box]
        else:
            part = cut(content.tensors[key].value, box)
            place = files.add(file, templates.of_tensor(entry_name(key, box.offsets), part))
            if owner in kept:
                written[owner, box] = place
        saved[key].chunks.append(SavedChunk(box.offsets, box.sizes, *place))
    data = description(saved)
    return [*files.plans(), FilePlan(METADATA, len(data), (Literal(0, data),))]


class _Entry(NamedTuple):
    """An archive of `size` bytes: its parts, as if it began at byte 0."""

    size: int
    parts: tuple[Part, ...]


class _Files:
    """The `.distcp` files so far, each a list of entries.

    With a limit, files are named by a rank's number, which stands for the last of its files, `__R_N.distcp`; the next
    begins where that would exceed `limit` bytes. Without one, by their names.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._parts: dict[str, list[Part]] = {}
        self._sizes: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def add(self, file: str, entry: _Entry) -> tuple[str, int, int]:
        """Append `entry` to a file; return the file's name, and the offset and size of the entry."""
        name = file
        if self._limit is not None:
            number = self._last.setdefault(file, 0)
            name = f"__{file}_{number}.distcp"
            if self._sizes.get(name, 0) and self._sizes[name] + entry.size > self._limit:
                self._last[file] += 1
                name = f"__{file}_{number + 1}.distcp"
        at = self._sizes.get(name, 0)
        self._parts.setdefault(name, []).extend(_moved(part, at) for part in entry.parts)
        self._sizes[name] = at + entry.size
        return name, at, entry.size

    def plans(self) -> Iterator[FilePlan]:
        for name in sorted(self._parts, key=_numbered):
            yield FilePlan(name, self._sizes[name], tuple(self._parts[name]))


def _numbered(name: str) -> tuple[int, str]:
    """Return a key that sorts names with numbers in them by these."""
    return len(name), name


def _moved(part: Part, by: int) -> Part:
    if isinstance(part, Literal):
        return Literal(part.offset + by, part.data)
    if isinstance(part, Data):
        return Data(part.offset + by, part.tensor, part.name)
    assert isinstance(part, Trailer)
    return Trailer(part.offset + by, part.nbytes, part.make, part.of)


def _bytes(parts: Iterable[Part], digests: Mapping[str, int]) -> bytes:
    """Return the bytes of `parts` that hold no data; `digests` are the CRC-32 of torch's records by name."""
    return b"".join(part.make(digests) if isinstance(part, Trailer) else _data(part) for part in parts)


def _data(part: Part) -> bytes:
    assert isinstance(part, Literal)
    return part.data


def _made(parts: tuple[Part, ...], names: tuple[tuple[str, str], ...], digests: Mapping[str, int]) -> bytes:
    """Return the bytes of `parts`; `names` are the pairs (record, its name in `digests`)."""
    return _bytes(parts, {record: digests[name] for record, name in names if name in digests})


def _tail(parts: tuple[Part, ...], record: str, name: str, digests: Mapping[str, int]) -> bytes:
    """Return the bytes of `parts`, which depend on the only `record`, whose name in `digests` is `name`."""
    return _bytes(parts, {record: digests[name]})


class _Template(NamedTuple):
    """The archive of a tensor but for its data: the bytes before, the record's name ("" if there is no data), the parts
    after it, and the size of the whole archive."""

    head: bytes
    record: str
    tail: tuple[Part, ...]
    size: int


class _Templates:
    """Makes entries. Tensors of one dtype and shape share all but their data, and equal plain values share everything:
    of a model with many tensors, few archives are planned."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, Shape], _Template] = {}
        self._values: dict[tuple[type, str], _Entry] = {}

    def of_tensor(self, name: str, tensor: LazyTensor) -> _Entry:
        """Return the archive of a tensor; `name` is that of its data."""
        kind = tensor.dtype.name, tensor.shape
        if kind not in self._tensors:
            self._tensors[kind] = _template(plan_tree("", tensor))
        head, record, tail, size = self._tensors[kind]
        if not record:
            return _Entry(size, (Literal(0, head),))
        at, end = len(head), len(head) + tensor.nbytes
        make = functools.partial(_tail, tail, record, name)
        return _Entry(size, (Literal(0, head), Data(at, tensor, name), Trailer(end, size - end, make, name)))

    def of_value(self, key: str, value: Any, opaque: str) -> _Entry:
        """Return the archive of another value, which may hold tensors."""
        if not _is_shared(value):
            return _whole(key, TorchTree(value, opaque).plan(""))
        kind = type(value), repr(value)
        if kind not in self._values:
            self._values[kind] = _whole(key, TorchTree(value).plan(""))
        return self._values[kind]


def _is_shared(value: Any) -> bool:
    """Return whether `value` is plain, and its `repr` differs from that of any other value of its type. NaN's does
    not."""
    if type(value) is tuple:
        return all(map(_is_shared, value)) and not any(type(item) is tuple for item in value)
    return type(value) in _SHARED and not (type(value) is float and math.isnan(value))


def _template(plan: FilePlan) -> _Template:
    at = next((number for number, part in enumerate(plan.parts) if isinstance(part, Data)), len(plan.parts))
    data = [part.name for part in plan.parts[at:] if isinstance(part, Data)]
    return _Template(_bytes(plan.parts[:at], {}), data[0] if data else "", plan.parts[at + 1 :], plan.size)


def _whole(key: str, plan: FilePlan) -> _Entry:
    """Return the archive of a value, with names for its data that nothing under another key has."""
    names = {part.name: entry_name(f"{key}/{part.name}", ()) for part in plan.parts if isinstance(part, Data)}
    if not names:
        return _Entry(plan.size, (Literal(0, _bytes(plan.parts, {})),))
    parts: list[Part] = []
    for part in plan.parts:
        if isinstance(part, Data):
            parts.append(Data(part.offset, part.tensor, names[part.name]))
        elif isinstance(part, Trailer):
            make = functools.partial(_made, (part,), tuple(names.items()))
            parts.append(Trailer(part.offset, part.nbytes, make))
        else:
            parts.append(part)
    return _Entry(plan.size, tuple(parts))


# ------------------------------------------------------------------------------------------------ safetensors shards


def _shards(tensors: Mapping[str, Leaf], placed: Iterable[tuple[str, Box, str]]) -> list[FilePlan]:
    """Plan one file for each rank, which says where in the whole its chunks begin. The first one comes last."""
    files: dict[str, dict[str, tuple[LazyTensor, Box]]] = {}
    for key, box, file in placed:
        chunks = files.setdefault(file, {})
        if key in chunks:
            raise UnsupportedError(
                f"{named(key)} would have two chunks in one shard, but a shard can store only one chunk per name.",
                "Give --chunks N instead of --like, or write .distcp files: --to dcp.",
            )
        chunks[key] = cut(tensors[key].value, box), box
    plans = []
    for number, file in enumerate(sorted(files, key=_numbered), 1):
        info = {key: {"saved_offsets": list(box.offsets)} for key, (_, box) in files[file].items()}
        metadata = {**FORMAT, **_VERSION, SHARDING: json.dumps(info)}
        parts = {key: part for key, (part, _) in files[file].items()}
        plans.append(safetensors.file_plan(shard_name(number), parts, metadata))
    return [*plans[1:], *plans[:1]]

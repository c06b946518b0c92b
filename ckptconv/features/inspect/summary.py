"""The contents of a checkpoint, as data: `inspect` returns and shows them. Pure; no tensor data is read here."""

from __future__ import annotations

import functools
import heapq
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.cli.registered import COMMANDS
from ckptconv.features.inspect.module_tree import ModuleInfo, totals, tree
from ckptconv.features.reporting.quantized import QuantizedSummary
from ckptconv.features.reporting.tensor_info import TensorInfo
from ckptconv.formats.source import NOT_CONVERTED, THEIR_STATES_ARE_CONVERTED, Source
from ckptconv.options.table import Options
from ckptconv.outputs import computed, selection
from ckptconv.outputs.naming import tree_of
from ckptconv.outputs.notices import idle_sentences
from ckptconv.pickles.children import ATOMS
from ckptconv.pickles.keys import value_of
from ckptconv.pickles.nodes import NumpyScalar, Opaque, TorchConstant
from ckptconv.pickles.vocabulary import MalformedError
from ckptconv.plan import Data, Plan
from ckptconv.result import Shown
from ckptconv.structure import keymap
from ckptconv.structure.choice import Choice
from ckptconv.structure.dtype_views import original
from ckptconv.tensors.lazy import Concat, Convert, Inline, LazyTensor, Narrow, Partitioned, Stored, Tagged, View
from ckptconv.tensors.moves import File
from ckptconv.text import brief, format_size, printable

if TYPE_CHECKING:
    from ckptconv.features.reporting.statistics import Statistics

# The number of largest tensors that are named.
LARGEST = 10
# The beginning of a note or warning on files that were not read.
NOT_READ = "Not read: "
# The most values, the most characters of each and of each key, the most elements of a list, and the longest name below
# which values are searched.
_VALUES, _LONGEST, _ITEMS, _DEEPEST = 1000, 200, 20, 2000
# A value of a checkpoint, in JSON.
Value: TypeAlias = "str | bool | int | float | list[Value] | None"


@dataclass(slots=True)
class Total:
    """The tensors, elements and bytes of one dtype. Tied tensors count once."""

    tensors: int = 0
    """Number of tensors."""

    elements: int = 0
    """Number of elements."""

    bytes: int = 0
    """Size of the tensors."""


@dataclass(slots=True)
class PlannedFile:
    """A file that a conversion would write."""

    name: str
    """Its name."""

    bytes: int
    """Its size."""

    tensors: int
    """Number of tensors in the file."""


@dataclass(slots=True)
class Forecast:
    """The output that a conversion would write. Sizes are in bytes."""

    dtype: str
    """The dtype of --as, or the default."""

    command: str
    """The command that does it."""

    bytes: int
    """The size of all its files."""

    files: list[PlannedFile]
    """The files it writes."""

    shards: int
    """Number of files that hold tensors."""

    bytes_to_read: int
    """Approximate number of bytes that the conversion reads."""

    input_bytes: int
    """The size of all files that it reads."""


@dataclass
class Summary(Shown):
    """The contents of a checkpoint. Sizes are in bytes."""

    input: str
    """The path, as it was given."""

    format: str
    """The format of the input, in words."""

    family: str
    """The family of formats: torch, deepspeed, dcp, safetensors, or that of a plug-in."""

    facts: dict[str, Any]
    """Facts about the checkpoint, by name: size, tag, world size, …"""

    counts: dict[str, int]
    """Number of tensors of each kind, for formats that distinguish kinds."""

    elements: int
    """Elements of all tensors; of tied ones once."""

    bytes: int
    """Size of all tensors; of tied ones once."""

    totals: dict[str, Total]
    """Tensors, elements and bytes by dtype; of tied tensors once."""

    tensors: list[TensorInfo]
    """Every tensor."""

    largest: list[str]
    """Names of the largest tensors, by falling size."""

    aliases: dict[str, str]
    """Tied tensors: {name: name of the one that it is tied to}."""

    values: dict[str, Value]
    """Values that are saved beside the tensors, by name; 1,000 at most. Numbers, booleans and texts, and lists and
    tuples of them, are those of JSON. Others are texts: infinities and NaN, integers of more than 53 bits and complex
    numbers as digits, bytes as hexadecimal digits, dtypes as torch.float32. A text of more than 200 characters, or a
    list of more than 20 elements, is cut, and ends with …"""

    opaque: list[str]
    """Classes of objects that are kept as inert data; nothing of them runs."""

    classes: list[str]
    """Classes and functions that its pickles name, those in `opaque` among them."""

    tables: list[str]
    """Notes on tables of whole rows, each in a sentence."""

    notes: list[str]
    """Notes, one sentence each."""

    warnings: list[str]
    """Warnings, one sentence each."""

    bytes_read: int
    """Bytes read for this report."""

    conversion: Forecast | None = None
    """The conversion that --as or --max-shard-size asks about."""

    not_finite: list[str] | None = None
    """Names of tensors with a NaN or an infinity, each once; with --stats."""

    made_of: dict[str, list[str]] | None = None
    """With --map: the input tensors of each output tensor."""

    quantized: QuantizedSummary | None = None
    """The quantized weights; only if there are any."""

    roles: dict[str, list[str]] | None = None
    """The names in the directory of a model, by their purpose; only if some are not weights."""

    @functools.cached_property
    def modules(self) -> list[ModuleInfo]:
        """Every module, by the dots in names, with what is in it: where the bytes are."""
        return list(totals(tree(self.tensors, self.aliases)))

    def to_dict(self) -> dict[str, Any]:
        """Return it as the command prints it, of plain values: the schema is `inspect.json`."""
        fields_of_summary = _fields(self)
        for name in ("conversion", "not_finite", "made_of", "quantized", "roles"):
            if fields_of_summary[name] is None:
                del fields_of_summary[name]
        if self.conversion:
            fields_of_summary["conversion"] = asdict(self.conversion)
        if self.quantized:
            fields_of_summary["quantized"] = asdict(self.quantized)
        with_stats = self.not_finite is not None
        return {
            **fields_of_summary,
            "totals": {name: asdict(total) for name, total in self.totals.items()},
            "tensors": [_row(tensor, with_stats) for tensor in self.tensors],
            "modules": [_fields(module) for module in self.modules],
        }


def _fields(value: Summary | ModuleInfo) -> dict[str, Any]:
    # There may be as many modules as tensors. `asdict`, which also copies the values of fields, takes twenty times as
    # long.
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _row(tensor: TensorInfo, with_stats: bool) -> dict[str, Any]:
    row = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.bytes}
    if with_stats:
        row["stats"] = tensor.stats and asdict(tensor.stats)
    return row


class Chosen(NamedTuple):
    """The tensors of a checkpoint that options choose, or, with a map, its result for them.

    `aliases` are their ties, {alias: kept}; `idle` are globs that match nothing, {option: reason}. `made_of` has for
    each tensor of a map the names of its sources; None without a map.
    """

    tensors: dict[str, LazyTensor]
    aliases: dict[str, str]
    idle: dict[str, str]
    made_of: dict[str, list[str]] | None = None


def tensors_of(source: Source, chosen: Options) -> Chosen:
    """Return the tensors that the options `key`, `include` and `exclude` choose.

    Raise UsageError if `key` or a glob of `include` matches nothing.
    """
    tree = tree_of(source, chosen)
    tensors = keymap.flatten(tree)[0] if source.structured else tree
    owners = source.owners
    if source.stored and not chosen.key and source.stored.tensors.keys() != tensors.keys():
        tensors, owners = source.stored.tensors, source.stored.aliases
    choice = Choice(chosen.include, chosen.exclude)
    # Tensors that safetensors must store under another dtype are shown under their own.
    flat = {name: original(tensors[name]) for name in selection.matching(tensors, choice)}
    idle = selection.idle_globs(list(tensors), choice)
    ties = {alias: owner for alias, owner in owners.items() if owner in flat}
    for way in computed.ways_of(source):
        if way.shown:
            result = way.shown(source, flat, ties)
            return Chosen(result.tensors, selection.untie(result.tensors, {}), idle, result.made_of)
    return Chosen(flat, selection.untie(flat, owners), idle)


def summarize(
    source: Source,
    tables: Sequence[str] = (),
    chosen: Options | None = None,
    *,
    path: str = "",
    statistics: Mapping[str, Statistics] | None = None,
    chosen_tensors: Chosen | None = None,
) -> Summary:
    """Return the contents of `source`, which was opened at `path`.

    `tables` are notes on tables of whole rows, to be shown too. `chosen` are the options that choose tensors.
    `statistics` are those of tensors, by name, if they were measured. `chosen_tensors` are the tensors that `chosen`
    choose, if they are known.
    """
    chosen = chosen or Options()
    flat, aliases, idle, made_of = chosen_tensors or tensors_of(source, chosen)
    by_dtype: dict[str, Total] = {}
    for name, tensor in flat.items():
        if name not in aliases:
            total = by_dtype.setdefault(tensor.dtype.name, Total())
            total.tensors += 1
            total.elements += tensor.numel
            total.bytes += tensor.nbytes
    kept = (name for name in flat if name not in aliases)
    stats = statistics or {}
    content = tree_of(source, chosen) if source.structured else {}
    return Summary(
        input=path or source.path,
        format=source.format,
        family=source.family,
        facts={**source.facts, **computed.facts_of(source)},
        # The kinds of all tensors, not of those that were chosen.
        counts={} if made_of is not None or chosen.key or chosen.include or chosen.exclude else dict(source.counts),
        elements=sum(total.elements for total in by_dtype.values()),
        bytes=sum(total.bytes for total in by_dtype.values()),
        totals=by_dtype,
        tensors=[
            TensorInfo(name, tensor.dtype.name, tuple(tensor.shape), tensor.nbytes, stats.get(aliases.get(name, name)))
            for name, tensor in flat.items()
        ],
        largest=heapq.nlargest(LARGEST, kept, key=lambda name: flat[name].nbytes),
        aliases=aliases,
        values=dict(islice(_values(content, source.values), _VALUES)),
        opaque=list(source.files.opaque),
        classes=list(source.files.mentioned),
        tables=list(tables),
        notes=[*map(_reworded, source.notes), *source.hints],
        warnings=[*map(_reworded, source.warnings), *idle_sentences(idle)],
        bytes_read=source.bytes_read,
        not_finite=None
        if statistics is None
        else [name for name in flat if name in statistics and not statistics[name].is_finite],
        made_of=made_of,
    )


def _reworded(note: str) -> str:
    return note.replace(NOT_CONVERTED, NOT_READ).replace(THEIR_STATES_ARE_CONVERTED, "")


def _values(*trees: Any) -> Iterator[tuple[str, Value]]:
    """Yield the values in `trees` that are not tensors, by name; of an object, those of its attributes."""
    stack: list[tuple[str, Any]] = [("", tree) for tree in reversed(trees)]
    seen: set[int] = set()
    while stack:
        name, value = stack.pop()
        value = _without_numpy(value)
        kind = type(value)
        is_list = kind in (list, tuple) and all(type(item) in ATOMS for item in map(_without_numpy, value))
        if is_list or kind in ATOMS or kind is TorchConstant:
            if name and value is not None:
                yield name, _plain(value)
        elif id(value) not in seen:
            seen.add(id(value))
            inner: Iterable[tuple[Any, Any]]
            inner = value.items() if isinstance(value, Mapping) else enumerate(value) if kind in (list, tuple) else ()
            if isinstance(value, Opaque):
                # An object's attributes are in a dict, which one with slots has in a pair.
                states = [part for state in value.state for part in (state if type(state) is tuple else (state,))]
                inner = [item for state in states if isinstance(state, Mapping) for item in state.items()]
            prefix = name + "." if name else ""
            inner_values = [(prefix + _word(key), item) for key, item in inner if not isinstance(item, LazyTensor)]
            stack.extend(reversed(inner_values if len(prefix) < _DEEPEST else []))


def _without_numpy(value: Any) -> Any:
    """Return a numpy scalar as a number, text or bytes; anything else, such as a numpy time, unchanged."""
    try:
        return value_of(value) if type(value) is NumpyScalar else value
    except MalformedError:
        return value


def _plain(value: Any) -> Value:
    """Return a value as JSON has it, or text."""
    value = _without_numpy(value)
    if type(value) in (list, tuple):
        return [_plain(item) for item in value[:_ITEMS]] + ["…"] * (len(value) > _ITEMS)
    if value is None or _is_number(value):
        return value  # type: ignore[no-any-return]
    if type(value) is bytes:
        value = value[:_LONGEST].hex()
    if type(value) is TorchConstant:
        value = value.name if value.kind == "device" else f"torch.{value.name}"
    if type(value) is not str:
        return brief(value, _LONGEST).strip("()")
    return value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"


def shown_value(value: Value) -> str:
    """Return a value as people read it: a text as it is, others as JSON."""
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def shown_fact(key: str, value: Any) -> str:
    """Return the fact called `key` as people read it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(name)}={shown_value(text)}" for name, text in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_size(value) if key == "size" else shown_value(value)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number or boolean that every reader of JSON reads unchanged."""
    return (
        type(value) is bool
        or (type(value) is int and abs(value) < 2**53)
        or (type(value) is float and math.isfinite(value))
    )


def _word(key: Any) -> str:
    """Return a key as a part of a value's name."""
    return key[:_LONGEST] if type(key) is str else brief(key, _LONGEST)


# For each family of formats, the command that converts it, and the name of its output.
_COMMANDS = {
    "torch": ("pt2safetensors", "OUTPUT"),
    "deepspeed": ("zero-to-fp32", "OUTPUT"),
    "dcp": ("dcp2safetensors", "OUTPUT"),
    "safetensors": ("safetensors2pt", "OUTPUT.pt"),
}


def command_for(source: Source) -> tuple[str, str]:
    """Return the command that converts `source`, and a name for its output."""
    command, output = _COMMANDS.get(source.family, _COMMANDS["torch"])
    return (command, output) if command in COMMANDS else ("convert", "OUTPUT")


def forecast(source: Source, dtype: str | None, max_shard_size: int | None = None, **chosen: Any) -> Forecast:
    """Return the conversion of `source` to `dtype` (None: the default): files, bytes, and bytes to be read.

    `chosen` are the options that choose tensors. Safetensors are converted to a file for torch.load, if a feature
    writes it. Raises the errors of planning the conversion.
    """
    from ckptconv.outputs.kinds import kind_of
    from ckptconv.outputs.planning import planned
    from ckptconv.outputs.targets import Target

    command, output = command_for(source)
    options = Options(dtype=dtype, max_shard_size=max_shard_size, **chosen)
    planning = planned(source, Target(output, kind_of(output)), options)
    flags = f" --dtype {dtype}" if dtype else ""
    flags += f" --max-shard-size {max_shard_size}" if max_shard_size else ""
    for name in ("key", "include", "exclude"):
        values = chosen.get(name, ())
        for value in filter(None, (values,) if isinstance(values, str) else values):
            flags += f" --{name} {shlex.quote(value)}"
    return Forecast(
        dtype=dtype or source.defaults.dtype,
        command=f"ckptconv {command} {shlex.quote(source.path)} {output}{flags}",
        bytes=planning.plan.nbytes,
        files=[PlannedFile(file.name, file.size, file.tensors) for file in planning.plan.files],
        shards=sum(file.tensors > 0 for file in planning.plan.files),
        bytes_to_read=source.bytes_read + bytes_to_read(planning.plan),
        input_bytes=sum(file.size for file in {file.stored: None for file in planning.plan.inputs()}),
    )


def bytes_to_read(plan: Plan) -> int:
    """Return the approximate number of bytes of its inputs that `plan` reads."""
    packed: dict[File, None] = {}
    total = 0
    for file in plan.files:
        for part in file.parts:
            if isinstance(part, Data):
                inputs = [stored for stored in part.tensor.inputs() if stored.packed]
                packed.update(dict.fromkeys(inputs))
                total += 0 if inputs else _stored_bytes(part.tensor)
    # A packed file is unpacked as a whole.
    return total + sum(file.packed.nbytes for file in packed if file.packed)


def _stored_bytes(tensor: LazyTensor) -> int:
    """Return the number of bytes of the elements of `tensor` in files."""
    if isinstance(tensor, (Tagged, View, Convert)):
        return _stored_bytes(tensor.tensor)
    if isinstance(tensor, Concat):
        return sum(map(_stored_bytes, tensor.parts))
    if isinstance(tensor, Narrow):
        extent = tensor.tensor.shape[tensor.dim]
        return _stored_bytes(tensor.tensor) * tensor.length // extent if extent else 0
    if isinstance(tensor, Stored):
        size = tensor.dtype.itemsize
        for extent, stride in zip(tensor.shape, tensor.strides, strict=True):
            size *= extent if stride else min(extent, 1)
        return size
    return tensor.nbytes if isinstance(tensor, Partitioned) or not isinstance(tensor, Inline) else 0

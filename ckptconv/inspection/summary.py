"""What is inside a checkpoint, as plain data: what `inspect` shows. Pure; no tensor data is read here."""

from __future__ import annotations

import heapq
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard

from ckptconv.formats.source import Source
from ckptconv.inspection.statistics import Statistics
from ckptconv.options import Options
from ckptconv.outputs import selection
from ckptconv.outputs.planning import weights_output
from ckptconv.outputs.selected import tree_of
from ckptconv.outputs.targets import Target
from ckptconv.pickles.children import ATOMS
from ckptconv.pickles.nodes import TorchConstant
from ckptconv.plan import Data, Plan
from ckptconv.structure import keymap
from ckptconv.structure.choice import Choice
from ckptconv.structure.dtype_views import STORED_AS
from ckptconv.tensors.lazy import Concat, Convert, Inline, LazyTensor, Narrow, Partitioned, Stored, Tagged, View
from ckptconv.tensors.moves import File
from ckptconv.text import brief

# So many of the largest tensors are named.
LARGEST = 10
# So many values are told, with so many characters of each and of each key; no deeper than names of so many.
_VALUES, _LONGEST, _DEEPEST = 1000, 200, 2000


def tensors_of(source: Source, chosen: Options) -> tuple[dict[str, LazyTensor], dict[str, str], dict[str, str]]:
    """Return the tensors that the options `key`, `include` and `exclude` choose, their ties, {alias: kept}, and which
    globs of `exclude` match nothing, {option: reason}.

    Raise UsageError if `key` or a glob of `include` matches nothing.
    """
    tree = tree_of(source, chosen)
    tensors = keymap.flatten(tree)[0] if source.structured else tree
    choice = Choice(chosen.include, chosen.exclude)
    # What safetensors has to store under another dtype is shown under its own.
    flat = {
        name: tensors[name].tensor if _is_view(tensors[name]) else tensors[name]
        for name in selection.matching(tensors, choice)
    }
    return flat, selection.untie(flat, source.owners), selection.idle_globs(list(tensors), choice)


def summarize(source: Source, tables: Sequence[str] = (), chosen: Options | None = None) -> dict[str, Any]:
    """Format, facts, totals by dtype, every tensor with dtype, shape and bytes, ties, and classes met in pickles.

    `tables` are notes on tables of whole rows, which are shown along. `chosen` are the options that choose tensors.
    Tied tensors count once. `largest` names tensors by falling size.
    """
    chosen = chosen or Options()
    flat, aliases, idle = tensors_of(source, chosen)
    totals: dict[str, dict[str, int]] = {}
    for name, tensor in flat.items():
        if name not in aliases:
            total = totals.setdefault(tensor.dtype.name, {"tensors": 0, "elements": 0, "bytes": 0})
            total["tensors"] += 1
            total["elements"] += tensor.numel
            total["bytes"] += tensor.nbytes
    kept = (name for name in flat if name not in aliases)
    held = tree_of(source, chosen) if source.structured else {}
    return {
        "format": source.format,
        "family": source.family,
        "facts": source.facts,
        # The kinds of all tensors, not of those that were chosen.
        "counts": {} if chosen.key or chosen.include or chosen.exclude else source.counts,
        "elements": sum(total["elements"] for total in totals.values()),
        "bytes": sum(total["bytes"] for total in totals.values()),
        "totals": totals,
        "tensors": list(_rows(flat)),
        "largest": heapq.nlargest(LARGEST, kept, key=lambda name: flat[name].nbytes),
        "aliases": aliases,
        "values": dict(islice(_values(held, source.values), _VALUES)),
        "opaque": source.opaque,
        "classes": source.mentioned,
        "tables": list(tables),
        "notes": [*source.notes, *source.hints],
        "warnings": [*source.warnings, *(f"{option} {reason}." for option, reason in idle.items())],
        "bytes_read": source.bytes_read,
    }


def _values(*trees: Any) -> Iterator[tuple[str, str]]:
    """Yield the values in `trees` that are no tensors, by name: numbers, texts, and lists of them."""
    stack: list[tuple[str, Any]] = [("", tree) for tree in reversed(trees)]
    seen: set[int] = set()
    while stack:
        name, value = stack.pop()
        kind = type(value)
        is_list = kind in (list, tuple) and all(type(each) in ATOMS for each in value)
        if is_list or kind in ATOMS or kind is TorchConstant:
            if name and value is not None:
                yield name, brief(value, _LONGEST)
        elif id(value) not in seen:
            seen.add(id(value))
            inner = value.items() if isinstance(value, Mapping) else enumerate(value) if kind in (list, tuple) else ()
            prefix = name + "." if name else ""
            found = [(prefix + _word(key), each) for key, each in inner if not isinstance(each, LazyTensor)]
            stack.extend(reversed(found if len(prefix) < _DEEPEST else []))


def _word(key: Any) -> str:
    """Return a key as a part of a value's name."""
    return key[:_LONGEST] if type(key) is str else brief(key, _LONGEST)


def _is_view(tensor: LazyTensor) -> TypeGuard[View]:
    return isinstance(tensor, View) and tensor.tensor.dtype.name in STORED_AS


def _rows(flat: dict[str, LazyTensor]) -> Iterator[dict[str, Any]]:
    for name, tensor in flat.items():
        yield {"name": name, "dtype": tensor.dtype.name, "shape": list(tensor.shape), "bytes": tensor.nbytes}


def add_statistics(summary: dict[str, Any], found: Mapping[str, Statistics]) -> None:
    """Add `found`, by name, to the tensors of `summary`; an alias has those of its tensor, others None.

    `not_finite` names the tensors with a NaN or an infinity, each once.
    """
    aliases = summary["aliases"]
    for row in summary["tensors"]:
        statistics = found.get(aliases.get(row["name"], row["name"]))
        row["stats"] = statistics and statistics._asdict()
    summary["not_finite"] = [
        row["name"] for row in summary["tensors"] if row["name"] in found and not found[row["name"]].is_finite
    ]


# For each family of formats the command that converts it, and what its output is called.
_COMMANDS = {
    "torch": ("pt2safetensors", "OUTPUT"),
    "deepspeed": ("zero-to-fp32", "OUTPUT"),
    "dcp": ("dcp2safetensors", "OUTPUT"),
    "safetensors": ("safetensors2pt", "OUTPUT.pt"),
}


def command_for(source: Source) -> tuple[str, str]:
    """The command that converts `source`, and a name for what it makes."""
    return _COMMANDS.get(source.family, _COMMANDS["torch"])


def forecast(source: Source, dtype: str | None, max_shard_size: int | None = None, **chosen: Any) -> dict[str, Any]:
    """The conversion of `source` to `dtype` (None: as it is done by default): files, bytes, and bytes to be read.

    `chosen` are the options that choose tensors. Of safetensors it is the one to a file for torch.load. Raises what
    planning the conversion raises.
    """
    command, output = command_for(source)
    is_torch = source.family == "safetensors"
    options = Options(dtype=dtype, max_shard_size=max_shard_size, **chosen)
    made = weights_output(source, Target(output, is_file=is_torch, is_torch=is_torch), options)
    asked = f" --dtype {dtype}" if dtype else ""
    asked += f" --max-shard-size {max_shard_size}" if max_shard_size else ""
    for name in ("key", "include", "exclude"):
        values = chosen.get(name, ())
        for value in (values,) if isinstance(values, str) else values:
            asked += f" --{name} {shlex.quote(value)}"
    return {
        "dtype": dtype or source.default_dtype,
        "command": f"ckptconv {command} {shlex.quote(source.path)} {output}{asked}",
        "bytes": made.plan.nbytes,
        "files": [{"name": file.name, "bytes": file.size, "tensors": file.tensors} for file in made.plan.files],
        "shards": sum(file.tensors > 0 for file in made.plan.files),
        "bytes_to_read": source.bytes_read + bytes_to_read(made.plan),
        "input_bytes": sum(file.size for file in {file.stored: None for file in made.plan.inputs()}),
    }


def bytes_to_read(plan: Plan) -> int:
    """About how many bytes of its inputs carrying out `plan` reads."""
    packed: dict[File, None] = {}
    total = 0
    for file in plan.files:
        for part in file.parts:
            if isinstance(part, Data):
                inputs = [each for each in part.tensor.inputs() if each.packed]
                packed.update(dict.fromkeys(inputs))
                total += 0 if inputs else _stored_bytes(part.tensor)
    # What is packed is unpacked whole.
    return total + sum(file.packed.nbytes for file in packed if file.packed)


def _stored_bytes(tensor: LazyTensor) -> int:
    """How many bytes of files the elements of `tensor` are."""
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

"""Opens a step of nanotron: a directory for each module, with a file for each parameter, or for each rank's part of
one.

Source: nanotron's serialize/{weights,utils,metadata}.py and parallel/parameters.py. The directories below `model` spell
the name of a parameter. The metadata of a part say which slices of the whole it has; its name contains its
tensor-parallel and pipeline rank.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.formats.alone import LoneKind
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.lone_file import LoneFile
from ckptconv.formats.source import Defaults, Source, Wanted
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.tensors.slices import Span, sliced
from ckptconv.text import count_of, quoted, some

FAMILY = "safetensors"
CONFIG, MODEL = "model_config.json", "model"
# The tensor in each file, and the mark of a parameter of Mamba that is not decayed; the metadata of a part.
DATA, _UNDECAYED = "data", "_no_weight_decay"
SLICES, _SHAPE = "local_global_slices_pairs", "unsharded_shape"
FILE = re.compile(
    r"model_(.+?)(?:_pp-rank-(\d{1,6})-of-(\d{1,6})_tp-rank-(\d{1,6})-of-(\d{1,6})(_exp-rank-\d+-of-\d+)?)?\.safetensors"
)
# Names in a complete step.
MARKERS = ("checkpoint_metadata.json",)
_GUESS = Guess(CERTAIN, "a step of nanotron", "convert {} OUTPUT")
# The deepest nesting of modules, and the most slices of a part.
_DEEPEST, _MOST = 64, 1 << 16


class _Part(NamedTuple):
    """A file: its place, its tensor-parallel rank, and the number of ranks; 0 of 0 if it has a whole parameter."""

    place: Location
    rank: int
    ranks: int


def sniff(probe: Probe) -> Guess | None:
    """Recognize the directory of a step."""
    names = probe.place.names if probe.is_directory else {}
    is_step = CONFIG in names and MODEL in names and names[MODEL].kind == "directory"
    return _GUESS if is_step and probe.expected in ("", FAMILY) else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open a step by its directory. Raise CorruptError if a rank's part is missing, or does not state its place;
    UnsupportedError for experts that are cut."""
    from ckptconv.formats.safetensors import header_of

    weights: dict[str, LazyTensor] = {}
    inputs: dict[str, Any] = {}
    read_bytes = size = undecayed = 0
    parameters = dict(sorted(_parameters(place.join(MODEL))))
    for name, parts in parameters.items():
        tiles: list[Any] = []
        shapes: dict[tuple[int, ...], None] = {}
        for part in parts:
            header = header_of(part.place)
            inputs[part.place.path[len(place.path) + 1 :]] = header.identity
            read_bytes, size = read_bytes + header.bytes_read, size + header.size
            undecayed += _UNDECAYED in header.tensors
            if DATA not in header.tensors or header.tensors.keys() - {DATA, _UNDECAYED}:
                raise CorruptError(
                    f"{part.place} contains {some(header.tensors)}, but the {DATA} of one parameter was expected."
                )
            tensor = header.tensors[DATA]
            shapes[_shape(part, header.metadata, tensor)] = None
            tiles += _tiles(part, header.metadata, tensor)
        weights[name] = _joined(place, name, parts, tiles, shapes)
    if not weights:
        raise CorruptError(f"{place.join(MODEL)} contains no nanotron parameters.")
    notes = (
        [f"Left out: {_UNDECAYED} of {count_of(undecayed, 'parameter')}, which only nanotron's optimizer uses."]
        if undecayed
        else []
    )
    if "optimizer" in place.names:
        notes.append(f"Not converted: the states in {place.join('optimizer')}, which are not supported.")
    ranks = max(part.ranks for parts in parameters.values() for part in parts)
    return Source(
        format="nanotron",
        family=FAMILY,
        path=place.path,
        weights=weights,
        structured=False,
        facts={
            "tensors": len(weights),
            "files": len(inputs),
            "size": size,
            **({"tensor ranks": ranks} if ranks else {}),
        },
        notes=notes,
        inputs=inputs,
        bytes_read=read_bytes,
        defaults=Defaults(shard_size=5 * 10**9),
        wanted=wanted,
        reread=functools.partial(read, place),
    )


def _parameters(model: Location) -> Iterator[tuple[str, list[_Part]]]:
    """Yield the names of parameters, and the files of each in the order of ranks."""
    stack = [(model, "")]
    while stack:
        place, prefix = stack.pop()
        parts_of: dict[str, list[_Part]] = {}
        for name, entry in place.names.items():
            if entry.kind == "directory":
                if prefix.count(".") > _DEEPEST:
                    raise CorruptError(f"{place} is nested more deeply than any module.")
                stack.append((place.child(name), f"{prefix}{name}."))
                continue
            match = FILE.fullmatch(name)
            if match is None:
                continue
            if match[6]:
                raise UnsupportedError(
                    f"{place.join(name)} belongs to one of several expert-parallel ranks, which ckptconv cannot join.",
                    "Save the checkpoint with one expert-parallel rank.",
                )
            rank, ranks = (0, 0) if match[4] is None else (int(match[4]), int(match[5]))
            parts_of.setdefault(prefix + match[1], []).append(_Part(place.at(entry.file), rank, ranks))
        for name, parts in parts_of.items():
            yield name, sorted(parts, key=lambda part: part.rank)


def _shape(part: _Part, metadata: Mapping[str, str], tensor: Stored) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    if SLICES not in metadata:
        return tensor.shape
    extents = [int(text) for text in re.findall(r"(?<![\w.])\d{1,18}(?!\w)", metadata.get(_SHAPE, ""))]
    if len(extents) != len(tensor.shape):
        raise CorruptError(
            f"{part.place}: {_SHAPE} is {quoted(metadata.get(_SHAPE, ''))}, but its tensor has the shape "
            f"{list(tensor.shape)}."
        )
    return tuple(extents)


def _tiles(part: _Part, metadata: Mapping[str, str], tensor: Stored) -> Iterator[Any]:
    """Yield the boxes of the whole that a part has."""
    from ckptconv.features.joining.chunks import ChunkTile

    if SLICES not in metadata:
        yield ChunkTile((0,) * len(tensor.shape), tensor)
        return
    whole = _shape(part, metadata, tensor)
    pairs = metadata[SLICES].split(";")
    if len(pairs) > _MOST:
        raise CorruptError(f"{part.place} has {len(pairs)} slices; at most {_MOST} are supported.")
    for pair in pairs:
        sides = [side.split("|") for side in pair.split("#")]
        if len(sides) != 2 or any(len(side) > len(whole) for side in sides):
            raise _no_slices(part, pair)
        local, in_whole = (
            [_span(part, text, extent) for text, extent in zip(_padded(side, len(whole)), shape, strict=True)]
            for side, shape in zip(sides, (tensor.shape, whole), strict=True)
        )
        if [span.length for span in local] != [span.length for span in in_whole]:
            raise _no_slices(part, pair)
        if math.prod(span.length for span in local):
            yield ChunkTile(tuple(span.start for span in in_whole), sliced(tensor, local))


def _padded(side: list[str], dims: int) -> list[str]:
    return side + ["None,None,None"] * (dims - len(side))


def _span(part: _Part, text: str, extent: int) -> Span:
    """Return the indices in a dimension of a slice of Python's, as start,stop,step."""
    numbers = text.split(",")
    if len(numbers) != 3 or not all(number == "None" or re.fullmatch(r"\d{1,18}", number) for number in numbers):
        raise _no_slices(part, text)
    start, stop, step = (None if number == "None" else int(number) for number in numbers)
    first, last = start or 0, extent if stop is None else stop
    if step not in (None, 1) or not first <= last <= extent:
        raise _no_slices(part, text)
    return Span(first, 1, last - first)


def _no_slices(part: _Part, text: str) -> CorruptError:
    return CorruptError(f"{part.place}: {quoted(text)} are not valid slices of the tensor and the whole parameter.")


def _joined(
    place: Location, name: str, parts: list[_Part], tiles: list[Any], shapes: Mapping[tuple[int, ...], None]
) -> LazyTensor:
    """Return a parameter, joined from its ranks' parts."""
    from ckptconv.features.joining.chunks import join

    sizes = {part.ranks for part in parts}
    missing = sorted({*range(max(sizes))} - {part.rank for part in parts}) if sizes != {0} else []
    if len(sizes) > 1 or len(shapes) > 1 or len({part.rank for part in parts}) < len(parts):
        raise CorruptError(f"{place}: the files of {quoted(name)} come from different saves: {_names(parts)}.")
    if missing:
        raise CorruptError(
            f"{place} lacks parts of {quoted(name)}, from these tensor-parallel ranks: {some(missing, form=str)}.",
            "Copy the files of all ranks.",
        )
    dtypes = {tile.tensor.dtype for tile in tiles}
    if len(dtypes) > 1:
        raise CorruptError(f"{place}: the parts of {quoted(name)} have different dtypes: {_names(parts)}.")
    (shape,) = shapes
    return join(next(iter(dtypes)), shape, tiles, lambda: f"{place}: {quoted(name)}")


def _names(parts: list[_Part]) -> str:
    return some([part.place.name for part in parts], form=str)


def _is_of_step(file: LoneFile) -> bool:
    return FILE.fullmatch(file.place.name) is not None and isinstance(file.tree, Mapping) and DATA in file.tree


# Files that are one of many, and the paths to give in their place.
LONE = (
    LoneKind(
        "is one parameter of a nanotron step, or a rank's part of one.",
        "Specify the directory of the step, which contains model_config.json: ckptconv convert STEP OUTPUT",
        _is_of_step,
    ),
)

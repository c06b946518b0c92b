"""Sharded sets: a state dict in several torch files, with or without an index that says which file holds which tensor.

Source: huggingface_hub's `serialization/_torch.py` and transformers' `save_pretrained`. The index of pytorch_model.bin
is pytorch_model.bin.index.json: {"metadata": {"total_size": …}, "weight_map": {name of a tensor: name of a file}}. The
files are pytorch_model-00001-of-00002.bin and so on.

ColossalAI's checkpoint_io/general_checkpoint_io.py (0.5.0) saves an optimizer in the same way: in its index,
pytorch_optim.bin.index.json, metadata.param_groups names the file of the groups.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptconv.cells import cut
from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.formats.model_files import INDEX, TORCH, TORCH_MODELS, is_torch_index, torch_shard, unlisted
from ckptconv.formats.source import Source, Wanted
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.file import read_torch
from ckptconv.formats.torch.input_log import InputLog
from ckptconv.formats.weight_map import Index, read_index
from ckptconv.storage.ahead import ahead, entries_of
from ckptconv.storage.inside import check_inside
from ckptconv.storage.location import Location
from ckptconv.storage.stores import is_repository
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import count_of, name_of, some

_GROUPS = "param_groups"
# Names of a list that a message shows.
_SHOWN = 5


def read(place: Location, wanted: Wanted | None = None) -> Source:
    """Open a set by its index, or by its directory.

    Raise CorruptError if files are missing, or hold other tensors than the index says; UnsafeError if the index names
    files outside its directory; UsageError for a directory with several sets.
    """
    if place.kind == "file":
        return _read_index(place, place.path)
    indexes = [name for name in place.names if is_torch_index(name)]
    if f"{TORCH_MODELS[0]}{INDEX}" in indexes and is_repository(place.path):
        indexes = [f"{TORCH_MODELS[0]}{INDEX}"]  # what from_pretrained takes
    if len(indexes) > 1:
        raise UsageError(
            f"{place} contains several indexes: {_some(indexes)}.", f"Specify one of them: {place.join(indexes[0])}"
        )
    if indexes:
        source = _read_index(place.join(indexes[0]), place.path)
        left = unlisted(place.names)
        why = (
            f"{_some(left)} in {place} {'was' if len(left) == 1 else 'were'} not read: {indexes[0]} lists other files."
        )
        return source._replace(warnings=[*source.warnings, why]) if left else source
    files = _complete_set(place.path, place.names)
    return _source(place.path, {file: place.at(place.names[file].file) for file in files}, None)


# --------------------------------------------------------------------------------------------------------- the index


def _read_index(index: Location, path: str) -> Source:
    index_file = _told(index)
    weight_map, groups = index_file.weight_map, index_file.metadata.get(_GROUPS)
    files = sorted(set(weight_map.values()))
    if files[0].endswith(".safetensors"):
        raise UnsupportedError(f"{index} is an index of safetensors files already.", "They need no conversion.")
    directory = index.parent
    if groups is not None:
        check_inside(name_of(groups), index.path, directory.path)
    entries = entries_of(directory, [*files, *([] if groups is None else [name_of(groups)])])
    missing = [file for file, entry in entries.items() if entry.kind != "file"]
    if missing:
        raise CorruptError(
            f"{index} lists files that cannot be found ({len(missing)} of {len(files)}): {_some(missing)}.",
            "Copy or download the missing files.",
        )
    places = {file: directory.at(entry.file) for file, entry in entries.items()}
    source = _source(path, {file: places[file] for file in files}, weight_map, places.get(name_of(groups)))
    return source._replace(inputs={**source.inputs, index.name: index_file.identity})


def _told(place: Location) -> Index:
    index = read_index(place)
    if index is None:
        raise UnsupportedError(
            f"{place} is not the index of a sharded checkpoint: it has no weight_map from tensor names to file names.",
            f"Specify the files of the checkpoint, their index, or their directory: {place.parent}",
        )
    if not index.weight_map:
        raise UsageError(f"{place} lists no tensors to convert.")
    return index


# -------------------------------------------------------------------------------------------------- names of files


def _complete_set(path: str, names: Iterable[str]) -> list[str]:
    """Return all files of the only set in a directory."""
    sets: dict[tuple[str, int, str, str], dict[int, str]] = {}
    for name in names:
        match = torch_shard().fullmatch(name)
        if match:
            stem, number, count, suffix = match.groups()
            width = len(number) if number.startswith("0") else 5
            sets.setdefault((stem, width, count, suffix), {})[int(number)] = name
    if len(sets) > 1:
        examples = [next(iter(shards.values())) for shards in sets.values()]
        raise UsageError(
            f"{path} contains several sets of shards: {_some(examples)}.", "Specify the index of one of them."
        )
    (((stem, width, count, suffix), shards),) = sets.items()
    first = 0 if 0 in shards else 1
    wanted = range(first, first + int(count))
    missing = [number for number in wanted if number not in shards]
    if missing or len(shards) != len(wanted):
        names = some(missing, form=lambda number: f"{stem}-{number:0{width}d}-of-{count}{suffix}"[:100])
        extra = f"{path} contains {len(shards)} files, but their names specify a set of {int(count)} shards."
        raise CorruptError(
            f"{path} contains {len(shards)} of {int(count)} shards; missing: {names}." if missing else extra,
            "Copy or download the missing files." if missing else "",
        )
    return [shards[number] for number in wanted]


# --------------------------------------------------------------------------------------------------------- the files


def _source(
    path: str, files: Mapping[str, Location], weight_map: Mapping[str, str] | None, groups: Location | None = None
) -> Source:
    """Join all files into one state dict, each tensor once; `weight_map`, if given, says which file holds which. If
    there are `groups`, the file of an optimizer's groups, they hold its states by number."""
    expected: dict[str, set[str]] = {file: set() for file in files}
    for name, file in (weight_map or {}).items():
        expected[file].add(name)
    opened: list[TorchFile] = []
    log = InputLog()
    weights: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for file, torch_file in zip(files, ahead(read_torch, [*files.values()]), strict=True):
        opened.append(torch_file)
        log.add(torch_file, file)
        entries = _entries(torch_file, (int if groups else str) if groups or len(files) > 1 else object)
        if weight_map is not None:
            _check_agreement(path, file, entries, expected[file])
        for name, value in entries.items():
            if name in origin:
                raise CorruptError(f"{path}: {name[:100]!r} is in two files, {origin[name]} and {file}.")
            origin[name] = file
            weights[name] = value
    whole = _joined(weights, opened)
    if groups is not None:
        opened.append(read_torch(groups))
        log.add(opened[-1], groups.name)
        whole = {"state": weights, _GROUPS: opened[-1].value}
    return Source(
        format=f"{len(files)} torch files" if len(files) > 1 else f"torch {opened[0].container}",
        family=TORCH,
        path=path,
        weights=whole,
        facts={"files": len(files), "size": log.size},
        warnings=list(log.warnings),
        shards=list(log.records),
        **log.fields(),
    )


def _entries(file: TorchFile, kind: type) -> dict[str, Any]:
    """Return the state dict in a file of a set. `kind` is that of its keys: names, or the numbers of an optimizer."""
    value = file.value
    if isinstance(value, dict) and all(isinstance(name, kind) for name in value):
        return {str(name): entry for name, entry in value.items()} if kind is int else value
    raise UnsupportedError(
        f"{file.file.path} is a file of a sharded checkpoint, but contains a value of type {type(value).__name__}; a "
        "state dict was expected."
    )


def _check_agreement(path: str, file: str, entries: Mapping[str, Any], expected: set[str]) -> None:
    missing = expected - entries.keys()
    if missing:
        raise CorruptError(
            f"{path} lists {count_of(len(missing), 'tensor')} in {file} that the file does not contain: "
            f"{_some(sorted(missing))}.",
            "The index and the files belong to different checkpoints. Download or copy both again.",
        )
    unknown = [name for name, value in entries.items() if isinstance(value, LazyTensor) and name not in expected]
    if unknown:
        raise CorruptError(
            f"{file} contains {count_of(len(unknown), 'tensor')} that {path} does not list: {_some(unknown)}.",
            "The index and the files belong to different checkpoints. Download or copy both again.",
        )


def _joined(weights: dict[str, Any], files: Sequence[TorchFile]) -> dict[str, Any]:
    """Return `weights`; if all files hold OrderedDicts, as an OrderedDict with the attributes of all of them."""
    values = [file.value for file in files]
    if not all(type(value) is OrderedDict for value in values):
        return weights
    whole = OrderedDict(weights)
    for value in values:
        for name, attribute in vars(value).items():
            known = vars(whole).setdefault(name, attribute)
            if known is not attribute and type(known) is type(attribute) and type(known) in (dict, OrderedDict):
                vars(whole)[name] = type(known)({**known, **attribute})
    return whole


def _some(names: Sequence[str]) -> str:
    return some(names, form=lambda name: cut(name, 100))

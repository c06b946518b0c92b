"""The files of a directory of safetensors: shards of a size, or as the input has them, with an index. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ckptconv.formats.model_files import INDEX_SUFFIX, SUFFIX
from ckptconv.formats.source import Source
from ckptconv.outputs.safetensors import file_plan
from ckptconv.plan import FilePlan, Literal
from ckptconv.structure.record import FILE_NAME
from ckptconv.tensors.lazy import LazyTensor


def file_plans(
    tensors: Mapping[str, LazyTensor],
    aliases: Mapping[str, str],
    structure: str | None,
    limit: int | None,
    metadata: Mapping[str, str],
    groups: Mapping[str, list[str]],
    stem: str,
) -> tuple[FilePlan, ...]:
    """Plan the files `groups`, {name: names of its tensors}, or if there are none, files of at most `limit` bytes of
    tensors, whose names begin with `stem`. Each has the `metadata`."""
    groups = groups or _numbered(pack({name: tensor.nbytes for name, tensor in tensors.items()}, limit), stem)
    contents = {name: {key: tensors[key] for key in group} for name, group in groups.items()}
    is_one = [*groups] == shard_names(stem, SUFFIX, [None])
    extra = aliases if is_one else {}
    files = [file_plan(name, content, {**metadata, **extra}) for name, content in contents.items()]
    if structure is not None:
        data = structure.encode()
        files.append(FilePlan(FILE_NAME, len(data), (Literal(0, data),)))
    if not is_one:
        files.append(index_plan(contents, aliases, stem))
    return tuple(files)


def index_plan(files: Mapping[str, Mapping[str, LazyTensor]], metadata: Mapping[str, str], stem: str) -> FilePlan:
    """Plan the index of a sharded output: the file of each tensor, and the total bytes of tensors."""
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total, **metadata},
        "weight_map": {key: name for name, tensors in files.items() for key in tensors},
    }
    data = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    return FilePlan(f"{stem}{INDEX_SUFFIX}", len(data), (Literal(0, data),))


def grouped(names: Iterable[str], files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return {file: its tensors} for tensors of these `names`; `files` are the files by tensor."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(files[name], []).append(name)
    return dict(sorted(groups.items()))


def as_in(
    source: Source, tensors: Mapping[str, LazyTensor], grouping: Mapping[str, str], stem: str
) -> dict[str, list[str]]:
    """Return {file: its tensors}, grouped as in the files of `source`: by `grouping`, or by the files of their
    bytes."""
    shards = source.shards or list(dict.fromkeys(source.defaults.grouping.values()))
    groups: dict[str, list[str]] = {path: [] for path in shards}
    for name, tensor in tensors.items():
        path = grouping.get(name) or next((file.stored.path for file in tensor.inputs()), shards[0])
        groups[path if path in groups else shards[0]].append(name)
    return _numbered([group for group in groups.values() if group] or [[]], stem)


def _numbered(groups: list[list[str]], stem: str) -> dict[str, list[str]]:
    """Return {name of a file: names of its tensors}."""
    return dict(zip(shard_names(stem, SUFFIX, groups), groups, strict=True))


def pack(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Divide names into groups, one for each shard, of at most `limit` bytes, except a single tensor that is larger.

    Greedy, in the order of `sizes` (bytes by name). Groups come in the order in which they become full, as in
    huggingface_hub: a tensor over the limit, in a group of its own, comes before the group that was begun before it.
    """
    if limit is None:
        return [list(sizes)]
    groups: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            groups.append([name])
            continue
        if current and filled + size > limit:
            groups.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*groups, current] if current or not groups else groups


def shard_names(stem: str, suffix: str, groups: Sequence[object]) -> list[str]:
    """Return `model.safetensors`, or `model-00001-of-00003.safetensors` and so on."""
    count = len(groups)
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]

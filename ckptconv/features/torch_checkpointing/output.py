"""Plans steps that torch_checkpointing loads: a file for each item and rank, and `metadata.pkl`.

Source: torch_checkpointing/{distributed_metadata,dtensor_metadata,checkpoint_layout,default_resharder}.py of 0.1.0 and
0.1.1. An item of tensors alone is written in safetensors, any other as torch.save writes it. A resharder reads both, on
any number of ranks: the metadata describes each rank's part of a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.dcp_output.contents import DcpContents, Leaf, boxes, contents, cut
from ckptconv.features.dcp_output.options import GIVEN
from ckptconv.features.dcp_output.output import output_with, with_states
from ckptconv.features.joining.chunks import Box
from ckptconv.features.joining.names import Path, dotted, named, nest
from ckptconv.features.torch_checkpointing.locate import SAFETENSORS, TORCH
from ckptconv.features.torch_files.tree import TorchTree
from ckptconv.features.torch_files.writer import dumps
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.run_names import STEP_METADATA
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import safetensors
from ckptconv.outputs.planning import Output
from ckptconv.outputs.selected import METADATA
from ckptconv.outputs.targets import Target
from ckptconv.plan import FilePlan, Literal
from ckptconv.storage.inside import leads_out
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.strides import contiguous_strides

_VERSION = "2.0"
# A mesh dimension's name that no training has. If the training had the same mesh, the library would not reshard, but
# copy a rank's plain tensor to a DTensor, which it refuses.
_DIMENSION = "saved_by_ckptconv"


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan a step: the weights, and with `optimizer` the states next to them."""
    source = with_states(source, options)
    parts = contents(source, options)
    return output_with(source, target, options, parts, file_plans(parts, options))


def file_plans(contents: DcpContents, options: Options) -> list[FilePlan]:
    """Plan the files of a step with these `contents`, on `options.chunks` ranks. The metadata comes last.

    Raise UsageError for an item whose name is not a valid file name.
    """
    ranks = GIVEN.of(options).chunks or 1
    items: dict[str, dict[str, Leaf]] = {}
    for key, leaf in (*contents.tensors.items(), *contents.values.items()):
        items.setdefault(str(leaf.path[0]), {})[key] = leaf
    plans = []
    described = {}
    for item, leaves in items.items():
        _check_name(item)
        tensors = {key: leaf for key, leaf in leaves.items() if key in contents.tensors}
        values = {leaf.path[1:]: leaf.value for key, leaf in leaves.items() if key in contents.values}
        is_plain = all(len(leaf.path) > 1 and leaf.value.dtype.code for leaf in tensors.values()) and not values
        by_rank: list[dict[Path, LazyTensor]] = [{} for _ in range(ranks)]
        paths: dict[str, list[dict[str, Any]]] = {}
        for leaf in tensors.values():
            path, shape = leaf.path[1:], leaf.value.shape
            rank_boxes = boxes(shape, ranks)
            for rank, box in enumerate(rank_boxes):
                by_rank[rank][path] = cut(leaf.value, box)
            text = json.dumps(list(path), separators=(",", ":"), ensure_ascii=True)
            paths[text] = [_described(leaf.value, rank_boxes, ranks)]
        suffix = SUFFIX if is_plain else ".pt"
        files = [f"{item}_{rank}{suffix}" for rank in range(ranks)]
        for name, own_tensors in zip(files, by_rank, strict=True):
            if is_plain:
                flat = {dotted(path): tensor for path, tensor in own_tensors.items()}
                plans.append(safetensors.file_plan(name, flat, METADATA))
            else:
                tree = _nested({**own_tensors, **values}, name)
                plans.append(TorchTree(tree, options.opaque).plan(name, name.removesuffix(".pt")))
        if paths:
            kind = SAFETENSORS if is_plain else TORCH
            described[item] = {
                "nested_path_to_metadata": paths,
                "rank_to_layout_info": {
                    rank: {"file_path": name, "serialization_format": {"type": kind}} for rank, name in enumerate(files)
                },
            }
    data = dumps({"metadata": described, "world_size": ranks, "version": _VERSION})
    return [*plans, FilePlan(STEP_METADATA, len(data), (Literal(0, data),))]


def _check_name(item: str) -> None:
    why = "it is empty" if not item else "it is a path" if "/" in item else leads_out(f"{item}_0.pt", "")
    why = why or ("it begins with a dot" if item.startswith(".") else "")
    if why:
        raise UsageError(
            f"{named(item)} would be the name of an item and of its files in the step, but {why}.",
            "Store the weights under another key with --model-key.",
        )


def _nested(leaves: Mapping[Path, Any], name: str) -> Any:
    """Return a rank's value of an item: the only value, or the dicts and lists that hold it."""
    return leaves[()] if () in leaves else nest(leaves, name) if leaves else {}


def _described(tensor: LazyTensor, rank_boxes: tuple[Box, ...], ranks: int) -> dict[str, Any]:
    """Describe a tensor: cut along its first dimension for all ranks, the last of which may have nothing; or whole, on
    the first rank."""
    is_cut = len(rank_boxes) > 1
    mesh = tuple(range(ranks if is_cut else 1))
    data = {
        "global_shape": list(tensor.shape),
        "dtype": f"torch.{tensor.dtype}",
        "stride": list(contiguous_strides(tensor.shape)),
        "mesh_spec": {
            "device_type": "cpu",
            "mesh_shape": (len(mesh),),
            "mesh_data": mesh,
            "mesh_dim_names": (_DIMENSION,),
        },
        "placements": [{"type": "Shard", "dim": 0} if is_cut else {"type": "Replicate"}],
    }
    return {
        "sharding_metadata": {"type": "DTensorShardingMetadata", "data": data},
        "ranks": tuple(range(len(rank_boxes))),
    }

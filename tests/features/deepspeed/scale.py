"""Plans the conversion of a ZeRO-3 checkpoint of a trillion parameters, of which only the description exists.

    scale.py [--parameters 200000] [--ranks 1024] [--elements 5000000]

Prints a JSON object: what the plan is, and what planning took in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from typing import Any

from ckptconv.features.deepspeed.assemble import assemble
from ckptconv.features.deepspeed.records import ModelFile, OptimFile
from ckptconv.formats.source import Defaults, Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import planned
from ckptconv.outputs.targets import Target
from ckptconv.plan import Data
from ckptconv.process import peak_rss
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor, Stored
from ckptconv.tensors.moves import File

FLOAT32, BFLOAT16 = DTYPES["float32"], DTYPES["bfloat16"]
# DeepSpeed's default: elements of a sub-group on every rank.
SUB_GROUP = 1_000_000_000


def shapes_of(parameters: int, elements: int) -> list[dict[str, tuple[int, ...]]]:
    """One group of matrices and vectors, in blocks as models have them; no size is a multiple of the ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(parameters):
        rows = 2_001 + number % 7
        shape = (rows, elements // rows) if number % 10 else (elements,)
        shapes[f"model.layers.{number // 10}.mlp.experts.{number % 10}.weight"] = shape
    return [shapes]


def sub_groups(shapes: dict[str, tuple[int, ...]], ranks: int) -> list[dict[str, tuple[int, ...]]]:
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled >= SUB_GROUP:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += piece(shape, ranks)
    return groups


def piece(shape: tuple[int, ...], ranks: int) -> int:
    numel = 1
    for count in shape:
        numel *= count
    return -(-numel // ranks)


def described(parameters: int, ranks: int, elements: int) -> tuple[ModelFile, list[OptimFile]]:
    """What the files of such a checkpoint say."""
    shapes = sub_groups(shapes_of(parameters, elements)[0], ranks)
    placeholder = Inline(b"", BFLOAT16, (0,))
    module: dict[str, LazyTensor] = {name: placeholder for group in shapes for name in group}
    nothing: dict[str, Any] = {}
    model = ModelFile(
        File("zero_pp_rank_0_mp_rank_00_model_states.pt", 1 << 26),
        module, {}, [], [], shapes, {}, {}, {}, nothing, "0.19.8", None, [], False, nothing,
    )  # fmt: skip
    sizes = [sum(piece(shape, ranks) for shape in group.values()) for group in shapes]
    optims = []
    for rank in range(ranks):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        file = File(f"/checkpoints/global_step100000/{name}", 12 * sum(sizes) + (1 << 20))
        masters: list[LazyTensor] = []
        at = 4096
        for size in sizes:
            masters.append(Stored(file, at, FLOAT32, (size,), (1,)))
            at += 4 * size
        states: list[dict[str, Any]] = [{} for _ in sizes]
        optims.append(
            OptimFile(
                file, 3, [ranks], masters, [], [], [], None, states, [], None, nothing, "0.19.8", None, False, nothing
            )
        )  # fmt: skip
    return model, optims


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--parameters", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--elements", type=int, default=5_000_000, help="of every parameter, about")
    options = parser.parse_args()
    model, optims = described(options.parameters, options.ranks, options.elements)
    started = time.process_time()
    weights = assemble(model, optims, "global_step100000", lambda rank: model, {}, dict)
    state = weights.state_dict()
    source = Source(
        "DeepSpeed ZeRO-3", "deepspeed", "global_step100000", state,
        structured=False, defaults=Defaults("float32", 5 * 10**9),
    )  # fmt: skip
    plan = planned(source, Target("/nowhere/model", "directory"), Options()).plan
    seconds = time.process_time() - started
    largest = max(plan.files, key=lambda file: len(file.parts))
    tensors = [part for file in plan.files for part in file.parts if isinstance(part, Data)]
    # The last bytes of the last tensor come from the last rank that has any.
    last = list(tensors[-1].tensor.moves(tensors[-1].nbytes - 1, tensors[-1].nbytes))
    report = {
        "parameters": sum(tensor.tensor.numel for tensor in tensors),
        "tensors": len(tensors),
        "files": len(plan.files),
        "bytes": plan.nbytes,
        "seconds": seconds,
        "peak_rss_bytes": peak_rss(),
        "task_bytes": len(pickle.dumps(largest)),
        "last": [move.file.path for move in last if move.file],
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

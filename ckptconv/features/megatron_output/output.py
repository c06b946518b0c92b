"""Plan a step of Megatron-core: the files of torch.distributed.checkpoint, and what Megatron-LM looks for beside them.

Source: megatron/core/dist_checkpointing/{core,serialization}.py and strategies/common.py, and Megatron-LM's
megatron/training/checkpointing.py, of Megatron-core 0.16 to 0.19. `latest_checkpointed_iteration.txt`, next to the
step, has its number or "release". The values that all ranks share are in common.pt, which every release reads; from
0.19 on, Megatron-core writes them into the checkpoint, and reads both. A step like one of these has them there too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ckptconv.features.dcp_output.contents import (
    COMMON_STATE,
    DEFAULT_FILE_SIZE,
    DcpContents,
    Leaf,
    contents,
    file_plans,
)
from ckptconv.features.dcp_output.layout import Layout
from ckptconv.features.dcp_output.options import GIVEN as CUTTING
from ckptconv.features.dcp_output.output import output_with, with_states
from ckptconv.features.joining.chunks import Box
from ckptconv.features.joining.names import nest
from ckptconv.features.megatron_core.alone import COMMON, CONFIG_FILE, RUN_CONFIG
from ckptconv.features.megatron_core.arguments import ADAPTER, EMBEDDINGS, HEAD
from ckptconv.features.megatron_core.extra import BACKEND
from ckptconv.features.megatron_core.fsdp import OF_RANKS
from ckptconv.features.megatron_core.optimizers import schedule_of
from ckptconv.features.megatron_output.arguments import arguments, shape_of
from ckptconv.features.megatron_output.groups import SHARDING, has_two, optimizer_of
from ckptconv.features.megatron_output.imitating import Form
from ckptconv.features.megatron_output.kind import NUMBERED
from ckptconv.features.megatron_output.sharding import LOCAL, TRANSFORMER_ENGINE, Sharded, sharded
from ckptconv.features.megatron_output.states import remarks, stored_states, taken_out
from ckptconv.features.torch_files.tree import TorchTree
from ckptconv.formats.run_names import TREES
from ckptconv.formats.source import CONFIG, Source
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.planning import Output
from ckptconv.outputs.targets import Target
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.plan import FilePlan, Literal
from ckptconv.storage.paths import basename
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

_CHECKPOINT_VERSION = 3.0
_CORE, _ENGINE = "Megatron-core", "Transformer Engine"
NAMESPACE = Global("argparse", "Namespace")


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan a step: the weights, and with `states` the optimizer's states."""
    source, form = with_states(source, options), target.layout or Form()
    content = contents(source, options)
    states = taken_out(content) if options.states else None
    own = common_of(content)
    tensors = untied({key: leaf.value for key, leaf in content.tensors.items()})
    stored = sharded(tensors, options.to, source.path)
    objects = {name: [None] for name in stored.objects} | {key: leaf.value for key, leaf in content.values.items()}
    content.values = {name: Leaf((), value) for name, value in objects.items()}
    name = basename(target.path)
    number = NUMBERED.fullmatch(name)
    iteration = int(number[1]) if number else 0
    common, notes = completed(own, stored, source, iteration, has_states=bool(options.states))
    if states:
        content.warnings.extend(remarks(states, tensors))
        kinds = stored_states(states, tensors, options.to, source.path)
        stored = stored.beside(kinds)
        are_two = has_two(tensors, own.get("args"), form.optimizers)
        if are_two is None:
            notes.append(
                "The states of experts are written as those of a second optimizer, which Megatron-core uses on "
                "several expert-parallel ranks. To train on a single rank, use --like STEP with any step of a "
                "single-rank training run."
            )
        common["optimizer"] = optimizer_of(
            states, tensors, own.get("optimizer") or {}, are_two is not False, source.path
        )
        common["opt_param_scheduler"] = own.get("opt_param_scheduler") or schedule_of(common["optimizer"])
        common["content_metadata"] |= {
            "distrib_optim_sharding_type": SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
        }
        if CUTTING.of(options).fill_states:
            notes.append(
                "Parameters whose states were filled with zeros get the step count of the others: Megatron-core "
                "stores one count for all."
            )
        if "opt_param_scheduler" not in own:
            notes.append(
                "The learning rate schedule restarts: specify a schedule in Megatron-LM, with "
                "--override-opt_param-scheduler."
            )
    content.tensors = {name: Leaf((), tensor) for name, tensor in stored.tensors.items()}
    of_engine = options.to == TRANSFORMER_ENGINE
    if not all(ADAPTER in name for name in stored.tensors):
        notes.append(
            f"The layers have the names of {_ENGINE if of_engine else _CORE}. For the names of "
            f"{_CORE if of_engine else _ENGINE}, use --to {LOCAL if of_engine else TRANSFORMER_ENGINE}."
        )
    if EMBEDDINGS not in stored.tensors and not stored.layers:
        content.warnings.append(
            f"the tensors include neither {EMBEDDINGS} nor a decoder layer: Megatron-core may recognize none of them"
        )
    files = [literal(CONFIG_FILE, json.dumps({"sharded_backend": BACKEND, "sharded_backend_version": 1}))]
    if form.has_common:
        files.append(TorchTree(common).plan(COMMON, "common"))
    else:
        content.values[COMMON_STATE] = Leaf((), [common])
    if form.run_config:
        files.append(literal(RUN_CONFIG, form.run_config))
        notes.append(
            f"{RUN_CONFIG} was copied unchanged from {form.where}, without a check that it describes this model."
        )
    files.extend(file_plans(content, options, _layout(content, stored, options)))
    files.append(literal(TREES[target.form], str(iteration) if number else name))
    planned = output_with(source, target._replace(layout=None), options, content, files)
    return planned._replace(notices=planned.notices._replace(notes=(*planned.notices.notes, *notes)))


def untied(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return `tensors`, without the head if it is tied to the embeddings: Megatron-core has none then."""
    aliases = selection.untie(tensors, {})
    if {EMBEDDINGS, HEAD} <= tensors.keys() and aliases.get(HEAD, HEAD) == aliases.get(EMBEDDINGS, EMBEDDINGS):
        del tensors[HEAD]
    return tensors


def literal(name: str, text: str) -> FilePlan:
    """Plan a file with this text."""
    data = text.encode()
    return FilePlan(name, len(data), (Literal(0, data),))


def common_of(content: DcpContents) -> dict[str, Any]:
    """Take the values that all ranks share out of `content`, and return them; none of another program's source."""
    if COMMON_STATE in content.values:
        (values,) = content.values.pop(COMMON_STATE).value
        return dict(values)
    paths = {key: leaf for key, leaf in content.values.items() if leaf.path[0] == "common"}
    for key in paths:
        del content.values[key]
    common = nest({leaf.path[1:]: leaf.value for leaf in paths.values()}, "common") if paths else {}
    return dict(common)


def completed(
    common: Mapping[str, Any], stored: Sharded, source: Source, iteration: int, *, has_states: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the values that all ranks share, and notes about them: the source's own, with arguments that its
    configuration says, and without those of its ranks."""
    config = source.values.get(CONFIG) or {}
    notes = []
    values = {key: value for key, value in common.items() if key not in (*OF_RANKS, "optimizer", "opt_param_scheduler")}
    own = values.pop("args", None)
    args = dict(own) if isinstance(own, dict) else {}
    if not args:
        derived = arguments(stored, config)
        args = derived.values
        if not args:
            notes.append(
                "No arguments were written, because they require embeddings and a config.json with the number of "
                "attention heads. Specify them on Megatron-LM's command line."
            )
        if derived.untold:
            notes.append(
                f"Missing from the arguments, so specify them on Megatron-LM's command line: {some(derived.untold)}."
            )
    if args:
        own_shape = shape_of(stored.tensors, stored.layers)
        changed = [f"{name} ({args[name]!r}, now {of!r})" for name, of in own_shape.items() if args.get(name, of) != of]
        if changed:
            notes.append(
                f"Arguments that contradict the tensors were changed to match the tensors: {some(changed, form=str)}."
            )
        args |= {name: of for name, of in own_shape.items() if name in args}
        args |= {"no_save_rng": True, "no_save_optim": not has_states, "ckpt_format": BACKEND}
    metadata = values.get("content_metadata")
    own_values: dict[str, Any] = {
        **({"args": Opaque(NAMESPACE, state=[args])} if args else {}),
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": iteration,
        "content_metadata": {**(metadata if isinstance(metadata, dict) else {}), "singleton_local_shards": False},
    }
    rows = stored.tensors[EMBEDDINGS].shape[0] if EMBEDDINGS in stored.tensors else 0
    vocabulary = config.get("vocab_size")
    if type(vocabulary) is int and rows > vocabulary:
        notes.append(f"The embeddings have {rows} rows, of which the last {rows - vocabulary} are padding.")
    return {**own_values, **{key: value for key, value in values.items() if key not in own_values}}, notes


def _layout(content: DcpContents, stored: Sharded, options: Options) -> Layout:
    """Return how the tensors are cut, and the file of each chunk: the parts of a rank in files of limited size."""
    limit, chunks = options.max_shard_size or DEFAULT_FILE_SIZE, CUTTING.of(options).chunks or 1
    sizes: dict[int, tuple[int, int]] = {}
    boxes: dict[str, list[tuple[Box, str]]] = {}
    for name, tensor in stored.tensors.items():
        placed = boxes.setdefault(name, [])
        starts: dict[int, int] = {}
        for box in stored.boxes(name, chunks):
            start = box.offsets[stored.axes[name]] if len(box.offsets) > stored.axes[name] else 0
            rank = starts.setdefault(start, len(starts))
            number, size = sizes.get(rank, (0, 0))
            nbytes = tensor.nbytes // max(tensor.numel, 1) * math.prod(box.sizes)
            if size and size + nbytes > limit:
                number, size = number + 1, 0
            sizes[rank] = number, size + nbytes
            placed.append((box, f"__{rank}_{number}.distcp"))
    values = dict.fromkeys(content.values, "__0_0.distcp")
    paths = {key: leaf.path for key, leaf in (*content.tensors.items(), *content.values.items())}
    return Layout({name: tensor.shape for name, tensor in stored.tensors.items()}, boxes, values, paths)

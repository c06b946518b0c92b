"""Plan a checkpoint of Megatron-FSDP: the files of torch.distributed.checkpoint, and the pointer of the run.

Source: megatron/training/checkpointing.py of Megatron-LM with Megatron-core 0.16 to 0.19, and
megatron/core/transformer/fsdp_dtensor_checkpoint.py. Weights lie under `model`, as `module.<parameter>`, and are the
fp32 masters if there are any. States and settings lie under `optimizer`, as `module.module.<parameter>`, with a further
`module.` if the model computes in 16 bits. The values that all ranks share have keys of their own.
"""

from __future__ import annotations

import struct

from ckptconv.features.dcp_output.contents import OBJECT, contents, file_plans, flattened
from ckptconv.features.dcp_output.output import output_with, with_states
from ckptconv.features.joining.names import dotted
from ckptconv.features.megatron_core.optimizers import schedule_of
from ckptconv.features.megatron_fsdp.parameters import apart, divided, gated, settings
from ckptconv.features.megatron_output.groups import has_two, optimizer_of
from ckptconv.features.megatron_output.kind import NUMBERED
from ckptconv.features.megatron_output.output import NAMESPACE, common_of, completed, literal, untied
from ckptconv.features.megatron_output.sharding import TRANSFORMER_ENGINE, sharded
from ckptconv.features.megatron_output.states import remarks, stored_states, taken_out
from ckptconv.formats.run_names import TREES
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.outputs.targets import Target
from ckptconv.pickles.nodes import Opaque
from ckptconv.storage.paths import basename
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor
from ckptconv.text import some

_MODEL, _OPTIMIZER, _SCHEDULE, _ARGS = "model", "optimizer", "opt_param_scheduler", "args"
_STATE, _META, _STEP = "state", "param_to_group_meta", "step"
_WRAPPED = "module."
# The keys of states, and that of masters, as `stored_states` has them.
_MOMENTS, _MASTERS = {key: f"optimizer.state.{key}" for key in ("exp_avg", "exp_avg_sq")}, "optimizer.state.param"


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan a checkpoint: the weights, and with `states` the optimizer's states."""
    source = with_states(source, options)
    content = contents(source, options)
    states = taken_out(content) if options.states else None
    own = common_of(content)
    tensors = untied({key: leaf.value for key, leaf in content.tensors.items()})
    stored = sharded(tensors, TRANSFORMER_ENGINE, source.path)
    name = basename(target.path)
    number = NUMBERED.fullmatch(name)
    iteration = int(number[1]) if number else 0
    tree, notes = completed(own, stored, source, iteration, has_states=bool(states))
    del tree["content_metadata"]
    args = tree[_ARGS].state[0] if _ARGS in tree else {}
    tree[_ARGS] = Opaque(NAMESPACE, state=[{**args, "ckpt_format": "fsdp_dtensor"}])
    weights = apart(stored)
    with_gate = gated(weights, source.path)
    if states:
        content.warnings.extend(remarks(states, tensors))
        kinds = stored_states(states, tensors, TRANSFORMER_ENGINE, source.path)
        masters, moments = apart(kinds[_MASTERS]), {key: apart(kinds[whole]) for key, whole in _MOMENTS.items()}
        weights |= masters
        are_two = bool(has_two(tensors, own.get(_ARGS), None))
        optimizer = optimizer_of(states, tensors, own.get(_OPTIMIZER) or {}, are_two, source.path)
        by_name = settings(optimizer, masters, source.path)
        in_16_bits = bool(args.get("bf16", True) or args.get("fp16"))
        wrapped = _WRAPPED * (3 if in_16_bits else 2)
        step = Inline(struct.pack("<f", next(iter(by_name.values()))[_STEP]), DTYPES["float32"], ())
        parts = {key: dict(divided(every, with_gate)) for key, every in moments.items()}
        tree[_OPTIMIZER] = {
            _STATE: {
                f"{wrapped}{name}": {_STEP: step, **{key: every[name] for key, every in parts.items()}}
                for name in parts[next(iter(parts))]
            },
            _META: {f"{wrapped}{name}": values for name, values in by_name.items()},
        }
        tree[_SCHEDULE] = own.get(_SCHEDULE) or schedule_of(optimizer)
        notes.append(
            f"The states have the parameter names of a training run with {'16' if in_16_bits else '32'}-bit weights."
        )
    tree[_MODEL] = {f"{_WRAPPED}{name}": tensor for name, tensor in divided(weights, with_gate)}
    objects = [key for key in content.values if OBJECT.fullmatch(key)]
    if objects:
        notes.append(f"Left out, because Megatron-FSDP does not support these objects: {some(objects)}.")
    content.tensors = {}
    content.values = {key: leaf for key, leaf in content.values.items() if key not in objects}
    for leaf in flattened(tree, (), []):
        (content.tensors if isinstance(leaf.value, LazyTensor) else content.values)[dotted(leaf.path)] = leaf
    notes.append(
        "The output is for layers of Transformer Engine and one pipeline-parallel stage: with several stages, "
        "Megatron-FSDP uses the same names for the layers of each. It contains no random states: use --no-load-rng "
        "in Megatron-LM."
    )
    files = [*file_plans(content, options), literal(TREES[target.form], str(iteration) if number else name)]
    planned = output_with(source, target._replace(layout=None), options, content, files)
    return planned._replace(notices=planned.notices._replace(notes=(*planned.notices.notes, *notes)))

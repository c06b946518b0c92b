"""Plan a checkpoint of torch.distributed.checkpoint, or a step of torch_checkpointing, as an output."""

from __future__ import annotations

from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import dcp, restore, step
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.targets import Target
from ckptconv.outputs.told import Told
from ckptconv.text import some


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan a checkpoint of torch.distributed.checkpoint, or a step of torch_checkpointing: the weights, and with
    `states` those of the optimizer beside them."""
    if options.states:
        source = source._replace(inputs=source.inputs_of_all)
    found = dcp.contents(source, options)
    files = tuple(step.checkpoint_plans(found, options, target.layout))
    warnings = [*found.chosen.warnings, *found.warnings]
    if found.left_out:
        warnings.append(f"left out, as their classes are known by name only: {restore.shown(found.left_out)}")
    if found.kept:
        warnings.append(f"dcp.load will run what is named by: {restore.shown(found.kept)}")
    if options.to == dcp.SHARDS and found.values:
        warnings.append(f"left out, as safetensors shards hold tensors alone: {some(found.values)}")
    if target.layout and (unlike := dcp.unlike(found.tensors, target.layout)):
        warnings.append(f"not in {options.like} with this shape, so written whole: {some(unlike)}")
    told = Told(idle=found.chosen.idle(options), kept=frozenset(), warnings=tuple(warnings), notes=found.chosen.notes)
    made = output_of("dcp", [source], target, options, files, {}, told)
    return made._replace(described=len(found.tensors))

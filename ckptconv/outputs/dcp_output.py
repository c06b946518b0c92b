"""Plan a checkpoint of torch.distributed.checkpoint as an output."""

from __future__ import annotations

from collections.abc import Sequence

from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import dcp, restore
from ckptconv.outputs.notices import Notices
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.targets import Target
from ckptconv.plan import FilePlan
from ckptconv.text import some


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan a checkpoint of torch.distributed.checkpoint: the weights, and with `states` the optimizer's beside them."""
    source = with_states(source, options)
    found = dcp.contents(source, options)
    return output_with(source, target, options, found, dcp.file_plans(found, options, target.layout))


def with_states(source: Source, options: Options) -> Source:
    """Return `source` with the inputs of the optimizer's states among its own, if these are written beside the
    weights."""
    return source._replace(inputs=source.inputs_of_all) if options.states else source


def output_with(
    source: Source, target: Target, options: Options, found: dcp.DcpContents, files: Sequence[FilePlan]
) -> Output:
    """Return the output of the planned `files`, which hold what was `found`."""
    warnings = [*found.chosen.warnings, *found.warnings]
    if found.left_out:
        warnings.append(f"left out, because only the names of their classes are known: {restore.shown(found.left_out)}")
    if found.kept:
        warnings.append(f"dcp.load will run the code named by: {restore.shown(found.kept)}")
    if options.to == dcp.SHARDS and found.values:
        warnings.append(f"left out, because safetensors shards hold only tensors: {some(found.values)}")
    if target.layout and (unlike := dcp.unlike(found.tensors, target.layout)):
        warnings.append(f"not in {options.fitting()['like']} with this shape, so written uncut: {some(unlike)}")
    notices = Notices(
        idle=found.chosen.idle(options), kept=frozenset(), warnings=tuple(warnings), notes=found.chosen.notes
    )
    made = output_of("dcp", [source], target, options, tuple(files), {}, notices)
    return made._replace(described=len(found.tensors))

"""Plan a universal checkpoint of DeepSpeed as an output."""

from __future__ import annotations

from ckptconv.features.universal import trees
from ckptconv.features.universal.resuming import resumable
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.notices import Notices
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.targets import Target


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan the weights, and the optimizer's states where there are any."""
    checkpoint = resumable(source, options)
    files = (*trees.file_plans(checkpoint.training, checkpoint.weights, checkpoint.states), trees.latest(target.path))
    source = source._replace(inputs=source.inputs_of_all)
    notices = Notices(
        idle=checkpoint.idle,
        notes=checkpoint.notes,
        warnings=checkpoint.warnings,
        equal=checkpoint.equal,
        record=checkpoint.record,
    )
    return output_of("universal", [source], target, options, files, {}, notices)

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
    found = resumable(source, options)
    files = (*trees.file_plans(found.training, found.weights, found.states), trees.latest(target.path))
    source = source._replace(inputs=source.inputs_of_all)
    notices = Notices(idle=found.idle, notes=found.notes, warnings=found.warnings)
    return output_of("universal", [source], target, options, files, {}, notices)

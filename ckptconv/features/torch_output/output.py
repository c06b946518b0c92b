"""Plan a file for torch.load as an output."""

from __future__ import annotations

from ckptconv.errors import UsageError
from ckptconv.features.torch_output.restore import plan_restored
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import computed
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.targets import Target
from ckptconv.publish.present import taken_for_input
from ckptconv.storage.location import Location
from ckptconv.text import LastWord


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan the file of the weights. Raise UsageError for a computed source, or one like a reference."""
    if computed.command_of(source.computed):
        if (
            isinstance(target.proposed, LastWord)
            and Location(target.path, dict(options.storage_options)).kind != "missing"
        ):
            raise taken_for_input(target.path)
        raise UsageError(
            f"{target.path} has the name of a file for torch.load, but computed outputs are written as safetensors.",
            "Use a directory or a name that ends in .safetensors, and convert the result to .pt with `ckptconv "
            "safetensors2pt`.",
        )
    if source.reference:
        raise UsageError(
            f"{target.path} has the name of a file for torch.load, but --like applies only to safetensors."
        )
    file, restored, notices = plan_restored(source, target.path, options)
    return output_of("weights", [source], target, options, (file,), {}, notices, restored)

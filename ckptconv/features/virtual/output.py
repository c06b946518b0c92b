"""Plans a virtual checkpoint as an output, and recognizes one."""

from __future__ import annotations

from ckptconv.features.virtual import description
from ckptconv.formats.registered import copying
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output, output_of, safetensors_files
from ckptconv.outputs.targets import Target
from ckptconv.plan import FilePlan, Literal
from ckptconv.storage.paths import basename, dirname
from ckptconv.storage.reading import Reader


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan the description of the files that a conversion of the weights to a directory would write."""
    meant = Target(dirname(target.path), "directory", stem=source.stem)
    source = source._replace(inputs=source.all_inputs())
    files, aliases, remarks = safetensors_files(source, meant, options)
    for module in copying("plan"):
        _, remarks = module.planned(source._replace(companions={}), remarks)
    real = output_of("weights", [source], meant, options, files, aliases, remarks)
    data = description.document(target.path, real.plan.files, source.format, real.plan.plan_id)
    file = FilePlan(basename(target.path), len(data), (Literal(0, data),))
    output = output_of("virtual", [source], target, options, (file,), real.aliases, real.notices)
    return output._replace(described=real.tensors)


def is_ours(reader: Reader) -> bool:
    """Return whether this program wrote the file, judged by its form."""
    return reader.read_at(0, min(reader.file.size, len(description.BEGINNING))) == description.BEGINNING

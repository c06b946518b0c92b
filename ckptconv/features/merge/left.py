"""The tokenizer in the directory of an adapter, which the output does not have: that of the base is copied."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptconv.features.companions.copying import is_same_file
from ckptconv.features.companions.directory import ROWS
from ckptconv.features.companions.reading import companions_of
from ckptconv.formats.source import Source
from ckptconv.outputs.targets import Target
from ckptconv.storage.location import Location
from ckptconv.text import some

# Names of the files by which texts, images and sound become the input of a model.
_PREPARING = {name for row in ROWS if row.role.startswith(("tokenizer", "processor")) for name in row.names.split()}


def with_left(
    source: Source,
    target: Target,
    options: Mapping[str, object],
    stays: Mapping[str, str] = {},
    folders: Collection[str] = (),
) -> tuple[Source, Target]:
    """Return `source`, whose companions go to `target`, with a warning for each adapter merged into it that has another
    tokenizer or processor next to it: a training may have changed it."""
    merge = source.computed.get("merge") if source.companions else None
    place = Location(target.path, dict(options))
    warnings = []
    for adapter in merge.adapters if merge else ():
        beside = companions_of(adapter.source, options, _PREPARING)
        others = [
            name if name in source.companions else f"{name} (the base has none)"
            for name, file in beside.files.items()
            if name not in source.companions or not is_same_file(file, source.companions[name], place)
        ]
        if others:
            warnings.append(
                f"{beside.directory} has its own {some(others, len(others), str)}, but the output has the tokenizer "
                "and the chat template of the base. If the training run changed these, copy the files of the adapter "
                "to OUTPUT."
            )
    return source._replace(warnings=[*source.warnings, *warnings]), target

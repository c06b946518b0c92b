"""Whether the configuration in a model's directory describes the tensors of an output too: it is copied without an
option then, with the other companions.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptconv.features.companions.reading import companions_of
from ckptconv.features.configs import configs
from ckptconv.formats.model_files import holds_whole
from ckptconv.formats.registered import DEEPSPEED, pipelines
from ckptconv.formats.source import CONFIG, Source
from ckptconv.options.table import Options
from ckptconv.outputs.kinds import is_set
from ckptconv.storage.location import Location

# Options after which an output may have other names than a configuration describes.
_NAMING = ("key", "include", "strip_prefix", "rename", "map", "raw", "partial")


def is_described(source: Source, names: Collection[str], options: Options) -> bool:
    """Return whether a configuration in the directory of `source`, with these `names`, describes the tensors of the
    output."""
    if source.reference or "map" in source.computed or any(is_set(name, options) for name in _NAMING):
        return False
    if source.family != DEEPSPEED and not holds_whole(names):
        return False
    # One module of sentence-transformers is not what its configuration describes.
    files = companions_of(source, options.storage_options).files
    is_whole = CONFIG in files and not pipelines(files)
    return is_whole and configs.known(Location(files[CONFIG].path, dict(options.storage_options))) is not None

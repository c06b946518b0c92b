"""Open a source with the tensors that are grafted onto it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.graft.grafting import Graft
from ckptconv.features.graft.options import GraftOptions
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.hints import globs_like
from ckptconv.outputs.naming import named
from ckptconv.storage.paths import normalize
from ckptconv.text import count_of


def opened(source: Source, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the grafts that the options `settings` ask for; `reaching` are the options of stores."""
    texts = GraftOptions(graft=settings["graft"]).graft
    return source.computing(graft=[_graft(text, reaching) for text in texts])


def _graft(text: str, reaching: Mapping[str, Any]) -> Graft:
    """Return the tensors that a text such as "REF:mtp.*" means. Raise UsageError if there are none."""
    path, colon, glob = text.rpartition(":")
    if not (path and colon and glob) or glob.startswith("//"):
        raise UsageError(f"--graft {text} does not select tensors.", "Use the form REF:GLOB, such as release:'mtp.*'.")
    source = open_source(normalize(path), structure=False, **reaching)
    source.check_weights()
    tensors = named(source, Options()).described.tensors
    chosen = {name: tensor for name, tensor in tensors.items() if fnmatch.fnmatchcase(name, glob)}
    if not chosen:
        raise UsageError(
            f"--graft {text}: {glob!r} matches no name of {source.path}, which has {count_of(len(tensors), 'tensor')}.",
            globs_like(glob, list(tensors)),
        )
    return Graft(source, glob, chosen)

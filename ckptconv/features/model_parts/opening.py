"""Open a source with the part of it that options ask for: with its configuration, and with the grafted tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.model_parts.cutting import Asked
from ckptconv.features.model_parts.grafting import Graft
from ckptconv.features.model_parts.numbers import numbers_in
from ckptconv.features.model_parts.options import PartOptions
from ckptconv.features.model_parts.parting import Part
from ckptconv.formats import companions
from ckptconv.formats.detect import open_source
from ckptconv.formats.model_directory import (
    CONFIG,
    LARGEST,
    QUANTIZED,
    VOCABULARIES,
)
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.naming import named
from ckptconv.outputs.selection import globs_like
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize


def opened(source: Source, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the part that the options `settings` ask for; `reaching` are the options of stores."""
    options = PartOptions(**{name: settings[name] for name in PartOptions.table if name in settings})
    stores = dict(reaching.get("storage_options") or {})
    if options.config:
        place = Location(normalize(options.config), stores)
        place.check_file(f"--config {place}")
        source = companions.with_files(source, {**source.companions, CONFIG: place.entry.file}, stores)
    stated = {name: config.says for name, config in companions.configurations(source, stores, CONFIG, QUANTIZED)}
    vocabularies = companions.read_files(source, stores, *VOCABULARIES) if options.vocab else {}
    grafts = [_graft(text, reaching) for text in options.graft]
    part = Part(
        Asked(
            tuple(numbers_in(options.layers)) if options.layers else (),
            tuple(tuple(numbers_in(text)) for text in options.experts),
            options.component,
            options.vocab,
        ),
        {name: value for name in ("layers", "experts", "component", "vocab") if (value := getattr(options, name))},
        stated.get(CONFIG),
        stated.get(QUANTIZED),
        options.config,
        {name: _entries(Location(file.path, stores)) for name, file in vocabularies.items()},
        tuple(name for graft in grafts for name in graft.tensors),
    )
    return source.computing(part=part, graft=grafts or None)


def _graft(text: str, reaching: Mapping[str, Any]) -> Graft:
    """Return the tensors that a text such as "REF:mtp.*" means. Raise UsageError if there are none."""
    path, colon, glob = text.rpartition(":")
    if not (path and colon and glob) or glob.startswith("//"):
        raise UsageError(
            f"--graft {text} does not say which tensors.", "Write it as REF:GLOB, such as release:'mtp.*'."
        )
    source = open_source(normalize(path), structure=False, **reaching)
    source.check_weights()
    tensors = named(source, Options()).described.tensors
    chosen = {name: tensor for name, tensor in tensors.items() if fnmatch.fnmatchcase(name, glob)}
    if not chosen:
        raise UsageError(
            f"--graft {text}: {glob!r} matches none of the {len(tensors)} names of {source.path}.",
            globs_like(glob, list(tensors)),
        )
    return Graft(source, glob, chosen)


def _entries(place: Location) -> int:
    """Return the number after the largest that a tokenizer gives to a token; 0 if its file has another form."""
    try:
        tokenizer = strict_json.parse(place.read_text(LARGEST))
    except ValueError:
        return 0
    vocabularies = [tokenizer]
    if isinstance(tokenizer, dict) and isinstance(tokenizer.get("model"), dict):
        added = tokenizer.get("added_tokens")
        tokens = [token for token in added if isinstance(token, dict)] if added else []
        vocabularies = [tokenizer["model"].get("vocab"), {str(at): token.get("id") for at, token in enumerate(tokens)}]
    by_token = [vocabulary.values() for vocabulary in vocabularies if isinstance(vocabulary, dict)]
    numbers = [number for values in by_token for number in values if type(number) is int]
    numbers += [len(vocabulary) - 1 for vocabulary in vocabularies if isinstance(vocabulary, list)]
    return max(numbers, default=-1) + 1

"""Open a source with the part of it that options ask for, and with its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.companions import reading
from ckptconv.features.companions.directory import QUANTIZED
from ckptconv.features.model_parts.cutting import Asked
from ckptconv.features.model_parts.numbers import numbers_in
from ckptconv.features.model_parts.options import PartOptions
from ckptconv.features.model_parts.parting import Part
from ckptconv.formats.source import CONFIG, Source
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize


def opened(source: Source, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the part that the options `settings` ask for; `reaching` are the options of stores."""
    options = PartOptions(**{name: settings[name] for name in PartOptions.table if name in settings})
    stores = dict(reaching.get("storage_options") or {})
    if options.config:
        place = Location(normalize(options.config), stores)
        place.check_file(f"--config {place}")
        source = reading.with_files(source, {**source.companions, CONFIG: place.entry.file}, stores)
    stated = {name: config.says for name, config in reading.configurations(source, stores, CONFIG, QUANTIZED)}
    part = Part(
        Asked(
            tuple(numbers_in(options.layers)) if options.layers else (),
            tuple(tuple(numbers_in(text)) for text in options.experts),
            options.component,
        ),
        {name: value for name in ("layers", "experts", "component") if (value := getattr(options, name))},
        stated.get(CONFIG),
        stated.get(QUANTIZED),
        options.config,
    )
    return source.computing(part=part)

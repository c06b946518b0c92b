"""A verdict of `scan` on the configurations next to weights: some name code, which loading the model runs."""

from __future__ import annotations

from ckptconv.features.companions.reading import code_named
from ckptconv.features.configs import configs
from ckptconv.features.scan.contents import ScannedContents
from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.source import CONFIG
from ckptconv.storage.location import Location
from ckptconv.text import some


def is_one(place: Location, head: bytes) -> bool:
    """Return whether a file configures a model, its tokenizer or its processor: each of them may name code."""
    return place.name.endswith(CONFIG) and is_companion_name(place.name)


def look(contents: ScannedContents, place: Location) -> str:
    """Add a finding for code that a configuration names. Return its kind in words; "" if it names none."""
    code = code_named(configs.known(place) or {})
    if not code:
        return ""
    needed = "Loading the model with trust_remote_code=True runs this code, which scan does not judge"
    contents.add("repository-code", f"{place} refers to code in a repository: {some(code, form=str)}. {needed}.")
    return "configuration"

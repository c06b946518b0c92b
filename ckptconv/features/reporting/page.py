"""Make one HTML page that shows tensors: a map of the bytes in files, and all tensors to search.

The page is one file and loads nothing. Its content security policy allows only its own script and style, by their
hashes. Names from the checkpoint are embedded as JSON only, so that any name is text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from ckptconv.features.reporting.tensor_info import TensorInfo
from ckptconv.text import printable
from ckptconv.version import __version__

_TEMPLATE = "page.html"
# The largest integer that every number of JavaScript up to it is.
_EXACT = 2**53
_BLOCK = re.compile(r"\{\{(style|script)\}\}(.*?)\{\{end\}\}", re.DOTALL)
_FIELD = re.compile(r"\{\{(policy|title|data)\}\}")


def page_with(name: str, data: Mapping[str, Any]) -> str:
    """Return the page that shows `data`, which are those of its script, about the path `name`."""
    template = resources.files(__package__).joinpath(_TEMPLATE).read_text("utf-8")
    hashes = {kind: _hash_of(text) for kind, text in _BLOCK.findall(template)}
    template = _BLOCK.sub(lambda match: match[2], template)
    policy = (
        f"default-src 'none'; script-src '{hashes['script']}'; style-src '{hashes['style']}'; "
        "base-uri 'none'; form-action 'none'"
    )
    fields = {
        "policy": policy,
        "title": html.escape(f"{os.path.basename(name.rstrip('/')) or name} · ckptconv"),
        "data": _embedded(data),
    }
    return _FIELD.sub(lambda match: fields[match[1]], template)


def _hash_of(text: str) -> str:
    """Return the hash by which a policy allows a script or a style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(value: Any) -> str:
    """Return JSON in which no HTML parser finds markup, for an element of the page."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def tensors_of(rows: Sequence[TensorInfo], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the data about tensors. Dtypes and shapes are few, so tensors refer to them by number."""
    dtypes: dict[str, int] = {}
    shapes: dict[tuple[int, ...], int] = {}
    places = {row.name: place for place, row in enumerate(rows)}
    return {
        "version": __version__,
        "names": [printable(row.name) for row in rows],
        "dtype": [dtypes.setdefault(row.dtype, len(dtypes)) for row in rows],
        "shape": [shapes.setdefault(row.shape, len(shapes)) for row in rows],
        "bytes": [row.bytes for row in rows],
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "tied": {places[alias]: printable(kept) for alias, kept in aliases.items() if alias in places},
    }


def numbers(values: Iterable[Any]) -> list[Any]:
    """Return numbers for the page; an integer that a script would round becomes text."""
    return [str(value) if isinstance(value, int) and abs(value) > _EXACT else value for value in values]

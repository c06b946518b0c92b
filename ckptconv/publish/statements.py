"""Files about outputs that features write next to them, such as statements of their inputs.

They are computed from manifests with digests, and from the digests of inputs. A module has `inputs_of(output, source)`,
the input files of an output by name; `described(inputs)`, their places, for parts, and `of_parts(planned, options)`,
the same again for `finish`; `bytes_of(inputs)`, the number of bytes that it reads of all outputs' inputs;
`digested(inputs, algorithm, options, progress)`; and `statements(documents, inputs)`, the bytes of the file.
`is_ours(reader)` is whether this program wrote a present file.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ckptconv.options.table import Options
from ckptconv.publish.parts import part_of

# The module of each file, by the option with its path.
STATEMENTS: dict[str, str] = {
    "attest": "ckptconv.features.provenance.attesting",
}


# Files that get their names after all outputs: the module of each, by the option with its path. Its `staged(path,
# sources, outputs, inputs, options)` is a context manager, within which the outputs get theirs.
AFTERWARDS: dict[str, str] = {
    "depfile": "ckptconv.features.depfile.rule",
}


def requested(options: Options, registry: Mapping[str, str] = STATEMENTS) -> dict[str, tuple[str, Any]]:
    """Return the path and the module of each in `registry` that `options` ask for, by option."""
    paths = {option: options.asked(option) for option in registry}
    return {option: (path, import_module(registry[option])) for option, path in paths.items() if path}


def needing_inputs(options: Options) -> Any:
    """Return the module for which inputs have to be known: now, or when parts that have digests are finished; None if
    there is none."""
    later = STATEMENTS.values() if part_of(options) and options.digest else ()
    return next((module for _, module in requested(options).values()), None) or next(map(import_module, later), None)

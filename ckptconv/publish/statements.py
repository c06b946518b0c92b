"""Files about outputs that features write beside them, such as statements of what they were made of.

They are made of manifests with digests, and of the digests of inputs. A module has `inputs_of(output, source)`, the
files of which an output is made, by name; `described(inputs)`, where they are, for parts, and `of_parts(planned,
options)`, the same again for `finish`; `bytes_of(inputs)`, how many bytes it reads of those of all outputs;
`digested(inputs, algorithm, options, progress)`; and `statements(documents, inputs)`, the bytes of the file. Of a file
that is there, `is_ours(reader)` tells whether this program wrote it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ckptconv.options.table import Options
from ckptconv.publish.parts import part_of

# By the option that says where it goes: the module.
STATEMENTS: dict[str, str] = {
    "attest": "ckptconv.features.provenance.attesting",
}


def asked(options: Options) -> dict[str, tuple[str, Any]]:
    """Return the path and the module of each that `options` ask for, by option."""
    paths = {option: getattr(options, option) for option in STATEMENTS}
    return {option: (path, import_module(STATEMENTS[option])) for option, path in paths.items() if path}


def needing_inputs(options: Options) -> Any:
    """Return the module for which inputs have to be known: now, or when parts that have digests are finished; None if
    there is none."""
    later = STATEMENTS.values() if part_of(options) and options.digest else ()
    return next((module for _, module in asked(options).values()), None) or next(map(import_module, later), None)

"""Compare an output, bit for bit, with the result that its source gives.

In: a source, an output, options. Out: a `Verification`, or the first difference. `evaluate` computes a tensor's
elements with code of its own. `output` reads safetensors outputs strictly: the safetensors library must read them
alike, and would write their headers alike. `provenance` checks manifests. The expected names and tensors are selected
as for a conversion; no code that moves a conversion's bytes is used. `command` is the command, and `staged` compares
the output of a conversion before it is published. What other features add to it is in their module `with_verify`.
"""

from __future__ import annotations

PAGES = ()
# The features that it builds on.
NEEDS = ("pairs", "regexes")
# Advice about an output that does not agree with itself, and about a file that is not what it says.
STALE = "It belongs to another version of these files; convert again."
AGAIN = "The file was damaged or changed since it was written; convert again."
OTHER_SOURCE = (
    "`ckptconv diff` compares any two checkpoints. If the source is another one, or was changed since, give the right "
    "one; else "
)
CONVERTED_SO = (
    f"{OTHER_SOURCE}give --for-hub, --key, --map, --states, --include, --exclude, --strip-prefix and --rename as the "
    "conversion had them. The order is: verify SOURCE OUTPUT."
)

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
STALE = "The file belongs to another version of the output; convert again."
AGAIN = "The file was damaged or changed since it was written; convert again."
OTHER_SOURCE = (
    "`ckptconv diff` compares any two checkpoints. If the output has another source, or SOURCE has changed since, "
    "specify the original source; otherwise, "
)
CONVERTED_SO = (
    f"{OTHER_SOURCE}use the same --for-hub, --key, --map, --states, --include, --exclude, --strip-prefix and --rename "
    "as the conversion. The order of arguments is: verify SOURCE OUTPUT."
)

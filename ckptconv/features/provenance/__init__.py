"""`--attest`: statements about outputs and their inputs, for others to sign.

In: manifests with digests, and the input files of outputs. Out: a file of statements, which `publish` puts next to the
outputs, as `STATEMENTS` has it.
"""

from __future__ import annotations

PAGES = ("provenance.md",)

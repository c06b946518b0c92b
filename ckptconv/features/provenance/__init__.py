"""`--attest`: statements about outputs, of what they were made, for others to sign.

In: manifests with digests, and the files that outputs were made of. Out: a file of statements, which `publish` puts
beside the outputs, as `STATEMENTS` has it.
"""

from __future__ import annotations

PAGES = ("provenance.md",)

"""What tests of the trunk ask of compressed data too."""

from __future__ import annotations

from attacks.assemble import zipped
from attacks.corpus import CORRUPT, Case, swapped

_OTHER = zipped(swapped(local_method=8))
_AT = _OTHER.rindex(b"archive/data/0") - 36
ATTACKS = [
    Case(
        "zip_inflate_garbage.pt",
        "zip",
        CORRUPT,
        "a stored member that says it is deflated",
        lambda canary: _OTHER[:_AT] + b"\x08" + _OTHER[_AT + 1 :],
        whole=True,
    ),
]

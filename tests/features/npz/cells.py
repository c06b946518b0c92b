"""What tests of the trunk ask of archives of numpy too."""

from __future__ import annotations

from attacks.assemble import Member, zipped
from attacks.corpus import CORRUPT, Case

ATTACKS = [
    Case("scan_npz.pt", "scanners", CORRUPT, "an archive of an array of no shape", lambda canary: zipped(
        [Member("arr_0.npy", b"\x93NUMPY" + bytes(80))]
    )),
]  # fmt: skip

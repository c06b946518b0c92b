"""What tests of the trunk ask of `--dask` too."""

from __future__ import annotations

# Words that are refused with this exit code, and what is said.
SAID = [
    (f"pt2safetensors model.pt --dask {address}", 2, "is not the address of a scheduler")
    for address in ("foo", "foo://x", "tcp")
]
# An option that is for one conversion, and not for several.
OF_ONE = ["--dask=tcp://127.0.0.1:1"]

"""The option of maps for `diff`."""

from __future__ import annotations

from ckptconv.features.maps.options import MapOptions

COMPARING = {
    "map": MapOptions.table["map"].explained(
        "Give the tensors of A the names and layouts of B, with a built-in map (`ckptconv maps`) or a file of rules.",
    )
}

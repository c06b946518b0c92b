"""The pages about maps."""

from __future__ import annotations

import re

from checkpoints import DATA

from ckptconv.features.maps.file import parse_map

ROOT = DATA.parents[1]


def test_maps_that_are_shown_are_maps() -> None:
    pages = [ROOT / "docs" / "maps.md", ROOT / "docs" / "internals" / "maps.md"]
    text = "\n".join(page.read_text() for page in pages)
    shown = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [len(parse_map(each, "maps.md").rules) for each in shown] == [1, 4, 1, 1, 1, 1, 2, 1]

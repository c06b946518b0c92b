"""Draws how a conversion flows, for the documentation.

pictures.py [DIRECTORY]      default: docs/
"""

from __future__ import annotations

import sys
from pathlib import Path

import plots

ROOT = Path(__file__).resolve().parents[1]
# The steps of a conversion, as CONTRIBUTING.md has them.
STEPS = [
    ("open", "Read names, shapes, and where the bytes are", "kilobytes of each file"),
    ("select", "Choose tensors; rename, cast, tie", "no data read yet"),
    ("plan", "Lay out every output file, byte by byte", "disk space checked"),
    ("move", "Read ranges, cast, write, buffer by buffer", "8 MiB of buffers"),
    ("commit", "Sync, rename; the index comes last", "complete, or nothing"),
]


def main() -> int:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    (target / "flow.svg").write_text(plots.steps("How a conversion flows", STEPS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

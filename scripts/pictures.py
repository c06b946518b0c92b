"""Makes the pictures of the documentation that show no measurements: what commands print, and how a conversion flows.

    pictures.py [DIRECTORY]      default: docs/

Runs every command of `SCENES` on examples that are made for it, and draws what it really printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

import plots

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "scripts" / "make_example.py"
COLUMNS = 112
# What is shown in each picture; the commands run in a directory that holds `checkpoints` and `stranger.pt`.
SCENES = {
    "inspect": ["ckptconv inspect --depth 3 --as fp32 checkpoints"],
    "errors": [
        "ckptconv zero-to-fp32 -t global_step4 checkpoints model",
        "rm checkpoints/global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt",
        "ckptconv zero-to-fp32 checkpoints model",
        "ckptconv pt2safetensors stranger.pt",
    ],
}
EXAMPLE_OPTIONS = {
    "checkpoints": ["--params", "20e6", "--ranks", "4", "--frozen-blocks", "1"],
}
# The steps of a conversion, as CONTRIBUTING.md has them.
STEPS = [
    ("open", "Read names, shapes, and where the bytes are", "kilobytes of each file"),
    ("select", "Choose tensors; rename, cast, tie", "no data read yet"),
    ("plan", "Lay out every output file, byte by byte", "disk space checked"),
    ("move", "Read ranges, cast, write, buffer by buffer", "8 MiB of buffers"),
    ("commit", "Sync, rename; the index comes last", "complete, or nothing"),
]
# An attack that is none: nothing runs, here or elsewhere.
_ATTACK = b"\x80\x02cos\nsystem\nX\x09\x00\x00\x00rm -rf ~/\x85R."
_LINE, _CHARACTER, _MARGIN = 18, 8.0, 16
_STYLE = """
rect { fill: #f6f8fa; stroke: #d0d7de }
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
text { fill: #24292f; white-space: pre }
.prompt { fill: #0969da }
@media (prefers-color-scheme: dark) {
  rect { fill: #161b22; stroke: #3d444d }
  text { fill: #e6edf3 }
  .prompt { fill: #58a6ff }
}
"""


def prepare(place: Path) -> None:
    """The examples that the commands are run on."""
    for name, options in EXAMPLE_OPTIONS.items():
        subprocess.run([sys.executable, str(EXAMPLES), *options, str(place / name)], check=True)
    (place / "stranger.pt").write_bytes(_ATTACK)


def run(command: str, place: Path) -> list[str]:
    """What a terminal shows of `command`, line by line."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "CKPTCONV_PROGRESS": "0", "PATH": path}
    done = subprocess.run(
        ["bash", "-c", command], cwd=place, env={**os.environ, **settings}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return [line for text in done.stdout.splitlines() for line in folded(text)]


def folded(line: str) -> list[str]:
    """A line that is too long, broken at spaces, as some terminals do."""
    return textwrap.wrap(line, COLUMNS, drop_whitespace=False, break_on_hyphens=False) or [""]


def picture(lines: Sequence[str]) -> str:
    """The lines as SVG; those of prompts begin with a dollar sign."""
    width = _MARGIN * 2 + _CHARACTER * max(map(len, lines))
    height = _MARGIN * 2 + _LINE * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">',
        f"<style>{_STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="6"/>',
    ]
    for number, line in enumerate(lines):
        y = _MARGIN + _LINE * (number + 0.75)
        kind = ' class="prompt"' if line.startswith("$ ") else ""
        parts.append(f'<text x="{_MARGIN}" y="{y:.1f}" xml:space="preserve"{kind}>{escape(line)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    (target / "flow.svg").write_text(plots.steps("How a conversion flows", STEPS))
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        prepare(place)
        for name, commands in SCENES.items():
            lines: list[str] = []
            for command in commands:
                lines += ["$ " + command, *run(command, place)]
            text = picture(lines)
            if re.search(re.escape(str(ROOT)), text):
                raise RuntimeError(f"{name} shows where this was made")
            (target / f"terminal-{name}.svg").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

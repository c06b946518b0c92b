"""The size of the package without its features, and of its roads: what a main job loads for a tiny checkpoint.

    python scripts/house.py     prints both

Lines are those that are not blank.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckptconv"
# The main jobs, and a checkpoint of the tests that each converts; "": a file that torch.save writes.
ROADS = {
    "pt2safetensors": "",
    "dcp2safetensors": "tests/features/dcp/data/noflatten_nodist/checkpoint",
    "zero-to-fp32": "tests/features/deepspeed/data/z3_bf16_w2/checkpoint",
}
# Runs a command, and writes the files of all modules of the package that it loaded.
_PROGRAM = """\
import json, sys
from ckptconv.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
files = [module.__file__ for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "ckptconv"]
print(json.dumps(files))
"""


class Size(NamedTuple):
    """How many modules, and how many lines they have."""

    modules: int
    lines: int

    def __str__(self) -> str:
        return f"{self.modules} modules, {self.lines:,} lines"


def size_of(paths: Iterable[Path]) -> Size:
    """The size of these modules."""
    lines = [sum(1 for line in path.read_text("utf-8").splitlines() if line.strip()) for path in paths]
    return Size(len(lines), sum(lines))


def trunk() -> Size:
    """The size of the package without its features."""
    return size_of(path for path in PACKAGE.rglob("*.py") if "features" not in path.relative_to(PACKAGE).parts)


def loaded(job: str) -> list[Path]:
    """The modules that a main job loads."""
    # Without digits: a name with some may be like that of a rank, which is then looked for.
    made = Path(tempfile.gettempdir(), "road" + "".join(random.choices("abx", k=20)))
    made.mkdir(mode=0o700)
    try:
        source = ROOT / ROADS[job]
        if not ROADS[job]:
            import torch

            source = made / "model.pt"
            torch.save({"model": {"a.weight": torch.zeros(3, 4), "b.bias": torch.ones(3)}, "step": 7}, source)
        command = [sys.executable, "-c", _PROGRAM, job, str(source), f"{made}/model.safetensors", "--quiet"]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    finally:
        shutil.rmtree(made)
    return [Path(path) for path in json.loads(done.stdout)]


def report() -> list[str]:
    """The lines to print: the trunk, and each road whose checkpoint is in the checkout."""
    return [f"trunk: {trunk()}"] + [
        f"{job} loads {size_of(loaded(job))}" for job in ROADS if (ROOT / ROADS[job]).exists()
    ]

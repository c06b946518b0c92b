"""torch is an extra: every command, and the library, works where it cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cells import of_features
from processes import prepared

ROOT = Path(__file__).parents[1]

# Runs what scripts/smoke.py runs, in one process.
EVERYTHING = """
import contextlib, io, os, sys, tempfile
from pathlib import Path

import smoke
from ckptconv.cli.main import main


class Here(smoke.Smoke):
    def run(self, *arguments, code=0, stdin=b""):
        if stdin:
            return super().run(*arguments, code=code, stdin=stdin)
        out, err = io.StringIO(), io.StringIO()
        os.chdir(self.place)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(list(map(str, arguments)))
        except SystemExit as ended:
            assert ended.code == code, (arguments, out.getvalue(), err.getvalue())
        assert "mistake in ckptconv" not in err.getvalue(), err.getvalue()
        self.count += 1
        return out.getvalue()


smoke.Smoke = Here
smoke.main()
"""

# Copies as they are: numpy is for casts, rows and verification.
PLAIN = """
from ckptconv.cli.main import main
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import NAMED
from pathlib import Path
import json, smoke, sys

smoke.write_safetensors(Path("first.safetensors"), {"a.weight": ("F32", [2, 3], bytes(range(24)))})
PARTS = "convert", "first.safetensors", "parts", "--max-shard-size", "1KB"
TORCH = ["pt2safetensors", "model.pt", "again.safetensors"]
for command in (
    *json.loads(sys.argv[1]),
    *([["safetensors2pt", "first.safetensors", "model.pt"], TORCH] if "pt" in NAMED else []),
    ["convert", "first.safetensors", "again"],
    *([[*PARTS, "--part", "0/1"], ["finish", "parts"]] if "part" in OPTIONS else []),
):
    try:
        main(list(map(str, command)))
    except SystemExit as ended:
        assert ended.code == 0, command
"""


def without(blocked: list[str], code: str, place: Path) -> str:
    """`code` for where importing the `blocked` packages fails."""
    for name in blocked:
        (place / "blocked" / name).mkdir(parents=True)
        (place / "blocked" / name / "__init__.py").write_text(f"raise ModuleNotFoundError('No module named {name}')")
    paths = [str(path) for path in (place / "blocked", ROOT / "scripts", ROOT)]
    return f"import sys\nassert not {set(blocked)!r} & set(sys.modules)\nsys.path[:0] = {paths!r}\n{code}"


def test_every_command_and_the_library_work_without_torch(tmp_path: Path) -> None:
    done = prepared().run(without(["torch"], EVERYTHING, tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "commands and the library did what they should" in done.stdout


def test_what_only_copies_works_without_numpy_too(tmp_path: Path) -> None:
    copying = [words for commands in of_features("COPYING") for words in commands]
    command = [sys.executable, "-c", without(["torch", "numpy"], PLAIN, tmp_path), json.dumps(copying, default=str)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

"""Runs scripts/smoke.py on other Pythons, each with the lowest and the newest libraries that pyproject.toml allows.

Environments are made by uv under build/pythons. What cannot be had here (a Python, a library for it) is said and
skipped. Extras are tried too, but for torch, which smoke.py needs for little. With --fetch, uv downloads Pythons that
are not here; with --python 3.12 only that one is tried, and with --libraries lowest (or newest) only those. Ends with 1
if anything that could be tried failed; with --strict, also if anything was skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
EXTRAS = ("azure", "blake3", "crc32c", "dask", "fast", "gcs", "http", "hub", "s3", "xxhash", "zstd")


def candidates(uv: str, version: str, fetch: bool) -> Iterator[str]:
    """Interpreters that may be of this version: on the path, pyenv's, what uv knows, and what it may `fetch`."""
    yield shutil.which(f"python{version}") or ""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from (str(each / "bin" / "python") for each in sorted(pyenv.glob(f"versions/{version}.*"), reverse=True))
    find = [uv, "python", "find", "--no-python-downloads", version]
    yield subprocess.run(find, capture_output=True, text=True, check=False).stdout.strip()
    if fetch:
        subprocess.run([uv, "python", "install", "--quiet", version], capture_output=True, check=False)
        yield subprocess.run(find, capture_output=True, text=True, check=False).stdout.strip()


def python_of(uv: str, version: str, fetch: bool) -> str:
    """An interpreter of this version that runs; "" if there is none."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in candidates(uv, version, fetch):
        if path and os.path.exists(path):
            done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip() == version:
                return path
    return ""


def tried(uv: str, python: str, version: str, resolution: str) -> bool | None:
    """Whether the smoke suite passes; None where the libraries cannot be had."""
    place = ROOT / "build" / "pythons" / f"{version}-{resolution}"
    steps = [
        [uv, "venv", "--quiet", "--clear", "--python", python, str(place)],
        [
            uv, "pip", "install", "--quiet", "--python", str(place / "bin" / "python"), "--only-binary", ":all:",
            "--resolution", RESOLUTIONS[resolution], "--requirements", str(ROOT / "pyproject.toml"),
            *(f"--extra={extra}" for extra in EXTRAS),
        ],
    ]  # fmt: skip
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip().splitlines() or ["it did not say why"]
            print(f"skipped: Python {version} with the {resolution} libraries cannot be had: {why[-1]}")
            return None
    smoke = [str(place / "bin" / "python"), str(ROOT / "scripts" / "smoke.py")]
    return subprocess.run(smoke, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--python", action="append", choices=VERSIONS)
    parser.add_argument("--libraries", action="append", choices=RESOLUTIONS)
    asked = parser.parse_args()
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        print("skipped: there is no uv, which makes the environments; make install brings it.")
        return 0
    outcomes: list[bool | None] = []
    for version in asked.python or VERSIONS:
        python = python_of(uv, version, asked.fetch)
        if not python:
            print(f"skipped: there is no Python {version} here.")
            outcomes.append(None)
            continue
        for resolution in asked.libraries or RESOLUTIONS:
            print(f"Python {version}, the {resolution} libraries", flush=True)
            outcomes.append(tried(uv, python, version, resolution))
    done, failed, skipped = outcomes.count(True), outcomes.count(False), outcomes.count(None)
    print(f"{done} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or (skipped and asked.strict) else 0


if __name__ == "__main__":
    raise SystemExit(main())

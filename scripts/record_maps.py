"""Record what frameworks' own converters make of tiny models: tests/features/maps/data, which the maps are held to.

    make test-maps                          # compares what they make now with what is recorded
    make test-maps MAPS_FLAGS=--write       # records it anew

Each module in scripts/maps yields the cases of a framework. Models of torchtitan, Megatron-core and MaxText are also
saved as these save them, converted, and computed with by transformers: the logits must be those of the original.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests/features/maps/data"
MODULES = (
    "titan",
    "titan2",
    "megatron",
    "bridge",
    "swift",
    "nemo",
    "hugging",
    "olmo",
    "meta",
    "originals",
    "lit",
    "tune",
    "openpi",
    "maxtext",
)
# Those that need what no registry has: the variable that says where it is.
ELSEWHERE = {"openpi": "OPENPI"}
# Those whose models are also converted, loaded by transformers, and computed with.
COMPUTING = ("titan", "megatron", "maxtext")
# Of these, those that compute in an environment of their own: the variable that names its Python.
PYTHONS = {"maxtext": "MAXTEXT"}
# Those with packages of their own, each in a directory that the Makefile makes: the last releases that have what is
# compared, and packages that ask for other releases than they need.
BESIDE = {
    "titan2": "titan",
    "meta": "old",
    "originals": "old",
    "lit": "more",
    "tune": "more",
    "bridge": "more",
    "swift": "more",
    "nemo": "more",
    "maxtext": "maxtext",
}


def record(module: str, parent: Path) -> None:
    """Write the cases of a module to directories in `parent`."""
    for case in importlib.import_module(f"maps.{module}").cases():
        case.save(parent)


def differing(one: Path, other: Path) -> list[str]:
    """Return the files of cases that are not the same in both."""
    names = {str(file.relative_to(one)) for file in one.rglob("*.*") if file.is_file()}
    return sorted(
        name
        for name in names
        if not (other / name).exists() or (one / name).read_bytes() != (other / name).read_bytes()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace what is recorded")
    parser.add_argument("--old", default="", help="where transformers 4.45 is installed")
    parser.add_argument("--more", default="", help="where litgpt, torchtune and others are installed")
    parser.add_argument("--titan", default="", help="where torchtitan 0.2 is installed")
    parser.add_argument("--maxtext", default="", help="where MaxText is installed")
    parser.add_argument("--only", choices=MODULES, action="append", help="of these frameworks alone")
    parser.add_argument("--logits", choices=COMPUTING, help="compare logits of this framework's models alone")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.into:
        record(args.only[0], args.into)
        return 0
    if args.logits:
        for found in importlib.import_module(f"maps.{args.logits}").logits():
            print(found, flush=True)
        return 0
    failed = []
    with tempfile.TemporaryDirectory() as place:
        for module in args.only or MODULES:
            if module in ELSEWHERE and ELSEWHERE[module] not in os.environ:
                print(f"{module}: left out, as {ELSEWHERE[module]} is not set to a checkout of it", flush=True)
                continue
            made = Path(place, module)
            made.mkdir()
            beside = getattr(args, BESIDE[module]) if module in BESIDE else ""
            path = os.pathsep.join(filter(None, [beside, os.environ.get("PYTHONPATH", "")]))
            command = [sys.executable, __file__, "--only", module, "--into", str(made)]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
            print(f"{module}: {', '.join(sorted(each.name for each in made.iterdir()))}", flush=True)
            if args.write:
                for each in made.iterdir():
                    shutil.rmtree(DATA / each.name, ignore_errors=True)
                    shutil.copytree(each, DATA / each.name)
            else:
                failed += [name for name in differing(made, DATA) if name.endswith(".safetensors")]
    for name in failed:
        print(f"tests/features/maps/data/{name} is not what the framework makes now", file=sys.stderr)
    for module in (each for each in args.only or MODULES if each in COMPUTING):
        if module in PYTHONS and PYTHONS[module] not in os.environ:
            print(f"{module}: logits left out, as {PYTHONS[module]} does not name a Python that has it", flush=True)
            continue
        failed += [module] * bool(
            subprocess.run([sys.executable, __file__, "--logits", module], check=False).returncode
        )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

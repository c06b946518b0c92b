"""Has the programs that write a format make checkpoints of new arrays, and compares what we read with what they read.

    test_formats.py [--directory build/formats] [--seed N] [NAME …]

Each module in scripts/formats is for one program, and is left out where that is not installed. Its `check` makes
checkpoints below a directory, and yields a line for each: its name, and what is wrong with it, "" if nothing is. The
exit code is 1 if something is.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def main() -> int:
    """Check the programs that are asked for, all by default."""
    import formats

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules in scripts/formats; all by default")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "formats")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    for name in given.names or [each.name for each in pkgutil.iter_modules(formats.__path__)]:
        module = importlib.import_module(f"formats.{name}")
        lacking = [package for package in module.NEEDED if importlib.util.find_spec(package) is None]
        if lacking:
            print(f"{name}: left out, as {', '.join(lacking)} is not installed")
            continue
        place = given.directory / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for case, why in module.check(place, given.seed):
            print(f"{name} {case}: {why or 'the same'}", flush=True)
            wrong += bool(why)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

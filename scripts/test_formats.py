"""Has the programs that write a format make checkpoints of new arrays, and compares what we read with what they read.

    test_formats.py [--directory build/formats] [--seed N] [NAME …]

Each module in scripts/formats is for one program, and is left out where that is not installed. Its `check` makes
checkpoints below a directory, and yields a line for each: its name, and what is wrong with it, "" if nothing is. The
exit code is 1 if something is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from libraries import emptied, parser_of, present

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def main() -> int:
    """Check the programs that are asked for, all by default."""
    parser = parser_of(__doc__, "formats")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    for name, module in present("formats", given.names):
        for case, why in module.check(emptied(given.directory / name), given.seed):
            print(f"{name} {case}: {why or 'the same'}", flush=True)
            wrong += bool(why)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes what the README shows of the benchmarks: its table and its first picture, of docs/benchmarks.md.

Writes both; so does `bench.py --write`.
"""

from __future__ import annotations

import re
from pathlib import Path

import plots

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "measured.svg"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# What a table of the benchmarks is called: the output of 2 GB of two kinds. And its rows that are shown, by what they
# are called in the picture; the first is the yardstick.
TABLES = {
    r"ZeRO-3, 4 ranks, [^\n]*: 2\.0 GB of output": {
        "": "`cp` of the result",
        "cp, then sync": "`cp` of the result, then `sync`",
        "ckptconv --no-fsync": "`ckptconv zero-to-fp32 --no-fsync`",
        "ckptconv": "`ckptconv zero-to-fp32`",
        "DeepSpeed's zero_to_fp32": "DeepSpeed's `zero_to_fp32`, to .bin",
    },
    r"\.pt of [^\n]*: 2\.0 GB of output": {
        "": "`cp` of the result",
        "cp, then sync": "`cp` of the result, then `sync`",
        "ckptconv --no-fsync": "`ckptconv pt2safetensors --no-fsync`",
        "ckptconv": "`ckptconv pt2safetensors`",
        "torch.load + save_file": "torch.load + save_file",
        "torch.load(mmap) + save_file": "torch.load(mmap=True) + save_file",
    },
}
COLUMNS = {"seconds (median)": "seconds", "÷ `cp`": "÷ `cp`", "peak RSS, MiB": "peak memory, MiB"}


def rows(report: str, heading: str) -> dict[str, dict[str, str]]:
    """Return {row: {column: text}} of the table below a heading of docs/benchmarks.md."""
    found = re.search(rf"^## {heading}\n\n(.*?)\n\n", report, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"The README is as it was: docs/benchmarks.md has no table {heading}")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def made(report: str) -> tuple[str, str]:
    """Return the table and the picture, of the text of docs/benchmarks.md."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", f"|---|{'---:|' * len(COLUMNS)}"]
    groups: dict[str, list[tuple[str, float]]] = {}
    notes = {}
    for heading, wanted in TABLES.items():
        name = re.search(rf"^## ({heading})$", report, re.MULTILINE)
        table = rows(report, heading)
        title = name[1].partition(":")[0] if name else heading
        lines.append(f"| **{title}** |{' |' * len(COLUMNS)}")
        for shown, row in wanted.items():
            if row not in table:  # another converter that was not there
                continue
            lines.append(f"| {row} | {' | '.join(table[row][each] for each in COLUMNS)} |")
            if shown:
                group = title.replace(", 4 ranks", "").replace(", 0.5 B parameters", "")
                groups.setdefault(group, []).append((shown, float(table[row]["÷ `cp`"])))
                notes[group, shown] = f"{table[row]['peak RSS, MiB']} MiB"
    return "\n".join(lines), plots.bars("Time, as a multiple of cp of the output, and peak memory", groups, notes=notes)


def write(report: str) -> None:
    """Put what the text of docs/benchmarks.md says into the README, and draw its picture."""
    table, picture = made(report)
    parts = re.split(f"(?<={BEGIN})\n.*\n(?={END})", README.read_text(), flags=re.DOTALL)
    README.write_text(f"\n\n{table}\n\n".join(parts))
    PICTURE.write_text(picture)


if __name__ == "__main__":
    write((ROOT / "docs" / "benchmarks.md").read_text())

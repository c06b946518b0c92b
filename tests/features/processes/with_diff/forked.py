"""Two models to compare, and comparisons that are made in forked processes however small the files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from processes import COUNTED, prepared
from safetensors.torch import save_file

# The program itself, to which all files are large; it says at its end how often it forked.
LARGE = "from ckptconv.features.diff import reading\nreading.WORTH_PROCESSES = 0\n" + COUNTED.format(before="pass")
WHAT_VARIES = ("seconds", "peak_rss_bytes")


def two_models(directory: Path) -> list[Path]:
    """Tensors that differ everywhere, late, in one element, in none, by what is not finite; and many small ones."""
    torch.manual_seed(0)
    state = {name: torch.randn(1 << 20).bfloat16() for name in ("all", "late", "one", "equal", "nan")}
    state |= {f"small.{n}": torch.full((100,), float(n)) for n in range(300)}
    save_file(state, directory / "a.safetensors", {"format": "pt"})
    state["all"] = state["all"] * 1.01
    state["late"][-70_000:] += 1
    state["one"][3] = 7
    state["nan"][::100_000] = float("nan")
    state["small.7"][5] = -1.0
    save_file(state, directory / "b.safetensors", {"format": "pt"})
    return sorted(directory.iterdir())


def run_by(*arguments: object, forks: int) -> dict[str, Any]:
    """The report of a run in which so many processes are started."""
    run = prepared().run(LARGE, *arguments, "--json", "--quiet")
    assert run.stderr == f"{forks}\n"
    return comparable(json.loads(run.stdout))


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name not in WHAT_VARIES}

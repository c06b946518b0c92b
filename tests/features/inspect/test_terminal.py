"""inspect, where standard streams are the question; and what it prints of what it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import rich.progress
import torch
from checkpoints import ZERO, ckptconv_here, done

import ckptconv
from ckptconv.features.inspect.overview import overview
from ckptconv.features.inspect.page import page_of


def test_a_pager_may_be_left_early(tmp_path: Path) -> None:
    torch.save({f"{'long name ' * 20}{n}": torch.ones(1) for n in range(1000)}, tmp_path / "model.pt")
    command = f"set -o pipefail; {sys.executable} -m ckptconv inspect -v model.pt | head -1"
    for colours in ({}, {"FORCE_COLOR": "1"}):
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, **colours},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, ""), colours
        assert len(ended.stdout.splitlines()) == 1, colours


def test_names_are_shown_in_any_encoding(tmp_path: Path) -> None:
    torch.save({"größe": torch.ones(3, 3)}, tmp_path / "größe.pt")
    for encoding in ("ascii", "latin-1", "utf-8"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "ckptconv", "inspect", "größe.pt"]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.decode(encoding)


def test_the_command_that_it_shows_can_be_pasted(place: Path) -> None:
    torch.save({"w": torch.ones(3)}, "my model.pt")
    run = ckptconv_here("inspect", "my model.pt", "--as", "bf16")
    assert "    ckptconv pt2safetensors 'my model.pt' OUTPUT --dtype bfloat16\n" in run.out


def test_json_says_where_the_bytes_are(place: Path) -> None:
    torch.save({"a": {"x": torch.ones(3), "y": {"z": torch.ones(2, dtype=torch.int8)}}, "b": torch.ones(1)}, "m.pt")
    found = done(ckptconv_here("inspect", "m.pt", "--json")).json
    modules = {each["name"]: (each["tensors"], each["elements"], each["bytes"]) for each in found["modules"]}
    assert modules == {"": (3, 6, 18), "a": (2, 5, 14), "a.y": (1, 2, 2)}
    assert found["modules"][0]["dtypes"] == ["float32", "int8"]


def test_json_has_all_that_the_page_and_the_text_show(place: Path) -> None:
    step = ZERO / "z3_bf16_w2/checkpoint"
    arguments = ["inspect", step, "--as", "bf16", "--html", "page.html"]
    found = done(ckptconv_here(*arguments, "--json")).json
    summary = ckptconv.inspect(step, as_="bf16")
    assert {**summary.to_dict(), "version": 1, "ok": True, "command": "inspect"} == found
    assert page_of(summary) == Path("page.html").read_text()
    lines = ["".join(span.text for span in line) for line in overview(summary)]
    assert lines == ckptconv_here(*arguments).out.splitlines()


def test_values_are_shown_in_a_few_printable_characters(tmp_path: Path) -> None:
    deep: dict[str, Any] = {"end": 1}
    for _ in range(100):
        deep = {"k" * 10_000: deep}
    deep.update({"\x1b[31m": "\x1b[0m", "w": torch.ones(1), "big": 1 << 20_000, "many": ["x" * 100_000]})
    torch.save(deep, tmp_path / "run.pt")
    run = done(ckptconv_here("inspect", tmp_path / "run.pt"))
    assert "\x1b" not in run.out
    assert len(run.out) < 10_000


def test_a_notebook_shows_what_was_found(tmp_path: Path) -> None:
    torch.save({"<w>": torch.ones(3, 4), "b": torch.ones(2000)}, tmp_path / "x.pt")
    shown = ckptconv.inspect(tmp_path / "x.pt")._repr_html_()
    assert "<caption>Summary</caption>" in shown
    assert "<tr><th>tensors</th><td>&lt;w&gt;, b</td></tr>" in shown
    assert "<tr><th>bytes</th><td>8.05 kB</td></tr>" in shown
    assert "opaque" not in shown
    assert "<tr><th>totals</th><td>float32: tensors=2 elements=2012 bytes=8.05 kB</td></tr>" in shown
    assert "<tr><th>name</th><td>dtype</td><td>shape</td><td>bytes</td></tr>" in shown
    assert "<tr><th>b</th><td>float32</td><td>[2000]</td><td>8.00 kB</td></tr>" in shown


def test_a_notebook_shows_statistics_of_each_tensor(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, 3.0]), "s": torch.tensor(True), "m": {"x": 1}}, tmp_path / "x.pt")
    shown = ckptconv.inspect(tmp_path / "x.pt", stats=True)._repr_html_()
    columns = ("dtype", "shape", "bytes", "min", "max", "mean", "std", "zeros", "nan", "inf")
    assert f"<tr><th>name</th>{''.join(f'<td>{column}</td>' for column in columns)}</tr>" in shown
    cells = ("float32", "[2]", "8 bytes", "1", "3", "2", "1", "0", "0", "0")
    assert f"<tr><th>w</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" in shown
    assert "<tr><th>s</th><td>bool</td><td>[]</td><td>1 byte</td>" in shown
    assert "Total" not in shown


def test_a_notebook_lists_fifty_tensors(tmp_path: Path) -> None:
    torch.save({str(number): torch.ones(1) for number in range(60)}, tmp_path / "x.pt")
    shown = ckptconv.inspect(tmp_path / "x.pt")._repr_html_()
    assert shown.count("<td>float32</td>") == 50
    assert "<th>10 more tensors</th>" in shown


def test_the_bytes_that_are_read_for_statistics_are_shown(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "x.pt")
    with rich.progress.Progress(disable=True) as progress:
        ckptconv.inspect(tmp_path / "x.pt", stats=True, progress=progress)
    assert [(task.description, task.completed) for task in progress.tasks] == [("inspect", 4000)]


def test_in_a_process_that_is_spawned(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(ckptconv.inspect, tmp_path / "x.pt").result() == ckptconv.inspect(tmp_path / "x.pt")

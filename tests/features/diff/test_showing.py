"""diff: what is printed of it, in any width and as JSON, and with the options that other commands have too."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here
from features.diff.cells import UNEQUAL
from lone_files import STATE, making
from safetensors.torch import save_file

import ckptconv
from ckptconv.cells import cells
from ckptconv.features.diff.showing import overview


def test_rows_of_different_names_differ_in_any_width(tmp_path: Path) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{way}_proj.weight"
        for layer in (1, 11) for expert in (7, 17) for way in ("up", "down")
    ]  # fmt: skip
    for number, file in enumerate(("a", "b")):
        save_file({name: torch.full((3, 4), float(number)) for name in names}, tmp_path / f"{file}.safetensors")
    difference = ckptconv.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    for width in (40, 50, 60, 80, 100, 200, None):
        shown = ["".join(words.text for words in line) for line in overview(difference, width=width)]
        lines = shown[shown.index("") + 1 : shown.index("", 3)]
        text = "".join(line.strip() for line in lines)
        assert all(name in text for name in names) or len({*lines}) == len(lines) == len(names) + 1, width
        assert width is None or not [line for line in lines if cells(line) > width], width


def test_json_has_the_status_of_each_tensor(place: Path) -> None:
    torch.save({"model": {"w": torch.ones(3), "v": torch.ones(2, 2)}, "epoch": 3}, place / "model.pt")
    for make, words in UNEQUAL:
        make()
        found = ckptconv_here(*words, "--json").json
        assert {each["name"]: each["status"] for each in found["tensors"]} == {
            "model.v": "only_a",
            "model.x": "only_b",
            "model.w": "changed",
        }


def test_a_notebook_shows_what_was_found(tmp_path: Path) -> None:
    torch.save({"b": torch.ones(2000)}, tmp_path / "x.pt")
    found = ckptconv.diff(tmp_path / "x.pt", tmp_path / "x.pt")
    assert found._repr_html_().startswith("<table><caption>Difference</caption><tr>")
    assert "<tr><th>b</th><td>equal</td><td>float32</td>" in found._repr_html_()


def test_python_prints_what_the_command_prints_and_no_more_tensors(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file(
            {f"layer.{number}": torch.full((2,), value) for number in range(99)}, tmp_path / f"{name}.safetensors"
        )
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    printed = str(ckptconv.diff(*paths)).splitlines()
    assert printed[0] == f"A  {paths[0]}: safetensors"
    assert "different: of 99 tensors, 99 changed" in printed
    assert 40 < len(printed) < 60
    shown = ckptconv_here("diff", *paths).out.splitlines()
    assert [line for line in shown if line not in printed and "peak memory" not in line] == []


def test_one_file_of_many_is_compared_by_whoever_says_so(tmp_path: Path) -> None:
    path = making(STATE, "model-00002-of-00002.safetensors")(tmp_path)
    ckptconv.convert(path, tmp_path / "o.safetensors", alone=True, fsync=False)
    assert ckptconv_here("diff", path, tmp_path / "o.safetensors", "--alone").code == 0


def test_values_that_are_no_tensors_are_named(place: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 7, "rates": [0.1]}, "a.pt")
    torch.save({"model": {"w": torch.ones(2)}, "step": 8, "epoch": 1}, "b.pt")
    run = ckptconv_here("diff", "a.pt", "b.pt", "--html", "page.html")
    sentence = "not compared: the values under step, rates, epoch, which are not tensors"
    assert sentence in run.out.splitlines()
    assert "equal: 1 tensor" in run.out
    assert sentence in Path("page.html").read_text()
    assert ckptconv_here("diff", "a.pt", "b.pt", "--json").json["not_compared"] == ["step", "rates", "epoch"]
    # These are left out by what the user has chosen.
    for options in (["--key", "model"], ["--include", "model.*"]):
        assert "not compared" not in ckptconv_here("diff", "a.pt", "b.pt", *options).out

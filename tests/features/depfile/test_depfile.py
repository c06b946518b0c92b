"""Rules for make, tried with make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here, done, torch_file
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from stores import FAR, PLACES

import ckptconv
from ckptconv.errors import UsageError
from ckptconv.features.depfile.rule import escaped, rule
from ckptconv.options.table import OPTIONS

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

NAMES = st.text("ab 0=.-_#$:;%*?[]&'\"{}<>,!@+^é", min_size=1, max_size=12).filter(
    lambda name: name.strip() == name and name not in (".", "..") and not name.startswith("-")
)

# "._" is named as make's own targets are, and is refused.
TARGETS = NAMES.filter(lambda name: "%" not in name and name.rstrip("_") != ".")


def is_made(place: Path, target: str) -> bool:
    """Whether make finds `target` out of date; the recipe notes it and touches nothing else."""
    makefile = f".PHONY: first\nfirst: {escaped(target)}\n{escaped(target)}:\n\t@echo made\ninclude rule.d\n"
    (place / "Makefile").write_text(makefile)
    done = subprocess.run(["make", "-C", place, "-s"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return "made" in done.stdout


@examples(40)
@given(TARGETS, st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_a_target_is_made_when_an_input_is_newer_and_else_not(target: str, inputs: list[str]) -> None:
    if target in inputs or {target, *inputs} & {"Makefile", "rule.d", "first"}:
        return
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for number, name in enumerate([target, *inputs]):
            (place / name).touch()
            os.utime(place / name, (1000 - number, 1000 - number))
        (place / "rule.d").write_text(rule([target], inputs))
        assert not is_made(place, target)
        for name in inputs:
            os.utime(place / name, (2000, 2000))
            assert is_made(place, target), name
            os.utime(place / name, (500, 500))


def test_inputs_that_are_called_as_what_make_does_are_files_like_others(tmp_path: Path) -> None:
    names = (".IGNORE", ".ONESHELL", ".PHONY", ".SUFFIXES", ".DEFAULT", ".POSIX", "./.SILENT")
    for number, name in enumerate(names):
        # In turn where it has to be quoted.
        place = tmp_path / f"{number}{' with blanks' if number % 2 else ''}"
        place.mkdir()
        for each, changed in ((name, 1000), ("out", 2000), ("other", 500)):
            (place / each).touch()
            os.utime(place / each, (changed, changed))
        (place / "rule.d").write_text(rule(["out"], ["other", name]))
        assert not is_made(place, "out"), name
        os.utime(place / name, (3000, 3000))
        assert is_made(place, "out"), name
        (place / name).unlink()
        assert is_made(place, "out"), name
        makefile = "all: out other2\nother2:\n\t@false\n\t@touch went-on\nout:\n\t@cd / \n\t@pwd\ninclude rule.d\n"
        (place / "Makefile").write_text(makefile)
        run = subprocess.run(["make", "-k", "-C", place], capture_output=True, text=True, check=False)
        assert run.returncode == 2, name
        assert not (place / "went-on").exists(), name
        assert str(place) in run.stdout.splitlines(), name


def test_words_of_make_are_names_like_others(tmp_path: Path) -> None:
    for word in ("define", "undefine", "export", "unexport", "override", "private", "ifdef", "else"):
        for target, inputs in (("out", [word]), ("out", [word, "other"]), ("out", ["other", word]), (word, ["other"])):
            for name in ("out", "other", word):
                (tmp_path / name).touch()
                os.utime(tmp_path / name, (2000 if name == target else 1000,) * 2)
            (tmp_path / "rule.d").write_text(rule([target], inputs))
            assert not is_made(tmp_path, target), (word, target, inputs)
            for name in inputs:
                os.utime(tmp_path / name, (3000, 3000))
                assert is_made(tmp_path, target), (word, target, inputs)
                os.utime(tmp_path / name, (1000, 1000))


def test_an_input_that_is_gone_does_not_stop_make(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    (tmp_path / "rule.d").write_text(rule(["out"], ["in 1", "in 2"]))
    assert is_made(tmp_path, "out")


def test_long_rules_are_of_several_lines(tmp_path: Path) -> None:
    inputs = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(64)]
    text = rule(["out"], inputs)
    assert max(map(len, text.splitlines())) <= 122
    for name in inputs:
        (tmp_path / name).touch()
    (tmp_path / "out").touch()
    os.utime(tmp_path / "out", (1, 1))
    (tmp_path / "rule.d").write_text(text)
    assert is_made(tmp_path, "out")


def test_names_that_make_cannot_hold_are_refused() -> None:
    names = [("a", name) for name in ("b\nc", "~b", "b\\c", "b (1)", "b\vc", "b\fc", "b\x7f")]
    for target, name in (("a%b", "c"), ("a|b", "c"), (".PHONY", "c"), ("a\0", "b"), *names):
        with pytest.raises(UsageError, match="Makefiles do not support this name"):
            rule([target], [name])


def test_the_report_names_it_beside_the_manifest(tmp_path: Path) -> None:
    source, output = torch_file(tmp_path, {"w": torch.ones(2)}), tmp_path / "out.safetensors"
    words = [source, output, "--manifest", tmp_path / "m.json", "--depfile", tmp_path / "m.d"]
    run = done(ckptconv_here("convert", *words, "--json")).json
    assert run["beside"] == {str(tmp_path / "m.json"): "--manifest", str(tmp_path / "m.d"): "--depfile"}


@pytest.mark.skipif("copy_config" not in OPTIONS, reason="no small files of a model are copied")
def test_small_files_of_a_model_are_prerequisites(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "in/model.safetensors")
    for name, text in (("config.json", '{"model_type": "llama", "dtype": "float32"}'), ("tokenizer.json", "{}")):
        (tmp_path / "in" / name).write_text(text)
    for dtype in ("fp32", "bf16"):
        ckptconv.convert(tmp_path / "in", tmp_path / "out", dtype=dtype, copy_config=True, depfile=tmp_path / "out.d")
        assert prerequisites(tmp_path / "out.d") == {"model.safetensors", "config.json", "tokenizer.json"}, dtype


def prerequisites(rule: Path) -> set[str]:
    head = rule.read_text().replace(" \\\n", "").splitlines()[0]
    return {Path(name).name for name in head.partition(": ")[2].split()}


def test_files_that_describe_others_are_prerequisites(tmp_path: Path) -> None:
    state = {"model": {f"w{number}": torch.ones(64) for number in range(4)}, "epoch": 1}
    converted = tmp_path / "converted"
    ckptconv.convert(torch_file(tmp_path, state), converted, key=".", max_shard_size="300B", fsync=False)
    (tmp_path / "saved").mkdir()
    for number, name in enumerate(state["model"]):
        torch.save({name: state["model"][name]}, tmp_path / f"saved/pytorch_model-{number + 1:05}-of-00004.bin")
    files = {name: f"pytorch_model-{number + 1:05}-of-00004.bin" for number, name in enumerate(state["model"])}
    (tmp_path / "saved/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    for source in (converted, tmp_path / "saved"):
        ckptconv.convert(source, tmp_path / "out", depfile=tmp_path / "out.d", fsync=False, overwrite=True)
        read = {path.name for path in source.iterdir() if not path.name.startswith(".")}
        assert prerequisites(tmp_path / "out.d") == read
        assert any(name.endswith(".index.json") for name in read), source
    assert (converted / "ckptconv.structure.json").exists()


@FAR
def test_files_of_a_store_are_no_prerequisites(tmp_path: Path) -> None:
    place = PLACES["memory"]()
    url = place.put(torch_file(tmp_path, {"w": torch.ones(2)}), "model.pt")
    ckptconv.convert(url, tmp_path / "out.safetensors", depfile=str(tmp_path / "out.d"))
    assert (tmp_path / "out.d").read_text() == f"{tmp_path}/out.safetensors:\n"

"""`--opaque keep`: objects of other classes are written back if, and only if, `scan` would call the file safe."""

from __future__ import annotations

import argparse
import collections
import functools
import numbers
import random
from pathlib import Path
from typing import Any

import effort
import torch
from attacks.assemble import archive
from attacks.corpus import CASES
from cells import VERIFY
from checkpoints import ckptconv_here, done, torch_loaded
from features.scan import further, held_back, later
from states import with_objects

from ckptconv import convert

KEEP = ("--opaque", "keep")


class Config:
    pass


class Subclass(torch.Tensor):
    pass


def converted(tmp_path: Path, state: Any) -> Path:
    """The safetensors of a state."""
    torch.save(state, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "x.safetensors", overwrite=True)
    return tmp_path / "x.safetensors"


def test_reviewed_objects_are_written_on_request(tmp_path: Path) -> None:
    state = with_objects()
    source, output = converted(tmp_path, state), tmp_path / "back.pt"
    ckptconv_here("safetensors2pt", source, output).refused(
        3, "4 objects", "'config'", "--opaque keep", "--opaque drop"
    )
    kept = done(ckptconv_here("safetensors2pt", source, output, *KEEP, *VERIFY, "--no-fsync"))
    assert "array.array" in kept.err
    again = torch_loaded(output)
    assert again["class"] is numbers.Number
    assert again["config"].getstate() == state["config"].getstate()
    assert again["counts"].default_factory is random.Random
    assert again["when"] == state["when"]
    convert(source, output, opaque="keep")
    assert "config" in torch_loaded(output)
    left = ["--exclude", "config", "--exclude", "class", "--exclude", "when", "--exclude", "counts"]
    done(ckptconv_here("safetensors2pt", source, output, *KEEP, *left))
    assert set(torch_loaded(output)) == {"w"}


def test_what_nobody_has_reviewed_is_not_written_whoever_asks_for_it(tmp_path: Path) -> None:
    wrong = argparse.Namespace(lr=Config)
    values = {
        "a class": Config(),
        "a class as a value": Config,
        "a function": [functools.partial(print, 1)],
        "a tensor": torch.arange(3.0).as_subclass(Subclass),
        "a function in a known object": wrong,
        "a factory": collections.defaultdict(Config, a=1),
    }
    for what, value in values.items():
        source = converted(tmp_path, {"w": torch.ones(3), "value": value})
        plain, kept = (
            ckptconv_here("safetensors2pt", source, tmp_path / "back.pt", *options) for options in ((), KEEP)
        )
        assert (plain.code, kept.code) == (3, 3), what
        assert "--opaque drop" in plain.err, what
        assert "--opaque keep" not in plain.err + kept.err, what
        assert not (tmp_path / "back.pt").exists()


def test_an_attack_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(CASES["live_partial.pt"].make(str(tmp_path / "canary")))
    done(ckptconv_here("pt2safetensors", path, "--inert"))
    ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt", *KEEP).refused(3)
    assert not (tmp_path / "canary").exists()


def test_no_live_payload_is_written_back(tmp_path: Path) -> None:
    source, between, back = tmp_path / "x.pt", tmp_path / "x.safetensors", tmp_path / "back.pt"
    calls = {**held_back.CALLS, **later.CALLS, **further.CALLS}
    tried = 0
    for what in list(calls)[:: max(25 // effort.TIMES, 1)]:
        between.unlink(missing_ok=True)
        source.write_bytes(archive(calls[what](str(tmp_path / "canary"))))
        if ckptconv_here("pt2safetensors", source, "--inert").code:
            continue
        kept = ckptconv_here("safetensors2pt", between, back, *KEEP)
        assert (kept.code, back.exists()) == (3, False), what
        tried += 1
    assert tried > 10
    assert not (tmp_path / "canary").exists()

"""--key, --include, --exclude, --strip-prefix, --rename, --dtype and --tied, there and back: what comes back is the
state that was saved, less what was left out. A state dict of tensors alone has the new names, any other its keys."""

from __future__ import annotations

import fnmatch
import re
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from cells import verified_here
from checkpoints import ckptconv_here, done
from compare import assert_same
from effort import examples
from hypothesis import assume, given
from hypothesis import strategies as st

LEFT_OUT: Any = object()
BASE = torch.arange(24.0) / 7


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    """Tensors, some of which share memory, and plain values."""
    kind = draw(st.sampled_from(["own", "tied", "view", "integers", "parameter", "value"]))
    if kind == "value":
        return draw(st.sampled_from([1, 2.5, None, "text", True]))
    if kind == "integers":
        return torch.arange(draw(st.integers(1, 5)))
    tensor = BASE[:6] if kind == "tied" else BASE[draw(st.integers(0, 5)) :][:5] if kind == "view" else BASE.clone()
    return torch.nn.Parameter(tensor) if kind == "parameter" else tensor


keys = st.sampled_from(["a", "b", "bias", "model", "é", 0, 7])
states = st.dictionaries(
    st.sampled_from(["model", "optimizer", "a", "w"]),
    st.recursive(
        leaves(),
        lambda inner: st.dictionaries(keys, inner, max_size=3) | st.lists(inner, max_size=3) | st.tuples(inner, inner),
        max_leaves=6,
    ),
    min_size=1,
)
globs = st.lists(st.sampled_from(["*", "model*", "*.a*", "*bias", "w", "*0*", "optimizer.*", "[!m]*"]), max_size=2)
renames = st.lists(st.sampled_from(["^=net.", "a=o", "model=m", r"\.(\d)=_\1", "(.)$=\\1\\1", "b=b"]), max_size=2)


def names(tree: Any, prefix: str = "") -> list[str]:
    """What the tensors of a state are called."""
    if isinstance(tree, torch.Tensor):
        return [prefix[:-1] or "tensor"]
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return [name for key, value in pairs for name in names(value, f"{prefix}{key}.")]


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, one) for one in patterns)


def without(tree: Any, include: list[str], exclude: list[str], prefix: str = "", taken: bool | None = None) -> Any:
    """The state with what was chosen: the entry of a dict is absent, and None stands in a sequence.

    Tensors go by their names alone; values also by the names of what they are in, of which `taken` is the outcome: a
    container was left out (False), was chosen (True), or was not named (None).
    """
    name = prefix[:-1] or "tensor"
    if isinstance(tree, torch.Tensor):
        return tree if (not include or matches(name, include)) and not matches(name, exclude) else LEFT_OUT
    if prefix and taken is not False:
        taken = False if matches(name, exclude) else True if taken or matches(name, include) else None
    elif not prefix:
        taken = None if include else True
    if isinstance(tree, dict):
        made = {key: without(value, include, exclude, f"{prefix}{key}.", taken) for key, value in tree.items()}
        made = {key: value for key, value in made.items() if value is not LEFT_OUT}
        return made if made or taken or not prefix else LEFT_OUT
    if isinstance(tree, (list, tuple)):
        items = [without(value, include, exclude, f"{prefix}{at}.", taken) for at, value in enumerate(tree)]
        if all(value is LEFT_OUT for value in items) and not taken and prefix:
            return LEFT_OUT
        return type(tree)(None if value is LEFT_OUT else value for value in items)
    return tree if taken else LEFT_OUT


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The state with floating tensors of another dtype."""
    if isinstance(tree, torch.nn.Parameter):
        return torch.nn.Parameter(tree.detach().to(dtype))
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: cast(value, dtype) for key, value in tree.items()}
    return type(tree)(cast(value, dtype) for value in tree) if isinstance(tree, (list, tuple)) else tree


def apart(tree: Any) -> Any:
    """The state with memory of its own for every tensor."""
    if isinstance(tree, torch.nn.Parameter):
        return torch.nn.Parameter(tree.detach().clone())
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: apart(value) for key, value in tree.items()}
    return type(tree)(apart(value) for value in tree) if isinstance(tree, (list, tuple)) else tree


def under_new_names(tree: Any, prefix: str, rules: list[str]) -> Any:
    """The state, under new names if its keys are names of tensors."""
    if not isinstance(tree, dict) or names(tree) != [*tree]:
        return tree
    renamed = {}
    for name, tensor in tree.items():
        new = name.removeprefix(prefix)
        for rule in rules:
            new = re.sub(*rule.split("="), new)
        renamed[new] = tensor
    return renamed


@examples(40)
@given(
    states,
    st.sampled_from(["", "model", "optimizer"]),
    globs,
    globs,
    st.sampled_from(["", "model.", "a"]),
    renames,
    st.sampled_from(["keep", "bfloat16"]),
    st.sampled_from(["alias", "duplicate"]),
    st.sampled_from(["x.safetensors", "x"]),
)
def test_what_comes_back_is_what_was_chosen(
    state: Any,
    key: str,
    include: list[str],
    exclude: list[str],
    prefix: str,
    rules: list[str],
    dtype: str,
    tied: str,
    output: str,
) -> None:
    assume(not key or key in state)
    part = state[key] if key else state
    matched = [name for name in names(part) if not include or any(fnmatch.fnmatchcase(name, one) for one in include)]
    chosen = {name for name in matched if not any(fnmatch.fnmatchcase(name, one) for one in exclude)}
    assume(chosen)
    options = ["--dtype", dtype, "--tied", tied]
    asked = {"--key": [key], "--strip-prefix": [prefix], "--include": include, "--exclude": exclude, "--rename": rules}
    options += [word for name, values in asked.items() for value in values if value for word in (name, value)]
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        torch.save(state, place / "x.pt")
        run = ckptconv_here("pt2safetensors", place / "x.pt", place / output, "--max-shard-size", "1MB", *options)
        # Globs that match nothing, and names that would be one, are told.
        assume(run.code == 0 or (run.code == 2 and ("matches none" in run.err or "the same name" in run.err)))
        assume(run.code == 0)
        done(ckptconv_here("safetensors2pt", place / output, place / "y.pt"))
        expected = without(part, include, exclude)
        expected = under_new_names(expected, prefix, rules) if names(part) == [*part] else expected
        again = torch.load(place / "y.pt", weights_only=False)
        if dtype == "keep":
            torch.save(expected, place / "z.pt")
            assert_same(torch.load(place / "z.pt", weights_only=False), again)
        else:
            assert_same(apart(cast(expected, torch.bfloat16)), apart(again))


def test_new_names_are_those_of_a_pt_file_on_either_way(tmp_path: Path) -> None:
    """Directly, and by safetensors: the same types, order, names, memory and parameters."""
    shared = torch.arange(6.0)
    state = OrderedDict({"m.b": shared, "m.a": shared, "m.c": torch.nn.Parameter(torch.ones(3)), "m.v": shared[1:3]})
    state._metadata = OrderedDict({"m": {"version": 1}})  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "flat.pt")
    torch.save({"state": state, "epoch": 3}, tmp_path / "nested.pt")
    torch.save({"m.b": torch.ones(2), "m.a": torch.zeros(3, dtype=torch.int64)}, tmp_path / "plain.pt")
    for source, *options in (
        ("flat.pt", "--strip-prefix", "m."),
        ("flat.pt", "--exclude", "m.b", "--rename", "m.a=m.b"),
        ("flat.pt", "--rename", r"\.a$=.b2", "--dtype", "bf16"),
        ("plain.pt", "--rename", "^m=n"),
        ("plain.pt", "--rename", "a$=c", "--rename", "b$=a"),
        ("nested.pt", "--key", "state", "--include", "m.[abc]", "--strip-prefix", "m."),
    ):
        done(ckptconv_here("convert", tmp_path / source, tmp_path / "direct.pt", *options))
        direct = torch.load(tmp_path / "direct.pt")
        for output in ("x.safetensors", "x"):
            run = done(ckptconv_here("convert", tmp_path / source, tmp_path / output, *options))
            assert ("_metadata of the state dict" in run.out) == (source != "plain.pt")
            verified_here(tmp_path / source, tmp_path / output, *options)
            done(ckptconv_here("safetensors2pt", tmp_path / output, tmp_path / "y.pt"))
            again = torch.load(tmp_path / "y.pt")
            assert_same(direct, again)
            assert list(direct) == list(again)
            assert not [name for name in again if name in state and "--strip-prefix" in options]


def test_keys_of_a_nested_state_stay_which_is_told_when_names_are_given(tmp_path: Path) -> None:
    state = {"state": {"m.a": torch.ones(2)}, "epoch": 3}
    torch.save(state, tmp_path / "x.pt")
    options = ("--strip-prefix", "state.m.")
    run = done(ckptconv_here("convert", tmp_path / "x.pt", tmp_path / "x.safetensors", *options))
    assert "keep the old keys; --no-structure changes this." in run.out
    done(ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "y.pt"))
    assert_same(state, torch.load(tmp_path / "y.pt"))
    # Both of the ways that it names.
    for named in (("--no-structure", *options), ("--key", "state", "--strip-prefix", "m.")):
        run = done(ckptconv_here("convert", tmp_path / "x.pt", tmp_path / "x.safetensors", *named))
        assert "keep the old keys" not in run.out
        done(ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "y.pt"))
        assert_same({"a": torch.ones(2)}, torch.load(tmp_path / "y.pt"))


def test_the_way_back_chooses_too(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2), "b": [torch.zeros(2), 5]}, "optimizer": {0: {"m": torch.ones(2)}}, "n": 1}
    torch.save(state, tmp_path / "x.pt")
    assert ckptconv_here("pt2safetensors", tmp_path / "x.pt").code == 0
    for options, expected in [
        (["--key", "model"], state["model"]),
        (["--exclude", "optimizer.*"], {**state, "optimizer": {}}),
        (["--exclude", "optimizer*"], {"model": state["model"], "n": 1}),
        (["--include", "model.b.0"], {"model": {"b": [torch.zeros(2), None]}}),
        (["--include", "model.b.0", "--include", "n"], {"model": {"b": [torch.zeros(2), None]}, "n": 1}),
        (["--no-structure"], {"model.a": torch.ones(2), "model.b.0": torch.zeros(2), "optimizer.0.m": torch.ones(2)}),
        (["--dtype", "float16"], cast(state, torch.float16)),
    ]:
        done(ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "y.pt", *options))
        assert_same(expected, torch.load(tmp_path / "y.pt", weights_only=True))
        verified_here(tmp_path / "x.safetensors", tmp_path / "y.pt", *options)
    for options in (["--key", "nothing"], ["--include", "nothing"], ["--exclude", "*"]):
        run = ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "y.pt", *options)
        assert run.code == 2, run.err

"""diff: what means the same is equal, and what differs is found, counted and located, whatever the formats."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import READABLE, of_features, opened
from checkpoints import ZERO, Run, ckptconv, ckptconv_here
from safetensors.torch import load_file, save_file
from stores import FAR

from ckptconv import Difference, LimitError, TensorDifference, UsageError, convert, diff
from ckptconv.features.diff import reading
from ckptconv.formats.detect import open_source


def saved(state: dict[str, Any], path: Path) -> Path:
    torch.save(state, path)
    return path


def tensor_of(found: Difference, name: str) -> TensorDifference:
    (tensor,) = (each for each in found.tensors if each.name == name)
    return tensor


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int = 4096) -> None:
    """Compare so few bytes at a time that small tensors are of many blocks."""
    monkeypatch.setattr(reading, "UNIT", size)


# --------------------------------------------------------------------------------------------------------------- equal


def test_a_zero_checkpoint_is_equal_to_what_deepspeed_makes_of_it() -> None:
    for case in ZERO.cases:
        expected = ZERO / case / "expected.safetensors"
        # It leaves frozen parameters in 16 bits, and some buffers out.
        found = diff(ZERO / case / "checkpoint", expected, rtol=0, exclude="*.steps")
        assert found.equal, (case, [each for each in found.tensors if each.status != "equal"])
        assert found.elements > 0, case
        assert found.elements_differ == 0, case


PAIRS = [
    *itertools.chain(*of_features("EQUAL")),
]


def test_what_ranks_wrote_is_equal_to_what_torch_makes_of_it() -> None:
    for one, other in PAIRS:
        for a, b in ((one, other), (other, one)):
            found = diff(a, b, key="." if "dcp" in one.parts else "")
            assert found.equal, (a, [each for each in found.tensors if each.status != "equal"])


CONVERTED = [
    *(ZERO / name for name in ZERO.names if name.startswith(("z1_bf16_frozen", "z3_fp16"))),
    *itertools.chain(*of_features("COMPRESSED")),
]


def test_a_conversion_is_equal_to_its_source_bit_for_bit(tmp_path: Path) -> None:
    for case in CONVERTED:
        convert(case / "checkpoint", tmp_path / case.name, max_shard_size=500, **READABLE)
        found = diff(case / "checkpoint", tmp_path / case.name)
        assert found.equal, case
        assert found.counts["equal"] == len(found.tensors) > 3, case


def test_optimizer_states_are_compared_if_asked_for() -> None:
    one, other = (ZERO / case / "checkpoint" for case in ("z1_bf16_w2", "z2_bf16_w2"))
    found = diff(one, one, with_states=True)
    assert found.equal
    weights = len(diff(one, one).tensors)
    states = [each.name for each in found.tensors if each.name.startswith("optimizer.")]
    assert len(found.tensors) == weights + len(states)
    assert any(name.endswith(".exp_avg") for name in states)
    left = [hint for hint in diff(one, other).hints if hint.startswith("Not compared: ")]
    assert left == ["Not compared: the optimizer. Use --with-states for it."]
    assert not [hint for hint in found.hints if hint.startswith("Not compared: ")]
    chosen = diff(one, other, with_states=True, include=states[0].removeprefix("optimizer."))
    assert [each.name for each in chosen.tensors] == [states[0]]
    with pytest.raises(UsageError, match="no optimizer states"):
        diff(one, ZERO / "z1_bf16_w2/expected.safetensors", with_states=True)


# ------------------------------------------------------------------------------------------------- planted differences

FP8 = torch.float8_e4m3fn
BASE: dict[str, torch.Tensor] = {
    "f32": torch.linspace(-2, 2, 35).reshape(5, 7),
    "f64": torch.linspace(-2, 2, 6, dtype=torch.float64),
    "f16": torch.linspace(-2, 2, 24, dtype=torch.float16).reshape(2, 3, 4),
    "bf16": torch.linspace(-2, 2, 6000, dtype=torch.bfloat16).reshape(60, 100),
    "fp8": torch.linspace(-2, 2, 16).to(FP8),
    "i64": torch.arange(10),
    "u8": torch.arange(200, dtype=torch.uint8),
    "i8": torch.arange(-5, 5, dtype=torch.int8),
    "bool": torch.tensor([True, False, True]),
    "c64": torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3),
    "c128": torch.ones(3, dtype=torch.complex128),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 4),
    "nan": torch.tensor([math.nan, 1.0, 0.0]),
    "transposed": torch.arange(2400.0).reshape(40, 60).t(),
    "strided": torch.arange(600.0).reshape(20, 30)[::2, ::3],
    "qint": torch.quantize_per_tensor(torch.linspace(-1, 1, 8), 0.1, 0, torch.qint8),
}


def put(name: str, place: tuple[int, ...], value: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    """Give an element another value."""

    def change(state: dict[str, torch.Tensor]) -> None:
        state[name] = state[name].clone()
        state[name][place] = value

    return change


def bits(name: str, byte: int, value: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """Change bits of a byte of a contiguous tensor."""

    def change(state: dict[str, torch.Tensor]) -> None:
        flat = state[name].contiguous().clone().reshape(-1)
        flat.view(torch.uint8)[byte] ^= value
        state[name] = flat.reshape(state[name].shape)

    return change


def instead(name: str, tensor: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    """Put another tensor in the place of one; none takes it away."""

    def change(state: dict[str, torch.Tensor]) -> None:
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor(state) if callable(tensor) else tensor

    return change


# What is changed, and what has to be found: the tensor, its status, how many elements, and the index of the first.
PLANTED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str, str, int | None, list[int] | None]] = {
    "a value": (put("f32", (2, 3), 9), "f32", "changed", 1, [2, 3]),
    "the first": (put("f32", (0, 0), 9), "f32", "changed", 1, [0, 0]),
    "the last": (put("f32", (4, 6), 9), "f32", "changed", 1, [4, 6]),
    "a row": (put("f32", (3,), 9), "f32", "changed", 7, [3, 0]),
    "all": (instead("f32", BASE["f32"] + 1), "f32", "changed", 35, [0, 0]),
    "one bit of the last element": (bits("f32", 34 * 4, 1), "f32", "changed", 1, [4, 6]),
    "one bit of a float64": (bits("f64", 47, 1), "f64", "changed", 1, [5]),
    "a float16": (put("f16", (1, 2, 3), 9), "f16", "changed", 1, [1, 2, 3]),
    "a bfloat16 in a later block": (put("bf16", (59, 98), 9), "bf16", "changed", 1, [59, 98]),
    "a column": (put("bf16", (slice(None), 50), 9), "bf16", "changed", 60, [0, 50]),
    "an infinity": (put("bf16", (30, 1), math.inf), "bf16", "changed", 1, [30, 1]),
    "a NaN": (put("f32", (1, 1), math.nan), "f32", "changed", 1, [1, 1]),
    "fp8": (put("fp8", (15,), 0.5), "fp8", "changed", 1, [15]),
    "a bit of fp8": (bits("fp8", 3, 128), "fp8", "changed", 1, [3]),
    "an integer": (put("i64", (9,), -1), "i64", "changed", 1, [9]),
    "the top byte of an integer": (bits("i64", 7, 64), "i64", "changed", 1, [0]),
    "a byte": (put("u8", (199,), 7), "u8", "changed", 1, [199]),
    "a negative integer": (put("i8", (0,), 5), "i8", "changed", 1, [0]),
    "a bool": (put("bool", (1,), True), "bool", "changed", 1, [1]),
    "a real part": (put("c64", (1, 1), 9 - 4j), "c64", "changed", 1, [1, 1]),
    "an imaginary part": (put("c64", (0, 2), 2 + 2j), "c64", "changed", 1, [0, 2]),
    "a complex128": (put("c128", (2,), 0), "c128", "changed", 1, [2]),
    "a scalar": (put("scalar", (), 2), "scalar", "changed", 1, []),
    "the payload of a NaN": (bits("nan", 0, 1), "nan", "changed", 1, [0]),
    "the sign of a NaN": (bits("nan", 3, 128), "nan", "changed", 1, [0]),
    "minus zero": (bits("nan", 11, 128), "nan", "changed", 1, [2]),
    "in a transposed tensor": (put("transposed", (59, 39), 0.5), "transposed", "changed", 1, [59, 39]),
    "a column of a transposed tensor": (put("transposed", (slice(None), 7), 0.5), "transposed", "changed", 60, [0, 7]),
    "a transposed tensor that is not": (
        instead("transposed", torch.arange(2400.0).reshape(60, 40)),
        "transposed",
        "changed",
        2398,
        [0, 1],
    ),
    "in a strided tensor": (put("strided", (9, 9), 0.5), "strided", "changed", 1, [9, 9]),
    "in a quantized tensor": (
        instead("qint", torch.quantize_per_tensor(torch.linspace(1, -1, 8), 0.1, 0, torch.qint8)),
        "qint.values",
        "changed",
        8,
        [0],
    ),
    "a shape of as many elements": (instead("f32", BASE["f32"].reshape(7, 5)), "f32", "shape", None, None),
    "a shape of one dimension more": (instead("scalar", torch.tensor([1.5])), "scalar", "shape", None, None),
    "an empty shape": (instead("empty", torch.empty(4, 0)), "empty", "shape", None, None),
    "an empty dtype": (instead("empty", torch.empty(0, 4, dtype=torch.int8)), "empty", "dtype", None, None),
    "a dtype with the same values": (instead("f16", BASE["f16"].float()), "f16", "dtype", 0, None),
    "a dtype with other values": (
        instead("bf16", torch.linspace(-2, 2, 6000).reshape(60, 100)),
        "bf16",
        "dtype",
        int((BASE["bf16"] != torch.linspace(-2, 2, 6000).reshape(60, 100)).sum()),
        [0, 1],
    ),
    "a dtype that is not comparable": (instead("i64", torch.arange(10.0)), "i64", "dtype", None, None),
    "an integer's dtype": (instead("i8", torch.arange(-5, 5)), "i8", "dtype", 0, None),
    "the same bits as another dtype": (
        instead("f32", BASE["f32"].view(torch.int32)),
        "f32",
        "dtype",
        35,
        [0, 0],
    ),
    "a tensor less": (instead("bool", None), "bool", "only_a", None, None),
    "a tensor more": (instead("more", torch.ones(2)), "more", "only_b", None, None),
    "a tie": (instead("more", lambda state: state["f32"]), "more", "only_b", None, None),
}


def test_a_difference_is_found_counted_and_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    base = saved(BASE, tmp_path / "base.pt")
    for planted, (change, name, status, elements, first) in PLANTED.items():
        state = dict(BASE)
        change(state)
        other = saved(state, tmp_path / "other.pt")
        # Complex numbers of a safetensors file are told by its structure record.
        if not READABLE and "shape" not in planted and "quantized" not in planted:
            convert(other, tmp_path / "other.safetensors", fsync=False)
            other = tmp_path / "other.safetensors"
        for found in (diff(base, other), diff(base, other, jobs=1)):
            assert not found.equal, planted
            assert [each.name for each in found.tensors if each.status != "equal"] == [name], planted
            tensor = tensor_of(found, name)
            assert tensor.status == status, planted
            assert found.counts[status] == 1, planted
            assert (tensor.change.elements if tensor.change else None) == elements, planted
            assert (tensor.change.first if tensor.change else None) == first, planted
            assert found.elements_differ == (elements or 0), planted
        back = diff(other, base)
        assert tensor_of(back, name).status == {"only_a": "only_b", "only_b": "only_a"}.get(status, status), planted
        assert back.elements_differ == (elements or 0), planted


def test_sizes_and_norms_are_those_of_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Most blocks are equal: some are passed before the first difference is found, and are read again.
    small_blocks(monkeypatch, 1 << 12)
    one = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    other = one.clone()
    other[120, 7] += 3
    other[199, 299] *= -1
    for name, layout in (("plain", one), ("transposed", one.t().contiguous().t())):
        a = saved({"w": layout}, tmp_path / f"{name}-a.pt")
        b = saved({"w": other}, tmp_path / f"{name}-b.pt")
        for jobs in (1, 4):
            change = tensor_of(diff(a, b, jobs=jobs), "w").change
            assert change is not None
            delta = other.double() - one.double()
            assert (change.elements, change.first) == (2, [120, 7])
            assert change.max_abs == delta.abs().max().item()
            for norm, values in ((change.norm, delta), (change.norm_a, one), (change.norm_b, other)):
                assert norm == pytest.approx(values.double().norm().item(), rel=1e-12)


def test_what_differs_most_comes_first(tmp_path: Path) -> None:
    one = {name: torch.ones(4) for name in "abcdef"}
    other = {**one, "b": one["b"] * 1.01, "c": one["c"] * 5, "d": torch.tensor([1, 1, 1, math.nan]), "g": one["a"]}
    other["f"] = torch.ones(5)
    del other["e"]
    found = diff(saved(one, tmp_path / "a.pt"), saved(other, tmp_path / "b.pt"))
    assert [each.name for each in found.tensors] == ["e", "g", "f", "d", "c", "b", "a"]
    assert tensor_of(found, "d").change.not_finite == 1  # type: ignore[union-attr]


def test_an_element_of_a_tensor_that_ranks_share_is_located(tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2/checkpoint"
    convert(source, tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[-2:] += 1
    save_file(tensors, tmp_path / "b.safetensors")
    change = tensor_of(diff(source, tmp_path / "b.safetensors", include=name), name).change
    assert change is not None
    place = list(tensors[name].shape)
    assert (change.elements, change.first) == (2, [*(extent - 1 for extent in place[:-1]), place[-1] - 2])


def test_a_block_of_a_shard_is_located(tmp_path: Path) -> None:
    convert(saved(BASE, tmp_path / "a.pt"), tmp_path / "a", max_shard_size=5000, structure=False)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    path = tmp_path / "b" / index["weight_map"]["bf16"]
    tensors = load_file(path)
    tensors["bf16"][30, 40] = 5
    save_file(tensors, path, {"format": "pt"})
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.counts["changed"] == 1
    assert tensor_of(found, "bf16").change.first == [30, 40]  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------- what is the same


def test_with_a_tolerance_values_count_and_not_bits_or_dtypes(tmp_path: Path) -> None:
    zero = torch.tensor([0.0, math.nan, 1.0])
    other = torch.tensor([-0.0, -math.nan, 1.001])
    a = saved({"w": zero, "v": torch.ones(3), "n": torch.arange(3)}, tmp_path / "a.pt")
    b = saved({"w": other, "v": torch.ones(3).bfloat16(), "n": torch.arange(3.0)}, tmp_path / "b.pt")
    found = diff(a, b)
    assert found.counts["dtype"] == 2
    assert tensor_of(found, "w").change.same_value == 2  # type: ignore[union-attr]
    exact = diff(a, b, rtol=0)
    assert exact.counts == {"only_a": 0, "only_b": 0, "shape": 0, "dtype": 1, "changed": 1, "equal": 1}
    assert tensor_of(exact, "w").change.first == [2]  # type: ignore[union-attr]
    near = diff(a, b, atol="2e-3", exclude="n")
    assert near.equal
    assert (near.rtol, near.atol) == (0, 2e-3)
    assert tensor_of(near, "w").change.elements == 0  # type: ignore[union-attr]
    assert tensor_of(near, "w").change.max_abs == pytest.approx(1e-3, rel=1e-3)  # type: ignore[union-attr]
    assert diff(a, b, rtol=1e-3, exclude="n").equal
    assert not diff(a, b, rtol=9e-4, exclude="n").equal


def test_both_may_be_cast_before_they_are_compared(tmp_path: Path) -> None:
    a = saved({"w": torch.linspace(0, 1, 99)}, tmp_path / "a.pt")
    convert(a, tmp_path / "b.safetensors", dtype="bf16")
    assert diff(a, tmp_path / "b.safetensors").counts["dtype"] == 1
    assert diff(a, tmp_path / "b.safetensors", dtype="bf16").equal


def test_a_hint_leaves_out_parts_that_only_one_side_has(tmp_path: Path) -> None:
    state = {"layer.w": torch.ones(3), "head": torch.ones(1)}
    whole = {"model": state, "optimizer": {"m": torch.ones(3)}, "rng": torch.ones(2)}
    a, b = saved(whole, tmp_path / "a.pt"), saved(state, tmp_path / "b.pt")
    (hint,) = diff(a, b).hints
    advice = "--strip-prefix model. removes it. --exclude 'optimizer.*' --exclude rng excludes the remaining names"
    assert advice in hint
    assert diff(a, b, strip_prefix="model.", exclude=["optimizer.*", "rng"]).equal
    # A part with names that both sides have stays.
    b = saved({**state, "optimizer.n": torch.ones(3)}, tmp_path / "b.pt")
    assert "--exclude" not in diff(a, b).hints[0]


def test_names_are_changed_and_chosen_on_both_sides(tmp_path: Path) -> None:
    state = {"layer.w": torch.ones(3), "layer.b": torch.zeros(2), "head": torch.ones(1)}
    a = saved({f"model.{name}": tensor for name, tensor in state.items()}, tmp_path / "a.pt")
    b = saved(state, tmp_path / "b.pt")
    found = diff(a, b)
    assert (found.counts["only_a"], found.counts["only_b"]) == (3, 3)
    (hint,) = found.hints
    assert "3 names of A" in hint
    assert "--strip-prefix model." in hint
    assert diff(a, b, strip_prefix="model.").equal
    assert diff(b, a, strip_prefix="model.").equal
    assert diff(a, b, rename="^model[.]=").equal
    assert [each.name for each in diff(a, b, include=["model.head", "layer.w"]).tensors] == ["model.head", "layer.w"]
    assert len(diff(a, b, exclude="*.b", strip_prefix="model.").tensors) == 2
    assert "strip-prefix" in diff(a, b, strip_prefix="no.").warnings[0]
    with pytest.raises(UsageError, match="'hat' matches no name"):
        diff(a, b, include="hat")


def test_tied_names_are_compared_once_and_counted_each(tmp_path: Path) -> None:
    tied = torch.ones(5)
    a = saved({"embed": tied, "head": tied}, tmp_path / "a.pt")
    b = saved({"embed": tied + 1, "head": tied + 1}, tmp_path / "b.pt")
    found = diff(a, a)
    assert (found.elements, found.counts["equal"]) == (5, 2)
    assert tensor_of(found, "head").tied == "embed"
    assert diff(a, b).counts["changed"] == 2
    convert(a, tmp_path / "a.safetensors", structure=False)
    assert diff(a, tmp_path / "a.safetensors").equal
    alone = saved({"embed": tied}, tmp_path / "c.pt")
    assert tensor_of(diff(a, alone), "head").tied == "embed"


# ------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(tmp_path)
    state = {f"layers.{n}.w": torch.full((3,), float(n + 1)) for n in range(60)}
    saved(state, Path("a.pt"))
    saved({**state, **{name: 2 * tensor for name, tensor in list(state.items())[5:]}}, Path("b.pt"))
    return "a.pt", "b.pt"


def test_the_exit_code_says_whether_anything_differs(two: tuple[str, str]) -> None:
    same, other = ckptconv_here("diff", "a.pt", "a.pt"), ckptconv_here("diff", *two)
    assert (same.code, other.code) == (0, 1)
    assert "equal: 60 tensors" in same.out
    assert "different: of 60 tensors, 55 changed, 5 equal" in other.out
    assert other.err == ""
    assert ckptconv_here("diff", "a.pt", "none.pt").refused(2, "none.pt does not exist")
    assert ckptconv_here("diff", "--rtol", "-1", *two).refused(2, "--rtol", "number not below 0")
    assert ckptconv_here("diff", "a.pt").code == 2
    assert ckptconv_here("diff", "-", "-").refused(2, "A and B are both pipes")


def test_top_lists_differences_within_the_tolerance_too(tmp_path: Path) -> None:
    save_file({name: torch.ones(4) for name in "abc"}, tmp_path / "a.safetensors")
    save_file({name: torch.ones(4) + 2**-10 * number for number, name in enumerate("abc")}, tmp_path / "b.safetensors")
    words = ("diff", "--rtol", "0.01", tmp_path / "a.safetensors")
    lines = ckptconv_here(*words, tmp_path / "b.safetensors", "--top", "1").out.splitlines()
    (listed,) = (line.split() for line in lines if line.startswith("  c "))
    assert listed[1] == "0"
    assert float(listed[-1]) == pytest.approx(2**-9, rel=1e-2)
    assert "  … and 1 more (--top N shows more)" in lines
    assert "  c " not in ckptconv_here(*words, tmp_path / "b.safetensors").out
    same = ckptconv_here(*words, tmp_path / "a.safetensors", "--top", "1")
    assert "no tensors to list: all are equal, even without a tolerance" in same.out


def test_as_many_tensors_are_listed_as_asked_for(two: tuple[str, str]) -> None:
    def listed(run: Run) -> int:
        return sum("layers." in line for line in run.out.splitlines())

    assert listed(ckptconv_here("diff", *two)) == 40
    assert "… and 15 more (--verbose shows all)" in ckptconv_here("diff", *two).out
    assert listed(ckptconv_here("diff", *two, "--verbose")) == 55
    assert listed(ckptconv_here("diff", *two, "--top", "3")) == 3
    assert ckptconv_here("diff", *two, "-q").out == ""
    found = ckptconv_here("diff", *two, "--json").json
    assert (len(found["tensors"]), found["ok"], found["error"]["kind"]) == (60, False, "difference")
    assert len(ckptconv_here("diff", *two, "--json", "--top", "3").json["tensors"]) == 3


def test_a_page_shows_all_of_it(two: tuple[str, str]) -> None:
    run = ckptconv_here("diff", *two, "--html", "page.html")
    assert run.code == 1
    text = Path("page.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["names"]) == len(data["level"]) == len(data["stats"]) == 60
    levels = {data["levels"][level][0] for level in data["level"]}
    assert levels == {"equal", "by 10% or more"}
    assert "default-src 'none'" in text
    assert ckptconv_here("diff", *two, "--html", "a.pt").refused(2, "a.pt")


@FAR
def test_remote_checkpoints_are_compared_where_they_are(tmp_path: Path) -> None:
    a = saved(BASE, tmp_path / "a.pt")
    convert(a, "memory://diff/a", max_shard_size=4000, **READABLE)
    state = dict(BASE)
    put("bf16", (59, 99), 7)(state)
    convert(saved(state, tmp_path / "b.pt"), "memory://diff/b.safetensors", **READABLE)
    assert diff(a, "memory://diff/a").equal
    found = diff("memory://diff/a", "memory://diff/b.safetensors")
    assert found.counts["changed"] == 1
    assert tensor_of(found, "bf16").change.first == [59, 99]  # type: ignore[union-attr]
    assert found.bytes_read < 100_000
    assert diff("memory://diff/a", "memory://diff/b.safetensors", measure=False).counts == found.counts


def test_what_repeats_a_few_elements_forever_is_refused(tmp_path: Path) -> None:
    big = saved({"w": torch.ones(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pt")
    with pytest.raises(LimitError, match="repeat the same elements"):
        diff(big, big)


def test_memory_stays_small_whatever_the_size_of_a_tensor(tmp_path: Path) -> None:
    big = torch.arange(12 << 20, dtype=torch.float32)
    a = saved({"a": big.reshape(4096, -1).t(), "b": big.view(-1, 2)}, tmp_path / "a.pt")
    big[5 << 20 :] += 1
    b = saved({"a": big.reshape(4096, -1).t().contiguous(), "b": big.view(-1, 2)}, tmp_path / "b.pt")
    run = ckptconv("diff", a, b, "--json")
    assert run.code == 1, run.err
    assert run.json["elements_differ"] == 2 * (7 << 20)
    assert run.json["peak_rss_bytes"] < 72 << 20


def test_it_is_a_call_too_and_takes_opened_checkpoints(two: tuple[str, str]) -> None:
    for one, other in ((open_source("a.pt"), open_source("b.pt")), *zip(opened("a.pt"), opened("b.pt"), strict=True)):
        found = diff(one, other)
        assert json.loads(found.to_json(top=2))["tensors"][0]["status"] == "changed"
        assert not found.equal


def test_numpy_s_rule_of_tolerance_is_that_of_isclose(tmp_path: Path) -> None:
    a = torch.tensor([1.0, 1.1, 0.0, 2.0, float("nan"), float("inf"), -1.0, 100.0])
    b = torch.tensor([1.1, 1.0, 0.05, 2.3, float("nan"), float("inf"), 1.0, 110.5])
    save_file({"w": a}, tmp_path / "a.safetensors")
    save_file({"w": b}, tmp_path / "b.safetensors")
    for rtol, atol in ((0.1, 0.0), (0.0, 0.1), (0.1, 0.05), (0.05, 0.1), (0.1, 0.01)):
        for one, other, x, y in (("a", "b", a, b), ("b", "a", b, a)):
            paths = [tmp_path / f"{each}.safetensors" for each in (one, other)]
            found = diff(*paths, rtol=rtol, atol=atol, tolerance="numpy")
            close = np.isclose(x.double().numpy(), y.double().numpy(), rtol=rtol, atol=atol, equal_nan=True)
            assert found.elements_differ == (~close).sum(), (rtol, atol, one)
            assert found.tolerance == "numpy"
    run = ckptconv_here("diff", *(tmp_path / f"{each}.safetensors" for each in "ab"), "--tolerance", "numpy")
    run.refused(2, "--tolerance numpy", "--rtol or --atol.")


def test_exclude_takes_the_names_that_include_takes(tmp_path: Path) -> None:
    save_file({"x.a": torch.zeros(3), "x.b": torch.zeros(3)}, tmp_path / "a.safetensors")
    save_file({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "b.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    found = diff(*paths, strip_prefix="x.", exclude="b")
    assert [each.name for each in found.tensors] == ["a"]
    assert found.warnings == []
    assert [each.name for each in diff(*paths, strip_prefix="x.", include="b").tensors] == ["b"]
    found = diff(*paths, exclude=["a", "b", "c"])
    assert {each.name: each.status for each in found.tensors} == {"x.a": "only_a", "x.b": "only_a"}
    assert [text.partition(".")[0] for text in found.warnings] == ["--exclude 'c' matches nothing"]
    with pytest.raises(UsageError, match="No tensors to compare"):
        diff(*paths, strip_prefix="x.", exclude="?")


def test_a_nan_on_one_side_has_no_relative_size(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 2.0])}, tmp_path / "a.safetensors")
    save_file({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (tensor,) = found.tensors
    assert tensor.change is not None
    assert (tensor.change.relative, tensor.change.not_finite) == (None, 1)
    run = ckptconv_here("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    row = next(line for line in run.out.splitlines() if line.lstrip().startswith("w "))
    assert row.split()[:7] == ["w", "1", "(50", "%)", "–", "–", "[1]"]
    assert row.endswith("1 NaN or infinite")


def test_a_page_counts_tied_tensors_once_and_divides_small_changes(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    for name, by in (("a", 0.0), ("b", 3e-6), ("c", 3e-5)):
        changed = weight * (1 + by)
        torch.save({"embed": changed, "head": changed, "own": weight.clone()}, tmp_path / f"{name}.pt")
    levels = []
    for name in "bc":
        page = tmp_path / f"{name}.html"
        ckptconv_here("diff", tmp_path / "a.pt", tmp_path / f"{name}.pt", "--html", page)
        told = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())[1])
        assert told["totals"] == [["float32", 2, 2000, 8000]]
        assert told["tied"] == {str(told["names"].index("head")): "embed"}
        levels.append(told["levels"][told["level"][told["names"].index("embed")]][0])
    assert levels == ["by less than 0.001%", "by less than 0.01%"]


def test_its_own_words_for_an_option_stand_in_its_help() -> None:
    shown = " ".join(ckptconv_here("diff", "--help").out.split())
    assert "--dtype DTYPE Cast the floating-point tensors of both" in shown
    assert "As for convert, see ckptconv help options: " in shown


def test_states_are_asked_for_by_their_former_name_too() -> None:
    step = ZERO / "z1_bf16_w2" / "checkpoint"
    told = "ckptconv: --optimizer is called --with-states here.\n"
    assert ckptconv_here("diff", step, step, "--optimizer").err == told
    assert ckptconv_here("diff", step, step, "--with-states").err == ""
    with pytest.warns(UserWarning, match="--optimizer is called --with-states"):
        assert diff(step, step, optimizer=True).equal  # type: ignore[call-arg]


def test_the_size_of_a_difference_is_no_rule(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    run = ckptconv_here("diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors", "--tolerance", "1e-3")
    run.refused(2, "--tolerance must be symmetric or numpy", "--rtol or --atol")
    run = ckptconv_here("diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors", "--tol", "1e-3")
    run.refused(2, "There is no option --tol.", "Use --rtol or --atol")


def test_a_key_that_one_side_lacks_is_that_of_the_other(tmp_path: Path) -> None:
    weights = {"model.w": torch.ones(2), "head.w": torch.ones(3)}
    torch.save({"model": weights, "step": 1}, tmp_path / "a.pt")
    save_file(weights, tmp_path / "b.safetensors")
    paths = [tmp_path / "a.pt", tmp_path / "b.safetensors"]
    for sides, has in ((paths, "A"), (paths[::-1], "B")):
        run = ckptconv_here("diff", *sides, "--key", "model")
        assert (run.code, f"--key model was applied to {has} alone" in run.err) == (0, True), run
        # Names of both sides begin with the prefix, so that to strip it helps neither.
        run = ckptconv_here("diff", *sides)
        assert f"--key model compares this part of {has}." in run.out
        assert "--strip-prefix" not in run.out
    ckptconv_here("diff", *paths, "--key", "none").refused(2, "The key 'none'")
    torch.save({"model": {"inner": weights}}, tmp_path / "a.pt")
    torch.save({"model": weights}, tmp_path / "c.pt")
    run = ckptconv_here("diff", tmp_path / "a.pt", tmp_path / "c.pt", "--key", "model.inner")
    assert "--key model.inner was applied to A alone" in run.err


def test_the_share_of_an_element_is_not_called_as_the_ratio_of_norms_is(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 100.0])}, tmp_path / "a.safetensors")
    save_file({"w": torch.tensor([2.0, 100.0])}, tmp_path / "b.safetensors")
    out = ckptconv_here("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors").out
    assert "1 of 2 elements differ (50 %), by at most 1, and by at most 0.5 of the larger element" in out
    assert out.count("relative") == 1


def test_the_sizes_of_changes_are_in_the_result(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": torch.tensor([value])}, tmp_path / f"{name}.safetensors")
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    with pytest.raises(UsageError, match=r"size of each change: result.tensors\[i\].change"):
        diff(a, b, stats=True)  # type: ignore[call-arg]
    change = diff(a, b).tensors[0].change
    assert change
    assert change.max_abs == 1

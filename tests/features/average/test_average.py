"""Averages: exact sums of checkpoints of any formats, verified, and nothing averaged that is no number."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from cells import VERIFIED, offered, verified, verify, verifying
from checkpoints import ZERO, ckptconv_here, contents, done
from effort import examples
from faults import other_fields
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from reading import state_in
from safetensors.torch import load_file, save_file
from stores import FAR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptconv import DifferenceError, UnsupportedError, UsageError, average, convert
from ckptconv.features.average.options import AVERAGING
from ckptconv.features.sums.kernels import WeightedSum
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import CHECKPOINTS, NAMED

Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.usefixtures("place")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def model(seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(40, 33, generator=made).bfloat16(),
        "a.bias": torch.randn(33, generator=made),
        "b.weight": torch.randn(7, 5, generator=made).half(),
        "c.weight": torch.randn(3, generator=made, dtype=torch.float64),
        "steps": torch.tensor(seed),
        "nothing": torch.zeros(0, 4),
    }


def saved(*tensors: Tensors) -> list[str]:
    """Files of these tensors: .pt and .safetensors in turn."""
    names = []
    for number, each in enumerate(tensors):
        names.append(f"{number}.{'safetensors' if number % 2 else 'pt'}")
        (save_file if number % 2 else torch.save)(each, names[-1])
    return names


def expected(models: Sequence[Tensors], weights: Sequence[float], over: float = 0) -> Tensors:
    """The sums as torch makes them in float64, in order, rounded once."""
    made = dict(models[-1])
    for name, last in models[-1].items():
        if last.dtype.is_floating_point:
            total = models[0][name].double() * weights[0]
            for each, weight in zip(models[1:], weights[1:], strict=True):
                total = total + each[name].double() * weight
            made[name] = rounded(total / (over or sum(weights)), last.dtype)
    return made


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of float64 in `dtype`, rounded once: torch rounds them to float32 first."""
    near = exact.to(dtype)
    others = (
        [torch.nextafter(near, torch.full_like(near, to)) for to in (-torch.inf, torch.inf)] if near.numel() else []
    )
    for other in others if dtype in (torch.bfloat16, torch.float16) else []:
        near = torch.where((other.double() - exact).abs() < (near.double() - exact).abs(), other, near)
    return near


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("weights", [None, [1, 1, 2], [0.3, -0.2, 0.7]], ids=str)
def test_a_sum_is_that_of_float64_rounded_once(weights: list[float] | None) -> None:
    models = [model(seed) for seed in range(3)]
    report = average(saved(*models), "out.safetensors", weights=weights, **VERIFIED)
    assert_equal(load_file("out.safetensors"), expected(models, weights or [1, 1, 1]))
    assert any("'steps'" in note and "2.pt" in note for note in report.notes)
    assert bool(report.bytes_verified) == bool(VERIFIED)


def test_the_average_is_that_of_torch() -> None:
    modules = [torch.nn.Linear(20, 30) for _ in range(3)]
    swa = AveragedModel(modules[0])
    for module in modules:
        swa.update_parameters(module)
    average(saved(*(module.state_dict() for module in modules)), "out.safetensors")
    for name, tensor in load_file("out.safetensors").items():
        torch.testing.assert_close(tensor, swa.module.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_the_moving_average_is_that_of_torch() -> None:
    modules = [torch.nn.Linear(20, 30) for _ in range(4)]
    moving = AveragedModel(modules[0], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for module in modules:
        moving.update_parameters(module)
    average(saved(*(module.state_dict() for module in modules)), "out.safetensors", ema=0.9)
    for name, tensor in load_file("out.safetensors").items():
        torch.testing.assert_close(tensor, moving.module.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_a_moving_average_counts_the_last_most() -> None:
    models = [model(seed) for seed in range(3)]
    average(saved(*models), "out.safetensors", ema=0.9)
    moving = {name: tensor.double() for name, tensor in models[0].items()}
    for each in models[1:]:
        moving = {name: 0.9 * tensor + 0.1 * each[name].double() for name, tensor in moving.items()}
    found = load_file("out.safetensors")
    for name in ("a.weight", "a.bias", "c.weight"):
        torch.testing.assert_close(found[name].double(), moving[name], rtol=2**-8, atol=1e-12)


def test_differences_are_added_by_their_weights() -> None:
    models = [model(seed) for seed in range(3)]
    names = saved(*models)
    average(names[:2], "out.safetensors", minus=names[2], weights=[1, 0.5], **VERIFIED)
    base, tuned, pre = (each["a.bias"].double() for each in models)
    assert torch.equal(load_file("out.safetensors")["a.bias"], (base + 0.5 * tuned - 0.5 * pre).float())
    # The first weight counts too.
    average(names[:2], "out.safetensors", minus=names[2], weights=[0.5, 0.25], overwrite=True)
    assert torch.equal(load_file("out.safetensors")["a.bias"], (0.5 * base + 0.25 * (tuned - pre)).float())
    assert "weight × first STEP + Σ weight × (STEP − BASE)" in AVERAGING["minus"].about
    average(names[:1], "difference.safetensors", minus=names[1])
    assert torch.equal(load_file("difference.safetensors")["a.bias"], models[0]["a.bias"] - models[1]["a.bias"])


@given(data=st.data())
@examples(8, HealthCheck.function_scoped_fixture)
def test_any_numbers_of_any_dtypes_are_verified(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 4))
    bits = [
        torch.from_numpy(np.frombuffer(data.draw(st.binary(min_size=96, max_size=96)), "u1").copy()).view(
            data.draw(st.sampled_from(FLOATS))
        )[:12]
        for _ in range(count)
    ]
    weights = data.draw(st.lists(st.floats(-8, 8), min_size=count, max_size=count).filter(math.fsum))
    names = saved(*({"w": each} for each in bits))
    for dtype in ("keep", "bf16"):
        average(names, "any.safetensors", weights=weights, dtype=dtype, **VERIFIED, fsync=False)


@pytest.mark.parametrize("to", ["fp32", "bf16", "fp16"])
def test_another_dtype_is_rounded_once_too(to: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[to]
    models = [model(seed) for seed in range(3)]
    average(saved(*models), "out.safetensors", dtype=to)
    wide = [{name: t.double() if t.is_floating_point() else t for name, t in each.items()} for each in models]
    made = expected(wide, [1, 1, 1])
    assert_equal(
        load_file("out.safetensors"),
        {name: rounded(t, dtype) if t.is_floating_point() else t for name, t in made.items()},
    )


@verifying
def test_formats_may_be_mixed() -> None:
    zero = ZERO / "z3_fp32_w4" / "checkpoint"
    convert(zero, "model.safetensors")
    other = {name: tensor + 1 for name, tensor in load_file("model.safetensors").items() if tensor.is_floating_point()}
    torch.save({**load_file("model.safetensors"), **other}, "other.pt")
    average(["other.pt", zero, zero, "model.safetensors"], "out", **VERIFIED)
    found, first = load_file("out/model.safetensors"), load_file("model.safetensors")
    for name in other:
        torch.testing.assert_close(found[name], first[name] + 0.25)
    assert verify("model.safetensors", "out").bytes_compared


def test_states_of_an_optimizer_are_those_of_the_last() -> None:
    for number in range(2):
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(4)).sum().backward()
        optimizer.step()
        torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "step": number}, f"{number}.pt")
    report = average(["0.pt", "1.pt"], "whole.safetensors", **VERIFIED)
    assert any("states" in note for note in report.notes)
    whole, last = state_in(Path("whole.safetensors")), torch.load("1.pt")
    assert whole["step"] == 1
    assert torch.equal(whole["optimizer"]["state"][0]["exp_avg"], last["optimizer"]["state"][0]["exp_avg"])
    average(["0.pt", "1.pt"], "model.safetensors", key="model")
    first = torch.load("0.pt")["model"]["weight"].double()
    mean = ((first + last["model"]["weight"].double()) / 2).float()
    assert torch.equal(load_file("model.safetensors")["weight"], mean)
    assert torch.equal(whole["model"]["weight"], mean)


def test_names_are_tied_if_they_are_in_every_checkpoint() -> None:
    def tied(seed: int, apart: bool = False) -> dict[str, torch.Tensor]:
        one = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))
        return {"embed": one, "head": one + 1 if apart else one}

    torch.save(tied(0), "0.pt")
    torch.save(tied(1), "1.pt")
    torch.save(tied(2, apart=True), "apart.pt")
    assert average(["0.pt", "1.pt"], "tied.safetensors", **VERIFIED).aliases == {"head": "embed"}
    report = average(["apart.pt", "1.pt"], "untied.safetensors", **VERIFIED)
    assert not report.aliases
    assert any("head" in text for text in report.warnings)
    found = load_file("untied.safetensors")
    assert torch.allclose(found["head"], found["embed"] + 0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda each: each.pop("a.bias"), ("lacks 'a.bias'", "0.pt")),
        (lambda each: each.update(more=torch.ones(1)), ("lacks 'more'", "1.safetensors")),
        (lambda each: each.update({"a.bias": torch.ones(34)}), ("'a.bias'", "[34]", "[33]")),
        (lambda each: each.update({"a.bias": torch.ones(33, dtype=torch.int64)}), ("'a.bias'", "int64")),
    ],
    ids=["missing", "more", "shape", "dtype"],
)
def test_checkpoints_that_are_not_alike_are_refused(change: Any, words: tuple[str, ...]) -> None:
    models = [model(0), model(1)]
    change(models[0])
    names = saved(*models)
    with pytest.raises(DifferenceError) as error:
        average(names, "out")
    assert all(word in str(error.value) for word in words), error.value
    assert not Path("out").exists()
    average(names, "out", exclude=["a.bias", "more"])


@pytest.mark.skipif("vocab" not in OPTIONS, reason="no feature takes rows of a vocabulary")
@pytest.mark.parametrize("larger", ["0", "1"])
def test_a_larger_vocabulary_is_met_with_the_command_that_makes_it_as_large(larger: str) -> None:
    for name in ("0", "1"):
        rows = 10 if name == larger else 8
        Path(name).mkdir()
        save_file({"embed_tokens.weight": torch.ones(rows, 4), "norm": torch.ones(4)}, f"{name}/model.safetensors")
        Path(name, "config.json").write_text(json.dumps({"vocab_size": rows}))
    said = ckptconv_here("average", "0", "1", "out").refused(1, f"cut {larger} first, and average CUT instead: ")
    done(ckptconv_here(*shlex.split(said.partition("CUT instead: ckptconv ")[2])))
    done(ckptconv_here("average", *("CUT" if name == larger else name for name in ("0", "1")), "out"))
    assert load_file("out/model.safetensors")["embed_tokens.weight"].shape == (8, 4)


def test_models_of_different_widths_are_not_taken_for_vocabularies() -> None:
    for shapes in (((8, 4), (4, 4)), ((10, 4), (4, 10))):
        save_file({f"{n}.weight": torch.ones(shape) for n, shape in enumerate(shapes)}, f"{shapes[0][0]}.safetensors")
    refused = ckptconv_here("average", "8.safetensors", "10.safetensors", "out").refused(1, "[8, 4]", "[10, 4]")
    assert "vocabular" not in refused
    save_file({"w": torch.ones(8, 4)}, "matrix.safetensors")
    save_file({"w": torch.tensor(1.0)}, "scalar.safetensors")
    for names in (("matrix", "scalar"), ("scalar", "matrix")):
        refused = ckptconv_here("average", *(f"{name}.safetensors" for name in names), "out").refused(1, "[8, 4]")
        assert "vocabular" not in refused


def test_without_quantization_keep_is_met_with_a_conversion_of_the_average() -> None:
    if "keep" not in OPTIONS:
        pytest.skip("no feature quantizes")
    names = saved(model(0), model(1))
    hint = "CONVERTED OUTPUT --dtype bf16 --exclude x --graft CONVERTED:x"
    ckptconv_here("average", *names, "out", "--keep", "x").refused(2, "--keep has no effect", hint)


@pytest.mark.parametrize("dtype", ["keep", "float16"])
def test_values_that_are_no_numbers_are_warned_of(dtype: str) -> None:
    diverged = model(1)
    diverged["a.weight"][3] = math.nan
    diverged["b.weight"][0, 0] = math.nan
    names = saved(model(0), diverged, model(2))
    report = average(names, "out", dtype=dtype, fsync=False, **VERIFIED)
    (warning,) = (text for text in report.warnings if "NaN" in text)
    assert warning.startswith("34 values were NaN after the inputs were added, in 'a.weight', 'b.weight'; ")
    result = load_file("out/model.safetensors")
    assert sum(int(tensor.isnan().sum()) for tensor in result.values()) == 34


@pytest.mark.parametrize(
    ("given_", "word"),
    [
        ({"weights": [1, -1]}, "sum to zero, but an average requires a sum that is not zero."),
        ({"weights": [1]}, "--weights has 1 weight for 2 checkpoints"),
        ({"weights": [1, 2, 3]}, "without spaces: --weights 1,1"),
        ({"weights": "1,x"}, "such as 1,1,2"),
        ({"weights": [1, 1], "ema": 0.9}, "one of them"),
        *(({"ema": wrong}, "a decay from 0 to 1, such as 0.99") for wrong in (1.5, -0.1, "90%", True, "nan")),
        ({"ema": 0.5, "minus": "1.safetensors"}, "one of them"),
    ],
    ids=str,
)
def test_weights_that_make_no_average_are_refused(given_: dict[str, Any], word: str) -> None:
    names = saved(model(0), model(1))
    with pytest.raises(UsageError, match=word):
        average(names, "out", **given_)


def test_one_checkpoint_has_no_average() -> None:
    (name,) = saved(model(0))
    with pytest.raises(UsageError, match="requires at least 2 checkpoints; given: 1"):
        average(name, "out")
    with pytest.raises(UsageError, match="at most 1,000 can be averaged in one run"):
        average([name] * 1001, "out")


def test_what_is_described_is_what_is_written() -> None:
    names = saved(model(0), model(1))
    average(names, "out", max_shard_size=1000)
    written = {name: data for name, data in contents(Path("out")).items() if not name.startswith(".ckptconv")}
    for suffix in DESCRIBING:
        average(names, f"x{suffix}", max_shard_size=1000)
        for files in offered(f"x{suffix}"):
            assert {name: files.read_bytes(name) for name in files} == written


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_parts_make_the_whole() -> None:
    names = saved(model(0), model(1))
    average(names, "whole", max_shard_size=1000)
    for part in ("0/2", "1/2"):
        assert ckptconv_here("average", *names, "parts", "--max-shard-size", "1000B", "--part", part).code == 0
    assert ckptconv_here("finish", "parts").code == 0
    assert contents(Path("whole")) == contents(Path("parts"))


@verifying
def test_the_manifest_names_the_others_and_verify_reads_them() -> None:
    names = saved(*(model(seed) for seed in range(3)))
    average(names, "out", weights=[1, 2, 3])
    told = json.loads(Path("out/.ckptconv-manifest.json").read_text())
    assert told["average"] == {"terms": ["../0.pt", "../1.safetensors", None], "weights": [1, 2, 3], "over": 6}
    done = verify("2.pt", "out")
    assert done.bytes_compared
    assert [Path(each).name for each in done.averaged] == names[:2]
    told["average"]["weights"][0] = 1.5
    Path("out/.ckptconv-manifest.json").write_text(json.dumps(told))
    with pytest.raises(DifferenceError):
        verify("2.pt", "out")
    shutil.copy("2.pt", "0.pt")
    with pytest.raises(DifferenceError):
        verify("2.pt", "out")


@verifying
def test_verify_finds_a_fault_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    other_fields(WeightedSum, weights=lambda kernel: kernel.weights[::-1])(monkeypatch)
    with pytest.raises(DifferenceError):
        average(saved(model(0), model(1)), "out", weights=[1, 2], **VERIFIED)


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_an_average_is_no_file_for_torch() -> None:
    ckptconv_here("average", *saved(model(0), model(1)), "x.pt").refused(2, "safetensors2pt")


def test_an_option_that_a_command_does_not_have_leads_to_what_does() -> None:
    ckptconv_here("average", "runs", "x", "--last", 3).refused(2, "no option --last. Specify the steps before OUTPUT")
    ckptconv_here("average", "a", "b", "--output-dir", "x").refused(2, "no option --output-dir. Specify OUTPUT last")
    ckptconv_here("average", "--model", "a", "x").refused(2, "no option --model. Name STEP first.")
    ckptconv_here("convert", "a", "x", "--ema", 1).refused(2, "such as --key ema", "use ckptconv average --ema")
    if "vocab" in OPTIONS:
        ckptconv_here("average", "a", "x", "--vocab", 1).refused(2, "no option --vocab. ckptconv convert has --vocab.")


def test_adapters_have_no_average_of_their_factors() -> None:
    """The products are what counts, and those are not products of averages."""
    prefix = "base_model.model.a"
    factors = {f"{prefix}.lora_A.weight": torch.ones(2, 5), f"{prefix}.lora_B.weight": torch.ones(6, 2)}
    with pytest.raises(UsageError, match=r"0\.pt is an adapter") as refused:
        average(saved(factors, factors), "out")
    assert "ckptconv merge" in refused.value.hint
    kohya = {"lora_unet_x.lora_down.weight": torch.ones(2, 5)}
    save_file(kohya, "kohya.safetensors")
    with pytest.raises(UnsupportedError, match="an adapter of kohya's"):
        average(["kohya.safetensors", "kohya.safetensors"], "out")


def test_the_report_says_which_dtype_several_became() -> None:
    one, other = model(0), {name: t.double() if t.is_floating_point() else t for name, t in model(1).items()}
    report = average(saved(one, other), "out.safetensors")
    assert (
        "1 tensor with the dtypes bfloat16 and float64 became float64, as in 1.safetensors; --dtype selects "
        "another dtype." in report.notes
    )
    report = average(saved(other, one), "out.safetensors", dtype="fp32")
    assert any("float64 and bfloat16 became float32, the dtype of the output." in note for note in report.notes)
    assert not any("became" in note for note in average(saved(one, model(1)), "out.safetensors").notes)


def test_a_step_that_is_given_twice_is_told() -> None:
    steps = saved(model(0), model(1))
    report = average([*steps, f"./{steps[0]}"], "out.safetensors")
    assert any("0.pt is given 2 times, and each time counts as a separate input." in text for text in report.warnings)
    report = average(steps, "out.safetensors", minus=steps[0], weights=[1, 0.5])
    assert not report.warnings


def test_a_difference_is_added_to_its_base_and_the_report_says_how_much_of_each_counts() -> None:
    base, tuned = saved(model(0), model(1))
    average(tuned, "vector.safetensors", minus=base, dtype="fp32")
    report = average([base, "vector.safetensors"], "half.safetensors", weights=[1, 1])
    assert report.notes[0] == f"averaged 5 tensors of 2 checkpoints: 0.5 × {base}, 0.5 × vector.safetensors."
    average([base, "vector.safetensors"], "whole.safetensors", minus=base, weights=[2, 1], dtype="fp32")
    whole = load_file("whole.safetensors")
    for name, tensor in model(1).items():
        if tensor.is_floating_point():
            torch.testing.assert_close(whole[name], tensor.float(), rtol=1e-2, atol=1e-2)


def test_the_weight_of_a_difference_for_the_first_step_is_warned_of() -> None:
    math_path, code, base = saved(*map(model, range(3)))
    (warning,) = average([math_path, code], "scaled.safetensors", minus=base, weights=[0.75, 0.25]).warnings
    assert f"the result is 0.75 × {math_path} plus differences from {base}" in warning
    command = shlex.split(warning[warning.index("ckptconv average") :].replace("OUTPUT", "sum.safetensors"))
    run = done(ckptconv_here(*command[1:], "--json"))
    assert run.json["warnings"] == []
    result, parts = load_file("sum.safetensors"), [model(seed) for seed in range(3)]
    for name, tensor in parts[2].items():
        if tensor.dtype == torch.float64:
            total = tensor + 0.75 * (parts[0][name] - tensor) + 0.25 * (parts[1][name] - tensor)
            torch.testing.assert_close(result[name], total)
    # A first step of weight 1 is a model, with differences of others added.
    assert not average([math_path, code], "sum.safetensors", minus=base, weights=[1, 0.25]).warnings


def test_a_difference_is_no_average() -> None:
    steps = saved(model(0), model(1))
    report = average(steps[1], "out.safetensors", minus=steps[0])
    assert report.notes[0] == "added up 1 × 1.safetensors, -1 × 0.pt: 5 tensors."
    assert not any("average" in note for note in report.notes)
    assert (report.averaged, report.weights) == (["1.safetensors", "0.pt"], [1.0, -1.0])
    average(steps[1], "out", minus=steps[0])
    verified(steps[1], "out")


class Guarded(MemoryFileSystem):
    """A store that answers nobody without its token."""

    protocol, cachable, store = "guarded", False, {}

    def __init__(self, token: str = "", **options: Any) -> None:
        super().__init__(**options)
        if not token:
            raise PermissionError("no token")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("guarded://", "memory://")))


@FAR
def test_a_last_word_is_looked_up_with_the_settings_of_its_store() -> None:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    save_file(model(1), "a.safetensors")
    Guarded(token="t").pipe("/kept/b.safetensors", Path("a.safetensors").read_bytes())
    words = ("average", "a.safetensors", "guarded://kept/b.safetensors")
    ckptconv_here(*words, "--storage-options", '{"token": "t"}').refused(2, "is not an earlier output", "-o")
    assert Guarded(token="t").cat("/kept/b.safetensors") == Path("a.safetensors").read_bytes()


def test_an_average_is_no_file_for_torch_whatever_asks_for_it(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    words = ["average", tmp_path / "m.safetensors", tmp_path / "m.safetensors", "-o"]
    refused = "--to is 'pt'; it may be", "has the name of a file for torch.load"
    if not CHECKPOINTS:
        refused = "but no installed feature provides a value for it", refused[1]
    if "pt" not in NAMED:
        refused = "needs the feature torch_output", "needs the feature torch_output"
    for output, said in zip((["x", "--to", "pt"], ["x.pt"]), refused, strict=True):
        ckptconv_here(*words, tmp_path / output[0], *output[1:]).refused(2, said)


def test_a_last_step_for_torch_is_no_output() -> None:
    if "pt" not in NAMED:
        pytest.skip("no feature writes files for torch.load")
    for number in range(3):
        torch.save({"w": torch.full((2,), float(number))}, f"{number}.pt")
    before = Path("2.pt").read_bytes()
    words = ("average", "0.pt", "1.pt", "2.pt")
    refused = ckptconv_here(*words).refused(2, "2.pt exists", "is read as another input", "Give OUTPUT with -o.")
    assert "safetensors" not in refused
    assert Path("2.pt").read_bytes() == before
    done(ckptconv_here(*words, "-o", "mean"))
    assert load_file("mean/model.safetensors")["w"].tolist() == [1.0, 1.0]


def test_one_run_is_no_list_of_steps(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    run = ckptconv_here("average", tmp_path / "m.safetensors", tmp_path / "out")
    run.refused(2, "An average requires at least 2 checkpoints; given: 1.", "RUN/step-1 RUN/step-2")


def test_other_ways_to_merge_are_said_what_there_is_here() -> None:
    for option in ("--method", "--alpha"):
        told = ckptconv_here("average", "0.safetensors", "1.safetensors", "out", option, "slerp").refused(2)
        assert "ckptconv average computes the weighted mean of tensors, with --weights" in told


def test_weights_in_several_words_are_told_apart_from_checkpoints() -> None:
    names = saved(model(0), model(1))
    for words in ([*names, "out", "--weights", "0.5", "0.5"], ["--weights", "0.5", "0.5", *names, "out"]):
        run = ckptconv_here("average", *words)
        run.refused(2, "0.5 was read as a path, not as a weight.", "without spaces: --weights 1,1,2")


def test_a_pattern_that_the_shell_did_not_expand_is_named() -> None:
    saved(model(0), model(1))
    run = ckptconv_here("average", "*.[ps]*", "out")
    run.refused(2, "*.[ps]* does not exist.", "without quotes, it would match 0.pt, 1.safetensors")


def test_arguments_of_other_programs_lead_to_those_of_an_average() -> None:
    one, other = saved(model(0), model(1))
    for call, hint in (
        (lambda: average(one, other, "x"), "Give the steps in a list"),  # type: ignore[call-arg,misc]
        (lambda: average([one, other], "x", decay=0.9), "Use ema, the decay: ema=0.9."),  # type: ignore[call-arg]
        (lambda: average([one, other], "x", alphas=[1, 2]), "weights=[0.3, 0.7]"),  # type: ignore[call-arg]
        (lambda: average([one, other], "x", scale=0.5), "minus=BASE, weights=[1, 0.5])"),  # type: ignore[call-arg]
        # The values of a mapping would be lost, and a set has no order.
        (lambda: average({one: 0.3, other: 0.7}, "x"), "weights=[0.3, 0.7]"),  # type: ignore[arg-type]
        (lambda: average({one, other}, "x"), "Give them in a list"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert hint in caught.value.hint
    for flag, hint in (
        ("--decay", "Use --ema DECAY"),
        ("--alphas", "Use --weights with one number per STEP"),
        ("--subtract", "Use --minus BASE."),
        ("--scale", "With --minus, give the weights: average BASE TUNED OUTPUT --minus BASE --weights 1,0.5"),
    ):
        ckptconv_here("average", one, other, "x", flag, "0.9").refused(2, f"There is no option {flag}. {hint}")

"""Adapters merged into their base: PEFT's own results, exact arithmetic, and what does not fit refused by name."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, VERIFY, of_features, offered, verified, verify, verifying
from checkpoints import DATA, ckptconv, ckptconv_here, contents, done
from effort import examples
from faults import tiles
from hypothesis import HealthCheck
from hypothesis import given as made_up
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stores import SOURCES

from ckptconv import CkptconvError, CorruptError, DifferenceError, UnsupportedError, UsageError, convert, merge
from ckptconv.features.factors.kernels import LowRank
from ckptconv.features.merge import adapters as merging
from ckptconv.features.merge import files
from ckptconv.features.merge.memory import families
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.table import OPTIONS
from ckptconv.process import has_feature

PEFT = DATA / "peft"
# Of each element, all rows would be needed.
REFUSED = ["dora-conv1d", "dora-embedding"]
CASES = sorted(case.name for case in PEFT.iterdir() if case.is_dir() and case.name not in REFUSED)
Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.usefixtures("place")


def adapter(tensors: Tensors, name: str = "adapter", **config: Any) -> str:
    """An adapter of rank 2 as PEFT writes it, in a directory of this name."""
    Path(name).mkdir()
    prefixed = {f"base_model.model.{each}": tensor.contiguous() for each, tensor in tensors.items()}
    save_file(prefixed, f"{name}/adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}
    Path(name, "adapter_config.json").write_text(json.dumps(told))
    return name


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors(module: str, rows: int, columns: int, rank: int = 2) -> Tensors:
    left, right = random(rows, rank, seed=1), random(rank, columns, seed=2)
    return {f"{module}.lora_A.weight": right, f"{module}.lora_B.weight": left}


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product in float64, added up in the order of the rank."""
    total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float64)
    for inner in range(left.shape[1]):
        total = total + left[:, inner, None].double() * right[None, inner].double()
    return total


def model(**more: torch.Tensor) -> str:
    save_file({"a.weight": random(6, 5, seed=3), "b.weight": random(4), **more}, "base.safetensors")
    return "base.safetensors"


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_peft_makes(case: str) -> None:
    base, wanted = load_file(PEFT / case / "base/model.safetensors"), load_file(PEFT / case / "merged.safetensors")
    merge(PEFT / case / "base", PEFT / case / "adapter", "out", copy_config=True, **VERIFIED)
    found = load_file("out/model.safetensors")
    assert found.keys() == {*base, *wanted}
    told = PEFT / case / "settings.json"
    if told.exists():
        config = json.loads(Path("out/config.json").read_text())
        assert config.get("tie_word_embeddings") == json.loads(told.read_text())["tie_word_embeddings"]
    for name, tensor in found.items():
        if name not in base or tensor.shape != base[name].shape:
            assert torch.equal(tensor, wanted[name])
            continue
        assert tensor.dtype == base[name].dtype
        if name not in wanted:
            assert torch.equal(tensor, base[name]), name
            continue
        largest = max(float(each.abs().max()) for each in (base[name], wanted[name]))
        unit = torch.finfo(tensor.dtype).eps * largest
        assert float((tensor.double() - wanted[name].double()).abs().max()) <= unit, name
        assert not torch.equal(tensor, base[name])


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_makes_and_is_not_made_here_is_refused_by_name(case: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'(c_fc|embed_tokens)\.weight' is not supported: DoRA of"):
        merge(PEFT / case / "base", PEFT / case / "adapter", "out")


def test_the_order_of_base_and_adapter_is_said() -> None:
    merging_wrongly = pytest.raises(UsageError, match="The base must come first: ckptconv merge BASE ADAPTER OUTPUT")
    with merging_wrongly:
        merge(PEFT / CASES[0] / "adapter", PEFT / CASES[0] / "base", "out")


def test_ten_kinds_are_those_of_peft() -> None:
    assert len(CASES) >= 10


def test_products_are_added_in_float64_and_rounded_once() -> None:
    given = factors("a", 6, 5)
    merge(model(), adapter(given), "out.safetensors", dtype="bf16", **VERIFIED)
    base = load_file("base.safetensors")
    exact = base["a.weight"].double() + 1.5 * product(given["a.lora_B.weight"], given["a.lora_A.weight"])
    torch.save({"a.weight": exact, "b.weight": base["b.weight"]}, "exact.pt")
    convert("exact.pt", "exact.safetensors", dtype="bf16")
    found, wanted = load_file("out.safetensors"), load_file("exact.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_several_adapters_are_added_and_rounded_once() -> None:
    first, second = factors("a", 6, 5), {name: tensor * 0.3 for name, tensor in factors("a", 6, 5).items()}
    merge(model(), [adapter(first, "one"), adapter(second, "two", use_rslora=True)], "out.safetensors", **VERIFIED)
    exact = load_file("base.safetensors")["a.weight"].double()
    exact = exact + 1.5 * product(first["a.lora_B.weight"], first["a.lora_A.weight"])
    exact = exact + 3 / 2**0.5 * product(second["a.lora_B.weight"], second["a.lora_A.weight"])
    assert torch.equal(load_file("out.safetensors")["a.weight"], exact.float())


def test_lengths_of_rows_are_those_of_dora() -> None:
    given = {**factors("a", 6, 5), "a.lora_magnitude_vector": random(6, seed=5).abs()}
    merge(model(), adapter(given, use_dora=True), "out.safetensors", **VERIFIED)
    rows = load_file("base.safetensors")["a.weight"].double()
    rows = rows + 1.5 * product(given["a.lora_B.weight"], given["a.lora_A.weight"])
    wanted = given["a.lora_magnitude_vector"].double()[:, None] * rows / rows.norm(dim=1, keepdim=True)
    torch.testing.assert_close(load_file("out.safetensors")["a.weight"].double(), wanted, rtol=1e-7, atol=0)


def test_a_long_row_gets_its_length_once_however_often_it_is_cut() -> None:
    columns = 200_000
    save_file({"a.weight": random(2, columns)}, "long.safetensors")
    given = {**factors("a", 2, columns), "a.lora_magnitude_vector": random(2, seed=5).abs()}
    report = merge("long.safetensors", adapter(given, use_dora=True), "out.safetensors", jobs=1, memory=1 << 20)
    # Each row once, and for it one of the factors.
    assert report.bytes_read < 1.6 * report.input_bytes
    rows = load_file("long.safetensors")["a.weight"].double()
    rows = rows + 1.5 * product(given["a.lora_B.weight"], given["a.lora_A.weight"])
    wanted = given["a.lora_magnitude_vector"].double()[:, None] * rows / rows.norm(dim=1, keepdim=True)
    torch.testing.assert_close(load_file("out.safetensors")["a.weight"].double(), wanted, rtol=1e-7, atol=0)


def test_factors_and_rows_longer_than_any_adapter_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**factors("a", 6, 5), "a.lora_magnitude_vector": random(6, seed=5).abs()}
    base, tuned = model(), adapter(given, use_dora=True)
    for limit, told in (
        ("MOST_RANK", "factors of rank 2; at most 1 is supported"),
        ("MOST_COLUMNS", "rows of 5 elements; at most 1 are supported"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(merging, limit, 1)
            with pytest.raises(UnsupportedError, match=told):
                merge(base, tuned, "out.safetensors")
    assert not Path("out.safetensors").exists()


def test_factors_take_so_much_memory_and_no_more() -> None:
    """What docs/merge.md says: numbers of the factors are beside the buffers that --memory bounds."""
    save_file({"a.weight": random(2048, 2048).bfloat16()}, "base.safetensors")
    taken = []
    for rank in (1, 1024):
        left, right = random(2048, rank).bfloat16(), random(rank, 2048).bfloat16()
        path = adapter({"a.lora_A.weight": right, "a.lora_B.weight": left}, f"rank-{rank}", r=rank)
        run = ckptconv("merge", "base.safetensors", path, f"{rank}.safetensors", "--jobs", 1, "--json")
        taken.append(run.json["peak_rss_bytes"])
    assert taken[1] - taken[0] < 32 << 20


@pytest.mark.parametrize("turned", [False, True])
def test_experts_may_be_stacked_in_the_base(turned: bool) -> None:
    experts, rows, columns = 3, 8, 5
    base = random(experts, *((columns, rows) if turned else (rows, columns)), seed=3)
    save_file({"m.experts.gate_up_proj": base}, "stacked.safetensors")
    left, right = random(rows, 2 * experts, seed=1), random(2 * experts, columns, seed=2)
    given = {"m.experts.lora_A.weight": right, "m.experts.lora_B.weight": left}
    merge("stacked.safetensors", adapter(given, target_parameters=["gate_up_proj"]), "out.safetensors", **VERIFIED)
    delta = torch.einsum(
        "ore,eri->eoi", left.double().reshape(rows, 2, experts), right.double().reshape(experts, 2, columns)
    )
    wanted = base.double() + 1.5 * (delta.mT if turned else delta)
    torch.testing.assert_close(load_file("out.safetensors")["m.experts.gate_up_proj"].double(), wanted)


def test_square_experts_are_transposed_if_the_others_of_their_module_are() -> None:
    experts, size = 3, 6
    left, right = random(size, 2 * experts, seed=1), random(2 * experts, size, seed=2)
    given = adapter({"m.experts.lora_A.weight": right, "m.experts.lora_B.weight": left})
    delta = torch.einsum(
        "ore,eri->eoi", left.double().reshape(size, 2, experts), right.double().reshape(experts, 2, size)
    )
    down = random(experts, size, size, seed=3)
    for shape, turned in (((2 * size, size), False), ((size, 2 * size), True)):
        save_file({"m.experts.down_proj": down, "m.experts.gate_up_proj": random(experts, *shape)}, "base.safetensors")
        merge("base.safetensors", given, "out.safetensors", **VERIFIED)
        wanted = down.double() + 1.5 * (delta.mT if turned else delta)
        torch.testing.assert_close(load_file("out.safetensors")["m.experts.down_proj"].double(), wanted)
    save_file({"m.experts.down_proj": down}, "base.safetensors")
    with pytest.raises(UnsupportedError, match="its experts are square"):
        merge("base.safetensors", given, "out.safetensors")


def test_experts_of_the_base_may_have_other_names_than_in_memory() -> None:
    """As those of Mixtral, of which transformers 5 holds stacks."""
    experts, rows, columns = 3, 4, 5
    files, memory = "x.layers.0.block_sparse_moe", "x.layers.0.mlp"
    base = {f"{files}.gate.weight": random(experts, columns)}
    for number in range(experts):
        for seed, name in enumerate(("w1", "w3")):
            base[f"{files}.experts.{number}.{name}.weight"] = random(rows, columns, seed=10 * number + seed)
        base[f"{files}.experts.{number}.w2.weight"] = random(columns, rows, seed=10 * number + 2)
    save_file(base, "base.safetensors")
    up, gate = (random(2 * rows, 2 * experts, seed=5), random(2 * experts, columns, seed=6)), factors("a", 3, 5)
    down = random(columns, 3 * experts, seed=7), random(3 * experts, rows, seed=8)
    given = {f"{memory}.gate.{name[2:]}": tensor for name, tensor in gate.items()}
    for depth, (left, right) in ((".base_layer", down), ("", up)):
        given[f"{memory}.experts{depth}.lora_A.weight"] = right
        given[f"{memory}.experts{depth}.lora_B.weight"] = left
    told = {"target_parameters": ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    patterns = {"rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"down_proj": 9, "gate.weight": 2}}
    merge("base.safetensors", adapter(given, **told, **patterns), "out.safetensors", **VERIFIED)
    found = load_file("out.safetensors")

    def delta(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor:
        rank = right.shape[0] // experts
        return product(left[:, number::experts], right[number * rank : (number + 1) * rank])

    for number in range(experts):
        stacked = 1.5 * delta(*up, number)
        for name, more in (("w1", stacked[:rows]), ("w3", stacked[rows:]), ("w2", 3.0 * delta(*down, number))):
            full = f"{files}.experts.{number}.{name}.weight"
            assert torch.equal(found[full], (base[full].double() + more).float()), full
    router = product(gate["a.lora_B.weight"], gate["a.lora_A.weight"])
    assert torch.equal(found[f"{files}.gate.weight"], (base[f"{files}.gate.weight"].double() + router).float())


def test_patterns_are_tried_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = files.first_matches

    def first_matches(lists: Any, names: Any) -> Any:
        calls.append(names)
        return right(lists, names)

    monkeypatch.setattr(files, "first_matches", first_matches)
    save_file({f"l.{number}.a.weight": random(6, 5) for number in range(9)}, "base.safetensors")
    given = {name: tensor for number in range(9) for name, tensor in factors(f"l.{number}.a", 6, 5).items()}
    patterns = {"alpha_pattern": {r"l\.[0-4]\.a": 4, "7.a": 6}, "rank_pattern": {r".*\.x": 4}}
    merge("base.safetensors", adapter(given, **patterns), "out.safetensors")
    assert len(calls) == 1
    found, one = load_file("out.safetensors"), product(given["l.0.a.lora_B.weight"], given["l.0.a.lora_A.weight"])
    for number, alpha in ((0, 4), (4, 4), (5, 3), (7, 6), (8, 3)):
        assert torch.equal(found[f"l.{number}.a.weight"], (random(6, 5).double() + alpha / 2 * one).float())


def test_adapters_and_bases_may_be_of_any_format() -> None:
    given = factors("a", 6, 5)
    merge(model(), adapter(given), "out.safetensors")
    torch.save(load_file("base.safetensors"), "base.pt")
    live = {f"module.base_model.model.{name.replace('.weight', '.default.weight')}": t for name, t in given.items()}
    Path("trained").mkdir()
    torch.save(live, "trained/adapter_model.bin")
    shutil.copy("adapter/adapter_config.json", "trained")
    merge("base.pt", "trained", "again.safetensors", **VERIFIED)
    found, wanted = load_file("again.safetensors"), load_file("out.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def training(tensors: Tensors, prefix: str = "base_model.model.") -> Tensors:
    """The tensors as they are called while they are trained."""
    return {f"{prefix}{name.replace('.weight', '.default.weight')}": tensor for name, tensor in tensors.items()}


TRAININGS = [save for trainings in of_features("TRAININGS") for save in trainings.values()]


@pytest.mark.parametrize("save", [*of_features("SAVED_BY_RANKS"), *TRAININGS])
def test_adapters_may_be_in_the_files_of_ranks(save: Callable[[Path, Tensors], object]) -> None:
    given = factors("a", 6, 5)
    merge(model(), adapter(given), "out.safetensors")

    save(Path("run"), training(given))
    shutil.copy("adapter/adapter_config.json", "run")
    merge("base.safetensors", "run", "again.safetensors", **VERIFIED)
    assert torch.equal(load_file("again.safetensors")["a.weight"], load_file("out.safetensors")["a.weight"])


def test_a_training_holds_the_base_too() -> None:
    """What is wrapped is the base, unless modules_to_save take its place; stacks are as in memory."""
    experts, rows, columns = 2, 4, 5
    base = {
        f"m.mlp.experts.{n}.{name}.weight": random(rows, columns, seed=n)
        for n in range(2)
        for name in ("gate_proj", "up_proj")
    }
    save_file({"a.weight": random(6, 5), "head.weight": random(3), **base}, "base.safetensors")
    stack = random(experts, 2 * rows, columns, seed=9)
    told = {
        **training(factors("a", 6, 5)),
        "base_model.model.a.base_layer.weight": random(6, 5),
        "base_model.model.head.original_module.weight": random(3),
        "base_model.model.head.modules_to_save.default.weight": random(3, seed=4),
        "base_model.model.m.mlp.experts.base_layer.gate_up_proj": stack,
    }
    Path("run").mkdir()
    torch.save(told, "run/adapter_model.bin")
    shutil.copy(Path(adapter({}), "adapter_config.json"), "run")
    merge("base.safetensors", "run", "out.safetensors", **VERIFIED)
    found = load_file("out.safetensors")
    assert torch.equal(found["head.weight"], random(3, seed=4))
    for number in range(experts):
        for at, name in ((0, "gate_proj"), (rows, "up_proj")):
            assert torch.equal(found[f"m.mlp.experts.{number}.{name}.weight"], stack[number, at : at + rows])
    torch.save(
        {**told, "base_model.model.m.mlp.experts.base_layer.gate_up_proj": stack[:, :-1]}, "run/adapter_model.bin"
    )
    with pytest.raises(UsageError, match=r"\[2, 7, 5\]"):
        merge("base.safetensors", "run", "out.safetensors")


def test_the_base_of_an_adapter_is_named_if_another_model_is_in_its_place() -> None:
    module = "model.layers.0.self_attn.q_proj"
    named = adapter(factors(module, 6, 5), base_model_name_or_path="meta-llama/Llama-3.2-1B")
    unnamed = adapter(factors(module, 6, 5), "unnamed")
    Path("base").mkdir()
    save_file({"transformer.h.0.attn.c_attn.weight": random(5, 15)}, "base/model.safetensors")
    for config in ({}, {"model_type": "gpt2"}):
        Path("base/config.json").write_text(json.dumps(config))
        for path, hint in (
            (named, "The adapter is for another model (its adapter_config.json names 'meta-llama/Llama-3.2-1B')."),
            (unnamed, "The adapter is for another model."),
        ):
            with pytest.raises(UsageError, match="base has none of the tensors that") as caught:
                merge("base", path, "out")
            assert caught.value.hint == hint
    # A model whose files have these tensors in another layout.
    Path("base/config.json").write_text(json.dumps({"model_type": "gradium_phonon_tts"}))
    with pytest.raises(UsageError, match="different layouts in files and in memory"):
        merge("base", named, "out")


def test_one_file_of_an_adapter_is_not_merged_as_all_of_it() -> None:
    place = Path(adapter(factors("a", 6, 5)))
    shard = place / "adapter_model-00001-of-00002.safetensors"
    (place / "adapter_model.safetensors").rename(shard)
    with pytest.raises(UnsupportedError, match="is one file of a sharded set"):
        merge(model(), shard, "out.safetensors")
    assert not Path("out.safetensors").exists()


def test_a_glob_for_names_of_an_adapter_is_told_how_a_part_of_it_is_merged() -> None:
    base = {"a.weight": random(6, 5), "norm.weight": random(3)}
    save_file(base, "base.safetensors")
    wrapped = {"base_model.model.a.base_layer.weight": torch.zeros(6, 5)}
    path = Path(adapter({}, "run"), "adapter_model.safetensors")
    save_file({**training(factors("a", 6, 5)), **wrapped}, path)
    refused = ckptconv_here("merge", "base.safetensors", "run", "out.safetensors", "--exclude", "*base_layer*")
    hint = refused.refused(2, "--exclude applies only to tensors of the base", "but it matches 1 name of run.")
    Path("NEW").mkdir()
    done(ckptconv_here(*shlex.split(hint.partition("first: ckptconv ")[2].partition(", and copy")[0])))
    shutil.copy("run/adapter_config.json", "NEW")
    merge("base.safetensors", "NEW", "out.safetensors")
    expected = base["a.weight"].double() + 1.5 * product(random(6, 2, seed=1), random(2, 5, seed=2))
    assert torch.equal(load_file("out.safetensors")["a.weight"], expected.float())


def test_a_base_that_a_training_rounded_is_told() -> None:
    """The adapter alone leaves the base as it is."""
    base = {"a.weight": random(6, 5), "norm.weight": random(3), "head.weight": random(2, 3)}
    save_file(base, "base.safetensors")
    told = {
        **training(factors("a", 6, 5)),
        "base_model.model.a.base_layer.weight": base["a.weight"].bfloat16(),
        "base_model.model.norm.weight": base["norm.weight"].bfloat16(),
        "base_model.model.head.original_module.weight": base["head.weight"].bfloat16(),
        "base_model.model.head.modules_to_save.default.weight": random(2, 3, seed=4).bfloat16(),
    }
    path = Path(adapter({}, "run", modules_to_save=["head"]), "adapter_model.safetensors")
    rounded = "run replaced 2 tensors of the base, with fewer bits: bfloat16 instead"
    for dtype in (torch.bfloat16, torch.float32):
        save_file({name: tensor if "lora" in name else tensor.to(dtype) for name, tensor in told.items()}, path)
        report = merge("base.safetensors", "run", "out.safetensors")
        assert sum(rounded in note for note in report.notes) == (dtype == torch.bfloat16)
    save_file({name: tensor for name, tensor in told.items() if "lora" in name or "_save" in name}, path)
    report = merge("base.safetensors", "run", "out.safetensors")
    assert not any("with fewer bits" in note for note in report.notes)
    assert torch.equal(load_file("out.safetensors")["norm.weight"], base["norm.weight"])


@pytest.mark.skipif("dequantize" not in OPTIONS, reason="there are no quantized weights")
def test_a_quantized_base_is_merged_into_as_its_weights() -> None:
    (dialects,) = of_features("DIALECTS")
    case = dialects.QUANTIZED / "block-fp8-f32"
    convert(case, "once", dequantize=True)
    name, weight = next((n, t) for n, t in load_file("once/model.safetensors").items() if t.dim() == 2 and "proj" in n)
    given = adapter(factors(name.removesuffix(".weight"), *weight.shape))
    merge(case, given, "out", dequantize=True, **VERIFIED)
    assert not torch.equal(load_file("out/model.safetensors")[name], weight)


@pytest.mark.skipif("quantize" not in OPTIONS, reason="there are no quantized weights")
@pytest.mark.parametrize("way", ["fp8-block", "int4-g32"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_base_of_codes_is_refused_with_what_to_do(way: str, kept: bool) -> None:
    """Whether the codes have the name of the weight or not, and for whole weights too."""
    (ways,) = of_features("QUANTIZING_WAYS")
    weight = "m.up_proj.weight"
    save_file({weight: random(64, 64)}, "base.safetensors")
    convert("base.safetensors", "base", quantize=way, fsync=False)
    Path("base/config.json").write_text(json.dumps({"quantization_config": ways[way].told}))
    given = {"m.up_proj.modules_to_save.weight": random(64, 64)} if kept else factors("m.up_proj", 64, 64)
    with pytest.raises(UnsupportedError, match=r"'m\.up_proj\.weight' is quantized") as refused:
        merge("base", adapter(given), "out")
    assert "--dequantize" in refused.value.hint
    report = merge("base", "adapter", "out", dequantize=True, quantize=way, **VERIFIED)
    assert report.quantized == {way: 1}


def tied_model() -> str:
    one = random(6, 5, seed=3)
    torch.save({"a.weight": one, "head.weight": one}, "tied.pt")
    return "tied.pt"


def test_tied_names_stay_tied() -> None:
    report = merge(tied_model(), adapter(factors("a", 6, 5)), "out.safetensors", **VERIFIED)
    assert report.aliases == {"head.weight": "a.weight"}


Change = Callable[[Tensors, dict[str, Any]], object]
WRONG: dict[str, tuple[Change, type[Exception], str]] = {
    "no module": (lambda t, c: t.update(factors("x", 6, 5)), UsageError, "'x.weight'"),
    "another shape": (lambda t, c: t.update(factors("a", 6, 4)), UsageError, r"\[6, 4\]"),
    "one factor": (lambda t, c: t.pop("a.lora_A.weight"), CorruptError, "but not both factors \\(A and B\\) of 'a'"),
    "another rank": (lambda t, c: c.update(r=4), CorruptError, "rank 2"),
    "no rank": (lambda t, c: c.update(r=0), CorruptError, "its r is 0"),
    "another type": (lambda t, c: c.update(peft_type="IA3"), UnsupportedError, "IA3"),
    "factors that the base lacks": (lambda t, c: c.update(init_lora_weights="pissa"), UnsupportedError, "'pissa'"),
    "rows of tokens": (lambda t, c: c.update(trainable_token_indices=[1]), CorruptError, "trained rows of tokens"),
    "rows that are none": (lambda t, c: c.update(trainable_token_indices=[-1]), CorruptError, "a list of row numbers"),
    "parameters that are none": (lambda t, c: c.update(target_parameters=3), CorruptError, "target_parameters"),
    "more than LoRA": (lambda t, c: c.update(use_qalora=True), UnsupportedError, "use_qalora"),
    "nothing": (lambda t, c: t.clear(), CorruptError, "contains no factors"),
    "a switch that is not known": (lambda t, c: c.update(use_new=True), UnsupportedError, "use_new"),
    "settings that are not known": (lambda t, c: c.update(new_config={"a": 1}), UnsupportedError, "new_config"),
    "no biases of LoRA factors": (lambda t, c: c.update(lora_bias=True), CorruptError, "lacks biases"),
    "a factor of another kind": (lambda t, c: t.update({"a.lora_C.weight": random(2)}), UnsupportedError, "lora_C"),
    "lengths": (lambda t, c: t.update({"a.lora_magnitude_vector": random(6)}), CorruptError, "DoRA magnitudes"),
    "no lengths": (lambda t, c: c.update(use_dora=True), CorruptError, "DoRA magnitudes"),
    "a tensor that the base lacks": (lambda t, c: t.update({"y.weight": random(2)}), UsageError, "'y.weight'"),
    "an invalid pattern": (
        lambda t, c: c.update(rank_pattern={"(": 2}),
        UnsupportedError,
        r"in adapter_config.json is not a regular expression; the patterns are '\('",
    ),
    "factors that are not targeted": (lambda t, c: c.update(target_modules=["b"]), CorruptError, "has factors of 'a'"),
    "factors that an expression leaves out": (
        lambda t, c: c.update(target_modules="x.*|ab"), CorruptError, "PEFT ignores such factors.",
    ),
    "factors that are left out by name": (
        lambda t, c: c.update(target_modules=["a"], exclude_modules="a"), CorruptError, "PEFT ignores such factors.",
    ),
    "an expression that is none": (lambda t, c: c.update(target_modules="("), UnsupportedError, "target_modules"),
    "targets that are a number": (lambda t, c: c.update(target_modules=3), UnsupportedError, "not supported"),
    "a module that was trained whole and is not there": (
        lambda t, c: c.update(modules_to_save=["b"]), CorruptError, "lacks 'b', which modules_to_save",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    change, kind, words = WRONG[wrong]
    tensors, config = factors("a", 6, 5), {"r": 2, "lora_alpha": 3}
    change(tensors, config)
    with pytest.raises(kind, match=words):
        merge(model(), adapter(tensors, **config), "out")
    assert not Path("out").exists()


# What a configuration says of the layers that are adapted, and the layers whose factors PEFT loads.
LAYERS: tuple[tuple[dict[str, Any], set[int]], ...] = (
    ({}, {0, 1, 12}),
    ({"layers_to_transform": 1}, {1}),
    ({"layers_to_transform": [0, 12], "layers_pattern": "layers"}, {0, 12}),
    ({"layers_to_transform": [1], "layers_pattern": ["blocks"]}, set()),
    ({"layers_to_transform": []}, {0, 1, 12}),
)


@pytest.mark.parametrize(("said", "loaded"), LAYERS)
def test_factors_of_layers_that_peft_does_not_load_are_refused(said: dict[str, Any], loaded: set[int]) -> None:
    for layer in (0, 1, 12):
        module = f"m.layers.{layer}.q"
        base = model(**{f"{module}.weight": random(6, 5)})
        given = adapter(factors(module, 6, 5), f"of-{layer}", target_modules=["q"], **said)
        ended = ckptconv_here("merge", base, given, "-o", f"out-{layer}")
        assert ended.code == (0 if layer in loaded else 4), ended.err
        assert layer in loaded or f"has factors of '{module}'" in ended.err


def test_an_adapter_has_a_configuration() -> None:
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        merge(model(), "base.safetensors", "out")


def test_what_is_described_is_what_is_written() -> None:
    given = adapter(factors("a", 6, 5))
    merge(model(), given, "out")
    written = {name: data for name, data in contents(Path("out")).items() if not name.startswith(".ckptconv")}
    for suffix in DESCRIBING:
        assert ckptconv_here("merge", "base.safetensors", given, f"x{suffix}").code == 0
        for offers in offered(f"x{suffix}"):
            assert {name: offers.read_bytes(name) for name in offers} == written


@verifying
def test_the_manifest_names_the_adapters_and_verify_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = adapter(factors("a", 6, 5))
    merge(model(), given, "out")
    told = json.loads(Path("out/.ckptconv-manifest.json").read_text())
    assert told["adapters"] == ["../adapter"]
    done = verify("base.safetensors", "out")
    assert done.bytes_compared
    assert [Path(each).name for each in done.adapters] == ["adapter"]
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 4}))
    with pytest.raises(DifferenceError):
        verify("base.safetensors", "out")
    tiles(LowRank, scale=lambda kernel: kernel.scale * 2)(monkeypatch)
    with pytest.raises(DifferenceError):
        merge("base.safetensors", given, "again", **VERIFIED)


def large() -> tuple[str, str]:
    """A base and an adapter that need several windows and shards."""
    save_file(
        {name: random(96, 64, seed=seed).bfloat16() for seed, name in enumerate("abcd")}
        | {f"{name}.weight": random(96, 64, seed=seed).bfloat16() for seed, name in enumerate("ef")},
        "base.safetensors",
    )
    return "base.safetensors", adapter({**factors("e", 96, 64), **factors("f", 96, 64)})


def test_parts_and_executors_make_the_whole() -> None:
    base, given = large()
    merge(base, given, "whole", max_shard_size=20_000)
    if "part" in OPTIONS:
        for part in ("0/2", "1/2"):
            assert ckptconv_here("merge", base, given, "parts", "--max-shard-size", "20000B", "--part", part).code == 0
        assert ckptconv_here("finish", "parts").code == 0
        assert contents(Path("whole")) == contents(Path("parts"))
    merge(base, given, "small", max_shard_size=20_000, memory=1 << 16, jobs=1)
    if has_feature("executors"):
        with ThreadPoolExecutor(2) as executor:
            merge(base, given, "threads", max_shard_size=20_000, executor=executor)
    for other in ("threads", "small") if has_feature("executors") else ("small",):
        assert all(
            Path(other, each.name).read_bytes() == each.read_bytes() for each in Path("whole").glob("*.safetensors")
        )


def test_base_adapter_and_output_may_be_on_a_store() -> None:
    base, given = large()
    merge(base, given, "out.safetensors")
    for make in SOURCES.values():
        place = make()
        there = [place.put(Path(each), str(each)) for each in (base, given)]
        output = f"{place.url}/merged.safetensors" if place.writable else "merged.safetensors"
        merge(*there, output, storage_options=place.options, **VERIFIED)
        made = place.contents()["merged.safetensors"] if place.writable else Path(output).read_bytes()
        assert made == Path("out.safetensors").read_bytes()


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_a_reference_is_for_what_is_merged() -> None:
    base, given = large()
    save_file({name: tensor.float() for name, tensor in load_file(base).items()}, "like.safetensors")
    merge(base, given, "wide.safetensors", like="like.safetensors", **VERIFIED)
    assert {tensor.dtype for tensor in load_file("wide.safetensors").values()} == {torch.float32}


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_a_map_is_for_what_is_merged() -> None:
    base, given = large()
    merge(base, given, "out.safetensors")
    wanted = load_file("out.safetensors")
    Path("my.toml").write_text(
        '[[rule]]\nhere = "e.weight : (a + a) b"\nthere = ["e1 : a b", "e2 : a b"]\n\n'
        '[keep]\nnames = ["?", "f.weight"]\n'
    )
    merge(base, given, "mapped.safetensors", map="./my.toml", **VERIFIED)
    found = load_file("mapped.safetensors")
    assert torch.equal(torch.cat([found["e1"], found["e2"]]), wanted["e.weight"])
    assert torch.equal(found["f.weight"], wanted["f.weight"])


def test_a_dry_run_tells_the_size() -> None:
    base, given = large()
    told = merge(base, given, "out.safetensors", dry_run=True)
    assert not Path("out.safetensors").exists()
    assert told.bytes_written == merge(base, given, "out.safetensors").bytes_written


# ------------------------------------------------------------------------------------- several adapters, and conflicts


def test_an_adapter_that_is_given_twice_counts_twice_with_a_warning() -> None:
    given = adapter(factors("a", 6, 5), "lora")
    assert merge(model(), given, "once").warnings == []
    (warning,) = merge(model(), [given, given], "twice").warnings
    assert warning.endswith("lora is given 2 times, and each time counts as a separate input.")


def test_of_several_models_in_the_base_the_one_that_was_merged_into_is_named() -> None:
    def weights(prefix: str = "") -> Tensors:
        return {f"{prefix}a.weight": random(6, 5, seed=3), f"{prefix}b.weight": random(4)}

    given = adapter(factors("a", 6, 5), "lora")
    for base, merged, other in (
        ({"model": weights("module."), "ema": weights()}, "ema", "model"),
        ({"model": weights(), "head": random(4)}, "", ""),
    ):
        torch.save(base, "base.pt")
        notes = [note for note in merge("base.pt", given, "out.safetensors").notes if note.startswith("merged into")]
        told = f"merged into {merged}: the tensors with the same names in {other} stay unchanged. To "
        told += "select one of these instead, use --key."
        assert notes == ([told] if merged else [])


def test_a_base_below_a_prefix_is_refused_with_the_options_that_remove_it() -> None:
    weights = {
        f"model.net.{name}": tensor for name, tensor in {"a.weight": random(6, 5), "b.weight": random(4)}.items()
    }
    torch.save({"state_dict": weights}, "base.pt")
    lora, options = adapter(factors("a", 6, 5), "lora"), ("--key", "state_dict", "--strip-prefix", "model.net.")
    for key, name in (((), "state_dict.model.net.a.weight"), (options[:2], "model.net.a.weight")):
        run = ckptconv_here("merge", "base.pt", lora, "out", *key)
        run.refused(2, f"has 'a.weight' as '{name}'", f"convert base.pt base.safetensors {' '.join(options)}. Then")
    # Below a key that was given, names may begin as keys do.
    torch.save({"model": weights}, "keyed.pt")
    run = ckptconv_here("merge", "keyed.pt", lora, "out", "--key", "model")
    run.refused(2, "convert keyed.pt base.safetensors --key model --strip-prefix model.net.. Then")
    done(ckptconv_here("convert", "base.pt", "base.safetensors", *options, "--overwrite"))
    done(ckptconv_here("merge", "base.safetensors", lora, "out"))


def test_of_several_adapters_in_one_place_one_is_named() -> None:
    """As TRL saves what it trains with DPO beside the reference."""
    first, second = factors("a", 6, 5), {name: tensor * 3 for name, tensor in factors("a", 6, 5).items()}
    both = {**training(first), **{name.replace("default", "reference"): t for name, t in training(second).items()}}
    Path("run").mkdir()
    save_file(both, "run/adapter_model.safetensors")
    shutil.copy(Path(adapter({}), "adapter_config.json"), "run")
    with pytest.raises(UsageError, match="2 adapters: 'default', 'reference'"):
        merge(model(), "run", "out")
    for name, given in (("default", first), ("reference", second)):
        assert ckptconv_here("merge", "base.safetensors", "run", name, "--adapter", name, *VERIFY).code == 0
        alone = adapter(given, f"{name}-alone")
        merge("base.safetensors", alone, f"{name}-merged")
        found, wanted = (load_file(f"{each}/model.safetensors") for each in (name, f"{name}-merged"))
        assert torch.equal(found["a.weight"], wanted["a.weight"])
        verified("base.safetensors", name)


def test_a_name_that_tensors_leave_out_is_that_of_their_directory() -> None:
    """As save_pretrained writes a second adapter, in a directory of its name beside the first."""
    first, second = factors("a", 6, 5), {name: tensor * 3 for name, tensor in factors("a", 6, 5).items()}
    adapter(first, "run")
    adapter(second, "run/reference")
    base = model()
    found = {}
    for path, name in (("run", ""), ("run", "default"), ("run", "reference"), ("run/reference", "reference")):
        merge(base, path, output := f"{path}-{name}-merged".replace("/", "-"), adapter=name)
        found[path, name] = load_file(f"{output}/model.safetensors")["a.weight"]
        verified(base, output)
    assert torch.equal(found["run", "default"], found["run", ""])
    assert torch.equal(found["run", "reference"], found["run/reference", "reference"])
    assert not torch.equal(found["run", "reference"], found["run", ""])
    for path, name in (("run", "third"), ("run/reference", "default/.."), ("run", "../run"), ("run", "reference/")):
        with pytest.raises(UsageError, match="has no adapter"):
            merge(base, path, "none", adapter=name)
    assert not Path("none").exists()


def test_whole_tensors_of_two_adapters_are_no_sum() -> None:
    """Nothing that one adapter trained is taken back by another."""
    first = adapter(factors("a", 6, 5), "first")
    wrapped = {**factors("a", 6, 5), "a.base_layer.weight": random(6, 5)}
    saved = adapter({"b.weight": random(4)}, "saved", modules_to_save=["b"])
    for others in ([first, adapter(wrapped, "wrapped")], [saved, adapter({"b.weight": random(4)}, "saved-too")]):
        with pytest.raises(CorruptError, match="which another adapter changes too"):
            merge(model(), others, "out")
    merge(model(), ["wrapped", first, saved], "out", **VERIFIED)


def test_so_many_adapters_are_not_merged_at_once() -> None:
    given = adapter(factors("a", 6, 5))
    with pytest.raises(UsageError, match="at most 64 can be merged in one run"):
        merge(model(), [given] * 2000, "out")
    report = merge("base.safetensors", [given] * 64, "out", **VERIFIED)
    assert len(report.adapters) == 64


def test_safetensors_go_before_what_peft_wrote_earlier() -> None:
    given = factors("a", 6, 5)
    place = adapter(given)
    torch.save({name: torch.zeros_like(t) for name, t in training(given).items()}, f"{place}/adapter_model.bin")
    merge(model(), place, "out.safetensors")
    assert not torch.equal(load_file("out.safetensors")["a.weight"], load_file("base.safetensors")["a.weight"])


def test_views_of_what_is_changed_are_not_left_as_they_were() -> None:
    whole = random(8, 5)
    torch.save({"a.weight": whole[:6], "b.weight": whole[4:]}, "views.pt")
    with pytest.raises(UnsupportedError, match=r"share storage, but the adapter changes only 'a.weight'"):
        merge("views.pt", adapter(factors("a", 6, 5)), "out")
    torch.save({"a.weight": whole[:6], "b.weight": whole[6:]}, "views.pt")
    merge("views.pt", "adapter", "out")


# -------------------------------------------------------------------------------------------------- shapes that tell it


def test_stacks_are_told_by_what_is_left() -> None:
    """Twelve stacks, and ten factors, of which each but the first fits two: there are half a billion orders."""
    experts, names = 2, [f"p{number}" for number in range(12)]
    stacks = {f"m.{name}": random(experts, number + 2, 3) for number, name in enumerate(names)}
    save_file(stacks, "base.safetensors")
    given = {}
    for depth in range(10):
        left, right = random(depth + 2, 2 * experts, seed=depth), random(2 * experts, 3, seed=depth + 50)
        given[f"m{'.base_layer' * depth}.lora_A.weight"] = right
        given[f"m{'.base_layer' * depth}.lora_B.weight"] = left
    merge("base.safetensors", adapter(given), "out.safetensors", **VERIFIED)
    found = load_file("out.safetensors")
    changed = [name for name, tensor in found.items() if not torch.equal(tensor, stacks[name])]
    assert sorted(changed) == sorted(f"m.{name}" for name in names[:10])
    save_file({"m.a": random(2, 4, 3), "m.b": random(2, 4, 3)}, "base.safetensors")
    alike = {f"m.lora_{side}.weight": random(*shape) for side, shape in (("A", (4, 3)), ("B", (4, 4)))}
    with pytest.raises(CorruptError, match="match more than one of the stacked parameters"):
        merge("base.safetensors", adapter(alike, "alike"), "out")


def test_what_is_said_of_square_matrices_is_what_the_other_modules_show() -> None:
    """PEFT takes fan_in_fan_out back for linear layers, and adapters of before keep it."""
    square, more = factors("l.0.q", 5, 5), factors("l.0.k", 6, 5)
    delta = 1.5 * product(square["l.0.q.lora_B.weight"], square["l.0.q.lora_A.weight"])
    base = random(5, 5, seed=3)
    for shape, others, wanted in (((6, 5), more, delta), ((5, 6), more, delta.T), ((6, 5), {}, delta.T)):
        save_file({"l.0.q.weight": base, "l.0.k.weight": random(*shape)}, "base.safetensors")
        shutil.rmtree("adapter", ignore_errors=True)
        merge("base.safetensors", adapter({**square, **others}, fan_in_fan_out=True), "out.safetensors", **VERIFIED)
        assert torch.equal(load_file("out.safetensors")["l.0.q.weight"], (base.double() + wanted).float())


def test_kernels_of_convolutions_are_products_of_rows() -> None:
    base = random(6, 5, 3, 2)
    save_file({"c.weight": base}, "base.safetensors")
    left, right = random(6, 2, 1, 1, seed=1), random(2, 5, 3, 2, seed=2)
    merge("base.safetensors", adapter({"c.lora_A.weight": right, "c.lora_B.weight": left}), "out", **VERIFIED)
    wanted = base.double() + 1.5 * torch.einsum("or,rikl->oikl", left.double()[:, :, 0, 0], right.double())
    torch.testing.assert_close(load_file("out/model.safetensors")["c.weight"].double(), wanted, rtol=1e-6, atol=1e-6)
    wide = {"c.lora_A.weight": right, "c.lora_B.weight": random(6, 2, 3, 2)}
    with pytest.raises(UnsupportedError, match="not that of a convolution of kernel size 1"):
        merge("base.safetensors", adapter(wide, "wide"), "out")


def test_rows_of_dora_are_not_made_anew_for_every_tile() -> None:
    columns = (1 << 20) + 1
    save_file({"a.weight": torch.zeros(1, columns, dtype=torch.bfloat16)}, "base.safetensors")
    given = {
        "a.lora_A.weight": torch.zeros(2, columns, dtype=torch.bfloat16),
        "a.lora_B.weight": random(1, 2),
        "a.lora_magnitude_vector": random(1),
    }
    with pytest.raises(UnsupportedError, match="DoRA of rows of 1,048,577 elements"):
        merge("base.safetensors", adapter(given, use_dora=True), "out")


def _is_beside(other: Any, rule: Any) -> bool:
    return bool(other.files and other.files.names == rule.files.names)


def test_what_files_hold_in_one_tensor_is_changed_in_parts() -> None:
    """transformers holds the projections of DINOv3's and other models apart, of which files have one tensor."""
    family, rule = next(
        (each, rule)
        for each in families()
        for rule in each._rules
        if rule.files and rule.files.parts == 3 and rule.memory[-1] == "weight" and not rule.begins
    )
    parts = [other.files and (other.files.part, other.memory) for other in family._rules if _is_beside(other, rule)]
    names = {part: ".".join(["x", *memory]).replace("*", "0") for part, memory in filter(None, parts)}
    file = next(family.in_files(names[0])).names[0]
    modules = [names[part].removesuffix(".weight") for part in range(3)]
    base = random(12, 5)
    save_file({file: base}, "base.safetensors")
    given = {key: tensor for module in modules[:2] for key, tensor in factors(module, 4, 5).items()}
    merge("base.safetensors", adapter(given), "out.safetensors", **VERIFIED)
    found = load_file("out.safetensors")[file]
    delta = 1.5 * product(given[f"{modules[0]}.lora_B.weight"], given[f"{modules[0]}.lora_A.weight"])
    wanted = base.double()
    wanted[:4] += delta
    wanted[4:8] += delta
    assert torch.equal(found, wanted.float())


# --------------------------------------------------------------------------------------------------- ties and new heads


def test_a_copy_of_an_embedding_needs_to_know_of_a_head() -> None:
    case = PEFT / "tied-save"
    shutil.copytree(case / "base", "base")
    Path("base/config.json").unlink()
    with pytest.raises(
        UnsupportedError, match=r"it is not known whether base ties the head to this embedding\. The head"
    ):
        merge("base", case / "adapter", "out")


def test_tied_names_in_a_file_are_told_apart_too() -> None:
    """A base that stores both names, of which modules_to_save have trained one."""
    case = PEFT / "tied-save"
    tensors = load_file(case / "base/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, "base.pt")
    report = merge("base.pt", case / "adapter", "out", **VERIFIED)
    wanted, found = load_file(case / "merged.safetensors"), load_file("out/model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], wanted["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])
    assert not report.aliases
    assert any("tie_word_embeddings: false" in note for note in report.notes)


def test_a_head_that_nothing_names_is_not_added() -> None:
    """Only what the configuration says was trained whole is."""
    given = {"score.weight": random(2, 5)}
    with pytest.raises(UsageError, match=r"has none of the tensors .*, such as 'score\.weight'"):
        merge(model(), adapter(given), "out")
    report = merge(model(), adapter(given, "named", modules_to_save=["score"]), "out", **VERIFIED)
    assert torch.equal(load_file("out/model.safetensors")["score.weight"], given["score.weight"])
    assert any("'score.weight' was added" in note for note in report.notes)


HOSTILE = [None, 0, -1, 1e400, "x" * 10_000, [[]], {"a": {"b": []}}, [1, "a"], True, 10**4000]
KEYS = [
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "lora_bias",
    "target_parameters", "modules_to_save", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "trainable_token_indices", "ensure_weight_tying", "init_lora_weights",
    "peft_type", "task_type", "arrow_config", "layer_replication",
]  # fmt: skip


def test_no_value_of_a_configuration_is_a_traceback() -> None:
    given = adapter(factors("a", 6, 5))
    config = json.loads(Path(given, "adapter_config.json").read_text())
    for key in KEYS:
        for value in HOSTILE:
            text = json.dumps({**config, key: None}).replace(f'"{key}": null', f'"{key}": {_written(value)}')
            Path(given, "adapter_config.json").write_text(text)
            found = ckptconv_here("merge", model(), given, "out")
            assert found.code in (0, 2, 4, 5), (key, str(value)[:30])
            assert "Traceback" not in found.err, (key, str(value)[:30])


def _written(value: Any) -> str:
    return "1" + "0" * 4000 if value == 10**4000 else json.dumps(value)


def test_json_names_what_was_merged() -> None:
    given = adapter(factors("a", 6, 5))
    done = ckptconv_here("merge", model(), given, "out", "--json")
    assert json.loads(done.out)["adapters"] == ["adapter"]
    if VERIFIED:
        out = ckptconv_here("merge", model(), given, "again", "--verify", "--dtype", "bf16").out
        assert " match the values computed from the source bit for bit" in out


def test_a_model_to_publish_has_the_configuration_of_its_base() -> None:
    case = PEFT / "llava"
    assert ckptconv_here("merge", case / "base", case / "adapter", "out", "--for-hub").code == 0
    assert {each.name for each in Path("out").iterdir()} == {"config.json", "model.safetensors"}


SHAPES = st.sampled_from(
    [(6, 5), (5, 6), (2, 5), (6, 2), (5, 2), (4, 5), (6, 4), (2,), (6,), (3, 6, 5), (6, 2, 1, 1), (20, 8)]
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool, torch.complex64])
MODULES = st.sampled_from(["a", "b", "embed_tokens", "lm_head", "x.embed_tokens", "score", "c", "m.experts", "l.0.q"])
ENDS = st.sampled_from(
    ["lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
     "weight", "bias", "base_layer.weight", "base_layer.lora_A.weight", "base_layer.lora_B.weight",
     "token_adapter.trainable_tokens_delta", "modules_to_save.default.weight", "original_module.weight", "p"]
)  # fmt: skip
BASE = {
    "a.weight": (6, 5), "b.weight": (6,), "embed_tokens.weight": (20, 8), "c.weight": (6, 2, 1, 1), "b.bias": (6,),
    "m.experts.p": (3, 6, 5), "l.0.q.weight": (5, 5),
}  # fmt: skip
WORDS = st.fixed_dictionaries(
    {"r": st.sampled_from([1, 2, 4])},
    optional={
        "use_dora": st.booleans(), "lora_bias": st.booleans(), "fan_in_fan_out": st.booleans(),
        "modules_to_save": st.just(["embed_tokens", "score"]), "ensure_weight_tying": st.booleans(),
        "trainable_token_indices": st.sampled_from([[0, 3], {"embed_tokens": [1, 19], "lm_head": [2, 0]}, [30]]),
        "target_parameters": st.just(["m.experts.p"]), "task_type": st.just("SEQ_CLS"),
    },
)  # fmt: skip


@examples(80, HealthCheck.function_scoped_fixture)
@made_up(
    st.dictionaries(st.tuples(MODULES, ENDS), st.tuples(SHAPES, DTYPES), min_size=1, max_size=6), WORDS, st.booleans()
)
def test_any_adapter_is_merged_and_verified_or_refused(tensors: Any, words: dict[str, Any], ties: bool) -> None:
    """No traceback, whatever it holds; and what is written is what its own code makes of it again."""
    for name in ("adapter", "base", "out"):
        shutil.rmtree(name, ignore_errors=True)
    Path("base").mkdir()
    save_file({name: random(*shape) for name, shape in BASE.items()}, "base/model.safetensors")
    Path("base/config.json").write_text(json.dumps({"tie_word_embeddings": ties, "vocab_size": 20}))
    made = {f"{module}.{end}": random(*shape).to(dtype) for (module, end), (shape, dtype) in tensors.items()}
    with contextlib.suppress(CkptconvError):
        merge("base", adapter(made, **words), "out", **VERIFIED, fsync=False, copy_config=True)
        assert load_file("out/model.safetensors").keys() >= BASE.keys()


def test_options_of_other_programs_are_said_what_they_are_in_merge() -> None:
    for option, said in {
        "--lora-r": "merge reads it from the adapter's adapter_config.json.",
        "--safe-serialization": "The output is safetensors.",
        "--no-safe-serialization": "ckptconv safetensors2pt converts it to a file for torch.load",
        "--out-dir": "Name OUTPUT last.",
    }.items():
        ckptconv_here("merge", "base", "adapter", option, "out").refused(2, f"There is no option {option}.", said)


def test_a_weight_of_an_adapter_stands_in_its_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no option 'weights'.* multiply lora_alpha there by the weight"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", weights=[0.5])  # type: ignore[call-arg]

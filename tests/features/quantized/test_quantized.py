"""Quantized weights become weights: of each format, what the program that defines it makes of it, bit for bit.

The checkpoints in `data` are rows of those that each program wrote, with what it made of them.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import VERIFIED, looking, of_features, offered, verifying
from checkpoints import ckptconv_here, metadata_of
from effort import every
from features.quantized.dialects import CASES, QUANTIZED
from reading import state_in, state_of
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError, UsageError
from ckptconv.features.quantized import dialects
from ckptconv.features.quantized.table import NOT_READ
from ckptconv.features.quantized.words import ELSEWHERE
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import CHECKPOINTS, NAMED

NAME = "model.layers.0.self_attn.q_proj.weight"
SCALE = f"{NAME}_scale_inv"
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# Files of tensors that a library stores in parts, without their suffixes.
PARTED: dict[str, Path] = {case: file for found in of_features("PARTED") for case, file in found.items()}


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def model_directory(
    path: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any] | None = FP8
) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    config: dict[str, Any] = {"model_type": "llama", "dtype": "float16", "layers": [1, 2.5]}
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    (path / "config.json").write_text(json.dumps(config))
    return path


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    made = np.random.default_rng(seed).integers(0, 126, shape, "u1")
    return torch.from_numpy(made).view(torch.float8_e4m3fn)


def weights(source: Path, output: Path, **options: Any) -> dict[str, torch.Tensor]:
    ckptconv.convert(source, output, dequantize=True, **VERIFIED, **options)
    return load_file(output / "model.safetensors")


@every("case", CASES)
def test_a_conversion_makes_what_its_program_makes(case: str, tmp_path: Path) -> None:
    made = weights(QUANTIZED / case, tmp_path / "out", copy_config=True)
    assert bits(made) == bits(load_file(QUANTIZED / case / "expected.safetensors"))
    config = (tmp_path / "out" / "config.json").read_text()
    if case != "not-quantized":
        assert json.loads(config)["dtype"] == "bfloat16"
    assert not {"quantization_config", "quantization", "expert_dtype"} & json.loads(config).keys()


@every("case", ["bnb-nf4", "bnb-nf4-nested"])
def test_bitsandbytes_is_the_product_in_float32_rounded_once(case: str, tmp_path: Path) -> None:
    given = load_file(QUANTIZED / case / "model.safetensors")
    scales = given["m.weight.absmax"]
    if "nested" in case:
        state = json.loads(bytes(given["m.weight.quant_state.bitsandbytes__nf4"].tolist()))
        scales = (
            given["m.weight.nested_quant_map"][scales.long()]
            * given["m.weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(scales)]
        )
        scales = scales + state["nested_offset"]
    packed = given["m.weight"].reshape(-1)
    indices = torch.stack([packed >> 4, packed & 15], 1).reshape(-1).long()
    expected = given["m.weight.quant_map"][indices].reshape(-1, 64) * scales[:, None]
    made = weights(QUANTIZED / case, tmp_path / "out")
    assert bits(made) == bits({"m.weight": expected.reshape(64, 96).bfloat16()})


def test_float32_is_the_product_itself(tmp_path: Path) -> None:
    given = load_file(QUANTIZED / "gptq" / "model.safetensors")
    made = weights(QUANTIZED / "gptq", tmp_path / "out", dtype="float32")["m.weight"]
    rounded = load_file(QUANTIZED / "gptq" / "expected.safetensors")["m.weight"]
    scales = given["scales" if "scales" in given else "m.scales"].float()
    quotient = made / scales[given["m.g_idx"].long()].T
    assert torch.equal(quotient, quotient.round())
    assert torch.equal(made.half().bfloat16(), rounded)


@every("file", PARTED.values())
def test_tensors_stored_in_parts_are_weights_in_both_their_files(file: Path, tmp_path: Path) -> None:
    parts = load_file(f"{file}.safetensors")
    codes, zero = (parts.get(f"0._weight_{part}", torch.zeros(1)).float() for part in ("qdata", "zero_point"))
    expected = ((codes - zero) * parts["0._weight_scale"].float()).bfloat16()
    for ending in ("safetensors", "pt"):
        output = tmp_path / f"{ending}.safetensors"
        ckptconv.convert(f"{file}.{ending}", output, dequantize=True, **VERIFIED)
        made = load_file(output)
        assert made.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert bits({"": made["0.weight"]}) == bits({"": expected})
        assert "torchao" not in str(metadata_of(output))
        assert "tensor_names" not in metadata_of(output)


def test_scales_that_are_shuffled_are_refused(tmp_path: Path) -> None:
    for file in itertools.chain(*of_features("SHUFFLED")):
        for ending in ("safetensors", "pt"):
            with pytest.raises(UnsupportedError, match=r"0\.weight"):
                ckptconv.convert(f"{file}.{ending}", tmp_path / "out", dequantize=True)


# -------------------------------------------------------------------------------------------------- what is left behind


@verifying
def test_scales_are_gone_from_tensors_index_and_sizes(tmp_path: Path) -> None:
    shards = [
        {NAME: codes(130, 200), "b": torch.ones(9000)},
        {SCALE: torch.ones(2, 2), "a.input_scale": torch.ones(()), "norm": torch.ones(4)},
    ]
    source = model_directory(tmp_path / "in", {})
    (source / "model.safetensors").unlink()
    index = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(shard, source / file)
        index.update(dict.fromkeys(shard, file))
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    report = ckptconv.convert(source, tmp_path / "out", dequantize=True, max_shard_size="55KB", **VERIFIED)
    told = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert told["weight_map"].keys() == {NAME, "b", "norm"}
    assert told["metadata"]["total_size"] == 130 * 200 * 2 + 36000 + 16
    assert report.dequantized == {"block FP8": 1}
    manifest = json.loads((tmp_path / "out" / ".ckptconv-manifest.json").read_text())
    assert manifest["dequantized"] == {"block FP8": 1}
    assert ckptconv.verify(source, tmp_path / "out").tensors == 3


def test_configurations_of_one_method_say_the_same(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "in", {NAME: codes(4, 4), SCALE: torch.ones(2, 2)})
    config = {"quantization_config": FP8, "text_config": {"quantization_config": {**FP8, "weight_block_size": [2, 2]}}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"text_config\.\w+\) contradict .*'weight_block_size'"):
        weights(source, tmp_path / "out")
    # What one of them leaves out, the other says.
    config["quantization_config"] = {"quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(config))
    assert weights(source, tmp_path / "out")[NAME].shape == (4, 4)


WRONG: tuple[dict[str, Any], ...] = (
    *({"quant_method": "gptq", "bits": 4, "group_size": size} for size in ("128", [128], {}, True, 1 << 40, 1.5)),
    {"quant_method": "fp8", "weight_block_size": ["128", 128]},
    {"quant_method": ["fp8"]},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": "32"}}}},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": []}}},
    {"quant_method": "compressed-tensors", "config_groups": [1]},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": {}},
    {"quant_method": "modelopt", "quant_algo": "MIXED", "quantized_layers": {"a": {"quant_algo": 4}}},
)


def test_a_state_of_bitsandbytes_that_is_none_is_refused(tmp_path: Path) -> None:
    given = load_file(QUANTIZED / "bnb-nf4-nested" / "model.safetensors")
    name = "m.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(given[name].tolist()))
    for change in (
        *({"nested_offset": offset} for offset in (1e300, 10**400, "1", None, {}, True)),
        *({"shape": shape} for shape in ([-1, 2], ["2", 3], 6, [1 << 70], None)),
        *({key: size} for key in ("blocksize", "nested_blocksize") for size in (0, -1, "64", [64], 10**400, 1.5)),
        {"deep": json.loads("[" * 900 + "]" * 900)},
    ):
        data = json.dumps({**state, **change}).encode()
        tensors = {**given, name: torch.frombuffer(bytearray(data), dtype=torch.uint8)}
        with pytest.raises(UnsupportedError, match=r"its state|of no known format"):
            weights(model_directory(tmp_path / "in", tensors, None), tmp_path / "out")


def test_a_nested_configuration_does_not_outlive_what_is_quantized_anew(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "in", {NAME: torch.randn(64, 64)}, None)
    nested = {"text_config": {"quantization_config": {**FP8, "weight_block_size": [4, 4]}, "expert_dtype": "fp4"}}
    (source / "config.json").write_text(json.dumps(nested))
    (source / "hf_quant_config.json").write_text("{}")
    ckptconv.convert(source, tmp_path / "codes", quantize="fp8-block", **VERIFIED)
    told = json.loads((tmp_path / "codes" / "config.json").read_text())
    assert told["text_config"] == {}
    assert told["quantization_config"]["weight_block_size"] == [128, 128]
    assert not (tmp_path / "codes" / "hf_quant_config.json").exists()
    assert weights(tmp_path / "codes", tmp_path / "out")[NAME].dtype == torch.bfloat16


def test_fields_of_other_types_are_refused(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "in", {NAME: codes(4, 4), SCALE: torch.ones(1, 1)})
    for told in WRONG:
        (source / "config.json").write_text(json.dumps({"text_config": {"quantization_config": told}}))
        with pytest.raises(UnsupportedError, match=r"config\.json \(text_config\.quantization_config\)"):
            weights(source, tmp_path / "out")
    for text in ('{"quantization_config": {"group_size": ' + "1" * 5000 + "}}", '{"a": ' * 600 + "1" + "}" * 600):
        (source / "config.json").write_text(text)
        with pytest.raises(CorruptError, match=r"config.json is not a valid configuration"):
            weights(source, tmp_path / "out")


def test_a_configuration_says_nothing_of_quantizing_at_any_depth(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "in", {NAME: codes(4, 4), SCALE: torch.ones(1, 1)})
    config = {"text_config": {"torch_dtype": "float16", "quantization_config": FP8}, "b": {"compression_config": FP8}}
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text("{}")
    weights(source, tmp_path / "out", copy_config=True, dtype="float32")
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told == {"text_config": {"torch_dtype": "float32"}, "b": {}, "dtype": "float32"}
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_a_cast_without_the_option_is_refused(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "in", {NAME: codes(4, 4), SCALE: torch.ones(1, 1)})
    with pytest.raises(UsageError, match="1 weight is quantized") as caught:
        ckptconv.convert(source, tmp_path / "out", dtype="bf16")
    assert "--dequantize" in caught.value.hint
    ckptconv.convert(source, tmp_path / "out")


def test_a_cast_that_leaves_weights_quantized_says_so(tmp_path: Path) -> None:
    said = "--dtype does not change quantized weights; --dequantize converts them to float16."
    ways: list[tuple[dict[str, Any], bool]] = [
        ({"dtype": "fp16"}, True),
        ({"dtype": "keep"}, False),
        ({}, False),
        ({"dtype": "fp16", "dequantize": True}, False),
    ]
    for number, (options, is_said) in enumerate(ways):
        report = ckptconv.convert(QUANTIZED / "gptq", tmp_path / f"out{number}", **options)
        assert (said in report.warnings) == is_said
    save_file({NAME: torch.ones(128, 128).bfloat16()}, tmp_path / "plain.safetensors")
    for dtype in ("bf16", "fp16"):
        report = ckptconv.convert(tmp_path / "plain.safetensors", tmp_path / dtype, dtype=dtype, quantize="fp8-block")
        assert not [warning for warning in report.warnings if warning.startswith("--dtype")]


def test_a_shard_whose_scales_are_in_another_is_told_as_one_of_its_set(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "in", {NAME: codes(4, 4)})
    shard = source / "model-00001-of-00002.safetensors"
    (source / "model.safetensors").rename(shard)
    save_file({SCALE: torch.ones(1, 1)}, source / "model-00002-of-00002.safetensors")
    ckptconv_here("convert", shard, tmp_path / "o.safetensors", "--dequantize").refused(
        5, "is one file of a sharded set", f"Give the directory of the set, {source}"
    )


def test_a_configuration_keeps_its_dtype_where_nothing_is_cast(tmp_path: Path) -> None:
    source = QUANTIZED / "bnb-nf4"
    report = ckptconv.convert(source, tmp_path / "out", dtype="fp16")
    assert "Use --dequantize to convert the weights to float16." in report.warnings[0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    ckptconv.convert(source, tmp_path / "weights", dtype="fp16", dequantize=True, **VERIFIED)
    assert json.loads((tmp_path / "weights" / "config.json").read_text())["dtype"] == "float16"
    assert load_file(tmp_path / "weights" / "model.safetensors")["m.weight"].dtype == torch.float16
    shutil.copytree(source, tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(4)}, tmp_path / "in" / "model.safetensors")
    ckptconv.convert(tmp_path / "in", tmp_path / "cast", dtype="fp16")
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "float16"


def test_that_nothing_is_quantized_is_a_warning(tmp_path: Path) -> None:
    source = QUANTIZED / "not-quantized"
    report = ckptconv.convert(source, tmp_path / "out", dequantize=True)
    assert report.warnings == [f"--dequantize has no effect: no weight of {source} is quantized."]
    assert not any("--dequantize" in note for note in report.notes)


def test_that_nothing_is_quantized_is_a_warning_where_weights_are_quantized_too(tmp_path: Path) -> None:
    source = tmp_path / "plain.safetensors"
    save_file({"m.weight": torch.ones(128, 128, dtype=torch.bfloat16)}, source)
    report = ckptconv.convert(source, tmp_path / "out", quantize="fp8-dynamic")
    assert not any("--dequantize" in told for told in report.warnings)
    report = ckptconv.convert(source, tmp_path / "out", quantize="fp8-dynamic", dequantize=True)
    assert f"--dequantize has no effect: no weight of {source} is quantized." in report.warnings


def test_what_is_quantized_is_told() -> None:
    for command in looking():
        told = ckptconv_here(command, QUANTIZED / "modelopt-mixed", "--json").json["quantized"]
        assert told["parameters"] == 48 * 64 + 32 * 64
        assert told["formats"]["NVFP4"] == {"weights": 1, "parameters": 48 * 64, "bits_per_weight": 4.51}
        assert told["formats"]["FP8"]["weights"] == 1
        assert "quantized" not in ckptconv_here(command, QUANTIZED / "not-quantized", "--json").json
        for ending in ("safetensors", "pt") if "int8" in PARTED else ():
            told = ckptconv_here(command, f"{PARTED['int8']}.{ending}", "--json").json
            assert told["quantized"]["formats"]["torchao int8"]["parameters"] == 8 * 32
            assert not told["warnings"]


# -------------------------------------------------------------------------------------------------------- every refusal

GOOD: dict[str, torch.Tensor] = {NAME: codes(160, 192), SCALE: torch.ones(2, 2)}
INT4_WORDS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"weights": INT4_WORDS}},
}
INT4: dict[str, torch.Tensor] = {
    "w.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
    "w.weight_scale": torch.ones(4, 2).bfloat16(),
    "w.weight_shape": torch.tensor([4, 64]),
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
GPTQ_PARTS: dict[str, torch.Tensor] = {
    "m.qweight": torch.zeros(8, 8, dtype=torch.int32),
    "m.qzeros": torch.zeros(2, 1, dtype=torch.int32),
    "m.scales": torch.ones(2, 8).half(),
    "m.g_idx": torch.tensor([0] * 32 + [1] * 32, dtype=torch.int32),
}
LOW_RANK: dict[str, torch.Tensor] = {
    "w.weight": torch.arange(64, dtype=torch.uint8).reshape(4, 16),
    "w.weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
    "w.weight_scale_2": torch.tensor(0.5),
    "w.pre_quant_scale": torch.arange(1, 33) / 16,
    "w.svdquant_lora_b": torch.arange(8.0).reshape(4, 2) / 8,
    "w.svdquant_lora_a": torch.arange(-32.0, 32.0).reshape(2, 32) / 8,
}
SVD: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD", "group_size": 16}
REFUSED: dict[str, tuple[dict[str, torch.Tensor], Mapping[str, Any] | None, type[CkptconvError], str]] = {
    "a scale is missing": ({NAME: GOOD[NAME]}, FP8, CorruptError, NAME),
    "a weight is missing": ({SCALE: GOOD[SCALE]}, FP8, CorruptError, SCALE),
    "a scale is NaN": ({**GOOD, SCALE: torch.tensor([[1, math.nan], [1, 1]])}, FP8, CorruptError, SCALE),
    "a scale is infinite": ({**GOOD, SCALE: torch.tensor([[1, 1], [math.inf, 1]])}, FP8, CorruptError, SCALE),
    "a scale is 0": ({**GOOD, SCALE: torch.zeros(2, 2)}, FP8, CorruptError, SCALE),
    "a scale is huge": ({**GOOD, SCALE: torch.full((2, 2), 3e38)}, FP8, CorruptError, SCALE),
    "a power of two is NaN": ({**GOOD, SCALE: torch.full((2, 2), 255, dtype=torch.uint8)}, FP8, CorruptError, SCALE),
    "the grid is another": ({**GOOD, SCALE: torch.ones(1, 2)}, FP8, UnsupportedError, NAME),
    "the block is another": (GOOD, {**FP8, "weight_block_size": [64, 64]}, UnsupportedError, NAME),
    "nothing says the block": (GOOD, None, UnsupportedError, NAME),
    "the method is another": (GOOD, {"quant_method": "quip"}, UnsupportedError, "QuIP#"),
    "there are two scales": ({**GOOD, f"{NAME}_scale": torch.ones(2, 2)}, FP8, UnsupportedError, NAME),
    "scales of whole numbers": ({**GOOD, SCALE: torch.ones(2, 2, dtype=torch.int32)}, FP8, UnsupportedError, NAME),
    "the weight is none": ({**GOOD, NAME: torch.ones(160, 192)}, FP8, UnsupportedError, NAME),
    "a shape that lies": ({**INT4, "w.weight_shape": torch.tensor([4, 96])}, PACKED, UnsupportedError, "w.weight"),
    "a negative shape": ({**INT4, "w.weight_shape": torch.tensor([-4, 64])}, PACKED, UnsupportedError, "w.weight"),
    "codes are missing": (
        {name: INT4[name] for name in ("w.weight_scale", "w.weight_shape")},
        PACKED,
        CorruptError,
        "w.weight",
    ),
    "zero points are missing": (
        INT4,
        {
            **PACKED,
            "config_groups": {"g": {"weights": {**PACKED["config_groups"]["g"]["weights"], "symmetric": False}}},
        },
        UnsupportedError,
        "w.weight",
    ),
    "a group that is not there": (
        {**GPTQ_PARTS, "m.g_idx": torch.tensor([0] * 63 + [2], dtype=torch.int32)},
        GPTQ,
        CorruptError,
        "m.scales",
    ),
    "a group before the first": (
        {**GPTQ_PARTS, "m.g_idx": torch.tensor([0] * 63 + [-1], dtype=torch.int32)},
        GPTQ,
        CorruptError,
        "m.scales",
    ),
    "another layout of GPTQ": (GPTQ_PARTS, {**GPTQ, "checkpoint_format": "marlin"}, UnsupportedError, "marlin"),
    "8 bits of bitsandbytes in an order for a GPU": (
        {
            "w.weight": torch.zeros(8, 8, dtype=torch.int8),
            "w.SCB": torch.ones(8),
            "w.weight_format": torch.tensor(2, dtype=torch.uint8),
        },
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        UnsupportedError,
        "w.weight",
    ),
    "8 bits of bitsandbytes without a scale": (
        {"w.weight": torch.zeros(8, 8, dtype=torch.int8)},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        CorruptError,
        "w.weight",
    ),
    "smoothed by nothing": (
        {
            "w.weight": torch.zeros(4, 8, dtype=torch.int8),
            "w.weight_scale": torch.ones(4),
            "w.pre_quant_scale": torch.zeros(8),
        },
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"},
        CorruptError,
        "w.weight_scale",
    ),
    "a factor of another rank": (
        {**LOW_RANK, "w.svdquant_lora_a": torch.ones(3, 32)},
        SVD,
        UnsupportedError,
        "its factors have the shapes [4, 2] and [3, 32], but a weight of shape [4, 32] requires",
    ),
    "factors of other sides": (
        {**LOW_RANK, "w.svdquant_lora_b": torch.ones(32, 2), "w.svdquant_lora_a": torch.ones(2, 4)},
        SVD,
        UnsupportedError,
        "its factors have the shapes [32, 2] and [2, 4]",
    ),
    "factors without a rank": (
        {**LOW_RANK, "w.svdquant_lora_b": torch.ones(4, 0), "w.svdquant_lora_a": torch.ones(0, 32)},
        SVD,
        UnsupportedError,
        "its factors have the shapes [4, 0]",
    ),
    "a factor without the other": (
        {name: tensor for name, tensor in LOW_RANK.items() if name != "w.svdquant_lora_b"},
        SVD,
        UnsupportedError,
        "unknown format",
    ),
    "no factors where there have to be some": (
        {name: tensor for name, tensor in LOW_RANK.items() if "lora" not in name},
        SVD,
        UnsupportedError,
        "unknown format",
    ),
    "factors of nothing": (
        {name: tensor for name, tensor in LOW_RANK.items() if "lora" in name},
        SVD,
        CorruptError,
        "has no codes",
    ),
    "factors of weights that have none": (LOW_RANK, {**SVD, "quant_algo": "NVFP4"}, UnsupportedError, "unknown format"),
    "a sparse weight": (
        {
            "w.weight.compressed": codes(8, 8),
            "w.weight.bitmask": torch.zeros(8, 2, dtype=torch.uint8),
            "w.weight.shape": torch.tensor([8, 16]),
            "w.weight_scale": torch.ones(8, 1),
        },
        {**PACKED, "format": "float-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}},
        UnsupportedError,
        "w.weight.bitmask",
    ),
    "in marlin's order": (
        {"w.weight_packed": INT4["w.weight_packed"], "w.scale_packed": torch.ones(8, 1).half()},
        {**PACKED, "format": "marlin-24"},
        UnsupportedError,
        "w.scale_packed",
    ),
    "a method that is not known": ({"w.codes": torch.ones(3)}, {"quant_method": "aqlm"}, UnsupportedError, "aqlm"),
    "fused and padded by shards": (
        {NAME: codes(13568 // 32, 64), SCALE: torch.ones(4 * 27 // 4, 1)},
        FP8,
        UnsupportedError,
        NAME,
    ),
}


@every("case", REFUSED)
def test_what_is_no_quantized_weight_is_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, quantization, error, name = REFUSED[case]
    source = model_directory(tmp_path / "in", tensors, quantization)
    with pytest.raises(error) as caught:
        ckptconv.convert(source, tmp_path / "out", dequantize=True)
    assert name in str(caught.value)
    assert not list((tmp_path).glob("out/*.safetensors"))


# Beside a quantized weight, and not known: its module's tensors, and words of its configuration.
BESIDE = {
    "w.pre_quant_scale": "unknown format",
    "w.svdquant_lora_a": "unknown format",
    "w.weight_quantizer._svdquant_lora_b": "unknown format",
    "w.smooth_factor": "belongs to the quantized weight 'w.weight'",
    "w.weight_offset": "belongs to the quantized weight 'w.weight'",
    "w.inner.matrix": "belongs to the quantized weight 'w.weight'",
    "up_offset": "belongs to the quantized weight 'up'",
    "experts.hadamard": "belongs to the quantized weight 'experts.down'",
}
AUTOROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
}
MLX: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "affine"}
QUARK_SPEC: dict[str, Any] = {"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
QUARK: dict[str, Any] = {
    "quant_method": "quark",
    "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {"weight": QUARK_SPEC},
}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}
ROTATED = {"config_groups": {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "residual"}]}}}
UNKNOWN_WORDS: dict[str, tuple[Mapping[str, Any], dict[str, Any]]] = {
    "transform_config": (PACKED, {"transform_config": ROTATED}),
    "sparsity_config": (PACKED, {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    "mxfp5-pack-quantized": (PACKED, {"format": "mxfp5-pack-quantized"}),
    "marlin_format": (GPTQ, {"is_marlin_format": True}),
    "'rotation'": (GPTQ, {"rotation": "hadamard"}),
    "'bits'": (GPTQ, {"bits": "4"}),
    "'a key'": (FP8, {"a key": None}),
    "'weight_block_size'": (FP8, {"weight_block_size": 128}),
    "NVFP4_ROW": ({"quant_method": "modelopt"}, {"quant_algo": "NVFP4_ROW"}),
    "'version'": (AWQ, {"version": "gemv"}),
    "'packing_format'": (AUTOROUND, {"packing_format": "auto_round:auto_foo"}),
    "'data_type'": (AUTOROUND, {"data_type": "fp8"}),
    "'super_bits'": (AUTOROUND, {"extra_config": {"a": {"super_bits": 6}}}),
    "'mode'": (MLX, {"mode": "mxfp2"}),
    "'global_scale'": (MLX, {"a.b": {**MLX, "global_scale": 1}}),
    "'a.c'": (MLX, {"a.c": True}),
    "''": (MLX, {"": 3}),
    "'pack_method'": (QUARK, {"export": {**QUARK["export"], "pack_method": "shuffle"}}),
    "'weight_format'": (QUARK, {"export": {**QUARK["export"], "weight_format": "fake_quantized"}}),
    "'svdquant'": (QUARK, {"algo_config": [{"name": "awq"}, {"name": "svdquant"}]}),
    "'r4'": (QUARK, {"algo_config": {"name": "rotation", "r1": True, "r4": True}}),
    "'online_r1_rotation'": (QUARK, {"algo_config": [{"name": "rotation", "online_r1_rotation": True}]}),
    "'pack_method' of AWQ": (AWQ, {"export": {**QUARK["export"], "pack_method": "order"}}),
    "'dtype'": (QUARK, {"global_quant_config": {"weight": {**QUARK_SPEC, "dtype": "mx"}}}),
    "'block_size'": (QUARK, {"layer_quant_config": {"": {"weight": {**QUARK_SPEC, "block_size": [1, 32]}}}}),
    "'a_key'": (QUARK, {"layer_type_quant_config": {"Linear": {"weight": [{**QUARK_SPEC, "a_key": 1}] * 2}}}),
    **{
        f"'group_size' {value}"[:60]: (GPTQ, {"group_size": value})
        for value in ("32", [32], {}, True, 1 << 40, 10**4000)
    },
}


def refused(source: Path, here: Path) -> str:
    """What is said of a checkpoint that is refused."""
    with pytest.raises(UnsupportedError) as caught:
        ckptconv.convert(source, here / "out", dequantize=True)
    assert not list((here / "out").glob("*.safetensors"))
    return str(caught.value)


def test_a_tensor_beside_a_quantized_weight_is_known_or_refused_by_name(tmp_path: Path) -> None:
    good = {"w.weight": codes(4, 6), "w.weight_scale": torch.tensor(0.5)}
    good |= {"up": codes(2, 4, 6), "up_scale": torch.ones(2, 1, 1)}
    good |= {
        f"experts.{name}": tensor.clone() for name, tensor in (("down", good["up"]), ("down_scale", good["up_scale"]))
    }
    own = {"w.bias": torch.ones(4), "up_bias": torch.ones(4), "w.lora_A.weight": torch.ones(2, 6)}
    own |= {
        "experts.up_proj": torch.ones(2, 4, 6),
        "experts.up_proj_bias": torch.ones(2, 4),
        "router.own": torch.ones(2),
    }
    fp8 = {"quant_method": "fp8"}
    activations = {"w.input_scale": torch.ones(6), "w.input_scale_ub": torch.ones(1)}
    source = model_directory(tmp_path / "in", {**good, **own, **activations}, fp8)
    assert weights(source, tmp_path / "good").keys() == {"w.weight", "up", "experts.down", *own}
    for name, why in BESIDE.items():
        told = refused(model_directory(tmp_path / "in", {**good, name: torch.ones(6)}, fp8), tmp_path)
        assert repr(name) in told, name
        assert why in told, name


def test_a_word_of_the_configuration_is_known_or_refused_by_name(tmp_path: Path) -> None:
    for name, (words, more) in UNKNOWN_WORDS.items():
        told = refused(model_directory(tmp_path / "in", {"a": torch.ones(2)}, {**words, **more}), tmp_path)
        assert name.split(" ")[0] in told, name
        assert "config.json" in told, name


def test_rotations_that_both_sides_have_in_their_weights_are_known(tmp_path: Path) -> None:
    """So are those of queries and keys together, which no weight has."""
    for sides in (("weight_input", "weight_output"), ("q_attn", "k_cache")):
        pair = [{"targets": ["Linear"], "location": side, "inverse": False} for side in sides]
        rotated = {"config_groups": {"R": {"type": "hadamard", "apply": pair}}}
        words = {**PACKED, "transform_config": rotated, "sparsity_config": {}}
        made = weights(model_directory(tmp_path / "in", INT4, words), tmp_path / "out", overwrite=True)
        assert made.keys() == {"w.weight"}, sides


def test_a_low_rank_part_is_added_under_both_names_smoothed_or_not(tmp_path: Path) -> None:
    """Model Optimizer names it otherwise for diffusers, and smooths the norm instead where it can."""
    plain = {name: tensor for name, tensor in LOW_RANK.items() if "lora" not in name}
    codes_alone = weights(
        model_directory(tmp_path / "codes", plain, {**SVD, "quant_algo": "NVFP4_AWQ"}), tmp_path / "0", dtype="fp32"
    )["w.weight"]
    product = LOW_RANK["w.svdquant_lora_b"] @ LOW_RANK["w.svdquant_lora_a"]
    smoothing = LOW_RANK["w.pre_quant_scale"]
    for case, parts, expected in (
        ("diffusers", LOW_RANK, codes_alone + product * smoothing),
        (
            "transformers",
            {name.replace("svdquant", "weight_quantizer._svdquant"): part for name, part in LOW_RANK.items()},
            codes_alone + product * smoothing,
        ),
        (
            "smoothed before",
            {name: part for name, part in LOW_RANK.items() if "pre_quant" not in name},
            codes_alone / smoothing + product,
        ),
    ):
        source = model_directory(tmp_path / case, parts, {**SVD, "config_groups": {"group_0": {"lora_rank": 2}}})
        made = weights(source, tmp_path / f"{case} made", dtype="fp32")
        # These numbers are so short that no sum is rounded.
        assert bits(made) == bits({"w.weight": expected}), case
        for command in looking():
            told = ckptconv_here(command, source, "--json").json["quantized"]
            assert told["formats"]["NVFP4"]["parameters"] == 128, case


def test_compressed_tensors_mxfp6_has_four_codes_in_three_bytes(tmp_path: Path) -> None:
    """Codes 1, 8, 31 and 63, the first in the lowest bits: 1/8, 1, 7.5 and −7.5, of e2m3. They are told by their
    name."""
    word = 1 | 8 << 6 | 31 << 12 | 63 << 18
    codes_ = torch.tensor([*word.to_bytes(3, "little")] * 8, dtype=torch.uint8).repeat(2, 1)
    tensors = {"a.weight_packed": codes_, "a.weight_scale": torch.tensor([[127], [129]], dtype=torch.uint8)}
    spec = {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32}
    words = {**PACKED, "format": "mxfp6-pack-quantized", "config_groups": {"g": {"weights": spec}}}
    source = model_directory(tmp_path / "in", tensors, words)
    report = ckptconv.convert(source, tmp_path / "out", dequantize=True, **VERIFIED)
    assert report.dequantized == {"MXFP6": 1}
    numbers = torch.tensor([0.125, 1, 7.5, -7.5] * 8)
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert bits(made) == bits({"a.weight": torch.stack([numbers, numbers * 4]).bfloat16()})


def packed(width: int) -> dict[str, torch.Tensor]:
    """The parts of a weight in AutoRound's integers of so many bits: 16 rows of 64, in which each code is 1."""
    ones = sum(1 << at for at in range(0, 32, width))
    return {
        "qweight": torch.full((64 * width // 32, 16), ones, dtype=torch.int32),
        "qzeros": torch.zeros(2, width * 16 // 32, dtype=torch.int32),
        "scales": torch.full((2, 16), 2.0).half(),
    }


def test_autorounds_modules_are_what_their_names_or_expressions_say(tmp_path: Path) -> None:
    """A name goes before an expression, and the first of these that is found before the others."""
    widths = {"a.q": 4, "a.k": 8, "a.v": 2, "b.q": 8, "b.k": 2}
    tensors = {f"{name}.{part}": tensor for name, each in widths.items() for part, tensor in packed(each).items()}
    extra = {r".*\.k.*": {"bits": 2}, "a.k": {"bits": 8}, r"^b\.": {"bits": 8}, "v": {"bits": 2, "sym": False}}
    words = {**AUTOROUND, "packing_format": "auto_round", "extra_config": extra}
    made = weights(model_directory(tmp_path / "in", tensors, words), tmp_path / "good")
    assert bits(made) == bits({f"{name}.weight": torch.full((16, 64), 2.0).bfloat16() for name in widths})
    told = refused(model_directory(tmp_path / "in", tensors, {**words, "extra_config": {}}), tmp_path)
    assert "'a.k.weight'" in told
    for expression in (".+", "(a+)+$", "a{9}", "[", "(?=a)"):
        source = model_directory(tmp_path / "in", tensors, {**words, "extra_config": {expression: {"bits": 8}}})
        assert repr(expression) in refused(source, tmp_path)


def test_autorounds_floats_lie_as_those_of_compressed_tensors(tmp_path: Path) -> None:
    """Under its own words, which may say another type for a module."""
    words = {**AUTOROUND, "packing_format": "auto_round:llm_compressor"}
    floats = {"MXFP4": ("mx_fp", 4, 32, "ct-mxfp4"), "NVFP4": ("nv_fp", 4, 16, "ct-nvfp4")}
    for called, (kind, width, size, case) in floats.items():
        said = {**words, "data_type": kind, "bits": width, "group_size": size}
        other = {**words, "extra_config": {r"\.": {key: said[key] for key in ("data_type", "bits", "group_size")}}}
        for number, config in enumerate((said, other)):
            out = tmp_path / f"{called}-{number}"
            parts, expected = (load_file(QUANTIZED / case / f"{name}.safetensors") for name in ("model", "expected"))
            source = model_directory(tmp_path / f"{number} {case}", parts, config)
            report = ckptconv.convert(source, out, dequantize=True, dtype="bf16", **VERIFIED)
            assert report.dequantized.keys() == {called}
            assert bits(load_file(out / "model.safetensors")) == bits(expected)
    scale = torch.full((4, 2), 120, dtype=torch.uint8)
    source = model_directory(
        tmp_path / "8", {"w.weight": codes(4, 64), "w.weight_scale": scale}, {**words, "data_type": "mx_fp", "bits": 8}
    )
    made = weights(source, tmp_path / "of 8", dtype="fp32")
    assert torch.equal(made["w.weight"], codes(4, 64).float() / 128)


def test_autorounds_fp8_has_scales_of_rows_in_one_dimension_or_one_scale(tmp_path: Path) -> None:
    words = {**AUTOROUND, "packing_format": "auto_round:fp8_static", "data_type": "fp", "bits": 8, "fmt": "e4m3"}
    for size, scale in ((-1, torch.rand(4).bfloat16()), (0, torch.rand(1).bfloat16())):
        parts = {"w.weight": codes(4, 64), "w.weight_scale": scale, "w.input_scale": torch.ones(1).bfloat16()}
        source = model_directory(tmp_path / f"{size}", parts, {**words, "group_size": size})
        made = weights(source, tmp_path / f"{size} made")
        assert bits(made) == bits({"w.weight": codes(4, 64).bfloat16() * scale[:, None]}), size
        other = model_directory(tmp_path / f"{size} other", parts, {**words, "group_size": -1 - size})
        assert "'w.weight'" in refused(other, tmp_path), size
    of_other_codes = {**words, "group_size": -1, "fmt": "e5m2"}
    assert "'fmt'" in refused(model_directory(tmp_path / "e5m2", parts, of_other_codes), tmp_path)


def test_autorounds_layer_rounds_scales_of_fp8_to_bfloat16_but_reads_no_weights_alone(tmp_path: Path) -> None:
    alone = {key: word for key, word in AUTOROUND.items() if key != "packing_format"}
    alone |= {"data_type": "fp", "bits": 8, "fmt": "e4m3"}
    of_layer = {**alone, "packing_format": "auto_round:fp8_static"}
    weight, rows, one = codes(4, 64), torch.rand(4) + 0.5, torch.rand(1) + 0.5
    for size, scale in ((-1, rows), (0, one), (-1, rows.half())):
        parts = {"w.weight": weight, "w.weight_scale": scale}
        case = f"{size} {scale.dtype}"
        source = model_directory(tmp_path / f"{case} of a layer", parts, {**of_layer, "group_size": size})
        rounded = scale.bfloat16()[:, None]
        made = weights(source, tmp_path / f"{case} rounded")
        assert bits(made) == bits({"w.weight": weight.bfloat16() * rounded}), case
        made = weights(source, tmp_path / f"{case} product", dtype="fp32")
        assert bits(made) == bits({"w.weight": weight.float() * rounded.float()}), case
        source = model_directory(tmp_path / f"{case} alone", parts, {**alone, "group_size": size})
        made = weights(source, tmp_path / f"{case} as stored", dtype="fp32")
        assert bits(made) == bits({"w.weight": weight.float() * scale[:, None].float()}), case
    of_integers = model_directory(tmp_path / "of integers", parts, {**alone, "data_type": "int"})
    assert "lacks 'packing_format'" in refused(of_integers, tmp_path)


def test_autorounds_mxint4_are_quarters_with_a_sign(tmp_path: Path) -> None:
    """Two in a byte, the first in its low half; −0 stays."""
    parts = {"w.weight_packed": torch.arange(256, dtype=torch.uint8).reshape(8, 32)}
    parts["w.weight_scale"] = torch.tensor([[127, 128]] * 8, dtype=torch.uint8)
    words = {**AUTOROUND, "packing_format": "auto_round", "data_type": "mx_int"}
    made = weights(model_directory(tmp_path / "in", parts, words), tmp_path / "out")
    quarters = torch.tensor([sign * count / 4 for sign in (1.0, -1.0) for count in range(8)])
    both = torch.stack([quarters.repeat(16), quarters.repeat_interleave(16)], 1).reshape(8, 2, 32)
    assert bits(made) == bits({"w.weight": (both * torch.tensor([[[1.0], [2.0]]])).reshape(8, 64).bfloat16()})


def test_autorounds_words_on_weights_of_mlx_stand_beside_those_of_mlx(tmp_path: Path) -> None:
    tensors = load_file(QUANTIZED / "mlx-affine-g64-4bit" / "model.safetensors")
    config = json.loads((QUANTIZED / "mlx-affine-g64-4bit" / "config.json").read_text())
    own = config["quantization"]
    sizes = {key: own[key] for key in ("bits", "group_size")}
    source = model_directory(tmp_path / "in", tensors, own)
    words = {**AUTOROUND, "packing_format": "mlx", **sizes}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": words}))
    expected = load_file(QUANTIZED / "mlx-affine-g64-4bit" / "expected.safetensors")
    assert bits(weights(source, tmp_path / "good")) == bits(expected)
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {**words, "bits": 8}}))
    assert "contradict each other: 'bits' is" in refused(source, tmp_path)


def test_model_optimizer_has_a_one_after_each_side_of_its_blocks(tmp_path: Path) -> None:
    weight, scale = codes(160, 200), torch.rand(2, 2) + 0.5
    words = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    tensors = {"w.weight": weight, "w.weight_scale": scale[:, None, :, None].clone()}
    made = weights(model_directory(tmp_path / "in", tensors, words), tmp_path / "good")
    spread = scale.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :200]
    assert bits(made) == bits({"w.weight": (weight.float() * spread).bfloat16()})
    assert "'w.weight'" in refused(
        model_directory(tmp_path / "in", {**tensors, "w.weight_scale": scale.T[None, None]}, words), tmp_path
    )


def test_the_8_bits_of_bitsandbytes_are_multiplied_by_a_127th(tmp_path: Path) -> None:
    integers, scale = torch.arange(-127, 128, dtype=torch.int8).reshape(5, 51), torch.rand(5) + 0.5
    tensors = {"w.weight": integers, "w.SCB": scale, "w.weight_format": torch.tensor(0, dtype=torch.uint8)}
    words = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    made = weights(model_directory(tmp_path / "in", tensors, words), tmp_path / "out")
    expected = integers.float() * scale[:, None] * torch.tensor(1 / 127)
    assert bits(made) == bits({"w.weight": expected.bfloat16()})


def hqq(matrix: torch.Tensor, axis: int, shape: Sequence[int], bits: int, dtype: torch.dtype) -> dict[str, Any]:
    """The parts of a weight as HQQ stores them, of codes in a matrix whose rows, or columns with axis 0, are groups."""
    rows, columns = matrix.shape
    counts = (1, rows)[axis == 1], (columns, 1)[axis == 1]
    many, word = {8: (1, torch.uint8), 4: (2, torch.uint8), 3: (10, torch.int32), 2: (4, torch.uint8)}[bits]
    filled = torch.nn.functional.pad(matrix, (0, 0, 0, -rows % many)).to(torch.int64)
    words = torch.zeros(len(filled) // many, columns, dtype=torch.int64)
    for number, each in enumerate(filled.chunk(many)):
        words |= each << bits * (many - 1 - number)
    numbers = {"nbits": bits, "group_size": columns if axis else rows, "shape": [*shape], "axis": axis}
    parts = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
    text = f"{bits}bit_{'32' if bits == 3 else 'u8'}"
    parts["packing"] = torch.tensor([*text.encode()], dtype=torch.uint8)
    parts |= {name: torch.tensor(0, dtype=torch.uint8) for name in ("view_as_float", "quant_zero", "offload_meta")}
    random = torch.Generator().manual_seed(bits)
    scale, zero = (torch.rand(counts, generator=random, dtype=torch.float64).to(dtype) * size for size in (0.1, 9))
    return {"W_q": words.to(word), "scale": scale, "zero": zero, **parts}


@every("axis", [0, 1])
def test_hqq_subtracts_floats_and_stores_rows_far_apart_in_one_word(axis: int, tmp_path: Path) -> None:
    """Each operation is rounded to the dtype of the scales."""
    tensors, expected = {}, {}
    for bits_ in (8, 4, 3, 2):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            shape = (24, 32) if bits_ != 3 else (16, 20)
            groups = shape[0] * shape[1] // 8
            matrix = torch.randint(0, 1 << bits_, (groups, 8) if axis else (8, groups))
            parts = hqq(matrix, axis, shape, bits_, dtype)
            name = f"{str(dtype)[6:]}.m{bits_}"
            tensors |= {f"{name}.{part}": each for part, each in parts.items()}
            weight = (matrix.to(dtype) - parts["zero"]) * parts["scale"]
            expected[f"{name}.weight"] = weight.reshape(shape).bfloat16()
    words = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}, "skip_modules": ["lm_head"]}
    assert bits(weights(model_directory(tmp_path / "in", tensors, words), tmp_path / "good")) == bits(expected)
    name = next(name for name in tensors if name.endswith("m4.axis"))
    for change in (
        *({name: torch.tensor(axis)} for axis in (1 - axis, 2, -1)),
        {name.replace("axis", "quant_zero"): torch.tensor(1, dtype=torch.uint8)},
        {name.replace("axis", "group_size"): torch.tensor(0)},
        {name.replace("axis", "nbits"): torch.tensor(2)},
        {name.replace("axis", "packing"): torch.tensor([*b"4bit_32"], dtype=torch.uint8)},
        {name.replace("axis", "meta_zero"): torch.ones(2)},
    ):
        source = model_directory(tmp_path / "in", {**tensors, **change}, words)
        assert name.replace("axis", "weight") in refused(source, tmp_path), change


def test_what_model_optimizer_multiplies_the_input_by_is_of_the_columns(tmp_path: Path) -> None:
    """As it multiplies: in float32, the product of code and scale first. Of int4, each byte has those of two rows."""
    random = torch.Generator().manual_seed(3)
    smoothing = {name: torch.rand(64, generator=random).bfloat16() + 0.5 for name in "abcd"}
    int8 = torch.randint(-128, 128, (6, 64), generator=random).to(torch.int8)
    int4 = torch.randint(-8, 8, (6, 64), generator=random)
    e2m1 = torch.randint(0, 256, (6, 32), generator=random).to(torch.uint8)
    rows, groups = torch.rand(6, generator=random), torch.rand(6, 2, generator=random)
    small = (torch.rand(6, 4, generator=random) * 9).to(torch.float8_e4m3fn)
    tensors = {f"{name}.pre_quant_scale": each for name, each in smoothing.items()}
    tensors |= {"a.weight": int8, "a.weight_scale": rows, "c.weight": e2m1, "c.weight_scale": small}
    tensors |= {"b.weight": (int4[::2] & 15 | (int4[1::2] & 15) << 4).to(torch.uint8), "b.weight_scale": groups}
    tensors |= {"c.weight_scale_2": torch.tensor(0.37), "d.weight_scale_2": torch.tensor(0.01)}
    tensors |= {"d.weight": tensors["b.weight"].clone(), "d.weight_scale": groups.clone()}
    powers = torch.randint(100, 140, (6, 2), generator=random).to(torch.uint8)
    tensors |= {"e.weight": e2m1.clone(), "e.weight_scale": powers}
    tensors |= {"plain.weight": int8.clone(), "plain.weight_scale": rows.clone()}
    layers = {"a": "W8A8_SQ_PER_CHANNEL", "b": "W4A16_AWQ", "c": "NVFP4_AWQ", "d": "W4A8_AWQ", "plain": "W8A16"}
    layers |= {"e": "W4A8_MXFP4_FP8"}
    words: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    words["quantized_layers"] = {
        name: {
            "quant_algo": algorithm,
            "group_size": {"a": None, "c": 16, "plain": None}.get(name, 32),
            "pre_quant_scale": name in smoothing,
        }
        for name, algorithm in layers.items()
    }
    made = weights(model_directory(tmp_path / "in", tensors, words), tmp_path / "out")
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([e2m1 & 15, e2m1 >> 4], -1).flatten(1).long()
    numbers = table[codes & 7] * torch.where(codes > 7, -1, 1)
    products = {
        "a": int8.float() * rows[:, None],
        "b": int4.float() * groups.repeat_interleave(32, 1),
        "c": numbers * (small.float() * 0.37).repeat_interleave(16, 1),
    }
    products["d"] = products["b"]
    expected = {f"{name}.weight": (each * smoothing[name].float()).bfloat16() for name, each in products.items()}
    expected["e.weight"] = torch.ldexp(numbers, powers.int().repeat_interleave(32, 1) - 127).bfloat16()
    assert bits(made) == bits({**expected, "plain.weight": products["a"].bfloat16()})


def test_mlx_leaves_modules_that_are_said_to_be_plain(tmp_path: Path) -> None:
    """Codes in a module of which the configuration says false are an error: it is not known what they are."""
    parts = {"weight": torch.ones(8, 8, dtype=torch.uint32), "scales": torch.ones(8, 2), "biases": torch.ones(8, 2)}
    tensors = {f"a.q.{name}": tensor for name, tensor in parts.items()} | {"a.o.weight": torch.ones(8, 4)}
    source = model_directory(tmp_path / "in", tensors, {**MLX, "a.o": False})
    assert weights(source, tmp_path / "good").keys() == {"a.q.weight", "a.o.weight"}
    for words in ({**MLX, "a.q": False}, {**MLX, "a.q": {**MLX, "mode": "mxfp4"}}, {**MLX, "bits": 8}, None):
        assert "'a.q.weight'" in refused(model_directory(tmp_path / "in", tensors, words), tmp_path)
    alone = {name: tensor for name, tensor in tensors.items() if "biases" not in name}
    assert "'a.q.weight'" in refused(model_directory(tmp_path / "in", alone, None), tmp_path)
    (source / "config.json").write_text(json.dumps({"quantization_config": MLX, "quantization": {**MLX, "bits": 8}}))
    assert "'bits'" in refused(source, tmp_path)


def test_another_programs_quantization_stays_in_a_configuration(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "in", GOOD, FP8)
    told = {"quantization_config": FP8, "quantization": {"levels": 8}}
    (source / "config.json").write_text(json.dumps(told))
    weights(source, tmp_path / "out", copy_config=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"] == {"levels": 8}


def test_quarks_patterns_go_before_what_is_said_of_all(tmp_path: Path) -> None:
    """Two patterns that are about one module, and say other things, are told apart by its parts."""
    floats = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}
    layers = {"*q*": {"weight": floats}, "*.q2": {"weight": {**floats, "qscheme": "per_tensor"}}}
    tensors = {f"a.{name}.weight": codes(6, 4) for name in ("q1", "q2")}
    tensors |= {"a.q1.weight_scale": torch.ones(6), "a.q2.weight_scale": torch.ones(())}
    source = model_directory(tmp_path / "in", tensors, {**QUARK, "layer_quant_config": layers})
    assert weights(source, tmp_path / "good").keys() == {"a.q1.weight", "a.q2.weight"}
    assert "'a.q1.weight'" in refused(model_directory(tmp_path / "in", tensors, QUARK), tmp_path)


def test_what_quark_has_done_to_other_weights_in_exchange_is_known(tmp_path: Path) -> None:
    tensors = {"a.weight": codes(6, 4), "a.weight_scale": torch.ones(6)}
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}
    algorithms = [
        {"name": "awq", "scaling_layers": [{"prev_op": "norm"}]},
        {"name": "gptq", "desc_act": True},
        {"name": "rotation", "r1": True, "r2": True, "r3": True, "r4": False, "online_r1_rotation": False},
    ]
    for algorithm in (None, *algorithms, algorithms):
        words = {**QUARK, "global_quant_config": {"weight": spec}, "algo_config": algorithm}
        source = model_directory(tmp_path / "in", tensors, words)
        assert weights(source, tmp_path / "out", overwrite=True).keys() == {"a.weight"}, algorithm


def test_quark_without_zero_points_has_two_complements_in_the_layout_of_awq(tmp_path: Path) -> None:
    """Of one word: -1 in the second element, at bits 16 to 19, and 7 in the first. AutoAWQ's numbers are from 0 to
    15."""
    word = torch.tensor([15 << 16 | 7], dtype=torch.int32)
    parts = {"qweight": word.repeat(32).reshape(32, 1), "qzeros": torch.zeros(1, 1, dtype=torch.int32)}
    tensors = {f"a.{name}": part for name, part in {**parts, "scales": torch.full((1, 8), 2.0).half()}.items()}
    for words, second in (({"export": QUARK["export"], "pack_method": "reorder"}, -2.0), ({}, 30.0)):
        source = model_directory(tmp_path / "in", tensors, {**AWQ, "zero_point": False, **words})
        made = weights(source, tmp_path / "out", overwrite=True)["a.weight"]
        assert made.float()[:, 0].tolist() == [14.0, second, *[0.0] * 6], words


def test_quarks_scale_of_a_whole_weight_has_the_dtype_of_the_model(tmp_path: Path) -> None:
    spec = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 16}
    stages = [spec, {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True}]
    tensors = {"a.weight": torch.full((2, 8), 0x32, dtype=torch.uint8)}
    tensors["a.weight_scale"] = torch.full((2, 1), 3.0).to(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float32):
        scale = {"a.weight_scale_2": torch.tensor(0.5, dtype=dtype)}
        words = {**QUARK, "global_quant_config": {"weight": stages}}
        made = weights(model_directory(tmp_path / "in", {**tensors, **scale}, words), tmp_path / "out", overwrite=True)
        assert made["a.weight"].float().tolist() == [[1.5, 2.25] * 8] * 2, dtype


def test_configurations_that_say_different_things_are_refused(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "in", GOOD, None)
    other = {"quantization_config": {**FP8, "weight_block_size": [64, 64]}}
    (source / "config.json").write_text(json.dumps({"quantization_config": FP8, "vision_config": other}))
    assert "'weight_block_size'" in refused(source, tmp_path)


def test_other_programs_formats_are_told_by_the_method_or_by_names(tmp_path: Path) -> None:
    plain = {"w.weight": torch.ones(8, 8)}
    for method, reader in ELSEWHERE.items():
        told = refused(model_directory(tmp_path / "in", plain, {"quant_method": method}), tmp_path)
        assert method in told, method
        assert reader in told, method
    for ending, (what, reader) in NOT_READ.items():
        told = refused(model_directory(tmp_path / "in", {f"w{ending}": torch.ones(8)}, None), tmp_path)
        assert f"'w{ending}'" in told, ending
        assert what in told, ending
        assert reader in told, ending


def test_what_is_not_read_is_neither_averaged_nor_cast(tmp_path: Path) -> None:
    parts: dict[str, dict[str, torch.Tensor]] = {
        "mlx": {"w.weight": torch.ones(8, 8, dtype=torch.uint32), "w.scales": torch.ones(8, 1)},
        "aqlm": {
            "w.codes": torch.ones(8, 8, dtype=torch.int16),
            "w.codebooks": torch.ones(8),
            "w.scales": torch.ones(8),
        },
        "quanto": {"w.weight._data": torch.ones(8, 8, dtype=torch.int8), "w.weight._scale": torch.ones(8)},
        "quark": {"w.weight": torch.ones(8, 8, dtype=torch.int32), "w.weight_scale": torch.ones(8)},
        "awq of Model Optimizer": {
            "w.weight": codes(8, 8),
            "w.weight_scale": torch.ones(1),
            "w.pre_quant_scale": torch.ones(8),
        },
    }
    for case, tensors in parts.items():
        source = model_directory(tmp_path / "in", tensors, None)
        for dequantize in (False, True):
            for make in of_features("MAKE"):
                with pytest.raises((UsageError, UnsupportedError), match=r"quantized|w\.weight"):
                    make(source, tmp_path / "out", dequantize=dequantize)
        with pytest.raises(UsageError, match="quantized") as caught:
            ckptconv.convert(source, tmp_path / "out", dtype="float16")
        assert "'w.weight'" in str(caught.value), case


def test_codes_of_which_nothing_else_is_there_are_refused(tmp_path: Path) -> None:
    for name, dtype in (("m.B", torch.int32), ("m.weight", torch.int8), ("m.codes", torch.uint8)):
        source = model_directory(tmp_path / "in", {name: torch.ones(4, 8, dtype=dtype)}, GPTQ)
        with pytest.raises(CorruptError, match=f"{name!r} contains codes"):
            ckptconv.convert(source, tmp_path / "out", dequantize=True)


STATE: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 64]}
NESTED = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
STATES: dict[str, str] = {
    "too deep": '{"shape":' + "[" * 20000,
    "a huge offset": json.dumps({**STATE, **NESTED, "nested_offset": 1e300}),
    "no offset": json.dumps({**STATE, "nested_blocksize": 256}),
    "an offset in words": json.dumps({**STATE, **NESTED, "nested_offset": "0"}),
    "a block of many digits": json.dumps(STATE).replace("64,", f"{'9' * 5000},"),
    "a block of nothing": json.dumps({**STATE, "blocksize": 0}),
    "a shape in words": json.dumps({**STATE, "shape": "2"}),
    "a shape of many sides": json.dumps({**STATE, "shape": [1] * 20000}),
    "a word that is not known": json.dumps({**STATE, "rotated": True}),
    "no object": "[]",
    "no text": "\udcff",
}


def test_hostile_states_of_bitsandbytes_are_refused_by_name(tmp_path: Path) -> None:
    for case, state in STATES.items():
        parts = {"weight": torch.zeros(64, 1, dtype=torch.uint8), "weight.quant_map": torch.zeros(16)}
        data = torch.tensor(list(state.encode("utf-8", "surrogateescape")), dtype=torch.uint8)
        parts |= {"weight.absmax": torch.ones(2), "weight.quant_state.bitsandbytes__nf4": data}
        if "offset" in case:
            parts |= {"weight.absmax": torch.ones(2, dtype=torch.uint8), "weight.nested_absmax": torch.ones(1)}
            parts |= {"weight.nested_quant_map": torch.ones(256)}
        source = model_directory(tmp_path / "in", {f"w.{part}": each for part, each in parts.items()}, None)
        assert "'w.weight'" in refused(source, tmp_path), case


def test_experts_of_llama_4_have_a_scale_for_each_column(tmp_path: Path) -> None:
    """As transformers' FbgemmFp8Llama4TextExperts has them, also where rows and columns are as many."""
    scale = torch.rand(2, 8, 1) + 0.5
    up, down = codes(2, 8, 16), codes(2, 8, 8, seed=1)
    wide = torch.rand(2, 1, 16) + 0.5
    tensors = {"e.down_proj": down, "e.down_proj_scale": scale, "e.gate_up_proj": up, "e.gate_up_proj_scale": wide}
    made = weights(model_directory(tmp_path / "in", tensors, {"quant_method": "fbgemm_fp8"}), tmp_path / "out")
    expected = {"e.down_proj": down.float() * scale.transpose(1, 2), "e.gate_up_proj": up.float() * wide}
    assert bits(made) == bits({name: each.bfloat16() for name, each in expected.items()})


def test_a_note_says_which_zero_point_is_beyond_the_largest_of_gptq(tmp_path: Path) -> None:
    parts = {**GPTQ_PARTS, "m.qzeros": torch.full((2, 1), -1, dtype=torch.int32)}
    source = model_directory(tmp_path / "in", parts, GPTQ)
    report = ckptconv.convert(source, tmp_path / "out", dequantize=True)
    assert any("each zero point minus 1. The" in note for note in report.notes)
    made = load_file(tmp_path / "out" / "model.safetensors")["m.weight"]
    assert torch.equal(made, torch.full((8, 64), -16).bfloat16())
    for words in ({"sym": True}, {"checkpoint_format": "gptq_v2"}):
        source = model_directory(tmp_path / "in", parts, {**GPTQ, **words})
        report = ckptconv.convert(source, tmp_path / "x", dequantize=True, dry_run=True)
        assert not any("each zero point minus 1. The" in note for note in report.notes)


def test_bytes_that_are_no_codes_stay_as_they_are(tmp_path: Path) -> None:
    others = {"a": torch.arange(5, dtype=torch.int8), "b.scale": torch.ones(3), "b.weight": torch.ones(3)}
    source = model_directory(tmp_path / "in", {**GOOD, **others})
    made = weights(source, tmp_path / "out")
    assert bits({name: made[name] for name in others}) == bits(others)
    told = "tensors that were not quantized and remain float32: 'b.scale', 'b.weight'. --dtype bfloat16 casts them too."
    assert told in ckptconv.convert(source, tmp_path / "again", dequantize=True).notes
    whole = ckptconv.convert(source, tmp_path / "cast", dequantize=True, dtype="bf16")
    assert not any("tensors that were not quantized and remain" in note for note in whole.notes)


def test_scales_of_activations_go_with_the_weights(tmp_path: Path) -> None:
    experts = {"experts.up": codes(2, 4, 4), "experts.up_scale": torch.ones(2), "experts.up_input_scale": torch.ones(2)}
    others = {"attn.k_scale": torch.ones(()), "layer_scale": torch.ones(3), "logit_scale": torch.ones(())}
    made = weights(model_directory(tmp_path / "in", {**experts, **others}, {"quant_method": "fp8"}), tmp_path / "out")
    assert made.keys() == {"experts.up", "layer_scale", "logit_scale"}
    assert bits({"": made["experts.up"]}) == bits({"": experts["experts.up"].bfloat16()})


SHAPES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "no rows": lambda: {"x.weight": codes(0, 8), "x.weight_scale_inv": torch.ones(0, 1)},
    "no columns, one scale": lambda: {"x.weight": codes(8, 0), "x.weight_scale": torch.ones(())},
    "one column": lambda: {"x.weight": codes(200, 1), "x.weight_scale_inv": torch.ones(2, 1)},
    "no dimension": lambda: {"x.weight": codes(1)[0], "x.weight_scale": torch.ones(())},
    "one dimension": lambda: {"x.weight": codes(9), "x.weight_scale": torch.ones(1)},
}


@every("case", SHAPES)
def test_small_weights_are_weights_too(case: str, tmp_path: Path) -> None:
    tensors = SHAPES[case]()
    block = FP8 if "x.weight_scale_inv" in tensors else {"quant_method": "fp8"}
    made = weights(model_directory(tmp_path / "in", tensors, block), tmp_path / "out")
    assert bits(made) == bits({"x.weight": tensors["x.weight"].bfloat16()})


def test_what_comfyui_writes_is_described_in_its_metadata(tmp_path: Path) -> None:
    floats, bytes_ = codes(4, 6), codes(4, 6).view(torch.uint8)
    scale, grid = torch.tensor(0.37), torch.tensor([[0.5, 0.25]])
    integers = torch.arange(-100, 156, 2, dtype=torch.int8).reshape(1, 128).repeat(3, 2)
    tensors = {"a.weight": floats, "a.weight_scale": scale, "b.weight": bytes_, "b.weight_scale": scale.clone()}
    tensors |= {"c.weight": integers, "c.weight_scale": grid, "plain.weight": bytes_.clone()}
    layers = {name: {"format": "float8_e4m3fn"} for name in ("a", "b")}
    layers |= {"c": {"format": "int8_blockwise", "group_size": 128}}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers}), "kept": "yes"}
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    ckptconv.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", dequantize=True, **VERIFIED)
    made = load_file(tmp_path / "y.safetensors")
    weight = (floats.float() * 0.37).bfloat16()
    spread = grid.repeat_interleave(128, 1)
    expected = {"a.weight": weight, "b.weight": weight, "c.weight": (integers.float() * spread).bfloat16()}
    assert bits(made) == bits({**expected, "plain.weight": bytes_})
    assert metadata_of(tmp_path / "y.safetensors") == {"format": "pt", "kept": "yes"}


def test_what_comfyui_writes_may_be_described_in_tensors(tmp_path: Path) -> None:
    integers, scale = torch.arange(-12, 12, dtype=torch.int8).reshape(4, 6), torch.rand(4, 1)

    def written(**words: Any) -> Path:
        mark = torch.tensor(list(json.dumps({"format": "int8_tensorwise", **words}).encode()), dtype=torch.uint8)
        tensors = {"a.weight": integers, "a.weight_scale": scale, "a.comfy_quant": mark, "b.weight": integers.clone()}
        save_file(tensors, tmp_path / "x.safetensors")
        return tmp_path / "x.safetensors"

    ckptconv.convert(written(), tmp_path / "y.safetensors", dequantize=True, **VERIFIED)
    expected = {"a.weight": (integers.float() * scale).bfloat16(), "b.weight": integers}
    assert bits(load_file(tmp_path / "y.safetensors")) == bits(expected)
    assert "'convrot'" in refused(written(convrot=True, convrot_groupsize=4), tmp_path)


def test_state_dicts_of_torch_are_dequantized_where_they_lie(tmp_path: Path) -> None:
    state = {"model": {"x.weight": codes(3, 4), "x.weight_scale": torch.tensor(0.5)}, "step": 7}
    torch.save(state, tmp_path / "x.pt")
    ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.safetensors", dequantize=True, **VERIFIED)
    tree = state_in(tmp_path / "y.safetensors")
    assert tree["step"] == 7
    assert bits(tree["model"]) == bits({"x.weight": (codes(3, 4).float() * 0.5).bfloat16()})


# ------------------------------------------------------------------------------------------------------- other outputs


@every("case", ["deepseek-v4", "ct-nvfp4", "gptq", "gpt-oss-mxfp4"])
def test_whatever_is_written_holds_the_same_weights(case: str, tmp_path: Path) -> None:
    source, plain = QUANTIZED / case, tmp_path / "plain"
    expected = bits(load_file(source / "expected.safetensors"))
    ckptconv.convert(source, plain, dequantize=True)
    for to in CHECKPOINTS[:1]:
        ckptconv.convert(source, tmp_path / to, dequantize=True, to=to, chunks=2)
    others = [*CHECKPOINTS[:1], *(["x.pt"] if "pt" in NAMED else [])]
    if "x.pt" in others:
        ckptconv.convert(source, tmp_path / "x.pt", dequantize=True)
    described = [f"v{suffix}" for suffix in DESCRIBING]
    for made in described:
        ckptconv.convert(source, tmp_path / made, dequantize=True)
    if "like" in OPTIONS:
        ckptconv.convert(source, tmp_path / "like", dequantize=True, like=plain)
        described.append("like")
    if "part" in OPTIONS:
        for part in range(2):
            ckptconv.convert(source, tmp_path / "parts", dequantize=True, part=(part, 2))
        ckptconv.finish(tmp_path / "parts")
        described.append("parts")
    for made in (*others, *described):
        assert bits(state_of(tmp_path / made)) == expected, made
    whole = (plain / "model.safetensors").read_bytes()
    for files in offered(source, dequantize=True):
        assert files.read_bytes("model.safetensors") == whole
        assert "quantization_config" not in json.loads(files.read_bytes("config.json"))
    assert "part" not in OPTIONS or (tmp_path / "parts" / "model.safetensors").read_bytes() == whole


_STACKED = """
about = "experts in one tensor"
source = "these tests"

[[rule]]
one = "experts.w1 : e h d"
hf = "experts.{e}.up_proj.weight : h d"

[[rule]]
one = "norm"
hf = "norm.weight"
"""


@pytest.mark.skipif(not {"map", "like"} <= OPTIONS.keys(), reason="there are no maps, or no references")
def test_a_map_and_a_reference_see_the_weights(tmp_path: Path) -> None:
    tensors = {"norm.weight": torch.ones(3).bfloat16()}
    for number in range(3):
        name = f"experts.{number}.up_proj.weight"
        tensors |= {name: codes(130, 260, seed=number), f"{name}_scale_inv": torch.full((2, 3), 0.1 + number)}
    source, plain = model_directory(tmp_path / "in", tensors), tmp_path / "plain"
    (tmp_path / "m.toml").write_text(_STACKED)
    ckptconv.convert(source, plain, dequantize=True)
    ckptconv.convert(plain, tmp_path / "two", map=tmp_path / "m.toml")
    ckptconv.convert(source, tmp_path / "one", dequantize=True, map=tmp_path / "m.toml", **VERIFIED)
    options: dict[str, Any] = {"dequantize": True, "map": tmp_path / "m.toml", **VERIFIED}
    ckptconv.convert(source, tmp_path / "like", like=tmp_path / "two", **options)
    for to in CHECKPOINTS[:1]:
        ckptconv.convert(source, tmp_path / to, to=to, **options)
    expected = bits(load_file(tmp_path / "two" / "model.safetensors"))
    assert expected["experts.w1"][1] == (3, 130, 260)
    for made in ("one", "like", *CHECKPOINTS[:1]):
        assert bits(state_of(tmp_path / made)) == expected, made


def test_a_plan_reads_names_and_shapes_alone(tmp_path: Path) -> None:
    header: dict[str, Any] = {}
    at = 0
    for number in range(2000):
        for name, dtype, shape, size in (
            ("", "F8_E4M3", [256, 384], 256 * 384),
            ("_scale_inv", "F32", [2, 3], 24),
        ):
            header[f"l{number}.weight{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    config = json.dumps({"quantization_config": FP8})
    (tmp_path / "config.json").write_text(config)
    report = ckptconv.convert(tmp_path, tmp_path / "out", dequantize=True, dry_run=True)
    assert report.dequantized == {"block FP8": 2000}
    assert report.bytes_read <= len(text) + len(config) + 1024


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    tied, scale = codes(40, 30), torch.tensor(0.5)
    state = {f"{name}.weight{part}": each for name in "ab" for part, each in (("", tied), ("_scale", scale))}
    torch.save(state, tmp_path / "x.pt")
    report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.safetensors", dequantize=True, **VERIFIED)
    assert report.aliases == {"b.weight": "a.weight"}
    made = load_file(tmp_path / "y.safetensors")
    assert bits({"": made["a.weight"]}) == bits({"": (tied.float() * 0.5).bfloat16()})


def test_values_too_large_for_float16_are_counted(tmp_path: Path) -> None:
    large = torch.tensor([[448.0, 2, 448, 448]] * 4).to(torch.float8_e4m3fn)
    given = {"x.weight": large, "x.weight_scale": torch.tensor(300.0)}
    source = model_directory(tmp_path / "in", given, {"quant_method": "fp8"})
    report = ckptconv.convert(source, tmp_path / "out", dequantize=True, dtype="float16")
    assert report.warnings == ["12 values were too large for float16 and became infinite, in 'x.weight'."]


def test_what_is_read_is_read_through_links(tmp_path: Path) -> None:
    source, away = tmp_path / "in", tmp_path / "away"
    source.mkdir()
    away.mkdir()
    codes = torch.arange(16, dtype=torch.uint8).reshape(4, 4).view(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale_inv": torch.full((2, 2), 3.0)}, away / "model.safetensors")
    told = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    (away / "config.json").write_text(json.dumps({"quantization_config": told}))
    for name in ("model.safetensors", "config.json"):
        (source / name).symlink_to(away / name)
    ckptconv.convert(source, tmp_path / "out", dequantize=True)
    made = load_file(tmp_path / "out" / "model.safetensors")["a.weight"]
    assert torch.equal(made, (codes.float() * 3).bfloat16())
    (away / "config.json").unlink()
    with pytest.raises(CorruptError, match=r"config\.json is a broken link"):
        ckptconv.convert(source, tmp_path / "out2", dequantize=True)


@every(
    "weight, scale",
    [
        ("q.weight", "q.weight_scale_inv"),
        ("q.weight", "q.weight_scale"),
        ("q.weight", "q.scale"),
        ("q.weight", "q.scale_weight"),
        ("experts.gate_up_proj", "experts.gate_up_proj_scale"),
    ],
)
def test_a_cast_of_quantized_weights_is_refused(weight: str, scale: str, tmp_path: Path) -> None:
    state = {weight: torch.ones(2, 2).to(torch.float8_e4m3fn), scale: torch.ones(1), "bare.weight": torch.ones(2)}
    torch.save(state, tmp_path / "x.pt")
    back = [("x.safetensors", "y.pt")] if "pt" in NAMED else []
    for source, output in (("x.pt", "x.safetensors"), *back):
        command = "pt2safetensors" if source == "x.pt" else "safetensors2pt"
        refused = ckptconv_here(command, "--dtype", "bfloat16", tmp_path / source, tmp_path / f"cast.{output}")
        assert refused.code == 2
        assert f"1 weight is quantized ('{weight}')" in refused.err
        assert "--dequantize" in refused.err
        assert ckptconv_here(command, tmp_path / source, tmp_path / output).code == 0


# The most lines of a dialect.
DIALECT = 80


def test_dialects_keep_to_their_budget() -> None:
    texts = {path.name: path.read_text("utf-8") for path in Path(dialects.__file__).parent.glob("*.py")}
    sizes = {name: sum(map(bool, map(str.strip, text.splitlines()))) for name, text in texts.items()}
    assert len(sizes) > 8
    assert max(sizes.values()) <= DIALECT, sizes

"""Outputs whose weights are quantized: which weights, under which names, and what the configuration says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cells import VERIFIED, offered, verifying
from checkpoints import ckptconv_here
from effort import every
from features.quantized.dialects import MADE, QUANTIZED
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import DifferenceError, UnsupportedError, UsageError
from ckptconv.features.quantized.options import ROUNDING_WAYS
from ckptconv.features.quantized.table import WAYS
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import CHECKPOINTS

LEFT = ["model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"]
LEFT += ["model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "model.conv.weight"]
WEIGHTS = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight"]


PAGE = Path(__file__).parents[3] / "docs" / "quantized.md"


def model(here: Path, **more: torch.Tensor) -> Path:
    """A model, with a configuration beside it."""
    random = torch.Generator().manual_seed(2)
    shapes = {name: (4,) if name.endswith(("bias", "norm.weight")) else (96, 64) for name in (*LEFT, *WEIGHTS)}
    shapes["model.conv.weight"] = (4, 1, 3)
    weights = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    here.mkdir()
    save_file({**weights, **more}, here / "model.safetensors")
    (here / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16", "vocab_size": 96}')
    return here


@every(
    "kept, has_vllm", [("*.q_proj.*", False), ("*.[qkv]_proj.*", True), ("*.up_proj.*", False), ("*.o_proj.*", True)]
)
def test_vllm_is_named_only_if_all_that_it_joins_is_quantized_or_none(
    kept: str, has_vllm: bool, tmp_path: Path
) -> None:
    names = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    source = {f"model.layers.0.{name}.weight": torch.ones(128, 128) for name in names}
    save_file(source, tmp_path / "m.safetensors")
    report = ckptconv.convert(tmp_path / "m.safetensors", tmp_path / "q", quantize="fp8-block", keep=[kept])
    (note,) = (note for note in report.notes if "Tested loaders" in note)
    assert note.endswith("Tested loaders: transformers, vLLM.") is has_vllm
    assert has_vllm or "vLLM joins 'model.layers.0." in note


@verifying
@every("way", ROUNDING_WAYS)
def test_weights_are_quantized_and_the_configuration_says_so(way: str, tmp_path: Path) -> None:
    source, out = model(tmp_path / "m"), tmp_path / "q"
    report = ckptconv.convert(source, out, quantize=way, **VERIFIED)
    (note,) = (note for note in report.notes if f"quantized 2 weights as {way}" in note)
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{way}` |"))
    readers = row.rsplit("| ", 1)[1].removesuffix(" |")
    tried = (
        f"Tested loaders: {readers}."
        if readers != "not tested"
        else "Tested loaders: none; transformers and vLLM were not tested."
    )
    assert note.endswith(f" {tried}")
    told = json.loads((out / "config.json").read_text())
    assert {"model_type", "dtype", "vocab_size", "quantization_config"} == told.keys()
    left = told["quantization_config"][WAYS[way].left]
    assert {name.removesuffix(".weight") for name in LEFT if "bias" not in name and "norm" not in name} == {*left}
    manifest = json.loads((out / ".ckptconv-manifest.json").read_text())
    assert report.quantized == manifest["quantized"] == {way: 2}
    assert ckptconv.verify(source, out).bytes_compared
    # What programs are to load is what we read.
    ckptconv.convert(out, tmp_path / "back", dequantize=True, copy_config=True)
    before, after = (load_file(each / "model.safetensors") for each in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) == (name in LEFT) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text()).keys() == {"model_type", "dtype", "vocab_size"}


@every("way", MADE)
def test_the_parts_are_those_of_the_program_that_has_the_format(way: str, tmp_path: Path) -> None:
    """Blocks and weights of zeros, tiny numbers and ties among them. Model Optimizer gives the modules of one input one
    scale; of a weight of zeros alone it makes NaN, and we do not."""
    source = tmp_path / "in.safetensors"
    shutil.copy(MADE[way] / "source.safetensors", source)
    ckptconv.convert(source, tmp_path / "out.safetensors", quantize=way, **VERIFIED)
    made, expected = load_file(tmp_path / "out.safetensors"), load_file(MADE[way] / "made.safetensors")
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (made[name].dtype, made[name].shape) == (tensor.dtype, tensor.shape), name
        same = made[name].reshape(-1).view(torch.uint8) == tensor.reshape(-1).view(torch.uint8)
        scale = expected.get(f"{name.rpartition('.')[0]}.weight_scale_2", torch.ones(()))
        assert same.all() or scale.isnan(), name


def test_one_weight_is_read_about_twice_for_its_scale(tmp_path: Path) -> None:
    """The scale of a weight is made of all of it, and then kept for its tiles."""
    save_file({"a.weight": torch.randn(512, 4096)}, tmp_path / "in.safetensors")
    report = ckptconv.convert(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", quantize="nvfp4", memory="16MB"
    )
    assert report.bytes_read < 6 * 512 * 4096 * 4


def test_more_is_kept_and_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    source = model(tmp_path / "m")
    ckptconv.convert(source, tmp_path / "q", quantize="mxfp8", keep="*.q_proj.*")
    told = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.q_proj" in told["ignored_layers"]
    assert load_file(tmp_path / "q" / "model.safetensors")[WEIGHTS[0]].dtype == torch.bfloat16
    for options in ({"keep": "*.none"}, {"keep": "*.weight"}, {"requantize": "mxfp8"}):
        with pytest.raises(UsageError):
            ckptconv.convert(source, tmp_path / "x", **{"quantize": "mxfp8", **options})
    with pytest.raises(UsageError, match="--keep"):
        ckptconv.convert(source, tmp_path / "x", keep="*")
    with pytest.raises(UsageError, match=r"--keep 'lm_head' matches no tensor .* Did you mean 'lm_head\.\*'"):
        ckptconv.convert(source, tmp_path / "x", quantize="mxfp8", keep="lm_head")
    assert not (tmp_path / "x").exists()


def test_words_of_other_programs_for_what_is_not_quantized_lead_to_keep(tmp_path: Path) -> None:
    source = model(tmp_path / "m")
    for option in ("--ignore", "--modules-to-not-convert"):
        run = ckptconv_here("convert", source, tmp_path / "q", "--quantize", "mxfp8", option, "lm_head")
        run.refused(2, f"There is no option {option}", "With --quantize, --keep GLOB leaves weights unquantized")
    report = ckptconv.convert(source, tmp_path / "q", quantize="mxfp8", keep="*.q_proj.*")
    assert not [note for note in report.notes if "--exclude" in note]
    report = ckptconv.convert(source, tmp_path / "q", quantize="mxfp8", exclude="*.q_proj.*")
    left_out = load_file(source / "model.safetensors").keys() - load_file(tmp_path / "q" / "model.safetensors").keys()
    count = len([name for name in left_out if ".q_proj." in name])
    assert count
    are = "tensors are" if count > 1 else "tensor is"
    told = (
        f"{count} {are} not in the output, because of --exclude. To keep weights in the output, unquantized, use "
        "--keep."
    )
    assert told in report.notes


def test_nan_is_refused_by_name_and_nothing_gets_its_final_name(tmp_path: Path) -> None:
    wrong = torch.ones(4, 64)
    wrong[3, 5] = torch.nan
    source = model(tmp_path / "m", **{"a.weight": wrong})
    for way in ("fp8-block", "nvfp4"):
        with pytest.raises(UnsupportedError, match=r"'a\.weight' has NaN or infinity") as caught:
            ckptconv.convert(source, tmp_path / "q", quantize=way)
        assert caught.value.hint == "--keep a.weight leaves it unquantized."
        assert not list(tmp_path.glob("q/*.safetensors"))
    ckptconv.convert(source, tmp_path / "q", quantize="fp8-block", keep="a.weight")
    assert load_file(tmp_path / "q" / "model.safetensors")["a.weight"].dtype == wrong.dtype


def test_groups_that_are_cut_short_are_left_and_said(tmp_path: Path) -> None:
    source = model(tmp_path / "m", **{"a.weight": torch.ones(4, 40)})
    report = ckptconv.convert(source, tmp_path / "q", quantize="int4-g32")
    assert any("a.weight (rows whose length is not a multiple of 32)" in each for each in report.warnings)
    ckptconv.convert(source, tmp_path / "p", quantize="fp8-block")
    assert load_file(tmp_path / "p" / "model.safetensors")["a.weight"].dtype == torch.float8_e4m3fn


def test_what_is_quantized_already_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="quantized already") as refused:
        ckptconv.convert(QUANTIZED / "mxfp8", tmp_path / "q", quantize="fp8-block")
    assert "--requantize" in refused.value.hint


def test_without_a_configuration_it_is_said_what_that_has_to_say(tmp_path: Path) -> None:
    source = model(tmp_path / "m")
    report = ckptconv.convert(source, tmp_path / "x.safetensors", quantize="mxfp8")
    assert any('"quant_method": "mxfp8"' in each for each in report.warnings)


def test_the_configuration_of_dequantized_weights_is_copied_without_its_settings(tmp_path: Path) -> None:
    source = QUANTIZED / "mxfp8"
    assert "quantization_config" in json.loads((source / "config.json").read_text())
    for options in ({}, {"copy_config": True}, {"copy_config": False}, *({"to": to} for to in CHECKPOINTS)):
        place = tmp_path / f"{options}"
        ckptconv.convert(source, place, dequantize=True, **options)
        is_copied = options in ({}, {"copy_config": True})
        assert (place / "config.json").exists() == is_copied
        assert not is_copied or "quantization_config" not in json.loads((place / "config.json").read_text())
    # Nothing is dequantized: the configuration describes the output as it is.
    ckptconv.convert(model(tmp_path / "m"), tmp_path / "plain", dequantize=True)
    assert (tmp_path / "plain" / "config.json").read_bytes() == (tmp_path / "m" / "config.json").read_bytes()


def test_a_scale_of_nothing_that_is_known_is_said(tmp_path: Path) -> None:
    source = tmp_path / "s"
    shutil.copytree(QUANTIZED / "mxfp8", source)
    tensors = load_file(source / "model.safetensors")
    more = {"attn.kv_cache_scale": torch.ones(1), "attn.logit.bias": torch.ones(1), "attn.k_scale": torch.ones(1)}
    save_file({**tensors, **more}, source / "model.safetensors")
    report = ckptconv.convert(source, tmp_path / "w", dequantize=True)
    assert any(
        note.endswith("Left unchanged: scales of unknown purpose: 'attn.kv_cache_scale'.") for note in report.notes
    )
    assert {"attn.kv_cache_scale", "attn.logit.bias"} <= load_file(tmp_path / "w" / "model.safetensors").keys()


def test_a_virtual_checkpoint_is_quantized_as_it_is_read(tmp_path: Path) -> None:
    source = model(tmp_path / "m")
    ckptconv.convert(source, tmp_path / "q", quantize="int4-g32")
    for files in offered(source, quantize="int4-g32"):
        for name in ("model.safetensors", "config.json"):
            assert files.read_bytes(name) == (tmp_path / "q" / name).read_bytes()


@verifying
def test_a_scale_that_was_changed_is_found(tmp_path: Path) -> None:
    source = model(tmp_path / "m")
    ckptconv.convert(source, tmp_path / "q", quantize="fp8-block")
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{WEIGHTS[0]}_scale_inv"] *= 2
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(DifferenceError, match=r"q_proj\.weight_scale_inv"):
        ckptconv.verify(source, tmp_path / "q")


# ------------------------------------------------------------------------------------------------------- requantizing


@every(
    "name, way",
    [
        ("gpt-oss-mxfp4", "fp8-block"),
        ("ct-mxfp4", "fp8-block"),
        ("ct-mxfp4", "mxfp8"),
        ("ct-mxfp4", "nvfp4"),
        ("block-fp8-e8m0", "mxfp8"),
        ("block-fp8-f32-pow2", "mxfp8"),
        ("block-fp8-u8", "fp8-block-ue8m0"),
    ],
)
def test_another_format_gives_back_the_same_numbers(name: str, way: str, tmp_path: Path) -> None:
    source = QUANTIZED / name
    report = ckptconv.convert(source, tmp_path / "q", requantize=way, **VERIFIED)
    assert not any("float32" in note for note in report.notes)
    for place, path in ((source, "before"), (tmp_path / "q", "after")):
        ckptconv.convert(place, tmp_path / path, dequantize=True, dtype="fp32")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[each].view(torch.int32), after[each].view(torch.int32)) for each in before)


@every(
    "name, way",
    [
        ("block-fp8-f32", "mxfp8"),
        ("mxfp8", "fp8-block"),
        ("deepseek-v4", "fp8-block"),
    ],
)
def test_where_a_number_would_be_another_it_is_refused_by_name(name: str, way: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'.+.weight' has numbers that the codes and scales"):
        ckptconv.convert(QUANTIZED / name, tmp_path / "q", requantize=way)
    assert not list(tmp_path.glob("q/*.safetensors"))


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_a_map_does_not_round_what_is_requantized(tmp_path: Path) -> None:
    """A number between two of bfloat16 would be another one."""
    source = tmp_path / "s"
    source.mkdir()
    codes = torch.full((4, 64), 1.0).to(torch.float8_e4m3fn)
    scales = {f"{name}.weight_scale_inv": torch.full((1, 1), 1 + 2.0**-12) for name in "ab"}
    save_file({"a.weight": codes, "b.weight": codes.clone(), **scales}, source / "model.safetensors")
    told = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": told}))
    rules = tmp_path / "turned.toml"
    rules.write_text('keep = ["b.weight"]\n[[rule]]\nleft = "a.weight : o i"\nright = "c.weight : i o"\n')
    for options in ({}, {"map": rules}):
        with pytest.raises(UnsupportedError, match=r"'[abc]\.weight' has numbers"):
            ckptconv.convert(source, tmp_path / "x", requantize="fp8-block", **options)
    ckptconv.convert(source, tmp_path / "y", dequantize=True, quantize="fp8-block", map=rules, **VERIFIED)
    assert json.loads((tmp_path / "y" / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_that_were_not_quantized_stay_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "s"
    shutil.copytree(QUANTIZED / "ct-mxfp4", source)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "other.weight": torch.ones(4, 64)}, source / "model.safetensors")
    ckptconv.convert(source, tmp_path / "q", requantize="fp8-block")
    assert load_file(tmp_path / "q" / "model.safetensors")["other.weight"].dtype == torch.float32
    told = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert "other" in told["modules_to_not_convert"]
    with pytest.raises(UsageError, match="no quantized weights"):
        ckptconv.convert(model(tmp_path / "m"), tmp_path / "x", requantize="fp8-block")


def of_mxfp4(here: Path, exponents: list[int], codes: int = 0x21) -> Path:
    """A weight of MXFP4, a group of each scale in a row of its own."""
    shutil.copytree(QUANTIZED / "ct-mxfp4", here)
    scales = torch.tensor([[each + 127] for each in exponents], dtype=torch.uint8)
    packed = torch.full((len(exponents), 16), 0x21, dtype=torch.uint8)
    packed[0] = codes
    save_file({"a.weight_packed": packed, "a.weight_scale": scales}, here / "model.safetensors")
    return here


@every("least", [-20, -119, 100])
def test_scales_of_nvfp4_may_be_seventeen_powers_of_two_apart(least: int, tmp_path: Path) -> None:
    source = of_mxfp4(tmp_path / "s", [least, least + 3, least + 17])
    ckptconv.convert(source, tmp_path / "q", requantize="nvfp4", **VERIFIED)
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    scales = tensors["a.weight_scale"].float() / tensors["a.weight_global_scale"]
    assert torch.equal(
        scales, torch.exp2(torch.tensor([[least], [least + 3], [least + 17]]).double()).float().repeat(1, 2)
    )
    assert torch.equal(tensors["a.weight_packed"], load_file(source / "model.safetensors")["a.weight_packed"])
    wide = of_mxfp4(tmp_path / "w", [least, least + 18])
    with pytest.raises(UnsupportedError, match=r"'a.weight' has scales in a wider range"):
        ckptconv.convert(wide, tmp_path / "x", requantize="nvfp4")
    # Zeros, of both signs, need no scale.
    zeros = of_mxfp4(tmp_path / "z", [least, least + 18], codes=0x80)
    ckptconv.convert(zeros, tmp_path / "y", requantize="nvfp4", **VERIFIED)
    assert load_file(tmp_path / "y" / "model.safetensors")["a.weight_scale"].float().tolist() == [[0, 0], [256, 256]]


@every("name, stored", [("block-fp8-e8m0", "block FP8"), ("gpt-oss-mxfp4", "MXFP4"), ("ct-nvfp4", "NVFP4")])
def test_nvfp4_is_made_of_rows_of_mxfp4_alone(name: str, stored: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has codes that are not MXFP4 along rows") as refused:
        ckptconv.convert(QUANTIZED / name, tmp_path / "q", requantize="nvfp4")
    assert f"are stored as {stored}. This format supports only MXFP4 along rows." in refused.value.message
    assert "Omit --requantize to keep the weights" in refused.value.hint


def test_values_that_are_no_tensors_are_named_in_a_note(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(8, 32), "epoch": 3}, tmp_path / "run.pt")
    report = ckptconv.convert(tmp_path / "run.pt", tmp_path / "q", quantize="mxfp8")
    assert "Not converted: epoch, because --quantize writes only tensors." in report.notes
    assert not [warning for warning in report.warnings if "epoch" in warning]


def test_the_experts_of_mlx_are_said_to_stay_and_to_be_for_no_other_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts, linear = "model.layers.0.mlp.switch_mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    model = tmp_path / "model.safetensors"
    save_file({experts: torch.randn(2, 32, 32), linear: torch.randn(32, 32)}, model)
    for way in ("mxfp4", "mxfp8"):
        report = ckptconv.convert(model, tmp_path / way, quantize=way, fsync=False)
        assert [text for text in report.warnings if f"does not support them: {experts} (experts of mlx-lm)" in text], (
            way
        )
        assert report.quantized == {way: 1}
    (tmp_path / "mxfp8" / "generation_config.json").write_text("{}")
    report = ckptconv.convert(tmp_path / "mxfp8", tmp_path / "back", dequantize=True, copy_config=True, fsync=False)
    assert any("mlx-lm names" in text and "transformers does not load" in text for text in report.warnings)
    assert "copied: generation_config.json" in report.notes
    assert "from_pretrained" not in " ".join(report.notes)

"""Pipelines of diffusers: a directory of several models becomes one of safetensors, with the same names and files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, looking, of_features, verified, verifying
from checkpoints import ckptconv_here, contents, done
from effort import every
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import CorruptError, FailedError, UnsafeError, UnsupportedError, UsageError
from ckptconv.formats.detect import open_source
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import FURTHER, NAMED

UNET = {"conv_in.weight": torch.arange(24.0).reshape(2, 3, 4), "conv_in.bias": torch.ones(2)}
VAE = {"encoder.conv_in.weight": torch.full((4, 3), 0.5), "conv_in.bias": torch.zeros(3)}
TEXT = {"text_model.embeddings.token_embedding.weight": torch.arange(6.0).reshape(3, 2)}
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.42.1",
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
MODELS = {"unet": UNET, "vae": VAE, "text_encoder": TEXT}
OF_DIFFUSERS = "diffusion_pytorch_model"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline as `save_pretrained(safe_serialization=False)` writes it: diffusers' models in .bin files."""
    here = tmp_path / "pipeline"
    for name in ("scheduler", "tokenizer", *MODELS):
        (here / name).mkdir(parents=True)
    (here / "model_index.json").write_text(json.dumps(INDEX))
    (here / "scheduler" / "scheduler_config.json").write_text('{"beta_start": 0.0001}')
    (here / "tokenizer" / "tokenizer_config.json").write_text("{}")
    for name, weights in MODELS.items():
        (here / name / "config.json").write_text(json.dumps({"_class_name": name}))
        if name != "text_encoder":
            torch.save(weights, here / name / f"{OF_DIFFUSERS}.bin")
    save_file(TEXT, here / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    return here


def convert(pipeline: Path, **options: Any) -> Path:
    output = pipeline.parent / "out"
    ckptconv.convert(pipeline, output, fsync=False, **options)
    return output


def files(directory: Path) -> set[str]:
    return {name for name in contents(directory) if "ckptconv" not in name}


def test_every_model_gets_its_name_and_its_configuration(pipeline: Path) -> None:
    output = convert(pipeline, **VERIFIED)
    assert files(output) == {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        *(f"{name}/{file}" for name in ("unet", "vae") for file in ("config.json", f"{OF_DIFFUSERS}.safetensors")),
    }
    for name, weights in MODELS.items():
        stem = "model" if name == "text_encoder" else OF_DIFFUSERS
        found = load_file(output / name / f"{stem}.safetensors")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert json.loads((output / "model_index.json").read_text()) == INDEX


@verifying
def test_options_are_for_every_model_and_verify_reads_them_again(pipeline: Path) -> None:
    output = convert(pipeline, dtype="bf16")
    assert load_file(output / "vae" / f"{OF_DIFFUSERS}.safetensors")["conv_in.bias"].dtype == torch.bfloat16
    assert load_file(output / "text_encoder" / "model.safetensors").popitem()[1].dtype == torch.bfloat16
    assert ckptconv.verify(pipeline, output).tensors == sum(map(len, MODELS.values()))


@verifying
@pytest.mark.parametrize("changed", ["unet/config.json", "scheduler/scheduler_config.json", "model_index.json"])
def test_verify_compares_what_was_copied(pipeline: Path, changed: str) -> None:
    output = convert(pipeline)
    text = (output / changed).read_text()
    (output / changed).write_text(text.replace('"', "'", 1))
    with pytest.raises(ckptconv.DifferenceError, match=changed):
        ckptconv.verify(pipeline, output)


@verifying
def test_verify_compares_the_models(pipeline: Path) -> None:
    output = convert(pipeline)
    torch.save({**VAE, "conv_in.bias": torch.ones(3)}, pipeline / "vae" / f"{OF_DIFFUSERS}.bin")
    with pytest.raises(ckptconv.DifferenceError, match=rf"vae/{OF_DIFFUSERS}.safetensors: 'conv_in.bias' differs"):
        ckptconv.verify(pipeline, output)


def test_shards_have_the_names_that_diffusers_reads(pipeline: Path) -> None:
    output = convert(pipeline, max_shard_size=50, **VERIFIED)
    index = json.loads((output / "unet" / f"{OF_DIFFUSERS}.safetensors.index.json").read_text())
    shards = {f"{OF_DIFFUSERS}-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert set(index["weight_map"].values()) == shards
    again = ckptconv.convert(output / "unet", pipeline.parent / "one.safetensors")
    assert again.tensors == len(UNET)


def test_a_smaller_output_takes_the_place_of_shards(pipeline: Path) -> None:
    convert(pipeline, max_shard_size=50)
    output = convert(pipeline, copy_config=True)
    assert {name for name in files(output) if name.startswith("unet/")} == {
        "unet/config.json",
        f"unet/{OF_DIFFUSERS}.safetensors",
    }
    verified(pipeline, output)


def test_without_output_it_is_beside_the_input(pipeline: Path) -> None:
    ckptconv.convert(pipeline, fsync=False)
    assert "model_index.json" in files(pipeline.parent / "pipeline-safetensors")


def test_without_configuration_the_models_alone_are_written(pipeline: Path) -> None:
    assert {Path(name).suffix for name in files(convert(pipeline, copy_config=False))} == {".safetensors"}


def test_one_of_its_models_keeps_the_name_of_its_file(pipeline: Path) -> None:
    output = convert(pipeline / "unet")
    assert files(pipeline / "out") == {f"{OF_DIFFUSERS}.safetensors", "config.json"}
    verified(pipeline / "unet", output)


def test_a_variant_is_taken_where_there_is_no_other(pipeline: Path) -> None:
    unet, vae = pipeline / "unet", pipeline / "vae"
    (unet / f"{OF_DIFFUSERS}.bin").rename(unet / f"{OF_DIFFUSERS}.fp16.bin")
    torch.save({"conv_in.bias": torch.zeros(1)}, vae / f"{OF_DIFFUSERS}.fp16.bin")
    ckptconv.convert(pipeline, pipeline.parent / "out")
    assert load_file(pipeline.parent / "out" / "unet" / f"{OF_DIFFUSERS}.safetensors").keys() == UNET.keys()
    assert load_file(pipeline.parent / "out" / "vae" / f"{OF_DIFFUSERS}.safetensors").keys() == VAE.keys()


def shown(command: str, path: Path, *options: str) -> tuple[set[str], dict[str, Any]]:
    """The names of the tensors that a command shows, and all that it says."""
    told = done(ckptconv_here(command, path, *options, "--json")).json
    return {tensor["name"] for tensor in told["tensors"]}, told


def test_all_models_are_shown(pipeline: Path) -> None:
    expected = {f"{name}/{key}" for name, weights in MODELS.items() for key in weights}
    for command in looking():
        names, told = shown(command, pipeline)
        assert names == expected
        assert told["facts"]["models"] == 3
        some, _ = shown(command, pipeline, "--include", "unet/*", "--stats")
        assert some == {f"unet/{key}" for key in UNET}


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """A model of sentence-transformers, with the folder of the last module left out, as git leaves an empty one."""
    here = tmp_path / "sentences"
    for name in ("1_Pooling", "2_Dense", "onnx"):
        (here / name).mkdir(parents=True)
    (here / "modules.json").write_text(json.dumps(MODULES))
    (here / "config_sentence_transformers.json").write_text("{}")
    for name in ("", "1_Pooling", "2_Dense"):
        (here / name / "config.json").write_text('{"dtype": "float32"}')
    save_file(TEXT, here / "model.safetensors", metadata={"format": "pt"})
    torch.save({"linear.weight": torch.ones(2, 3)}, here / "2_Dense" / "pytorch_model.bin")
    (here / "onnx" / "model.onnx").write_bytes(b"")
    return here


@verifying
def test_modules_of_sentence_transformers_are_converted_whole(sentences: Path) -> None:
    expected = {
        *("modules.json", "config_sentence_transformers.json", "config.json", "model.safetensors"),
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    }
    ckptconv.convert(sentences, sentences.parent / "hub", for_hub=True, **VERIFIED)
    assert files(sentences.parent / "hub") == expected
    output = convert(sentences, copy_config=True, dtype="bf16")
    assert files(output) == expected
    assert ckptconv.verify(sentences, output).tensors == 2
    for name in ("", "2_Dense"):
        assert json.loads((output / name / "config.json").read_text()) == {"dtype": "bfloat16"}
    for command in looking():
        assert shown(command, sentences)[0] == {*TEXT, "2_Dense/linear.weight"}
    # Half of a model is none.
    with pytest.raises(UsageError, match="requires a directory"):
        ckptconv.convert(sentences, sentences.parent / "out.safetensors")


def test_what_a_router_holds_is_not_cast_without_a_word(sentences: Path) -> None:
    """sentence-transformers 6.2 loads what `SentenceTransformer.bfloat16().save_pretrained` writes of it in two dtypes,
    and fails: "mat1 and mat2 must have the same dtype"."""
    for types, wanted in (({"1_Pooling": "P", "2_Dense": "Dense"}, 1), ({"1_Pooling": "P"}, 0)):
        (sentences / "router_config.json").write_text(json.dumps({"types": types}))
        for number, options in enumerate(({"dtype": "bf16"}, {})):
            out = sentences.parent / f"{wanted}{number}"
            report = ckptconv.convert(sentences, out, for_hub=True, **options)  # type: ignore[arg-type]
            told = [warning for warning in report.warnings if "2_Dense in float32" in warning]
            assert len(told) == (wanted if options else 0)


def test_none_of_its_modules_is_published_without_the_others(sentences: Path) -> None:
    out = sentences.parent / "out"
    calls: list[tuple[str, Callable[[], object]]] = [
        *(("1_Pooling", functools.partial(make, sentences, out, for_hub=True)) for make in of_features("MAKE")),
        ("2_Dense", lambda: ckptconv.convert(sentences / "model.safetensors", out, copy_config=True)),
        ("reads this module from one file", lambda: convert(sentences, for_hub=True, max_shard_size=8)),
    ]
    torch.save(
        {"linear.weight": torch.ones(2, 3), "linear.bias": torch.ones(2)}, sentences / "2_Dense" / "pytorch_model.bin"
    )
    for told, call in calls:
        with pytest.raises(UsageError, match=told):
            call()
        assert not out.exists()


def test_a_model_with_one_module_of_weights_is_one_file_if_nothing_is_copied(sentences: Path) -> None:
    (sentences / "2_Dense" / "pytorch_model.bin").unlink()
    assert ckptconv.convert(sentences, sentences.parent / "out.safetensors").tensors == len(TEXT)


@every(
    "modules, error",
    [
        ([{"path": "9_Dense", "type": "Dense"}], "but that folder does not exist."),
        ([{"path": "../x", "type": "Dense"}], "is outside its directory"),
        ([{"path": 3, "type": "Dense"}], "0.path is not text"),
        (["2_Dense"], "0 is not an object"),
        ({}, "it is not a list"),
    ],
)
def test_modules_that_are_not_true_are_refused(sentences: Path, modules: Any, error: str) -> None:
    (sentences / "modules.json").write_text(json.dumps(modules))
    with pytest.raises((CorruptError, UnsafeError), match=error):
        convert(sentences, for_hub=True)


def test_what_is_there_stays_with_no_clobber(pipeline: Path) -> None:
    output = convert(pipeline, copy_config=False)
    before = contents(output)
    with pytest.raises(FailedError, match="forbids"):
        convert(pipeline, clobber=False)
    assert contents(output) == before


@every(
    "output, options, told",
    [
        ("out.safetensors", {}, "which requires a directory"),
        *([("out.pt", {}, "which requires a directory")] if "pt" in NAMED else []),
        *((None, {name: "u"}, "which requires a directory") for name in FURTHER if name != "optimizer"),
        *([("out", {"part": "0/2"}, "--part divides one output")] if "part" in OPTIONS else []),
        ("pipeline", {}, "would replace .*text_encoder/model.safetensors, the input itself"),
    ],
)
def test_what_it_cannot_become_is_refused(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, output: str | None, options: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(pipeline.parent)
    before = contents(pipeline.parent)
    with pytest.raises(UsageError, match=told):
        ckptconv.convert("pipeline", output, **options)
    assert contents(pipeline.parent) == before


def test_other_commands_name_its_models(pipeline: Path) -> None:
    with pytest.raises(UsageError, match=r"diffusers pipeline.*pipeline/text_encoder.*pipeline/unet.*pipeline/vae"):
        open_source(pipeline)


@every(
    "index, error",
    [
        ('{"unet": ["diffusers", "X"], "other": ["diffusers", "X"]}', "but the folders 'other' do not exist."),
        ('{"../pipeline": ["diffusers", "X"]}', "but the folders '../pipeline' do not exist"),
        ('{"unet": ["diffusers", "X"], "unet": ["diffusers", "Y"]}', "unet"),
        ("[]", "not an object: a list"),
        ("{", "not JSON"),
    ],
)
def test_an_index_that_is_not_true_is_refused(pipeline: Path, index: str, error: str) -> None:
    (pipeline / "model_index.json").write_text(index)
    with pytest.raises(CorruptError, match=error):
        convert(pipeline)
    assert not (pipeline.parent / "out").exists()


def test_a_model_without_weights_is_refused(pipeline: Path) -> None:
    (pipeline / "unet" / f"{OF_DIFFUSERS}.bin").unlink()
    with pytest.raises(UnsupportedError, match="unet is a folder for a UNet2DConditionModel, but contains no weights"):
        convert(pipeline)
    assert not (pipeline.parent / "out").exists()


def test_without_models_there_has_to_be_something_to_copy(tmp_path: Path) -> None:
    place = tmp_path / "settings"
    place.mkdir()
    (place / "model_index.json").write_text("{}")
    for options in ({"output": place}, {"output": tmp_path / "out", "copy_config": False}):
        with pytest.raises(UsageError, match="neither a model"):
            ckptconv.convert(place, **options)
    assert contents(place) == {"model_index.json": b"{}"}


def test_a_part_that_is_a_folder_of_the_pipeline_is_converted_by_its_folder(pipeline: Path, tmp_path: Path) -> None:
    for option, value in (("--include", "unet/*"), ("--key", "unet"), ("--include", "vae.conv_in.*")):
        command = f"ckptconv convert {pipeline / value[:4].rstrip('/.')} OUTPUT"
        ckptconv_here("convert", pipeline, tmp_path / "out", option, value).refused(2, "a pipeline of several", command)
    said = ckptconv_here("convert", pipeline, tmp_path / "out", "--include", "none.*").refused(2, "matches none of the")
    assert "pipeline of several models" not in said

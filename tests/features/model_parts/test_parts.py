"""A part of a model has the tensors of its layers, experts and components, and a configuration that is true of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, offered, opened, verifying
from effort import every
from features.model_facts import models
from features.model_facts.models import assert_equal, converted
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from stores import FAR

import ckptconv
from ckptconv.errors import UsageError
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import NAMED

Tensors = dict[str, torch.Tensor]


def renumbered(tensors: Tensors, kept: list[int], place: str = "model.layers") -> Tensors:
    """Tensors with these layers alone, in this order: what is expected."""
    made = {}
    for name, tensor in tensors.items():
        number = re.match(rf"{re.escape(place)}\.(\d+)\.", name)
        if number is None:
            made[name] = tensor
        elif int(number[1]) in kept:
            made[f"{place}.{kept.index(int(number[1]))}{name[number.end() - 1 :]}"] = tensor
    return made


@every("kept", [[0, 1], [0, 1, 2, 5], [4, 5], [0, 3, 4], [0, 1, 2, 3, 4, 5, 6], [3, 6]])
def test_layers_are_kept_and_renumbered(kept: list[int], tmp_path: Path) -> None:
    shapes, config = models.latent()
    tensors = models.save(tmp_path / "m", shapes, config)
    found, told, report = converted(tmp_path / "m", tmp_path / "out", layers=kept)
    assert_equal(found, renumbered(tensors, kept))
    dense = sum(number < 3 for number in kept)
    assert told["num_hidden_layers"] == sum(number < 6 for number in kept)
    assert told["num_nextn_predict_layers"] == (6 in kept)
    assert told["first_k_dense_replace"] == (3 if kept[:2] == [0, 1] else dense)
    changed = {key: [*map(json.loads, values)] for key, values in report.configuration.items()}
    assert changed == {key: [config[key], told[key]] for key in config if config[key] != told[key]}


def test_experts_are_kept_with_their_rows_of_the_router(tmp_path: Path) -> None:
    kept = [0, 3, 4, 7]
    for name, (shapes, config) in {"apart": models.latent(), "stacked": models.mixed()}.items():
        tensors = models.save(tmp_path / name, shapes, config)
        found, told, _ = converted(tmp_path / name, tmp_path / f"{name}-out", experts=kept)
        wanted = {}
        for each, tensor in tensors.items():
            expert = re.search(r"\.experts\.(\d+)\.", each)
            if expert and int(expert[1]) not in kept:
                continue
            own = each.replace(f".experts.{expert[1]}.", f".experts.{kept.index(int(expert[1]))}.") if expert else each
            is_row = ".mlp.gate." in each or re.search(r"\.experts\.[a-z]", each)
            wanted[own] = tensor[kept] if is_row else tensor
        assert_equal(found, wanted)
        key = "n_routed_experts" if name == "apart" else "num_local_experts"
        assert (told[key], told["num_experts_per_tok"]) == (4, 2)


@verifying
def test_each_layer_may_keep_other_experts(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    tensors = models.save(tmp_path / "m", shapes, config)
    lists = [[0, 1], [2, 5], [6, 7], [0, 7]]
    (tmp_path / "keep.json").write_text(json.dumps(lists))
    found, told, report = converted(tmp_path / "m", tmp_path / "out", experts=str(tmp_path / "keep.json"))
    for number, kept in enumerate(lists):
        for name in ("mlp.gate.weight", "mlp.experts.gate_up_proj"):
            at = f"model.layers.{number}.{name}"
            assert torch.equal(found[at], tensors[at][kept])
    assert told["num_local_experts"] == 2
    # The file is not asked for again.
    (tmp_path / "keep.json").unlink()
    assert ckptconv.verify(tmp_path / "m", tmp_path / "out").tensors == report.tensors


def test_another_component_is_met_with_how_tensors_are_taken_by_their_names(tmp_path: Path) -> None:
    for value, hint in (("projector", "'multi_modal_projector.*'"), ("llm", "Did you mean text?")):
        with pytest.raises(ckptconv.UsageError) as caught:
            ckptconv.convert(tmp_path, component=value)  # type: ignore[arg-type]
        assert hint in caught.value.hint


def test_a_component_has_its_own_names_and_configuration(tmp_path: Path) -> None:
    shapes, config = models.seeing()
    tensors = models.save(tmp_path / "m", shapes, config)
    found, told, _ = converted(tmp_path / "m", tmp_path / "text", component="text")
    text = {name: each for name, each in tensors.items() if "vision" not in name and "projector" not in name}
    assert_equal(found, {name.replace("language_model.", ""): each for name, each in text.items()})
    assert told == {**config["text_config"], "dtype": "float32", "tie_word_embeddings": False}
    # A head that is no tensor of its own is the embeddings.
    del shapes["lm_head.weight"]
    models.save(tmp_path / "tied", shapes, config)
    _, told, _ = converted(tmp_path / "tied", tmp_path / "tied-text", component="text")
    assert told["tie_word_embeddings"] is True
    found, told, report = converted(tmp_path / "m", tmp_path / "eyes", component="vision")
    assert any(
        note.startswith("config.json was changed to match the part: it is vision_config of the model")
        for note in report.notes
    )
    tower = "model.vision_tower."
    assert_equal(found, {name.removeprefix(tower): each for name, each in tensors.items() if name.startswith(tower)})
    assert told["model_type"] == "eyes"
    # Layers of the language model, in the whole and alone; the vision model has as many, and keeps them.
    found, told, _ = converted(tmp_path / "m", tmp_path / "both", layers="0,2")
    assert_equal(found, renumbered(tensors, [0, 2], "model.language_model.layers"))
    assert told["text_config"]["layer_types"] == ["a", "c"]
    assert told["vision_config"] == config["vision_config"]
    found, told, _ = converted(tmp_path / "m", tmp_path / "some", component="text", layers="2")
    assert told["num_hidden_layers"] == 1
    assert "model.layers.0.mlp.up_proj.weight" in found


def test_a_configuration_without_that_of_the_component_is_met_with_what_to_give(tmp_path: Path) -> None:
    shapes, config = models.seeing()
    own = {**config["text_config"], "model_type": "speaker"}
    flat = {**own, "vision_config": config["vision_config"]}
    models.save(tmp_path / "m", shapes, flat)
    (tmp_path / "own.json").write_text(json.dumps(own))
    for given, named in (({}, "config.json"), ({"config": tmp_path / "m" / "config.json"}, str(tmp_path / "m"))):
        with pytest.raises(
            UsageError, match=r"no configuration of its text component, .* but vision_config"
        ) as refused:
            ckptconv.convert(tmp_path / "m", tmp_path / "text", component="text", **given)  # type: ignore[arg-type]
        assert refused.value.message.startswith(named)
        assert "Write the configuration of the text component alone" in refused.value.hint
    # The configuration of the component alone, as the hint asks for.
    _, told, _ = converted(tmp_path / "m", tmp_path / "text", component="text", config=str(tmp_path / "own.json"))
    assert told == own
    _, told, _ = converted(
        tmp_path / "m", tmp_path / "part", component="text", layers="2", config=tmp_path / "own.json"
    )
    assert told["num_hidden_layers"] == 1


def test_who_asks_for_a_component_by_its_key_is_told_the_option(tmp_path: Path) -> None:
    shapes, config = models.seeing()
    models.save(tmp_path / "m", {name.removeprefix("model."): shape for name, shape in shapes.items()}, config)
    for key, component in (("language_model", "text"), ("vision_tower", "vision")):
        with pytest.raises(UsageError) as refused:
            ckptconv.convert(tmp_path / "m", tmp_path / component, key=key)
        assert f"--include, or with --component {component} if config.json" in refused.value.hint
        ckptconv.convert(tmp_path / "m", tmp_path / component, component=component, fsync=False)
    with pytest.raises(UsageError) as refused:
        ckptconv.convert(tmp_path / "m", tmp_path / "none", key="multi_modal_projector")
    assert refused.value.hint.endswith("Select these names with --include.")


def test_a_copy_says_no_dtype_that_its_weights_do_not_have(tmp_path: Path) -> None:
    shapes, config = models.seeing()
    del config["dtype"]
    config["text_config"]["dtype"] = "bfloat16"
    models.save(tmp_path / "m", shapes, config)
    told = "The copy of config.json has the dtype of the output's weights"
    report = ckptconv.convert(tmp_path / "m", tmp_path / "text", component="text", fsync=False)
    assert not any(told in note for note in report.notes)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["dtype"] == "bfloat16"
    report = ckptconv.convert(tmp_path / "m", tmp_path / "half", component="text", dtype="fp16", fsync=False)
    assert f"{told}, float16, instead of bfloat16." in report.notes
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"


def test_a_component_has_the_files_that_are_for_it(tmp_path: Path) -> None:
    models.save(tmp_path / "m", *models.seeing())
    of_text, of_vision = {"generation_config.json", "tokenizer.json"}, {"preprocessor_config.json"}
    for name in (*of_text, *of_vision):
        (tmp_path / "m" / name).write_text("{}")
    for component, own in (("text", of_text), ("vision", of_vision)):
        _, _, report = converted(tmp_path / "m", tmp_path / component, component=component)
        names = {path.name for path in (tmp_path / component).glob("*.json")}
        assert names & (of_text | of_vision) == own, component
        left = {Path(path).name: why for path, why in report.left.items()}
        what = "the other components" if component == "text" else "the language model"
        assert left == dict.fromkeys((of_text | of_vision) - own, f"for {what}")
    # All of them, if all components are there.
    converted(tmp_path / "m", tmp_path / "some", layers="0,2")
    assert {path.name for path in (tmp_path / "some").iterdir()} >= of_text | of_vision


@verifying
def test_every_way_to_convert_gives_the_same_part(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    models.save(tmp_path / "m", shapes, config)
    part: dict[str, Any] = {"layers": "0,3", "experts": "1-2"}
    wanted, _, _ = converted(tmp_path / "m", tmp_path / "out", **part)
    if "pt" in NAMED:
        ckptconv.convert(tmp_path / "m", tmp_path / "m.pt", fsync=False, **VERIFIED, **part)
        assert_equal(dict(torch.load(tmp_path / "m.pt", weights_only=True)), wanted)
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "one.safetensors", fsync=False)
        assert_equal(load_file(tmp_path / "one.safetensors"), wanted)
    for files in offered(tmp_path / "m", **part):
        for name in ("model.safetensors", "config.json"):
            assert files.read_bytes(name) == (tmp_path / "out" / name).read_bytes()
    for checkpoint in opened(tmp_path / "m", **part):
        assert_equal({name: checkpoint.get_tensor(name) for name in checkpoint}, wanted)
    if "part" in OPTIONS:
        options: dict[str, Any] = {"max_shard_size": 2000, "fsync": False, **part}
        for number in range(2):
            ckptconv.convert(tmp_path / "m", tmp_path / "parts", part=(number, 2), **options)
        ckptconv.finish(tmp_path / "parts")
        assert ckptconv.verify(tmp_path / "m", tmp_path / "parts").tensors == len(wanted)


def test_a_part_goes_with_casts_names_and_a_reference(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    tensors = models.save(tmp_path / "m", shapes, config)
    found, told, _ = converted(tmp_path / "m", tmp_path / "cast", layers="1", dtype="bf16", for_hub=False)
    assert found["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    found, _, _ = converted(tmp_path / "m", tmp_path / "named", layers="1", strip_prefix="model.", exclude="*.bias")
    assert torch.equal(found["layers.0.mlp.gate.weight"], tensors["model.layers.1.mlp.gate.weight"])
    assert not any(name.endswith(".bias") for name in found)
    if "like" in OPTIONS:
        found, told, _ = converted(tmp_path / "m", tmp_path / "like", layers="1", like=str(tmp_path / "cast"))
        assert found["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
        assert told["num_hidden_layers"] == 1


def test_the_configuration_may_lie_elsewhere(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    models.save(tmp_path / "m", shapes, None)
    (tmp_path / "other.json").write_text(json.dumps(config))
    found, told, _ = converted(tmp_path / "m", tmp_path / "out", layers="0-1", config=str(tmp_path / "other.json"))
    assert (told["num_hidden_layers"], told["layer_types"]) == (2, config["layer_types"][:2])
    bare, none, report = converted(tmp_path / "m", tmp_path / "bare", layers="0-1")
    assert none == {}
    assert any("No config.json was found" in note for note in report.notes)
    assert_equal(bare, found)


def test_a_configuration_alone_is_copied_and_makes_no_part(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    tensors = models.save(tmp_path / "other", shapes, config)
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "m.pt")
    given = str(tmp_path / "other" / "config.json")
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", config=given, fsync=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    left = "Not converted: epoch, because an output with --config contains only tensors."
    assert report.notes == ["copied: config.json", left]
    assert report.warnings == []


@pytest.mark.skipif("dcp" not in NAMED, reason="no feature writes checkpoints of a run")
def test_a_configuration_that_lies_elsewhere_is_not_left_in_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    torch.save({"module": {"a.weight": torch.ones(2)}}, tmp_path / "a.pt")
    ckptconv.convert(tmp_path / "a.pt", run, to="dcp", key="module", fsync=False)
    (tmp_path / "config.json").write_text("{}")
    for name in ("tokenizer.json", "README.md"):
        (run / name).write_text("{}")
    report = ckptconv.convert(run, tmp_path / "out", config=str(tmp_path / "config.json"), fsync=False)
    assert [note for note in report.notes if "not copied from" in note] == []
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "tokenizer.json", "README.md"}


def test_of_a_file_only_the_rows_that_are_kept_are_read(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    shapes = {name: (*shape[:-1], 64 * shape[-1]) if len(shape) > 1 else shape for name, shape in shapes.items()}
    models.save(tmp_path / "m", shapes, config)
    report = ckptconv.convert(tmp_path / "m", tmp_path / "out", layers="1", experts="2-3", fsync=False)
    header = 8 + int.from_bytes((tmp_path / "m" / "model.safetensors").read_bytes()[:8], "little")
    assert report.bytes_read <= 1.1 * report.bytes_written + header


@FAR
def test_of_shards_in_a_store_no_more_than_their_headers_is_read_too(tmp_path: Path) -> None:
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(512, 256) for layer in range(8)}
    torch.save(tensors, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "in", max_shard_size=2 * 512 * 256 * 4, fsync=False)
    (tmp_path / "in" / "config.json").write_text(json.dumps({"num_hidden_layers": 8}))
    store, place = MemoryFileSystem(), tmp_path.name
    store.put(f"{tmp_path / 'in'}/", f"/{place}", recursive=True)
    report = ckptconv.convert(f"memory://{place}", tmp_path / "out", layers="0-3", fsync=False)
    assert len(list((tmp_path / "in").glob("*.safetensors"))) == 4
    assert report.bytes_read <= 1.1 * report.bytes_written + (1 << 16)
    store.rm(f"/{place}", recursive=True)


def test_a_warning_names_what_is_left_out_by_globs(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    models.save(tmp_path / "m", shapes, config)
    report = ckptconv.convert(
        tmp_path / "m", tmp_path / "out", exclude="model.layers.3.*", copy_config=True, fsync=False
    )
    assert any("num_hidden_layers 4, layer_types 4" in warning for warning in report.warnings)


def test_a_part_is_not_resumed_as_another(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    models.save(tmp_path / "m", shapes, config)

    def plan(**options: Any) -> str:
        ckptconv.convert(tmp_path / "m", tmp_path / "out", fsync=False, **options)
        return str(json.loads((tmp_path / "out" / ".ckptconv-manifest.json").read_text())["plan"])

    parts: list[dict[str, Any]] = [
        {"layers": "0,1"},
        {"layers": "1,0"},
        {"experts": "0-1"},
        {"experts": "1-2"},
    ]
    assert len({plan(**part) for part in parts}) == len(parts)

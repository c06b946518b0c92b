"""A model with the names of another program is not published, or given a configuration of transformers, in silence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import verify, verifying
from effort import every
from safetensors.torch import load_file, save_file

from ckptconv import Report, UsageError, convert
from ckptconv.features.maps.publishing import foreign_names

MEGATRON = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
    "decoder.final_layernorm.weight",
    "own.weight",
)
LLAMA = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight")
TITAN = ("tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight", "norm.weight")
OF_TRANSFORMERS = {"model_type": "llama"}


def published(place: Path, names: Sequence[str], config: dict[str, Any] | None, **options: Any) -> Report:
    (place / "in").mkdir()
    save_file({name: torch.ones(1) for name in names}, place / "in" / "model.safetensors")
    if config is not None:
        (place / "in" / "config.json").write_text(json.dumps(config))
    return convert(place / "in", place / "out", fsync=False, **options)


@every(
    "names, expected",
    [
        (MEGATRON, "megatron"),
        ([name.replace("layers.0.", "layers.").replace("layers.1.", "layers.") for name in MEGATRON], "megatron"),
        (TITAN, "meta titan"),
        (LLAMA, ""),
        # Both programs have such names, or none is known.
        ((*LLAMA, *MEGATRON[:2]), ""),
        (("own.weight", "other.bias"), ""),
        (("model.layers.0.block_sparse_moe.experts.0.w1.weight",), ""),
        ((), ""),
    ],
)
def test_the_names_tell_the_program(names: Sequence[str], expected: str) -> None:
    foreign = foreign_names(names)
    assert " ".join(dict.fromkeys(foreign.maps.values()) if foreign else ()) == expected


def test_names_of_megatron_are_not_published_in_silence(tmp_path: Path) -> None:
    (warning,) = (text for text in published(tmp_path, MEGATRON, None, for_hub=True).warnings if "names of" in text)
    assert "'decoder.final_layernorm.weight', which transformers does not load. Give the map of its arch" in warning
    assert "megatron-llama" in warning


def test_a_configuration_of_transformers_beside_them_is_refused_or_warned_of(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"names of megatron.* which would not find these weights.*--no-copy-config"):
        published(tmp_path, MEGATRON, OF_TRANSFORMERS, for_hub=True)
    assert not (tmp_path / "out").exists()
    copied = convert(tmp_path / "in", tmp_path / "out", copy_config=True)
    assert any("names of megatron" in warning for warning in copied.warnings)
    bare = convert(tmp_path / "in", tmp_path / "out", for_hub=True, copy_config=False)
    assert any("names of megatron" in warning for warning in bare.warnings)


@every(
    "names, config",
    [(LLAMA, OF_TRANSFORMERS), (LLAMA, None), (TITAN, {**OF_TRANSFORMERS, "auto_map": {"AutoModel": "own.Model"}})],
)
def test_other_models_are_published_without_a_word(names: Sequence[str], config: Any, tmp_path: Path) -> None:
    assert not [text for text in published(tmp_path, names, config, for_hub=True).warnings if "names of" in text]


def olmo_names(*more: str) -> dict[str, torch.Tensor]:
    """Return a Llama of OLMo-core with one layer."""
    places = ("attention.w_q", "attention.w_k", "attention.w_v", "attention.w_out", "attention_norm", *more)
    names = ["embeddings", "lm_head.norm", *(f"blocks.0.{place}" for place in places)]
    return {f"{name}.weight": torch.ones(2) for name in names}


@pytest.mark.parametrize(
    ("named", "more", "doubt"),
    [
        ("olmo_core", (), "'blocks.{l}.attention.q_norm.weight', 'blocks.{l}.attention.k_norm.weight'"),
        ("olmo_core", ("attention.q_norm", "attention.k_norm"), ""),
        ("olmo_core-llama", (), ""),
    ],
)
def test_a_map_whose_models_have_more_is_warned_of(named: str, more: Sequence[str], doubt: str, tmp_path: Path) -> None:
    save_file(olmo_names(*more), tmp_path / "a.safetensors")
    report = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=named)
    expected = (
        f"the map olmo_core expects {doubt}, but this checkpoint has no such tensor. Is this the right map? "
        "Built-in maps that match all of the names: olmo_core-llama (ckptconv maps lists them)."
    )
    assert report.warnings == ([expected] if doubt else [])


def test_names_that_a_map_lacks_first_raise_the_question_whether_it_is_the_right_one(tmp_path: Path) -> None:
    save_file(olmo_names(), tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="matches none of 7 names") as caught:
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map="torchtitan-llama3")
    assert caught.value.hint.startswith(
        "Is this the right map? Built-in maps that match all of the names: olmo_core-llama ("
    )
    save_file(olmo_names("other"), tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="no rule for 1 tensor") as caught:
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map="olmo_core-llama")
    assert str(caught.value).count("'blocks.0.other.weight'") == 1
    assert "no rule for 1 tensor on its side 'olmo'" in caught.value.message
    assert caught.value.hint.startswith(
        "Is this the right map? No other built-in map matches all of the names. If it is,"
    )
    renaming = {"rename": [r"other\.weight=more.weight"]}
    with pytest.raises(UsageError, match=r"'blocks\.0\.more\.weight'") as caught:
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map="olmo_core-llama", **renaming)
    first = "--strip-prefix and --rename change names before the map is applied, so the new names must match the map."
    assert caught.value.hint.startswith(f"{first} Is this the right map?")
    # A file of the user's is the right one: it says how the other names stay.
    (tmp_path / "my.toml").write_text("[[rule]]\nold = 'blocks.0.other.weight'\nnew = 'w'\n")
    with pytest.raises(UsageError, match="no rule for 7 tensors") as caught:
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=str(tmp_path / "my.toml"))
    assert caught.value.hint.startswith("Add a rule for each tensor, or exclude these tensors with --exclude. To keep")
    assert caught.value.hint.endswith("use --rename 'REGEX=REPL' instead of the map.")


def test_a_rule_that_is_required_says_so_by_true(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "m.toml").write_text('[[rule]]\none = "a"\nother = "b"\nrequired = 1\n')
    with pytest.raises(UsageError, match="required is 1, but true or false was expected"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=str(tmp_path / "m.toml"))


@every("present, doubted", [("b", False), ("a", False), ("x", True)])
def test_one_alternative_of_a_rule_that_is_required_is_enough(present: str, doubted: bool, tmp_path: Path) -> None:
    save_file({present: torch.ones(2)}, tmp_path / "a.safetensors")
    rules = '[[rule]]\none = "a | b"\nother = "c"\nrequired = true\n[[rule]]\none = "x"\nother = "y"\n'
    (tmp_path / "m.toml").write_text(rules)
    report = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=str(tmp_path / "m.toml"))
    assert (
        any("expects 'a', but this checkpoint has no such tensor" in warning for warning in report.warnings) == doubted
    )


TIMM = ("blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight", "blocks.0.mlp.fc1.weight", "blocks.0.norm1.weight")


@every(
    "others, is_told",
    [
        # A vision model of transformers, beside a language model, has such names too.
        (("model.norm.weight",), False),
        # All names with the prefix of a wrapper, and two models of one program.
        ((), True),
        (tuple(f"teacher.{name}" for name in TIMM), True),
    ],
)
def test_a_module_of_a_larger_model_is_not_judged(others: tuple[str, ...], is_told: bool, tmp_path: Path) -> None:
    names = (*(f"visual.{name}" for name in TIMM), *others)
    only = {"include": "visual.*", "strip_prefix": "visual.", "copy_config": True}
    warnings = published(tmp_path, names, {"model_type": "any"}, **only).warnings
    assert any("names of timm" in warning for warning in warnings) is is_told


@every("name", ["megatron-qwen3", "megatron-qwen3_moe", "megatron-gemma2", "torchtune-gemma2", "torchtitan-qwen3"])
def test_a_llama_does_not_pass_for_another_model_in_silence(name: str, tmp_path: Path) -> None:
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    names = [f"self_attn.{part}" for part in attention] + [f"mlp.{part}" for part in mlp]
    llama = {f"model.layers.0.{part}.weight": torch.ones(4, 4) for part in names}
    llama |= {f"model.layers.0.{part}_layernorm.weight": torch.ones(4) for part in ("input", "post_attention")}
    save_file(llama, tmp_path / "a.safetensors")
    sizes = {"v": 8, "h": 4, "q": 1, "d": 2, "k": 1, "n": 2, "g": 2}
    warnings = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=name, size=sizes).warnings
    (doubt,) = (warning for warning in warnings if "Is this the right map?" in warning)
    assert f"the map {name} expects " in doubt


@verifying
def test_openai_names_are_right_next_to_a_configuration_of_open_clip(tmp_path: Path) -> None:
    blocks = [f"{part}.{leaf}" for part in ("ln_1", "ln_2", "attn.out_proj", "mlp.c_fc") for leaf in ("weight", "bias")]
    blocks += ["attn.in_proj_weight", "attn.in_proj_bias", "mlp.c_proj.weight", "mlp.c_proj.bias"]
    trees = ("transformer", "visual.transformer")
    names = ["visual.proj", "visual.conv1.weight", "text_projection", "logit_scale", "token_embedding.weight"]
    names += [f"{tree}.resblocks.{layer}.{block}" for tree in trees for layer in range(2) for block in blocks]
    torch.save({"state_dict": {name: torch.ones(1) for name in names}}, tmp_path / "epoch_5.pt")
    given: tuple[Path, Path] = (tmp_path / "epoch_5.pt", tmp_path / "out")
    warnings = convert(given[0], tmp_path / "without", for_hub=True).warnings
    (warning,) = (text for text in warnings if "names of" in text)
    assert warning.startswith("The output has names of openai")
    (tmp_path / "open_clip_config.json").write_text("{}")
    assert convert(*given, for_hub=True).warnings == []
    written = {path.name for path in given[1].iterdir()}
    assert written == {"open_clip_model.safetensors", "open_clip_config.json"}
    assert verify(*given, for_hub=True).tensors == len(names)
    # With the configuration of transformers as well, it is not known whose names are meant.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(UsageError, match="names of openai"):
        convert(*given, for_hub=True, overwrite=True)


@verifying
def test_an_output_with_names_of_another_program_than_open_clip_has_the_usual_name(tmp_path: Path) -> None:
    torch.save({"text.a": torch.ones(2)}, tmp_path / "open_clip_pytorch_model.bin")
    (tmp_path / "map.toml").write_text('[[rule]]\nopenai = "text.a"\nhf = "text_model.a"\n')
    given: tuple[Path, Path] = (tmp_path / "open_clip_pytorch_model.bin", tmp_path / "out")
    convert(*given, map=tmp_path / "map.toml", copy_config=False)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"text_model.a"}
    assert verify(*given).tensors == 1

"""What a configuration says of layers, experts and modules is true of a part, or is an error that names the key."""

from __future__ import annotations

import math
from typing import Any

import pytest
from effort import every

from ckptconv.errors import CkptconvError, CorruptError, UsageError
from ckptconv.features.model_parts.cutting import Asked, cut
from ckptconv.features.model_parts.editing import edited
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Zeros

Config = dict[str, Any]
F32 = DTYPES["float32"]


def model(layers: int = 6, experts: int = 0, place: str = "model.layers") -> dict[str, LazyTensor]:
    """A model with so many layers, and experts in each."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, 4)}
    for number in range(layers):
        shapes[f"{place}.{number}.norm.weight"] = (4,)
        shapes |= {f"{place}.{number}.mlp.experts.{expert}.up.weight": (4, 4) for expert in range(experts)}
        shapes |= {f"{place}.{number}.mlp.gate.weight": (experts, 4)} if experts else {}
    return {name: Zeros(F32, shape) for name, shape in shapes.items()}


def told(config: Config, layers: tuple[int, ...] = (), tensors: Any = None, **asked: Any) -> Config:
    """What a configuration says of a part of a model of six layers, or of these `tensors`."""
    made = cut(Asked(layers, **asked), tensors or model(), config, "x")
    return edited(config, made.facts).config


FIRST, OTHERS, TURNED = (0, 1, 2), (1, 4, 5), (4, 0)
SIX = {"num_hidden_layers": 6}
LETTERS = ["a", "b", "c", "d", "e", "f"]


@every(
    "layers, before, after",
    [
        (FIRST, {"num_hidden_layers": 6}, {"num_hidden_layers": 3}),
        (FIRST, {"n_layer": 6, "num_layers": 6}, {"n_layer": 3, "num_layers": 3}),
        # One that has the number by chance, and what others have.
        (
            FIRST,
            {**SIX, "num_attention_heads": 6, "max_window": 6},
            {"num_hidden_layers": 3, "num_attention_heads": 6, "max_window": 6},
        ),
        (
            FIRST,
            {**SIX, "vision_config": {"num_hidden_layers": 6}},
            {"num_hidden_layers": 3, "vision_config": {"num_hidden_layers": 6}},
        ),
        (
            FIRST,
            {**SIX, "draft": {"model_type": "x", "n_layer": 6}},
            {"num_hidden_layers": 3, "draft": {"model_type": "x", "n_layer": 6}},
        ),
        (
            OTHERS,
            {"text_config": {"model_type": "t", **SIX}},
            {"text_config": {"model_type": "t", "num_hidden_layers": 3}},
        ),
        # Lists and texts with an entry for each layer, also without a number.
        (OTHERS, {"layer_types": LETTERS}, {"layer_types": ["b", "e", "f"]}),
        (TURNED, {"layer_types": LETTERS}, {"layer_types": ["e", "a"]}),
        (
            OTHERS,
            {**SIX, "intermediate_size": [1, 2, 3, 4, 5, 6]},
            {"num_hidden_layers": 3, "intermediate_size": [2, 5, 6]},
        ),
        (OTHERS, {**SIX, "no_rope_layers": [1, 1, 0, 1, 1, 0]}, {"num_hidden_layers": 3, "no_rope_layers": [1, 1, 0]}),
        (OTHERS, {"hybrid_override_pattern": "M-M*-E"}, {"hybrid_override_pattern": "--E"}),
        (
            OTHERS,
            {**SIX, "architectures": LETTERS, "eos_token_id": [1] * 6},
            {"num_hidden_layers": 3, "architectures": LETTERS, "eos_token_id": [1] * 6},
        ),
        # Lists of numbers of layers, and a text of them.
        (OTHERS, {**SIX, "mlp_only_layers": [0, 4]}, {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
        (TURNED, {**SIX, "full_attn_idxs": [0, 2, 4]}, {"num_hidden_layers": 2, "full_attn_idxs": [0, 1]}),
        (OTHERS, {**SIX, "moe_layers": [0, 1, 2, 3, 4, 5]}, {"num_hidden_layers": 3, "moe_layers": [0, 1, 2]}),
        (OTHERS, {**SIX, "moe_layers_enum": "3,4,5"}, {"num_hidden_layers": 3, "moe_layers_enum": "1,2"}),
        (OTHERS, {**SIX, "mlp_only_layers": []}, {"num_hidden_layers": 3, "mlp_only_layers": []}),
        (
            OTHERS,
            {**SIX, "per_layer_config": {"1": {"a": 1}, "2": {}}},
            {"num_hidden_layers": 3, "per_layer_config": {"0": {"a": 1}}},
        ),
        (
            OTHERS,
            {**SIX, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
            {"num_hidden_layers": 3, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
        ),
        # Groups of layers, of which the first computes what the others take.
        (
            (0, 3, 4),
            {**SIX, "kv_reuse_group": [[1, 2], [3, 4]]},
            {"num_hidden_layers": 3, "kv_reuse_group": [[1, 2]]},
        ),
        (FIRST, {**SIX, "block_types": ["r", "r", "a"]}, {"num_hidden_layers": 3, "block_types": ["r", "r", "a"]}),
        # Rules over the numbers stay where the first layers are kept, or become what says the same.
        (
            FIRST,
            {**SIX, "first_k_dense_replace": 5, "max_window_layers": 6},
            {"num_hidden_layers": 3, "first_k_dense_replace": 5, "max_window_layers": 6},
        ),
        (OTHERS, {**SIX, "first_k_dense_replace": 2}, {"num_hidden_layers": 3, "first_k_dense_replace": 1}),
        (
            OTHERS,
            {**SIX, "moe_layer_start_index": 2, "moe_layer_end_index": 4},
            {"num_hidden_layers": 3, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
        ),
        ((1, 3, 5), {**SIX, "full_attention_interval": 2}, {"num_hidden_layers": 3, "full_attention_interval": 1}),
        ((0, 2, 4), {**SIX, "decoder_sparse_step": 2}, {"num_hidden_layers": 3, "decoder_sparse_step": 4}),
        ((0, 2, 4), {**SIX, "moe_layer_freq": 2}, {"num_hidden_layers": 3, "moe_layer_freq": 1}),
        (
            (2, 3),
            {**SIX, "attn_layer_offset": 1, "attn_layer_period": 3},
            {"num_hidden_layers": 2, "attn_layer_offset": 2, "attn_layer_period": 3},
        ),
        (FIRST, {**SIX, "attn_layer_period": 0}, {"num_hidden_layers": 3, "attn_layer_period": 0}),
        (OTHERS, {**SIX, "num_kv_shared_layers": 3}, {"num_hidden_layers": 3, "num_kv_shared_layers": 2}),
        (FIRST, {**SIX, "num_kv_shared_layers": 3}, {"num_hidden_layers": 3, "num_kv_shared_layers": 0}),
        (
            (3, 1, 5),
            {**SIX, "sliding_window_pattern": "LLG"},
            {"num_hidden_layers": 3, "sliding_window_pattern": "LLG"},
        ),
        (OTHERS, {**SIX, "num_blocks": 6, "num_things": 6}, {"num_hidden_layers": 3, "num_blocks": 3, "num_things": 6}),
        (
            FIRST,
            {**SIX, "num_last_full_attention_layers": 2},
            {"num_hidden_layers": 3, "num_last_full_attention_layers": 0},
        ),
        # Two programs read this key, each in a way of its own.
        ((2, 3), {**SIX, "global_attn_every_n_layers": 2}, {"num_hidden_layers": 2, "global_attn_every_n_layers": 2}),
        (FIRST, {**SIX, "layer_group_size": 3}, {"num_hidden_layers": 3, "layer_group_size": 3}),
        (
            FIRST,
            {**SIX, "rescale_every": 2, "rope_base_freq": 9},
            {"num_hidden_layers": 3, "rescale_every": 2, "rope_base_freq": 9},
        ),
        # What programs divide by the root of the number of layers.
        (FIRST, {**SIX, "scale_depth": 2.0}, {"num_hidden_layers": 3, "scale_depth": 2.0 * math.sqrt(0.5)}),
        (
            OTHERS,
            {**SIX, "conv_dim": {"0": 1, "1": 2, "2": 3, "3": 4, "4": 5, "5": 6}},
            {"num_hidden_layers": 3, "conv_dim": {"0": 2, "1": 5, "2": 6}},
        ),
        # A list that says the same of each layer goes before.
        (
            (0, 2, 5),
            {**SIX, "index_topk_freq": 2, "indexer_types": LETTERS},
            {"num_hidden_layers": 3, "index_topk_freq": 2, "indexer_types": ["a", "c", "f"]},
        ),
        (
            (0, 2, 5),
            {"full_attention_interval": 3, "layer_types": LETTERS},
            {"full_attention_interval": 3, "layer_types": ["a", "c", "f"]},
        ),
    ],
)
def test_keys_about_layers_follow_them(layers: tuple[int, ...], before: Config, after: Config) -> None:
    assert told(before, layers) == after
    assert list(told(before, layers)) == list(before)


@every(
    "layers, config, words",
    [
        (FIRST, {}, ["number of layers, 6 in the weights"]),
        (FIRST, {"num_hidden_layers": 7}, ["num_hidden_layers 7", "6 layers"]),
        (FIRST, {**SIX, "layer_types": LETTERS[:5]}, ["layer_types has length 5", "6 layers"]),
        (FIRST, {**SIX, "intermediate_size": [8, 9]}, ["intermediate_size has length 2", "6 layers"]),
        (FIRST, {**SIX, "kda_layers": [2, 4, 6]}, ["kda_layers has length 3"]),
        (FIRST, {"hybrid_override_pattern": "M-M*-E-"}, ["hybrid_override_pattern", "length 7"]),
        ((3, 0), {**SIX, "first_k_dense_replace": 2}, ["first_k_dense_replace 2", "layers 3,0"]),
        ((0, 1, 3), {**SIX, "full_attention_interval": 2}, ["full_attention_interval 2"]),
        ((0, 1, 3), {**SIX, "sliding_window_pattern": "LLG"}, ["sliding_window_pattern 'LLG'"]),
        ((5, 0), {**SIX, "num_kv_shared_layers": 2}, ["num_kv_shared_layers 2"]),
        ((0, 1, 2, 3), {**SIX, "layer_group_size": 3}, ["layer_group_size 3"]),
        ((1, 2), {**SIX, "global_attn_every_n_layers": 3}, ["global_attn_every_n_layers 3"]),
        (FIRST, {**SIX, "last_dense_layers": 1}, ["last_dense_layers 1"]),
        (OTHERS, {**SIX, "scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        (OTHERS, {**SIX, "index_topk_freq": 2}, ["index_topk_freq 2"]),
        (OTHERS, {**SIX, "indexer_types": ["full", "shared"] * 3}, ["indexer_types 'shared' for layer 1"]),
        (OTHERS, {**SIX, "kv_reuse_group": [[1, 2], [3, 4]]}, ["kv_reuse_group", "use results of its first layer"]),
        ((2, 1), {**SIX, "kv_reuse_group": [[1, 2]]}, ["kv_reuse_group", "use results of its first layer"]),
        (OTHERS, {**SIX, "cla_share_factor": 2}, ["cla_share_factor 2"]),
        (OTHERS, {**SIX, "n_layers_per_block": 2}, ["n_layers_per_block 2"]),
        (OTHERS, {**SIX, "moe_layer_offset_of_something": 3}, ["moe_layer_offset_of_something 3"]),
        (
            (0, 5),
            {**SIX, "text_config": {"num_hidden_layers": 5}, "num_nextn_predict_layers": 1},
            ["contradicts itself", "text_config.num_hidden_layers 5"],
        ),
    ],
)
def test_what_cannot_be_true_of_the_layers_is_an_error(
    layers: tuple[int, ...], config: Config, words: list[str]
) -> None:
    with pytest.raises(CkptconvError) as error:
        told(config, layers)
    assert [word for word in words if word not in str(error.value)] == []


@every(
    "layers, config, is_told",
    [
        (OTHERS, {"sliding_window": 4}, True),
        (FIRST, {"sliding_window": 4}, False),
        (OTHERS, {"sliding_window": None}, False),
        (OTHERS, {"sliding_window": 4, "use_sliding_window": False}, False),
        (OTHERS, {"sliding_window": 4, "layer_types": LETTERS}, False),
        ((3, 4, 5), {"sliding_window": 4, "sliding_window_pattern": 3}, False),
    ],
)
def test_a_window_of_layers_that_are_not_named_is_a_warning(
    layers: tuple[int, ...], config: Config, is_told: bool
) -> None:
    whole = {**SIX, **config}
    told = edited(whole, cut(Asked(layers), model(), whole, "x").facts).warnings
    assert [text for text in told if "sliding_window 4, but does not list the layers" in text] == [*told]
    assert bool(told) == is_told


@every("kept, is_told", [((0, 2, 5, 7), False), ((0, 1, 2, 5), True), ((4, 5, 0, 1), True)])
def test_experts_that_are_grouped_otherwise_are_a_warning(kept: tuple[int, ...], is_told: bool) -> None:
    whole = {"num_experts": 8, "n_group": 2}
    told = edited(whole, cut(Asked(experts=(kept,)), model(2, 8), whole, "x").facts).warnings
    assert ["config.json has n_group 2" in text for text in told] == [True] * is_told


@every("key, value", [("global_head_dim", 512), ("per_layer_config", {"1": {"head_dim": 512}}), ("head_dim", 64)])
def test_a_last_layer_that_programs_take_for_another_kind_is_an_error(key: str, value: Any) -> None:
    """As those of Gemma 4 do; others read what the configuration says of it."""
    whole = {**SIX, "layer_types": ["sliding_attention", "full_attention"] * 3, key: value}
    assert told(whole, (0, 1))["layer_types"] == ["sliding_attention", "full_attention"]
    if key == "head_dim":
        assert told(whole, FIRST)["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
        return
    with pytest.raises(UsageError, match=r"layer_types sliding_attention for layer 2, .* read the last layer as full"):
        told(whole, FIRST)


EXPERTS = {"n_routed_experts": 8, "num_hidden_layers": 2}


@every(
    "kept, before, after",
    [
        (range(4), {"num_experts": 8, "num_experts_per_tok": 2}, {"num_experts": 4, "num_experts_per_tok": 2}),
        (
            range(4),
            {"num_local_experts": 8, "n_group": 2, "topk_group": 1},
            {"num_local_experts": 4, "n_group": 2, "topk_group": 1},
        ),
        (range(4), {"moe_num_experts": [8, 8]}, {"moe_num_experts": [4, 4]}),
        (range(4), {"num_experts": [0, 8]}, {"num_experts": [0, 4]}),
        (range(4), {"num_experts": [16, 8]}, r"num_experts \[16, 8\], but the weights have 8"),
        (range(4), {"num_experts": 8, "num_heads": 8, "top_k": 50}, {"num_experts": 4, "num_heads": 8, "top_k": 50}),
        (range(4), {"num_experts": 7}, "num_experts 7, but the weights have 8"),
        (range(2), {"num_experts": 8, "num_experts_per_tok": 3}, "num_experts_per_tok 3, but the part has 2"),
        (range(3), {"num_experts": 8, "n_group": 2}, "but the part has 3 experts"),
        (
            range(4),
            {"num_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 2},
            "uses 2 experts of 1 group, ",
        ),
        (range(4), {"hidden_size": 8}, "number of experts, 8 in the weights"),
    ],
)
def test_keys_about_experts_follow_them(kept: range, before: Config, after: Any) -> None:
    tensors = model(2, 8)
    if "top_k" in before:  # what sampling takes
        before = {**before, "num_experts_per_tok": 2}
        after = {**after, "num_experts_per_tok": 2}
    if isinstance(after, str):
        with pytest.raises((UsageError, CorruptError), match=after):
            told(before, tensors=tensors, experts=(tuple(kept),))
    else:
        assert told(before, tensors=tensors, experts=(tuple(kept),)) == after


@every(
    "before, after",
    [
        (["lm_head", "Linear"], ["lm_head", "Linear"]),
        (["model.layers.4.mlp.gate", "model.layers.3.mlp.gate", "layers.1"], ["model.layers.1.mlp.gate", "layers.0"]),
        (["model.layers.4.mlp.experts.6.up", "model.layers.4.mlp.experts.1.up"], ["model.layers.1.mlp.experts.2.up"]),
        (["model.visual.blocks.4", "mtp.layers.0.fc"], ["model.visual.blocks.4", "mtp.layers.0.fc"]),
        (["re:.*lm_head", "re:.*mlp.gate$", "*.layers.*.mlp.*", r"re:.*layers\.\d+\.w1"], None),
        (["model.layers.4.*", "model.layers.3.*"], ["model.layers.1.*"]),
        ({r"-:model\.layers\.4\..*": {}, r"+:model\.layers\.3\..*": {}}, {r"-:model\.layers\.1\..*": {}}),
        ({"model.layers.4.mlp": {"bits": 8}, "model.layers.0.mlp": {"bits": 4}}, {"model.layers.1.mlp": {"bits": 8}}),
        (
            {"group_0": {"targets": ["model.layers.4.q"], "weights": {"num_bits": 4}}},
            {"group_0": {"targets": ["model.layers.1.q"], "weights": {"num_bits": 4}}},
        ),
        (["re:.*layers.4.mlp"], "re:.*layers.4.mlp"),
        (["model.layers.4*"], "model.layers.4"),
        ([r"re:model\.layers\.[0-3]\..*"], "may refer to layers"),
        ({r"+:.*\.4\..*": {}}, "may refer to layers"),
    ],
)
def test_names_of_quantized_modules_follow_them(before: Any, after: Any) -> None:
    tensors, experts = model(6, 8), ((2, 4, 6),)
    config = {**SIX, "num_experts": 8, "quantization_config": {"ignore": before, "quant_method": "x"}}
    if isinstance(after, str):
        with pytest.raises(UsageError) as error:
            told(config, (1, 4), tensors, experts=experts)
        assert after in str(error.value)
        # Where nothing has another number, a pattern means what it meant.
        assert told(config, (0, 1, 2, 3, 4), tensors)["quantization_config"]["ignore"] == before
        return
    found = told(config, (1, 4), tensors, experts=experts)["quantization_config"]["ignore"]
    assert found == (before if after is None else after)

"""Rules over the numbers of layers in configurations, by key: the layers for which each holds. Pure.

Sources: `configuration_*.py` and `modeling_*.py` of transformers' models.
"""

from __future__ import annotations

# Lists with an entry for each layer, of which one may say the same as a rule: the rule is not read next to it.
KINDS, MLPS, _ROPES = ("layer_types", "layers_block_type"), ("mlp_layer_types", "moe_layers"), ("no_rope_layers",)


def _before(layer: int, value: int, count: int) -> bool:
    return layer < value


def _through(layer: int, value: int, count: int) -> bool:
    return value < 0 or layer <= value


def _every(layer: int, value: int, count: int) -> bool:
    return value > 0 and (layer + 1) % value == 0


def _from(layer: int, value: int, count: int) -> bool:
    return value > 0 and layer % value == 0


def _last(layer: int, value: int, count: int) -> bool:
    return layer >= count - value


def in_period(layer: int, value: tuple[int, int], count: int) -> bool:
    return layer % value[0] == value[1]


def _closing(layer: int, value: int, count: int) -> bool:
    """Return whether a layer closes a group, or is in the rest after the last whole group."""
    return value > 0 and (_every(layer, value, count) or layer >= count // value * value)


# Rules over the numbers of layers: keys, whether one with a value holds of a layer of so many, and the lists that may
# say the same. Of a key to which programs give two meanings, both have to hold.
RULES = {
    key: (meanings, lists)
    for keys, meanings, lists in (
        ("first_k_dense_replace num_dense_layers n_dense_layers moe_layer_start_index", (_before,), MLPS),
        ("moe_layer_end_index", (_through,), MLPS),
        ("interleave_moe_layer_step decoder_sparse_step moe_layer_interval", (_every,), MLPS),
        ("moe_layer_freq", (_from,), MLPS),
        ("max_window_layers num_first_full_attention_layers", (_before,), KINDS),
        ("full_attention_interval sliding_window_pattern", (_every,), KINDS),
        ("global_attn_every_n_layers", (_every, _from), KINDS),
        ("layer_group_size", (_every, _closing), KINDS),
        ("num_last_full_attention_layers", (_last,), KINDS),
        ("no_rope_layer_interval", (_every,), _ROPES),
        ("num_kv_shared_layers", (_last,), ()),
        ("index_topk_freq index_skip_topk_offset", (), ("indexer_types",)),
    )
    for key in keys.split()
}
# Keys of a period, and of the offset of its first layer; and keys of lists with an entry for each layer of a period.
PERIODS = {"attn_layer_period": "attn_layer_offset", "expert_layer_period": "expert_layer_offset"}
PERIODIC = ("block_types", "_block_types")

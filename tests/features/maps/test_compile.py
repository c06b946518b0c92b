"""Maps: the layouts of real models, element by element, against numpy's reshape and transpose."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from effort import every
from features.maps.mapping import Checkpoint, numbered, same, values

from ckptconv.errors import CkptconvError, CorruptError, UsageError
from ckptconv.features.maps.compile import Applied, apply_map
from ckptconv.features.maps.file import parse_map
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Narrow, Stored
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import contiguous_strides


def there_and_back(
    path: Path, text: str, there: Mapping[str, np.ndarray], back: Mapping[str, np.ndarray], **sizes: int
) -> Applied:
    """Check that the map makes `back` of `there` and, with the sizes found on the way, `there` of `back`."""
    map_ = parse_map(text, "test.toml")
    result = apply_map(map_, Checkpoint(path / "there", there).tensors, sizes=sizes)
    same(values(result.tensors), back)
    again = apply_map(map_, Checkpoint(path / "back", back).tensors, sizes=result.sizes)
    same(values(again.tensors), there)
    return result


QKV = """
[[rule]]
megatron = ["decoder.layers.{l}.self_attention.linear_qkv.weight : (g (q + k + v) d) h"]
hf = ["model.layers.{l}.self_attn.q_proj.weight : (g q d) h",
      "model.layers.{l}.self_attn.k_proj.weight : (g k d) h",
      "model.layers.{l}.self_attn.v_proj.weight : (g v d) h"]
[sizes]
g = ["num_key_value_heads", "num_attention_heads"]
d = ["head_dim", "hidden_size / num_attention_heads"]
k = 1
v = 1
"""


LINEAR_QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def test_joined_attention(tmp_path: Path) -> None:
    g, q, d, h = 2, 3, 4, 5
    there, back = {}, {}
    for layer in (0, 1, 10):
        joined = np.random.default_rng(layer).permutation(g * (q + 2) * d * h).astype("i4")
        there[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = joined.reshape(-1, h)
        groups = joined.reshape(g, q + 2, d, h)
        for name, rows in (("q", slice(q)), ("k", slice(q, q + 1)), ("v", slice(q + 1, None))):
            back[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = groups[:, rows].reshape(-1, h)
    there_and_back(tmp_path, QKV, there, back, g=g, d=d)


def test_gated_attention(tmp_path: Path) -> None:
    text = """
    [[rule]]
    a = "qkv : (g (q + p + k + v) d) h"
    b = ["qg : ((g q d) + (g p d)) h", "k : (g k d) h", "v : (g v d) h"]
    [sizes]
    k = 1
    v = 1
    """
    g, q, d, h = 2, 3, 4, 5
    qkv = numbered(qkv=(g * (2 * q + 2) * d, h))["qkv"]
    groups = qkv.reshape(g, 2 * q + 2, d, h)
    back = {
        "qg": np.concatenate([groups[:, :q].reshape(-1, h), groups[:, q : 2 * q].reshape(-1, h)]),
        "k": groups[:, 2 * q].reshape(-1, h),
        "v": groups[:, 2 * q + 1].reshape(-1, h),
    }
    there_and_back(tmp_path, text, {"qkv": qkv}, back, g=g, d=d, p=q)


def test_rotary_halves(tmp_path: Path) -> None:
    text = """
    [[rule]]
    titan = "layers.{l}.attention.wq.weight : (n e two) h"
    hf = "model.layers.{l}.self_attn.q_proj.weight : (n two e) h"
    [sizes]
    n = "num_attention_heads"
    two = 2
    """
    there = numbered(**{"layers.0.attention.wq.weight": (12, 5)})
    wq = there["layers.0.attention.wq.weight"]
    back = {"model.layers.0.self_attn.q_proj.weight": wq.reshape(3, 2, 2, 5).transpose(0, 2, 1, 3).reshape(12, 5)}
    there_and_back(tmp_path, text, there, back, n=3)


EXPERTS = """
[[rule]]
hf4 = ["mlp.experts.{e}.gate_proj.weight : f h", "mlp.experts.{e}.up_proj.weight : f h"]
hf5 = "mlp.experts.gate_up_proj : e (f + f) h"
[[rule]]
hf4 = "mlp.experts.{e}.down_proj.weight : h f"
hf5 = "mlp.experts.down_proj : e f h"
"""


def test_stacked_experts(tmp_path: Path) -> None:
    names = [f"mlp.experts.{e}.{kind}_proj.weight" for e in range(3) for kind in ("gate", "up", "down")]
    there = numbered(**{name: (5, 4) if "down" in name else (4, 5) for name in names})
    back = {
        "mlp.experts.gate_up_proj": np.stack(
            [
                np.concatenate([there[f"mlp.experts.{e}.{kind}_proj.weight"] for kind in ("gate", "up")])
                for e in range(3)
            ]
        ),
        "mlp.experts.down_proj": np.stack([there[f"mlp.experts.{e}.down_proj.weight"].T for e in range(3)]),
    }
    there_and_back(tmp_path, EXPERTS, there, back)


def test_ranks_joined_inside_an_axis(tmp_path: Path) -> None:
    text = """
    [[rule]]
    ranks = "rank{r}.w : o h"
    whole = "w : (r o) h"
    [[rule]]
    ranks = "rank{r}.u : h o"
    whole = "u : h (o r)"
    """
    there = numbered(**{f"rank{r}.{name}": (3, 4) for r in range(3) for name in "wu"})
    w, u = ([there[f"rank{r}.{name}"] for r in range(3)] for name in "wu")
    back = {"w": np.concatenate(w), "u": np.stack(u, axis=2).reshape(3, 12)}
    there_and_back(tmp_path, text, there, back, r=3)


def test_padding_is_dropped_and_zero_on_the_way_back(tmp_path: Path) -> None:
    text = '[[rule]]\nmegatron = "word.weight : (v + _) h"\nhf = "embed.weight : v h"\n[sizes]\nv = "vocab_size"\n'
    array = numbered(w=(8, 3))["w"]
    padded = np.concatenate([array[:5], np.zeros((3, 3), "i4")])
    result = there_and_back(tmp_path, text, {"word.weight": padded}, {"embed.weight": array[:5]}, v=5)
    assert result.padding == {"word.weight": 9}
    assert result.sizes["1._"] == 3


@every(
    "text, there, sizes, error, told",
    [
        (QKV, {LINEAR_QKV: (10, 4)}, {"g": 3, "d": 1}, UsageError, "linear_qkv"),
        (QKV, {LINEAR_QKV: (12, 4)}, {}, UsageError, "--size"),
        (QKV, {LINEAR_QKV: (12,)}, {}, UsageError, "2 dimensions"),
        (QKV, {"model.layers.0.self_attn.q_proj.weight": (4, 4)}, {"g": 1, "d": 4}, UsageError, "k_proj"),
        (EXPERTS, {"mlp.experts.0.down_proj.weight": (4, 4), "mlp.experts.2.down_proj.weight": (4, 4)}, {},
         CorruptError, r"experts\.1\.down_proj"),
        (EXPERTS, {"mlp.experts.0.down_proj.weight": (4, 4), "mlp.experts.999999999.down_proj.weight": (4, 4)}, {},
         CorruptError, r"experts\.1\.down_proj"),
        (EXPERTS, {"mlp.experts.0.down_proj.weight": (4, 4), "norm.weight": (4,)}, {}, UsageError, r"norm\.weight"),
        (EXPERTS, {"mlp.experts.0.down_proj.weight": (4, 4), "mlp.experts.1.down_proj.weight": (4, 5)}, {},
         UsageError, r"experts\.1\.down_proj"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_that_names_it(
    tmp_path: Path,
    text: str,
    there: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    error: type[Exception],
    told: str,
) -> None:
    tensors = Checkpoint(tmp_path / "there", numbered(**there)).tensors
    with pytest.raises(error, match=told):
        apply_map(parse_map(text, "test.toml"), tensors, sizes=sizes)


def test_all_sizes_that_lack_are_asked_for_at_once_and_a_configuration_first(tmp_path: Path) -> None:
    rules = '[[rule]]\na = "x : (e f) h"\nb = "y : (f e) h"\n[[rule]]\na = "z : (v + _) h"\nb = "w : v h"\n'
    text = f'{rules}[[rule]]\na = "u"\nb = "t"\n[sizes]\ne = "num_heads"\n'
    tensors = Checkpoint(tmp_path / "there", numbered(y=(8, 2), w=(3, 2), t=(1,))).tensors
    with pytest.raises(
        UsageError, match=r"^The shapes do not determine the sizes of e and _ for 'y' \(.*rule \d"
    ) as caught:
        apply_map(parse_map(text, "test.toml"), tensors)
    assert caught.value.hint == (
        "Give convert's option --config config.json for e, put a config.json next to the checkpoint, give --like "
        "REF, or give --size e=NUMBER (num_heads in config.json) --size _=NUMBER (rows of padding to add, for "
        "example to a vocabulary; 0 for none)."
    )
    assert apply_map(parse_map(text, "test.toml"), tensors, sizes={"e": 2, "_": 0}).tensors.keys() == {"x", "z", "u"}


@every(
    "text, there, told",
    [
        ('[[rule]]\na = "x : e f"\nb = "y.{e} : f"', {"x": (1 << 40, 0)}, "more than"),
        ('[[rule]]\na = "x : e"\nb = "y : (e + _)"\n[sizes]\n_ = 9000000000000000000', {"x": (8,)}, "be counted"),
        (
            "".join(f'[[rule]]\na = "{{i}}{i}.x"\nb = "{{i}}{i}.y"\n' for i in range(9)),
            {"x": (1,)},
            "more than 8 patterns",
        ),
    ],
)
def test_a_map_that_asks_for_too_much_is_refused(
    tmp_path: Path, text: str, there: Mapping[str, tuple[int, ...]], told: str
) -> None:
    tensors = {
        name: Stored(File(str(tmp_path / "none"), 0), 0, DTYPES["int32"], shape, contiguous_strides(shape))
        for name, shape in there.items()
    }
    with pytest.raises(CkptconvError, match=told):
        apply_map(parse_map(text, "test.toml"), tensors)


def test_a_dimension_that_is_joined_of_parts_is_cut_where_they_end(tmp_path: Path) -> None:
    """As when ranks hold rows that do not end with a group."""
    text = '[[rule]]\na = "x : (g (q + k) d) h"\nb = ["q : (g q d) h", "k : (g k d) h"]\n[sizes]\nk = 1\n'
    arrays = numbered(x=(2 * 4 * 3, 5))
    whole = Checkpoint(tmp_path / "x", arrays).tensors["x"]
    map_ = parse_map(text, "test.toml")
    expected = values(apply_map(map_, {"x": whole}, sizes={"g": 2, "d": 3}).tensors)
    for cuts in ((0, 7, 24), (0, 1, 2, 23, 24), (0, 12, 24)):
        parts = tuple(Narrow(whole, 0, low, high - low) for low, high in itertools.pairwise(cuts))
        same(values(apply_map(map_, {"x": Concat(parts)}, sizes={"g": 2, "d": 3}).tensors), expected)


def test_rules_that_rename_do_not_need_sizes_that_others_lack(tmp_path: Path) -> None:
    map_ = parse_map(
        '[[rule]]\na = "x"\nb = "y"\n[[rule]]\na = "v : (n d)"\nb = "w : n d"\n[sizes]\nn = "heads"', "test"
    )
    with pytest.raises(UsageError, match="--size n=NUMBER"):
        apply_map(map_, Checkpoint(tmp_path / "there", numbered(x=(3,), v=(4,))).tensors)


LATER = """
[[rule]]
megatron = "decoder.layers.{l}.norm.weight"
hf = "model.layers.{l}.norm.weight"
[[rule]]
megatron = "mtp.layers.{i}.norm.weight"
hf = "model.layers.{i + count}.norm.weight"
[[rule]]
megatron = "mtp.layers.{i}.experts.{e + 1} : o h"
hf = "model.layers.{i + count}.experts : e o h"
"""


def test_names_that_count_from_a_number_on(tmp_path: Path) -> None:
    there = numbered(
        **{f"decoder.layers.{at}.norm.weight": (3,) for at in (0, 1)},
        **{f"mtp.layers.{at}.norm.weight": (3,) for at in (0, 1)},
        **{f"mtp.layers.0.experts.{e}": (2, 3) for e in (1, 2)},
    )
    back = {
        **{f"model.layers.{at}.norm.weight": there[f"decoder.layers.{at}.norm.weight"] for at in (0, 1)},
        **{f"model.layers.{at + 2}.norm.weight": there[f"mtp.layers.{at}.norm.weight"] for at in (0, 1)},
        "model.layers.2.experts": np.stack([there[f"mtp.layers.0.experts.{e}"] for e in (1, 2)]),
    }
    result = there_and_back(tmp_path, LATER, there, back, count=2)
    assert result.sizes["count"] == 2


@every(
    "name, told",
    [("mtp.layers.0.norm.weight", "--size count=NUMBER"), ("mtp.layers.x.norm.weight", r"mtp\.layers\.x")],
)
def test_what_names_add_has_to_be_known_where_it_is_used(tmp_path: Path, name: str, told: str) -> None:
    map_ = parse_map(LATER, "test.toml")
    other = {"decoder.layers.0.norm.weight": (3,)}
    assert apply_map(map_, Checkpoint(tmp_path / "there", numbered(**other)).tensors).tensors
    with pytest.raises(UsageError, match=told):
        apply_map(map_, Checkpoint(tmp_path / "more", numbered(**other, **{name: (3,)})).tensors)


def test_an_index_stands_for_several_parts_where_no_rule_has_the_name_otherwise(tmp_path: Path) -> None:
    text = """
    [[rule]]
    a = "{name}.LayerNorm.gamma"
    b = "{name}.LayerNorm.weight"
    [[rule]]
    a = "base.{module}.lora_{side}.default.weight"
    b = "{module}.lora_{side}.weight"
    [[rule]]
    a = "h.{l}.{p}"
    b = "layers.{l}.{p}"
    """
    names = {
        "embeddings.LayerNorm.gamma": "embeddings.LayerNorm.weight",
        "encoder.0.output.LayerNorm.gamma": "encoder.0.output.LayerNorm.weight",
        "base.model.layers.0.q_proj.lora_A.default.weight": "model.layers.0.q_proj.lora_A.weight",
        "h.0.scale": "layers.0.scale",
    }
    there = numbered(**dict.fromkeys(names, (2,)))
    there_and_back(tmp_path, text, there, {names[name]: array for name, array in there.items()})


@every("name", ["h.0.mlp.scale", "h.0.1.scale", "base.0.q.lora_A.default.weight"])
def test_an_index_stands_for_one_part_where_names_say_so(tmp_path: Path, name: str) -> None:
    """So that a rule that is missing is noticed: a layer is no layer and what is below it."""
    text = '[[rule]]\na = "h.{l}.{p}"\nb = "layers.{l}.{p}"\n'
    text += '[[rule]]\na = "base.{module}.lora_{side}.default.weight"\nb = "{module}.lora_{side}.weight"\n'
    tensors = Checkpoint(tmp_path / "there", numbered(**{"h.0.scale": (2,), name: (2,)})).tensors
    with pytest.raises(UsageError, match=re.escape(repr(name))):
        apply_map(parse_map(text, "test.toml"), tensors)

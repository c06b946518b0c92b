"""Layouts of models that no map comes with, written in the notation, against slices of numpy as the models' own code
takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from effort import every
from features.maps.mapping import Checkpoint, numbered, same, values

from ckptconv import UsageError
from ckptconv.features.maps.compile import apply_map
from ckptconv.features.maps.file import parse_map

Arrays = Mapping[str, np.ndarray]


def _rule(one: str, other: str, sizes: str = "") -> str:
    return f"[[rule]]\na = [{one}]\nb = [{other}]\n[sizes]\n{sizes}"


def _interleaved(given: Arrays) -> dict[str, np.ndarray]:
    """gpt-oss: gate and up of an expert in every second column."""
    w, b = given["gate_up"], given["bias"]
    return {
        "gate": w[..., ::2].transpose(0, 2, 1),
        "up": w[..., 1::2].transpose(0, 2, 1),
        "gate_bias": b[..., ::2],
        "up_bias": b[..., 1::2],
    }


def _by_expert(given: Arrays) -> dict[str, np.ndarray]:
    w = given["gate_up"]
    return {
        f"{expert}.{name}": w[expert][:, start::2].T
        for expert in range(len(w))
        for start, name in enumerate(("gate", "up"))
    }


def _gated(given: Arrays) -> dict[str, np.ndarray]:
    """Qwen3-Next in Megatron-core: of each group q, the gate of q, k and v; in transformers q and gate by head."""
    w = given["qkv"].reshape(2, 3 + 3 + 1 + 1, 4, 5)
    q, gate = w[:, :3].reshape(6, 4, 5), w[:, 3:6].reshape(6, 4, 5)
    return {
        "q": np.concatenate([q.reshape(24, 5), gate.reshape(24, 5)]),
        "k": w[:, 6].reshape(8, 5),
        "v": w[:, 7].reshape(8, 5),
    }


def _by_head(given: Arrays) -> dict[str, np.ndarray]:
    w = given["qkv"].reshape(2, 3 + 3 + 1 + 1, 4, 5)
    q, gate = w[:, :3].reshape(6, 4, 5), w[:, 3:6].reshape(6, 4, 5)
    return {
        "q": np.concatenate([q, gate], 1).reshape(48, 5),
        "k": w[:, 6].reshape(8, 5),
        "v": w[:, 7].reshape(8, 5),
    }


def _linear_attention(given: Arrays) -> dict[str, np.ndarray]:
    """Qwen3-Next's gated delta net: of each key head its q and k, and the v and z of its value heads."""
    w = given["qkvz"].reshape(2, 3 + 3 + 2 * 4 + 2 * 4, 5)
    return {
        "qkv": np.concatenate([w[:, :3].reshape(6, 5), w[:, 3:6].reshape(6, 5), w[:, 6:14].reshape(16, 5)]),
        "z": w[:, 14:].reshape(16, 5),
    }


def _by_thirds(given: Arrays) -> dict[str, np.ndarray]:
    """GPT-NeoX and BLOOM: q, k and v of each head."""
    w = given["query_key_value"].reshape(3, 3, 4, 5)
    return {name: w[:, at].reshape(12, 5) for at, name in enumerate("qkv")}


def _phi(given: Arrays) -> dict[str, np.ndarray]:
    """Phi-3: all of q, then k, then v."""
    q, k, v = np.split(given["qkv_proj"], [12, 16])
    return {"q": q, "k": k, "v": v}


def _latent(given: Arrays) -> dict[str, np.ndarray]:
    """DeepSeek's kv_b_proj: of each head the keys, and after them the values, as vLLM takes them apart."""
    w = given["kv_b"].reshape(3, 4 + 2, 5)
    return {"k": w[:, :4], "v": w[:, 4:].transpose(0, 2, 1)}


def _grouped(given: Arrays) -> dict[str, np.ndarray]:
    """Megatron-core's GroupedMLP: the columns of all experts two adjacent indices."""
    w = given["weight1"].reshape(5, 3, 2, 4)
    return {f"{expert}.{name}": w[:, expert, half].T for expert in range(3) for half, name in enumerate(("gate", "up"))}


@every(
    "given, rule, make, told",
    [
        (
            {"gate_up": (3, 5, 8), "bias": (3, 8)},
            _rule(
                '"gate_up : e h (f (1 + 1))", "bias : e (f (1 + 1))"',
                '"gate : e f h", "up : e f h", "gate_bias : e f", "up_bias : e f"',
            ),
            _interleaved,
            {},
        ),
        (
            {"gate_up": (3, 5, 8)},
            _rule('"gate_up : e h (f (1 + 1))"', '"{e}.gate : f h", "{e}.up : f h"'),
            _by_expert,
            {},
        ),
        (
            {"gate_up": (3, 5, 8)},
            _rule('"gate_up : e h (f (g + u))"', '"{e}.gate : (f g) h", "{e}.up : (f u) h"', "g = 1\nu = 1"),
            _by_expert,
            {},
        ),
        (
            {"qkv": (64, 5)},
            _rule(
                '"qkv : (g (q + p + k + v) d) h"',
                '"q : ((g q d) + (g p d)) h", "k : (g k d) h", "v : (g v d) h"',
                'k = 1\nv = 1\np = "q"',
            ),
            _gated,
            {"g": 2, "q": 3},
        ),
        (
            {"qkv": (64, 5)},
            _rule('"qkv : (g (q + q + 1 + 1) d) h"', '"q : (g q (d + d)) h", "k : (g d) h", "v : (g d) h"'),
            _by_head,
            {"g": 2, "d": 4},
        ),
        (
            {"qkvz": (44, 5)},
            _rule('"qkvz : (n (k + k + r v + r v)) h"', '"qkv : (n k + n k + n r v) h", "z : (n r v) h"'),
            _linear_attention,
            {"n": 2, "k": 3, "r": 2},
        ),
        (
            {"query_key_value": (36, 5)},
            _rule('"query_key_value : (n (1 + 1 + 1) d) h"', '"q : (n d) h", "k : (n d) h", "v : (n d) h"'),
            _by_thirds,
            {"n": 3},
        ),
        (
            {"qkv_proj": (20, 5)},
            _rule('"qkv_proj : (n d + g d + g d) h"', '"q : (n d) h", "k : (g d) h", "v : (g d) h"'),
            _phi,
            {"n": 3, "g": 1},
        ),
        ({"kv_b": (18, 5)}, _rule('"kv_b : (n (k + v)) c"', '"k : n k c", "v : n c v"'), _latent, {"n": 3, "k": 4}),
        (
            {"weight1": (5, 24)},
            _rule('"weight1 : h (e (f + f))"', '"{e}.gate : f h", "{e}.up : f h"'),
            _grouped,
            {"e": 3},
        ),
    ],
    ids=[
        "gpt-oss", "gpt-oss by expert", "gpt-oss by named halves", "gated attention", "gated attention by head",
        "gated delta net", "GPT-NeoX", "Phi-3", "latent keys and values", "grouped experts",
    ],
)  # fmt: skip
def test_layouts(
    given: dict[str, tuple[int, ...]],
    rule: str,
    make: Callable[[Arrays], dict[str, np.ndarray]],
    told: dict[str, int],
    tmp_path: Path,
) -> None:
    there, map_ = numbered(**given), parse_map(rule, "test.toml")
    back = make(there)
    result = apply_map(map_, Checkpoint(tmp_path / "there", there).tensors, sizes=told, target="b")
    same(values(result.tensors), back)
    again = apply_map(map_, Checkpoint(tmp_path / "back", back).tensors, sizes=told, target="a")
    same(values(again.tensors), there)


def test_the_padding_to_add_is_told_how_to_be_given(tmp_path: Path) -> None:
    map_ = parse_map('[[rule]]\na = "x : (v + _) h"\nb = "y : v h"\n', "test.toml")
    tensors = Checkpoint(tmp_path / "x", numbered(y=(3, 2))).tensors
    with pytest.raises(UsageError, match=r"Give --size _=NUMBER \(rows of padding to add, .*; 0 for none\)"):
        apply_map(map_, tensors, target="a")

"""The maps that come with ckptconv make, bit by bit, what the frameworks' own converters made of tiny models.

`scripts/record_maps.py` recorded that, and `make test-maps` compares it with the frameworks as they are now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from compare import evaluate
from effort import every
from safetensors.numpy import load_file

from ckptconv.errors import UsageError
from ckptconv.features.maps.compile import Applied, apply_map
from ckptconv.features.maps.file import catalogue, from_catalogue
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import contiguous_strides

DATA = Path(__file__).parent / "data"
CASES = sorted(place.name for place in DATA.iterdir())


class Case:
    """A recorded case, as `scripts/maps/cases.py` describes it."""

    def __init__(self, name: str) -> None:
        self.place = DATA / name
        told = json.loads((self.place / "case.json").read_text())
        self.map = from_catalogue(told["map"])
        self.config = json.loads((self.place / "config.json").read_text())
        self.sizes, self.lost = told["sizes"], set(told["lost"])
        self.ours, self.hf = (load_file(self.place / f"{each}.safetensors") for each in ("ours", "hf"))
        back = self.place / "back.safetensors"
        kept = {} if told.get("computed") else self.ours
        self.back = {name: array for name, array in kept.items() if name not in self.lost}
        self.back |= load_file(back) if back.exists() else {}


def lazy(arrays: Mapping[str, np.ndarray], path: Path) -> dict[str, LazyTensor]:
    """Write arrays to a file; return the lazy tensors that are these arrays."""
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    path.write_bytes(data)
    file, at, made = File(str(path), len(data)), 0, {}
    for name, array in arrays.items():
        made[name] = Stored(file, at, DTYPES[array.dtype.name], array.shape, contiguous_strides(array.shape))
        at += array.nbytes
    return made


def check(result: Applied, expected: Mapping[str, np.ndarray]) -> None:
    assert result.tensors.keys() == expected.keys()
    for name, tensor in result.tensors.items():
        assert tensor.shape == expected[name].shape, name
        array = np.frombuffer(evaluate(tensor), expected[name].dtype).reshape(tensor.shape)
        np.testing.assert_array_equal(array, expected[name], name)


@every("name", CASES)
def test_the_map_makes_what_the_framework_makes(name: str, tmp_path: Path) -> None:
    case = Case(name)
    _ours, hf = case.map.sides
    there = apply_map(case.map, lazy(case.ours, tmp_path / "ours"), config=case.config, target=hf)
    check(there, case.hf)
    assert set(there.dropped) == case.lost


@every("name", CASES)
def test_the_map_makes_of_that_what_the_framework_had(name: str, tmp_path: Path) -> None:
    case = Case(name)
    ours, hf = case.map.sides
    # What only the way there tells: how many ranks there were, and how much padding.
    told = apply_map(case.map, lazy(case.ours, tmp_path / "ours"), config=case.config, target=hf).sizes
    back = apply_map(case.map, lazy(case.hf, tmp_path / "hf"), config=case.config, target=ours, sizes=told)
    check(back, case.back)


# Names that a framework had in other releases, or has with other layers: the recorded name, and the other.
OTHER_NAMES = (
    ("torchtitan-llama3", {"attention.qkv_linear.": "attention.", "lm_head": "output"}),
    ("torchtitan-qwen3", {"attention.qkv_linear.": "attention.", "lm_head": "output"}),
    (
        "torchtitan-deepseek_v3",
        {"moe.routed_experts.inner_experts.": "moe.experts.", "_EFD": "", "_EDF": "", "bias_E": "bias"},
    ),
    (
        "megatron-llama",
        {
            "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
            "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
        },
    ),
    (
        "megatron-deepseek_v3",
        {"linear_q_up_proj.layer_norm_": "q_layernorm.", "linear_kv_up_proj.layer_norm_": "kv_layernorm."},
    ),
)


@every("name, others", OTHER_NAMES)
def test_the_map_reads_other_names_too(name: str, others: Mapping[str, str], tmp_path: Path) -> None:
    case = Case(name)
    renamed = {}
    for each, array in case.ours.items():
        for one, other in others.items():
            each = each.replace(one, other)
        renamed[each] = array
    assert renamed.keys() != case.ours.keys()
    check(apply_map(case.map, lazy(renamed, tmp_path / "ours"), config=case.config, target="hf"), case.hf)


def test_every_map_has_a_recorded_case() -> None:
    assert {Case(name).map.name for name in CASES} == {*catalogue()}


@every("one, other", [("meta-llama3", "meta-llama2"), ("meta-llama2", "meta-llama3")])
@every("told", ["params.json", "nothing", "params.json, of the embeddings alone"])
def test_the_files_of_one_llama_are_no_other(one: str, other: str, told: str, tmp_path: Path) -> None:
    case = Case(f"{one}-tp2")
    params = {"dim": 24, "n_heads": 6, "vocab_size": 38 if one == "meta-llama3" else -1}
    ours = {name: each for name, each in case.ours.items() if "embed" in name or "alone" not in told}
    config, sizes = ({}, {"e": 2}) if told == "nothing" else (params, {})
    with pytest.raises(UsageError, match=r"the shape of|the sizes imply|a whole number"):
        apply_map(from_catalogue(other), lazy(ours, tmp_path / "ours"), config=config, sizes=sizes, target="hf")


def test_what_nothing_tells_is_said(tmp_path: Path) -> None:
    ours = {name: each for name, each in Case("meta-llama3-tp2").ours.items() if "embed" in name}
    made = apply_map(from_catalogue("meta-llama2"), lazy(ours, tmp_path / "ours"), target="hf")
    (told,) = made.unchecked
    assert told.startswith("columns = 24 follows from the shape of '0.tok_embeddings.weight' alone")

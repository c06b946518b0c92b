"""What PEFT's names mean: every tensor of an adapter is one part of one module, or the adapter is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from effort import every
from hypothesis import given
from hypothesis import strategies as st

from ckptconv import CkptconvError, CorruptError, UnsupportedError, UsageError
from ckptconv.features.merge.peft import PREFIX, Module, parsed
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Zeros


def tensors(*names: str, prefix: str = PREFIX, shape: tuple[int, ...] = (2, 2)) -> dict[str, LazyTensor]:
    return {f"{prefix}{name}": Zeros(DTYPES["float32"], shape) for name in names}


def parts_of(module: Module) -> list[LazyTensor]:
    """All tensors that a module holds."""
    found = [*module.whole.values()]
    for pair in module.factors:
        found += [pair.left, pair.right, *([pair.bias] if pair.bias is not None else [])]
    return [*found, *(each for each in (module.lengths, module.rows) if each is not None)]


SAVED = ("a.lora_A.weight", "a.lora_B.weight")
TRAINED = ("a.lora_A.default.weight", "a.lora_B.default.weight")
OTHER = ("a.lora_A.reference.weight", "a.lora_B.reference.weight")


def test_saved_and_trained_names_are_one() -> None:
    for names in (SAVED, TRAINED):
        (module,) = parsed("x", tensors(*names)).values()
        assert len(module.factors) == 1


def test_of_several_adapters_the_one_that_is_meant_is_taken() -> None:
    both = tensors(*TRAINED, *OTHER, "h.modules_to_save.default.weight", "h.modules_to_save.reference.weight", "b.bias")
    with pytest.raises(UsageError, match="2 adapters: 'default', 'reference'") as refused:
        parsed("x", both)
    assert "--adapter default" in refused.value.hint
    for name in ("default", "reference"):
        found = parsed("x", both, name)
        assert found["a"].factors[0].right is both[f"{PREFIX}a.lora_A.{name}.weight"]
        assert found["h"].whole["weight"] is both[f"{PREFIX}h.modules_to_save.{name}.weight"]
        assert found["b"].whole.keys() == {"bias"}
    with pytest.raises(UsageError, match="no adapter 'third'"):
        parsed("x", both, "third")


def test_what_a_wrapper_holds_beside_what_was_trained_is_the_bases() -> None:
    names = ("h.original_module.weight", "h.modules_to_save.default.weight", "e.original_module.weight")
    rows = ("t.token_adapter.trainable_tokens_delta.default", "t.token_adapter.trainable_tokens_original.default")
    given = tensors(*names, *rows)
    found = parsed("x", given)
    assert found["h"].whole["weight"] is given[f"{PREFIX}h.modules_to_save.default.weight"]
    assert found["e"].whole["weight"] is given[f"{PREFIX}e.original_module.weight"]
    assert found["t"].rows is given[f"{PREFIX}{rows[0]}"]


CONFLICTS = {
    "two prefixes": (tensors(*SAVED) | tensors(*SAVED, prefix=f"module.{PREFIX}"), CorruptError, "several models"),
    "a weight and what is wrapped": (tensors("a.weight", "a.base_layer.weight"), CorruptError, "the same part"),
    "an embedding and none": (
        tensors(*SAVED, "a.lora_embedding_A", "a.lora_embedding_B"), CorruptError, "one of them is for an embedding.",
    ),
    "with a name and without": (tensors(*SAVED, *TRAINED), CorruptError, "the name of an adapter and some without:"),
    "one factor": (tensors(SAVED[0]), CorruptError, "but not both factors \\(A and B\\) of 'a'"),
    "the factor of another adapter": (tensors(TRAINED[0], OTHER[1]), UsageError, "2 adapters"),
    "lengths alone": (tensors("a.lora_magnitude_vector"), CorruptError, "no factors"),
    "a name without the prefix": (tensors(*SAVED, prefix="model."), UnsupportedError, "base_model.model."),
    "a projection without its attention": (
        tensors("a.base_layer.out_proj.lora_A.weight", "a.base_layer.out_proj.lora_B.weight"),
        UnsupportedError, "only an adapted nn.MultiheadAttention",
    ),
    "a bias of the first factor": (tensors(*SAVED, "a.lora_A.bias"), UnsupportedError, "not a known LoRA factor"),
    "factors in one dimension": (tensors(*SAVED, shape=(4,)), CorruptError, "but a matrix with elements was"),
    "empty factors": (tensors(*SAVED, shape=(0, 4)), CorruptError, "but a matrix with elements was"),
    "kohya": (tensors("lora_unet_x.lora_down.weight", prefix=""), UnsupportedError, "an adapter of kohya's"),
    "diffusers": (tensors("unet.x.lora_A.weight", prefix=""), UnsupportedError, "an adapter of diffusers"),
    "MLX": (tensors("model.layers.0.q_proj.lora_a", prefix=""), UnsupportedError, "an adapter of MLX"),
    "a very long name": (tensors("a." * 2000 + "lora_A.weight"), UnsupportedError, "is not supported"),
}  # fmt: skip


@every("case", CONFLICTS)
def test_what_two_readers_would_read_differently_is_refused(case: str) -> None:
    given, kind, words = CONFLICTS[case]
    with pytest.raises(kind, match=words):
        parsed("x", given)


@every("dtype", ["float8_e4m3fn", "bool", "complex64", "int32", "uint8"])
def test_factors_are_floats_of_16_bits_and_more(dtype: str) -> None:
    given = {f"{PREFIX}{name}": Zeros(DTYPES[dtype], (2, 2)) for name in SAVED}
    with pytest.raises(UnsupportedError, match=rf"is {dtype}"):
        parsed("x", given)


WORDS = st.sampled_from(
    ["a", "b", "0", "weight", "bias", "default", "reference", "base_layer", "original_module", "modules_to_save",
     "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "token_adapter",
     "trainable_tokens_delta", "trainable_tokens_original", "base_model", "model"]
)  # fmt: skip
NAMES = st.lists(WORDS, min_size=1, max_size=6).map(".".join)


@given(st.lists(NAMES, min_size=1, max_size=8, unique=True), st.sampled_from(["", "default", "reference"]))
def test_every_tensor_is_used_once_or_refused(names: list[str], wanted: str) -> None:
    made: dict[str, Any] = tensors(*names)
    try:
        found = parsed("x", made, wanted)
    except CkptconvError:
        return
    used = Counter(id(each) for module in found.values() for each in parts_of(module))
    assert not used or max(used.values()) == 1
    for name, tensor in made.items():
        is_own = "original" in name
        is_other = any(f".{each}" in name for each in ("default", "reference") if each != wanted)
        assert id(tensor) in used or is_own or is_other, name

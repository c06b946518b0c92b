"""Names of tensors tell what is an adapter."""

from __future__ import annotations

from ckptconv.formats.adapter_names import is_adapter


def test_adapters_are_known_by_their_factors() -> None:
    for names in (("a.lora_A.weight", "a.lora_B.weight"), ("e.lora_embedding_A",)):
        assert is_adapter({f"base_model.model.{name}": None for name in names})
    for name in ("a.weight", "lora_proj.weight", "a.lora_norm.weight"):
        assert not is_adapter({f"base_model.model.{name}": None})

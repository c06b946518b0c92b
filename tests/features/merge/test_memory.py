"""Names that transformers has in memory lead to those of files, as its own conversion mapping says."""

from __future__ import annotations

import re

import pytest
from cells import of_features
from checkpoints import DATA
from effort import every

from ckptconv.features.merge.memory import Family, InFiles, families
from ckptconv.options.table import OPTIONS
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Zeros


def family(kind: str, name: str) -> Family:
    """The family of this type of model that knows a name."""
    return next(each for each in families() if kind in each.called and next(each.in_files(name), None))


FILES = [
    ("llava", "lm_head.weight", "language_model.lm_head.weight"),
    ("llava", "model.language_model.layers.3.mlp.up_proj.weight", "language_model.model.layers.3.mlp.up_proj.weight"),
    ("gemma3", "model.vision_tower.x.weight", "vision_tower.x.weight"),
    ("qwen2_vl", "model.language_model.norm.weight", "model.norm.weight"),
    ("qwen2_vl", "model.visual.blocks.7.attn.qkv.bias", "visual.blocks.7.attn.qkv.bias"),
    ("vit", "vit.layers.11.attention.q_proj.weight", "vit.encoder.layer.11.attention.attention.query.weight"),
    ("vit", "vit.layers.11.mlp.fc2.bias", "vit.encoder.layer.11.output.dense.bias"),
    ("mixtral", "model.layers.2.mlp.gate.weight", "model.layers.2.block_sparse_moe.gate.weight"),
]


@every("kind, memory, file", FILES)
def test_other_names_are_in_files(kind: str, memory: str, file: str) -> None:
    assert next(family(kind, memory).in_files(memory)) == InFiles((file,))


def test_a_stack_is_a_tensor_for_each_expert() -> None:
    mixtral = family("mixtral", "model.layers.3.mlp.experts.down_proj")
    assert {*mixtral.stacks_of("model.layers.3.mlp.experts")} == {"gate_up_proj", "down_proj"}
    found = next(mixtral.in_files("model.layers.3.mlp.experts.gate_up_proj"))
    assert found.stacked
    names = "model.layers.3.block_sparse_moe.experts.7.w1.weight", "model.layers.3.block_sparse_moe.experts.7.w3.weight"
    assert found.of_expert(7) == names
    assert not list(mixtral.stacks_of("model.layers.3.self_attn"))
    assert not list(mixtral.in_files("model.layers.3.self_attn.q_proj.weight"))


def test_parts_of_one_tensor_are_all_of_it() -> None:
    """What is cut in memory has each part once."""
    table = (DATA.parents[1] / "ckptconv/features/merge/memory.txt").read_text()
    cut = re.findall(r"^\S+ = \S+ (\d+)/(\d+)$", table, re.MULTILINE)
    assert cut
    for text in table.split("\n\n"):
        files: dict[str, list[tuple[int, int]]] = {}
        for file, part, parts in re.findall(r"^\S+ = (\S+) (\d+)/(\d+)$", text, re.MULTILINE):
            files.setdefault(file, []).append((int(part), int(parts)))
        for file, found in files.items():
            assert sorted(found) == [(part, len(found)) for part in range(len(found))], file


def test_every_line_of_the_table_is_a_rule() -> None:
    for each in families():
        assert each.called
        for rule in each._rules:
            assert all(rule.memory)
            assert rule.files is None or all(rule.files.names) or rule.files.names == ("",)


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
@every("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_they_are_the_names_that_the_map_makes(kind: str) -> None:
    (maps,) = of_features("MAPS")
    files: dict[str, LazyTensor] = {}
    module = "model.layers.3.mlp.experts"
    found = family(kind, f"{module}.down_proj")
    for parameter in found.stacks_of(module):
        each = next(found.in_files(f"{module}.{parameter}"))
        for number in range(2):
            for name in each.of_expert(number):
                files[name] = Zeros(DTYPES["float32"], (4, 6) if parameter == "gate_up_proj" else (6, 4))
    made = maps["apply"](maps["named"](f"transformers5-{kind}"), files, sizes={}, config={}, target="v5").tensors
    shapes = {name: tensor.shape for name, tensor in made.items()}
    assert shapes == {f"{module}.gate_up_proj": (2, 8, 6), f"{module}.down_proj": (2, 6, 4)}

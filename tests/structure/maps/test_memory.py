"""Names that transformers has in memory lead to those of files, as the maps of the catalogue say."""

from __future__ import annotations

import pytest

from ckptconv.structure.maps.compile import apply_map
from ckptconv.structure.maps.file import from_catalogue
from ckptconv.structure.maps.memory import in_files, stacks_of
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Zeros


def test_a_stack_is_a_tensor_for_each_expert() -> None:
    assert stacks_of("model.layers.3.mlp.experts") == ("gate_up_proj", "down_proj")
    names = {str(name.of({files.stack: 7})) for files in in_files("x.1.mlp.experts.down_proj") for name in files.names}
    assert names == {"x.1.mlp.experts.7.down_proj.weight", "x.1.block_sparse_moe.experts.7.w2.weight"}


def test_other_names_may_be_in_files() -> None:
    (found,) = in_files("model.layers.2.mlp.gate.weight")
    assert (str(found.names[0]), found.stack) == ("model.layers.2.block_sparse_moe.gate.weight", "")
    assert not list(in_files("model.layers.2.self_attn.q_proj.weight"))
    assert not stacks_of("model.layers.2.self_attn")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_they_are_the_names_that_the_map_makes(kind: str) -> None:
    files: dict[str, LazyTensor] = {}
    for parameter in stacks_of("model.layers.3.mlp.experts"):
        found = list(in_files(f"model.layers.3.mlp.experts.{parameter}"))
        each = next(each for each in found if ("block_sparse" in str(each.names[0])) == (kind == "mixtral"))
        for number in range(2):
            for name in each.names:
                shape = (4, 6) if parameter == "gate_up_proj" else (6, 4)
                files[name.of({each.stack: number})] = Zeros(DTYPES["float32"], shape)
    made = apply_map(from_catalogue(f"transformers5-{kind}"), files, sizes={}, config={}, target="v5").tensors
    shapes = {name: tensor.shape for name, tensor in made.items()}
    begin = "model.layers.3.mlp.experts"
    assert shapes == {f"{begin}.gate_up_proj": (2, 8, 6), f"{begin}.down_proj": (2, 6, 4)}

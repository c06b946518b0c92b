"""Which part of a tensor a rank holds: as torch itself cuts tensors."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptconv.features.joining.layouts import Distribution, Mesh, MeshCut, boxes, by_shards, extents, spans


@st.composite
def layouts(draw: Any) -> Distribution:
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=2)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cut = st.builds(MeshCut, st.integers(0, len(shape) - 1), st.integers(1, 4))
    placements = tuple(draw(st.one_of(st.none(), cut)) for _ in mesh)
    return Distribution(Mesh(tuple(range(int(torch.tensor(mesh).prod()))), mesh), placements, shape)


def torchs(layout: Distribution, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The elements, by number, that torch gives to the rank at `coordinate`."""
    held = torch.arange(int(torch.tensor(layout.shape).prod())).reshape(layout.shape)
    for at, cut in enumerate(layout.placements):
        if cut is not None:
            place: Any = _StridedShard(cut.dim, split_factor=cut.factor) if cut.factor > 1 else Shard(cut.dim)
            held = place._split_tensor(held, layout.mesh.shape[at], with_padding=False)[0][coordinate[at]]
    return held


@examples(60)
@given(layouts())
def test_each_rank_holds_what_torch_gives_it(layout: Distribution) -> None:
    numbers = torch.arange(int(torch.tensor(layout.shape).prod())).reshape(layout.shape)
    for coordinate in product(*map(range, layout.mesh.shape)):
        held = spans(layout, coordinate)
        theirs = torchs(layout, coordinate)
        assert extents(held) == tuple(theirs.shape)
        for box in boxes(held):
            there = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            here = tuple(slice(at, at + size) for at, size in zip(box.inside, box.sizes, strict=True))
            assert torch.equal(numbers[there], theirs[here])


def test_strides_are_the_same_cuts_in_another_order_where_the_extent_is_divisible() -> None:
    """Tensor parallelism cuts first, and FSDP then, though its mesh dimension is the first."""
    mesh = Mesh(tuple(range(8)), (4, 2))
    for extent, same in ((16, True), (9, False)):
        strided = Distribution(mesh, (MeshCut(0, 2), MeshCut(0)), (extent,))
        other = by_shards(strided)
        assert other is not None
        assert other.order == (1, 0)
        every = list(product(range(4), range(2)))
        assert all(spans(strided, at) == spans(other, at) for at in every) is same


def test_a_split_factor_that_no_order_of_the_mesh_makes_has_no_other_order() -> None:
    assert by_shards(Distribution(Mesh(tuple(range(4)), (2, 2)), (MeshCut(0, 3), MeshCut(0)), (12,))) is None

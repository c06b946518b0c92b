"""Lazy tensors: whatever the expression and whatever the interval, the moves make exactly its bytes."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from cells import of_features
from compare import evaluate
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ckptconv.tensors.computing import Bits, Join, Joined
from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.geometry import tiles
from ckptconv.tensors.lazy import (
    Concat,
    Convert,
    Inline,
    LazyTensor,
    Narrow,
    Partitioned,
    Picked,
    Stored,
    Tagged,
    TensorFacts,
    View,
    Zeros,
    same_bytes,
)
from ckptconv.tensors.moves import File, Runs, Swap
from ckptconv.tensors.slices import Span, Steps, reshaped_strides, sliced, strided
from ckptconv.tensors.strides import contiguous_strides, is_contiguous

SIZE = 40_000
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, dtype="u1")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    path = tmp_path_factory.mktemp("tensors") / "content"
    path.write_bytes(CONTENT.tobytes())
    return File(str(path), SIZE)


def reference(tensor: LazyTensor) -> np.ndarray:
    """The tensor's bytes, one more dimension than it has, from the definition of each expression."""
    item = tensor.dtype.itemsize
    if isinstance(tensor, Stored):
        strides = (*(stride * item for stride in tensor.strides), 1)
        return np.lib.stride_tricks.as_strided(CONTENT[tensor.offset :], (*tensor.shape, item), strides).copy()
    if isinstance(tensor, Partitioned):
        pieces = [CONTENT[base + tensor.offset :][: tensor.piece * item] for base in tensor.bases]
        return np.concatenate(pieces)[: tensor.nbytes].reshape(*tensor.shape, item)
    if isinstance(tensor, Inline):
        return np.frombuffer(tensor.data, "u1").reshape(*tensor.shape, item)
    if isinstance(tensor, Concat):
        return np.concatenate([reference(part) for part in tensor.parts], axis=tensor.dim)
    if isinstance(tensor, Narrow):
        return reference(tensor.tensor).take(range(tensor.start, tensor.start + tensor.length), axis=tensor.dim)
    if isinstance(tensor, View):
        return reference(tensor.tensor).reshape(*tensor.shape, item)
    if isinstance(tensor, Convert) and isinstance(tensor.kernel, Bits):
        return reference(tensor.tensor)[..., -1:]
    if isinstance(tensor, Convert):
        return reference(tensor.tensor)[..., ::-1]
    if isinstance(tensor, Joined) and not isinstance(tensor.kernel, Join):
        return np.asarray(CHANGED[type(tensor.kernel)]([reference(part) for part in tensor.parts]))
    if isinstance(tensor, Joined):
        return np.concatenate([reference(part) for part in tensor.parts], axis=-1)
    if isinstance(tensor, Picked):
        elements = reference(tensor.tensor).reshape(-1, item)
        indices = np.full((), tensor.start)
        for extent, stride in zip(tensor.shape, tensor.strides, strict=True):
            indices = indices[..., None] + np.arange(extent) * stride
        return elements[indices] if tensor.numel else np.zeros((*tensor.shape, item), "u1")
    if isinstance(tensor, Zeros):
        return np.zeros((*tensor.shape, item), "u1")
    raise TypeError(tensor)


def at(array: np.ndarray, spans: tuple[Span, ...]) -> np.ndarray:
    """The elements of an array at these indices of its first dimensions."""
    for dim, (start, step, length) in enumerate(spans):
        array = array.take([start + step * index for index in range(length)], axis=dim)
    return array


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Span, ...]:
    spans = []
    for extent in shape:
        step = draw(st.integers(1, 3))
        start = draw(st.integers(0, max(extent - 1, 0)))
        spans.append(Span(start, step, draw(st.integers(0, -(-(extent - start) // step)))))
    return tuple(spans)


def picked(tensor: LazyTensor, spans: tuple[Span, ...]) -> Picked:
    within = contiguous_strides(tensor.shape)
    start = sum(span.start * stride for span, stride in zip(spans, within, strict=True))
    strides = tuple(span.step * stride for span, stride in zip(spans, within, strict=True))
    return Picked(tensor, start, tuple(span.length for span in spans), strides)


@st.composite
def leaves(draw: st.DrawFn, file: File) -> LazyTensor:
    dtype = DTYPES[draw(st.sampled_from(["uint8", "int16", "float32"]))]
    kind = draw(st.sampled_from(["stored", "strided", "partitioned", "inline", "zeros"]))
    if kind == "partitioned":
        world, numel = draw(st.integers(1, 5)), draw(st.integers(1, 60))
        bases = tuple(draw(st.integers(0, 20_000)) for _ in range(world))
        offset = draw(st.integers(0, 100))
        return Partitioned((file,) * world, bases, offset, -(-numel // world), dtype, (numel,))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    if kind == "inline":
        count = int(np.prod(shape)) * dtype.itemsize
        return Inline(draw(st.binary(min_size=count, max_size=count)), dtype, shape)
    if kind == "zeros":
        return Zeros(dtype, shape)
    strides = contiguous_strides(shape)
    if kind == "strided":
        wider = contiguous_strides(tuple(extent + draw(st.integers(0, 2)) for extent in shape))
        strides = tuple(draw(st.permutations(wider)))
        strides = tuple(0 if draw(st.integers(0, 9)) == 0 else stride for stride in strides)
    return Stored(file, draw(st.integers(0, 1000)), dtype, shape, strides)


# Kernels of features that change bytes: how they are joined of bytes, others, and pairs of bytes; and what they make.
CHANGES = list(itertools.chain(*of_features("CHANGES")))
CHANGED = {kernel: made for each in of_features("CHANGED") for kernel, made in each.items()}
STEPS = ("concat", "narrow", "view", "swap", "last byte", "join", "pick", "slice")


def flipped(tensor: LazyTensor) -> tuple[bytes, DType, tuple[int, ...]]:
    """The fields of a tensor of as many bytes, none of which is zero."""
    return bytes(at % 255 + 1 for at in range(tensor.nbytes)), DTYPES["uint8"], tensor.shape


@st.composite
def expressions(draw: st.DrawFn, file: File) -> LazyTensor:
    tensor = draw(leaves(file))
    for step in draw(st.lists(st.sampled_from(STEPS), max_size=3)):
        if step in ("concat", "narrow") and tensor.shape:
            dim = draw(st.integers(0, len(tensor.shape) - 1))
            cuts = []
            for _ in range(draw(st.integers(1, 3)) if step == "concat" else 1):
                start = draw(st.integers(0, tensor.shape[dim]))
                cuts.append(Narrow(tensor, dim, start, draw(st.integers(0, tensor.shape[dim] - start))))
            tensor = Concat((tensor, *cuts), dim) if step == "concat" else cuts[0]
        elif step == "view":
            tensor = View(tensor, tensor.dtype, (tensor.numel,))
        elif step == "pick":
            tensor = picked(tensor, draw(slices(tensor.shape)))
        elif step == "slice":
            tensor = sliced(tensor, draw(slices(tensor.shape)))
        elif step == "swap":
            tensor = Convert(tensor, Swap(tensor.dtype.itemsize), tensor.dtype)
        elif step == "last byte":
            item = tensor.dtype.itemsize
            tensor = Convert(tensor, Bits(item, 8 * (item - 1), 8, 1), DTYPES["uint8"])
        elif step == "join" and tensor.dtype.itemsize < 8:
            # Of two numbers, the bytes of one before those of the other.
            item = tensor.dtype.itemsize
            kernel = Join(((item, 0, 8 * item), (item, 8 * item, 8 * item)), 2 * item)
            wide = {1: "int16", 2: "int32", 4: "int64"}[item]
            twice = Joined((tensor, View(tensor, tensor.dtype, tensor.shape)), kernel, DTYPES[wide])
            if item == 1 and CHANGES and draw(st.booleans()):
                tensor = draw(st.sampled_from(CHANGES))(tensor, Inline(*flipped(tensor)), twice)
            else:
                tensor = twice
    return tensor


@examples(250, *HealthCheck)
@given(data=st.data())
def test_moves_make_every_byte_of_any_interval_exactly_once(file: File, data: st.DataObject) -> None:
    tensor = data.draw(expressions(file))
    whole = np.ascontiguousarray(reference(tensor)).tobytes()
    start = data.draw(st.integers(0, tensor.nbytes))
    stop = data.draw(st.one_of(st.just(tensor.nbytes), st.integers(start, tensor.nbytes)))
    order = data.draw(st.sampled_from(["output", "source"]))
    limit = data.draw(st.sampled_from([16, 64, 256, 1 << 20]))
    assert tensor.shape == reference(tensor).shape[:-1]
    assert evaluate(tensor, start, stop, order, limit) == whole[start:stop]


@examples(200, *HealthCheck)
@given(data=st.data())
def test_a_slice_is_the_elements_at_its_indices(file: File, data: st.DataObject) -> None:
    tensor = data.draw(expressions(file))
    spans = data.draw(slices(tensor.shape))
    part = sliced(tensor, spans)
    expected = at(reference(tensor), spans)
    assert (part.dtype, part.shape) == (tensor.dtype, expected.shape[:-1])
    assert evaluate(part) == np.ascontiguousarray(expected).tobytes()


@examples(200, *HealthCheck)
@given(data=st.data())
def test_several_steps_along_one_dimension_are_several_dimensions(file: File, data: st.DataObject) -> None:
    tensor = data.draw(expressions(file))
    starts, axes = [], []
    indices = [np.zeros((), int) for _ in tensor.shape]
    if 0 in tensor.shape:
        return
    for dim, extent in enumerate(tensor.shape):
        starts.append(data.draw(st.integers(0, extent - 1)))
        room = extent - 1 - starts[-1]
        for _ in range(data.draw(st.integers(0, 2))):
            step = data.draw(st.integers(1, 4))
            length = data.draw(st.integers(1, 1 + room // step))
            room -= (length - 1) * step
            axes.append(Steps(length, dim, step))
    axes = data.draw(st.permutations(axes))
    made = strided(tensor, starts, axes)
    for dim in range(len(indices)):
        for axis in axes:
            along = np.arange(axis.length) * axis.step if axis.dim == dim else np.zeros(axis.length, int)
            indices[dim] = indices[dim][..., None] + along
        indices[dim] = indices[dim] + starts[dim]
    expected = reference(tensor)[tuple(indices)] if indices else reference(tensor)
    assert (made.dtype, made.shape) == (tensor.dtype, expected.shape[:-1])
    assert evaluate(made) == np.ascontiguousarray(expected).tobytes()


@examples(100)
@given(data=st.data())
def test_strides_of_another_shape_are_of_the_same_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    strides = tuple(data.draw(st.permutations(contiguous_strides(shape))))
    factors = [factor for extent in shape for factor in {1: [], 4: [2, 2]}.get(extent, [extent])]
    wanted: list[int] = []
    while factors:
        count = data.draw(st.integers(1, len(factors)))
        wanted.append(int(np.prod(factors[:count])))
        factors = factors[count:]
    found = reshaped_strides(shape, strides, wanted)
    as_strided = np.lib.stride_tricks.as_strided
    numbers = np.arange(1000)
    elements = as_strided(numbers, shape, [8 * stride for stride in strides]).reshape(-1)
    if found is not None:
        np.testing.assert_array_equal(as_strided(numbers, wanted, [8 * each for each in found]).reshape(-1), elements)
    else:
        assert strides != contiguous_strides(shape)


def test_columns_are_cut_within_an_element_where_the_interval_is(file: File) -> None:
    column = Stored(file, 0, DTYPES["int16"], (3, 1), (1, 1))
    swapped = Convert(Concat((column, column), 1), Swap(2), DTYPES["int16"])
    whole = np.ascontiguousarray(reference(swapped)).tobytes()
    for start in range(13):
        for stop in range(start, 13):
            assert evaluate(swapped, start, stop) == whole[start:stop]


@examples(100, *HealthCheck)
@given(data=st.data())
def test_no_move_makes_more_than_the_limit_or_reads_more_than_about_twice_that(file: File, data: st.DataObject) -> None:
    tensor = data.draw(expressions(file))
    limit = data.draw(st.sampled_from([16, 64, 1024]))
    for move in tensor.moves(0, tensor.nbytes, data.draw(st.sampled_from(["output", "source"])), limit):
        assert move.target.nbytes <= limit
        if not isinstance(move.source, bytes):
            assert move.source.nbytes <= 2 * limit


@examples(50, *HealthCheck)
@given(data=st.data())
def test_an_expression_survives_pickling_so_that_any_process_can_carry_it_out(file: File, data: st.DataObject) -> None:
    tensor = data.draw(expressions(file))
    assert evaluate(pickle.loads(pickle.dumps(tensor))) == evaluate(tensor)


def test_expressions_are_equal_when_they_are_made_of_the_same(file: File) -> None:
    one = Stored(file, 4, DTYPES["int32"], (2, 3), (3, 1))
    assert one == one.replaced()
    assert hash(one) == hash(one.replaced())
    assert one != one.replaced(offset=8)
    assert one.replaced(offset=8).offset == 8
    assert repr(one).startswith("Stored(dtype=")
    joined = Concat((one, one), 1)
    assert joined.replaced(dim=0).shape == (4, 3)
    assert joined == Concat((one, one), 1) != joined.replaced(dim=0)
    same: list[LazyTensor] = [View(one, one.dtype, (6,)), View(one, one.dtype, (3, 2)), Zeros(one.dtype, (6,)), one]
    assert len({*same, *(each.replaced() for each in same)}) == len(same)


def test_a_contiguous_tensor_is_plain_copies_and_no_kernel(file: File) -> None:
    tensor = Stored(file, 100, DTYPES["float32"], (50, 60), contiguous_strides((50, 60)))
    moves = list(tensor.moves(0, tensor.nbytes, limit=4096))
    assert [move.source.offset for move in moves] == [100, 4196, 8292]
    assert not any(move.kernels for move in moves)


def test_columns_of_a_matrix_are_read_run_by_run_without_what_lies_between(file: File) -> None:
    tensor = Stored(file, 0, DTYPES["uint8"], (3, 10), (9000, 1))
    (move,) = tensor.moves(0, tensor.nbytes)
    assert move.source.nbytes == 30
    assert not move.kernels


def test_columns_that_lie_near_are_read_with_what_lies_between_while_that_fits_to_the_byte(file: File) -> None:
    tensor = Stored(file, 0, DTYPES["uint8"], (65, 4), (64, 1))
    (move,) = tensor.moves(0, tensor.nbytes, limit=2050)
    assert move.source == Runs(0, 64 * 64 + 4)
    (move,) = tensor.moves(0, tensor.nbytes, limit=2049)
    assert move.source == Runs(0, 4, ((65, 64),))


def test_a_transposed_matrix_is_moved_in_tiles_that_are_long_runs_on_both_sides() -> None:
    shape, strides = (50_000, 50_000), (1, 50_000)
    # What is written in runs is longer than what is read, which is an odd number of cache lines.
    assert {tile.counts for tile in tiles(shape, strides, 1 << 22, 4)} >= {(1008, 4096)}
    assert next(tiles(shape, strides, 1 << 22, 4)).target == Runs(0, 4096 * 4, ((1008, 50_000 * 4),))


def test_tiles_of_few_columns_are_so_small_that_pieces_of_them_take_whole_cache_lines() -> None:
    assert next(tiles((64, 1_000_000), (1, 64), 1 << 22, 4)).counts == (64, 16_384)


def test_a_transposed_matrix_is_written_at_once_where_whole_rows_leave_runs_to_read(file: File) -> None:
    tensor = Stored(file, 0, DTYPES["uint8"], (190, 200), (1, 190))
    moves = list(tensor.moves(0, tensor.nbytes, "source", 4096))
    # A tile is 20 rows of the result, which lie one after the other there.
    assert [move.target for move in moves[:2]] == [Runs(0, 4000), Runs(4000, 4000)]
    assert {move.source.length for move in moves} == {20, 10}
    assert evaluate(tensor, order="source", limit=4096) == np.ascontiguousarray(reference(tensor)).tobytes()


@pytest.mark.parametrize("dim", [0, 1])
def test_joined_transposed_matrices_are_moved_in_the_tiles_of_each(file: File, dim: int) -> None:
    parts = [Stored(file, at, DTYPES["uint8"], (90, 100), (1, 90)) for at in (0, 9000, 18000)]
    joined = Concat((Concat(tuple(parts[:2]), dim), parts[2]), dim)
    moves = list(joined.moves(0, joined.nbytes, "source", 1024))
    assert [move.source for move in moves] == [
        move.source for part in parts for move in part.moves(0, part.nbytes, "source", 1024)
    ]
    assert evaluate(joined, 0, joined.nbytes, "source", 1024) == np.ascontiguousarray(reference(joined)).tobytes()


def test_pieces_of_a_parameter_come_from_every_rank_and_padding_from_none(file: File) -> None:
    tensor = Partitioned((file,) * 3, (1000, 2000, 3000), 8, 4, DTYPES["float32"], (5, 2))
    ranges = [(move.source.offset, move.source.length) for move in tensor.moves(0, tensor.nbytes)]
    assert ranges == [(1008, 16), (2008, 16), (3008, 8)]


def test_parameters_of_a_group_share_their_tuples_so_that_a_thousand_ranks_stay_small() -> None:
    files = tuple(File(f"rank{rank}", 1 << 40) for rank in range(1024))
    bases = (64,) * 1024
    tensors = [Partitioned(files, bases, 4 * i, 1, DTYPES["float32"], (1000,)) for i in range(1000)]
    # One pickle of all of them holds the thousand files once.
    assert len(pickle.dumps(tensors)) < 1024 * 60 + 1000 * 100


def test_tensors_are_tied_when_they_are_the_same_elements_of_the_same_file(file: File) -> None:
    one = Stored(file, 0, DTYPES["float32"], (4,), (1,))
    facts = TensorFacts(requires_grad=True)
    assert same_bytes(one) == same_bytes(Tagged(Stored(file, 0, DTYPES["float32"], (4,), (1,)), facts))
    assert same_bytes(one) != same_bytes(Stored(file, 4, DTYPES["float32"], (4,), (1,)))
    assert same_bytes(one) != same_bytes(Stored(file, 0, DTYPES["int32"], (4,), (1,)))
    assert same_bytes(Stored(file, 0, DTYPES["float32"], (0,), (1,))) is None


@pytest.mark.parametrize("shape", list(itertools.product([0, 1, 2], repeat=3)))
def test_contiguous_strides_are_contiguous(shape: tuple[int, ...]) -> None:
    assert is_contiguous(shape, contiguous_strides(shape))


def test_tensors_that_do_not_fit_together_are_not_joined(file: File) -> None:
    one = Stored(file, 0, DTYPES["float32"], (4, 3), (3, 1))
    with pytest.raises(ValueError, match="cannot join"):
        Concat((one, Stored(file, 0, DTYPES["float32"], (4, 2), (2, 1))), 0)
    with pytest.raises(ValueError, match="cannot be viewed as"):
        View(one, DTYPES["float32"], (13,))
    with pytest.raises(ValueError, match="outside"):
        Narrow(one, 1, 2, 2)

"""Codes and scales of numbers, beside what torch makes of them, and beside the evaluator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cells import of_features
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_samples import evaluated

from ckptconv.engine.worker import Worker
from ckptconv.errors import UnsupportedError
from ckptconv.features.quantized.computing import Quantize
from ckptconv.features.quantized.making import parts, tiles_of
from ckptconv.features.quantized.options import ROUNDING_WAYS
from ckptconv.features.quantized.table import WAYS
from ckptconv.plan import Data
from ckptconv.storage.files import Readers
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor

# Codes of four bits, as other programs make them.
OF_FOUR_BITS = ("mxfp4", "nvfp4", "nvfp4-modelopt")
DTYPE = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def inline(weight: torch.Tensor) -> Inline:
    data = weight.contiguous().view(torch.uint8).numpy().tobytes()
    return Inline(data, DTYPES[DTYPE[weight.dtype]], tuple(weight.shape))


def made(tensor: LazyTensor, start: int = 0, stop: int | None = None, unit: int = 1 << 14) -> bytes:
    """The bytes from `start` to `stop`, made in windows of `unit` bytes."""
    stop = tensor.nbytes if stop is None else stop
    with Readers() as readers:
        worker, part = Worker(readers, None, unit), Data(0, tensor, "x")
        return b"".join(bytes(worker.bytes_of(part, at, min(at + unit, stop))) for at in range(start, stop, unit))


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    shape = (*draw(st.sampled_from([(), (2,)])), draw(st.integers(1, 300)), draw(st.integers(1, 9)) * 32)
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    size = 2.0 ** draw(st.integers(-130, 100))
    weight = torch.randn(shape, generator=random, dtype=torch.float64) * size
    weight[..., : shape[-2] // 3, : shape[-1] // 2] = 0
    # Numbers of very other sizes, ties, and both zeros.
    weight[..., -1, ::3] = torch.exp2(torch.randint(-20, 4, weight[..., -1, ::3].shape, generator=random)) * size
    weight[..., 0, 1] = -0.0
    return weight.to(draw(st.sampled_from(list(DTYPE)))).nan_to_num()


def best_of_three(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of int4 in groups of 32, with the scale of three whose codes are nearest."""
    most = groups.abs().amax(-1)
    scales = torch.stack([(most / largest).clamp(min=2.0**-126).bfloat16().float() for largest in (7, 7.5, 8)])
    scales[:, most == 0] = 1
    quotients = groups / scales[..., None]
    codes = quotients.round().clamp(-8, 7)
    squares = (quotients - codes) ** 2
    while squares.shape[-1] > 1:
        low, high = squares.chunk(2, -1)
        squares = low + high
    best = (squares[..., 0].double() * scales.double() ** 2).argmin(0, keepdim=True)
    chosen = codes.gather(0, best[..., None].expand(-1, *groups.shape))
    return chosen[0].flatten(-2), scales.gather(0, best)[0]


def expected(weight: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, before they are packed, and the scales as numbers."""
    m, k = weight.shape[-2:]
    rows, columns = (128, 128) if "block" in way else (1, k if way == "fp8-dynamic" else 32)
    fill = (0, -k % columns, 0, -m % rows)
    tiles = torch.nn.functional.pad(weight.float(), fill).unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    most = tiles.abs().amax((-3, -1))
    if way in ("mxfp8", "fp8-block-ue8m0"):
        exponent = torch.tensor([math.ceil(math.log2(each / 448)) if each else 0 for each in most.double().flatten()])
        scale = torch.exp2(exponent.clamp(min=-126).double()).float().reshape(most.shape)
    elif way == "int4-g32":
        return best_of_three(weight.float().unflatten(-1, (-1, 32)))
    else:
        scale = (most / 448).clamp(min=2.0**-126)
    scale[most == 0] = 1
    quotient = (tiles / scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2)[..., :m, :k]
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale


@pytest.mark.parametrize("way", [way for way in ROUNDING_WAYS if way not in OF_FOUR_BITS])
@examples(25)
@given(weight=weights())
def test_codes_and_scales_are_what_torch_computes(way: str, weight: torch.Tensor) -> None:
    if way == "int4-g32":
        weight = weight.flatten(0, -2)
    codes, scale, *_ = (found := parts("x.weight", inline(weight), WAYS[way], False)).values()
    want, scales = expected(weight, way)
    got = torch.frombuffer(bytearray(made(codes)), dtype=torch.uint8)
    if way == "int4-g32":
        words = got.view(torch.int32).reshape(codes.shape)
        got = torch.stack([(words >> 4 * at & 15) - 8 for at in range(8)], -1).flatten(-2).float()
    assert torch.equal(got.reshape(want.shape), want)
    bits = torch.frombuffer(bytearray(made(scale)), dtype=torch.uint8)
    numbers = {
        "mxfp8": lambda: torch.exp2(bits.double() - 127).float(),
        "int4-g32": lambda: bits.view(torch.bfloat16).float(),
    }.get(way, lambda: bits.view(torch.float32))()
    assert torch.equal(numbers.reshape(scales.shape), scales)
    for tensor in found.values():
        assert {made(tensor), *evaluated(tensor)} == {made(tensor, unit=1 << 20)}


@examples(15)
@given(weights(), st.sampled_from(ROUNDING_WAYS), st.data())
def test_any_interval_and_any_buffer_give_the_same_bytes(weight: torch.Tensor, way: str, data: st.DataObject) -> None:
    if way == "int4-g32" or way in OF_FOUR_BITS:
        weight = weight.flatten(0, -2)
    for tensor in parts("x.weight", inline(weight), WAYS[way], False).values():
        whole = made(tensor, unit=1 << 20)
        start, stop = sorted(data.draw(st.integers(0, tensor.nbytes)) for _ in range(2))
        assert made(tensor, start, stop, 1 << data.draw(st.integers(10, 16))) == whole[start:stop]
        source = bytearray(len(whole))
        with Readers() as readers:
            worker = Worker(readers, None, 1 << 16)
            for move in tensor.moves(0, tensor.nbytes, "source", 1 << 14):
                worker.mover.put(move, memoryview(source), 0)
        assert source == whole


@pytest.mark.parametrize("way", ROUNDING_WAYS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_by_name(way: str, wrong: float) -> None:
    weight = torch.ones(130, 64)
    weight[129, 63] = wrong
    for tensor in list(parts("a.weight", inline(weight), WAYS[way], False).values())[:2]:
        for make in (made, *of_features("EVALUATING")):
            with pytest.raises(UnsupportedError, match=r"'a\.weight' has NaN or infinity"):
                make(tensor)


@pytest.mark.parametrize("way", [way for way in ROUNDING_WAYS if way not in OF_FOUR_BITS])
def test_what_codes_give_is_nearest(way: str) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scale = expected(weight, way)
    if way == "int4-g32":
        errors = []
        for largest in (7, 7.5, None):
            groups = weight.double().unflatten(1, (-1, 32))
            its = scale.double() if largest is None else (groups.abs().amax(-1) / largest).bfloat16().double()
            nearest = (groups / its[..., None]).round().clamp(-8, 7) * its[..., None]
            errors.append(float((nearest - groups).norm() / groups.norm()))
        # On normal numbers, one scale for all groups loses more.
        assert errors[2] < 0.09
        assert min(errors[:2]) > 0.094
        return
    values = np.unique(np.arange(256, dtype="u1")[np.arange(256) % 128 != 127])
    every = torch.from_numpy(values).view(torch.float8_e4m3fn).double().unique()
    down, across = (128, 128) if "block" in way else (1, 128 // scale.shape[1])
    number = weight.double() / scale.double().repeat_interleave(down, 0)[:64].repeat_interleave(across, 1)
    nearest = (number.flatten()[:, None] - every).abs().amin(1)
    got = (number.flatten() - codes.view(torch.float8_e4m3fn).double().flatten()).abs()
    assert (got <= nearest + 1e-4).all()


def four_bits(weight: torch.Tensor, way: str) -> tuple[torch.Tensor, ...]:
    """The codes of e2m1, the scales as they are stored, and the one of the weight, if there is one: in torch."""
    weight = weight.float()
    blocks = weight.unflatten(1, (-1, 32 if way == "mxfp4" else 16))
    most, whole = blocks.abs().amax(-1), weight.abs().max()
    if way == "mxfp4":
        bits = most.view(torch.int32) + (1 << 21)
        stored = ((bits >> 23) - 2).clamp(min=0).to(torch.uint8)
        factor, others = torch.ldexp(torch.ones(stored.shape), stored.int() - 127), ()
    elif way == "nvfp4":
        scale = (whole.reciprocal() * 2688).clamp(max=torch.finfo(torch.float32).max) if whole else torch.ones(())
        stored = (most / 6 * scale).clamp(max=448).to(torch.float8_e4m3fn)
        stored = torch.where(stored.float() == 0, torch.full_like(stored, 0.125), stored)
        factor, others = stored.float() / scale, (scale,)
    else:
        scale = (whole / 2688).clamp(min=2.0**-126) if whole else torch.ones(())
        quotient = most / (6 * scale)
        stored = torch.where(quotient == 0, 1.0, quotient).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
        factor, others = stored.float() * scale, (scale,)
    number = (blocks / factor[..., None]).flatten(1).double()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (number.abs().clamp(max=6)[..., None] - values).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    codes = (is_nearest * (2 - torch.arange(8) % 2)).argmax(-1) + 8 * (weight < 0)
    return codes[:, ::2] + 16 * codes[:, 1::2], stored, *others


@pytest.mark.parametrize("way", OF_FOUR_BITS)
@examples(25)
@given(weight=weights())
def test_codes_and_scales_of_four_bits_are_what_torch_computes(way: str, weight: torch.Tensor) -> None:
    weight = weight.flatten(0, -2)
    want = four_bits(weight, way)
    for tensor, expected_ in zip(
        parts("x.weight", inline(weight), WAYS[way], False).values(), (want[0].to(torch.uint8), *want[1:]), strict=True
    ):
        expected_bytes = expected_.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert {made(tensor), *evaluated(tensor)} == {expected_bytes}


@given(weights())
def test_codes_of_four_bits_are_the_nearest_and_even_ones_at_ties(weight: torch.Tensor) -> None:
    kernel = Quantize("codes", "e2m1", "float8_e8m0fnu", 1, 32, (8 - 2.0**-21,), True, False, "x")
    codes = tiles_of(kernel, inline(weight), (*weight.shape[:-1], weight.shape[-1] // 2))
    scales = tiles_of(kernel._replace(made="scales"), inline(weight), (*weight.shape[:-1], weight.shape[-1] // 32))
    groups = weight.double().unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1)
    # OCP Microscaling Formats 1.0, section 6.3: the exponent of the largest number, less 2.
    exponent = (torch.frexp(most)[1] - 3).clamp(min=-126)
    exponent[most == 0] = 0
    assert {made(scales), *evaluated(scales)} == {(exponent + 127).to(torch.uint8).numpy().tobytes()}
    number = (groups / torch.exp2(exponent.double())[..., None]).flatten(-2)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (number.abs().clamp(max=6)[..., None] - values).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    # Of two that are nearest, the one whose last bit is 0.
    code = (is_nearest * (2 - torch.arange(8) % 2)).argmax(-1) + 8 * torch.signbit(number)
    pairs = code.unflatten(-1, (-1, 2))
    expected_codes = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8).numpy().tobytes()
    assert {made(codes), *evaluated(codes)} == {expected_codes}

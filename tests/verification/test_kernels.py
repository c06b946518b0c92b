"""Every kernel has its form in JSON, and an evaluator of its own that a fault in the kernel does not touch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from cells import of_features
from faults import one_bit, spoiled

from ckptconv.engine.worker import Worker
from ckptconv.plan import Data
from ckptconv.storage.files import Readers
from ckptconv.tensors import computing, kernels, moves, tile_kernels
from ckptconv.tensors.computing import (
    Bits,
    Join,
    Joined,
    WeightedSum,
)
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.expressions import KERNELS, Decoder, Encoder
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor
from ckptconv.tensors.moves import Cast, Conjugate, Negate, Swap
from ckptconv.tensors.registered import HOMES, type_of
from ckptconv.verification.evaluate import Evaluator

F32, F64, BF16, U8, U16, I16, C64 = (
    DTYPES[name] for name in ("float32", "float64", "bfloat16", "uint8", "uint16", "int16", "complex64")
)
BYTES = bytes(range(1, 33))
NUMBERS = Inline(np.arange(1, 9, dtype="<f4").tobytes(), F32, (8,))
HALVES = Inline(np.arange(16256, 16264, dtype="<u2").tobytes(), BF16, (8,))
MATRIX = Inline(np.arange(1, 5, dtype="<f8").tobytes(), F64, (2, 2))
FACTOR = Inline(np.array([[0.1, 3], [7, 0.7]], "<f4").tobytes(), F32, (2, 2))
NARROW = Inline(np.array([16256, 16257], "<u2").tobytes(), BF16, (2,))
OCTETS = Inline(BYTES, U8, (32,))
# Those that moves are made of, and that no expression names; a kernel of tiles is carried out by `Tile`.
OF_MOVES = {moves.Gather, computing.Tile}
SAMPLES: dict[type[Any], LazyTensor] = {
    Cast: Convert(NUMBERS, Cast("float32", "bfloat16"), BF16),
    Swap: Convert(NUMBERS, Swap(4), F32),
    Negate: Convert(NUMBERS, Negate("float32"), F32),
    Conjugate: Convert(Inline(BYTES, C64, (4,)), Conjugate("complex64"), C64),
    Bits: Convert(NUMBERS, Bits(4, 3, 5, 1), U8),
    Join: Joined((OCTETS, OCTETS), Join(((1, 0, 8), (1, 8, 8)), 2), I16),
    WeightedSum: Joined((NUMBERS, HALVES), WeightedSum(("float32", "bfloat16"), (1.0, 0.1), 1.1), F64),
    **{kernel: sample for samples in of_features("SAMPLES") for kernel, sample in samples.items()},
}


def test_no_kernel_is_left_out() -> None:
    of_homes = {type_of(name) for home in HOMES for name in home.names}
    own = {*KERNELS.values()} - of_homes
    assert SAMPLES.keys() == own | of_homes
    assert own == {*kernels.FUNCTIONS, *tile_kernels.TILING} - OF_MOVES - of_homes


def made(tensor: LazyTensor) -> bytes:
    with Readers() as readers:
        return bytes(Worker(readers, None, 1 << 12).bytes_of(Data(0, tensor, "x"), 0, tensor.nbytes))


def evaluated(tensor: LazyTensor) -> bytes:
    with Readers() as readers:
        return Evaluator(readers).flat(tensor, 0, tensor.numel).tobytes()


@pytest.mark.parametrize("kernel", SAMPLES)
def test_its_form_in_json_makes_it_again(kernel: type[Any]) -> None:
    encoder = Encoder()
    told = json.loads(json.dumps(encoder.encode(SAMPLES[kernel])))
    assert Decoder([], []).decode(told) == SAMPLES[kernel]


@pytest.mark.parametrize("kernel", SAMPLES)
def test_its_evaluator_finds_a_fault(kernel: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SAMPLES[kernel]
    assert made(tensor) == evaluated(tensor)
    runs = computing.Tile if tile_kernels.TILING.find(kernel) else kernel
    spoiled(runs, one_bit)(monkeypatch)
    assert made(tensor) != evaluated(tensor)

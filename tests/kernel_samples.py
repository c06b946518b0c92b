"""A tensor for each kernel, which the kernel makes: those of the trunk, and of each feature. Its bytes, as a conversion
makes them, and as features compute them by other means."""

from __future__ import annotations

from typing import Any

import numpy as np
from cells import of_features

from ckptconv.engine.worker import Worker
from ckptconv.plan import Data
from ckptconv.storage.files import Readers
from ckptconv.tensors.computing import Bits, Join, Joined
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor
from ckptconv.tensors.moves import Cast, Conjugate, Negate, Swap

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
SAMPLES: dict[type[Any], LazyTensor] = {
    Cast: Convert(NUMBERS, Cast("float32", "bfloat16"), BF16),
    Swap: Convert(NUMBERS, Swap(4), F32),
    Negate: Convert(NUMBERS, Negate("float32"), F32),
    Conjugate: Convert(Inline(BYTES, C64, (4,)), Conjugate("complex64"), C64),
    Bits: Convert(NUMBERS, Bits(4, 3, 5, 1), U8),
    Join: Joined((OCTETS, OCTETS), Join(((1, 0, 8), (1, 8, 8)), 2), I16),
    **{kernel: sample for samples in of_features("SAMPLES") for kernel, sample in samples.items()},
}


def made(tensor: LazyTensor) -> bytes:
    with Readers() as readers:
        return bytes(Worker(readers, None, 1 << 12).bytes_of(Data(0, tensor, "x"), 0, tensor.nbytes))


def evaluated(tensor: LazyTensor) -> list[bytes]:
    return [evaluate(tensor) for evaluate in of_features("EVALUATING")]

"""Floating-point formats by their bits, and numpy, which is imported when the first kernel runs."""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]


@functools.cache
def numpy_module() -> ModuleType:
    return loaded()[0]


@functools.cache
def loaded() -> tuple[ModuleType, bool]:
    """Return numpy, and whether OpenBLAS works only in the thread that calls it: no other program loaded it."""
    # OpenBLAS, when loaded, starts a thread for every processor, and their stacks count as memory of this process.
    # Nothing here uses them. The setting is removed again: it is not for processes and libraries loaded later.
    name, is_first = "OPENBLAS_NUM_THREADS", "numpy" not in sys.modules
    unset = name not in os.environ
    if unset:
        os.environ[name] = "1"
    is_alone = is_first and os.environ[name] == "1"
    try:
        import numpy
    finally:
        if unset:
            os.environ.pop(name, None)
    return numpy, is_alone


_LOCAL = threading.local()


def scratch(use: str, nbytes: int) -> Array:
    """Return `nbytes` bytes for a use of this thread, whose contents the next call for the same use may overwrite.

    Fresh memory of this size costs as much as the computation in it: the system clears each of its pages.
    """
    known: Array | None = getattr(_LOCAL, use, None)
    if known is None or len(known) < nbytes:
        known = numpy_module().empty(nbytes, "u1")
        setattr(_LOCAL, use, known)
    return known[:nbytes]


class FloatFormat(NamedTuple):
    """A binary floating-point format: bits of exponent and mantissa, exponent bias, and its special values.

    "ieee": infinities and NaNs. "fn": no infinities, NaN is all ones. "fnuz": no infinities and no minus zero, whose
    bits are the NaN. (OCP 8-bit Floating Point Specification 1.0; Noune et al. 2022, arXiv:2206.02915.)
    """

    exponent: int
    mantissa: int
    bias: int
    specials: str = "ieee"

    @property
    def code(self) -> str:
        return f"u{(1 + self.exponent + self.mantissa) // 8}"

    @property
    def infinity(self) -> int:
        """The bits of infinity; a larger magnitude is NaN."""
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def least(self) -> int:
        """The exponent of the smallest number that is not zero."""
        return 1 - self.bias - self.mantissa

    @property
    def quiet(self) -> int:
        return 1 << (self.mantissa - 1)

    def overflow(self, source: FloatFormat) -> int:
        """Return the bits, in format `source`, of the smallest number that rounds to infinity in this format.

        It is half a step above the largest finite number; that tie becomes infinite by rounding to even.
        """
        exponent = self.bias + source.bias
        return (exponent << source.mantissa) | (
            ((1 << (self.mantissa + 1)) - 1) << (source.mantissa - self.mantissa - 1)
        )


FORMATS = {
    "float64": FloatFormat(11, 52, 1023),
    "float32": FloatFormat(8, 23, 127),
    "bfloat16": FloatFormat(8, 7, 127),
    "float16": FloatFormat(5, 10, 15),
    "float8_e5m2": FloatFormat(5, 2, 15),
    "float8_e4m3fn": FloatFormat(4, 3, 7, "fn"),
    "float8_e5m2fnuz": FloatFormat(5, 2, 16, "fnuz"),
    "float8_e4m3fnuz": FloatFormat(4, 3, 8, "fnuz"),
}
# Formats of powers of two only: no sign, no mantissa.
SCALES = {"float8_e8m0fnu"}


@functools.cache
def float32_table(source: str) -> Array:
    """Return the float32 bits of all 256 values of an 8-bit format; float32 represents each exactly."""
    np = numpy_module()
    decode = _scale_bits if source in SCALES else functools.partial(_float32_bits, FORMATS[source])
    table: Array = np.array([decode(bits) for bits in range(256)], "u4")
    table.flags.writeable = False
    return table


def _scale_bits(bits: int) -> int:
    # 2**(bits - 127) has `bits` as its exponent field; only the smallest is subnormal.
    single = FORMATS["float32"]
    return single.infinity | single.quiet if bits == 0xFF else bits << single.mantissa or single.quiet


def _float32_bits(format_: FloatFormat, bits: int) -> int:
    single = FORMATS["float32"]
    sign, magnitude = bits >> 7, bits & 0x7F
    exponent, mantissa = magnitude >> format_.mantissa, magnitude & ((1 << format_.mantissa) - 1)
    distance = single.mantissa - format_.mantissa
    infinite = {"ieee": magnitude == format_.infinity, "fn": False, "fnuz": False}
    nan = {"ieee": magnitude > format_.infinity, "fn": magnitude == 0x7F, "fnuz": bits == 0x80}
    if infinite[format_.specials]:
        magnitude = single.infinity
    elif nan[format_.specials]:
        magnitude = single.infinity | single.quiet | mantissa << distance
    elif exponent:
        magnitude = (exponent + single.bias - format_.bias) << single.mantissa | mantissa << distance
    elif mantissa:
        # A subnormal: normalize it.
        shift = format_.mantissa + 1 - mantissa.bit_length()
        exponent, mantissa = 1 - shift, (mantissa << shift) & ((1 << format_.mantissa) - 1)
        magnitude = (exponent + single.bias - format_.bias) << single.mantissa | mantissa << distance
    return sign << 31 | magnitude


def numbers(dtype: str, bits: Array, single: Array) -> Array:
    """Return numbers of a floating dtype, those of bfloat16 in `single`."""
    if dtype != "bfloat16":
        return bits.view(dtype)
    single[...] = bits
    single <<= 16
    view: Array = single.view("f4")
    return view

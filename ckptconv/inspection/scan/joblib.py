"""Read pickles of joblib, which puts the bytes of arrays between the instructions.

Source: joblib 1.5, `NumpyArrayWrapper.read_array` and `NumpyUnpickler.load_build` in `joblib/numpy_pickle.py`: when a
wrapper has got its state, the array follows in the file, after a byte that counts the bytes of padding behind it. An
array of objects is a pickle of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from ckptconv.errors import UnsafeError
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.pickles.vocabulary import MalformedError
from ckptconv.storage.files import Reader
from ckptconv.storage.inside import leads_out
from ckptconv.text import brief

_WRAPPER = Global("joblib.numpy_pickle", "NumpyArrayWrapper")
_DTYPE = re.compile(r"[<>|=]?([?biufcmMSaUVO])([0-9]{0,9})")
# Sizes of kinds that are named without one.
_SIZES = {"?": 1, "b": 1, "i": 4, "u": 4, "f": 4, "c": 1, "m": 8, "M": 8, "O": 8}
# Wrappers of old releases, which name a file.
_FILES = (Global("joblib.numpy_pickle", "NDArrayWrapper"), Global("joblib.numpy_pickle", "ZNDArrayWrapper"))
# What is in a dtype in a dtype.
_DEPTH = 32


class Arrays:
    """Skips the arrays in the pickle that begins at byte `start` of a file: `Vocabulary.embedded`.

    `skipped` counts them. `objects` is called with the position of a pickle in the file, an array of objects, and
    returns the position behind it.
    """

    def __init__(self, reader: Reader, start: int, objects: Callable[[int], int]) -> None:
        self._reader, self._start, self._objects = reader, start, objects
        self.begin()

    def begin(self) -> None:
        """Begin again, with another reading of the same pickle."""
        self.skipped = 0
        # Bytes read at first behind an array; doubled whenever the pickle is read again, as it did not end in them.
        self._window, self._last = 1 << 16, -1

    def __call__(self, made: Opaque, position: int) -> tuple[int, bytes] | None:
        state = _attributes(made.state[-1])
        if made.cls in _FILES:
            name = state.get("filename")
            why = leads_out(name) if type(name) is str else "it is no text"
            if why:
                raise UnsafeError(f"A pickle of joblib reads an array from {brief(name)}, beside it: {why}.", "")
        if made.cls != _WRAPPER or not state:
            return None
        at = self._start + position
        if at <= self._last:
            self._window *= 2
        self._last = at
        size, has_objects = _item(state.get("dtype"))
        if has_objects:
            end = self._objects(at)
        else:
            if state.get("numpy_array_alignment_bytes") is not None:
                at += 1 + self._reader.read_at(at, 1)[0]
            shape = state.get("shape")
            if type(shape) is not tuple or any(type(count) is not int or count < 0 for count in shape):
                raise MalformedError("has an array of joblib without a shape")
            end = at + math.prod(shape) * size
        if end > self._reader.file.size:
            raise MalformedError("has an array of joblib that goes beyond the end of the file")
        self.skipped += 1
        return end - self._start, self._reader.read_at(end, min(self._window, self._reader.file.size - end))


def _attributes(state: Any) -> dict[Any, Any]:
    """Return the attributes that a state sets: those of a dict, or of two."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


def _item(dtype: Any, depth: int = 0) -> tuple[int, bool]:
    """Return the size in bytes of an element, and whether elements are objects."""
    if depth > _DEPTH or type(dtype) is not Opaque or dtype.cls != Global("numpy", "dtype") or not dtype.args:
        raise MalformedError("has an array of joblib whose dtype is not known")
    named = _DTYPE.fullmatch(dtype.args[0]) if type(dtype.args[0]) is str else None
    if named is None:
        raise MalformedError("has an array of joblib whose dtype is not known")
    kind, digits = named.groups()
    size, has_objects = int(digits or _SIZES.get(kind, 0)) * (4 if kind == "U" else 1), kind == "O"
    state = dtype.state[-1] if dtype.state else ()
    if type(state) is tuple and len(state) > 5:
        # Of other kinds, numpy has the size by the name.
        if kind in "SaUV" and type(state[5]) is int and state[5] >= 0:
            size = state[5]
        # The dtype of a part that is an array, and those of fields.
        fields = state[4].values() if type(state[4]) is dict else ()
        for part in (state[2], *fields):
            if type(part) is tuple and part:
                has_objects |= _item(part[0], depth + 1)[1]
    return size, has_objects

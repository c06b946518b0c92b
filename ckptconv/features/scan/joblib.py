"""Reads pickles of joblib, which puts the bytes of arrays between the instructions.

Source: joblib 1.5, `NumpyArrayWrapper.read_array` and `NumpyUnpickler.load_build` in `joblib/numpy_pickle.py`: after a
wrapper's state, the array follows in the file, after a byte with the number of bytes of padding behind it. An array of
objects is a pickle of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ckptconv.errors import UnsafeError
from ckptconv.features.scan import numpy_elements
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.pickles.vocabulary import MalformedError
from ckptconv.storage.inside import leads_out
from ckptconv.storage.reading import Reader
from ckptconv.text import brief

_WRAPPER = Global("joblib.numpy_pickle", "NumpyArrayWrapper")
# Wrappers of old releases, which name a file.
_FILES = (Global("joblib.numpy_pickle", "NDArrayWrapper"), Global("joblib.numpy_pickle", "ZNDArrayWrapper"))


class Arrays:
    """Skips the arrays in the pickle that begins at byte `start` of a file: `Vocabulary.embedded`.

    `skipped` counts them. `objects` is called with the position of a pickle in the file, an array of objects, and
    returns the position after it.
    """

    def __init__(self, reader: Reader, start: int, objects: Callable[[int], int]) -> None:
        self._reader, self._start, self._objects = reader, start, objects
        self.begin()

    def begin(self) -> None:
        """Begin again, for another reading of the same pickle."""
        self.skipped = 0
        # Bytes read at first after an array; doubled whenever the pickle is read again, because it did not end in them.
        self._window, self._last = 1 << 16, -1

    def __call__(self, wrapper: Opaque, position: int) -> tuple[int, bytes] | None:
        state = _attributes(wrapper.state[-1])
        if wrapper.cls in _FILES:
            name = state.get("filename")
            why = leads_out(name) if type(name) is str else "it is not text"
            if why:
                raise UnsafeError(
                    f"A joblib pickle reads an array from {brief(name)}, in the same directory: {why}.", ""
                )
        if wrapper.cls != _WRAPPER or not state:
            return None
        at = self._start + position
        if at <= self._last:
            self._window *= 2
        self._last = at
        try:
            size, has_objects = numpy_elements.element(state.get("dtype"))
        except ValueError as reason:
            raise MalformedError(f"has a joblib array with {reason}") from None
        if has_objects:
            end = self._objects(at)
        else:
            if state.get("numpy_array_alignment_bytes") is not None:
                at += 1 + self._reader.read_at(at, 1)[0]
            shape = state.get("shape")
            if type(shape) is not tuple or any(type(count) is not int or count < 0 for count in shape):
                raise MalformedError("has a joblib array without a shape")
            end = at + math.prod(shape) * size
        if end > self._reader.file.size:
            raise MalformedError("has a joblib array that extends beyond the end of the file")
        self.skipped += 1
        return end - self._start, self._reader.read_at(end, min(self._window, self._reader.file.size - end))


def _attributes(state: Any) -> dict[Any, Any]:
    """Return the attributes that a state sets: those of a dict, or of two."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}

"""Plans safetensors files (https://huggingface.co/docs/safetensors), byte for byte as the library lays them out."""

from __future__ import annotations

import array
import itertools
import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from operator import itemgetter

from ckptconv.errors import FailedError, UnsupportedError, UsageError
from ckptconv.formats.model_files import MAX_HEADER, METADATA
from ckptconv.plan import Data, FilePlan, Literal
from ckptconv.tensors.dtypes import DTYPE_RANK, DType
from ckptconv.tensors.lazy import LazyTensor

# Header entries that are encoded together.
_ENCODED_AT_ONCE = 4096

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def file_plan(name: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> FilePlan:
    """Plan one file of `tensors` with `metadata`.

    Tensors are ordered by descending rank of their dtype, then by name; metadata keys are sorted. Raises
    UnsupportedError for a dtype without a safetensors code, UsageError for a name that the header cannot hold, and
    FailedError for a header that is too long.
    """
    if METADATA in tensors:
        raise UsageError(
            f"{name}: safetensors do not allow a tensor named {METADATA}.",
            f"Rename it: --rename {METADATA}=NAME.",
        )
    ordered = sorted(tensors.items(), key=itemgetter(0))
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        ordered.sort(key=lambda item: -DTYPE_RANK[item[1].dtype.name])
    # Encode entries early: as dicts they take five times the memory of bytes, as text twice.
    header = [_encoded(name, f'{{"{METADATA}":{_json(dict(sorted(metadata.items())))}')]
    entries: list[str] = []
    # Tensors are many, pairs of dtype and shape are few, and most share them with the one before.
    kinds: dict[tuple[DType, tuple[int, ...]], tuple[str, int]] = {}
    dtype = shape = None
    text, size = "", 0
    starts = array.array("Q")
    at = 0
    for key, tensor in ordered:
        if tensor.shape is not shape or tensor.dtype is not dtype:
            dtype, shape = tensor.dtype, tensor.shape
            if (dtype, shape) not in kinds:
                counts = ",".join(map(str, shape_of(tensor)))
                fields_text = f'"dtype":"{code_of(name, key, tensor)}","shape":[{counts}],"data_offsets"'
                kinds[dtype, shape] = fields_text, tensor.nbytes
            text, size = kinds[dtype, shape]
        starts.append(at)
        entries.append(f",{encode_basestring(key)}:{{{text}:[{at},{(at := at + size)}]}}")
        if len(entries) == _ENCODED_AT_ONCE:
            header.append(_encoded(name, "".join(entries)))
            entries.clear()
    head = finished(name, [*header, _encoded(name, "".join(entries))])
    del header, entries
    start = len(head)
    fields = zip(map(start.__add__, starts), map(itemgetter(1), ordered), map(itemgetter(0), ordered), strict=False)
    # The same as Data(…), without a step of Python for each.
    return FilePlan(name, start + at, (Literal(0, head), *map(tuple.__new__, itertools.repeat(Data), fields)))


def code_of(file: str, key: str, tensor: LazyTensor) -> str:
    if tensor.dtype.code is None:
        raise UnsupportedError(
            f"{file}: {key!r} is a tensor of {tensor.dtype}, a dtype that safetensors do not support.",
            "Leave the tensor out with --exclude, or save it with another dtype.",
        )
    return tensor.dtype.code


def shape_of(tensor: LazyTensor) -> list[int]:
    """Return the shape as safetensors counts elements."""
    shape = list(tensor.shape)
    if tensor.dtype.code == "F4" and shape:
        shape[-1] *= 2  # torch counts bytes of two values each, safetensors counts values
    return shape


def _encoded(file: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise UsageError(
            f"{file}: the name of a tensor contains {bad!r}, half of a surrogate pair, which is not valid Unicode.",
            "Rename it with --rename.",
        ) from error


def finished(file: str, header: Sequence[bytes]) -> bytes:
    """Return the start of a file: the header's length in eight bytes, then `header`, closed and padded."""
    length = sum(map(len, header)) + 1
    padding = -length % 8
    length += padding
    if length > MAX_HEADER:
        raise FailedError(
            f"{file}: its header would have {length} bytes, but safetensors allow {MAX_HEADER}.",
            "Write several files: give a directory as OUTPUT, and a smaller --max-shard-size.",
        )
    return b"".join((length.to_bytes(8, "little"), *header, b"}", b" " * padding))

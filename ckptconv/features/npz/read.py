"""Reads archives of numpy's arrays by the headers of their members. No array is read.

Source: numpy/lib/_format_impl.py. A member is the magic bytes, the version, the length of the header, the header, which
is a dict of Python as text, and the elements. numpy takes the name of an array from its member's, without .npy.
"""

from __future__ import annotations

import functools
import math
import re
import zlib

from ckptconv.errors import CorruptError, TruncatedError, UnsupportedError
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.source import FileFacts, Source, Wanted
from ckptconv.pickles.numpy_dtypes import TORCH_NAMES
from ckptconv.plan import Input
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.archive import DEFLATED, STORED, Archive
from ckptconv.storage.location import Location
from ckptconv.tensors.dtypes import DTYPES, itemsize_of_components
from ckptconv.tensors.lazy import Convert, LazyTensor, Stored
from ckptconv.tensors.moves import Swap
from ckptconv.tensors.strides import contiguous_strides
from ckptconv.text import brief, quoted

FAMILY = "npz"
_GUESS = Guess(CERTAIN, "an archive of numpy arrays (.npz)", "convert {} OUTPUT", also=("torch",))
_SUFFIX, _MAGIC = ".npy", b"\x93NUMPY"
# Bytes of the header's length, by version; the alignment of a header, and the longest.
_LENGTHS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_USUAL, _LONGEST = 128, 1 << 16
# Advice on arrays whose dtype numpy does not write.
_INSTEAD = "Save the array as float32, or use safetensors.flax.save_file, which keeps the dtype."
# torch's limit.
_MAX_DIMS = 64
_HEADER = re.compile(
    r"\{'descr': '([<>|=]?)([\w\[\]]{1,40})', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,18}, ?)*\d{0,18})\), \} *\n"
)


def sniff(probe: Probe) -> Guess | None:
    """Recognize a zip archive whose first member has the name of an array."""
    head = probe.head[0] if probe.is_file else b""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return _GUESS if head.startswith(LOCAL_SIGNATURE) and name.endswith(_SUFFIX.encode()) else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open an archive. Raise CorruptError for one that contradicts itself, UnsupportedError for arrays that are no
    tensors."""
    with place.open_reader() as reader:
        archive = Archive(reader)
        archive.check_names((), ())
        archive.locate_all()
        weights = {name.removesuffix(_SUFFIX): _array(archive, name, row) for name, row in archive.rows.items()}
    records = archive.records(range(len(archive.rows)))
    return Source(
        format="npz archive",
        family=FAMILY,
        path=place.path,
        weights=weights,
        structured=False,
        facts={"tensors": len(weights), "size": archive.file.size},
        files=FileFacts(records={archive.file.path: records}),
        inputs={place.name: Input(archive.file, (archive.file.size, records.digest() or archive.file.stamp))},
        bytes_read=archive.bytes_read,
        wanted=wanted,
        reread=functools.partial(read, place),
    )


def _array(archive: Archive, name: str, row: int) -> LazyTensor:
    """Return the array in a member."""
    where = f"{archive.file.path}: member {brief(name)}"
    if not name.endswith(_SUFFIX):
        raise CorruptError(f"{where} is not an array, but an .npz archive contains only arrays.")
    if archive.methods[row] not in (STORED, DEFLATED):
        raise UnsupportedError(f"{where} uses a compression that numpy does not write.", "Pack it again.")
    head = _beginning(archive, name, _USUAL)
    size = _LENGTHS.get((head[6], head[7])) if len(head) > 11 and head.startswith(_MAGIC) else None
    if size is None:
        raise CorruptError(f"{where} is not an array: it begins with {head[:12]!r}.")
    start = 8 + size + int.from_bytes(head[8 : 8 + size], "little")
    if start > min(_LONGEST, archive.sizes[row]):
        most = f"a header can have at most {_LONGEST}, and the member has {archive.sizes[row]}"
        raise CorruptError(f"{where} has a header of {start} bytes, but {most}.")
    text = (head if len(head) >= start else _beginning(archive, name, start))[8 + size : start].decode("latin-1")
    header = _HEADER.fullmatch(text)
    if header is None:
        raise UnsupportedError(
            f"{where} is an array of records or objects, which tensors do not support: its header is "
            f"{brief(text.strip())}."
        )
    order, kind, is_fortran, extents = header.groups()
    known = TORCH_NAMES.get(kind)
    if known is None:
        objects = ", Python objects" if kind == "O" else ""
        nameless = {"V1": "float8", "V2": "bfloat16"}.get(kind)
        hint = f"numpy stores JAX's {nameless} as {kind}. {_INSTEAD}" if nameless else ""
        raise UnsupportedError(f"{where} has elements of {quoted(kind)}{objects}, which tensors do not support.", hint)
    dtype, shape = DTYPES[known], tuple(int(extent) for extent in re.findall(r"\d+", extents))
    if len(shape) > _MAX_DIMS or ("," not in extents and len(shape) == 1):
        raise CorruptError(f"{where} has an invalid shape: ({extents}).")
    nbytes = math.prod(shape) * dtype.itemsize
    if start + nbytes != archive.sizes[row]:
        error = TruncatedError if start + nbytes > archive.sizes[row] else CorruptError
        raise error(f"{where} has {archive.sizes[row] - start} bytes of elements, but its shape needs {nbytes}.")
    strides = contiguous_strides(shape[::-1])[::-1] if is_fortran == "True" else contiguous_strides(shape)
    file, offset = archive.file, archive.start + archive.payloads[row] + start
    if archive.methods[row]:
        file, offset = archive.deflated(row, name), start
    tensor, unit = Stored(file, offset, dtype, shape, strides), itemsize_of_components(dtype)
    return Convert(tensor, Swap(unit), dtype) if order == ">" and unit > 1 else tensor


def _beginning(archive: Archive, name: str, length: int) -> bytes:
    """Return the first bytes of a member, at most `length`."""
    row = archive.rows[name]
    if not archive.methods[row]:
        return archive.read_at(archive.payloads[row], min(length, archive.sizes[row]))
    packed = archive.read_at(archive.payloads[row], min(length + 1024, archive.packed[row]))
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, length)
    except zlib.error as error:
        raise archive.corrupt(f"{brief(name)} cannot be inflated ({error})") from None

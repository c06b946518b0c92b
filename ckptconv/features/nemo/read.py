"""Reads .nemo files: the weights in a tar archive, without extracting them. A compressed archive is unpacked first.

Source: nemo/core/connectors/save_restore_connector.py. NeMo packs a directory with `tarfile`, without compression since
release 1.11, with gzip before. The weights are model_weights.ckpt, a file of torch.save. The weights of a parallel
model are in directories of ranks, or in one of torch.distributed.checkpoint or zarr.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.features.modules.whole import taken
from ckptconv.features.tar.directory import listed
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.source import FileFacts, Source, Wanted
from ckptconv.formats.torch.zip import read_zip
from ckptconv.pickles.children import walk
from ckptconv.pickles.vocabulary import WHOLE_TREES
from ckptconv.plan import Input
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.files import Readers
from ckptconv.storage.location import Location
from ckptconv.storage.packed import check_ratio
from ckptconv.storage.reading import Reader
from ckptconv.storage.tar_header import is_tar
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File, Packed
from ckptconv.text import some

FAMILY = "nemo"
_GUESS = Guess(CERTAIN, "a NeMo model (.nemo)", "convert {} OUTPUT", also=("torch",))
_WEIGHTS = "model_weights.ckpt"
_DIRECTORY = "model_weights/"
# gzip's first bytes; the flags of a header for a checksum, further fields, a name and a comment; and the end of these.
_GZIP, _CHECKED, _FIELDS, _NAME, _COMMENT = b"\x1f\x8b\x08", 2, 4, 8, 16
_TRAILER, _LONGEST = 8, 1 << 12


def sniff(probe: Probe) -> Guess | None:
    """Recognize an archive by its name."""
    head = probe.head[0] if probe.is_file and probe.place.name.endswith(".nemo") else b""
    return _GUESS if head.startswith(_GZIP) or is_tar(head) else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open a model. Raise CorruptError for an archive that contradicts itself, UnsupportedError for weights in several
    files."""
    with place.open_reader() as reader:
        if reader.read_at(0, min(len(_GZIP), reader.file.size)) != _GZIP:
            return _read(place, wanted, reader)
        packed = _unpacked(reader)
    with Readers(place.options) as readers, readers.open(packed) as within:
        source = _read(place, wanted, within)
    note = (
        f"{place} is compressed: it was unpacked once to read its contents, and will be unpacked again for the "
        "conversion."
    )
    return source._replace(notes=[*source.notes, note])


def _read(place: Location, wanted: Wanted, reader: Reader) -> Source:
    """Open the archive in `reader`."""
    archive = listed(reader, directories=True)
    if archive.odd is not None:
        raise archive.odd
    members = {name.removeprefix("./"): span for name, span in archive.members.items()}
    if len(members) != len(archive.members):
        raise CorruptError(f"{place} has two members with the same name, one of them with a leading './'.")
    if _WEIGHTS not in members:
        raise _elsewhere(place, members)
    start, stop = members[_WEIGHTS]
    if not reader.read_at(start, min(len(LOCAL_SIGNATURE), stop - start)).startswith(LOCAL_SIGNATURE):
        raise UnsupportedError(f"{place}: its {_WEIGHTS} is not a zip archive of torch.save.", "Unpack it: tar -xf.")
    try:
        content = read_zip(reader, start, stop - start, limits=WHOLE_TREES)
    except CkptconvError as error:
        raise type(error)(f"In its {_WEIGHTS}: {error.message}", error.hint) from error
    tensors = (node for node in walk(content.value) if isinstance(node, LazyTensor))
    if reader.file.packed and any(file != reader.file for tensor in tensors for file in tensor.inputs()):
        raise UnsupportedError(f"{place}: its {_WEIGHTS} is compressed twice.", "Unpack it: tar -xf.")
    state = taken(content.value, content.opaque, place.path)
    left = [name for name in members if name != _WEIGHTS]
    outer = reader.file.packed.file if reader.file.packed else reader.file
    return Source(
        format="model of NeMo",
        family=FAMILY,
        path=place.path,
        weights=state.tree,
        facts={"size": outer.size},
        files=FileFacts(
            [str(name) for name in state.opaque],
            [str(name) for name in content.globals],
            {} if reader.file.packed else {outer.path: content.records},
        ),
        values=state.values,
        notes=[*content.notes, *state.notes, *([f"not read in {place}: {some(left, form=str)}."] if left else [])],
        warnings=[*content.warnings, *state.warnings],
        inputs={place.name: Input(outer, (outer.size, content.records.digest() or outer.stamp))},
        bytes_read=content.bytes_read,
        wanted=wanted,
    )


def _elsewhere(place: Location, members: Iterable[str]) -> UnsupportedError:
    """Return the error for an archive whose weights are not one file."""
    if any(name.startswith(_DIRECTORY) for name in members):
        reason = "its weights are a Megatron-core directory"
    elif several := [name for name in members if name.endswith(f"/{_WEIGHTS}")]:
        reason = f"its weights are split into files for model-parallel ranks: {some(several, form=str)}"
    else:
        reason = f"it has no {_WEIGHTS}, but contains {some(sorted(members), form=str) or 'nothing'}"
    return UnsupportedError(f"{place}: {reason}.", f"Unpack it (tar -xf {place.name}), and convert its contents.")


def _unpacked(reader: Reader) -> File:
    """Return the content of a file that gzip compressed, as a file within it."""
    size = reader.file.size
    head = reader.read_at(0, min(_LONGEST, size))
    start = _header(head, reader.file.path)
    if start + _TRAILER > size:
        raise CorruptError(f"{reader.file.path} ends within the header of gzip: it was cut short.")
    trailer = reader.read_at(size - _TRAILER, _TRAILER)
    crc, length = int.from_bytes(trailer[:4], "little"), int.from_bytes(trailer[4:], "little")
    check_ratio(reader.file.path, size - _TRAILER - start, length)
    packed = Packed(reader.file, start, size - _TRAILER - start, crc)
    return File(f"{reader.file.path} (unpacked)", length, reader.file.stamp, packed)


def _header(head: bytes, path: str) -> int:
    """Return the length of the gzip header at the beginning of a file."""
    flags, at = head[3] if len(head) > 10 else 0xFF, 10
    if flags & _FIELDS:
        at += 2 + int.from_bytes(head[at : at + 2], "little")
    for flag in (_NAME, _COMMENT):
        at = head.find(b"\0", at) + 1 if flags & flag else at
        if not at:
            break
    if flags >= 2 * _COMMENT or not 0 < at <= len(head):
        raise CorruptError(f"{path} does not begin with a gzip header.")
    return at + (2 if flags & _CHECKED else 0)

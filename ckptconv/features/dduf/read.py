"""Reads DDUF: the safetensors files in a zip archive, without unpacking them. No tensor is read.

Source: huggingface_hub/serialization/_dduf.py. Members are stored, in folders of one level, which model_index.json
names. A folder has a model's files and its configuration, or only the configuration.
"""

from __future__ import annotations

import functools

from ckptconv.errors import CkptconvError, CorruptError
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.safetensors import read_header
from ckptconv.formats.source import FileFacts, Source, Wanted
from ckptconv.plan import Input
from ckptconv.storage import LOCAL_SIGNATURE, strict_json
from ckptconv.storage.archive import Archive
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Reader
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import brief, quoted

FAMILY = "dduf"
_GUESS = Guess(CERTAIN, "a diffusers pipeline in one file (DDUF)", "convert {} OUTPUT")
_INDEX = "model_index.json"
_ENDINGS = (".json", ".model", ".txt", SUFFIX)


def sniff(probe: Probe) -> Guess | None:
    """Recognize a zip archive by its name."""
    is_one = probe.is_file and probe.place.name.endswith(".dduf") and probe.head[0].startswith(LOCAL_SIGNATURE)
    return _GUESS if is_one else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open a pipeline in one file. Raise CorruptError for an archive that is not DDUF, or that contradicts itself."""
    weights: dict[str, LazyTensor] = {}
    models: dict[str, None] = {}
    with place.open_reader() as reader:
        archive = Archive(reader)
        archive.check_names((), ())
        archive.locate_all()
        _check_members(archive)
        for name, row in archive.rows.items():
            folder, _, _ = name.rpartition("/")
            if not name.endswith(SUFFIX):
                continue
            models[folder] = None
            for tensor_name, tensor in _tensors(archive, reader, name, row).items():
                full = f"{folder}/{tensor_name}".removeprefix("/")
                if full in weights:
                    raise CorruptError(f"{place}: two of its files contain {quoted(full)}.")
                weights[full] = tensor
    records = archive.records(range(len(archive.rows)))
    return Source(
        format="DDUF",
        family=FAMILY,
        path=place.path,
        weights=weights,
        structured=False,
        facts={"models": len(models), "tensors": len(weights), "size": archive.file.size},
        files=FileFacts(records={archive.file.path: records}),
        inputs={place.name: Input(archive.file, (archive.file.size, records.digest() or archive.file.stamp))},
        bytes_read=archive.bytes_read,
        wanted=wanted,
        reread=functools.partial(read, place),
    )


def _check_members(archive: Archive) -> None:
    """Raise CorruptError for members that DDUF does not allow."""
    try:
        index = strict_json.parse(archive.read(_INDEX).decode())
    except ValueError as error:
        raise CorruptError(f"{archive.file.path}: its {_INDEX} is not valid JSON: {error}.") from None
    if type(index) is not dict:
        raise CorruptError(f"{archive.file.path}: its {_INDEX} is not a JSON object.")
    for name, row in archive.rows.items():
        folder, slash, _ = name.rpartition("/")
        if not name.endswith(_ENDINGS) or name.count("/") > 1 or "\\" in name or (slash and folder not in index):
            raise CorruptError(f"{archive.file.path}: member {brief(name)} is not allowed in DDUF.")
        if archive.methods[row]:
            raise CorruptError(
                f"{archive.file.path}: member {brief(name)} is compressed, but DDUF stores members uncompressed."
            )


def _tensors(archive: Archive, reader: Reader, name: str, row: int) -> dict[str, LazyTensor]:
    """Return the tensors of a file in the archive."""
    start = archive.start + archive.payloads[row]
    try:
        header = read_header(reader, start, start + archive.sizes[row])
    except CkptconvError as error:
        raise type(error)(f"In its member {brief(name)}: {error.message}", error.hint) from error
    archive.bytes_read += header.bytes_read
    return {**header.tensors}

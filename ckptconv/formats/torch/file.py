"""Files that torch.save wrote, in any container."""

from __future__ import annotations

from importlib import import_module

from ckptconv.errors import CkptconvError, CorruptError, UnsafeError, UnsupportedError
from ckptconv.formats.model_files import TORCH, torch_model
from ckptconv.formats.source import FileFacts, Source, Wanted
from ckptconv.formats.torch.container import Taken, TorchFile, is_stream
from ckptconv.pickles.refusing import refuse_attack
from ckptconv.pickles.vocabulary import DEFAULT_LIMITS, WHOLE_TREES, Limits
from ckptconv.plan import Input
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Reader

# Containers of torch.save other than zip archives: their names in messages, and the releases that write them.
TAR, STREAM = "tar archive", "stream"
_WRITTEN = {TAR: "before 0.1.10", STREAM: "before 1.6, or with _use_new_zipfile_serialization=False"}
# The module that reads each container: its `read` returns the content.
CONTAINERS: dict[str, str] = {
    TAR: "ckptconv.features.tar.read",
    STREAM: "ckptconv.features.torch_stream.read",
}
# The module that takes state dicts out of modules that were pickled as a whole: its `taken` returns the result.
MODULES: tuple[str, ...] = (
    "ckptconv.features.modules.whole",
)  # fmt: skip


def read_torch(place: Location | str, *, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Open a file that torch.save wrote. Read its description only; `limits` are those of its pickle.

    torch.load reads a file that begins like a zip archive as one, a file that tarfile opens as a tar archive, and any
    other as pickles. Raise CorruptError for a file that is several of these: other readers choose differently.
    """
    with (Location(place) if isinstance(place, str) else place).open_reader() as reader:
        return read_from(reader, limits=limits)


def read_from(reader: Reader, *, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Open a file that torch.save wrote, as `read_torch` does, through a reader of the file."""
    from ckptconv.storage.tar_header import HEAD  # formats that import this module may have no tar archives

    head = reader.read_at(0, min(HEAD, reader.file.size))
    try:
        return _read(reader, head, limits)
    except UnsafeError:
        raise
    except CkptconvError:
        refuse_attack("refuse_file", reader, head)
        raise


def _read(reader: Reader, head: bytes, limits: Limits) -> TorchFile:
    from ckptconv.storage.tar_header import is_tar

    container = TAR if is_tar(head) else STREAM if is_stream(head) else ""
    if container == TAR and head.startswith(LOCAL_SIGNATURE):
        raise CorruptError(
            f"{reader.file.path} is valid as the beginning of a zip archive and of a tar archive: readers would "
            "disagree on its contents."
        )
    if not container:
        from ckptconv.formats.torch.zip import read_zip

        return read_zip(reader, limits=limits)
    if container not in CONTAINERS:
        raise UnsupportedError(
            f"{reader.file.path} is a {container}, as written by torch.save {_WRITTEN[container]}.",
            "Load it with torch.load, and save it again with torch.save.",
        )
    content: TorchFile = import_module(CONTAINERS[container]).read(reader, limits)
    from ckptconv.storage.zip_elsewhere import ends_as_zip

    if ends_as_zip(reader):
        raise CorruptError(
            f"{reader.file.path} begins as a {container}, but ends as a zip archive: readers would disagree "
            "on its contents."
        )
    return content


def fingerprint(torch_file: TorchFile) -> Input:
    """Return the identity of this content: its size and CRCs, or, if no CRCs are recorded, its modification time."""
    digest = torch_file.records.digest()
    file = torch_file.file
    return Input(file, (file.size, file.stamp if digest is None else digest))


def read(place: Location, wanted: Wanted | None = None) -> Source:
    """Open a .pt, .pth, .bin or .ckpt file, or a directory with a model in one. Its weights are the tree in the file,
    with modules as their state dicts."""
    in_directory = place.kind == "directory"
    model = place.at(place.names[torch_model(place.names)].file) if in_directory else place
    torch_file = read_torch(model, limits=WHOLE_TREES)
    taken = Taken(torch_file.value, (), (), torch_file.opaque)
    # Modules are objects of unknown classes.
    if torch_file.opaque and not (wanted and wanted.raw):
        for module in MODULES:
            taken = import_module(module).taken(torch_file.value, torch_file.opaque, model.path)
    return Source(
        format=f"torch {torch_file.container}",
        family=TORCH,
        path=place.path,
        weights=taken.tree,
        facts={"files": 1, "size": torch_file.file.size} if in_directory else {"size": torch_file.file.size},
        files=FileFacts(
            [str(name) for name in taken.opaque],
            [str(name) for name in torch_file.globals],
            {torch_file.file.path: torch_file.records},
        ),
        values=taken.values,
        notes=[*torch_file.notes, *taken.notes],
        warnings=[*torch_file.warnings, *taken.warnings],
        shards=[model.path] if in_directory else [],
        inputs={model.name: fingerprint(torch_file)},
        bytes_read=torch_file.bytes_read,
    )

"""Load state dicts as torch tensors over a memory map of the checkpoint: no copy, and no code named in it runs."""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ckptconv.engine.execute import carry_out
from ckptconv.errors import CorruptError, FailedError, UsageError
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import Source
from ckptconv.formats.torch import file as torch_file
from ckptconv.options import OPTIONS, checked
from ckptconv.outputs import selection
from ckptconv.outputs.targets import TORCH_SUFFIXES
from ckptconv.plan import Data, FilePlan
from ckptconv.storage.files import Options, look
from ckptconv.storage.paths import basename, dirname, is_remote, join, normalize
from ckptconv.storage.spool import SpoolingReaders
from ckptconv.storage.writing import Writer, reason
from ckptconv.structure import keymap
from ckptconv.tensors.geometry import contiguous_strides
from ckptconv.tensors.lazy import LazyTensor, Stored, Tagged, View
from ckptconv.tensors.moves import File
from ckptconv.text import install

# Without MAP_NORESERVE, Linux counts a whole private map against the available memory; with it, only written pages.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_MEMORY = 8 << 20


@checked(OPTIONS)
def load_state_dict(
    path: str | os.PathLike[str], *, key: str = "", storage_options: Mapping[str, Any] | None = None
) -> Any:
    """Return the state dict in a safetensors output, a `.pt` file, or any other checkpoint, with torch tensors.

    The tensors are in a private map of the files: they are read, and take memory, only when used. They can be changed
    in place; that does not change the file. They share memory as the saved tensors did. Data that cannot be used in
    place (other byte order, unaligned, in pieces on several ranks, compressed, remote) is copied into memory. From a
    safetensors file, tensors that overlap in part are copied too, and all others are in C order, whatever their strides
    were.

    With a structure record, or from a `.pt` file, the result is nested as it was saved; else it is a dict of tensors by
    name. `key` selects a subtree, as in "state_dict". Objects of classes known by name only stay
    `ckptconv.tree.Opaque`. Raises a `CkptconvError`: `UsageError` if torch is not installed. Warns if a `.pt` file
    beside `path` is newer.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"load_state_dict needs torch, which cannot be imported: {error}.", install("torch")
        ) from error

    path = normalize(path)
    _warn_of_newer(path)
    options = dict(storage_options or {})
    source = open_source(path, key=key, storage_options=options)
    tree = selection.subtree(source.tree(key), key, path) if key else source.weights
    tensors, structure, *_ = keymap.describe(tree, tagged=True)
    with _Memory(torch, source, options) as memory, warnings.catch_warnings():
        # torch warns that the buffer is read-only where a private map was refused.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = {name: memory.tensor(tensor) for name, tensor in tensors.items()}
    return keymap.unflatten(flat, structure, live_values=True, lay_out=False)


def _warn_of_newer(path: str) -> None:
    """Warn if a torch file beside the safetensors file `path` is newer."""
    stem, suffix = os.path.splitext(path)
    if suffix != ".safetensors" or is_remote(path):
        return
    stems = [stem, join(dirname(path), "pytorch_model")] if basename(stem) == "model" else [stem]
    for original in (before + ending for before in stems for ending in TORCH_SUFFIXES):
        try:
            newer = os.stat(original).st_mtime_ns > os.stat(path).st_mtime_ns
        except OSError:
            continue
        if newer:
            warnings.warn(
                f"{original} is newer than {path}, which is loaded: convert it again if they should be the same.",
                stacklevel=4,
            )


class _Memory:
    """Maps the files of a source and makes tensors over the maps."""

    def __init__(self, torch: ModuleType, source: Source, options: Options) -> None:
        self._torch = torch
        # In torch files, tensors share memory as they did when saved; in other formats each has its own elements.
        self._in_place = source.family == torch_file.FAMILY
        self._dtype = source.default_dtype
        self._readers = SpoolingReaders(options)
        self._maps: dict[File, mmap.mmap | None] = {}
        self._storages: dict[tuple[File, int, int], Any] = {}

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.close()

    def tensor(self, leaf: LazyTensor) -> Any:
        """Return the torch tensor that `leaf` describes."""
        assert isinstance(leaf, Tagged)
        tensor = selection.converted("", leaf.tensor, self._dtype, widen_only=True)
        if not tensor.numel:
            return self._torch.empty(tensor.shape, dtype=getattr(self._torch, tensor.dtype.name))
        stored = _stored(tensor)
        if stored is not None:
            start, nbytes = stored.offset, stored.nbytes
            if self._in_place and leaf.facts.storage is not None:
                start -= leaf.facts.storage_offset * _itemsize(leaf.tensor)
                nbytes = leaf.facts.storage_nbytes
            made = self._mapped(stored, start, nbytes)
            if made is not None:
                return made
        return self._copied(tensor)

    def _mapped(self, stored: Stored, start: int, nbytes: int) -> Any:
        """Return a tensor over `nbytes` bytes from byte `start` of the file; None if they cannot be used in place."""
        item = stored.dtype.itemsize
        if start % item or (stored.offset - start) % item:
            return None
        storage = self._storage(stored.file, start, nbytes)
        if storage is None:
            return None
        empty = self._torch.empty(0, dtype=getattr(self._torch, stored.dtype.name))
        return empty.set_(storage, (stored.offset - start) // item, stored.shape, stored.strides)

    def _storage(self, file: File, start: int, nbytes: int) -> Any:
        place = (file, start, nbytes)
        storage = self._storages.get(place)
        if storage is None:
            if file not in self._maps:
                self._maps[file] = _map(file)
            memory = self._maps[file]
            if memory is None:
                return None
            flat = self._torch.frombuffer(memory, dtype=self._torch.uint8, count=nbytes, offset=start)
            storage = self._storages[place] = flat.untyped_storage()
        return storage

    def _copied(self, tensor: LazyTensor) -> Any:
        flat = self._torch.empty(tensor.nbytes, dtype=self._torch.uint8)
        plan = FilePlan("", tensor.nbytes, (Data(0, tensor, ""),))
        carry_out(plan, _Filling(flat), self._readers, jobs=1, memory=_MEMORY)
        return flat.view(getattr(self._torch, tensor.dtype.name)).reshape(tensor.shape)


class _Filling(Writer):
    """Writes into a tensor of bytes."""

    positioned = True

    def __init__(self, flat: Any) -> None:
        self._view = memoryview(flat.numpy())

    def write_at(self, offset: int, data: memoryview) -> None:
        self._view[offset : offset + len(data)] = data


def _stored(tensor: LazyTensor) -> Stored | None:
    """Return `tensor` as elements stored in one file; None if it is anything else."""
    if isinstance(tensor, View):
        inner = _stored(tensor.tensor)
        if inner is None:
            return None
        if tensor.shape == (*inner.shape, 2) and inner.dtype.kind == "c":
            return Stored(
                inner.file, inner.offset, tensor.dtype, tensor.shape, (*(2 * stride for stride in inner.strides), 1)
            )
        if inner.contiguous:
            return Stored(inner.file, inner.offset, tensor.dtype, tensor.shape, contiguous_strides(tensor.shape))
        same = tensor.shape == inner.shape and tensor.dtype.itemsize == inner.dtype.itemsize
        return Stored(inner.file, inner.offset, tensor.dtype, inner.shape, inner.strides) if same else None
    return tensor if isinstance(tensor, Stored) else None


def _itemsize(tensor: LazyTensor) -> int:
    """Return the bytes of one element; for a complex number stored as a pair, of both."""
    pair = isinstance(tensor, View) and tensor.tensor.dtype.kind == "c"
    return 2 * tensor.dtype.itemsize if pair else tensor.dtype.itemsize


def _map(file: File) -> mmap.mmap | None:
    """Return a private map of a whole file; None if the file is packed, remote, or not a regular file."""
    if file.packed or is_remote(file.path) or look(file.path).kind != "file":
        return None
    try:
        # Opening a pipe would otherwise wait for a writer.
        with open(file.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            if os.fstat(opened.fileno()).st_size != file.size:
                raise CorruptError(f"{file.path} changed while it was opened.", "Load it again.")
            try:
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                return mmap.mmap(opened.fileno(), file.size, mmap.MAP_PRIVATE | _NO_RESERVE, protection)
            except OSError:
                return mmap.mmap(opened.fileno(), file.size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FailedError(f"{file.path} cannot be mapped: {reason(error)}.") from error

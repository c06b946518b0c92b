"""Save a state dict as safetensors: what converting it would write, from memory."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from ckptconv.conversion import convert
from ckptconv.errors import UsageError
from ckptconv.formats.safetensors import RESERVED
from ckptconv.formats.source import Source
from ckptconv.formats.torch import file as torch_file
from ckptconv.options.table import OPTIONS, checked
from ckptconv.outputs.kinds import TORCH_SUFFIXES
from ckptconv.result import Report
from ckptconv.storage.files import holding
from ckptconv.storage.paths import normalize
from ckptconv.structure import keymap, live
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.geometry import contiguous_strides
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.tensors.moves import File
from ckptconv.text import brief

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import ConvertOptions
    from ckptconv.storage.progress import AnyProgress

_numbers = itertools.count()


@checked(OPTIONS)
def save_state_dict(
    state: Any,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    **options: Unpack[ConvertOptions],
) -> Report:
    """Write `state`, nested as it may be, as safetensors: `load_state_dict` returns it as it was.

    `path` is one file if it ends in ".safetensors", else a directory, of shards and an index with `max_shard_size`.
    Tensors are torch's, on any device, numpy's arrays in mappings, which come back as torch's, and those of an opened
    checkpoint; each that shares its memory with another is stored once. What else the state holds goes into the
    structure record, as a conversion has it. `metadata` is written beside that. `options` are the fields of `Options`
    that a conversion from memory can use: `max_shard_size`, `dtype`, `include`, `exclude`, `rename`, `structure`,
    `verify`, `manifest` and so on.

    `progress` and `on_total` are those of `convert`. Nothing has a final name before all is complete. Raise a
    CkptconvError: UsageError for what cannot be stored.

    Examples:
        >>> report = ckptconv.save_state_dict({"w": torch.ones(2), "step": 7}, "saved.safetensors")
        >>> ckptconv.load_state_dict("saved.safetensors")
        {'w': tensor([1., 1.]), 'step': 7}
    """
    if normalize(path).endswith(TORCH_SUFFIXES):
        raise UsageError(f"{path} is named as a file for torch.load, and this writes safetensors.", "Use torch.save.")
    buffers = _Buffers()
    described = keymap.describe(buffers.without_arrays(state))
    tensors = {name: buffers.tensor(value) for name, value in described.tensors.items()}
    source = Source(
        "state dict",
        torch_file.FAMILY,
        "<state dict>",
        keymap.unflatten(tensors, described.structure, live_values=False, lay_out=False),
        counts={"tensors": len(tensors)},
        inputs=buffers.inputs(),
        remarks=_checked(metadata, tensors),
    )
    with holding(buffers.held):
        return convert(source, path, progress=progress, on_total=on_total, **options)


def _checked(metadata: Mapping[Any, Any] | None, names: Collection[str]) -> dict[str, str]:
    """Return `metadata`. Raise UsageError if it is not text by text, or means something to a reader of tensors."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UsageError(f"metadata {brief(metadata)} is not a mapping.")
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"metadata {key!r}: {value!r} is not text by text, as safetensors has it.")
        if key in RESERVED or value in names:
            what = "is written by itself" if key in RESERVED else f"would make it another name of the tensor {value!r}"
            raise UsageError(f"metadata {key!r} {what}.", "Give it another name.")
    return dict(metadata or {})


class _Buffers:
    """The memory that tensors are in, as files. `held` are the bytes of each by its name."""

    def __init__(self) -> None:
        self.held: dict[str, memoryview] = {}
        self._files: dict[Hashable, File] = {}
        self._kept: list[Any] = []
        self._others: set[File] = set()
        self._token = f"<state dict {os.getpid()}.{next(_numbers)}>"

    def tensor(self, value: Any) -> LazyTensor:
        """Return a lazy tensor of the elements of a torch tensor; a lazy one as it is."""
        if isinstance(value, LazyTensor):
            self._others.update(file for file in value.inputs() if file.path not in self.held)
            return value
        torch = sys.modules["torch"]
        data, facts = live.bare(value.cpu())
        whole = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())
        dtype = DTYPES[live.dtype_name(data)]
        file = self._file((facts.storage, facts.storage_nbytes), whole.numpy(), data)
        return Stored(file, facts.storage_offset * dtype.itemsize, dtype, tuple(data.shape), tuple(data.stride()))

    def without_arrays(self, state: Any) -> Any:
        """Return `state` with lazy tensors for the numpy arrays that dicts lead to; itself if there are none."""
        if not isinstance(state, Mapping):
            return state
        made = {id(state): dict(state)}
        changed = False
        stack = [made[id(state)]]
        while stack:
            items = stack.pop()
            for key, value in items.items():
                if type(value) is dict:
                    if id(value) not in made:
                        made[id(value)] = dict(value)
                        stack.append(made[id(value)])
                    items[key] = made[id(value)]
                elif live.is_array(value):
                    items[key] = self._of_array(value)
                    changed = True
        return made[id(state)] if changed else state

    def _of_array(self, array: Any) -> LazyTensor:
        """Return a lazy tensor of the elements of a numpy array."""
        dtype = DTYPES.get(array.dtype.name)
        if dtype is None:
            raise UsageError(f"An array of numpy's {array.dtype} cannot be stored as a tensor.")
        array = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        file = self._file(id(array), array.reshape(-1).view("u1"), array)
        return Stored(file, 0, dtype, array.shape, contiguous_strides(array.shape))

    def _file(self, key: Hashable, array: Any, owner: Any) -> File:
        """Return the file that stands for the bytes of `array`; `owner` keeps them alive."""
        if key not in self._files:
            name = f"{self._token}/{len(self._files)}"
            self.held[name] = memoryview(array).cast("B")
            self._kept.append(owner)
            self._files[key] = File(name, len(self.held[name]))
        return self._files[key]

    def inputs(self) -> dict[str, Hashable]:
        """Return what identifies the data: a run that was interrupted is resumed only with the same."""
        digests = ((len(data), hashlib.sha256(data).hexdigest()) for data in self.held.values())
        others = {file.path: (file.size, file.stamp) for file in self._others}
        return {**{str(number): digest for number, digest in enumerate(digests)}, **others}

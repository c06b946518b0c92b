"""Save a state dict as safetensors: the files that its conversion would write, from memory."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from ckptconv.conversion import convert
from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.features.live_objects.objects import state_dicts
from ckptconv.features.live_objects.tensors import bare
from ckptconv.features.saving.buffers import Buffers
from ckptconv.features.unflattening.decoder import unflatten
from ckptconv.formats import model_files
from ckptconv.formats.source import FileFacts, Source
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.options.option import checked
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.selected import METADATA
from ckptconv.pickles.children import is_tensor, walk
from ckptconv.pickles.nodes import Opaque
from ckptconv.process import no_garbage
from ckptconv.result import Report
from ckptconv.storage.files import holding
from ckptconv.storage.paths import normalize
from ckptconv.structure import keymap, leaves
from ckptconv.structure.record import RESERVED
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored, TensorFacts
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import contiguous_strides
from ckptconv.text import brief, count_of, some

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import ConvertOptions
    from ckptconv.storage.progress import AnyProgress

_numbers = itertools.count()
_INSIDE = (
    "The state contains objects of classes that load_state_dict does not create again, with tensors inside: {}. Save "
    "these tensors in plain containers."
)


@leaving(UNWRITTEN)
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
    checkpoint; each that shares its memory with another is stored once. An object with a method state_dict, such as a
    module or an optimizer, is saved as what that returns, without `raw`. Other values of the state go into the
    structure record, as in a conversion. `metadata` is written in addition. `options` are the fields of `Options` that
    a conversion from memory can use: `max_shard_size`, `dtype`, `include`, `exclude`, `rename`, `structure`, `verify`,
    `manifest` and so on; with `like=PATH`, the output has the files, dtypes and configuration of the checkpoint that
    `state` was loaded from. Warns of tensors inside objects that `load_state_dict` does not make again.

    `progress` and `on_total` are those of `convert`. Files get their final names when all are complete. Raise a
    CkptconvError: UsageError for values that cannot be stored.

    Examples:
        >>> report = ckptconv.save_state_dict({"w": torch.ones(2), "step": 7}, "saved.safetensors")
        >>> [file.path for file in report.outputs], report.tensors
        (['saved.safetensors'], 1)
    """
    if isinstance(state, (str, os.PathLike)):
        place: object = path
        hint = "The state comes first: save_state_dict(STATE, PATH)."
        if isinstance(place, (str, os.PathLike)):
            hint = "Use ckptconv.convert(INPUT, OUTPUT) to convert a checkpoint."
        raise UsageError(f"{brief(os.fspath(state))} is not a state dict.", hint)
    if normalize(path).endswith(TORCH_SUFFIXES):
        raise UsageError(
            f"{path} has the name of a file for torch.load, but this function writes safetensors.", "Use torch.save."
        )
    memory = _Memory()
    with no_garbage():
        with state_dicts(raw=bool(options.get("raw"))) as stated:
            # The conversion records the order, as everything else.
            described = keymap.describe(memory.without_arrays(state), keep_order=False)
        tensors = memory.tensors(described.tensors)
        tree = unflatten(tensors, described.structure, live_values=False)
        opaque = [node for node in walk(tree) if type(node) is Opaque] if described.structure else []
        inside = dict.fromkeys(node.name for node in opaque if any(map(is_tensor, walk(node))))
        source = Source(
            "state dict",
            model_files.TORCH,
            "<state dict>",
            tree,
            counts={"tensors": len(tensors)},
            inputs=memory.inputs(),
            remarks=_checked(metadata, tensors),
            files=FileFacts(opaque=list(dict.fromkeys(node.name for node in opaque))),
            notes=_notes(stated),
            warnings=[_INSIDE.format(some(inside, 3, str))] if inside else [],
        )
    for warning in source.warnings:
        warnings.warn(warning, stacklevel=4)  # the line that called the library
    with holding(memory.held):
        return convert(source, path, progress=progress, on_total=on_total, **options)


def _notes(stated: Mapping[str, int]) -> list[str]:
    """Return the note on objects that were taken by their state dicts, of which `stated` has the classes."""
    if not stated:
        return []
    objects = f"{count_of(sum(stated.values()), 'object')} of {some(sorted(stated), 3, str)}"
    return [f"The state contains {objects}. The output has the result of state_dict()."]


def _checked(metadata: Mapping[Any, Any] | None, names: Collection[str]) -> dict[str, str]:
    """Return `metadata`. Raise UsageError if it is not text by text, or means something to a reader of tensors."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UsageError(f"metadata {brief(metadata)} is not a mapping.")
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"metadata {key!r}: {value!r}: safetensors metadata must map strings to strings.")
        # Every program says that its tensors are torch's, which they are.
        is_ours = key in RESERVED and (key, value) not in METADATA.items()
        if is_ours or value in names:
            problem = (
                "is written automatically" if is_ours else f"would declare it as another name of the tensor {value!r}"
            )
            raise UsageError(f"metadata {key!r} {problem}.", "Give it another name.")
    return dict(metadata or {})


class _Memory:
    """The memory that tensors are in, as files: one of all torch tensors, one of each array. `held` has their bytes."""

    def __init__(self) -> None:
        self.held: dict[str, Buffers] = {}
        self._arrays: dict[int, File] = {}
        self._kept: list[Any] = []
        self._others: set[File] = set()
        self._token = f"<state dict {os.getpid()}.{next(_numbers)}>"

    def tensors(self, values: Mapping[str, Any]) -> dict[str, LazyTensor]:
        """Return lazy tensors of the elements of torch tensors; lazy ones as they are."""
        storages = Buffers(self._token)
        starts: dict[Hashable, int] = {}
        facts: dict[str, TensorFacts] = {}
        arrays: dict[str, Any] = {}
        for name, value in values.items():
            arrays[name] = value
            if isinstance(value, LazyTensor):
                self._others.update(file for file in value.inputs() if file.path not in self.held)
                continue
            arrays[name], facts[name] = data, kind = bare(value.cpu())
            key = kind.storage, kind.storage_nbytes
            if key not in starts:
                torch = sys.modules["torch"]
                whole = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())
                starts[key] = storages.add(memoryview(whole.numpy()))
                self._kept.append(data)
        if storages.buffers:
            self.held[self._token] = storages
        for name, kind in facts.items():
            data, dtype = arrays[name], DTYPES[leaves.dtype_name(arrays[name])]
            start = starts[kind.storage, kind.storage_nbytes] + kind.storage_offset * dtype.itemsize
            arrays[name] = Stored(storages.file, start, dtype, tuple(data.shape), kind.strides)
        return arrays

    def without_arrays(self, state: Any) -> Any:
        """Return `state` with lazy tensors for the numpy arrays that dicts lead to; itself if there are none."""
        if not isinstance(state, Mapping):
            return state
        copies = {id(state): dict(state)}
        changed = False
        stack = [copies[id(state)]]
        while stack:
            items = stack.pop()
            for key, value in items.items():
                if type(value) is dict:
                    if id(value) not in copies:
                        copies[id(value)] = dict(value)
                        stack.append(copies[id(value)])
                    items[key] = copies[id(value)]
                elif _is_array(value):
                    items[key] = self._of_array(value)
                    changed = True
        return copies[id(state)] if changed else state

    def _of_array(self, array: Any) -> LazyTensor:
        """Return a lazy tensor of the elements of a numpy array."""
        dtype = DTYPES.get(array.dtype.name)
        if dtype is None:
            raise UsageError(f"A numpy array with the dtype {array.dtype} cannot be stored as a tensor.")
        array = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        name = f"{self._token}/{len(self._arrays)}"
        file = self._arrays.get(id(array))
        if file is None:
            self.held[name] = Buffers(name, memoryview(array.reshape(-1).view("u1")))
            self._kept.append(array)
            file = self._arrays[id(array)] = self.held[name].file
        return Stored(file, 0, dtype, array.shape, contiguous_strides(array.shape))

    def inputs(self) -> dict[str, Hashable]:
        """Return the identity of the data: a run that was interrupted is resumed only with the same."""
        digest = hashlib.sha256()
        for data in itertools.chain.from_iterable(file.buffers for file in self.held.values()):
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        others = {file.path: (file.size, file.stamp) for file in self._others}
        return {"0": digest.hexdigest(), **others}


def _is_array(value: Any) -> bool:
    """Return whether `value` is a numpy array of elements that a tensor can have."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and _is_number(value.dtype)


def _is_number(dtype: Any) -> bool:
    # ml_dtypes registers its dtypes with the kind of raw data, or of a float.
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.names is None and dtype.name in DTYPES)

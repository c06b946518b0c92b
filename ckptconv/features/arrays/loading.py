"""Load state dicts as torch tensors: maps of the checkpoint's files where possible, and no code named in it runs."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from ckptconv.features.arrays.frameworks import framework
from ckptconv.features.arrays.loading_options import INSTEAD, LOADING
from ckptconv.features.arrays.memory import Memory, WantedArray, warn, warn_of
from ckptconv.features.unflattening.decoder import unflatten
from ckptconv.formats import model_files
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import Source
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.pipeline import check_pieces
from ckptconv.process import no_garbage
from ckptconv.storage.paths import basename, dirname, is_remote, join, normalize
from ckptconv.structure import keymap
from ckptconv.structure.record import Flattened
from ckptconv.tensors.lazy import LazyTensor, Tagged, View, untagged

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import LoadOptions


@checked(LOADING, INSTEAD)
def load_state_dict(
    path: str | os.PathLike[str],
    *,
    device: Any = None,
    **options: Unpack[LoadOptions],
) -> dict[str, Any]:
    """Return the state dict in a checkpoint of any format, with torch tensors.

    The tensors are in a private map of the files: they are read, and take memory, only when used. They can be changed
    in place; that does not change the file. They share memory as the saved tensors did. Data that cannot be used in
    place (cast, other byte order, unaligned, in pieces on several ranks, compressed, remote) is copied into memory.
    From a safetensors file, tensors that overlap in part are copied too, and all others are in C order, even if their
    strides were others.

    With a structure record, or from a `.pt` file, the result is nested as it was saved; else it is a dict of tensors by
    name. `key` selects a subtree, as in "state_dict"; `tag` is for DeepSpeed, `master` and `unstack` for Megatron-core;
    `raw` keeps whole modules as objects; `alone` takes one file of many, such as a rank's, by itself. Floating-point
    tensors are cast to `dtype`, and all moved to `device`, if these are given. Objects of classes known by name only
    stay `ckptconv.pickles.nodes.Opaque`. Raises a `CkptconvError`. Gives the warnings of a conversion, such as one
    about a tensor that is left out, and warns if a `.pt` file next to `path` is newer.

    Examples:
        >>> state = ckptconv.load_state_dict("model.pt", dtype="bf16")
        >>> state["weight"].dtype, state["bias"].shape
        (torch.bfloat16, torch.Size([3]))
    """
    torch = framework("pt")
    path = normalize(path)
    _warn_of_newer(path)
    chosen = Options(**options)
    key, dtype = chosen.key, chosen.dtype
    with no_garbage():
        source = open_source(path, key=key, **chosen.opening())
        source.check_weights()
        warn_of(source)
        tree = selection.subtree(source.tree(key), key, path) if key else source.weights
        # The tensors become a dict in the order of the tree, even if a file would have another order.
        described = keymap.describe(tree, keep_order=False, tagged=True)
        check_pieces(source, described.tensors)
        wanted = _wanted(source, described, dtype)
        memory = Memory(source.path, dict(chosen.storage_options))
        try:
            with warnings.catch_warnings():
                # torch warns that the buffer is read-only where a private map was refused.
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                arrays = memory.arrays(wanted, torch)
        finally:
            memory.close()
        if device is not None:
            # Tied tensors are one array, and stay one.
            placed = {id(array): torch.placed(array, device) for array in arrays}
            arrays = [placed[id(array)] for array in arrays]
        flat = dict(zip(described.tensors, arrays, strict=True))
        state: dict[str, Any] = unflatten(flat, described.structure, live_values=True, lay_out=False)
        return state


def _wanted(source: Source, described: Flattened, dtype: str | None) -> list[WantedArray]:
    """Return the arrays to make: the tensors as they are cast, and the memory that they share."""
    # In torch files, tensors share memory as they did when saved; in other formats each has its own elements.
    in_place = source.family == model_files.TORCH
    plain = {name: untagged(tensor) for name, tensor in described.tensors.items()}
    tied = {} if in_place else selection.untie(plain, source.owners)
    shared = {*tied, *tied.values()}
    wanted = []
    for name, leaf in described.tensors.items():
        tensor = plain[tied.get(name, name)]
        if name not in described.uncastable:
            widen_only = dtype is None
            tensor = selection.converted(name, tensor, dtype or source.defaults.dtype, widen_only)
        before, storage = 0, None
        facts = leaf.facts if isinstance(leaf, Tagged) else None
        if in_place and facts is not None and facts.storage is not None:
            before, storage = facts.storage_offset * _itemsize(plain[name]), facts.storage_nbytes
        wanted.append(WantedArray(name, tensor, before, storage, tied.get(name, name) if name in shared else None))
    return wanted


def _itemsize(tensor: LazyTensor) -> int:
    """Return the bytes of one element; for a complex number stored as a pair, of both."""
    pair = isinstance(tensor, View) and tensor.tensor.dtype.kind == "c"
    return 2 * tensor.dtype.itemsize if pair else tensor.dtype.itemsize


def _warn_of_newer(path: str) -> None:
    """Warn if a torch file next to the safetensors file `path` is newer."""
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
            warn(
                f"{original} is newer than {path}, which was loaded. If the two should match, convert {original} again."
            )

"""A checkpoint of any format as a storage reader of `torch.distributed.checkpoint.load`.

Source: torch/distributed/checkpoint/{storage,planner,metadata}.py of torch 2.4 to 2.13. The planner asks for boxes of
tensors by the key that `dcp.save` would have given them: those of the shards that the rank has, and no others are read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptconv.features.arrays.frameworks import framework
from ckptconv.features.arrays.memory import Memory, warn_of
from ckptconv.features.arrays.tensor import Tensor
from ckptconv.features.dcp_output.contents import TORCH, contents
from ckptconv.features.dcp_output.states import with_states
from ckptconv.features.dcp_reader.options import DISTRIBUTED
from ckptconv.features.joining.chunks import Box
from ckptconv.features.unflattening.decoder import unflatten
from ckptconv.formats.opening import opened
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.storage.paths import normalize
from ckptconv.structure import keymap
from ckptconv.tensors.slices import Span, sliced

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.futures import Future
    from typing_extensions import Unpack

    from ckptconv.options.keywords import DistributedOptions
else:
    StorageReader = object  # torch is imported when something is loaded


class DistributedReader(StorageReader):
    """A checkpoint of any format, for `torch.distributed.checkpoint.load(state, storage_reader=…)`.

    `path` is anything that is converted: a file, a ZeRO, FSDP or Megatron-core checkpoint, quantized weights with a
    map, a URL. Its tensors have the keys that `safetensors2dcp` gives them: `model_key="model"` is for a state dict
    {"model": …}; `states` names the checkpoint with the optimizer's states, `path` itself for one. `options` choose,
    rename and cast them. Each rank reads the bytes of its own shards only. Tensors that are stored twice are not
    compared, and objects of classes that are known by name only are left out.

    Raises a `CkptconvError` for a path that cannot be opened.

    Examples:
        >>> state = {"model": get_model_state_dict(model)}  # doctest: +SKIP
        >>> dcp.load(state, storage_reader=DistributedReader("run/global_step100", model_key="model"))  # doctest: +SKIP
    """

    @checked(DISTRIBUTED)
    def __init__(self, path: str | os.PathLike[str], **options: Unpack[DistributedOptions]) -> None:
        path = normalize(path)
        chosen = Options(**{"to": TORCH, "opaque": "drop", **options})
        is_own = bool(chosen.states) and normalize(chosen.states) == path
        source = opened(path, chosen, key=chosen.key, states=is_own)
        if chosen.states:
            source = with_states(source, path, chosen.states, **chosen.opening())
        warn_of(source)
        saved = contents(source, chosen)
        self._leaves = {**saved.tensors, **saved.values}
        self._tensors = {key: leaf.value for key, leaf in saved.tensors.items()}
        self._memory = Memory(source.path, dict(chosen.storage_options), mapped=False, spool_dir=chosen.spool_dir)

    def close(self) -> None:
        """Close the files."""
        self._memory.close()

    # ---- called by torch

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of the same checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the keys, dtypes and shapes of all tensors, each in one chunk, and the keys of other values."""
        import torch
        from torch.distributed.checkpoint import metadata as described

        arrays = framework("pt")
        entries: dict[str, Any] = {}
        for key in self._leaves:
            tensor = self._tensors.get(key)
            if tensor is None:
                entries[key] = described.BytesStorageMetadata()
                continue
            arrays.check(key, tensor.dtype)
            size = torch.Size(tensor.shape)
            chunk = described.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = described.TensorProperties(dtype=getattr(torch, tensor.dtype.name))
            entries[key] = described.TensorStorageMetadata(properties, size, [chunk])
        paths = {key: leaf.path for key, leaf in self._leaves.items()}
        return described.Metadata(state_dict_metadata=entries, planner_data=paths, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return a rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a rank's plan into its tensors. Raise as `Tensor.read_into` does."""
        import torch
        from torch.distributed.checkpoint.planner import LoadItemType

        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._pickled(key))
                continue
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            self._read(key, box, target)
            planner.commit_tensor(item, target)
        done: Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: torch may not make a reader from a path by itself."""
        return False

    # ---- reading

    def _read(self, key: str, box: Box, target: Any) -> None:
        """Read a box of a tensor into `target`, a tensor of that shape."""
        whole = self._tensors[key]
        spans = [Span(start, 1, size) for start, size in zip(box.offsets, box.sizes, strict=True)]
        part = Tensor(key, sliced(whole, spans), self._memory, "pt")
        is_alike = str(target.dtype) == f"torch.{part.dtype.name}" and tuple(target.shape) == part.shape
        if is_alike and target.device.type == "cpu" and target.is_contiguous():
            part.read_into(target)
        else:
            target.copy_(part.torch())

    def _pickled(self, key: str) -> io.BytesIO:
        """Return a value that is no tensor as torch saves it."""
        import torch

        flat, record = keymap.flatten({"": self._leaves[key].value})
        value: Mapping[str, Any] = unflatten(flat, record, live_values=True)
        file = io.BytesIO()
        torch.save(value[""], file)
        file.seek(0)
        return file

"""Live tensors as leaves of a tree: which values are tensors, and the facts that are stored with their bytes.

Neither torch nor numpy is imported here: a tree cannot hold objects of a library that is not imported.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.lazy import TensorFacts
from ckptconv.tensors.strides import is_contiguous


def is_imported() -> bool:
    """Whether torch is imported."""
    return sys.modules.get("torch") is not None


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def dtype_name(tensor: Any) -> str:
    """Return the name of the dtype of a LazyTensor or a torch tensor, as in `tensors.DTYPES`; of others, its text."""
    dtype = tensor.dtype
    return dtype.name if type(dtype) is DType else _text_of(dtype).removeprefix("torch.")


# There are many tensors, of few dtypes on few devices.
_text_of = functools.lru_cache(maxsize=256)(str)


def is_storage(value: Any) -> bool:
    """Whether `value` is a torch storage, typed or untyped."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, (torch.TypedStorage, torch.UntypedStorage))


def is_plain(tensor: Any) -> bool:
    """Whether a torch tensor consists of elements in a storage, which can be stored as they are."""
    torch = sys.modules["torch"]
    return bool(
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and not is_wrapper(tensor)
    )


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is of a subclass that only wraps others, its attributes, and has no elements itself."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or hasattr(tensor, "full_tensor"):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or not vars(tensor):
        return False
    try:
        return tensor.device.type == "meta" or not tensor.data_ptr()
    except RuntimeError:  # one of torch's own that stand for tensors without data
        return False


def is_ordinary(value: Any) -> bool:
    """Whether `value` is a torch tensor of no other class, whose elements are in C order and safetensors has."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return False
    dtype = DTYPES.get(dtype_name(value))
    return dtype is not None and dtype.code is not None and is_plain(value) and value.is_contiguous()


def bare(tensor: Any) -> tuple[Any, TensorFacts]:
    """Return a plain torch tensor detached, and the facts about it. Raise UsageError if it has no storage."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind is not torch.Tensor and hasattr(tensor, "full_tensor"):
        raise UsageError(
            "The tree holds a DTensor; this process has only a part of it.",
            "Call full_tensor() on it, in all processes, or save it with torch.distributed.checkpoint.",
        )
    if kind is not torch.Tensor and is_storage(tensor):
        dtype = getattr(tensor, "dtype", torch.uint8)
        tensor = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor)
        data, facts = bare(tensor)
        return data, facts._replace(kind="storage")
    attributes = vars(tensor) or None
    data, form, requires_grad = tensor, "tensor", tensor.requires_grad
    if requires_grad or kind is not torch.Tensor or attributes:
        data, form = tensor.detach().as_subclass(torch.Tensor), kind_of(tensor)
    # Store the values that torch's conjugate and negative flags stand for.
    data = data.resolve_conj().resolve_neg()
    try:
        storage = data.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UsageError(f"A {class_name(kind)} has no data to store: {str(error).rstrip('.')}.") from error
    shares = address and data.numel()
    return data, TensorFacts(
        form,
        requires_grad,
        attributes,
        (_text_of(data.device), address) if shares else None,
        nbytes,
        data.storage_offset(),
        tuple(data.stride()),
    )


def kind_of(tensor: Any) -> str:
    """Return the kind of a torch tensor in a record: a parameter, a buffer, a tensor, or its class."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind is torch.nn.Parameter:
        return "parameter"
    if kind is torch.Tensor:
        return "buffer" if getattr(tensor, "_is_buffer", False) else "tensor"
    return class_name(kind)


def class_name(kind: type) -> str:
    """Return the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.lru_cache(maxsize=4096)  # there are many tensors, but few distinct shapes
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements laid out by `strides` are dense, with the dimensions in some order."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    return is_contiguous(tuple(shape[dim] for dim in order), tuple(strides[dim] for dim in order))

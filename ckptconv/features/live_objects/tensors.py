"""Tensors of torch: recognition of those that are elements in a storage, and the facts that are stored with these."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.structure import leaves
from ckptconv.tensors.lazy import TensorFacts

# There are many tensors, on few devices.
_text_of = functools.lru_cache(maxsize=256)(str)


def taken(value: Any) -> tuple[Any, TensorFacts] | None:
    """Return a tensor or a storage of torch as a tensor, detached, and the facts about it; None for any other value."""
    is_one = is_plain(value) if leaves.is_tensor(value) else is_storage(value)
    return bare(value) if is_one else None


def is_storage(value: Any) -> bool:
    """Return whether `value` is a torch storage, typed or untyped."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, (torch.TypedStorage, torch.UntypedStorage))


def is_plain(tensor: Any) -> bool:
    """Return whether a torch tensor consists of elements in a storage, which can be stored unchanged."""
    torch = sys.modules["torch"]
    return bool(
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and not is_wrapper(tensor)
    )


def is_wrapper(tensor: Any) -> bool:
    """Return whether a tensor is of a subclass that only wraps its attributes, and has no elements itself."""
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


def bare(tensor: Any) -> tuple[Any, TensorFacts]:
    """Return a plain torch tensor detached, and the facts about it. Raise UsageError if it has no storage."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind is not torch.Tensor and hasattr(tensor, "full_tensor"):
        raise UsageError(
            "The tree contains a DTensor, of which this process has only a part.",
            "Call full_tensor() on it in all processes, or save it with torch.distributed.checkpoint.",
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


def stored(tensor: Any, dtype: str) -> Any:
    """Return a torch tensor with its bits as elements of `dtype`: a complex number as a pair of these."""
    torch = sys.modules["torch"]
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(getattr(torch, dtype))


def viewed_as(tensor: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return the tensor of `dtype` and `shape` that is `stored` as `tensor`, a tensor of torch or an array of numpy.

    It is `tensor` itself if `dtype` is quantized: torch makes those from integers.
    """
    if not leaves.is_tensor(tensor):
        return tensor.view(dtype).reshape(shape) if dtype == "complex128" else tensor
    torch = sys.modules["torch"]
    if not dtype.startswith("complex"):
        return tensor.view(getattr(torch, dtype)) if dtype.startswith("bits") else tensor
    if tensor.data_ptr() % (2 * tensor.element_size()):
        # Pairs in a safetensors file may be misaligned: torch's instructions for copying complex numbers crash on
        # these.
        tensor = tensor.clone()
    try:
        return torch.view_as_complex(tensor)
    except RuntimeError:  # the two parts are not adjacent
        return torch.view_as_complex(tensor.contiguous())

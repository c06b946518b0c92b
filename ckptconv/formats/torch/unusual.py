"""Turns tensors that few pickles have into data: those of torch before 0.4, of devices without storages, of dtypes that
have no class of storages, and those that are lazily conjugated or negated."""

from __future__ import annotations

from typing import Any

from ckptconv.formats.torch.objects import KINDS, Tensors, check_arguments, described, unknown
from ckptconv.formats.torch.storages import STORAGE_DTYPES, Storage
from ckptconv.pickles.nodes import NumpyArray, Opaque, TorchConstant
from ckptconv.pickles.vocabulary import MalformedError, RefusedError
from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.lazy import Convert, LazyTensor, Tagged, TensorFacts
from ckptconv.tensors.moves import Cast, Conjugate, Negate
from ckptconv.text import brief


def resolved(tensor: LazyTensor, metadata: Any) -> LazyTensor:
    """Apply torch's lazy conjugate and negation, the flags in `metadata`, to `tensor`."""
    if type(metadata) is not dict:
        raise MalformedError("has a tensor whose metadata is not a dictionary")
    for name, value in metadata.items():
        if type(name) is not str:
            raise MalformedError("has a tensor with metadata keys that are not text")
        if name not in ("conj", "neg"):
            raise RefusedError(f"has a tensor with metadata {brief(name)}, which is not known")
        # If the flag is there, torch sets it, whatever its value.
        if value is not True:
            raise MalformedError(f"has a tensor whose {name} flag is not True")
    dtype = tensor.dtype
    if "conj" in metadata:
        if dtype.kind != "c":
            raise MalformedError(f"has a conjugate tensor of {dtype}")
        tensor = Convert(tensor, Conjugate(dtype.name), dtype)
    if "neg" in metadata:
        if dtype.kind not in "fc":
            raise MalformedError(f"has a tensor of {dtype} with the neg flag")
        tensor = Convert(tensor, Negate(dtype.name), dtype)
    return tensor


def rebuild_tensor_v3(tensors: Tensors, args: tuple[Any, ...]) -> Any:
    """Take the arguments of _rebuild_tensor_v2, and the dtype, which the storage does not record."""
    check_arguments(args, "_rebuild_tensor_v3", 7, 8)
    storage, offset, size, stride, requires_grad, _hooks, dtype, *metadata = args
    return tensors.view(storage, offset, size, stride, requires_grad, _dtype_of(dtype), *metadata)


def _dtype_of(value: Any) -> DType:
    if type(value) is not TorchConstant or value.kind != "dtype":
        raise MalformedError("has a tensor whose dtype is not a valid dtype")
    if value.name not in DTYPES:
        raise RefusedError(f"has a tensor of dtype torch.{value.name}, which is not known")
    return DTYPES[value.name]


def build_typed(tensors: Tensors, value: Opaque, state: Any) -> Any:
    """Set the state (storage, offset, size, stride) of a torch.FloatTensor or the like, until torch 0.1.10."""
    if value.args or value.state or type(state) is not tuple or len(state) != 4:
        raise MalformedError(f"has a {value.name} with an invalid state")
    if type(state[0]) is not Storage:
        return unknown(f"a {value.name}", state[0])
    if state[0].dtype.name != STORAGE_DTYPES[value.cls.name.removesuffix("Tensor")]:
        raise MalformedError(f"has a {value.name} in a storage of {state[0].dtype}")
    return tensors.view(*state)


def build_variable(value: Opaque, state: Any) -> Any:
    """Set the state of a Variable or Parameter of torch before 0.4, as torch.Tensor.__setstate__ does.

    The state is (requires_grad, volatile, hooks) if the Variable was constructed from its tensor; until torch 0.1.9, if
    it was constructed from nothing, (tensor, gradient, hooks, requires_grad, volatile). Torch ignores the gradient.
    """
    if type(state) is tuple and len(state) == 5 and not value.args:
        data, _, _, requires_grad, _ = state
    elif type(state) is tuple and len(state) == 3 and len(value.args) == 1:
        (data,), (requires_grad, _, _) = value.args, state
    else:
        raise MalformedError(f"has a {value.name} with an invalid state")
    if type(requires_grad) is not bool:
        raise MalformedError(f"has a {value.name} whose requires_grad is not a bool")
    return described(data, KINDS.get(value.cls, "tensor"), requires_grad, None)


def rebuild_device_tensor(args: tuple[Any, ...]) -> Any:
    """Take (data, dtype, device, requires_grad). `data` is a tensor or numpy array: such a device has no storages."""
    check_arguments(args, "_rebuild_device_tensor", 4)
    data, dtype, _device, requires_grad = args
    if type(requires_grad) is not bool:
        raise MalformedError("has a tensor whose requires_grad is not a bool")
    target = _dtype_of(dtype)
    if type(data) is NumpyArray:
        # Rarer than the other tensors here.
        from ckptconv.formats.torch.numpy_objects import from_numpy

        tensor = from_numpy(data)
    elif type(data) is Tagged:
        tensor = data.tensor
    else:
        return unknown("a tensor", data)
    if tensor.dtype != target:
        # torch converts bfloat16 to float32 for numpy.
        if (tensor.dtype.name, target.name) != ("float32", "bfloat16"):
            raise MalformedError(f"has a tensor of {target} whose elements are of {tensor.dtype}")
        tensor = Convert(tensor, Cast(tensor.dtype.name, target.name), target)
    facts = data.facts if type(data) is Tagged else TensorFacts()
    return described(Tagged(tensor, facts), "tensor", requires_grad, None)

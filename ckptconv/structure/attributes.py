"""Check whether a tensor can have the attributes that a pickle or a structure record gives it. Pure."""

from __future__ import annotations

from typing import Any

from ckptconv.pickles.nodes import Composite
from ckptconv.structure import leaves
from ckptconv.tensors.lazy import LazyTensor

# Attributes that torch's own tensor class computes or stores itself. Setting one changes the tensor, or fails. None is
# ever among the attributes that a user gave a tensor.
_OWN = frozenset(
    """
    H T _backward_hooks _base _cdata _grad _grad_fn _has_symbolic_sizes_strides _post_accumulate_grad_hooks
    _python_dispatch _version data device dtype grad grad_dtype grad_fn imag is_cpu is_cuda is_ipu is_leaf is_maia
    is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize
    layout mH mT name names nbytes ndim output_nr real requires_grad retains_grad shape volatile
    """.split()  # noqa: SIM905
)
# Of these, those that replace the tensor's values.
_DATA = frozenset({"data", "real", "imag"})
# The kinds of tensors of torch's own classes.
PLAIN_KINDS = frozenset({"tensor", "parameter", "buffer"})


def attributes_fault(kind: str, state: Any) -> str:
    """Return why a tensor of `kind` cannot have been given `state`, its attributes; "" if it can.

    A loader sets them one by one, and some would change the tensor itself.
    """
    plain = kind in PLAIN_KINDS
    if state is None:
        return ""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    if plain and not all(part is None or isinstance(part, dict) for part in parts):
        return "attributes that are not a dict"
    for part in parts:
        if not isinstance(part, dict):
            continue
        for name, value in part.items():
            if plain and type(name) is not str:
                return "an attribute whose name is not text"
            if name in ("__class__", "__dict__") or (plain and _is_special(name)):
                return f"an attribute {name[:40]!r}, which would change its class"
            # A user's class may have a state of its own, with another meaning.
            if name in _DATA and (plain or isinstance(value, (LazyTensor, Composite)) or leaves.is_tensor(value)):
                return f"an attribute {name!r}, which would replace its data"
            if plain and name in _OWN:
                return f"an attribute {name!r}, which torch defines itself"
    return ""


def _is_special(name: str) -> bool:
    return len(name) > 4 and name.startswith("__") and name.endswith("__")

"""The children of the nodes of a tree, and a walk over them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import EllipsisType
from typing import Any

from ckptconv.pickles.nodes import Composite, Opaque
from ckptconv.tensors.lazy import LazyTensor, Tagged

ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex, EllipsisType})
MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


def _values(mapping: dict[Any, Any]) -> Iterable[Any]:
    attributes = getattr(mapping, "__dict__", None)
    return chain(mapping.values(), (attributes,)) if attributes else mapping.values()


def in_order(elements: Iterable[Any]) -> list[Any]:
    """Return the elements of a set in an order that is the same in every process."""
    from ckptconv.pickles.set_order import ordered  # few checkpoints have sets

    return ordered(elements)


# By type of a node, the parts that may hold further nodes; the keys of mappings are left out.
CHILDREN: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys(MAPPINGS, _values),
    **dict.fromkeys((list, tuple, deque), lambda container: container),
    **dict.fromkeys((set, frozenset), in_order),
    Opaque: lambda opaque: (
        opaque.cls,
        opaque.args,
        *opaque.state,
        opaque.kwargs,
        *opaque.appended,
        *chain.from_iterable(opaque.items),
    ),
    Composite: lambda composite: composite.parts.values(),
    slice: lambda bounds: (bounds.start, bounds.stop, bounds.step),
    Tagged: lambda tensor: (tensor.facts.attributes,),
}


def walk(tree: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield each container, tensor and object in a tree of lazy tensors once, but no strings, numbers and the like.

    Skip nodes whose ids are in `seen`, and add the others to it. The order is the same in every process.
    """
    seen = set() if seen is None else seen
    stack = [tree]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind in ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if kind in CHILDREN:
            stack.extend(CHILDREN[kind](value))
        if kind in MAPPINGS:
            stack.extend(value)


def tensors_of(*trees: Any) -> list[LazyTensor]:
    """Return the tensors in trees of lazy tensors, each object once."""
    seen: set[int] = set()
    return [node for tree in trees for node in walk(tree, seen) if isinstance(node, LazyTensor)]


def is_tensor(node: Any) -> bool:
    """Return whether a node is a tensor, or consists of several."""
    return isinstance(node, (LazyTensor, Composite))

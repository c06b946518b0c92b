"""Whether a tree can be walked: in reasonable time, and no deeper than whoever walks it may recurse."""

from __future__ import annotations

import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from ckptconv.pickles.nodes import Composite, Opaque, Replaced
from ckptconv.pickles.vocabulary import ExcessiveError, Limits, MalformedError
from ckptconv.tensors.lazy import Tagged
from ckptconv.text import brief

# Smaller containers are remembered only if something else refers to them too; there may be a million others.
_WORTH_KEEPING = 16
# References to a container that has one place only: that, and those of the walk.
_ONE_PLACE = 3
# The one empty tuple that Python has: there may be one for each byte of a pickle.
_EMPTY = ()


def _mapped(container: dict[Any, Any]) -> Iterable[Any]:
    attributes = getattr(container, "__dict__", None)
    return itertools.chain(container.values(), (attributes,)) if attributes else container.values()


def _replaced(node: Replaced) -> Iterable[Any]:
    raise MalformedError(f"refers to a {brief(node.name)} from before it was given its state")


_CHILDREN: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys((dict, defaultdict, OrderedDict, Counter), _mapped),
    **dict.fromkeys((list, tuple, deque, set, frozenset), lambda container: container),
    Opaque: lambda opaque: (
        opaque.cls,
        opaque.args,
        opaque.kwargs,
        *opaque.state,
        *opaque.appended,
        *itertools.chain.from_iterable(opaque.items),
    ),
    Replaced: _replaced,
    Composite: lambda composite: composite.parts.values(),
    slice: lambda bounds: (bounds.start, bounds.stop, bounds.step),
    Tagged: lambda tensor: (tensor.facts.attributes,),
}


def check_nesting(value: Any, limits: Limits, most: int, most_containers: int) -> None:
    """Check that a walk over the tree that goes into shared parts each time comes to an end, soon, and not too deep.

    Raises ExcessiveError where it would come to more than `most` values, or there are more than `most_containers`
    with something in them.

    Objects, which have an identity, may lead back to themselves: whoever walks looks out for them. Other containers
    may if `limits` say so.
    """
    deepest = limits.depth
    # By identity, of containers that are finished: nodes inside, counted each time, and levels.
    finished: dict[int, tuple[int, int]] = {}
    unfinished: set[int] = set()
    # The containers we are in, outermost first: itself, its children yet to come, its nodes, its levels.
    path: list[list[Any]] = []
    child = value
    containers = 0
    while True:
        # Go into `child`, and then on with its children, until one is a container not yet seen.
        if type(child) in _CHILDREN:
            unfinished.add(id(child))
            path.append([child, iter(_CHILDREN[type(child)](child)), 1, 1])
            if len(path) > deepest:
                raise ExcessiveError(f"is nested more than {deepest} levels deep")
        while path:
            container, children, nodes, levels = path[-1]
            for child in children:
                nodes += 1
                kind = type(child)
                if (
                    kind in _CHILDREN
                    and child is not _EMPTY
                    and (kind is not Tagged or child.facts.attributes is not None)
                ):
                    known = finished.get(id(child))
                    if known:
                        nodes += known[0]
                        levels = max(levels, known[1] + 1)
                        if len(path) + known[1] > deepest:
                            raise ExcessiveError(f"is nested more than {deepest} levels deep")
                    elif id(child) not in unfinished:
                        break
                    elif kind is not Opaque and not limits.cyclic:
                        raise MalformedError(f"makes a {kind.__name__} that contains itself")
            else:
                path.pop()
                unfinished.remove(id(container))
                containers += nodes > 1
                if containers > most_containers:
                    raise ExcessiveError("makes more objects than its length can be about")
                if nodes > _WORTH_KEEPING or (nodes > 1 and sys.getrefcount(container) > _ONE_PLACE):
                    finished[id(container)] = nodes, levels
                if path:
                    path[-1][2] += nodes
                    path[-1][3] = max(path[-1][3], levels + 1)
                if nodes > most:
                    raise ExcessiveError(f"describes more than {most} values by referring to the same again and again")
                continue
            path[-1][2:] = nodes, levels
            break
        else:
            return

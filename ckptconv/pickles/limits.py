"""Check that a tree can be walked in reasonable time, and is no deeper than a recursive walk can go."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ckptconv.pickles.children import CHILDREN
from ckptconv.pickles.nodes import Opaque, Replaced
from ckptconv.pickles.vocabulary import ExcessiveError, Limits, MalformedError
from ckptconv.tensors.lazy import Tagged
from ckptconv.text import brief

# Containers of so few nodes are remembered only if they have another reference: there may be a million.
_WORTH_KEEPING = 16
# References to a container that occurs once: that one, and those of the walk.
_ONE_PLACE = 3
# Python has one empty tuple. A pickle may refer to it once a byte.
_EMPTY = ()


def _replaced(node: Replaced) -> Iterable[Any]:
    raise MalformedError(f"refers to a {brief(node.name)} from before it was given its state")


_CHILDREN = {**CHILDREN, Replaced: _replaced}


def check_nesting(value: Any, limits: Limits, most: int, most_containers: int) -> None:
    """Check that a walk which enters shared parts at each reference ends, soon, and does not go too deep.

    Raises ExcessiveError if such a walk meets more than `most` values, if more than `most_containers` containers are
    not empty, or if the tree is deeper than `limits.depth`.

    An `Opaque`, which has an identity, may contain itself, and walks look out for that. Other containers may only if
    `limits.cyclic`; else they raise MalformedError.
    """
    deepest = limits.depth
    # Finished containers, by identity: nodes inside, with shared ones counted at each reference, and levels.
    finished: dict[int, tuple[int, int]] = {}
    unfinished: set[int] = set()
    # The containers being walked, outermost first: the container, its remaining children, its nodes, its levels.
    path: list[list[Any]] = []
    child = value
    containers = 0
    while True:
        # Enter `child`, then take its children up to one that is a container not seen yet.
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
                    raise ExcessiveError("creates more objects than its length allows")
                if nodes > _WORTH_KEEPING or (nodes > 1 and sys.getrefcount(container) > _ONE_PLACE):
                    finished[id(container)] = nodes, levels
                if path:
                    path[-1][2] += nodes
                    path[-1][3] = max(path[-1][3], levels + 1)
                if nodes > most:
                    raise ExcessiveError(f"describes more than {most} values by repeated references")
                continue
            path[-1][2:] = nodes, levels
            break
        else:
            return

"""Write the structure record of the names that are chosen, of a tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def compacted(
    root: Any, nodes: Sequence[Any], storages: Sequence[Any], pinned: Collection[int]
) -> tuple[Any, list[Any], list[Any]]:
    """Return the parts of a record without nodes and storages that nothing refers to; keep nodes that are `pinned`.

    References are changed in place.
    """
    reached: dict[int, None] = dict.fromkeys(pinned)
    used: dict[int, None] = {}
    references: list[list[Any]] = []
    leaves: list[dict[str, Any]] = []
    stack = [root, *(nodes[index] for index in reached)]
    while stack:
        node = stack.pop()
        indices: list[int] = []
        if type(node) is dict:
            leaves.append(node)
            stack.append(node.get("kind"))
            used.update(dict.fromkeys(node["storage"][:1] if "storage" in node else ()))
            indices = [node["attributes"]] if "attributes" in node else []
        elif type(node) is list and node[0] == "@":
            references.append(node)
            indices = [node[1]]
        elif type(node) is list:
            stack.extend(node)
        for index in indices:
            if index not in reached:
                reached[index] = None
                stack.append(nodes[index])
    places = {index: place for place, index in enumerate(sorted(reached))}
    homes = {index: place for place, index in enumerate(sorted(used))}
    for reference in references:
        reference[1] = places[reference[1]]
    for leaf in leaves:
        if "attributes" in leaf:
            leaf["attributes"] = places[leaf["attributes"]]
        if "storage" in leaf:
            leaf["storage"][0] = homes[leaf["storage"][0]]
    return root, [nodes[index] for index in places], [storages[index] for index in homes]

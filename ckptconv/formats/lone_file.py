"""A file, with the properties that show that it is one of many (`registered.LONE`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.formats.model_files import SAFETENSORS, TORCH, TORCH_MODELS
from ckptconv.formats.source import MODEL_KEYS, Source
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename

# The depth to which a tree is searched for keys.
_LEVELS = 6


class LoneFile(NamedTuple):
    """A file: its place, its tree and metadata, and whether its parameters are joined from ranks' parts."""

    place: Location
    tree: Any
    metadata: Mapping[str, str]
    is_joined: bool

    @classmethod
    def of(cls, place: Location, source: Source) -> LoneFile | None:
        """Return the file that was read as `source`; None if there are several, a complete set, or no weights."""
        of_data = [name for name in source.inputs if not name.endswith(".json")]
        is_set = len(of_data) > 1 or any(basename(path) not in TORCH_MODELS for path in source.shards)
        if is_set or source.family not in (TORCH, SAFETENSORS) or source.weights_error:
            return None
        if place.kind == "directory":
            place = place.at(path) if (path := next(iter(source.files.records), "")) else place.join(of_data[0])
        return cls(place, source.weights, source.metadata, source.pieces is not None)

    @property
    def is_hollow(self) -> bool:
        """Whether a tensor at the top, or under a key of models, has the shape [0]."""
        trees = [tree for tree in (self.tree, *map(self.get, MODEL_KEYS)) if isinstance(tree, Mapping)]
        return any(getattr(value, "shape", None) == (0,) for tree in trees for value in tree.values())

    def get(self, key: str) -> Any:
        return self.tree.get(key) if isinstance(self.tree, Mapping) else None

    def has(self, key: str) -> bool:
        """Return whether the tree or the metadata of the file have a key."""
        return (isinstance(self.tree, Mapping) and key in self.tree) or key in self.metadata

    def keys(self, part: str) -> Iterator[str]:
        """Yield the keys of dicts in the tree that contain `part`; none if its parameters are joined."""
        level = [] if self.is_joined else [self.tree]
        for _ in range(_LEVELS):
            below: dict[int, Any] = {}
            for node in level:
                values = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
                # There may be a million values, of few types.
                kinds = {kind for kind in {*map(type, values)} if issubclass(kind, (Mapping, list))}
                below.update((id(value), value) for value in values if type(value) in kinds)
                keys = [key for key in node if type(key) is str] if isinstance(node, Mapping) else []
                if part in "\n".join(keys):
                    yield from (key for key in keys if part in key)
            level = [*below.values()]

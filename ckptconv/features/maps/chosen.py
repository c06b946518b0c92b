"""A map that was chosen for a checkpoint, with the known sizes and the side to make. Pure.

An output records its map as JSON, in its metadata and its manifest: {"name", "sha256", "from", "to", "sizes": {axis:
size}, "text"}. `text` is the whole map, so that the record alone leads back, and `sha256` its digest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.maps.claims import UnknownNamesError
from ckptconv.features.maps.compile import Applied, Cast, apply_map, unchanged
from ckptconv.features.maps.doubts import doubts
from ckptconv.features.maps.file import MAX_BYTES, SUFFIX, Map, parse_map
from ckptconv.features.maps.fitting import fitting, names_of_maps, prefix_before
from ckptconv.features.maps.notation import axes_in
from ckptconv.features.maps.options import SIZES
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import brief, quoted, some

_TEXTS = ("name", "sha256", "from", "to", "text")


@dataclass(frozen=True)
class ChosenMap:
    """A map, and the facts about the checkpoint that it is for.

    The user or a record gives `sizes`; `config` is the config.json next to the checkpoint. `target` is the side to
    make; "" for the side that the checkpoint's names are not from. `is_back`: it is the reverse of the map that made
    the checkpoint. Of alternatives, those with `wanted` names are made.
    """

    map: Map
    sizes: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""
    is_back: bool = False
    wanted: Collection[str] = ()

    def apply(
        self,
        tensors: Mapping[str, LazyTensor],
        shapes: Mapping[str, Sequence[int]] | None = None,
        cast: Cast = unchanged,
    ) -> Applied:
        """Return the tensors of the other side.

        `shapes` are known shapes of tensors to make; `cast` is for parts of one tensor that have different dtypes.
        Raises the errors of `apply_map`.
        """
        try:
            applied = apply_map(
                self.map,
                tensors,
                sizes=self.sizes,
                config=self.config,
                target=self.target,
                shapes=shapes,
                cast=cast,
                wanted=self.wanted,
            )
        except UnknownNamesError as error:
            # A file of the user's has other names than built-in maps on purpose.
            is_ours = not self.map.name.endswith(SUFFIX)
            others = f"Is this the right map? {names_of_maps(fitting(tensors, self.map.name))}" if is_ours else ""
            hint = f"{others} {error.hint}" if is_ours else error.hint.replace("If it is, add", "Add")
            if prefix := prefix_before(tensors, self.map):
                hint = (
                    f"All names begin with {quoted(prefix)}, and the map has rules for the names without this prefix. "
                    f"Add --strip-prefix {prefix}"
                )
            raise UnknownNamesError(error.message, hint.rstrip()) from None
        contradicted = [*doubts(self.map.name, self.config)]
        if applied.lacking:
            contradicted.append(
                f"the map {self.map.name} expects {some(applied.lacking)}, but this checkpoint has no such tensor. Is "
                f"this the right map? {names_of_maps(fitting(tensors, self.map.name))}"
            )
        return replace(applied, unchecked=(*applied.unchecked, *contradicted))

    def idle_sizes(self) -> tuple[str, ...]:
        """Return the given sizes whose axes no rule has."""
        known = {*self.map.sizes}
        for rule in self.map.rules:
            for tensor in (*rule.sides[0], *rule.sides[1]):
                for dim in tensor.dims or ():
                    known.update(name for axis in axes_in(dim) for name in axis.names)
            known |= {*rule.stacks, *(shift.by for shift in rule.shifts.values())}
        return tuple(name for name in self.sizes if name.rpartition(".")[2] not in known)


def of_record(record: Any, where: str, back: bool = False) -> ChosenMap:
    """Return the map of a record, to apply it again, or with `back` its reverse. Raise UsageError if it is invalid."""
    if isinstance(record, str):
        try:
            record = json.loads(record) if len(record) <= 2 * MAX_BYTES else None
        except (ValueError, RecursionError):
            record = None
    if (
        not isinstance(record, dict)
        or record.keys() != {*_TEXTS, "sizes"}
        or not all(isinstance(record[key], str) for key in _TEXTS)
        or not isinstance(record["sizes"], dict)
    ):
        raise UsageError(f"{where}: the record of its map is not valid: {brief(record)}.")
    sizes = SIZES.parse(record["sizes"], f"{where}, the size")
    map_ = parse_map(record["text"], record["name"][:200])
    target = record["from"] if back else record["to"]
    if map_.digest != record["sha256"]:
        raise UsageError(f"{where}: the record of its map has a digest that does not match the map.")
    if {record["from"], record["to"]} != {*map_.sides}:
        raise UsageError(
            f"{where}: the record of its map has the sides {some([record['from'], record['to']])}; expected "
            f"{some(map_.sides)}."
        )
    return ChosenMap(map_, sizes, {}, target, back)

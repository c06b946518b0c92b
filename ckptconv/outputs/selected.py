"""What an output holds of its source: the names and tensors that were selected, and how they are stored. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.formats.configs import Change
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.structure import keymap, torchao
from ckptconv.structure.choice import Choice
from ckptconv.structure.record import RESERVED
from ckptconv.tensors.lazy import Equal, LazyTensor

if TYPE_CHECKING:
    from ckptconv.outputs import likeness
    from ckptconv.structure.maps.compile import Applied

# The metadata of every safetensors file: loaders ask which library's tensors it holds.
METADATA = {"format": "pt"}


class Quantization(NamedTuple):
    """What was quantized: how many weights by format, the names of the parts in their place, and what a configuration
    says."""

    formats: Mapping[str, int]
    parts: frozenset[str]
    told: Mapping[str, Any]


class Selected(NamedTuple):
    """What is selected of a source.

    `names` are the selected names, {old: new}; `known` are all there are, by old name. `tensors` are by new name, as
    the source has them; `cast` returns them as they are stored. `described` is the flattened tree they come from, under
    its old names. `structured`: its structure record belongs to the output. `owners` are the source's own ties, {alias:
    owner}, by new name. `fixed` are new names of tensors that are never cast. `quantized` are torchao's tensors, by old
    name. `like` is what the output takes over from the source's reference: then `tensors` has those that are filled in
    too, and `owners` are all aliases. `metadata` is that of every file of the output, without aliases, structure record
    and what torchao says of `quantized`. `warnings` say what of the source is left out,
    `notes` what was computed, and `settings` what a configuration has to say of that.

    If a map was `applied`, the tensors and names are those of its other side, and `unmapped` is what was selected
    before, as it is if there was a `quantization`. `equal` are tensors by name of which the map kept one: they have to
    be equal.

    If it is `of_states`, `names` are of parameters, tensors are named <parameter>.<state> in `described` too, and
    `owners` are all aliases.
    """

    names: dict[str, str]
    known: Mapping[str, Any]
    tensors: dict[str, LazyTensor]
    described: keymap.Flattened
    structured: bool
    owners: dict[str, str]
    choice: Choice
    dtype: str
    widen_only: bool
    fixed: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = METADATA
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    quantized: Mapping[str, torchao.QuantizedTensor] = {}
    like: likeness.Likeness | None = None
    unmapped: Selected | None = None
    applied: Applied | None = None
    equal: tuple[Equal, ...] = ()
    of_states: bool = False
    quantization: Quantization | None = None
    settings: Mapping[str, Any] = {}

    def cast(self, name: str) -> LazyTensor:
        """Return the tensor of this new name, cast as it is stored."""
        tensor = self.tensors[name]
        dtype = self.like.dtypes.get(name, self.dtype) if self.like else self.dtype
        if dtype == "keep" or name in self.fixed:
            return tensor
        return selection.converted(name, tensor, dtype, self.widen_only)

    def stored(self, aliases: Mapping[str, str]) -> dict[str, LazyTensor]:
        """Return the tensors but for `aliases`, by their new names, each cast as it is stored."""
        if self.dtype == "keep" and not self.like:
            if not aliases:
                return dict(self.tensors)
            return {name: tensor for name, tensor in self.tensors.items() if name not in aliases}
        return {name: self.cast(name) for name in self.tensors if name not in aliases}

    def aliases(self) -> dict[str, str]:
        """Return the names whose bytes another name already holds: {removed: kept}."""
        if self.like or self.of_states or (self.described.apart and not self.owners):
            return dict(self.owners)
        return selection.untie(self.tensors, self.owners)

    def recorded_aliases(self) -> dict[str, str]:
        """Return those of `aliases` that metadata can record: {removed: kept}."""
        return {alias: kept for alias, kept in self.aliases().items() if alias not in RESERVED}

    def stated(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """Return the metadata of an output where `aliases` {removed: kept} are stored under other names."""
        if not self.quantized:
            return dict(self.metadata)
        names = {old: new for old, new in self.names.items() if new not in aliases}
        return {**self.metadata, **torchao.metadata_of(self.quantized, names)}

    @property
    def map_record(self) -> Mapping[str, Any] | None:
        """The record of the map that was applied; None without one."""
        return self.applied.record() if self.applied else None

    @property
    def made_of(self) -> Mapping[str, tuple[str, ...]]:
        """The names of which the map made each tensor."""
        return self.applied.sources if self.applied else {}

    def change(self, source: Source) -> Change:
        """Return what a configuration beside `source`, of which this was selected, is to say of it."""
        is_plain = bool(source.quantized and source.quantized.formats)
        usual = source.quantized.dtype if source.quantized and is_plain else ""
        dtype = usual if self.dtype == "keep" else self.dtype
        return Change(dtype, is_plain, self.quantization.told if self.quantization else None, self.settings)

    def idle_globs(self) -> dict[str, str]:
        """Return the globs that match nothing: {option: reason}."""
        return selection.idle_globs(list((self.unmapped or self).known), self.choice)

    def idle(self, options: Options) -> dict[str, str]:
        """Return the given options that select or rename nothing: {option: reason}."""
        names = (self.unmapped or self).names
        return self.idle_globs() | selection.idle(names, options.strip_prefix, options.rename)

    def structure(self, aliases: Mapping[str, str]) -> str | None:
        """Return the structure record of an output where `aliases` {removed: kept} are stored under other names; None
        if it needs none."""
        record = self.described.structure
        if self.of_states:
            return record if self.structured else None
        if record is None and self.structured and any(old != new for old, new in self.names.items()):
            record = keymap.plain_record(self.names)
        return keymap.remap(record, self.names, aliases) if self.structured else None

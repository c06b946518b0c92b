"""The selection of an output from its source: names and tensors, and how they are stored. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.notices import Change
from ckptconv.plan import FilePlan
from ckptconv.structure import parted
from ckptconv.structure.choice import Choice
from ckptconv.structure.record import RESERVED, Flattened
from ckptconv.tensors.lazy import Equal, LazyTensor

# The metadata of every safetensors file: loaders ask which library's tensors it holds.
METADATA = {"format": "pt"}


# The fields of a report that are known of an output, once its files are planned.
Reporter: TypeAlias = Callable[[Sequence[FilePlan]], Mapping[str, Any]]


class Selected(NamedTuple):
    """The selection from a source.

    `names` are the selected names, {old: new}; `known` are all tensors, by old name. `tensors` are by new name, as the
    source has them; `cast` returns them as they are stored. `described` is the flattened tree they come from, under its
    old names; its structure record, which belongs to the output if it is `structured`, has the new ones. `owners` are
    the source's own ties, {alias: owner}, by new name; all aliases, if they are `tied`. `uncastable` are new names of
    tensors that are never cast; the `settled` ones among them were not to be. `dtypes` has the dtypes of tensors for
    which `dtype` does not hold. `quantized` are tensors that are stored in parts, by old name. `metadata` is that of
    every file of the output, without aliases, structure record and entries about `quantized`; `remarks` are its entries
    that the source does not have. `warnings` name parts of the source that are left out, `notes` computations. `edit`
    changes a configuration to one that is true of these, and `quantization` are its settings about quantized weights.

    For computed tensors, `unmapped` is the selection before it had other names, as a map that was `applied` gives.
    `equal` are tensors by name of which one was kept: they have to be equal. `missing` are names that were expected and
    are left out. `files` are names of the files that tensors are to be in. `record` is the record of the selection in a
    manifest. Each of `reporters` returns the fields of a report, from the selection and the stored tensors. `patched`
    returns a tensor as it is stored, from its name and the tensor before that.

    If it is `of_states`, `names` are of parameters, and tensors are named <parameter>.<state> in `described` too.
    """

    names: dict[str, str]
    known: Mapping[str, Any]
    tensors: dict[str, LazyTensor]
    described: Flattened
    structured: bool
    owners: dict[str, str]
    choice: Choice
    dtype: str
    widen_only: bool
    uncastable: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = METADATA
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    quantized: Mapping[str, parted.PartedTensor] = {}
    unmapped: Selected | None = None
    applied: Any = None
    equal: tuple[Equal, ...] = ()
    of_states: bool = False
    edit: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    quantization: Mapping[str, Any] | None = None
    tied: bool = False
    settled: frozenset[str] = frozenset()
    dtypes: Mapping[str, str] = {}
    remarks: Mapping[str, str] = {}
    missing: tuple[str, ...] = ()
    files: Mapping[str, str] = {}
    record: Mapping[str, Any] = {}
    reporters: tuple[Callable[[Selected, Mapping[str, LazyTensor]], Reporter], ...] = ()
    patched: Callable[[str, LazyTensor], LazyTensor] | None = None

    def cast(self, name: str) -> LazyTensor:
        """Return the tensor of this new name, cast as it is stored."""
        tensor = self.tensors[name]
        dtype = self.dtypes.get(name, self.dtype)
        if dtype != "keep" and name not in self.uncastable:
            tensor = selection.converted(name, tensor, dtype, self.widen_only)
        return self.patched(name, tensor) if self.patched else tensor

    def stored(self, aliases: Mapping[str, str]) -> dict[str, LazyTensor]:
        """Return the tensors except `aliases`, by their new names, each cast as it is stored."""
        if self.dtype == "keep" and not self.dtypes and not self.patched:
            if not aliases:
                return dict(self.tensors)
            return {name: tensor for name, tensor in self.tensors.items() if name not in aliases}
        return {name: self.cast(name) for name in self.tensors if name not in aliases}

    def aliases(self) -> dict[str, str]:
        """Return the names whose bytes another name already holds: {removed: kept}."""
        if self.tied:
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
        return {**self.metadata, **parted.metadata_of(self.quantized, names)}

    @property
    def first(self) -> Selected:
        """The selection before it had other names."""
        return self.unmapped or self

    def reporter(self, stored: Mapping[str, LazyTensor]) -> Reporter:
        """Return the function that returns the fields of a report about it, with its tensors as they are `stored`. It
        keeps no more of them than it needs."""
        reporters = [reporter(self, stored) for reporter in self.reporters]
        return lambda files: {name: value for fields_of in reporters for name, value in fields_of(files).items()}

    def change(self, source: Source) -> Change:
        """Return the change that a configuration of `source`, from which this was selected, is to state."""
        is_plain = bool(source.quantized and source.quantized.formats)
        usual = source.quantized.dtype if source.quantized and is_plain else ""
        fixed = self.uncastable - self.settled
        is_kept = fixed and fixed.issuperset(name for name, tensor in self.tensors.items() if tensor.dtype.kind == "f")
        dtype = usual if is_kept or self.dtype == "keep" else self.dtype
        return Change(dtype, is_plain, self.quantization, self.edit)

    def idle_globs(self) -> dict[str, str]:
        """Return the globs that match nothing: {option: reason}."""
        return selection.idle_globs(list(self.first.known), self.choice)

    def idle(self, options: Options, tree: Any = None) -> dict[str, str]:
        """Return the given options that select or rename nothing in `tree`: {option: reason}."""
        if not options.strip_prefix and not options.rename:
            return self.idle_globs()
        from ckptconv.outputs import renaming

        return self.idle_globs() | renaming.idle(self.first.names, options, tree)

    def structure(self, aliases: Mapping[str, str]) -> str | None:
        """Return the structure record of an output with `aliases` {removed: kept}; None if it needs none."""
        record = self.described.structure if self.structured else None
        if record is None or self.of_states:
            return record
        from ckptconv.structure.keymap import remap

        return remap(record, {}, aliases)

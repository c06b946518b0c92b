"""What merging adapters makes of the tensors of a base. Pure.

PEFT names the factors of a module `<module>.lora_A.weight` and `.lora_B.weight`, those of an embedding
`.lora_embedding_A` and `_B`, DoRA's lengths `.lora_magnitude_vector`; other tensors take the place of the base's. For
parameters of experts, which PEFT calls by their stack, `base_layer` stands once for each that is wrapped before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.formats.adapters import factor, settled
from ckptconv.formats.quantized.parts import parts_among
from ckptconv.formats.source import Adapter
from ckptconv.structure.maps.memory import in_files, stacks_of
from ckptconv.tensors import casting
from ckptconv.tensors.computing import MOST_COLUMNS, MOST_RANK, Axis, LowRank, Magnitude, Tiled
from ckptconv.tensors.dtypes import DTYPES, SUMMED
from ckptconv.tensors.lazy import Concat, LazyTensor, View, same_bytes, untagged
from ckptconv.tensors.slices import Span, sliced
from ckptconv.text import some

_F64 = DTYPES["float64"]
_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+?)(?P<depth>(?:\.base_layer)*)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.(?!weight$)[^.]+)?"
    r"(?:\.weight)?"
)
_LENGTHS = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.(?!weight$)[^.]+)?(?:\.weight)?")
_KEPT = re.compile(r"\.(?:base_layer|modules_to_save(?:\.(?!weight$|bias$)[^.]+)?)(?=\.)")
# What modules_to_save take the place of: the base's own.
_REPLACED = re.compile(r"\.original_module\.")


class _Factors(NamedTuple):
    """The two factors of a module, and whether they are of an embedding; one may be missing."""

    left: LazyTensor | None = None
    right: LazyTensor | None = None
    embedding: bool = False


class Merged(NamedTuple):
    """The tensors that adapters change, by name, in float64 or the dtype they are stored with; and notes."""

    tensors: dict[str, LazyTensor]
    notes: tuple[str, ...]


def merged(
    base: Mapping[str, LazyTensor],
    ties: Mapping[str, str],
    adapters: Sequence[tuple[Adapter, Mapping[str, LazyTensor]]],
    path: str,
) -> Merged:
    """Return the tensors of `base`, of the source at `path` with these `ties` {alias: owner}, that `adapters` change.

    Raise CorruptError for a tensor of an adapter that the base has no place for, or in another shape, UnsupportedError
    for quantized weights, and for what is not known of adapters.
    """
    changed: dict[str, LazyTensor] = {}
    parts = parts_among(base)
    quantized = {*parts, *parts.values()}
    for adapter, tensors in adapters:
        work = _Work(base, changed, adapter, path, quantized)
        work.merge(tensors)
    first: dict[Hashable, str] = {}
    for name in changed:
        first[_place(base, ties, name)] = name
    for name in base:
        if name not in changed and (kept := first.get(_place(base, ties, name))) is not None:
            changed[name] = changed[kept]
    told = f"{len(adapters)} adapter{'s' if len(adapters) > 1 else ''}"
    return Merged(changed, (f"merged {told}: {len(changed):,} tensor{'s' if len(changed) != 1 else ''} changed.",))


def _place(base: Mapping[str, LazyTensor], ties: Mapping[str, str], name: str) -> Hashable:
    found = same_bytes(base.get(ties.get(name, name), base[name]))
    return name if found is None else found


class _Work:
    """Merges one adapter: puts what it changes into `changed`."""

    def __init__(
        self,
        base: Mapping[str, LazyTensor],
        changed: dict[str, LazyTensor],
        adapter: Adapter,
        path: str,
        quantized: Collection[str],
    ) -> None:
        self._base, self._changed, self._adapter, self._path = base, changed, adapter, path
        self._quantized = quantized
        # What is stacked in the base, by module.
        self._stored: dict[str, list[str]] = {}
        for name, tensor in base.items():
            if len(tensor.shape) == 3:
                module, _, stack = name.rpartition(".")
                self._stored.setdefault(module, []).append(stack)
        self._told: dict[str, tuple[float, float]] = {}

    def merge(self, tensors: Mapping[str, LazyTensor]) -> None:
        factors: dict[tuple[str, int], _Factors] = {}
        lengths: dict[str, LazyTensor] = {}
        for full, tensor in tensors.items():
            before, prefix, name = full.rpartition(_PREFIX)
            if not prefix or (before and not before.endswith(".")):
                raise self._unknown(full, "its name has no base_model.model.")
            if match := _FACTOR.fullmatch(name):
                at = match["module"], match["depth"].count(".base_layer")
                known = factors.get(at, _Factors())._replace(embedding=bool(match["embedding"]))
                tensor = untagged(tensor)
                factors[at] = known._replace(right=tensor) if match["side"] == "A" else known._replace(left=tensor)
            elif match := _LENGTHS.fullmatch(name):
                lengths[match["module"]] = untagged(tensor)
            elif "lora_" in name:
                raise self._unknown(full, "it is no factor of LoRA that is known")
            elif not _REPLACED.search(name):
                self._replace(full, _KEPT.sub("", name), tensor)
        if bool(lengths) != self._adapter.scale.dora:
            raise CorruptError(
                f"{self._adapter.source.path} {'has' if lengths else 'lacks'} DoRA's lengths, and its configuration "
                "says otherwise."
            )
        # The factors of what is wrapped first first.
        modules: dict[str, list[_Factors]] = {}
        for module, depth in sorted(factors, key=lambda at: (at[0], -at[1])):
            modules.setdefault(module, []).append(factors[module, depth])
        if missing := [module for module in (modules if lengths else ()) if module not in lengths]:
            raise CorruptError(f"{self._adapter.source.path} has no DoRA lengths of {some(missing, 3)}.")
        stacks = {module: self._stacks(module) for module in modules if self._weight(module) not in self._base}
        names = [f"{module}.{stack}" for module, known in stacks.items() for stack in known]
        names += itertools.chain.from_iterable((module, f"{module}.weight") for module in modules)
        self._told = settled(self._adapter.scale, names)
        for module, found in modules.items():
            self._module(module, found, stacks.get(module), lengths.get(module))

    def _weight(self, module: str) -> str:
        """Return the name of the weight of `module` in the base."""
        return self._in_files(f"{module}.weight")

    def _in_files(self, name: str) -> str:
        """Return what the base calls the tensor that `name` is in memory."""
        if name in self._base:
            return name
        others = (str(each.names[0]) for each in in_files(name) if not each.stack)
        return next((other for other in others if other in self._base), name)

    def _replace(self, full: str, name: str, tensor: LazyTensor) -> None:
        name = self._in_files(name)
        if name not in self._base and len(tensor.shape) == 3:
            module, _, stack = name.rpartition(".")
            if experts := self._stacks(module).get(stack):
                self._replace_stack(full, experts, untagged(tensor))
                return
        self._check_weight(name)
        if name not in self._base:
            raise self._no_place(full, name)
        if tensor.shape != self._base[name].shape:
            raise self._other_shape(full, tensor.shape, name)
        self._changed[name] = untagged(tensor)

    def _replace_stack(self, full: str, experts: list[list[str]], tensor: LazyTensor) -> None:
        """Put a stack in the place of the tensors that the base has for it."""
        whole = (Span(0, 1, tensor.shape[2]),)
        for number, names in enumerate(experts):
            at = 0
            for name in names:
                shape = self._base[name].shape
                if len(experts) != tensor.shape[0] or shape[1:] != tensor.shape[2:] or at + shape[0] > tensor.shape[1]:
                    raise self._other_shape(full, tensor.shape, name)
                part = sliced(tensor, (Span(number, 1, 1), Span(at, 1, shape[0]), *whole))
                self._changed[name] = View(part, part.dtype, shape)
                at += shape[0]
            if at != tensor.shape[1]:
                raise self._other_shape(full, tensor.shape, names[-1])

    def _module(
        self,
        module: str,
        found: Sequence[_Factors],
        stacks: Mapping[str, list[list[str]]] | None,
        lengths: LazyTensor | None,
    ) -> None:
        """Merge the factors of `module`, those of what is wrapped first first; `stacks` if it has no weight."""
        for each in found:
            if each.left is None or each.right is None:
                raise CorruptError(f"{self._adapter.source.path} has one factor of {module!r}, and not the other.")
        if stacks is None and len(found) == 1:
            self._matrix(module, found[0], lengths)
            return
        if not stacks:
            self._check_weight(min((name for name in self._quantized if name.startswith(f"{module}.")), default=""))
            raise self._no_place(f"{_PREFIX}{module}.lora_A.weight", f"{module}.weight")
        if lengths is not None:
            raise self._unknown(module, "DoRA of stacked experts")
        for each, stack in self._fitting(module, found, stacks):
            self._experts(f"{module}.{stack}", each, stacks[stack])

    def _matrix(self, module: str, found: _Factors, lengths: LazyTensor | None) -> None:
        name, left, right = self._weight(module), found.left, found.right
        assert left is not None
        assert right is not None
        base = self._now(name)
        if len(base.shape) != 2 or len(left.shape) != 2 or len(right.shape) != 2:
            raise self._unknown(name, "it is no matrix")
        shape = left.shape[0], right.shape[1]
        turned = shape[::-1] == base.shape and (found.embedding or self._adapter.turned or shape != base.shape)
        if found.embedding and not turned:
            turned = shape[::-1] == base.shape
        if not turned and shape != base.shape:
            raise self._other_shape(name, shape, name)
        if turned and not (found.embedding or self._adapter.turned):
            raise self._other_shape(name, shape, name)
        parameter = f"{module}.weight"
        adapted = any(parameter == each or parameter.endswith(f".{each}") for each in self._adapter.parameters)
        made = _added(base, left, right, self._factor(parameter if adapted else module, left, right), turned)
        if lengths is not None:
            made = self._with_lengths(name, made, lengths, turned)
        self._changed[name] = made

    def _with_lengths(self, name: str, made: LazyTensor, lengths: LazyTensor, turned: bool) -> LazyTensor:
        if turned:
            raise self._unknown(
                name, "DoRA of an embedding, or of a matrix that is stored transposed: each element needs all rows"
            )
        if made.shape[1] > MOST_COLUMNS:
            raise self._unknown(name, f"DoRA of rows of {made.shape[1]:,} elements, where {MOST_COLUMNS:,} is the most")
        if lengths.numel != made.shape[0] or lengths.dtype.name not in SUMMED:
            raise self._other_shape(name, lengths.shape, name)
        flat = lengths if len(lengths.shape) == 1 else View(lengths, lengths.dtype, (lengths.numel,))
        axes = (Axis(0), Axis(1, 0)), (Axis(0),)
        return Tiled((made, flat), axes, Magnitude(), _F64, made.shape, (0, 0))

    def _factor(self, module: str, left: LazyTensor, right: LazyTensor, experts: int = 1) -> float:
        rank, rest = divmod(left.shape[1], experts)
        if left.shape[1] != right.shape[0] or rest:
            raise CorruptError(
                f"{self._adapter.source.path}: the factors of {module!r} have {left.shape[1]} columns and "
                f"{right.shape[0]} rows, which do not fit."
            )
        if left.shape[1] > MOST_RANK:
            raise self._unknown(module, f"factors of rank {left.shape[1]:,}, where {MOST_RANK:,} is the most")
        return factor(self._adapter.scale, self._told[module], module, rank)

    def _now(self, name: str) -> LazyTensor:
        """Return the tensor of the base as it is by now."""
        self._check_weight(name)
        tensor = casting.unrounded(untagged(self._changed.get(name, self._base[name])))
        if tensor.dtype.name not in SUMMED:
            raise UnsupportedError(
                f"{self._path}: {name!r} is {tensor.dtype}, and an adapter is added to floats of 16 bits and more."
            )
        return tensor

    def _check_weight(self, name: str) -> None:
        if name in self._quantized:
            raise UnsupportedError(
                f"{self._path}: {name!r} is quantized, and an adapter is added to weights.",
                "--dequantize makes weights of quantized ones.",
            )

    # ---- experts

    def _stacks(self, module: str) -> dict[str, list[list[str]]]:
        """Return the parameters of stacked experts of `module`: of each expert, the tensors that it consists of; or a
        single one, the stack itself."""
        found: dict[str, list[list[str]]] = {}
        for stack in self._stored.get(module, ()):
            found[stack] = [[f"{module}.{stack}"]]
        for stack in stacks_of(module):
            for each in in_files(f"{module}.{stack}"):
                experts = ([name.of({each.stack: number}) for name in each.names] for number in itertools.count())
                there = [*itertools.takewhile(lambda names: all(name in self._base for name in names), experts)]
                if there and stack not in found:
                    found[stack] = there
        return found

    def _fitting(
        self, module: str, found: Sequence[_Factors], stacks: Mapping[str, list[list[str]]]
    ) -> Iterator[tuple[_Factors, str]]:
        """Yield the factors with the stacks that they are of, if their shapes tell it."""
        fits = [
            order
            for order in itertools.permutations(stacks, len(found))
            if all(self._fits(each, stacks[name]) for each, name in zip(found, order, strict=True))
        ]
        if len(fits) != 1:
            told = "none" if not fits else "more than one"
            raise CorruptError(
                f"{self._adapter.source.path}: the shapes of the factors of {module!r} fit {told} of the stacked "
                f"parameters {some(stacks)}."
            )
        yield from zip(found, fits[0], strict=True)

    def _fits(self, found: _Factors, experts: list[list[str]]) -> bool:
        assert found.left is not None
        assert found.right is not None
        shape = (found.left.shape[0], found.right.shape[1])
        first = [self._base[name].shape for name in experts[0]]
        if len(first[0]) == 3:
            return shape in (first[0][1:], first[0][:0:-1])
        return shape == (sum(each[0] for each in first), first[0][1])

    def _experts(self, parameter: str, found: _Factors, experts: list[list[str]]) -> None:
        left, right = found.left, found.right
        assert left is not None
        assert right is not None
        stack = experts[0][0] if len(self._base[experts[0][0]].shape) == 3 else ""
        count = self._base[stack].shape[0] if stack else len(experts)
        scale = self._factor(parameter, left, right, count)
        turned = bool(stack) and self._is_turned(stack, (left.shape[0], right.shape[1]))
        rank = right.shape[0] // count
        slices = []
        for number in range(count):
            mine = sliced(left, (Span(0, 1, left.shape[0]), Span(number, count, rank)))
            theirs = sliced(right, (Span(number * rank, 1, rank), Span(0, 1, right.shape[1])))
            if stack:
                slices.append(self._of_stack(stack, number, mine, theirs, scale, turned))
                continue
            at = 0
            for name in experts[number]:
                base = self._now(name)
                rows = sliced(mine, (Span(at, 1, base.shape[0]), Span(0, 1, rank)))
                self._changed[name] = _added(base, rows, theirs, scale, False)
                at += base.shape[0]
        if stack:
            self._changed[stack] = Concat(tuple(slices))

    def _is_turned(self, stack: str, shape: tuple[int, int]) -> bool:
        """Whether the matrices of the stack of this name are stored transposed, where the factors make this `shape`.

        All of a module are, or none. Of square ones the other stack tells it: what takes as many makes twice as many,
        as gates are stacked with what they open, or what makes as many takes half as many.
        """
        rows, columns = self._base[stack].shape[1:]
        if rows != columns:
            return shape != (rows, columns)
        module, _, _ = stack.rpartition(".")
        others = {self._base[f"{module}.{other}"].shape[1:] for other in self._stored[module]}
        told = {height < width for height, width in others if {height, width} in ({rows, 2 * rows}, {rows, rows / 2})}
        if len(told) != 1:
            raise self._unknown(stack, "square experts, of which nothing tells whether they are transposed")
        return told.pop()

    def _of_stack(
        self, stack: str, number: int, left: LazyTensor, right: LazyTensor, scale: float, turned: bool
    ) -> LazyTensor:
        whole = self._now(stack)
        one = sliced(whole, (Span(number, 1, 1), *(Span(0, 1, extent) for extent in whole.shape[1:])))
        inner = whole.shape[1:]
        made = _added(View(one, one.dtype, inner), left, right, scale, turned)
        return View(made, made.dtype, (1, *inner))

    # ---- errors

    def _unknown(self, name: str, why: str) -> UnsupportedError:
        return UnsupportedError(f"{self._adapter.source.path}: {name!r} is not supported: {why}.")

    def _no_place(self, full: str, name: str) -> CorruptError:
        return CorruptError(
            f"{self._adapter.source.path} has {full!r}, and {self._path} has no {name!r} for it.",
            "It is an adapter of another model, or of a tensor that this base ties to another and does not store.",
        )

    def _other_shape(self, full: str, shape: Sequence[int], name: str) -> CorruptError:
        return CorruptError(
            f"{self._adapter.source.path}: {full!r} is for a tensor of shape {list(shape)}, and {name!r} of "
            f"{self._path} has {list(self._base[name].shape)}.",
            "It is an adapter of another model.",
        )


def _added(base: LazyTensor, left: LazyTensor, right: LazyTensor, scale: float, turned: bool) -> LazyTensor:
    """Return `base` plus the product of two factors times `scale`, transposed if `turned`, as float64."""
    rows, columns = (1, 0) if turned else (0, 1)
    axes = (Axis(0), Axis(1)), (Axis(rows), Axis(0, 0)), (Axis(0, 0), Axis(columns))
    return Tiled((base, left, right), axes, LowRank(scale), _F64, base.shape, (0, 0))

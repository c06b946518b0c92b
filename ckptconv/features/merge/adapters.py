"""The tensors of a base after adapters are merged into it. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.features.factors.kernels import MOST_COLUMNS, MOST_RANK, Magnitude, with_product
from ckptconv.features.merge.files import Adapter, factor, settled
from ckptconv.features.merge.memory import InFiles
from ckptconv.features.merge.peft import PREFIX, Factors, Module, parsed, unknown
from ckptconv.features.merge.placing import Placed, placed
from ckptconv.features.merge.tied import EMBEDDINGS, HEAD, Base, Head, is_saved, moves_head, rows_of, untied
from ckptconv.features.sums.kernels import WeightedSum
from ckptconv.formats.coded import parts_among
from ckptconv.formats.source import ADAPTER_CONFIG, MODEL_KEYS
from ckptconv.tensors import casting
from ckptconv.tensors.computing import Axis, Joined, Tiled
from ckptconv.tensors.dtypes import DTYPES, SUMMED, DType
from ckptconv.tensors.lazy import Concat, LazyTensor, View, untagged
from ckptconv.tensors.slices import Span, as_stored, extent, sliced
from ckptconv.text import brief, count_of, some

_F64 = DTYPES["float64"]


# From the present rows of a tensor, the first of them in the whole, and their number, to the changed rows.
_Made: TypeAlias = Callable[[LazyTensor, int, int], LazyTensor]


class Merged(NamedTuple):
    """The tensors that adapters change, by name, in float64 or the dtype they are stored with; and notes.

    `dtypes` are those of tensors that the base lacks. `untied` are names that no longer share their tensor. `settings`
    are the new values of a configuration.
    """

    tensors: dict[str, LazyTensor]
    notes: tuple[str, ...]
    dtypes: Mapping[str, DType]
    untied: frozenset[str]
    settings: Mapping[str, Any]


def merged(base: Base, adapters: Sequence[tuple[Adapter, Mapping[str, LazyTensor]]]) -> Merged:
    """Return the tensors of `base` that `adapters`, each with its tensors by name, change.

    Raise UsageError if the base has no place for a tensor of an adapter, or one of another shape; UnsupportedError
    for quantized weights, and for unknown parts of adapters.
    """
    parts = parts_among(base.tensors)
    work = _Work(base, {*parts, *parts.values()})
    for adapter, tensors in adapters:
        work.merge(adapter, parsed(adapter.source.path, tensors, adapter.name))
    changed = work.changed
    first: dict[Hashable, str] = {}
    for name in changed:
        if name in base.tensors and name not in work.apart:
            first[base.place(name)] = name
    for name in base.tensors:
        if name not in changed and (kept := first.get(base.place(name))) is not None:
            changed[name] = changed[kept]
    _check_views(base, changed, work.apart)
    return Merged(
        changed,
        (f"merged {count_of(len(adapters), 'adapter')}: {count_of(len(changed), 'tensor')} changed.", *work.notes),
        work.dtypes,
        frozenset(work.apart),
        work.settings,
    )


def _check_views(base: Base, changed: Collection[str], apart: Collection[str]) -> None:
    """Raise UnsupportedError if an unchanged tensor shares bytes with a changed one."""
    pieces = []
    for name, tensor in base.tensors.items():
        if stored := as_stored(untagged(tensor)):
            pieces.append((stored.file.path, stored.offset, stored.offset + extent(stored), name))
    pieces.sort()
    last: dict[bool, tuple[str, int, str]] = {}
    for path, start, stop, name in pieces:
        mine = name in changed
        latest = last.get(not mine)
        if latest and latest[0] == path and start < latest[1] and start < stop and not {name, latest[2]} & {*apart}:
            one, other = (name, latest[2]) if mine else (latest[2], name)
            raise UnsupportedError(
                f"{base.path}: {one!r} and {other!r} share storage, but the adapter changes only {one!r}.",
                "Save separate copies first (tensor.clone()), or omit one of the two tensors with --exclude.",
            )
        if mine not in last or last[mine][0] != path or last[mine][1] < stop:
            last[mine] = path, stop, name


class _Work:
    """Merges adapters: puts the changed tensors into `changed`."""

    def __init__(self, base: Base, quantized: Collection[str]) -> None:
        self.changed: dict[str, LazyTensor] = {}
        self.dtypes: dict[str, DType] = {}
        # Names that no longer share their tensor.
        self.apart: set[str] = set()
        self.settings: dict[str, Any] = {}
        self.notes: list[str] = []
        self._base, self._quantized = base, quantized
        # The number of the adapter that changed a place, and the name under which it did.
        self._by: dict[Hashable, tuple[str, int]] = {}
        self._number = 0
        self._adapter: Adapter
        self._placed: Placed
        self._head: Head | None = None
        self._turns: dict[bool, bool] = {}
        self._told: dict[str, tuple[float, float]] = {}
        # Dtypes of tensors of the base that frozen ones replace, in words.
        self._rounded: list[str] = []

    @property
    def _path(self) -> str:
        return self._adapter.source.path

    def merge(self, adapter: Adapter, modules: Mapping[str, Module]) -> None:
        self._adapter = adapter
        self._number += 1
        self._check_said(modules)
        modules, self._head = untied(self._base, adapter, modules)
        if self._head:
            self._untie(self._head)
        elif embedding := moves_head(self._base, adapter, modules):
            self.notes.append(
                f"The head is tied to {embedding!r} and was changed with it, as in PEFT's merge. During training, the "
                "head did not change."
            )
        self._check_saved(modules)
        self._placed = placed(adapter, self._base.tensors, self._base.path, modules)
        names = [f"{module}.{stack}" for module, stacks in self._placed.stacks.items() for stack in stacks]
        adapted = [module for module, parts in modules.items() if parts.factors]
        names += itertools.chain.from_iterable((module, f"{module}.weight") for module in adapted)
        self._told = settled(adapter.scale, names)
        self._turns = self._evidence(modules)
        for module, parts in modules.items():
            for parameter, tensor in parts.whole.items():
                self._replace(module, parameter, tensor)
        for module, parts in modules.items():
            if parts.rows is not None:
                self._rows(module, parts.rows)
            if parts.factors:
                self._factors(module, parts)
        for dtypes, count in Counter(self._rounded).items():
            self.notes.append(
                f"{self._path} replaced {count_of(count, 'tensor')} of the base, with fewer bits: {dtypes}. To keep "
                "the tensors of the base, convert the adapter alone first, and merge that output."
            )
        self._rounded.clear()

    # ---- the configuration, and the ties in it

    def _check_said(self, modules: Mapping[str, Module]) -> None:
        """Raise CorruptError unless the configuration and the tensors have the same parts."""
        adapter = self._adapter
        adapted = {module: parts for module, parts in modules.items() if parts.factors}
        biased = [module for module, parts in adapted.items() if any(pair.bias is not None for pair in parts.factors)]
        for called, has, expected in (
            (
                "DoRA magnitudes",
                [name for name, parts in adapted.items() if parts.lengths is not None],
                adapter.scale.dora,
            ),
            ("biases of LoRA factors", biased, adapter.has_bias),
            (
                "trained rows of tokens",
                [name for name, parts in modules.items() if parts.rows is not None],
                bool(adapter.tokens),
            ),
        ):
            if bool(has) != expected:
                raise CorruptError(
                    f"{self._path} {f'has {called} for {some(has, 3)}' if has else f'lacks {called}'}, but its "
                    f"{ADAPTER_CONFIG} specifies {'none' if has else 'them'}."
                )
        lacking = [name for name, parts in adapted.items() if adapter.scale.dora and parts.lengths is None]
        if lacking:
            raise CorruptError(f"{self._path} lacks the DoRA magnitudes of {some(lacking, 3)}.")
        self._check_targets(adapted)

    def _check_targets(self, adapted: Mapping[str, Module]) -> None:
        """Raise CorruptError for factors that PEFT does not load, and for lacking modules that were trained whole."""
        adapter = self._adapter
        holders = [parameter.rpartition(".")[0] for parameter in adapter.parameters]
        # Modules that are tied to a target are adapted together with it.
        apart = [*holders, *([HEAD] if adapter.tied else [])]
        targeted = [parts.attention or module for module, parts in adapted.items() if not _ends(module, apart)]
        if left_out := adapter.targets.left_out(targeted):
            raise CorruptError(
                f"{self._path} has factors of {some(left_out, 3)}, but target_modules and related settings of its "
                f"{ADAPTER_CONFIG} do not select them. PEFT ignores such factors.",
                f"Correct target_modules in {ADAPTER_CONFIG}, or remove the factors.",
            )

    def _check_saved(self, modules: Mapping[str, Module]) -> None:
        """Raise CorruptError if a module of the base was trained whole, and the adapter lacks it."""
        whole = [f".{module}." for module, parts in modules.items() if parts.whole]
        for name in () if self._adapter.tied else self._adapter.saved:
            within = f".{name}."
            if any(within in f".{memory}" for memory in self._base.tensors) and not any(
                within in prefix for prefix in whole
            ):
                raise CorruptError(
                    f"{self._path} lacks {name!r}, which modules_to_save in its {ADAPTER_CONFIG} lists.",
                    "Save the adapter again with PEFT's save_pretrained.",
                )

    def _untie(self, head: Head) -> None:
        """Give the head a tensor of its own, a copy of the embedding as it is now."""
        if head.is_new and head.name not in self.changed:
            stored = self._base.tensors[head.embedding]
            self.changed[head.name] = casting.unrounded(untagged(self.changed.get(head.embedding, stored)))
            self.dtypes[head.name] = stored.dtype
        self.apart |= {head.embedding, head.name}
        self.settings["tie_word_embeddings"] = False
        self.notes.append(
            f"The base ties {head.name!r} to {head.embedding!r}, but the output stores both, because they were trained "
            "separately. Their model requires tie_word_embeddings: false in config.json."
        )

    # ---- whole tensors, and rows

    def _put(self, name: str, tensor: LazyTensor, is_whole: bool = False) -> None:
        """Change the tensor of this name. Raise CorruptError if that undoes an earlier change, or changes names that
        the base ties twice."""
        place = name if name in self.apart or name not in self._base.tensors else self._base.place(name)
        before, number = self._by.get(place, (name, self._number))
        if number != self._number and is_whole:
            raise CorruptError(
                f"{self._path} replaces the whole tensor {name!r}, which another adapter changes too.",
                "Adapters saved with save_pretrained contain only factors; several of them can be merged.",
            )
        if number == self._number and before != name:
            raise CorruptError(
                f"{self._path} changes {name!r} and {before!r} separately, but they are one tensor in "
                f"{self._base.path}.",
                "Train them as one tensor with PEFT's ensure_weight_tying.",
            )
        self._by[place] = name, self._number
        self.changed[name] = tensor

    def _replace(self, module: str, parameter: str, tensor: LazyTensor) -> None:
        """Replace a tensor of the base by one that was trained, or that was frozen next to trained ones."""
        memory = f"{module}.{parameter}"
        tensor = untagged(tensor)
        place = self._placed.tensors.get(memory)
        if place is None and len(tensor.shape) == 3 and (experts := self._placed.stacked(module, parameter)):
            self._replace_stack(memory, experts, tensor)
            return
        if place is None:
            self._add(module, memory, tensor)
            return
        for name in place.names:
            self._check_weight(name)
        stored = self._base.tensors[place.names[0]].dtype
        if tensor.dtype.itemsize < stored.itemsize and not is_saved(self._adapter, module):
            self._rounded.append(f"{tensor.dtype} instead of {stored}")
        if len(place.names) == 1 and place.parts == 1:
            name = place.names[0]
            if tensor.shape != self._base.tensors[name].shape and not self._is_resized(module, name, tensor):
                raise self._other_shape(memory, tensor.shape, name)
            self._put(name, tensor, is_whole=True)
            return
        self._in_place(memory, place, tensor.shape, lambda base, start, count: _rows(tensor, start, count), True)

    def _is_resized(self, module: str, name: str, tensor: LazyTensor) -> bool:
        """Return whether a whole tensor belongs to an embedding or a head with another vocabulary."""
        shape = self._base.tensors[name].shape
        of_words = module.rpartition(".")[2] in (*EMBEDDINGS, HEAD)
        if not of_words or len(shape) > 2 or tensor.shape[1:] != shape[1:] or len(tensor.shape) != len(shape):
            return False
        size = self.settings.setdefault("vocab_size", tensor.shape[0])
        if size != tensor.shape[0]:
            raise CorruptError(f"{self._path} has vocabularies of {size:,} and of {tensor.shape[0]:,} tokens.")
        if self._head and self._head.is_new and name == self._head.embedding:
            raise unknown(
                self._path, name, "its vocabulary differs in size from that of the head, to which the base ties it"
            )
        return True

    def _add(self, module: str, memory: str, tensor: LazyTensor) -> None:
        """Add a tensor that the base lacks, of a module that was trained whole."""
        if self._is_new_head(module):
            assert self._head is not None
            if tensor.shape[1:] != self._shape(self._head.name)[1:]:
                raise self._other_shape(memory, tensor.shape, self._head.name)
            self._put(self._head.name, tensor, is_whole=True)
            return
        self._check_weight(memory)
        if not is_saved(self._adapter, module):
            raise self._no_place(memory)
        if memory in self.dtypes:
            raise CorruptError(f"{self._path} has {memory!r}, but another adapter added this tensor already.")
        self.changed[memory], self.dtypes[memory] = tensor, tensor.dtype
        self.notes.append(
            f"{memory!r} was added: the base has no such tensor, and its config.json describes a model without this "
            "tensor."
        )

    def _is_new_head(self, module: str) -> bool:
        """Return whether `module` is a head that the base does not store."""
        return self._head is not None and self._head.is_new and module.rpartition(".")[2] == HEAD

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the base, or of one that was added to the base."""
        return (self._base.tensors.get(name) or self.changed[name]).shape

    def _replace_stack(self, memory: str, experts: Sequence[Sequence[str]], tensor: LazyTensor) -> None:
        """Replace the base's tensors of a stack by a whole stack."""
        whole = (Span(0, 1, tensor.shape[2]),)
        for number, names in enumerate(experts):
            at = 0
            for name in names:
                self._check_weight(name)
                shape = self._base.tensors[name].shape
                if len(experts) != tensor.shape[0] or shape[1:] != tensor.shape[2:] or at + shape[0] > tensor.shape[1]:
                    raise self._other_shape(memory, tensor.shape, name)
                part = sliced(tensor, (Span(number, 1, 1), Span(at, 1, shape[0]), *whole))
                self._put(name, View(part, part.dtype, shape), is_whole=True)
                at += shape[0]
            if at != tensor.shape[1]:
                raise self._other_shape(memory, tensor.shape, names[-1])

    def _rows(self, module: str, rows: LazyTensor) -> None:
        """Replace the base's rows of the tokens that were trained."""
        name = self._weight(module)
        base = self._now(name)
        tokens = rows_of(self._adapter, module)
        if tokens is None or len(base.shape) != 2 or rows.shape != (len(tokens), base.shape[1]):
            raise self._other_shape(f"{module}.token_adapter.trainable_tokens_delta", rows.shape, name)
        if max(tokens, default=0) >= base.shape[0]:
            raise CorruptError(
                f"{self._path} has row {max(tokens):,} of {name!r}, but in the base, this tensor has only "
                f"{base.shape[0]:,} rows, from 0."
            )
        pieces: list[LazyTensor] = []
        at = 0
        for number, token in sorted(enumerate(tokens), key=lambda pair: pair[1]):
            if token > at:
                pieces.append(_wide(_rows(base, at, token - at)))
            pieces.append(_wide(_rows(rows, number, 1)))
            at = token + 1
        if at < base.shape[0]:
            pieces.append(_wide(_rows(base, at, base.shape[0] - at)))
        self._put(name, Concat(tuple(pieces)))

    # ---- factors

    def _weight(self, module: str) -> str:
        place = self._placed.tensors.get(f"{module}.weight")
        if place is None and self._is_new_head(module) and self._head:
            return self._head.name
        if place is None or len(place.names) != 1 or place.parts != 1:
            raise self._no_place(f"{module}.weight")
        return place.names[0]

    def _factors(self, module: str, parts: Module) -> None:
        memory = f"{module}.{parts.parameter}"
        place = self._placed.tensors.get(memory)
        if place is None or len(parts.factors) > 1:
            self._stacked(module, parts)
            return
        (pair,) = parts.factors
        left, right = pair.left, pair.right
        is_parameter = any(
            memory == parameter or memory.endswith(f".{parameter}") for parameter in self._adapter.parameters
        )
        scale = self._factor(memory if is_parameter else parts.attention or module, left, right)
        # PEFT adds this product twice, both when it merges and in each step of the training.
        scale *= 2 if parts.attention else 1
        if pair.bias is not None:
            self._bias(module, pair.bias, scale)
        for name in place.names:
            self._check_weight(name)
        if len(place.names) > 1 or place.parts > 1:
            if parts.lengths is not None or pair.embedding or len(left.shape) != 2 or len(right.shape) != 2:
                raise unknown(
                    self._path,
                    module,
                    "the base stores its weight joined with others, or in parts. Only matrices as factors of a linear "
                    "layer, without DoRA, can be merged into such a weight",
                )
            self._in_place(
                memory,
                place,
                (left.shape[0], right.shape[1]),
                lambda base, start, count: with_product(base, _rows(left, start, count), right, scale=scale),
            )
            return
        name = place.names[0]
        base = self._now(name)
        if len(base.shape) > 2:
            self._convolution(name, base, pair, scale, parts.lengths)
            return
        if len(base.shape) != 2 or len(left.shape) != 2 or len(right.shape) != 2:
            shapes = f"{[*base.shape]}, and its factors B and A have {[*left.shape]} and {[*right.shape]}"
            raise unknown(self._path, name, f"it has the shape {shapes}, but all three must be matrices")
        shape = left.shape[0], right.shape[1]
        turned = self._is_turned(module, pair, name, base)
        if (shape[::-1] if turned else shape) != base.shape:
            raise self._other_shape(name, shape, name)
        product: LazyTensor = with_product(base, left, right, scale=scale, turned=turned)
        if parts.lengths is not None:
            product = self._with_lengths(name, product, parts.lengths, turned)
        self._put(name, product)

    def _is_turned(self, module: str, pair: Factors, name: str, base: LazyTensor) -> bool:
        shape = pair.left.shape[0], pair.right.shape[1]
        if pair.embedding:
            return shape[::-1] == base.shape
        if not self._adapter.turned or shape[::-1] != base.shape:
            return False
        if shape != base.shape:
            return True
        # A square matrix is stored as the others are. PEFT ignores the configuration's value for linear layers.
        return self._turns.get(_is_of_layer(module), True)

    def _evidence(self, modules: Mapping[str, Module]) -> dict[bool, bool]:
        """Return whether the matrices in layers, and those outside, are stored transposed, if matrices that are not
        square show it: {in a layer: transposed}."""
        kinds: dict[bool, set[bool]] = {}
        for module, parts in modules.items():
            place = self._placed.tensors.get(f"{module}.weight")
            for pair in parts.factors if place and len(place.names) == 1 and not place.parts > 1 else ():
                assert place is not None
                base = self._base.tensors[place.names[0]].shape
                shape = pair.left.shape[0], pair.right.shape[1]
                if not pair.embedding and len(base) == 2 and shape != shape[::-1] and base in (shape, shape[::-1]):
                    kinds.setdefault(_is_of_layer(module), set()).add(base != shape)
        return {inside: True in kind for inside, kind in kinds.items()}

    def _bias(self, module: str, bias: LazyTensor, scale: float) -> None:
        """Add the bias of factors to that of the base."""
        place = self._placed.tensors.get(f"{module}.bias")
        if place is None or len(place.names) != 1 or place.parts != 1:
            raise CorruptError(
                f"{self._path} has a bias for the factors of {module!r}, but {self._base.path} has no bias for this "
                "module.",
                "PEFT cannot merge it either. Add a bias of zeros to the module.",
            )
        name = place.names[0]
        base = self._now(name)
        if base.shape != bias.shape:
            raise self._other_shape(f"{module}.lora_B.bias", bias.shape, name)
        kernel = WeightedSum((base.dtype.name, bias.dtype.name), (1.0, scale), 1.0)
        self._put(name, Joined((base, bias), kernel, _F64))

    def _convolution(
        self, name: str, base: LazyTensor, pair: Factors, scale: float, lengths: LazyTensor | None
    ) -> None:
        """Merge the factors of a convolution: the first is one too, and the second has kernels of one element."""
        left, right = pair.left, pair.right
        if left.shape[2:] != (1,) * (len(base.shape) - 2) or left.numel != left.shape[0] * left.shape[1]:
            reason = f"its factor B has the shape {[*left.shape]}, which is not that of a convolution of kernel size 1"
            raise unknown(self._path, name, reason)
        if (left.shape[0], *right.shape[1:]) != base.shape:
            raise self._other_shape(name, (left.shape[0], *right.shape[1:]), name)
        shape = base.shape[0], base.numel // base.shape[0]
        matrix: LazyTensor = with_product(
            View(base, base.dtype, shape),
            View(left, left.dtype, left.shape[:2]),
            View(right, right.dtype, (right.shape[0], shape[1])),
            scale=scale,
        )
        if lengths is not None:
            matrix = self._with_lengths(name, matrix, lengths, False)
        self._put(name, View(matrix, matrix.dtype, base.shape))

    def _with_lengths(self, name: str, matrix: LazyTensor, lengths: LazyTensor, turned: bool) -> LazyTensor:
        if turned:
            raise unknown(
                self._path,
                name,
                "DoRA of an embedding or of a transposed matrix, where each element depends on all rows",
            )
        if matrix.shape[1] > MOST_COLUMNS:
            reason = f"DoRA of rows of {matrix.shape[1]:,} elements; at most {MOST_COLUMNS:,} are supported"
            raise unknown(self._path, name, reason)
        if lengths.numel != matrix.shape[0] or lengths.dtype.name not in SUMMED:
            raise self._other_shape(name, lengths.shape, name)
        flat = lengths if len(lengths.shape) == 1 else View(lengths, lengths.dtype, (lengths.numel,))
        axes = (Axis(0), Axis(1, 0)), (Axis(0),)
        return Tiled((matrix, flat), axes, Magnitude(), _F64, matrix.shape, (0, 0))

    def _factor(self, module: str, left: LazyTensor, right: LazyTensor, experts: int = 1) -> float:
        rank, odd = divmod(left.shape[1], experts)
        if left.shape[1] != right.shape[0] or odd:
            expected = f"the same multiple of its {experts} experts" if experts > 1 else "the same number"
            raise CorruptError(
                f"{self._path}: factor B of {module!r} has {count_of(left.shape[1], 'column')}, and factor A has "
                f"{count_of(right.shape[0], 'row')}; {expected} was expected."
            )
        if left.shape[1] > MOST_RANK:
            reason = f"factors of rank {left.shape[1]:,}; at most {MOST_RANK:,} is supported"
            raise unknown(self._path, module, reason)
        return factor(self._adapter.scale, self._told[module], module, rank)

    def _now(self, name: str) -> LazyTensor:
        """Return the tensor of the base with the changes so far."""
        self._check_weight(name)
        tensor = casting.unrounded(untagged(self.changed.get(name) or self._base.tensors[name]))
        if tensor.dtype.name not in SUMMED:
            raise UnsupportedError(
                f"{self._base.path}: {name!r} is {tensor.dtype}, but adapters can only be merged into floats of 16 "
                "bits or more."
            )
        return tensor

    def _check_weight(self, name: str) -> None:
        if name in self._quantized:
            raise UnsupportedError(
                f"{self._base.path}: {name!r} is quantized, but adapters can only be merged into plain weights.",
                "Use --dequantize to convert quantized weights to plain ones.",
            )

    def _in_place(
        self, memory: str, place: InFiles, shape: Sequence[int], change: _Made, is_whole: bool = False
    ) -> None:
        """Change several tensors, or a part of the rows of one. `change` takes the present rows, the first of them in
        the whole, and their number."""
        bases = [self._now(name) for name in place.names]
        rows = sum(base.shape[0] for base in bases) // place.parts
        if any(base.shape[1:] != tuple(shape[1:]) or base.shape[0] % place.parts for base in bases) or rows != shape[0]:
            raise self._other_shape(memory, shape, place.names[0])
        if place.parts > 1:
            (name,), (base,) = place.names, bases
            start = place.part * rows
            inside = change(_rows(base, start, rows), 0, rows)
            around = [(0, start), (start + rows, base.shape[0] - start - rows)]
            before, after = ([_wide(_rows(base, *span))] if span[1] else [] for span in around)
            self._put(name, Concat((*before, _wide(inside), *after)), is_whole)
            return
        at = 0
        for name, base in zip(place.names, bases, strict=True):
            self._put(name, change(base, at, base.shape[0]), is_whole)
            at += base.shape[0]

    # ---- experts

    def _stacked(self, module: str, parts: Module) -> None:
        """Merge the factors of a module's parameters, which are stacked."""
        stacks = self._placed.stacks.get(module)
        if not stacks:
            begin = f"{module}."
            self._check_weight(min((name for name in self._quantized if name.startswith(begin)), default=""))
            raise self._no_place(f"{module}.weight")
        if parts.lengths is not None or any(pair.bias is not None for pair in parts.factors):
            raise unknown(self._path, module, "it combines stacked experts with DoRA or a bias")
        for pair in parts.factors:
            if len(pair.left.shape) != 2 or len(pair.right.shape) != 2:
                shapes = f"{[*pair.left.shape]} and {[*pair.right.shape]}"
                raise unknown(self._path, module, f"its factors B and A have the shapes {shapes}, but must be matrices")
        for pair, stack in self._fitting(module, parts.factors, stacks):
            self._experts(f"{module}.{stack}", pair, stacks[stack])

    def _fitting(
        self, module: str, pairs: Sequence[Factors], stacks: Mapping[str, Sequence[Sequence[str]]]
    ) -> Iterator[tuple[Factors, str]]:
        """Yield the factors with their stacks, as far as the shapes show them: factors that fit only one stack have
        that stack, and no others can have it then."""
        meant = [name for name in stacks if f"{module}.{name}".endswith(tuple(self._adapter.parameters))]
        if len(meant) != len(pairs):
            meant = list(stacks)
        left = {at: {name for name in meant if self._fits(pair, stacks[name])} for at, pair in enumerate(pairs)}
        while left:
            at = min(left, key=lambda number: len(left[number]))
            fits = left.pop(at)
            # If several stacks fit, one of them may fit no other pair.
            alone = [name for name in fits if not any(name in names for names in left.values())]
            if len(fits) > 1 and not (len(alone) == 1 and len(left) + 1 == len({*fits}.union(*left.values()))):
                fits = set()
                count = "more than one"
            elif len(fits) > 1:
                fits = set(alone)
            else:
                count = "none"
            if not fits:
                raise CorruptError(
                    f"{self._path}: the factors of {module!r}, for a weight of shape "
                    f"{[pairs[at].left.shape[0], pairs[at].right.shape[1]]}, match {count} of the stacked parameters "
                    f"{some(stacks)}."
                )
            (name,) = fits
            for names in left.values():
                names.discard(name)
            yield pairs[at], name

    def _fits(self, pair: Factors, experts: Sequence[Sequence[str]]) -> bool:
        shape = (pair.left.shape[0], pair.right.shape[1])
        first = [self._base.tensors[name].shape for name in experts[0]]
        if len(first[0]) == 3:
            return shape in (first[0][1:], first[0][:0:-1])
        return all(len(shapes) == 2 for shapes in first) and shape == (sum(shapes[0] for shapes in first), first[0][1])

    def _experts(self, parameter: str, pair: Factors, experts: Sequence[Sequence[str]]) -> None:
        left, right = pair.left, pair.right
        stack = experts[0][0] if len(self._base.tensors[experts[0][0]].shape) == 3 else ""
        count = self._base.tensors[stack].shape[0] if stack else len(experts)
        scale = self._factor(parameter, left, right, count)
        turned = bool(stack) and self._is_stack_turned(parameter, stack, (left.shape[0], right.shape[1]))
        rank = right.shape[0] // count
        slices = []
        for number in range(count):
            mine = sliced(left, (Span(0, 1, left.shape[0]), Span(number, count, rank)))
            theirs = _rows(right, number * rank, rank)
            if stack:
                slices.append(self._of_stack(stack, number, mine, theirs, scale, turned))
                continue
            at = 0
            for name in experts[number]:
                base = self._now(name)
                self._put(name, with_product(base, _rows(mine, at, base.shape[0]), theirs, scale=scale))
                at += base.shape[0]
        if stack:
            self._put(stack, Concat(tuple(slices)))

    def _is_stack_turned(self, parameter: str, stack: str, shape: tuple[int, int]) -> bool:
        """Return whether the matrices of a stack are stored transposed, if the product of the factors has `shape`.

        All stacks of a module are transposed, or none. If the matrices are square, the other stack shows it. Gates are
        stacked with the layers that they open: a stack with as many inputs has twice as many outputs, and one with as
        many outputs has half as many inputs.
        """
        rows, columns = self._base.tensors[stack].shape[1:]
        if rows != columns:
            return shape != (rows, columns)
        module = stack.rpartition(".")[0]
        others = {
            tensor.shape[1:]
            for name, tensor in self._base.tensors.items()
            if len(tensor.shape) == 3 and name.rpartition(".")[0] == module
        }
        turned = {height < width for height, width in others if {height, width} in ({rows, 2 * rows}, {rows, rows / 2})}
        if len(turned) != 1:
            raise unknown(
                self._path, parameter, "its experts are square, so it is not known whether they are transposed"
            )
        return turned.pop()

    def _of_stack(
        self, stack: str, number: int, left: LazyTensor, right: LazyTensor, scale: float, turned: bool
    ) -> LazyTensor:
        whole = self._now(stack)
        matrix = sliced(whole, (Span(number, 1, 1), *(Span(0, 1, extent) for extent in whole.shape[1:])))
        inner = whole.shape[1:]
        changed = with_product(View(matrix, matrix.dtype, inner), left, right, scale=scale, turned=turned)
        return View(changed, changed.dtype, (1, *inner))

    # ---- errors

    @property
    def _named_base(self) -> str:
        """The base that the adapter's configuration names, in words that continue a sentence; "" if it names none."""
        base = self._adapter.base
        return f" (its {ADAPTER_CONFIG} names {brief(base)})" if base else ""

    def _no_place(self, memory: str) -> UsageError:
        if self._placed.has_other_layout(memory, self._base.model.get("model_type")):
            return UsageError(
                f"{self._path} has {memory!r}, for which transformers uses different layouts in files and in memory, "
                f"but {self._base.path} has no tensor {memory!r}.",
                "Save the base with the names that transformers uses in memory: model.state_dict().",
            )
        if longer := next((name for name in self._base.tensors if name.endswith(f".{memory}")), ""):
            above = longer.removesuffix(memory)
            first, _, rest = above.partition(".")
            is_in_key = first in MODEL_KEYS and not self._base.key
            key, prefix = (first, rest) if is_in_key else (self._base.key, above)
            options = [f"--key {key}"] if key else []
            options += [f"--strip-prefix {prefix}"] if prefix else []
            return UsageError(
                f"{self._path} has {PREFIX}{memory}, but {self._base.path} has {memory!r} as {longer!r}.",
                f"Convert the base without this prefix first: ckptconv convert {self._base.path} base.safetensors "
                f"{' '.join(options)}. Then merge into base.safetensors.",
            )
        if self._placed.is_empty:
            return UsageError(
                f"{self._base.path} has none of the tensors that {self._path} changes, such as {memory!r}.",
                f"The adapter is for another model{self._named_base}.",
            )
        return UsageError(
            f"{self._path} has {PREFIX}{memory}, but {self._base.path} has {memory!r} neither under this name nor "
            "under the other names that transformers uses in files.",
            f"The adapter is for another model{self._named_base}, or for a tied tensor that this base does not store.",
        )

    def _other_shape(self, memory: str, shape: Sequence[int], name: str) -> UsageError:
        return UsageError(
            f"{self._path}: {memory!r} is for a tensor of shape {list(shape)}, but {name!r} of {self._base.path} has "
            f"{list(self._shape(name))}.",
            f"The adapter is for another model{self._named_base}.",
        )


def _is_of_layer(module: str) -> bool:
    return any(part.isdecimal() for part in module.split("."))


def _rows(tensor: LazyTensor, start: int, count: int) -> LazyTensor:
    """Return `count` rows of a tensor, from row `start` on."""
    if not start and count == tensor.shape[0]:
        return tensor
    return sliced(tensor, (Span(start, 1, count), *(Span(0, 1, size) for size in tensor.shape[1:])))


def _wide(tensor: LazyTensor) -> LazyTensor:
    """Return a tensor of floats, cast to float64."""
    return casting.cast(tensor, _F64)


def _ends(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)

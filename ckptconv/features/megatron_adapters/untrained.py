"""Matrices that PEFT does not adapt, and Megatron-Bridge does: their factors in a step are zeros.

CanonicalLoRA of Megatron-Bridge calls the adapters of all matrices that Megatron-core joins: without that of k, it
fails in its first step, and when it saves. Two factors of zeros change nothing. The gradient of each is a product with
the other: so training leaves both at zero, and they mean the same afterwards.

Source: Megatron-Bridge 0.3.1 to 0.6.2, peft/canonical_lora.py (`ModuleDict`, `LoRALinearSplitQKV`,
`LoRALinearSplitFC1UpGate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.maps.chosen import ChosenMap
from ckptconv.features.maps.notation import MapTensor
from ckptconv.features.maps.sizes import Equation, KnownSizes, resolve, solve
from ckptconv.features.megatron_adapters.deriving import factors_of, joined_matrices
from ckptconv.features.megatron_adapters.names import adapters_in, part_of
from ckptconv.features.megatron_adapters.settings import layers_in
from ckptconv.formats.adapter_names import FACTOR
from ckptconv.formats.source import Source
from ckptconv.formats.values import first_bytes
from ckptconv.tensors.lazy import LazyTensor, Zeros
from ckptconv.text import quoted, some

# The bytes of a factor that are read first: most that are not zeros differ there.
_BEGINNING = 1 << 12
_MATRIX = 2


def zeros_of(source: Source, chosen: ChosenMap) -> dict[str, LazyTensor]:
    """Return factors of zeros, by name, for each matrix that an adapter of PEFT does not adapt, although it adapts
    another one that Megatron-core joins with it in the model of the map. Raise UsageError if its rows are not known."""
    weights, zeros = source.weights, dict[str, LazyTensor]()
    sizes = resolve(chosen.map.sizes, chosen.config, chosen.sizes)
    for layer, matrices in product(layers_in(weights), joined_matrices(chosen.map)):
        factors = {matrix: factors_of(matrix, layer) for matrix in matrices}
        adapted = {matrix: pair for matrix, names in factors.items() if (pair := _pair(weights, names))}
        for matrix, names in factors.items():
            if adapted and weights.keys().isdisjoint(names):
                first, second = next(iter(adapted.values()))
                rows = _rows(matrix, adapted, sizes, names[1], source.path)
                shapes = first.shape, (rows, *second.shape[1:])
                zeros |= {name: Zeros(first.dtype, shape) for name, shape in zip(names, shapes, strict=True)}
    return zeros


def _pair(weights: Mapping[str, Any], names: Sequence[str]) -> tuple[LazyTensor, LazyTensor] | None:
    """Return both factors of a matrix; None without one of them, or if one is no matrix."""
    first, second = (weights.get(name) for name in names)
    pair = (first, second) if isinstance(first, LazyTensor) and isinstance(second, LazyTensor) else None
    return pair if pair and all(len(factor.shape) == _MATRIX for factor in pair) else None


def _rows(
    matrix: MapTensor,
    adapted: Mapping[MapTensor, tuple[LazyTensor, LazyTensor]],
    sizes: Mapping[str, int],
    name: str,
    path: str,
) -> int:
    """Return the number of rows of a matrix, from the given sizes and from those of the `adapted` matrices."""
    known, rows = KnownSizes(sizes), {other.dims[:1]: pair[1].shape[0] for other, pair in adapted.items() if other.dims}
    if matrix.dims and matrix.dims[:1] in rows:
        return rows[matrix.dims[:1]]
    solve((Equation(dims[0], extent, name, 0) for dims, extent in rows.items()), known, path)
    try:
        return known.product(matrix.dims[0] if matrix.dims else ())
    except KeyError:
        raise UsageError(
            f"{path} does not contain {quoted(name)}, and its number of rows does not follow from the shapes of "
            "other factors.",
            "Specify the configuration of the model: --config FILE.",
        ) from None


def without_zeros(source: Source, chosen: ChosenMap, stores: Mapping[str, Any]) -> Source:
    """Return a source of adapters of CanonicalLoRA without those that `zeros_of` made, and a note on them. Those that
    the adapter has which the output is to be like are kept."""
    names = [*_zero_factors(adapters_in(source.weights), stores)]
    if not names:
        return source
    applied = chosen.apply({name: source.weights[name] for name in names})
    kept = source.reference.weights if source.reference else {}
    left_out = {name for target, sources in applied.sources.items() if target not in kept for name in sources}
    if not left_out:
        return source
    note = f"Left out, because both factors are zeros and have no effect: the adapters of {modules_of(applied.tensors)}"
    return source._replace(
        weights={name: leaf for name, leaf in source.weights.items() if name not in left_out},
        notes=[*source.notes, f"{note}."],
    )


def _zero_factors(adapters: Mapping[str, LazyTensor], stores: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of factors that are zeros for parts of matrices, each of which has another part that is not."""
    matrices: dict[str, dict[str, list[str]]] = {}
    for name in adapters:
        matrix, part = part_of(name)
        if part:
            matrices.setdefault(matrix, {}).setdefault(part, []).append(name)
    for parts in matrices.values():
        zeros = [names for names in parts.values() if all(_is_zero(adapters[name], stores) for name in names)]
        if len(zeros) < len(parts):
            yield from chain.from_iterable(zeros)


def _is_zero(tensor: LazyTensor, stores: Mapping[str, Any]) -> bool:
    """Return whether all bytes of a tensor are zero."""
    return not any(any(first_bytes(tensor, limit, stores)[0]) for limit in (_BEGINNING, tensor.nbytes))


def modules_of(names: Iterable[str]) -> str:
    """Return the modules that have factors of these names, by the ends of their names, as a text."""
    modules = {match["module"].rpartition(".")[2] for name in names if (match := FACTOR.fullmatch(name))}
    return some(sorted(modules), form=str)

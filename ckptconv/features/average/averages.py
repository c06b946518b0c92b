"""Averages: adds up the tensors of several checkpoints, copies those without an average, and notes both."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import DifferenceError, UsageError
from ckptconv.features.average import steps
from ckptconv.features.average.steps import Average
from ckptconv.features.sums.kernels import WeightedSum
from ckptconv.formats.adapter_names import is_adapter, other_program
from ckptconv.formats.coded import parts_among
from ckptconv.formats.opening import opened
from ckptconv.formats.source import Source
from ckptconv.formats.training import model_alone
from ckptconv.options.registered import missing
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.computed import Again, Computing, From
from ckptconv.outputs.naming import Named, named
from ckptconv.storage.strict_json import OrNull
from ckptconv.structure import parted
from ckptconv.structure.choice import Choice
from ckptconv.tensors import casting
from ckptconv.tensors.computing import Joined
from ckptconv.tensors.dtypes import DTYPES, SUMMED, DType
from ckptconv.tensors.lazy import LazyTensor, same_bytes, untagged
from ckptconv.text import count_of, some

_F64 = DTYPES["float64"]
# The most checkpoints that a note on a difference names.
_SHOWN = 10


class Term(NamedTuple):
    """A checkpoint of an average: its path, its tensors by name, those of them whose values mean nothing alone, its own
    ties {alias: owner}, and the names of its optimizers."""

    path: str
    tensors: Mapping[str, LazyTensor]
    uncastable: Collection[str]
    ties: Mapping[str, str]
    optimizers: tuple[str, ...]

    def weights(self) -> dict[str, LazyTensor]:
        """Return the tensors that are not states of an optimizer."""
        below = tuple(f"{name}." for name in self.optimizers)
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(below)}

    def place(self, name: str) -> Hashable:
        """Return a value that is equal for two names of one tensor."""
        kept = self.ties.get(name, name)
        identity = same_bytes(self.tensors.get(kept, self.tensors[name]))
        return name if identity is None else identity


class Averaged(NamedTuple):
    """The averaged tensors by name, and the remaining ties {alias: owner}. `untied` are names that are tied in the last
    checkpoint, but not in all. `notes` are for users."""

    tensors: dict[str, LazyTensor]
    ties: dict[str, str]
    untied: tuple[str, ...]
    notes: tuple[str, ...]


def averaged(terms: Sequence[Term], main: Term, average: Average, stored_as: Callable[[DType], DType]) -> Averaged:
    """Return the tensors that are averages, rounded once to the dtype that `stored_as` gives for that of `main`, which
    is one of `terms`. All other tensors are those of `main`.

    Raise DifferenceError for a tensor that is missing in one of them, or has another shape, or is no number in only
    one; UsageError for quantized weights.
    """
    for term in terms:
        if quantized := dict.fromkeys(parts_among(term.tensors).values()):
            raise UsageError(
                f"{term.path}: {some(quantized, 3)} {'is' if len(quantized) == 1 else 'are'} quantized, but quantized "
                "codes cannot be averaged.",
                "Use --dequantize to average plain weights.",
            )
        if error := other_program(term.path, term.tensors):
            raise error
        if is_adapter(term.tensors):
            raise _of_adapters(term.path)
    terms = [term if term is main else _named_alike(term, main) for term in terms]
    every = [term.weights() for term in terms]
    theirs = main.weights()
    for term, tensors in zip(terms, every, strict=True):
        _check_alike(main.path, theirs, term.path, tensors)
    averages: dict[str, LazyTensor] = {}
    known: dict[Hashable, LazyTensor] = {}
    places: dict[str, Hashable] = {}
    for name, tensor in theirs.items():
        parts = tuple(casting.unrounded(untagged(tensors[name])) for tensors in every)
        if name in main.uncastable or not _is_number(tensor):
            continue
        # Names are tied if they are in every checkpoint.
        places[name] = key = tuple(term.place(name) for term in terms)
        if key not in known:
            kernel = WeightedSum(tuple(part.dtype.name for part in parts), average.weights, average.over)
            known[key] = casting.rounded(Joined(parts, kernel, _F64), stored_as(tensor.dtype))
        averages[name] = known[key]
    ties = {alias: owner for alias, owner in main.ties.items() if places.get(alias) == places.get(owner)}
    first: dict[Hashable, str] = {}
    pairs = ((name, first.setdefault(main.place(name), name)) for name in averages)
    untied = tuple(name for name, tied_name in pairs if places[name] != places[tied_name])
    notes = _notes(terms, main, average, theirs, averages)
    return Averaged(averages, ties, untied, (*notes, *_of_dtypes(every, main, averages)))


def _of_adapters(path: str) -> UsageError:
    return UsageError(
        f"{path} is an adapter, but averages of factors are not factors of the averaged updates to a model.",
        "Merge each adapter into its base (ckptconv merge), and average the merged models.",
    )


def _named_alike(term: Term, main: Term) -> Term:
    """Return `term` with the names that `main` has for one tensor, if one of them stores it under fewer names."""
    tensors, ties = dict(term.tensors), dict(term.ties)
    for having, lacking in ((main, term), (term, main)):
        first: dict[Hashable, str] = {}
        for name in having.tensors:
            if name in lacking.tensors:
                first.setdefault(having.place(name), name)
        for name in having.tensors.keys() - lacking.tensors.keys():
            kept = first.get(having.place(name))
            if kept is not None and having is main:
                tensors[name], ties[name] = tensors[kept], ties.get(kept, kept)
            elif kept is not None:
                del tensors[name]
    return term._replace(tensors=tensors, ties=ties)


def _is_number(tensor: LazyTensor) -> bool:
    return tensor.dtype.name in SUMMED


def _check_alike(
    path: str, theirs: Mapping[str, LazyTensor], other_path: str, tensors: Mapping[str, LazyTensor]
) -> None:
    """Raise DifferenceError unless the tensors of two checkpoints have the same names and shapes."""
    for lacks, has, lacking in (
        (other_path, path, theirs.keys() - tensors.keys()),
        (path, other_path, tensors.keys() - theirs.keys()),
    ):
        if lacking:
            raise DifferenceError(
                f"{lacks} lacks {some(sorted(lacking), 3)}, which {has} has.",
                "Average checkpoints of one model, with the same names. To rename tensors, convert one of the "
                "checkpoints first; --exclude omits tensors.",
                what="missing",
                tensor=min(lacking),
                file=lacks,
            )
    for name, tensor in theirs.items():
        found_shape, number = tensors[name].shape, _is_number(tensors[name])
        if found_shape != tensor.shape or number != _is_number(tensor):
            descriptions = [f"{side.dtype} {list(side.shape)}" for side in (tensors[name], tensor)]
            raise DifferenceError(
                f"{other_path}: {name!r} is {descriptions[0]}, but {descriptions[1]} in {path}.",
                _vocabularies(path, theirs, other_path, tensors) or "Average checkpoints of one model.",
                what="shape" if found_shape != tensor.shape else "dtype",
                tensor=name,
                file=other_path,
            )


def _vocabularies(
    path: str, theirs: Mapping[str, LazyTensor], other_path: str, tensors: Mapping[str, LazyTensor]
) -> str:
    """Return advice if two checkpoints differ only in the number of rows of the vocabulary's tensors; else ""."""
    pairs = [(tensors[name].shape, tensor.shape) for name, tensor in theirs.items()]
    rows = {(one[0], other[0]) for one, other in pairs if one != other and one[1:] and other[1:]}
    if missing("vocab") or len(rows) != 1 or any(one[1:] != other[1:] for one, other in pairs):
        return ""
    (counts,) = rows
    larger = shlex.quote(other_path if counts[0] > counts[1] else path)
    cut = f"ckptconv convert {larger} CUT --vocab {min(counts)}"
    return f"If the vocabularies differ in size, cut {larger} first, and average CUT instead: {cut}"


def _of_dtypes(
    every: Sequence[Mapping[str, LazyTensor]], main: Term, averages: Mapping[str, LazyTensor]
) -> Iterator[str]:
    """Yield notes on the dtypes of averages whose tensors have several dtypes."""
    names_by_dtypes: dict[tuple[str, ...], list[str]] = {}
    for name, tensor in averages.items():
        dtypes = dict.fromkeys(tensors[name].dtype.name for tensors in every)
        if len(dtypes) > 1:
            names_by_dtypes.setdefault((*dtypes, tensor.dtype.name), []).append(name)
    for (*several, dtype), names in names_by_dtypes.items():
        last = main.tensors[names[0]].dtype.name
        why = f"as in {main.path}; --dtype selects another dtype" if dtype == last else "the dtype of the output"
        yield f"{count_of(len(names), 'tensor')} with the dtypes {' and '.join(several)} became {dtype}, {why}."


def _notes(
    terms: Sequence[Term], main: Term, average: Average, theirs: Mapping[str, LazyTensor], averages: Collection[str]
) -> Iterator[str]:
    if average.minus:
        parts = [f"{weight:g} × {term.path}" for weight, term in zip(average.weights, terms, strict=True)]
        yield f"added up {some(parts, _SHOWN, str)}: {count_of(len(averages), 'tensor')}."
    else:
        pairs = zip(average.weights, terms, strict=True)
        shares = some([f"{weight / average.over:.3g} × {term.path}" for weight, term in pairs], _SHOWN, str)
        yield f"averaged {count_of(len(averages), 'tensor')} of {count_of(len(terms), 'checkpoint')}: {shares}."
    if left := [name for name in theirs if name not in averages]:
        result = "differences" if average.minus else "averages"
        yield f"copied from {main.path}, because their dtype does not support {result}: {some(left)}."
    if states := [name for name in main.tensors if name not in theirs]:
        copied = count_of(len(states), "optimizer state")
        yield f"copied from {main.path}, because optimizer states are never averaged: {copied}."


# --------------------------------------------------------------------------------------------------- in an output


def _given(source: Source) -> Average:
    average: Average = source.computed["average"]
    return average


def _averages(originals: Named, source: Source, options: Options) -> Named:
    """Return the tensors of `source`, with averages in the place of those that can be averaged."""
    terms = []
    for term in _given(source).terms:
        if term is not None:
            term.check_weights()
        theirs = originals if term is None else named(term, options)
        flat = theirs.described.tensors
        chosen = {name: flat[name] for name in selection.matching(flat, Choice(options.include, options.exclude))}
        uncastable = theirs.described.uncastable | parted.parts_of(theirs.described.quantized)
        terms.append(Term((term or source).path, chosen, uncastable, theirs.ties, theirs.optimizers))
    dtype = options.dtype or source.defaults.dtype
    stored_as = functools.partial(selection.goal, dtype=dtype, widen_only=source.defaults.dtype == dtype == "float32")
    result = averaged(terms, terms[_given(source).terms.index(None)], _given(source), stored_as)
    described = originals.described._replace(tensors={**originals.described.tensors, **result.tensors})
    with_averages = originals._replace(described=described, ties=result.ties, notes=result.notes)
    if not result.untied or described.structure is None:
        return with_averages
    why = f"it ties {some(result.untied, 3)}, which are not tied in all checkpoints."
    return with_averages.without_record(f"{source.path}: the structure record was left out: {why}")


def _check(heading: Mapping[str, Any]) -> None:
    """Raise ValueError if a manifest's entry is not that of an average."""
    average = heading["average"]
    terms, numbers = average["terms"], [*average["weights"], average["over"]]
    if terms.count(None) != 1 or len(numbers) != len(terms) + 1 or not average["over"]:
        raise ValueError("its average is not valid")
    if not all(map(math.isfinite, numbers)):
        raise ValueError("the weights of its average are not valid numbers")


def _record(source: Source) -> Mapping[str, Any]:
    average = _given(source)
    terms = [From(term.path) if term else None for term in average.terms]
    entry = {"terms": terms, "weights": list(average.weights), "over": average.over}
    return {"average": entry | ({"minus": True} if average.minus else {})}


def _terms(source: Source) -> Iterable[Source]:
    return filter(None, _given(source).terms)


def _again(
    source: Source, heading: Mapping[str, Any], paths: Sequence[str | None], options: Options, output: str
) -> Source:
    """Return `source`, to be averaged with the same checkpoints again."""
    average, any_family = heading["average"], options.replaced(family="")
    terms = [source if path is None else opened(path, any_family, key=options.key) for path in paths]
    if options.for_hub:
        terms = [model_alone(term, options) for term in terms]
    own_index = paths.index(None)
    return steps.averaged(terms, own_index, average["weights"], average["over"], average.get("minus", False))


COMPUTING = Computing(
    heading={"average?": {"terms": [OrNull(str)], "weights": [float], "over": float, "minus?": bool}},
    check=_check,
    named=_averages,
    record=_record,
    reported=lambda source: {
        "averaged": _given(source).paths(source.path),
        "weights": list(_given(source).weights),
    },
    sources=_terms,
    again=Again(
        lambda heading: heading["average"]["terms"],
        (
            "`ckptconv average` computed it from several checkpoints",
            "Average them again, into another OUTPUT, and compare the two outputs with `ckptconv diff`.",
        ),
        "averaged",
        _again,
    ),
)

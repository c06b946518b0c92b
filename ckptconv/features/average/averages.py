"""Averages: which tensors of several checkpoints are added up, which cannot be, and what is said of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import DifferenceError, UsageError
from ckptconv.features.average import steps
from ckptconv.features.average.steps import Average
from ckptconv.formats.adapter_names import is_adapter, other_program
from ckptconv.formats.coded import parts_among
from ckptconv.formats.opening import opened
from ckptconv.formats.source import Source
from ckptconv.formats.training import model_alone
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.computed import Again, Computing, From
from ckptconv.outputs.naming import Named, named
from ckptconv.storage.strict_json import OrNull
from ckptconv.structure import parted
from ckptconv.structure.choice import Choice
from ckptconv.tensors import casting
from ckptconv.tensors.computing import Joined, WeightedSum
from ckptconv.tensors.dtypes import DTYPES, SUMMED, DType
from ckptconv.tensors.lazy import LazyTensor, same_bytes, untagged
from ckptconv.text import count_of, some

_F64 = DTYPES["float64"]


class Term(NamedTuple):
    """A checkpoint of an average: its path, its tensors by name, those of them whose values mean nothing alone, its own
    ties {alias: owner}, and the names under which it has optimizers."""

    path: str
    tensors: Mapping[str, LazyTensor]
    uncastable: Collection[str]
    ties: Mapping[str, str]
    optimizers: tuple[str, ...]

    def weights(self) -> dict[str, LazyTensor]:
        """Return the tensors that are no states of an optimizer."""
        below = tuple(f"{name}." for name in self.optimizers)
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(below)}

    def place(self, name: str) -> Hashable:
        """Return what is equal for two names of one tensor."""
        kept = self.ties.get(name, name)
        found = same_bytes(self.tensors.get(kept, self.tensors[name]))
        return name if found is None else found


class Averaged(NamedTuple):
    """What was averaged: the tensors by name, and those of its ties {alias: owner} that are left. `untied` are names
    that are tied in the last checkpoint, and not in all. `notes` say what users should know."""

    tensors: dict[str, LazyTensor]
    ties: dict[str, str]
    untied: tuple[str, ...]
    notes: tuple[str, ...]


def averaged(terms: Sequence[Term], own: Term, average: Average, stored_as: Callable[[DType], DType]) -> Averaged:
    """Return the tensors that are averages, rounded once to the dtype that `stored_as` gives for that of `own`, which
    is one of `terms`. All others are those of `own`.

    Raise DifferenceError for a tensor that is missing in one of them, or has another shape, or is no number in one
    alone, UsageError for quantized weights.
    """
    for term in terms:
        if quantized := dict.fromkeys(parts_among(term.tensors).values()):
            raise UsageError(
                f"{term.path}: {some(quantized, 3)} {'is' if len(quantized) == 1 else 'are'} quantized, and quantized "
                "codes cannot be averaged.",
                "Use --dequantize to average the plain weights.",
            )
        if error := other_program(term.path, term.tensors):
            raise error
        if is_adapter(term.tensors):
            raise _of_adapters(term.path)
    terms = [term if term is own else _named_alike(term, own) for term in terms]
    every = [term.weights() for term in terms]
    theirs = own.weights()
    for term, each in zip(terms, every, strict=True):
        _check_alike(own.path, theirs, term.path, each)
    made: dict[str, LazyTensor] = {}
    known: dict[Hashable, LazyTensor] = {}
    places: dict[str, Hashable] = {}
    for name, tensor in theirs.items():
        parts = tuple(casting.unrounded(untagged(each[name])) for each in every)
        if name in own.uncastable or not _is_number(tensor):
            continue
        # Names are tied if they are in every checkpoint.
        places[name] = key = tuple(term.place(name) for term in terms)
        if key not in known:
            kernel = WeightedSum(tuple(part.dtype.name for part in parts), average.weights, average.over)
            known[key] = casting.rounded(Joined(parts, kernel, _F64), stored_as(tensor.dtype))
        made[name] = known[key]
    ties = {alias: owner for alias, owner in own.ties.items() if places.get(alias) == places.get(owner)}
    first: dict[Hashable, str] = {}
    pairs = ((name, first.setdefault(own.place(name), name)) for name in made)
    untied = tuple(name for name, other in pairs if places[name] != places[other])
    notes = _notes(terms, own, average.minus, theirs, made)
    return Averaged(made, ties, untied, (*notes, *_of_dtypes(every, own, made)))


def _of_adapters(path: str) -> UsageError:
    return UsageError(
        f"{path} is an adapter: averaging its factors separately does not average the updates that they add to a "
        "model.",
        "Merge each adapter into its base (ckptconv merge), and average the merged models.",
    )


def _named_alike(term: Term, own: Term) -> Term:
    """Return `term` with the names that `own` has for one tensor, if either stores that under fewer of them."""
    tensors, ties = dict(term.tensors), dict(term.ties)
    for one, other in ((own, term), (term, own)):
        first: dict[Hashable, str] = {}
        for name in one.tensors:
            if name in other.tensors:
                first.setdefault(one.place(name), name)
        for name in one.tensors.keys() - other.tensors.keys():
            kept = first.get(one.place(name))
            if kept is not None and one is own:
                tensors[name], ties[name] = tensors[kept], ties.get(kept, kept)
            elif kept is not None:
                del tensors[name]
    return term._replace(tensors=tensors, ties=ties)


def _is_number(tensor: LazyTensor) -> bool:
    return tensor.dtype.name in SUMMED


def _check_alike(path: str, theirs: Mapping[str, LazyTensor], other: str, tensors: Mapping[str, LazyTensor]) -> None:
    """Raise DifferenceError unless the tensors of two checkpoints have the same names and shapes."""
    for lacks, has, found in (
        (other, path, theirs.keys() - tensors.keys()),
        (path, other, tensors.keys() - theirs.keys()),
    ):
        if found:
            raise DifferenceError(
                f"{lacks} lacks {some(sorted(found), 3)}, which {has} has.",
                "Average checkpoints of one model, with the same names. To rename tensors, convert one of them first; "
                "--exclude leaves tensors out.",
                what="missing",
                tensor=min(found),
                file=lacks,
            )
    for name, tensor in theirs.items():
        found_shape, number = tensors[name].shape, _is_number(tensors[name])
        if found_shape != tensor.shape or number != _is_number(tensor):
            told = [f"{each.dtype} {list(each.shape)}" for each in (tensors[name], tensor)]
            raise DifferenceError(
                f"{other}: {name!r} is {told[0]}, but {told[1]} in {path}.",
                "Average checkpoints of one model.",
                what="shape" if found_shape != tensor.shape else "dtype",
                tensor=name,
                file=other,
            )


def _of_dtypes(every: Sequence[Mapping[str, LazyTensor]], own: Term, made: Mapping[str, LazyTensor]) -> Iterator[str]:
    """Yield which dtype averages have of tensors that are of several."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, tensor in made.items():
        dtypes = dict.fromkeys(each[name].dtype.name for each in every)
        if len(dtypes) > 1:
            found.setdefault((*dtypes, tensor.dtype.name), []).append(name)
    for (*several, dtype), names in found.items():
        last = own.tensors[names[0]].dtype.name
        why = f"as in {own.path}; --dtype gives another" if dtype == last else "that of the output"
        yield f"{count_of(len(names), 'tensor')} of {' and '.join(several)} became {dtype}, {why}."


def _notes(
    terms: Sequence[Term], own: Term, minus: bool, theirs: Mapping[str, LazyTensor], made: Collection[str]
) -> Iterator[str]:
    if minus:
        *_, base = terms
        yield f"subtracted {base.path} from {count_of(len(terms) - 1, 'checkpoint')}: {count_of(len(made), 'tensor')}."
    else:
        yield f"averaged {count_of(len(made), 'tensor')} of {count_of(len(terms), 'checkpoint')}."
    if left := [name for name in theirs if name not in made]:
        yield f"taken from {own.path}, because their dtype has no {'difference' if minus else 'average'}: {some(left)}."
    if states := [name for name in own.tensors if name not in theirs]:
        yield f"{len(states):,} optimizer states were taken from {own.path}: states are never averaged."


# --------------------------------------------------------------------------------------------------- in an output


def _given(source: Source) -> Average:
    given: Average = source.computed["average"]
    return given


def _averages(own: Named, source: Source, options: Options) -> Named:
    """Return the tensors of `source`, those that can be averaged with others' as averages."""
    terms = []
    for each in _given(source).terms:
        if each is not None:
            each.check_weights()
        theirs = own if each is None else named(each, options)
        flat = theirs.described.tensors
        chosen = {name: flat[name] for name in selection.matching(flat, Choice(options.include, options.exclude))}
        uncastable = theirs.described.uncastable | parted.parts_of(theirs.described.quantized)
        terms.append(Term((each or source).path, chosen, uncastable, theirs.ties, theirs.optimizers))
    dtype = options.dtype or source.defaults.dtype
    stored_as = functools.partial(selection.goal, dtype=dtype, widen_only=source.defaults.dtype == dtype == "float32")
    found = averaged(terms, terms[_given(source).terms.index(None)], _given(source), stored_as)
    described = own.described._replace(tensors={**own.described.tensors, **found.tensors}, owns_storage=False)
    made = own._replace(described=described, ties=found.ties, notes=found.notes)
    if not found.untied or described.structure is None:
        return made
    why = f"it ties {some(found.untied, 3)}, which are not tied in all checkpoints."
    return made.without_record(f"{source.path}: the structure record was left out: {why}")


def _check(heading: Mapping[str, Any]) -> None:
    """Raise ValueError if what a manifest says is no average."""
    average = heading["average"]
    terms, numbers = average["terms"], [*average["weights"], average["over"]]
    if terms.count(None) != 1 or len(numbers) != len(terms) + 1 or not average["over"]:
        raise ValueError("its average is not valid")
    if not all(map(math.isfinite, numbers)):
        raise ValueError("the weights of its average are not numbers")


def _record(source: Source) -> Mapping[str, Any]:
    average = _given(source)
    terms = [From(each.path) if each else None for each in average.terms]
    told = {"terms": terms, "weights": list(average.weights), "over": average.over}
    return {"average": told | ({"minus": True} if average.minus else {})}


def _terms(source: Source) -> Iterable[Source]:
    return filter(None, _given(source).terms)


def _again(
    source: Source, heading: Mapping[str, Any], paths: Sequence[str | None], asked: Options, output: str
) -> Source:
    """Return `source` with the checkpoints that it was averaged with."""
    average, any_family = heading["average"], asked.replaced(family="")
    terms = [source if path is None else opened(path, any_family, key=asked.key) for path in paths]
    if asked.for_hub:
        terms = [model_alone(each, asked.key) for each in terms]
    own = paths.index(None)
    return steps.averaged(terms, own, average["weights"], average["over"], average.get("minus", False))


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
            "Average them again, to another OUTPUT, and compare the two with `ckptconv diff`.",
        ),
        "averaged",
        _again,
    ),
)

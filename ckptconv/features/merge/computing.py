"""Merges adapters into the tensors of a source, and records it."""

from __future__ import annotations

import fnmatch
import functools
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.merge import adapters, files, tied
from ckptconv.formats.source import MODEL_KEYS, Source
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.computed import Again, Computing, From
from ckptconv.outputs.naming import Named, named
from ckptconv.tensors import casting
from ckptconv.tensors.dtypes import SUMMED
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import count_of, some


def _given(source: Source) -> files.Merge:
    merge: files.Merge = source.computed["merge"]
    return merge


def _merged(originals: Named, source: Source, options: Options) -> Named:
    """Return `originals`, the tensors of `source`, with its adapters merged, rounded once to the stored dtype."""
    base = tied.Base(source.path, originals.described.tensors, originals.ties, _given(source).model, source.wanted.key)
    factors = [(adapter, named(adapter.source, Options()).described.tensors) for adapter in _given(source).adapters]
    for adapter, tensors in factors:
        _check_globs(options, base.tensors, adapter.source.path, tensors)
    changes = adapters.merged(base, factors)
    dtype = options.dtype or source.defaults.dtype
    widen_only = source.defaults.dtype == dtype == "float32"
    known: dict[tuple[int, str], LazyTensor] = {}
    casts = {}
    for name, tensor in changes.tensors.items():
        stored = changes.dtypes[name] if name in changes.dtypes else base.tensors[name].dtype
        goal = selection.goal(stored, dtype, widen_only)
        is_number = tensor.dtype.name in SUMMED and goal.name in SUMMED
        cast = casting.rounded(tensor, goal) if is_number else selection.converted(name, tensor, goal.name)
        # Tied names share one object.
        casts[name] = known.setdefault((id(tensor), goal.name), cast)
    described = originals.described._replace(tensors={**base.tensors, **casts})
    ties = {alias: owner for alias, owner in originals.ties.items() if not {alias, owner} & changes.untied}
    edit = functools.partial(_with_settings, settings=changes.settings) if changes.settings else originals.edit
    notes = (*originals.notes, *changes.notes, *_other_models(casts, base.tensors))
    merged = originals._replace(described=described, ties=ties, notes=notes, edit=edit)
    is_same = all(name in base.tensors and base.tensors[name].shape == casts[name].shape for name in casts)
    if (is_same and not changes.untied) or described.structure is None:
        return merged
    why = "an adapter adds tensors, changes their shapes, or unties them."
    return merged.without_record(f"{source.path}: the structure record was left out: {why}")


def _check_globs(options: Options, base: Iterable[str], path: str, names: Iterable[str]) -> None:
    """Raise UsageError for a glob that matches `names` of the adapter at `path`, and none of the base's."""
    for option, globs in (("--include", options.include), ("--exclude", options.exclude)):
        for glob in globs:
            count = len(fnmatch.filter(names, glob))
            if count and not fnmatch.filter(base, glob):
                raise UsageError(
                    f"{option} applies only to tensors of the base: {glob!r} matches none of these, but it matches "
                    f"{count_of(count, 'name')} of {path}.",
                    f"To merge a part of an adapter, convert that part first: ckptconv convert {shlex.quote(path)} "
                    f"NEW/adapter_model.safetensors {option} {shlex.quote(glob)}, and copy its adapter_config.json to "
                    "NEW.",
                )


def _other_models(changed: Collection[str], names: Iterable[str]) -> Iterator[str]:
    """Yield a note if the `changed` tensors are those under one key of a training checkpoint, such as model, and
    tensors under others, such as ema, have the same names, or the same after a prefix."""
    keys = {name.partition(".")[0] for name in changed}
    inner = {name.partition(".")[2] for name in changed}
    ends = {end for name in changed for end in _ends(name)}
    same = {
        name.partition(".")[0] for name in names if name.partition(".")[2] in ends or inner.intersection(_ends(name))
    }
    others = sorted(same - keys)
    if len(keys) == 1 and others and (same | keys).intersection(MODEL_KEYS):
        yield (
            f"merged into {keys.pop()}: the tensors with the same names in {some(others, form=str)} stay unchanged. "
            "To select one of these instead, use --key."
        )


def _ends(name: str) -> Iterator[str]:
    """Yield the ends of a name, of two parts at least."""
    parts = name.split(".")
    yield from (".".join(parts[start:]) for start in range(1, len(parts) - 1))


def _with_settings(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other `settings`: at its top, and where it has those of its language model."""
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    result = dict(config)
    if inner:
        result["text_config"] = {key: settings.get(key, value) for key, value in inner.items()}
    return {**result, **{key: value for key, value in settings.items() if key in config or key not in inner}}


def _record(source: Source) -> Mapping[str, Any]:
    every = _given(source).adapters
    name = every[0].name
    return {"adapters": [From(adapter.source.path) for adapter in every]} | ({"adapter": name} if name else {})


def _terms(source: Source) -> Iterable[Source]:
    return (adapter.source for adapter in _given(source).adapters)


def _again(
    source: Source, heading: Mapping[str, Any], paths: Sequence[str | None], options: Options, output: str
) -> Source:
    every = files.read_adapters([path for path in paths if path], options.opening(), heading.get("adapter", ""))
    return files.merging(source, every, options.storage_options)


COMPUTING = Computing(
    heading={"adapters?": [str], "adapter?": str},
    named=_merged,
    record=_record,
    reported=lambda source: {"adapters": [each.path for each in _terms(source)]},
    sources=_terms,
    again=Again(
        lambda heading: heading.get("adapters", ()),
        (
            "`ckptconv merge` merged adapters",
            "Merge them again, into another OUTPUT, and compare the two outputs with `ckptconv diff`.",
        ),
        "adapters",
        _again,
    ),
)

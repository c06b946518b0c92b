"""Add tensors of another checkpoint to an output's, unchanged, and count the layers that they add. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ckptconv.errors import UsageError
from ckptconv.features.model_facts import counts, places
from ckptconv.features.model_facts.edits import Edited, Editor, configured, tensors_alone
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import Computing, From
from ckptconv.outputs.selected import Selected
from ckptconv.plan import FilePlan, identify
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import count_of, some


class Graft(NamedTuple):
    """Tensors of a checkpoint whose names match a glob."""

    source: Source
    glob: str
    tensors: Mapping[str, LazyTensor]


def _grafted(chosen: Selected, source: Source, options: Options, reference: Selected | None = None) -> Selected:
    """Return `chosen` with the grafted tensors, which are never cast. Raise UsageError for names that it has."""
    grafts: list[Graft] = source.computed["graft"]
    added: dict[str, LazyTensor] = {}
    for graft in grafts:
        if twice := [name for name in graft.tensors if name in chosen.tensors or name in added]:
            raise UsageError(
                f"--graft {graft.source.path}:{graft.glob} adds {some(twice, 3)}, which the output already has.",
                "Exclude them with --exclude, or graft fewer tensors.",
            )
        added.update(graft.tensors)
        # --for-hub takes a part of the source too, which has cut names.
        own = graft.tensors.keys() - chosen.first.known.keys() if graft.source.path == source.path else set()
        if uncut := [*_uncut(graft.tensors, chosen, options), *sorted(own)]:
            raise UsageError(
                f"--graft adds {some(dict.fromkeys(uncut), 3)}, but --key, --strip-prefix or --for-hub "
                f"shortens the names of {source.path}, and grafted names are not changed.",
                "Convert the grafted checkpoint first, with the same options, and graft from that output.",
            )
    note = "; ".join(f"{count_of(len(graft.tensors), 'tensor')} of {graft.source.path}" for graft in grafts)
    further = _further(added, chosen, source)
    values = tensors_alone(chosen, "an output with --graft")
    chosen = chosen._replace(
        names={**{name: name for name in chosen.tensors}, **{name: name for name in added}},
        known={**chosen.tensors, **added},
        tensors={**chosen.tensors, **added},
        described=chosen.described._replace(
            tensors={**chosen.tensors, **added}, structure=None, uncastable=chosen.uncastable
        ),
        structured=False,
        uncastable=chosen.uncastable | added.keys(),
        settled=chosen.settled | added.keys(),
        files={**chosen.files, **_files(chosen, added)},
        unmapped=chosen.first,
        notes=(*chosen.notes, *values, f"grafted unchanged: {note}."),
    )
    if further is None:
        return chosen
    return configured(chosen, source, lambda config: edited(config, *further), is_told=False)


def _uncut(added: Iterable[str], chosen: Selected, options: Options) -> list[str]:
    """Return the `added` names that --key or --strip-prefix would cut, if they were the source's."""
    under = f"{options.key}." if options.key not in ("", ".") else ""
    prefixes = {under, options.strip_prefix, under + options.strip_prefix} - {""}
    cut = tuple(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in chosen.tensors))
    known = {under + name for name in chosen.first.known if prefixes and name.startswith(options.strip_prefix)}
    return [name for name in added if name.startswith(cut) or name in known]


def _further(added: Iterable[str], chosen: Selected, source: Source) -> tuple[int, int] | None:
    """Return the number of layers that predict further tokens in an output without the `added` names, and with them;
    None if these are in no layers. Raise UsageError for layers that do not follow those of the output."""
    layers = {layer for name in added if (layer := places.numbered(name))}
    if not layers or not any(map(places.numbered, chosen.tensors)):
        return None
    stack = places.stack_of(chosen.tensors, source.path)
    config = chosen.edit(source.config) if source.config and chosen.edit else source.config
    before = stack.size - counts.layers_in(config, stack.size, source.path)
    behind = sorted(number for place, number in layers if place == stack.place and number >= stack.size)
    if behind != [*range(stack.size, stack.size + len(behind))]:
        raise UsageError(
            f"--graft adds layers {some(behind, form=str)} of {stack.place}, but the converted part of {source.path} "
            f"has layers 0 to {stack.size - 1}, so the next layer must be {stack.size}.",
            "Convert the grafted checkpoint first, with --include and --rename, and graft from that output.",
        )
    own, every = (places.further_layers(names, stack) for names in (chosen.tensors, [*chosen.tensors, *added]))
    return before + own, before + len(behind) + every


def edited(config: Mapping[str, Any], before: int, after: int) -> Edited:
    """Return `config` as it is true of `after` layers that predict further tokens."""
    editor = Editor()

    def value_of(key: str, value: Any, where: str, scope: Mapping[str, Any]) -> Any:
        if type(value) is not int or not counts.FURTHER.fullmatch(key):
            return value
        editor.counted.add(key)
        return after

    changed = editor.walked(config, value_of)
    if after > before and not editor.counted:
        editor.notes.append(
            "config.json has no key, such as num_nextn_predict_layers, that counts the layers which predict further "
            "tokens."
        )
    return editor.edited(changed)


def _files(chosen: Selected, added: Iterable[str]) -> dict[str, str]:
    """Return the files of the `added` tensors, by name: the last of the others' files; {} if these have no files."""
    return dict.fromkeys(added, max(chosen.files.values())) if chosen.files else {}


def _identified(files: Iterable[FilePlan], source: Source, plan_id: str) -> str:
    grafts: list[Graft] = source.computed["graft"]
    inputs = {f"{at}/{name}": key for at, graft in enumerate(grafts) for name, key in graft.source.inputs.items()}
    return identify(files, inputs, ("graft", plan_id))


def _record(source: Source) -> Mapping[str, Any]:
    grafts: list[Graft] = source.computed["graft"]
    return {"graft": [{"of": From(graft.source.path), "names": graft.glob} for graft in grafts]}


def _asked(heading: Mapping[str, Any], seen: Callable[[str], str]) -> Mapping[str, Any]:
    paths = [(seen(entry["of"]), entry["names"]) for entry in heading["graft"]]
    return {"graft": tuple(f"{path}:{glob}" for path, glob in paths)} if all(path for path, _ in paths) else {}


def _states(source: Source, states: Mapping[str, Any], groups: Sequence[Any], ties: Mapping[str, str]) -> NoReturn:
    raise UsageError(
        "--graft adds weights, for which the optimizer has no states.", "Convert the states without --graft."
    )


COMPUTING = Computing(
    heading={"graft?": [{"of": str, "names": str}]},
    selected=_grafted,
    tree=_grafted,
    states=_states,
    identified=_identified,
    record=_record,
    sources=lambda source: (graft.source for graft in source.computed["graft"]),
    asked=_asked,
    retold="counts",
)

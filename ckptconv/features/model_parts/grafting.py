"""Add tensors of another checkpoint to what an output has, as they are there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
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
    """Return `chosen` with the tensors that are grafted: never cast. Raise UsageError for names that it has already."""
    grafts: list[Graft] = source.computed["graft"]
    added: dict[str, LazyTensor] = {}
    for graft in grafts:
        if twice := [name for name in graft.tensors if name in chosen.tensors or name in added]:
            raise UsageError(
                f"--graft {graft.source.path}:{graft.glob} adds {some(twice, 3)}, which the output has already.",
                "Leave them out with --exclude, or graft fewer.",
            )
        added.update(graft.tensors)
    note = "; ".join(f"{count_of(len(each.tensors), 'tensor')} of {each.source.path}" for each in grafts)
    kept = chosen.fixed | added.keys()
    return chosen._replace(
        names={**{name: name for name in chosen.tensors}, **{name: name for name in added}},
        known={**chosen.tensors, **added},
        tensors={**chosen.tensors, **added},
        described=chosen.described._replace(
            tensors={**chosen.tensors, **added}, structure=None, fixed=kept, apart=False
        ),
        structured=False,
        fixed=kept,
        settled=chosen.settled | added.keys(),
        files={**chosen.files, **_files(chosen, added)},
        unmapped=chosen.first,
        notes=(*chosen.notes, f"grafted, as they are there: {note}."),
    )


def _files(chosen: Selected, added: Iterable[str]) -> dict[str, str]:
    """Return the file of each of the tensors that are `added`, where the others have one: the last."""
    return dict.fromkeys(added, max(chosen.files.values())) if chosen.files else {}


def _identified(files: Iterable[FilePlan], source: Source, plan_id: str) -> str:
    grafts: list[Graft] = source.computed["graft"]
    inputs = {
        f"{number}/{name}": each for number, graft in enumerate(grafts) for name, each in graft.source.inputs.items()
    }
    return identify(files, inputs, ("graft", plan_id))


def _record(source: Source) -> Mapping[str, Any]:
    grafts: list[Graft] = source.computed["graft"]
    return {"graft": [{"of": From(each.source.path), "names": each.glob} for each in grafts]}


def _asked(heading: Mapping[str, Any], seen: Callable[[str], str]) -> Mapping[str, Any]:
    paths = [(seen(each["of"]), each["names"]) for each in heading["graft"]]
    return {"graft": tuple(f"{path}:{glob}" for path, glob in paths)} if all(path for path, _ in paths) else {}


COMPUTING = Computing(
    heading={"graft?": [{"of": str, "names": str}]},
    selected=_grafted,
    tree=_grafted,
    identified=_identified,
    record=_record,
    sources=lambda source: (each.source for each in source.computed["graft"]),
    asked=_asked,
)

"""Add tensors of another checkpoint to an output's, unchanged. Pure."""

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
    """Return `chosen` with the grafted tensors, which are never cast. Raise UsageError for names that it has."""
    grafts: list[Graft] = source.computed["graft"]
    added: dict[str, LazyTensor] = {}
    for graft in grafts:
        if twice := [name for name in graft.tensors if name in chosen.tensors or name in added]:
            raise UsageError(
                f"--graft {graft.source.path}:{graft.glob} adds {some(twice, 3)}, which the output has already.",
                "Leave them out with --exclude, or graft fewer.",
            )
        added.update(graft.tensors)
    note = "; ".join(f"{count_of(len(graft.tensors), 'tensor')} of {graft.source.path}" for graft in grafts)
    kept = chosen.uncastable | added.keys()
    return chosen._replace(
        names={**{name: name for name in chosen.tensors}, **{name: name for name in added}},
        known={**chosen.tensors, **added},
        tensors={**chosen.tensors, **added},
        described=chosen.described._replace(
            tensors={**chosen.tensors, **added}, structure=None, uncastable=kept, owns_storage=False
        ),
        structured=False,
        uncastable=kept,
        settled=chosen.settled | added.keys(),
        files={**chosen.files, **_files(chosen, added)},
        unmapped=chosen.first,
        notes=(*chosen.notes, f"grafted, as they are there: {note}."),
    )


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


COMPUTING = Computing(
    heading={"graft?": [{"of": str, "names": str}]},
    selected=_grafted,
    tree=_grafted,
    identified=_identified,
    record=_record,
    sources=lambda source: (graft.source for graft in source.computed["graft"]),
    asked=_asked,
)

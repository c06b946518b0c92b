"""Opens a checkpoint with a file for each rank, which torch.save wrote.

The files of the weights are read one after the other, descriptions only: each gives its rank's parts. The optimizer's
files next to them are read if its states are wanted, and the other files of the first rank for their values.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsafeError, UnsupportedError
from ckptconv.features.joining import names as names_of
from ckptconv.features.joining.files import Files, RankFiles, bytes_of, divided, source_of, states_of
from ckptconv.features.joining.join import Ranks, distributed, lacking
from ckptconv.features.joining.names import Path
from ckptconv.features.joining.pieces import Pieces
from ckptconv.features.joining.run_layout import Located
from ckptconv.features.joining.sets import OPTIMIZER, OTHER, FileSet, parsed, sets_in, sets_of
from ckptconv.features.ranks import flat
from ckptconv.features.ranks.locate import FAMILY, choose, locate
from ckptconv.formats.format import Probe
from ckptconv.formats.registered import DCP, FORMATS
from ckptconv.formats.source import NOT_CONVERTED, STATES_ARE_CONVERTED, Source, Wanted
from ckptconv.formats.torch import file as torch_file
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.file import read_torch
from ckptconv.storage.ahead import ahead
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.reading import Entry
from ckptconv.text import some

# The format that reads directories of torch.distributed.checkpoint; None where there is none.
_DISTRIBUTED = next((known for known in FORMATS if known.FAMILY == DCP), None)
# verl's directory for the adapter of a model that it trains with LoRA, and a file that shows that verl wrote the
# others.
_ADAPTER, _VERL = "lora_adapter", "fsdp_config.json"
# The most settings that inspect shows, and the greatest length of one.
_SHOWN, _LONGEST = 12, 80


def read(place: Location, wanted: Wanted) -> Source:
    """Open a checkpoint by its directory, or by one of its files.

    Raise CorruptError if files of ranks are missing, are of several saves, or contradict each other; UnsupportedError
    for tensors whose values no file has.
    """
    if place.kind == "directory":
        located = locate(place) or Located(place)
        sets = sets_in(located.directory)
        chosen = choose(located.directory, [file_set for file_set in sets if file_set.is_certain])
    else:
        located = Located(place.parent)
        sets = _beside(place)
        stem = parsed(place.name)
        chosen = next(file_set for file_set in sets if stem and file_set.stem == stem[0])
        if len(chosen.files) == 1 and not chosen.is_certain:
            return torch_file.read(place, wanted)
    return _read(place.path, located, chosen, sets, wanted)


def read_alone(place: Location, wanted: Wanted) -> Source | None:
    """Open a file without a rank in its name, and with all parts of distributed tensors, as the file of the only rank
    of a mesh. Return None if its name has a rank, or if parts are missing."""
    if parsed(place.name):
        return None
    only = FileSet(place.name, None, {0: place.name})
    try:
        return _read(place.path, Located(place.parent), only, [only], wanted)
    except (CorruptError, UnsupportedError):
        return None


def _beside(place: Location) -> list[FileSet]:
    """Return the sets of files next to a file; in a store that lists no names, the set of this file alone."""
    names = _names(place.parent)
    return sets_of(names if place.name in names else [place.name])


def _names(directory: Location) -> Mapping[str, Entry]:
    """Return the entries of a directory; none in a store that lists no names."""
    try:
        return directory.names
    except CkptconvError:
        return {}


def _opened(directory: Location, files: FileSet) -> Files:
    """Read the descriptions in all files of a set."""
    opened_files = Files(Ranks(directory.path))
    present = sorted(files.files)
    if files.twice:
        raise CorruptError(f"{directory} has two files of one rank: {' and '.join(files.twice)}.")
    expected = files.world or present[-1] + 1
    missing = [rank for rank in range(expected) if rank not in files.files]
    if missing and (files.world or present[0] == 0):
        raise lacking(directory.path, missing, files.files)
    if present[-1] >= expected:
        raise CorruptError(
            f"{directory.join(files.files[present[-1]])} belongs to rank {present[-1]}, but its name specifies "
            f"{files.world} ranks."
        )
    names = _names(directory)
    called = [files.files[rank] for rank in present]
    # A file in the listing is not looked up again.
    places = [directory.at(names[name].file) if name in names else directory.join(name) for name in called]
    for rank, place, file in zip(present, places, ahead(read_torch, places), strict=True):
        _add(opened_files, place, file, rank)
    opened_files.ranks.check_names()
    return opened_files


def _add(files: Files, place: Location, file: TorchFile, rank: int) -> None:
    reader = Pieces(place.path, rank, bytes_of(place))
    pieces, values = divided(file.value, reader)
    its_rank = rank if reader.said is None else reader.said
    files.ranks.add(its_rank, place.name, pieces, reader.meshes, reader.world)
    files.ranks.add_values(its_rank, values)
    files.log.add(file, place.name)


# --------------------------------------------------------------------------------------------------------- the source


def _read(path: str, located: Located, chosen: FileSet, sets: list[FileSet], wanted: Wanted) -> Source:
    directory = located.directory
    model = _opened(directory, chosen)
    ranks = model.ranks
    others = _optimizers(located, chosen, sets)
    is_alone = len(model.log.records) == 1 and chosen.world is None and not any(distributed(ranks.pieces))
    if is_alone and not (wanted.states and others):
        return torch_file.read(directory.join(chosen.files[min(chosen.files)]), wanted)
    opened = RankFiles(model)
    beside = _checkpoint_beside(directory)
    local = flat.is_local(ranks)
    if wanted.states or local:
        if len(others) == 1:
            opened.optimizer = _opened(*others[0])
        elif _DISTRIBUTED and beside is not None:
            opened.beside = _DISTRIBUTED.read(beside, Wanted(states=True))
    states, states_error, states_equal = states_of(opened, wanted)
    if local:
        flat.split(ranks, opened.roles.model, states)
    taken = list(ranks.paths()) if wanted.key else opened.weights
    notes, warnings = _told(directory, chosen, others, beside, ranks, wanted, taken)
    state_inputs = {**_state_inputs(opened, beside), **opened.by.inputs} if wanted.states or local else {}
    facts = _facts(directory, model, ranks)
    settings, broken = _settings(directory, sets, ranks)
    return source_of(
        opened,
        located,
        wanted,
        (states if wanted.states else None, states_error if wanted.states else None, states_equal),
        notes,
        [*warnings, *broken],
        format=f"torch.save files of {len(ranks.files)} ranks" if len(ranks.files) > 1 else "torch.save file of a rank",
        family=FAMILY,
        path=path,
        facts={**facts, **{name: value for name, value in settings.items() if name not in facts}},
        inputs={**model.log.inputs, **(state_inputs if local else {})},
        state_inputs=state_inputs,
        bytes_read=sum(opened_files.log.bytes_read for opened_files in (model, opened.optimizer) if opened_files),
        reread=functools.partial(_read, path, located, chosen, sets),
    )


def _optimizers(located: Located, chosen: FileSet, sets: list[FileSet]) -> list[tuple[Location, FileSet]]:
    """Return the sets of an optimizer's files, each with its directory."""
    near = [(located.directory, file_set) for file_set in sets if file_set is not chosen and file_set.kind == OPTIMIZER]
    far = [(located.optimizer, file_set) for file_set in sets_of(located.optimizer.names)] if located.optimizer else []
    return [(place, file_set) for place, file_set in near or far if file_set.is_certain]


def _state_inputs(opened: RankFiles, beside: Location | None) -> dict[str, Hashable]:
    if opened.optimizer:
        optimizer = opened.optimizer
        prefix = "" if optimizer.ranks.where == opened.model.ranks.where else f"{basename(optimizer.ranks.where)}/"
        return {f"{prefix}{name}": identity for name, identity in optimizer.log.inputs.items()}
    if opened.beside and beside:
        return {f"{beside.name}/{name}": identity for name, identity in opened.beside.all_inputs().items()}
    return opened.model.log.inputs


def _checkpoint_beside(directory: Location) -> Location | None:
    """Return the directory of torch.distributed.checkpoint with the optimizer's states, as accelerate writes it."""
    for name, entry in directory.names.items():
        if _DISTRIBUTED and entry.kind == "directory" and name.startswith("optim"):
            inner = directory.join(name)
            if _DISTRIBUTED.sniff(Probe(inner)):
                return inner
    return None


# --------------------------------------------------------------------------------------------------- facts and notes


def _facts(directory: Location, model: Files, ranks: Ranks) -> dict[str, Any]:
    meshes = list(dict.fromkeys(mesh for rank_meshes in ranks.meshes.values() for mesh in rank_meshes))
    shapes = list(dict.fromkeys(map(str, meshes)))
    return {
        **({"framework": "verl"} if _VERL in directory.names else {}),
        "ranks": len(ranks.files),
        **({"mesh": ", ".join(shapes)} if shapes else {}),
        "files": len(model.log.records),
        "size": model.log.size,
    }


def _told(
    directory: Location,
    chosen: FileSet,
    others: list[tuple[Location, FileSet]],
    beside: Location | None,
    ranks: Ranks,
    wanted: Wanted,
    paths: list[Path],
) -> tuple[list[str], list[str]]:
    """Return notes and warnings on the files that were taken or left out."""
    notes: list[str] = []
    warnings: list[str] = []
    if chosen.kind != OTHER and not wanted.states and not wanted.key:
        near = [(place, next(iter(file_set.files.values()))) for place, file_set in others]
        left = [name if place is directory else place.join(name).path for place, name in near]
        left = left or ([beside.path] if beside else [])
        if left:
            notes.append(f"{NOT_CONVERTED}{some(left, form=str)}{STATES_ARE_CONVERTED}.")
    if _ADAPTER in directory.names:
        notes.append(f"{NOT_CONVERTED}the LoRA adapter {directory.join(_ADAPTER)}.")
    missing = sorted(ranks.expected - ranks.files.keys())
    if missing:
        warnings.append(
            f"Files of these ranks are missing: {some(missing, form=str)}. The files of the other ranks contain the "
            "same data."
        )
    differing = [path for path in ranks.differing if path in paths]
    if differing:
        warnings.append(
            f"Values other than tensors differ between the ranks. The values of rank {min(ranks.files)} were used: "
            f"{some([names_of.dotted(path) for path in differing])}."
        )
    return notes, warnings


def _settings(directory: Location, sets: list[FileSet], ranks: Ranks) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers and texts next to the tensors, such as the epoch, by their dotted paths, and warnings."""
    warnings: list[str] = []
    shown: dict[str, Any] = {}
    values = [(names_of.dotted(path), value) for path, value in ranks.values.items()]
    for file_set in sets:
        if file_set.kind == OTHER:
            place = directory.join(file_set.files[min(file_set.files)])
            try:
                values.append(("", read_torch(place).value))
            except UnsafeError:
                raise
            except CkptconvError as error:
                warnings.append(f"Not read: {error.message}")
    for name, value in values:
        for path, leaf in _scalars(value):
            if len(shown) < _SHOWN:
                shown[names_of.dotted((*([name] if name else []), *path))] = leaf
    return shown, warnings


def _scalars(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the numbers and short texts in nested dicts, and in lists with one of them, each with its path."""
    stack: list[tuple[Path, Any]] = [((), tree)]
    for _ in range(_SHOWN * _LONGEST):
        if not stack:
            return
        path, node = stack.pop()
        if isinstance(node, dict):
            inner = [(str(key), value) for key, value in node.items()]
            stack.extend(((*path, step[:_LONGEST]), value) for step, value in reversed(inner[:_LONGEST]))
        elif type(node) is list and len(node) == 1 and type(node[0]) in (dict, int, float):
            stack.append((path, node[0]))
        elif (
            type(node) in (bool, float)
            or (type(node) is int and abs(node) < 1 << 63)
            or (type(node) is str and len(node) <= _LONGEST and node.isprintable())
        ):
            yield path, node

"""Open a checkpoint with a file for each rank, which torch.save wrote.

The files of the weights are read one after the other, descriptions only: of each, what it says of its rank's parts is
kept. The optimizer's files beside them are read when its states are wanted, and the other files of the first rank for
the values in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsafeError, UnsupportedError
from ckptconv.formats.dcp import locate as dcp
from ckptconv.formats.dcp import paths as names_of
from ckptconv.formats.dcp.metadata import MAX_DEPTH, Path, named
from ckptconv.formats.dcp.read import read as read_dcp
from ckptconv.formats.numbers.matching import Named
from ckptconv.formats.optimizers import by_parameter, renamed
from ckptconv.formats.ranks import flat
from ckptconv.formats.ranks.join import Ranks, distributed, lacking
from ckptconv.formats.ranks.locate import FAMILY, OPTIMIZER, OTHER, FileSet, choose, locate, parsed, sets_in, sets_of
from ckptconv.formats.ranks.pieces import Piece, Pieces, Whole, is_distributed, is_partial
from ckptconv.formats.ranks.states import by_name
from ckptconv.formats.runs import Located
from ckptconv.formats.source import STATES_ARE_CONVERTED, Defaults, FileFacts, Source, StateFacts, Wanted
from ckptconv.formats.torch import file as torch_file
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.file import Account, read_torch
from ckptconv.formats.torch.packed import is_tensor
from ckptconv.pickles.children import walk
from ckptconv.pickles.nodes import Composite, class_of
from ckptconv.storage.ahead import ahead
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.reading import Entry
from ckptconv.tensors.lazy import Equal, LazyTensor, Stored, Tagged, untagged
from ckptconv.text import some

# Values of a state dict, tensors and others; an honest one has some tens of thousands.
MAX_LEAVES = 1 << 18
# Where verl puts the adapter of a model that it trains with LoRA, and what tells that verl wrote the files.
_ADAPTER, _VERL = "lora_adapter", "fsdp_config.json"
# Settings that inspect shows, and the length of one.
_SHOWN, _LONGEST = 12, 80


def read(place: Location, wanted: Wanted) -> Source:
    """Open a checkpoint by its directory, or by one of its files.

    Raise CorruptError if files of ranks are missing, are of several saves, or contradict each other; UnsupportedError
    for tensors whose values no file tells.
    """
    if place.kind == "directory":
        located = locate(place) or Located(place)
        found = sets_in(located.directory)
        chosen = choose(located.directory, [each for each in found if each.is_certain])
    else:
        located = Located(place.parent)
        found = _beside(place)
        stem = parsed(place.name)
        chosen = next(each for each in found if stem and each.stem == stem[0])
        if len(chosen.files) == 1 and not chosen.is_certain:
            return torch_file.read(place, wanted)
    return _read(place.path, located, chosen, found, wanted)


def read_alone(place: Location, wanted: Wanted) -> Source | None:
    """Open a file that has no rank in its name, and all parts of distributed tensors, as that of the only rank of a
    mesh. Return None if it lacks parts."""
    only = FileSet(place.name, None, {0: place.name})
    try:
        return _read(place.path, Located(place.parent), only, [only], wanted)
    except (CorruptError, UnsupportedError):
        return None


def _beside(place: Location) -> list[FileSet]:
    """Return the sets of files beside a file; that of the file alone in a store that lists no names."""
    names = _names(place.parent)
    return sets_of(names if place.name in names else [place.name])


def _names(directory: Location) -> Mapping[str, Entry]:
    """Return the entries of a directory; none in a store that lists no names."""
    try:
        return directory.names
    except CkptconvError:
        return {}


@dataclass
class Files:
    """The files of a set that were read, and what they hold together."""

    ranks: Ranks
    account: Account = field(default_factory=Account)

    @classmethod
    def open(cls, directory: Location, files: FileSet) -> Files:
        """Read the descriptions in all files of a set."""
        found = cls(Ranks(directory.path))
        present = sorted(files.files)
        if files.twice:
            raise CorruptError(f"{directory} has two files of one rank: {' and '.join(files.twice)}.")
        expected = files.world or present[-1] + 1
        missing = [rank for rank in range(expected) if rank not in files.files]
        if missing and (files.world or present[0] == 0):
            raise lacking(directory.path, missing, files.files)
        if present[-1] >= expected:
            raise CorruptError(
                f"{directory.join(files.files[present[-1]])} belongs to rank {present[-1]}, but says that there are "
                f"{files.world} ranks."
            )
        names = _names(directory)
        called = [files.files[rank] for rank in present]
        # A file that the listing found is not asked for again.
        places = [directory.at(names[name].file) if name in names else directory.join(name) for name in called]
        for rank, place, file in zip(present, places, ahead(read_torch, places), strict=True):
            found._add(place, file, rank)
        found.ranks.check_names()
        return found

    def _add(self, place: Location, file: TorchFile, rank: int) -> None:
        reader = Pieces(place.path, rank, bytes_of(place))
        pieces, values = divided(file.value, reader)
        own = rank if reader.said is None else reader.said
        self.ranks.add(own, place.name, pieces, reader.meshes, reader.world)
        self.ranks.add_values(own, values)
        self.account.add(file, place.name)


def divided(tree: Any, reader: Pieces, prefix: Path = ()) -> tuple[dict[Path, Piece], dict[Path, Any]]:
    """Return the tensors of a rank's state dict, and its other values, by path; `prefix` begins each path.

    Raise UnsupportedError for what is neither.
    """
    pieces: dict[Path, Piece] = {}
    values: dict[Path, Any] = {}
    for at, node in leaves(tree, reader.where):
        path = (*prefix, *at)
        if path and is_distributed(node) and is_partial(node):
            values[path] = Composite("partial", {"shape": node.parts["shape"]})
        elif path and is_distributed(node):
            pieces[path] = reader.of(names_of.dotted(path), node)
        elif path and isinstance(node, Tagged):
            pieces[path] = Whole(node)
        elif not path or any(map(is_tensor, walk(node))):
            kind = class_of(node) or type(node).__name__
            what = named(names_of.dotted(path)) if path else "the whole"
            raise UnsupportedError(
                f"{reader.where}: {what} is a {kind[:200]}; only state dicts of ordinary, DTensor and ShardedTensor "
                "tensors can be joined."
            )
        else:
            values[path] = node
    return pieces, values


def bytes_of(place: Location) -> Callable[[Stored], bytes]:
    def read(stored: Stored) -> bytes:
        with place.open_reader() as reader:
            return reader.read_at(stored.offset, stored.nbytes)

    return read


def leaves(tree: Any, where: str) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors of a state dict and its other values, each with its path: keys as text, indices of lists.

    What holds no tensor is one value. Raise LimitError for a tree of too many.
    """
    stack: list[tuple[Path, Any]] = [((), tree)]
    holds: dict[int, bool] = {}  # whether a container holds a tensor: it may be in many places
    count = 0
    while stack:
        path, node = stack.pop()
        count += 1
        if count > MAX_LEAVES:
            raise LimitError(f"{where} holds more than {MAX_LEAVES} values.")
        inner = _inside(node) if len(path) < MAX_DEPTH else None
        if inner is not None and path and id(node) not in holds:
            holds[id(node)] = any(map(is_tensor, walk(node)))
        if inner is None or (path and not holds[id(node)]):
            yield path, node
        else:
            stack.extend(((*path, step), value) for step, value in reversed(inner))


def _inside(node: Any) -> list[tuple[str | int, Any]] | None:
    """Return what a container holds, by key as text or by index; None for anything else."""
    if isinstance(node, dict):
        return [(str(key), value) for key, value in node.items()]
    if isinstance(node, (list, tuple)) and not isinstance(node, LazyTensor):
        return list(enumerate(node))
    return None


# --------------------------------------------------------------------------------------------------------- the source


@dataclass
class RankFiles:
    """What was read of a checkpoint: the weights' files; if they were wanted, the optimizer's, or its directory, and
    what told the names of its numbers."""

    model: Files
    optimizer: Files | None = None
    beside: Source | None = None
    by: Named = field(default_factory=Named)

    @functools.cached_property
    def roles(self) -> names_of.Roles:
        """What is model, and what optimizer, in the weights' files."""
        ranks = self.model.ranks
        return names_of.Roles.of([*ranks.paths()], [*ranks.pieces])

    @functools.cached_property
    def weights(self) -> list[Path]:
        """The paths of the weights and what is beside them; all paths if the files are an optimizer's."""
        ranks, roles = self.model.ranks, self.roles
        chosen = [each for each in ranks.paths() if roles.is_model(each)]
        if roles.models or any(each in ranks.pieces for each in chosen):
            return chosen
        return list(ranks.paths())


def _read(path: str, located: Located, chosen: FileSet, found: list[FileSet], wanted: Wanted) -> Source:
    directory = located.directory
    model = Files.open(directory, chosen)
    ranks = model.ranks
    others = _optimizers(located, chosen, found)
    is_alone = len(model.account.records) == 1 and chosen.world is None and not any(distributed(ranks.pieces))
    if is_alone and not (wanted.states and others):
        return torch_file.read(directory.join(chosen.files[min(chosen.files)]), wanted)
    opened = RankFiles(model)
    beside = _checkpoint_beside(directory)
    local = flat.is_local(ranks)
    if wanted.states or local:
        if len(others) == 1:
            opened.optimizer = Files.open(*others[0])
        elif beside is not None:
            opened.beside = read_dcp(beside, Wanted(states=True))
    states, states_error, states_equal = states_of(opened, wanted)
    if local:
        flat.split(ranks, opened.roles.model, states)
    taken = list(ranks.paths()) if wanted.key else opened.weights
    notes, warnings = _told(directory, chosen, others, beside, ranks, wanted, taken)
    state_inputs = {**_state_inputs(opened, beside), **opened.by.inputs} if wanted.states or local else {}
    facts = _facts(directory, model, ranks)
    settings, broken = _settings(directory, found, ranks)
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
        inputs={**model.account.inputs, **(state_inputs if local else {})},
        state_inputs=state_inputs,
        bytes_read=sum(each.account.bytes_read for each in (model, opened.optimizer) if each),
        reread=functools.partial(_read, path, located, chosen, found),
    )


def source_of(
    opened: RankFiles,
    located: Located,
    wanted: Wanted,
    states: tuple[dict[str, Any] | None, CkptconvError | None, list[Equal]],
    notes: Iterable[str],
    warnings: Iterable[str],
    state_inputs: Mapping[str, Hashable] | None = None,
    **fields: Any,
) -> Source:
    """Return what is `wanted` of the files of all ranks as a source, with `states` as `states_of` gives them; `fields`
    are the rest of its fields, and those that its files alone do not tell."""
    ranks, account = opened.model.ranks, opened.model.account
    every = [each.account.files for each in (opened.model, opened.optimizer) if each]
    files = FileFacts.of_all([*every, *([opened.beside.files] if opened.beside else [])])
    weights, equal, structured = weights_of(ranks, opened.weights, opened.roles.model)
    trees: dict[str, Any] = {}
    if wanted.key:
        trees, equal = everything(ranks, wanted.key)
        structured = True
    told = {
        **account.told(),
        "files": files._replace(opaque=[name for name in files.opaque if not _is_understood(name)]),
        "warnings": [*account.warnings, *warnings],
        "notes": [
            *([located.note] if located.note else []),
            *notes,
            *(opened.by.notes if wanted.states else []),
        ],
        "pointers": located.pointers,
        "defaults": Defaults(shard_size=5 * 10**9),
        "pieces": names_of.FLAT_PARAMETER,
        "wanted": wanted,
    }
    optimizer, states_error, equal_states = states
    return Source(
        weights=weights,
        trees=trees,
        structured=structured,
        equal=equal,
        optimizer=optimizer,
        of_states=StateFacts(states_error, equal_states, inputs=state_inputs or {}),
        **{**told, **fields},
    )


def _optimizers(located: Located, chosen: FileSet, found: list[FileSet]) -> list[tuple[Location, FileSet]]:
    """Return the sets of an optimizer's files, each with its directory."""
    near = [(located.directory, each) for each in found if each is not chosen and each.kind == OPTIMIZER]
    far = [(located.optimizer, each) for each in sets_of(located.optimizer.names)] if located.optimizer else []
    return [(place, each) for place, each in near or far if each.is_certain]


def _is_understood(name: str) -> bool:
    """Whether a class, known by name only, is one that pieces are described by."""
    return name.startswith("torch.distributed.")


def weights_of(ranks: Ranks, paths: list[Path], model: Path) -> tuple[Any, list[Equal], bool]:
    """Return the weights, what must be equal in them, and whether they are more than a flat state dict."""
    joined = ranks.join([each for each in paths if each in ranks.pieces or each in ranks.ready])
    depth = len(model)
    values = [each for each in paths if each in ranks.values]
    if not values and all(len(each) == depth + 1 and type(each[-1]) is str for each in joined.tensors):
        state = {str(each[-1]): untagged(tensor) for each, tensor in joined.tensors.items()}
        if all(tensor.dtype.code is not None for tensor in state.values()):
            return state, joined.equal, False
    found = {**joined.tensors, **{each: ranks.values[each] for each in values}}
    tree = names_of.nest({each: found[each] for each in paths if each in found}, ranks.where)
    inner = names_of.below(tree, model)
    return ({} if inner is None else inner), joined.equal, True


def everything(ranks: Ranks, key: str) -> tuple[dict[str, Any], list[Equal]]:
    joined = ranks.join([*ranks.pieces, *ranks.ready])
    return {key: names_of.nest({**joined.tensors, **ranks.values}, ranks.where)}, joined.equal


def states_of(opened: RankFiles, wanted: Wanted) -> tuple[dict[str, Any] | None, CkptconvError | None, list[Equal]]:
    """Return the optimizer's states by parameter, or why they cannot be told, and what must be equal in them."""
    if opened.beside is not None:
        return opened.beside.optimizer, opened.beside.of_states.error, list(opened.beside.of_states.equal)
    model = opened.model.ranks
    ranks = opened.optimizer.ranks if opened.optimizer else model
    roles = names_of.Roles.of([*ranks.paths()], [*ranks.pieces])
    roots = sorted(roles.optimizers, key=names_of.dotted) or ([()] if opened.optimizer else [])
    if not roots:
        return None, None, []
    own = opened.roles
    parameters = {names_of.dotted(each[len(own.model) :]): each for each in model.pieces if own.is_model(each)}
    try:
        known = {root: by_name(ranks, root, model, parameters, wanted.orders) for root in roots}
        paths = [*ranks.pieces, *ranks.ready]
        joined = ranks.join([each for each in paths if ranks is not model or own.optimizer_of(each) is not None])
    except UnsupportedError as error:
        return None, error, []
    leading = {
        each: value for each, value in ranks.values.items() if ranks is not model or own.optimizer_of(each) is not None
    }
    tree = names_of.nest({**joined.tensors, **leading}, ranks.where)
    trees = []
    for root in roots:
        told = by_parameter([("", names_of.below(tree, root))], list(parameters), ranks.where)
        if told:
            trees.append(("", renamed(told, known[root].names)))
    opened.by = next((each for each in known.values() if each.told), opened.by)
    return by_parameter(trees, list(parameters), ranks.where), None, joined.equal


def _state_inputs(opened: RankFiles, beside: Location | None) -> dict[str, Hashable]:
    if opened.optimizer:
        own = opened.optimizer
        prefix = "" if own.ranks.where == opened.model.ranks.where else f"{basename(own.ranks.where)}/"
        return {f"{prefix}{name}": identity for name, identity in own.account.inputs.items()}
    if opened.beside and beside:
        return {f"{beside.name}/{name}": identity for name, identity in opened.beside.all_inputs().items()}
    return opened.model.account.inputs


def _checkpoint_beside(directory: Location) -> Location | None:
    """Return the directory of torch.distributed.checkpoint with the optimizer's states, as accelerate writes it."""
    for name, entry in directory.names.items():
        if entry.kind == "directory" and name.startswith("optim"):
            inner = directory.join(name)
            if dcp.is_directory(inner.names):
                return inner
    return None


# --------------------------------------------------------------------------------------------------------- what is told


def _facts(directory: Location, model: Files, ranks: Ranks) -> dict[str, Any]:
    meshes = list(dict.fromkeys(mesh for held in ranks.meshes.values() for mesh in held))
    shapes = list(dict.fromkeys(map(str, meshes)))
    return {
        **({"framework": "verl"} if _VERL in directory.names else {}),
        "ranks": len(ranks.files),
        **({"mesh": ", ".join(shapes)} if shapes else {}),
        "files": len(model.account.records),
        "size": model.account.size,
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
    """Return the notes and warnings on what was taken and what was left."""
    notes: list[str] = []
    warnings: list[str] = []
    if chosen.kind != OTHER and not wanted.states and not wanted.key:
        near = [(place, next(iter(each.files.values()))) for place, each in others]
        left = [name if place is directory else place.join(name).path for place, name in near]
        left = left or ([beside.path] if beside else [])
        if left:
            notes.append(f"Not converted: {some(left, form=str)}{STATES_ARE_CONVERTED}.")
    if _ADAPTER in directory.names:
        notes.append(f"Not converted: the LoRA adapter {directory.join(_ADAPTER)}.")
    missing = sorted(ranks.expected - ranks.files.keys())
    if missing:
        warnings.append(
            f"The files of ranks {some(missing, form=str)} are missing; the files of the other ranks hold the same "
            "data."
        )
    differing = [each for each in ranks.differing if each in paths]
    if differing:
        warnings.append(
            f"Values other than tensors differ between the ranks. They were taken from rank {min(ranks.files)}: "
            f"{some([names_of.dotted(each) for each in differing])}."
        )
    return notes, warnings


def _settings(directory: Location, found: list[FileSet], ranks: Ranks) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers and texts beside the tensors, such as the epoch, by their dotted paths, and warnings."""
    warnings: list[str] = []
    shown: dict[str, Any] = {}
    values = [(names_of.dotted(path), value) for path, value in ranks.values.items()]
    for each in found:
        if each.kind == OTHER:
            place = directory.join(each.files[min(each.files)])
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
    """Yield the numbers and short texts in nested dicts, and lists of one of them, each with its path."""
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

"""The files of all ranks that hold one state dict, and the source that they are together.

Of each file, what it says of its rank's parts is kept. What is made of them is read once all are there: which of it is
the model's and which the optimizer's, the tensors joined, and the optimizer's states by parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CkptconvError, LimitError, UnsupportedError
from ckptconv.formats.joining import names as names_of
from ckptconv.formats.joining.join import Ranks
from ckptconv.formats.joining.names import MAX_DEPTH, Path, named
from ckptconv.formats.joining.pieces import Piece, Pieces, Whole, is_distributed, is_partial
from ckptconv.formats.joining.states import by_name
from ckptconv.formats.numbers.matching import Named
from ckptconv.formats.numbers.states import by_parameter, renamed
from ckptconv.formats.runs import Located
from ckptconv.formats.source import Defaults, FileFacts, Source, StateFacts, Wanted
from ckptconv.formats.torch.file import InputLog
from ckptconv.formats.torch.packed import is_tensor
from ckptconv.pickles.children import walk
from ckptconv.pickles.nodes import Composite, class_of
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import Equal, LazyTensor, Stored, Tagged, untagged

# Values of a state dict, tensors and others; an honest one has some tens of thousands.
MAX_LEAVES = 1 << 18


@dataclass
class Files:
    """The files of a set that were read, and what they hold together."""

    ranks: Ranks
    log: InputLog = field(default_factory=InputLog)


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
    ranks, log = opened.model.ranks, opened.model.log
    every = [each.log.files for each in (opened.model, opened.optimizer) if each]
    files = FileFacts.of_all([*every, *([opened.beside.files] if opened.beside else [])])
    weights, equal, structured = weights_of(ranks, opened.weights, opened.roles.model)
    trees: dict[str, Any] = {}
    if wanted.key:
        trees, equal = everything(ranks, wanted.key)
        structured = True
    told = {
        **log.fields(),
        "files": files._replace(opaque=[name for name in files.opaque if not _is_understood(name)]),
        "warnings": [*log.warnings, *warnings],
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
    inner = names_of.subtree(tree, model)
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
        told = by_parameter([("", names_of.subtree(tree, root))], list(parameters), ranks.where)
        if told:
            trees.append(("", renamed(told, known[root].names)))
    opened.by = next((each for each in known.values() if each.told), opened.by)
    return by_parameter(trees, list(parameters), ranks.where), None, joined.equal

"""The files of all ranks that hold one state dict, and the source that they give together.

`divided` reads a rank's parts from each file. Once all files are read, `source_of` decides which parts are the model's
and which the optimizer's, joins the tensors, and names the optimizer's states by parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CkptconvError, LimitError, UnsupportedError
from ckptconv.features.joining import names as names_of
from ckptconv.features.joining.join import Ranks
from ckptconv.features.joining.names import MAX_DEPTH, Path, named
from ckptconv.features.joining.pieces import Piece, Pieces, Whole, is_distributed, is_partial
from ckptconv.features.joining.run_layout import Located
from ckptconv.features.joining.states import by_name
from ckptconv.features.optimizer_states.numbering import Named
from ckptconv.features.optimizer_states.states import by_parameter, renamed
from ckptconv.formats.source import Defaults, FileFacts, Source, StateFacts, Wanted
from ckptconv.formats.torch.input_log import InputLog
from ckptconv.pickles.children import is_tensor, walk
from ckptconv.pickles.nodes import Composite, class_of
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import Equal, LazyTensor, Stored, Tagged, untagged

# Values of a state dict, tensors and others. A real one has some tens of thousands.
MAX_LEAVES = 1 << 18


@dataclass
class Files:
    """The files of a set that were read: the ranks' parts in them, and the log of the files."""

    ranks: Ranks
    log: InputLog = field(default_factory=InputLog)


def divided(tree: Any, reader: Pieces, prefix: Path = ()) -> tuple[dict[Path, Piece], dict[Path, Any]]:
    """Return the tensors of a rank's state dict, and its other values, by path; `prefix` begins each path.

    Raise UnsupportedError for a container, or a tensor, that cannot be joined.
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
            shown = named(names_of.dotted(path)) if path else "the content"
            raise UnsupportedError(
                f"{reader.where}: {shown} is a {kind[:200]}; only state dicts of ordinary, DTensor and ShardedTensor "
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

    A container without tensors is one value. Raise LimitError for a tree of too many values.
    """
    stack: list[tuple[Path, Any]] = [((), tree)]
    holds: dict[int, bool] = {}  # whether a container holds a tensor: one container may be in many places
    count = 0
    while stack:
        path, node = stack.pop()
        count += 1
        if count > MAX_LEAVES:
            raise LimitError(f"{where} contains more than {MAX_LEAVES} values; more are not supported.")
        inner = _inside(node) if len(path) < MAX_DEPTH else None
        if inner is not None and path and id(node) not in holds:
            holds[id(node)] = any(map(is_tensor, walk(node)))
        if inner is None or (path and not holds[id(node)]):
            yield path, node
        else:
            stack.extend(((*path, step), value) for step, value in reversed(inner))


def _inside(node: Any) -> list[tuple[str | int, Any]] | None:
    """Return the items of a container, by key as text or by index; None for other values."""
    if isinstance(node, dict):
        return [(str(key), value) for key, value in node.items()]
    if isinstance(node, (list, tuple)) and not isinstance(node, LazyTensor):
        return list(enumerate(node))
    return None


# --------------------------------------------------------------------------------------------------------- the source


@dataclass
class RankFiles:
    """The files of a checkpoint that were read: those of the weights; if wanted, those of the optimizer, or the source
    of its directory; and the source of the names of the optimizer's numbers."""

    model: Files
    optimizer: Files | None = None
    beside: Source | None = None
    by: Named = field(default_factory=Named)

    @functools.cached_property
    def roles(self) -> names_of.Roles:
        """The roles of model and optimizer in the weights' files."""
        ranks = self.model.ranks
        return names_of.Roles.of([*ranks.paths()], [*ranks.pieces])

    @functools.cached_property
    def weights(self) -> list[Path]:
        """The paths of the weights and of values next to them; all paths if the files are an optimizer's."""
        ranks, roles = self.model.ranks, self.roles
        chosen = [path for path in ranks.paths() if roles.is_model(path)]
        if roles.models or any(path in ranks.pieces for path in chosen):
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
    """Return the `wanted` parts of the files of all ranks as a source, with `states` as `states_of` returns them.
    `fields` are further fields of the source; they override those that its files give."""
    ranks, log = opened.model.ranks, opened.model.log
    every = [part.log.files for part in (opened.model, opened.optimizer) if part]
    files = FileFacts.of_all([*every, *([opened.beside.files] if opened.beside else [])])
    weights, equal, structured = weights_of(ranks, opened.weights, opened.roles.model)
    trees: dict[str, Any] = {}
    if wanted.key:
        trees, equal = everything(ranks, wanted.key)
        structured = True
    common = {
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
        "left": functools.partial(left_of, opened),
    }
    optimizer, states_error, equal_states = states
    return Source(
        weights=weights,
        trees=trees,
        structured=structured,
        equal=equal,
        optimizer=optimizer,
        of_states=StateFacts(states_error, equal_states, inputs=state_inputs or {}),
        **{**common, **fields},
    )


def left_of(opened: RankFiles, unread: Collection[str] = ()) -> dict[str, list[Any]]:
    """Return the parts in the weights' files besides weights and states, each with a rank's pieces of its tensors.
    Those that begin with `unread` are in other files."""
    ranks, roles, chosen, left = opened.model.ranks, opened.roles, {*opened.weights}, dict[str, list[Any]]()
    for path in ranks.paths():
        if path not in chosen and roles.optimizer_of(path) is None and path[0] not in unread:
            pieces = [
                piece.tensor if isinstance(piece, Whole) else None for piece in ranks.pieces.get(path, {}).values()
            ]
            left.setdefault(names_of.dotted(roles.part_of(path)), []).extend(pieces[:1])
    return left


def _is_understood(name: str) -> bool:
    """Return whether a class, known by name only, describes pieces of tensors."""
    return name.startswith("torch.distributed.")


def weights_of(ranks: Ranks, paths: list[Path], model: Path) -> tuple[Any, list[Equal], bool]:
    """Return the weights, the tensors that must be equal in them, and whether they are more than a flat state dict."""
    joined = ranks.join([path for path in paths if path in ranks.pieces or path in ranks.ready])
    depth = len(model)
    values = [path for path in paths if path in ranks.values]
    if not values and all(len(path) == depth + 1 and type(path[-1]) is str for path in joined.tensors):
        state = {str(path[-1]): untagged(tensor) for path, tensor in joined.tensors.items()}
        if all(tensor.dtype.code is not None for tensor in state.values()):
            return state, joined.equal, False
    nodes = {**joined.tensors, **{path: ranks.values[path] for path in values}}
    tree = names_of.nest({path: nodes[path] for path in paths if path in nodes}, ranks.where)
    inner = names_of.subtree(tree, model)
    return ({} if inner is None else inner), joined.equal, True


def everything(ranks: Ranks, key: str) -> tuple[dict[str, Any], list[Equal]]:
    joined = ranks.join([*ranks.pieces, *ranks.ready])
    return {key: names_of.nest({**joined.tensors, **ranks.values}, ranks.where)}, joined.equal


def states_of(opened: RankFiles, wanted: Wanted) -> tuple[dict[str, Any] | None, CkptconvError | None, list[Equal]]:
    """Return the optimizer's states by parameter, or the error if they are unknown; and tensors that must be equal."""
    if opened.beside is not None:
        return opened.beside.optimizer, opened.beside.of_states.error, list(opened.beside.of_states.equal)
    model = opened.model.ranks
    ranks = opened.optimizer.ranks if opened.optimizer else model
    roles = names_of.Roles.of([*ranks.paths()], [*ranks.pieces])
    roots = sorted(roles.optimizers, key=names_of.dotted) or ([()] if opened.optimizer else [])
    if not roots:
        return None, None, []
    weights = opened.roles

    def is_of_state(path: Path) -> bool:
        return ranks is not model or weights.optimizer_of(path) is not None

    parameters = {names_of.dotted(path[len(weights.model) :]): path for path in model.pieces if weights.is_model(path)}
    try:
        known = {root: by_name(ranks, root, model, parameters, wanted.orders) for root in roots}
        paths = [*ranks.pieces, *ranks.ready]
        joined = ranks.join([path for path in paths if is_of_state(path)])
    except UnsupportedError as error:
        return None, error, []
    leading = {path: value for path, value in ranks.values.items() if is_of_state(path)}
    tree = names_of.nest({**joined.tensors, **leading}, ranks.where)
    trees = []
    for root in roots:
        states = by_parameter([("", names_of.subtree(tree, root))], list(parameters), ranks.where)
        if states:
            trees.append(("", renamed(states, known[root].names)))
    opened.by = next((numbering for numbering in known.values() if numbering.source), opened.by)
    return by_parameter(trees, list(parameters), ranks.where), None, joined.equal

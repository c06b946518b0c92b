"""Opens steps of Orbax: the model, the optimizer's states, or the value under a key. Reads no array.

A step has items, each with a tree of its own. The model is under `params`, in a state or at the top. An item without
`params` is a model as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.features.joining.names import Left, subtree
from ckptconv.features.joining.values import Directories, Files, Store
from ckptconv.features.ocdbt import database
from ckptconv.features.orbax import locate, states, tree
from ckptconv.features.orbax.locate import FAMILY, Step
from ckptconv.features.orbax.tree import ARRAY, SCALAR, VALUE, Leaf
from ckptconv.features.zarr import arrays
from ckptconv.formats.source import Defaults, Source, StateFacts, Wanted
from ckptconv.formats.values import number_in
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

_MOST_TREE, _MOST_VALUE = 128 << 20, 16 << 20
# Keys of containers of a model and its optimizer; the key of a model, and of an optimizer.
_HOLDERS = [(), ("state",), ("train_state",), ("default",), ("items",), ("default", "state"), ("items", "state")]
_MODEL, _OPTIMIZER, _STEP = "params", "opt_state", "step"
# Names of the only item of a step that has no key of its own.
_ONLY = ("", "default", "items", "state")


def read(place: Location, wanted: Wanted) -> Source:
    """Open a step by its directory, that of an item in it, or that of the run. Read descriptions only.

    Raise CorruptError if it is incomplete, or contradicts itself; UnsupportedError for data that Orbax does not write.
    """
    return _read(place.path, locate.located(place), wanted)


def _read(path: str, step: Step, wanted: Wanted) -> Source:
    opened = _Opened(step)
    model = opened.model()
    model_leaves, optimizer_keys = opened.under(model), opened.optimizer(model)
    weights = subtree(opened.tree(model_leaves), model)
    trees = {wanted.key: opened.tree(opened.at_key(wanted.key))} if wanted.key else {}
    inputs, optimizer = opened.identified(path), None
    if wanted.states and optimizer_keys:
        names = [leaf.keys[len(model) :] for leaf in model_leaves if leaf.kind == ARRAY]
        optimizer = states.by_parameter(subtree(opened.tree(opened.under(optimizer_keys)), optimizer_keys), names)
    left = Left() if wanted.key else opened.left(model, optimizer_keys)
    notes, warnings = (left.without(left.optimizers) if optimizer else left).messages()
    return Source(
        format="Orbax",
        family=FAMILY,
        path=path,
        weights=weights,
        of_model=bool(model),
        trees=trees,
        left=functools.partial(opened.left_of, model, optimizer_keys),
        optimizer=optimizer,
        of_states=StateFacts(inputs=opened.identified(path) if optimizer else {}),
        notes=[*([step.note] if step.note else []), *notes],
        warnings=[*([step.warning] if step.warning else []), *warnings, *opened.warnings],
        facts={
            **({} if step.place.path == path else {"directory": step.place.path}),
            "tensors": len(opened.tensors),
            "size": sum(tensor.nbytes for tensor in opened.tensors),
        },
        inputs=inputs,
        bytes_read=sum(files.bytes_read for files in opened.files),
        defaults=Defaults(shard_size=5 * 10**9),
        wanted=wanted,
        reread=functools.partial(_read, path, step),
    )


class _Opened:
    """A step whose trees were read: the leaves of its items, and the values of the opened ones."""

    def __init__(self, step: Step) -> None:
        self._where = str(step.place)
        self.files = [*map(Files, step.items.values())]
        self.warnings: list[str] = []
        self._values: dict[tuple[int, str], Any] = {}
        documents = [*_documents(step, self.files)]
        is_alone = len(step.items) == 1 and not documents and next(iter(step.items)) in _ONLY
        self.leaves: list[Leaf] = []
        self._stores: list[tuple[Store, bool]] = []
        for at, (name, files) in enumerate(zip(step.items, self.files, strict=False)):
            data, texts = files.whole(tree.NAME, _MOST_TREE), files.whole(tree.STRINGS, _MOST_VALUE)
            where = str(files.place.join(tree.NAME))
            item_leaves, has_all = tree.leaves_of(data or b"", texts, where, at, "" if is_alone else name)
            is_database = database.NAME in files.place.names
            store = database.Database(files) if is_database else Directories(files)
            odd = {*arrays.described(store)} - {leaf.name for leaf in item_leaves}
            if odd:
                self.warnings.append(f"{where} does not list all arrays in its directory: {some(sorted(odd))}.")
            self.leaves += item_leaves
            self._stores.append((store, has_all))
        self.leaves += documents
        # The keys of all containers with arrays.
        self._holding = {
            leaf.keys[:depth] for leaf in self.leaves if leaf.kind == ARRAY for depth in range(len(leaf.keys))
        }

    def model(self) -> tuple[str, ...]:
        """Return the keys of the model."""
        keys = next((keys for holder in _HOLDERS if (keys := (*holder, _MODEL)) in self._holding), None)
        if keys is None:
            holding = [keys for keys in self._holding if len(keys) == 1]
            return holding[0] if len(holding) == 1 and len(self.files) > len(self._stores) else ()
        # Flax repeats the word around the parameters of a module.
        while (*keys, _MODEL) in self._holding and {leaf.keys[len(keys)] for leaf in self.under(keys)} == {_MODEL}:
            keys = (*keys, _MODEL)
        return keys

    def optimizer(self, model: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys of the optimizer's states; () if there are none."""
        around = model[: model.index(_MODEL)] if _MODEL in model else model
        candidates = ((*holder, _OPTIMIZER) for holder in (around, *_HOLDERS))
        return next((keys for keys in candidates if keys in self._holding), ())

    def under(self, keys: tuple[str, ...]) -> list[Leaf]:
        """Return the leaves below a path of keys."""
        return [leaf for leaf in self.leaves if leaf.is_below(keys)]

    def at_key(self, key: str) -> list[Leaf]:
        """Return the leaves under a dotted key."""
        return [leaf for leaf in self.leaves if key == "." or f"{'.'.join(leaf.keys)}.".startswith(f"{key}.")]

    def left(self, model: tuple[str, ...], optimizer: tuple[str, ...]) -> Left:
        """Return the leaves next to the model. A step's number is a value, also if it is an array."""
        left = Left()
        for leaf in self.leaves:
            if not leaf.is_below(model):
                is_state = bool(optimizer) and leaf.is_below(optimizer)
                part = optimizer if is_state else leaf.keys[: len(model) if leaf.is_below(model[:-1]) else 1]
                noun = ARRAY if leaf.kind == ARRAY and leaf.keys[-1] != _STEP else VALUE
                left.add(".".join(part), noun, is_state=is_state)
        return left

    def left_of(self, model: tuple[str, ...], optimizer: tuple[str, ...]) -> dict[str, list[Any]]:
        """Return the parts that are neither the model's nor the optimizer's, each with its arrays."""
        ways = [keys for keys in (model, optimizer) if keys]
        leaves = [leaf for leaf in self.leaves if model and not any(map(leaf.is_below, ways))]
        self.tree(leaves)
        left: dict[str, list[Any]] = {}
        for leaf in leaves:
            value = self._values.get((leaf.item, leaf.name))
            part = leaf.keys[: len(model) if leaf.is_below(model[:-1]) else 1]
            left.setdefault(".".join(part), []).extend([value] if isinstance(value, LazyTensor) else [])
        return left

    def tree(self, leaves: Sequence[Leaf]) -> Any:
        """Return the tree with the arrays and values of these leaves; other leaves are None in it."""
        for at, ((store, has_all), files) in enumerate(zip(self._stores, self.files, strict=False)):
            kinds = {leaf.name: leaf.kind for leaf in leaves if leaf.item == at and leaf.kind != VALUE}
            names = [name for name in kinds if (at, name) not in self._values]
            tensors, filled = arrays.opened(store, files, names, has_all=has_all)
            if filled:
                self.warnings.append(
                    f"{files.place} lacks chunks, which are read as zeros: {some(filled, form=str)} are stored. "
                    "Orbax did not store chunks of zeros in this step, and chunks lost in a copy look the same."
                )
            for name, tensor in tensors.items():
                is_number = kinds[name] == SCALAR
                self._values[at, name] = number_in(tensor, files.place.options) if is_number else tensor
        pairs = ((leaf, self._values.get((leaf.item, leaf.name), leaf.value)) for leaf in self.leaves)
        return tree.tree_of(pairs, self._where)

    @property
    def tensors(self) -> list[LazyTensor]:
        """The arrays that were opened."""
        return [value for value in self._values.values() if isinstance(value, LazyTensor)]

    def identified(self, path: str) -> dict[str, Any]:
        """Return the identities of the files that were read so far, by their names below `path`."""
        return {
            f"{files.place.path[len(path) :]}/{name}".lstrip("/"): identity
            for files in self.files
            for name, identity in files.inputs.items()
        }


def _documents(step: Step, files: list[Files]) -> Iterator[Leaf]:
    """Yield the items that are JSON documents, in the files of the step itself, and add these files to `files`."""
    for name in locate.folders(step.place) if "" not in step.items else ():
        item_files = Files(step.place.child(name))
        data = item_files.whole(name, _MOST_VALUE) if name not in step.items else None
        if data is not None:
            files.append(item_files)
            try:
                value = strict_json.parse(data.decode(), constants=True, deepest=64)
            except ValueError as error:
                raise CorruptError(f"{item_files.place.join(name)} is not a valid JSON document: {error}.") from None
            yield Leaf((name,), -1, name, VALUE, value)

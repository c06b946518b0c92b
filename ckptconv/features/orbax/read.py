"""Opens steps of Orbax: the model, the optimizer's states, or the value under a key. Reads no array.

A step has items, each with a tree of its own. The model is under `params`, in a state or at the top. An item without
`params` is a model as a whole.
"""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.features.joining.names import left_by_key
from ckptconv.features.joining.values import Directories, Files, Store
from ckptconv.features.ocdbt import database
from ckptconv.features.orbax import locate, states, tree
from ckptconv.features.orbax.locate import FAMILY, Step
from ckptconv.features.orbax.tree import ARRAY, SCALAR, VALUE, Leaf
from ckptconv.features.zarr import arrays
from ckptconv.formats.source import Defaults, Source, StateFacts, Wanted
from ckptconv.formats.values import CODES, first_bytes
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

_MOST_TREE, _MOST_VALUE = 128 << 20, 16 << 20
# Keys of containers of a model and its optimizer; the key of a model, and of an optimizer.
_HOLDERS: tuple[tuple[str, ...], ...] = (
    *((), ("state",), ("train_state",), ("default",), ("items",)),
    *(("default", "state"), ("items", "state")),
)
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
    weights = _below(model, opened.tree(model_leaves))
    trees = {wanted.key: opened.tree(opened.at_key(wanted.key))} if wanted.key else {}
    inputs, optimizer = opened.identified(path), None
    if wanted.states and optimizer_keys:
        names = [leaf.keys[len(model) :] for leaf in model_leaves if leaf.kind == ARRAY]
        optimizer = states.by_parameter(_below(optimizer_keys, opened.tree(opened.under(optimizer_keys))), names)
    notes, warnings = (
        opened.left(model, optimizer_keys, is_converted=optimizer is not None) if not wanted.key else ([], [])
    )
    return Source(
        format="Orbax",
        family=FAMILY,
        path=path,
        weights=weights,
        of_model=bool(model),
        trees=trees,
        optimizer=optimizer,
        of_states=StateFacts(inputs=opened.identified(path) if optimizer else {}),
        notes=[*([step.note] if step.note else []), *notes],
        warnings=[*warnings, *opened.warnings],
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
                self.warnings.append(f"{where} does not name all arrays in its directory: {some(sorted(odd))}.")
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
        return [leaf for leaf in self.leaves if leaf.keys[: len(keys)] == keys]

    def at_key(self, key: str) -> list[Leaf]:
        """Return the leaves under a dotted key."""
        return [leaf for leaf in self.leaves if key == "." or f"{'.'.join(leaf.keys)}.".startswith(f"{key}.")]

    def left(
        self, model: tuple[str, ...], optimizer: tuple[str, ...], *, is_converted: bool
    ) -> tuple[list[str], list[str]]:
        """Return notes and warnings on leaves next to the model: arrays outside an optimizer get a warning."""
        counts: dict[str, Counter[str]] = {}
        is_usual: dict[str, bool] = {}
        for leaf in self.leaves:
            is_state = bool(optimizer) and leaf.keys[: len(optimizer)] == optimizer
            if leaf.keys[: len(model)] != model and not (is_state and is_converted):
                is_beside = leaf.keys[: len(model) - 1] == model[:-1]
                key = ".".join(leaf.keys[: len(model) if is_beside else 1])
                counts.setdefault(key, Counter())[ARRAY if leaf.kind == ARRAY else VALUE] += 1
                is_usual[key] = is_usual.get(key, True) and (is_state or leaf.kind != ARRAY or leaf.keys[-1] == _STEP)
        texts_of: dict[bool, list[str]] = {True: [], False: []}
        for is_note, texts in texts_of.items():
            keys = [key for key in counts if is_usual[key] == is_note]
            if keys:
                shown = some(keys, form=lambda key: f"{key!r} ({_counted(counts[key])})")
                texts.append(left_by_key(shown, keys, bool(is_note and optimizer and not is_converted)))
        return texts_of[True], texts_of[False]

    def tree(self, leaves: Iterable[Leaf]) -> Any:
        """Return the tree with the arrays and values of these leaves; other leaves are None in it."""
        chosen = {(leaf.item, leaf.name): leaf.kind for leaf in leaves}
        for at, (store, has_all) in enumerate(self._stores):
            kinds = {name: kind for (item, name), kind in chosen.items() if item == at and kind != VALUE}
            names = [name for name in kinds if (at, name) not in self._values]
            tensors, filled = arrays.opened(store, self.files[at], names, has_all=has_all)
            if filled:
                self.warnings.append(
                    f"{self.files[at].place} has not all chunks: {some(filled, form=str)}. The others are read as "
                    "zeros: Orbax did not store zeros in this step, and chunks that a copy lost look the same."
                )
            for name, tensor in tensors.items():
                is_number = kinds[name] == SCALAR and not tensor.shape and tensor.dtype.name in CODES
                self._values[at, name] = self._number(tensor, self.files[at]) if is_number else tensor
        pairs = ((leaf, self._values.get((leaf.item, leaf.name), leaf.value)) for leaf in self.leaves)
        return tree.tree_of(pairs, self._where)

    @staticmethod
    def _number(tensor: LazyTensor, files: Files) -> Any:
        data, size = first_bytes(tensor, tensor.nbytes, files.place.options)
        files.bytes_read += size
        return struct.unpack(CODES[tensor.dtype.name], data)[0]

    @property
    def tensors(self) -> list[LazyTensor]:
        """The arrays that were opened."""
        return [value for value in self._values.values() if isinstance(value, LazyTensor)]

    def identified(self, path: str) -> dict[str, Any]:
        """Return the identities of the files that were read so far, by their names below `path`."""
        folders = [files.place.path[len(path) :] for files in self.files]
        pairs = zip(folders, self.files, strict=True)
        return {
            f"{folder}/{name}".lstrip("/"): identity
            for folder, files in pairs
            for name, identity in files.inputs.items()
        }


def _below(keys: Iterable[str], node: Any) -> Any:
    """Return the value under `keys` in a tree of dicts; {} if there is none."""
    for key in keys:
        node = node.get(key, {}) if isinstance(node, dict) else {}
    return node


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {noun}{'s' * (count > 1)}" for noun, count in counts.items())


def _documents(step: Step, files: list[Files]) -> Iterator[Leaf]:
    """Yield the items that are JSON documents, in the files of the step itself, and add these files to `files`."""
    for name in step.place.names if "" not in step.items else ():
        item_files = Files(step.place.child(name)) if step.place.names[name].kind == "directory" else None
        data = item_files.whole(name, _MOST_VALUE) if item_files and name not in step.items else None
        if item_files and data is not None:
            files.append(item_files)
            try:
                value = strict_json.parse(data.decode(), constants=True, deepest=64)
            except ValueError as error:
                raise CorruptError(f"{item_files.place.join(name)} is no document of JSON: {error}.") from None
            yield Leaf(((tree.KEY, name),), -1, name, VALUE, value)

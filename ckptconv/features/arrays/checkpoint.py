"""An opened checkpoint: a mapping of names to tensors, for every format."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from ckptconv.errors import NoTensorError, OutOfRangeError, UsageError
from ckptconv.features.arrays.frameworks import framework as framework_named
from ckptconv.features.arrays.frameworks import named
from ckptconv.features.arrays.memory import Memory, batches, warn_of
from ckptconv.features.arrays.opening_options import INSTEAD, OF_TENSORS, VIEWING
from ckptconv.features.arrays.tensor import CHANGEABLE, Tensor
from ckptconv.formats.alone import OfSetError
from ckptconv.formats.detect import complete, open_source
from ckptconv.formats.model_files import SAFETENSORS
from ckptconv.formats.source import Source
from ckptconv.options.option import checked, filled
from ckptconv.options.table import OPENING, Options, named_in
from ckptconv.outputs import selection
from ckptconv.outputs.hints import candidates
from ckptconv.outputs.pipeline import check_pieces, selected
from ckptconv.outputs.selected import Selected
from ckptconv.process import no_garbage, of_feature
from ckptconv.result import REPORTING
from ckptconv.storage.files import is_held
from ckptconv.storage.paths import normalize
from ckptconv.structure import dtype_views, keymap
from ckptconv.structure.record import METADATA_KEY
from ckptconv.tensors.lazy import LazyTensor, untagged
from ckptconv.text import brief, count_of, format_size, some

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import TypeVar, Unpack

    from ckptconv.options.keywords import OpenOptions

    # The arrays of the framework that a checkpoint was opened for.
    ArrayT = TypeVar("ArrayT", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")

# Ways to read local files, as safetensors names them: by maps, or by copies.
_BACKENDS = ("mmap", "pread")
# Bytes of tensors that `forward` reads together.
_BATCH = 16 << 20
# Tensors that a notebook lists.
_ROWS = 50
# Names at most among which one like a missing one is looked for.
_SEARCHED = 10_000


class Names(KeysView[str], Sequence[str]):
    """The names of tensors, as a view of a mapping's keys that also has an order, as the list of safetensors has."""

    def __init__(self, names: Mapping[str, object]) -> None:
        super().__init__(names)
        self._names = names

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return list(self._names)[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[str]) -> list[str]:
        return [*self, *other]

    def __repr__(self) -> str:
        return repr(list(self))


def _like(wanted: object, keys: Sequence[Any]) -> str:
    """Return a hint for a key that is not among `keys`: one of another type, those below it, or keys like it."""
    named = {str(key): key for key in keys}
    if str(wanted) in named:
        return f"Did you mean {named[str(wanted)]!r}?"
    if begun := [name for name in named if wanted and name.startswith(f"{wanted}.")]:
        return f"The names that begin with {wanted}. are {some(begun, 3, repr)}."
    return candidates(str(wanted), list(named))


class Tensors(Mapping[str, Tensor], Generic[ArrayT]):
    """Tensors by name, in the order of the files. A tensor's data is read only when it is requested.

    It has the methods of safetensors' `safe_open` and those of a mapping.
    """

    def __init__(self, path: str, memory: Memory, framework: str, device: Any) -> None:
        self._path, self._memory, self._framework, self._device = path, memory, framework, device

    def _selected(self) -> Selected:
        """Return the tensors and their facts."""
        raise NotImplementedError

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        self._memory.check_open()
        with no_garbage():
            return self._made(self._selected())

    def _made(self, chosen: Selected) -> dict[str, Tensor]:
        # The tied names of states are found only among the owners.
        apart = {alias: owner for alias, owner in chosen.owners.items() if alias not in chosen.tensors}
        tied = {**apart, **chosen.aliases()}
        shared = {*tied, *tied.values()}
        lazy: dict[str, LazyTensor] = {name: chosen.cast(tied.get(name, name)) for name in (*chosen.tensors, *apart)}
        names = sorted(lazy, key=lambda name: lazy[name].origin())
        return {
            name: Tensor(
                name,
                lazy[name],
                self._memory,
                self._framework,
                self._device,
                (id(self), tied.get(name, name)) if name in shared else None,
            )
            for name in names
        }

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            # A name is often asked for to see whether it is there: do not search a million for those like it.
            close = _like(name, list(self._tensors)) if len(self) <= _SEARCHED else ""
            raise NoTensorError(f"{self._path} has no tensor {brief(name)}.", close) from None

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError(f"{self._path} is read-only. {CHANGEABLE}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {tensor!r}' for name, tensor in self._tensors.items())}}}"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._tensors)

    # ---- as safetensors' safe_open

    def keys(self) -> Names:
        """Return the names, in the order in which the files hold the tensors."""
        return Names(self._tensors)

    def offset_keys(self) -> list[str]:
        """Return the names as a list, in the same order."""
        return list(self._tensors)

    @checked({}, OF_TENSORS, "get_tensor")
    def get_tensor(self, name: str) -> ArrayT:
        """Return all of a tensor, as an array of the framework, on the device that the checkpoint was opened for."""
        return self.get_tensors([name])[name]

    def get_slice(self, name: str) -> Tensor:
        """Return a tensor to be sliced: `get_slice(name)[a:b, ...]`."""
        return self[name]

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, ArrayT]:
        """Return arrays by name, of all tensors or of `names`. Tensors that have to be copied are read together."""
        if isinstance(names, str):
            raise UsageError(
                f"get_tensors expects a list of names, but {brief(names)} is a single string.",
                f"Use [name], or fnmatch.filter(ck, {names[:100]!r}) for a glob.",
            )
        chosen = [self[name] for name in (self._tensors if names is None else names)]
        return dict(zip([tensor.name for tensor in chosen], self._arrays(chosen), strict=True))

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of a safetensors file, or that which a conversion would write; None for none."""
        self._memory.check_open()
        with no_garbage():
            chosen = self._selected()
            aliases = chosen.recorded_aliases()
            record = chosen.structure(aliases)
        return {**chosen.stated(aliases), **aliases, **({} if record is None else {METADATA_KEY: record})}

    # ---- forward

    def forward(self) -> Iterator[tuple[str, ArrayT]]:
        """Yield each name and array in the order in which the files hold them.

        Small tensors are read together, at most 16 MiB at a time: of a store, this takes few requests. Nothing that was
        yielded is kept.
        """
        for batch in batches((tensor.wanted() for tensor in self._tensors.values()), _BATCH):
            names = [wanted.name for wanted in batch]
            arrays = self._arrays([self._tensors[name] for name in names])
            for index, name in enumerate(names):
                array, arrays[index] = arrays[index], None
                yield name, array
                del array

    def _arrays(self, chosen: Sequence[Tensor]) -> list[Any]:
        framework = framework_named(self._framework)
        arrays = self._memory.arrays([tensor.wanted() for tensor in chosen], framework)
        return [framework.placed(array, self._device) for array in arrays]


class Checkpoint(Tensors[ArrayT]):
    """An opened checkpoint of any format: a read-only mapping of the names of its weights to lazy tensors.

    The names and dtypes are those that a conversion would write. `source` is the description that conversions use;
    `convert` and `verify` take a Checkpoint in its place. It closes at the end of a `with` block, by `close()`, or when
    it is collected; arrays that were read stay. It may be used by several threads, and in processes that are forked;
    pickled, it is opened again.

    Examples:
        >>> with ckptconv.open("train.pt", key="model") as ck:
        ...     print(ck.optimizer["weight.exp_avg"].shape == ck["weight"].shape)
        True
    """

    def __init__(self, source: Source, framework: str, device: Any, memory: Memory, options: Mapping[str, Any]) -> None:
        super().__init__(source.path, memory, framework, device)
        self.source = source
        self._given = options

    @property
    def format(self) -> str:
        """The format, for people: "DeepSpeed ZeRO-3"."""
        return self.source.format

    def _selected(self) -> Selected:
        given = {name: self._given[name] for name in named_in("key partial fill")}
        return selected(_by_name(self.source), Options(**given))

    def metadata(self) -> dict[str, str] | None:
        if self.source.family != SAFETENSORS:
            return super().metadata()
        self._memory.check_open()
        return dict(self.source.metadata) or None

    @functools.cached_property
    def optimizer(self) -> Tensors[ArrayT]:
        """The optimizer's states, named `<parameter>.<state>`; read only when they are used.

        Its first use raises UsageError for a checkpoint without states, or if states cannot be assigned to parameters.
        """
        return _States(self)

    @functools.cached_property
    def tree(self) -> Any:
        """The saved object, nested as it was saved, with lazy tensors as leaves: mappings, sequences and plain values.

        Inert nodes stand for objects of classes that are known by name only, and for constants of torch and numpy.
        """
        self._memory.check_open()
        inert = bool(self._given.get("inert"))
        key = self._given["key"] or "."
        whole = complete(self.source, key=key, inert=inert)
        tree = selection.subtree(whole.tree(key), key, whole.path)
        if whole.pieces:
            check_pieces(whole, keymap.flatten(tree)[0])
        return _Branch(self, "").wrapped("", tree)

    def close(self) -> None:
        """Close the files. Loaded data stays; reading more raises UsageError."""
        self._memory.close()

    def __enter__(self) -> Checkpoint[ArrayT]:
        self._memory.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        known = self.__dict__.get("_tensors")
        count = "" if known is None else f", {len(known)} tensors"
        return f"<Checkpoint {self._path!r}: {self.format}{count}>"

    def _repr_html_(self) -> str | None:
        """Return a table for notebooks: the tensors with their dtypes, shapes and sizes."""
        notebook = of_feature(REPORTING, "notebook")
        if notebook is None:
            return None
        rows: list[tuple[str, ...]] = [
            (name, str(tensor.dtype), str(list(tensor.shape)), format_size(tensor.nbytes))
            for name, tensor in islice(self._tensors.items(), _ROWS)
        ]
        if len(self) > _ROWS:
            rows.append((f"{len(self) - _ROWS:,} more tensors",))
        table: str = notebook.html_table(f"Checkpoint {self._path}: {self.format}", rows)
        return table

    def __reduce__(self) -> Any:
        self._memory.check_open()
        if is_held(self._given["path"]) or is_held(self._path):
            raise UsageError(f"{self._path} cannot be opened in another process: it was read from a pipe.")
        return _reopened, (dict(self._given),)


class _States(Tensors[ArrayT]):
    """The states of a checkpoint's optimizer."""

    def __init__(self, checkpoint: Checkpoint[ArrayT]) -> None:
        super().__init__(checkpoint._path, checkpoint._memory, checkpoint._framework, checkpoint._device)
        self._checkpoint = checkpoint

    def _selected(self) -> Selected:
        inert = bool(self._checkpoint._given.get("inert"))
        source = complete(self._checkpoint.source, states=True, inert=inert)
        return selected(source, Options(), holds="optimizer")


class _Branch:
    """Views of a tree whose leaves are tensors."""

    def __init__(self, checkpoint: Checkpoint[Any], name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def wrapped(self, key: object, value: Any) -> Any:
        """Return `value`, which is at `key` of this branch, as it is shown."""
        ckpt = self._checkpoint
        name = f"{self._name}.{key}" if self._name else str(key)
        if isinstance(value, LazyTensor):
            value = untagged(value)
            if value.dtype.kind == "x":
                value = dtype_views.stored(value)
            return Tensor(name, value, ckpt._memory, ckpt._framework, ckpt._device)
        if isinstance(value, Mapping):
            return _Node(ckpt, name, value)
        if type(value) in (list, tuple):
            return _List(ckpt, name, value)
        return value


class _Node(_Branch, Mapping[Any, Any]):
    """A mapping of a tree."""

    def __init__(self, checkpoint: Checkpoint[Any], name: str, items: Mapping[Any, Any]) -> None:
        super().__init__(checkpoint, name)
        self._items = items

    def __getitem__(self, key: Any) -> Any:
        if key in self._items:
            return self.wrapped(key, self._items[key])
        place = f"under {self._name!r}" if self._name else "at the top"
        close = _like(key, list(self._items)) if len(self) <= _SEARCHED else ""
        raise NoTensorError(f"{self._checkpoint._path} has no key {brief(key)} {place}.", close)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self._items else default

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<{type(self._items).__name__} of {', '.join(map(brief, self._items))}>"

    def _ipython_key_completions_(self) -> list[Any]:
        return list(self._items)


class _List(_Branch, Sequence[Any]):
    """A list or tuple of a tree."""

    def __init__(self, checkpoint: Checkpoint[Any], name: str, items: Sequence[Any]) -> None:
        super().__init__(checkpoint, name)
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        if not -len(self) <= index < len(self):
            raise OutOfRangeError(f"Index {index} is out of range: {self._name!r} has {count_of(len(self), 'item')}.")
        return self.wrapped(index % len(self), self._items[index])

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<{type(self._items).__name__} of {len(self._items)}>"


@overload
def open_checkpoint(
    path: str | os.PathLike[str] = "",
    framework: Literal["pt", "torch"] = "pt",
    device: Any = None,
    *,
    filename: str | os.PathLike[str] = "",
    backend: Literal["mmap", "pread"] = "mmap",
    **options: Unpack[OpenOptions],
) -> Checkpoint[torch.Tensor]: ...
@overload
def open_checkpoint(
    path: str | os.PathLike[str],
    framework: Literal["np", "numpy"],
    device: Any = None,
    *,
    filename: str | os.PathLike[str] = "",
    backend: Literal["mmap", "pread"] = "mmap",
    **options: Unpack[OpenOptions],
) -> Checkpoint[numpy.ndarray[Any, Any]]: ...
@overload
def open_checkpoint(
    path: str | os.PathLike[str] = "",
    *,
    framework: Literal["np", "numpy"],
    device: Any = None,
    filename: str | os.PathLike[str] = "",
    backend: Literal["mmap", "pread"] = "mmap",
    **options: Unpack[OpenOptions],
) -> Checkpoint[numpy.ndarray[Any, Any]]: ...
@checked(VIEWING, INSTEAD, "open")
def open_checkpoint(
    path: str | os.PathLike[str] = "",
    framework: Literal["pt", "np", "torch", "numpy"] = "pt",
    device: Any = None,
    *,
    filename: str | os.PathLike[str] = "",
    backend: Literal["mmap", "pread"] = "mmap",
    **options: Unpack[OpenOptions],
) -> Checkpoint[Any]:
    """Open the checkpoint at `path`, of any format, as safetensors' `safe_open` opens a file: `filename` is its name
    for `path`.

    Only descriptions are read, no tensor data. `framework` is "pt" for torch or "np" for numpy, which are imported with
    the first array; `device` is where torch's arrays go. `key` selects a subtree, as in "state_dict". `tag`,
    `exclude_frozen` and `model_rank` (one tensor-parallel rank) apply to DeepSpeed checkpoints, `master` (fp32 masters)
    and `unstack` (a tensor for each layer) to Megatron-core's. `with_states` reads the description of the optimizer's
    states now, not when they are used. A file that is an attack raises UnsafeError; with `inert` it is opened like any
    other, and nothing in it runs. A path of another `family` than the expected one raises UsageError. `like` names a
    reference, whose names and dtypes the tensors have; tensors that only the reference has are left out with `partial`,
    or taken from it with `fill`. The weights of one file of many, such as a rank's, are read only with `alone`, but for
    those of a shard of safetensors, which are whole; its `tree` can be read anyway. `backend` "pread" copies the bytes
    of a file, where "mmap" maps them. "-" is standard input; data from a pipe, and compressed data, is kept in a
    temporary file in `spool_dir`. The warnings of a conversion, such as one about a tensor that is left out, are
    UserWarnings. Raise a CkptconvError.

    Examples:
        >>> with ckptconv.open("model.pt", framework="np") as ck:
        ...     print(list(ck), ck["weight"].shape, ck["weight"][0, 2:])
        ['bias', 'weight'] (3, 4) [1. 1.]
    """
    kind = named(framework)
    if backend not in _BACKENDS:
        raise UsageError(f"The backend {backend!r} is not known.", f"Use {' or '.join(_BACKENDS)}.")
    if filename and path:
        raise UsageError("path and filename are two names for the same argument.", "Give one of them.")
    path = normalize(filename or path)
    reading = filled(VIEWING, options)
    with no_garbage():
        opening = {name: value for name, value in reading.items() if name in OPENING}
        source = open_source(path, states=reading["with_states"], **opening)
    warn_of(_by_name(source))
    memory = Memory(source.path, reading["storage_options"], backend == "mmap", reading["spool_dir"])
    arguments = {"path": path, "framework": framework, "device": device, "backend": backend, **reading}
    return Checkpoint(source, kind, device, memory, arguments)


def _by_name(source: Source) -> Source:
    """Return `source` for callers that take tensors by name: in one safetensors file of a set, tensors are whole."""
    error = source.weights_error
    if not isinstance(error, OfSetError) or source.family != SAFETENSORS:
        return source
    return source._replace(weights_error=None, warnings=[text for text in source.warnings if text != str(error)])


def _reopened(arguments: Mapping[str, Any]) -> Checkpoint[Any]:
    return open_checkpoint(**arguments)

"""`Source`: an opened checkpoint of any format, which every reader returns."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ckptconv.errors import CkptconvError, UsageError
from ckptconv.formats.wrappers import WRAPPERS, wrapper
from ckptconv.plan import Input
from ckptconv.storage.records import Records
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Equal, LazyTensor
from ckptconv.tensors.moves import File
from ckptconv.text import parse_path

# The beginnings of the names of a model's files: those of most programs, open_clip, diffusers and PEFT's adapters.
MODEL, ADAPTER, OPEN_CLIP = "model", "adapter_model", "open_clip_model"
_STEMS = {"diffusion_pytorch_model": "diffusion_pytorch_model", "open_clip_": OPEN_CLIP, "adapter_": ADAPTER}
STEMS = (MODEL, *_STEMS.values())
# Configurations beside weights: a model's, and PEFT's of an adapter.
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
# The family of files that belong to the models of a pipeline, and of the models together.
PIPELINE = "diffusers"
# The prefix of the names of a reference's files among those of the source.
OF_REFERENCE = "--like/"
# Keys under which training checkpoints keep the weights; the first one present is meant.
MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module")


class Wanted(NamedTuple):
    """The parts of a checkpoint to read besides its weights, and which of several checkpoints to open.

    `key` is a dotted path into the state, "." all of it. `states` asks for the optimizer's states. Formats that
    describe everything in one place read these anyway. `structure`: a structure record that does not fit is an error;
    otherwise it is left out. `tag`, `exclude_frozen` and `model_rank` (one tensor-parallel rank) are for DeepSpeed;
    `master` (the fp32 masters in the place of the weights) and `unstack` (a tensor for each layer) for Megatron-core.
    `raw` keeps whole modules as objects. `parts`: ranks' files that do not say how they are joined are opened all the
    same, for a map to join them. `orders` are the orders of the model's parameters that the user gives.
    """

    key: str = ""
    states: bool = False
    tag: str = ""
    exclude_frozen: bool = False
    model_rank: int | None = None
    structure: bool = True
    raw: bool = False
    master: bool = False
    unstack: bool = False
    parts: bool = False
    orders: tuple[Any, ...] = ()


_ALL = Wanted()


class StoredTensors(NamedTuple):
    """The tensors of a safetensors output under its own names for them, which may not be those of the tree.

    `tensors` has every name, aliases {removed: kept} included. `record` is the structure record.
    """

    tensors: Mapping[str, LazyTensor]
    aliases: Mapping[str, str]
    record: str


class Training(NamedTuple):
    """The content of a DeepSpeed checkpoint besides weights and states, for a universal checkpoint.

    `stage` is the ZeRO stage; `parameters` are the names of the trained parameters; `common` is the part of the
    optimizer's file about all of them together. `copies` are the model files to copy; for other checkpoints, `models`
    has the contents of model files by name.
    """

    stage: int | None
    parameters: Sequence[str]
    common: Mapping[str, Any]
    copies: Sequence[File] = ()
    models: Mapping[str, Any] = {}


class Quantized(NamedTuple):
    """The weights in the place of quantized ones, of `dtype` ("": all are quantized anew), and `formats` {name: count}.

    `path` is the configuration of the quantization, or "". `again` does the same to the source when it is reread.
    """

    dtype: str
    path: str
    formats: Mapping[str, int]
    again: Callable[[Source], Source]

    @property
    def says(self) -> str:
        """The path of the configuration that no longer holds, because weights replaced quantized ones; else ""."""
        return self.path if self.formats else ""


# The beginning of notes on the parts that a conversion leaves out.
NOT_CONVERTED = "Not converted: "
# The end of notes on optimizer states, which says how to convert them. The result of several checkpoints has none.
STATES_ARE_CONVERTED = ". Use convert --optimizer PATH for its states"
THEIR_STATES_ARE_CONVERTED = "--optimizer PATH for the optimizer states, "


class StateFacts(NamedTuple):
    """The known facts about the optimizer's states, besides their values.

    `error` is the reason why they cannot be converted although the weights can. `equal` are stored twice, by name, and
    must be equal. Of those that are `alike`, each rank keeps its own copy: a difference is worth a warning. `inputs`
    identify the files that were read only for the states, and more of a file that was read for the weights too. `step`
    is the number of steps that the optimizer has made, if it was read.
    """

    error: CkptconvError | None = None
    equal: Sequence[Equal] = ()
    alike: Sequence[Equal] = ()
    inputs: Mapping[str, Hashable] = {}
    step: int | None = None


class FileFacts(NamedTuple):
    """The facts about a checkpoint's files besides tensors.

    `opaque` are the names of classes kept as inert data; `mentioned` are all names that its pickles mention. `records`
    maps a file's path to its storages, with their checksums. `digests` are the SHA-256 of files by path, as the
    checkpoint states them.
    """

    opaque: Sequence[str] = ()
    mentioned: Sequence[str] = ()
    records: Mapping[str, Records] = {}
    digests: Mapping[str, str] = {}

    @property
    def has_checksums(self) -> bool:
        """Whether the files record checksums of their own."""
        return any(records.digest() is not None for records in self.records.values())

    @classmethod
    def of_all(cls, every: Iterable[FileFacts]) -> FileFacts:
        """Return the facts of several checkpoints together."""
        several = list(every)
        return cls(
            list(dict.fromkeys(name for facts in several for name in facts.opaque)),
            list(dict.fromkeys(name for facts in several for name in facts.mentioned)),
            {path: records for facts in several for path, records in facts.records.items()},
            {path: digest for facts in several for path, digest in facts.digests.items()},
        )


class Defaults(NamedTuple):
    """The dtype of an output, and the largest size of its files in bytes, unless the user chooses others; or, of a set
    of files that is only described, the name of each tensor's file."""

    dtype: str = "keep"
    shard_size: int | None = None
    grouping: Mapping[str, str] = {}


class _Fields(NamedTuple):
    """The fields of a `Source`."""

    format: str
    family: str
    path: str
    weights: Any
    optimizer: Any = None
    of_states: StateFacts = StateFacts()
    weights_error: CkptconvError | None = None
    trees: Mapping[str, Any] = {}
    training: Training | None = None
    left: Callable[[], Mapping[str, Sequence[Any]]] | None = None
    structured: bool = True
    of_model: bool = False
    owners: Mapping[str, str] = {}
    unaccounted: Sequence[str] = ()
    equal: Sequence[Equal] = ()
    counts: Mapping[str, int] = {}
    facts: Mapping[str, Any] = {}
    files: FileFacts = FileFacts()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    values: Mapping[str, Any] = {}
    inputs: Mapping[str, Hashable] = {}
    bytes_read: int = 0
    pointers: Sequence[str] = ()
    shards: Sequence[str] = ()
    part: int | str | None = None
    pieces: re.Pattern[str] | None = None
    metadata: Mapping[str, str] = {}
    remarks: Mapping[str, str] = {}
    stored: StoredTensors | None = None
    defaults: Defaults = Defaults()
    companions: Mapping[str, File] = {}
    config: Mapping[str, Any] | None = None
    computed: Mapping[str, Any] = {}
    wanted: Wanted = _ALL
    reread: Callable[[Wanted], Source] | None = None


# The abstract types of fields that must have a value: formats of other packages may mistake them.
_ABSTRACT: Mapping[type, Any] = {dict: Mapping, tuple: Sequence}
_KINDS: Mapping[str, Any] = {"format": str, "family": str, "path": str} | {
    name: _ABSTRACT.get(type(value), type(value))
    for name, value in _Fields._field_defaults.items()
    if value is not None
}


class Source(_Fields):
    """An opened checkpoint: a tree with `LazyTensor` leaves, and facts about it. It is complete and immutable.

    - `format` names it for people; `family`, such as "torch" or "deepspeed", says which command converts it.
    - `weights` is the tree to convert. `structured`: its nesting and order are the user's own and worth a record;
      otherwise it is a flat state dict whose order means nothing.
    - `of_model`: the format says that `weights` are those of the model alone.
    - `optimizer` is the optimizer's state dict by parameter name, if names are known; `of_states` are facts about it.
    - `weights_error` is the reason why its tensors are no weights, although they can be read and shown.
    - `trees` maps a key to a tree that holds the value under it, if `weights` does not.
    - `training` is the rest of DeepSpeed's state to resume the training, if DeepSpeed wrote it.
    - `left` returns its parts besides `weights` and optimizer states, each with its tensors, None for unread values.
    - `owners` are ties that the checkpoint itself names: {alias: owner}.
    - `unaccounted` are names whose data is nowhere in it: the user excludes them by name, or it is an error.
    - `equal` are tensors that are stored twice, by name; if they differ, the checkpoint is corrupt.
    - `counts` are the numbers of tensors in the weights by kind; `files` are the facts about its files besides tensors.
    - `warnings` are causes for concern; `notes` are not.
    - `values` are values next to `weights`, by name, for people, and derived companions, whose files are empty.
    - `inputs` identifies every file that was read, by a name relative to the source: by an `Input`, or by another value
    that only this content has. - `companions` are small files next to it, or next to its reference, by name, that are
    copied with the weights. - `config` is the content of the config.json among them, of an empty file if it is derived,
    or of one in the output's directory. - `computed` are the computations of its tensors, by the names of
    `outputs.computed.COMPUTED`; the tensors are as they are stored, except weights in the place of quantized ones.
    - `wanted` are the parts that were read. If that was not everything, `reread` opens the checkpoint again for more.
    - `pointers` are the paths of files that only say where the checkpoint is, such as `latest`.
    - `shards` are the paths of the files of a sharded set: the output keeps the grouping. Of a set that is only
      described, `grouping` has {tensor: name of its file}.
    - `part` names one of several sources: the tensor-parallel rank, or the folder in a pipeline, "" for its own.
    - `pieces` matches the names of tensors that are pieces of parameters; these are not converted.
    - `metadata` is the metadata of safetensors files, `remarks` that part of it which an output keeps.
    - `stored` are the tensors of a safetensors output with a structure record; `defaults` apply where none are given.
    """

    __slots__ = ()

    # mypy would not know the fields of what this makes.
    if not TYPE_CHECKING:

        def __new__(cls, *values: Any, **fields: Any) -> Source:
            """Make a source, and check it."""
            source = super().__new__(cls, *values, **fields)
            source.__post_init__()
            return source

        @classmethod
        def _make(cls, values: Iterable[Any]) -> Source:
            return cls(*values)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if its fields contradict the documentation, or one another."""
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name} of its Source must be {kind.__name__}, not {type(getattr(self, name)).__name__}"
                )
        if not self.structured and not isinstance(self.weights, Mapping):
            raise TypeError(f"weights of its Source must be a flat state dict, not {type(self.weights).__name__}")
        wrong = {
            "part is no rank": isinstance(self.part, int) and self.part < 0,
            "grouping excludes shards": bool(self.defaults.grouping and self.shards),
            "config.json was not read": CONFIG in self.companions and self.config is None,
            "dtype is not known": self.defaults.dtype not in ("keep", *DTYPES),
            "shard_size is not valid": self.defaults.shard_size is not None and self.defaults.shard_size < 1,
        }
        for mistake, is_so in wrong.items():
            if is_so:
                raise ValueError(f"{self.path}: its {mistake}")

    # A source is equal only to itself: it may be large, and some of its fields cannot be hashed.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<Source of {self.path}: {self.format}>"

    @property
    def model_rank(self) -> int | None:
        """The tensor-parallel rank, if each rank is a source of its own."""
        return self.part if isinstance(self.part, int) else None

    @property
    def component(self) -> str | None:
        """The folder in a pipeline of diffusers, "" for the pipeline's own, if it is a part of one."""
        return self.part if isinstance(self.part, str) else None

    @property
    def is_model(self) -> bool:
        """Whether the source has weights, and not only files that belong to the models of a pipeline."""
        return self.family != PIPELINE

    @property
    def reference(self) -> Source | None:
        """The checkpoint whose names, files and dtypes an output of the weights takes over."""
        return self.computed.get("like")

    @property
    def quantized(self) -> Quantized | None:
        """The weights in the place of quantized ones, if they were asked for."""
        return self.computed.get("dequantize")

    def computing(self, **computations: Any) -> Source:
        """Return the source with further `computations`, by names of `computed`, without those that are None."""
        every = {**self.computed, **computations}
        return self._replace(computed={name: entry for name, entry in every.items() if entry is not None})

    @property
    def folder(self) -> str:
        """The directory in OUTPUT for its output, if it is one of several sources; "" for OUTPUT itself."""
        return self.component or ("" if self.model_rank is None else f"mp_rank_{self.model_rank:02d}")

    @property
    def stem(self) -> str:
        """The beginning of the names of its output's files in a directory: its own, if it is that of diffusers, of
        open_clip or of PEFT's adapters, or that of its reference or of the companions of one program."""
        others = () if self.reference or CONFIG in self.companions else self.companions
        names = (*(self.reference or self).inputs, *others)
        stems = (stem for beginning, stem in _STEMS.items() if any(name.startswith(beginning) for name in names))
        return next((stem for stem in stems if stem != OPEN_CLIP or "map" not in self.computed), MODEL)

    @property
    def inputs_of_all(self) -> Mapping[str, Hashable]:
        """`inputs`, and those of the optimizer's states."""
        return {**self.inputs, **self.of_states.inputs}

    def all_inputs(self) -> Mapping[str, Hashable]:
        """Return `inputs`, those of the companions, and those of the reference's files as `--like/<name>`."""
        companions = {name: Input.stamped(file) for name, file in self.companions.items()}
        reference = self.reference.inputs if self.reference else {}
        return {**self.inputs, **companions, **{f"{OF_REFERENCE}{name}": read for name, read in reference.items()}}

    @property
    def hints(self) -> list[str]:
        """Return hints at options that remove wrappers' prefixes, if all names of the weights begin with them."""
        tree, key = self.weights, ""
        if self.structured and isinstance(tree, Mapping):
            key = next((name for name in MODEL_KEYS if isinstance(tree.get(name), Mapping)), "")
            tree = tree[key] if key else tree
        names = tree if isinstance(tree, Mapping) and all(map(_is_text, tree)) else ()
        shared = wrapper(names)
        # In a model in one file, the last is mostly the name of one of its modules; in Lightning's, that of the model.
        prefix = shared if shared.startswith(WRAPPERS[0]) else shared.removesuffix(WRAPPERS[-1]) or shared
        is_own = key != "state_dict" and (self.structured or self.family == "safetensors")
        if not prefix or (prefix == WRAPPERS[-1] and is_own):
            return []
        under, how = (f" under {key}", f"--key {key} --strip-prefix") if key else ("", "--strip-prefix")
        return [f"Every name{under} begins with {prefix!r}, a model wrapper's prefix; {how} {prefix} removes it."]

    def tree(self, key: str) -> Any:
        """Return the tree that holds the value under `key`: the weights, or a larger one."""
        return self.trees.get(key, self.weights)

    def check_weights(self) -> None:
        """Raise `weights_error`, if there is one."""
        if self.weights_error:
            raise self.weights_error

    def states(self) -> Any:
        """Return the optimizer's state dict by parameter name; None if the checkpoint has no such names.

        Raise the error of states that cannot be converted, if there is one.
        """
        if self.of_states.error:
            raise self.of_states.error
        return self.optimizer


def without_states(note: str) -> str:
    """Return a note without its advice on how optimizer states are converted."""
    return note.replace(STATES_ARE_CONVERTED, "").replace(THEIR_STATES_ARE_CONVERTED, "")


_WHEN_OPENED = ("tag", "exclude_frozen_parameters", "per_rank", "raw", "alone", "master", "unstack", "family")


class Opened(Protocol):
    """An object that was opened, and has its `Source`."""

    @property
    def source(self) -> Source: ...


def source_of(origin: str | os.PathLike[str] | Source | Opened, given: Mapping[str, Any] | None = None) -> str | Source:
    """Return the `Source` of an opened checkpoint, or itself; a path as text. Raise UsageError for others, and for an
    option that is `given`, but decides how a checkpoint is opened."""
    source = origin if isinstance(origin, Source) else getattr(origin, "source", None)
    if late := next((name for name in _WHEN_OPENED if (given or {}).get(name) and source is not origin and source), ""):
        raise UsageError(f"{late} decides how a checkpoint is opened, but it is open already.", "Give a path instead.")
    return source if isinstance(source, Source) else parse_path(origin)


def _is_text(key: Any) -> bool:
    return type(key) is str

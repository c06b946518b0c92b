"""What reading a checkpoint of any format returns."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ckptconv.errors import CkptconvError
from ckptconv.formats.wrappers import WRAPPERS, wrapper
from ckptconv.plan import Input
from ckptconv.storage.records import Records
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Equal, Inline, LazyTensor, whole
from ckptconv.tensors.moves import File
from ckptconv.text import parse_path

if TYPE_CHECKING:
    from ckptconv.formats.change import Change
    from ckptconv.formats.numbers.matching import Order

# How the names of a model's files begin: those of most programs, and by the beginning of an input's name, those of
# diffusers and of open_clip, and of PEFT's adapters.
MODEL, ADAPTER, OPEN_CLIP = "model", "adapter_model", "open_clip_model"
_STEMS = {
    "diffusion_pytorch_model": "diffusion_pytorch_model",
    "open_clip_": OPEN_CLIP,
    ADAPTER: ADAPTER,
}
STEMS = (MODEL, *_STEMS.values())
# The family of what goes with the models of a pipeline, and of the models together.
PIPELINE = "diffusers"
# Stands before the names of a reference's files among those of the source.
OF_REFERENCE = "--like/"
# Keys under which training checkpoints keep the weights; the first one present is meant.
MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module")


class Wanted(NamedTuple):
    """What of a checkpoint to read beside its weights, and which of several to open.

    `key` is a dotted path into the state, "." all of it. `states` asks for the optimizer's states. Formats that
    describe everything in one place read these anyway. `structure`: a structure record that does not fit is an error;
    otherwise it is left out. `tag`, `exclude_frozen` and `model_rank` (one tensor-parallel rank) are for DeepSpeed;
    `master` (the fp32 masters in the place of the weights) and `unstack` (a tensor for each layer) for Megatron-core.
    `raw` keeps whole modules the objects that they are. `parts`: ranks' files that do not say how they are joined are
    opened all the same, for a map to join them. `orders` are those of the model's parameters that the user names.
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
    orders: tuple[Order, ...] = ()


_ALL = Wanted()


class StoredTensors(NamedTuple):
    """The tensors of a safetensors output under the names that it has for them, which may not be those of the tree.

    `tensors` has every name, aliases {removed: kept} included. `record` is the structure record.
    """

    tensors: Mapping[str, LazyTensor]
    aliases: Mapping[str, str]
    record: str


class Training(NamedTuple):
    """What a DeepSpeed checkpoint holds beside weights and states, for a universal checkpoint.

    `stage` is the ZeRO stage; `parameters` are the names of the trained parameters; `common` is what the optimizer's
    file says of all of them together. The model files are `copies` of those that there are; of other checkpoints,
    `models` has their contents by name.
    """

    stage: int | None
    parameters: Sequence[str]
    common: Mapping[str, Any]
    copies: Sequence[File] = ()
    models: Mapping[str, Any] = {}


class Quantized(NamedTuple):
    """What was made of quantized weights: weights of `dtype` ("": all are quantized anew), `formats` {format: count}.

    `path` is the configuration that says so, "" if none does. `again` does the same to the source when it is reread.
    """

    dtype: str
    path: str
    formats: Mapping[str, int]
    again: Callable[[Source], Source]

    @property
    def says(self) -> str:
        """The configuration that is no longer true, as weights were made; "" if there is none."""
        return self.path if self.formats else ""


# How notes on optimizer states say what to do with them. What is computed of several checkpoints has none.
STATES_ARE_CONVERTED = ". Use --optimizer PATH for its states"
THEIR_STATES_ARE_CONVERTED = "--optimizer PATH for the optimizer states, "


class StateFacts(NamedTuple):
    """What is known of the optimizer's states, beside their values.

    `error` says why they cannot be converted although the weights can. `equal` are stored twice, by name, and must be
    equal; of those that are `alike`, each rank keeps its own copy: a difference is worth a warning. `inputs` identifies
    what was read only for them; it tells more of a file that was read for the weights too. `step` is how many steps the
    optimizer has made, where `formats.training` has looked.
    """

    error: CkptconvError | None = None
    equal: Sequence[Equal] = ()
    alike: Sequence[Equal] = ()
    inputs: Mapping[str, Hashable] = {}
    step: int | None = None


class FileFacts(NamedTuple):
    """What the files of a checkpoint have beside tensors.

    `opaque` are the names of classes kept as inert data; `mentioned` are all names that its pickles mention. `records`
    maps a file's path to its storages, with their checksums. `digests` are the SHA-256 of files by path, as the
    checkpoint states them.
    """

    opaque: Sequence[str] = ()
    mentioned: Sequence[str] = ()
    records: Mapping[str, Records] = {}
    digests: Mapping[str, str] = {}

    @classmethod
    def of_all(cls, every: Iterable[FileFacts]) -> FileFacts:
        """Return those of several checkpoints together."""
        several = list(every)
        return cls(
            list(dict.fromkeys(name for each in several for name in each.opaque)),
            list(dict.fromkeys(name for each in several for name in each.mentioned)),
            {path: records for each in several for path, records in each.records.items()},
            {path: digest for each in several for path, digest in each.digests.items()},
        )


class Defaults(NamedTuple):
    """The dtype of an output, and the bytes of its files at most, unless the user asks for others."""

    dtype: str = "keep"
    shard_size: int | None = None


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
    structured: bool = True
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
    grouping: Mapping[str, str] = {}
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


# What fields are that must be there, as formats of other packages may mistake them.
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
    - `optimizer` is the optimizer's state dict by parameter name, if the checkpoint tells the names; `of_states` are
      facts about it.
    - `weights_error` says why its tensors are no weights, although they can be read and shown.
    - `trees` maps a key to a tree that holds what is under it, if `weights` does not.
    - `training` is what else DeepSpeed needs to resume the training, if DeepSpeed wrote it.
    - `owners` are ties that the checkpoint itself names: {alias: owner}.
    - `unaccounted` are names whose data is nowhere in it: the user excludes them by name, or it is an error.
    - `equal` are tensors that are stored twice, by name; if they differ, the checkpoint is corrupt.
    - `counts` are the numbers of tensors in the weights, by kind.
    - `files` is what its files have beside tensors.
    - `warnings` are causes for concern; `notes` are not.
    - `values` are values that it holds beside `weights`, by name, for people: they are not converted.
    - `inputs` identifies every file that was read, by a name relative to the source, as an `Input` or by what tells its
      content from others alone.
    - `companions` are small files beside it, or beside its reference, by name, that are copied along with the weights.
    - `config` is what the config.json among the companions says, or one that lies where the output goes.
    - `computed` says of what else its tensors are computed, by the names of `outputs.computed.COMPUTED`; they are
      as they are stored, but for weights in the place of quantized ones.
    - `wanted` is what was read. If that was not everything, `reread` opens the checkpoint again for more.
    - `pointers` are the paths of files that only say where the checkpoint is, such as `latest`.
    - `shards` are the paths of the files of a sharded set: the output keeps the grouping. Of a set that is only
      described, `grouping` has {tensor: name of its file}.
    - `part` says which it is of several: the tensor-parallel rank, or the folder in a pipeline of diffusers, "" for the
      pipeline's own.
    - `pieces` matches the names of tensors that are pieces of parameters; these are not converted.
    - `metadata` is the metadata of safetensors files, `remarks` that part of it which an output keeps.
    - `stored` are the tensors of a safetensors output that has a structure record.
    - `defaults` apply unless the user asks for something else.
    """

    __slots__ = ()

    # mypy would not know the fields of what this makes.
    if not TYPE_CHECKING:

        def __new__(cls, *values: Any, **fields: Any) -> Source:
            """Make a source, and check it."""
            made = super().__new__(cls, *values, **fields)
            made.__post_init__()
            return made

        @classmethod
        def _make(cls, values: Iterable[Any]) -> Source:
            return cls(*values)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if its fields contradict what is said of them, or one another."""
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name} of its Source must be {kind.__name__}, not {type(getattr(self, name)).__name__}"
                )
        if not self.structured and not isinstance(self.weights, Mapping):
            raise TypeError(f"weights of its Source must be a flat state dict, not {type(self.weights).__name__}")
        wrong = {
            "part is no rank": isinstance(self.part, int) and self.part < 0,
            "grouping excludes shards": bool(self.grouping and self.shards),
            "config.json was not read": "config.json" in self.companions and self.config is None,
            "dtype is not known": self.defaults.dtype not in ("keep", *DTYPES),
            "shard_size is not valid": self.defaults.shard_size is not None and self.defaults.shard_size < 1,
        }
        for what, is_so in wrong.items():
            if is_so:
                raise ValueError(f"{self.path}: its {what}")

    # Equal only to itself: it may be large, and some of it is no key.
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
        """Whether it has weights, and not only files that go with the models of a pipeline."""
        return self.family != PIPELINE

    @property
    def reference(self) -> Source | None:
        """The checkpoint whose names, files and dtypes an output of the weights takes over."""
        return self.computed.get("like")

    @property
    def quantized(self) -> Quantized | None:
        """What was made of quantized weights, if weights were asked for in their place."""
        return self.computed.get("dequantize")

    def computing(self, **given: Any) -> Source:
        """Return it as one that is computed of what is `given` too, by the names of `computed`; without those that are
        None."""
        every = {**self.computed, **given}
        return self._replace(computed={name: each for name, each in every.items() if each is not None})

    @property
    def folder(self) -> str:
        """The directory in OUTPUT that its output has if it is one of several sources; "" for OUTPUT itself."""
        return self.component or ("" if self.model_rank is None else f"mp_rank_{self.model_rank:02d}")

    @property
    def stem(self) -> str:
        """How the names of the files of its output in a directory begin: as its own if these are those of diffusers, of
        open_clip or of PEFT's adapters, or those of its reference."""
        names = (self.reference or self).inputs
        stems = (stem for beginning, stem in _STEMS.items() if any(name.startswith(beginning) for name in names))
        return next(stems, MODEL)

    @property
    def inputs_of_all(self) -> Mapping[str, Hashable]:
        """`inputs`, and those of the optimizer's states."""
        return {**self.inputs, **self.of_states.inputs}

    def all_inputs(self) -> Mapping[str, Hashable]:
        """Return `inputs`, and likewise the companions, and the files of the reference as `--like/<name>`."""
        companions = {name: Input.stamped(file) for name, file in self.companions.items()}
        reference = self.reference.inputs if self.reference else {}
        return {**self.inputs, **companions, **{f"{OF_REFERENCE}{name}": each for name, each in reference.items()}}

    def content(self, name: str, file: File, change: Change) -> LazyTensor:
        """Return the bytes of the companion `file` as the output has them: as they are, but for a configuration that
        is no longer true, which says what `change` does."""
        if name != "config.json" or self.config is None:
            return whole(file)
        from ckptconv.formats import configs

        if self.quantized and self.quantized.says != file.path:
            change = change._replace(plain=False)  # it is a reference's, which says nothing of these
        if self.reference:
            change = change._replace(settings={})
        told = configs.changed(self.config, change)
        if told == self.config:
            return whole(file)
        data = configs.text_of(told).encode()
        return Inline(data, DTYPES["uint8"], (len(data),))

    @property
    def hints(self) -> list[str]:
        """What renames the weights as their module has them, if wrappers have put a prefix before all of their names:
        of no use to a user who has chosen names."""
        tree, key = self.weights, ""
        if self.structured and isinstance(tree, Mapping):
            key = next((each for each in MODEL_KEYS if isinstance(tree.get(each), Mapping)), "")
            tree = tree[key] if key else tree
        names = tree if isinstance(tree, Mapping) and all(map(_is_text, tree)) else ()
        prefix = wrapper(names)
        # Of a model in one file, this is mostly the name of a module of its own.
        if not prefix or (prefix == WRAPPERS[-1] and (self.structured or self.family == "safetensors")):
            return []
        how = f"--key {key} --strip-prefix {prefix}" if key else f"--strip-prefix {prefix}"
        every = f"Every name under {key}" if key else "Every name"
        return [f"{every} begins with {prefix!r}, the prefix of a model wrapper; {how} removes it."]

    def tree(self, key: str) -> Any:
        """Return the tree that holds what is under `key`: the weights, or a larger one."""
        return self.trees.get(key, self.weights)

    def check_weights(self) -> None:
        """Raise `weights_error`, if there is one."""
        if self.weights_error:
            raise self.weights_error

    def told(self) -> list[str]:
        """Return its notes, and that no weight was quantized where those were asked for."""
        idle = ["--dequantize has no effect: no weight is quantized."]
        return [*self.notes, *(idle if self.quantized and not self.quantized.formats else [])]

    def states(self) -> Any:
        """Return the optimizer's state dict by parameter name; None if the checkpoint does not tell the names.

        Raise the error of states that cannot be converted, if there is one.
        """
        if self.of_states.error:
            raise self.of_states.error
        return self.optimizer


def _without_states(note: str) -> str:
    return note.replace(STATES_ARE_CONVERTED, "").replace(THEIR_STATES_ARE_CONVERTED, "")


def combined(source: Source, terms: Sequence[Source], inputs: Mapping[str, Hashable], **given: Any) -> Source:
    """Return `source`, one of `terms`, as one whose tensors are computed of all of them, as its entries of `computed`
    say that are `given`; `inputs` identify what was read of the others."""
    return source.computing(**given)._replace(
        inputs={**source.inputs, **inputs},
        equal=[pair for each in terms for pair in each.equal],
        files=FileFacts.of_all(each.files for each in terms),
        warnings=list(dict.fromkeys(text for each in terms for text in each.warnings)),
        notes=list(dict.fromkeys(_without_states(text) for each in terms for text in each.notes)),
        bytes_read=sum(each.bytes_read for each in terms),
        reread=None,
    )


class Opened(Protocol):
    """What has been opened, and knows its `Source`."""

    @property
    def source(self) -> Source: ...


def source_of(given: str | os.PathLike[str] | Source | Opened) -> str | Source:
    """Return the `Source` of an opened checkpoint, or itself; a path as text. Raise UsageError for anything else."""
    source = given if isinstance(given, Source) else getattr(given, "source", None)
    return source if isinstance(source, Source) else parse_path(given)


def _is_text(key: Any) -> bool:
    return type(key) is str

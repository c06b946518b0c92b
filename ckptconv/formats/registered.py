"""The formats of input, and their modules' functions for single files: a line each, with the names of modules, which
are imported when their turn comes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.formats import model_files
from ckptconv.formats.model_files import SAFETENSORS, TORCH
from ckptconv.formats.source import PIPELINE

if TYPE_CHECKING:
    from ckptconv.formats.format import Format, Guess, Probe
    from ckptconv.formats.lone_file import LoneFile
    from ckptconv.formats.source import Source, Wanted
    from ckptconv.storage.location import Location

Sniff: TypeAlias = "Callable[[Probe], Guess | None]"
# The digits, each of which # stands for in the words below.
_DIGITS = str.maketrans("0123456789", "#" * 10)


def has_one(text: str, words: tuple[str, ...]) -> bool:
    """Return whether one of `words` is in `text`; # in a word stands for any digit."""
    plain = text.translate(_DIGITS) if words else ""
    return any(word in text or word in plain for word in words)


class KnownFormat:
    """A format of ours: its family, and the module whose `read` opens it.

    It is recognized by `sniff`, or by that function of the module `by` beside it, "" for the same module. That module
    is imported for directories, and for a file with one of `words` in its name (# is any digit) or `head` in its first
    bytes.
    """

    def __init__(
        self, family: str, reader: str, *words: str, by: str = "", head: bytes = b"", sniff: str | Sniff = "sniff"
    ) -> None:
        self.FAMILY, self.reader, self._words, self._head, self._sniff = family, reader, words, head, sniff
        self._by = f"{reader.rpartition('.')[0]}.{by}" if by else reader

    def sniff(self, probe: Probe) -> Guess | None:
        """Return how sure the format is of the content of a path; None if it does not read the path."""
        if not isinstance(self._sniff, str):
            return self._sniff(probe)
        is_asked = (
            not probe.is_file
            or has_one(probe.place.name, self._words)
            or (bool(self._head) and self._head in probe.head[0])
        )
        guess: Guess | None = getattr(import_module(self._by), self._sniff)(probe) if is_asked else None
        return guess

    def read(self, place: Location, wanted: Wanted) -> Source:
        """Open the checkpoint at `place`."""
        source: Source = import_module(self.reader).read(place, wanted)
        return source


class Lone(NamedTuple):
    """Kinds of files that are one of many: the module that has them as `LONE`. They are asked for a file whose path has
    one of `words` (# is any digit), that has one of `keys` in its tree or its metadata, or `part` in any key; with
    `hollow`, for one with a tensor of shape [0] too."""

    module: str
    words: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    part: str = ""
    hollow: bool = False

    def may_have(self, file: LoneFile) -> bool:
        """Return whether a file may be of one of these kinds."""
        if has_one(file.place.path, self.words) or any(map(file.has, self.keys)) or (self.hollow and file.is_hollow):
            return True
        return bool(self.part) and next(file.keys(self.part), None) is not None


# Families of checkpoints other than those of whole models, and the name of Megatron-core's for people.
DCP, DEEPSPEED = "dcp", "deepspeed"
MEGATRON = "torch_dist checkpoint of Megatron-core"
# Words in the names of DeepSpeed's files, and keys in them.
ZERO = ("_states.pt", "fp32.pt", "exp_avg", "optimizer_state.pt", "zero/")
ZERO_KEYS = ("optimizer_state_dict", "ds_version", "dp_world_size", "mp_world_size")
# Words before the number of a rank in the name of its file.
RANKS = ("rank", "fsdp", "dp", "shard", "gpu", "worker", "proc")
# The order in which the formats are asked, after those of the expected family. If a directory holds things of several
# formats, the first one wins.
FORMATS: tuple[Format, ...] = (
    KnownFormat(SAFETENSORS, "ckptconv.features.nanotron.step"),
    KnownFormat(DCP, "ckptconv.features.dcp.read", ".metadata", ".distcp", by="locate", head=b"torch.distributed.c"),
    KnownFormat(DEEPSPEED, "ckptconv.features.deepspeed.read", "_states.pt", "latest", "zero_to_fp32", by="locate"),
    KnownFormat(TORCH, "ckptconv.features.model_parallel.megatron"),
    KnownFormat(TORCH, "ckptconv.features.model_parallel.meta"),
    KnownFormat(TORCH, "ckptconv.features.torch_checkpointing.read", "metadata.pkl", by="locate"),
    KnownFormat(TORCH, "ckptconv.features.ranks.read", *RANKS, by="locate"),
    KnownFormat(DCP, "ckptconv.features.dcp.read", by="locate", sniff="sniff_below"),
    KnownFormat(TORCH, "ckptconv.features.torch_checkpointing.read", by="locate", sniff="sniff_below"),
    KnownFormat(TORCH, "ckptconv.features.ranks.read", by="locate", sniff="sniff_below"),
    KnownFormat(DEEPSPEED, "ckptconv.features.deepspeed.read", by="locate", sniff="sniff_below"),
    KnownFormat(SAFETENSORS, "ckptconv.features.virtual.description", ".virtual.json", head=b'{"ckptconv.virtual"'),
    KnownFormat("npz", "ckptconv.features.npz.read", head=b".npy"),
    KnownFormat("dduf", "ckptconv.features.dduf.read", ".dduf"),
    KnownFormat("nemo", "ckptconv.features.nemo.read", ".nemo"),
    KnownFormat("exported", "ckptconv.features.exported.read", ".pt2"),
    KnownFormat("orbax", "ckptconv.features.orbax.read", "_METADATA", "manifest.ocdbt", by="locate"),
    KnownFormat(SAFETENSORS, "ckptconv.formats.safetensors", sniff=model_files.sniff_safetensors),
    KnownFormat(TORCH, "ckptconv.features.torch_shards.read", sniff=model_files.sniff_torch_set),
    KnownFormat(TORCH, "ckptconv.formats.torch.file", sniff=model_files.sniff_torch),
)
# The order in which the kinds of files that are one of many are asked: `alone` has those of no format that is read.
LONE: tuple[Lone, ...] = (
    Lone("ckptconv.features.deepspeed.alone", ZERO, ZERO_KEYS),
    Lone("ckptconv.features.megatron_core.alone", ("common.pt",)),
    Lone("ckptconv.features.model_parallel.megatron", ("distrib_optim", "mp_rank_", "tp_rank_"), ("args",)),
    Lone("ckptconv.features.model_parallel.meta", ("consolidated.",), ("tok_embeddings.weight",)),
    Lone("ckptconv.features.dcp.shards", ("shard-#",), ("DCP_SHARDING_INFO",)),
    Lone("ckptconv.features.nanotron.step", keys=("data",)),
    Lone("ckptconv.formats.alone", ("#",), ("shard_metadata",)),
    Lone("ckptconv.features.deltas.alone", (".safetensors",)),
    Lone("ckptconv.features.ranks.alone", RANKS, part="flat_param"),
    Lone("ckptconv.features.torch_checkpointing.alone", ("#.pt", "#.safetensors")),
    Lone("ckptconv.features.deepspeed.placeholders", hollow=True),
)
# The feature that finds formats of other packages, which are asked last. `entries` in its folder has `installed`, which
# yields them, `named`, the one of a family, and `suspects`: in words, those that may have caused a failure.
PLUGINS = "plugins"
# The module that recognizes files of other programs, which are not read. There, `check_file`, `check_archive`,
# `check_directory` and `check_below` raise an error that describes such a path; `is_sign` tells by a name whether its
# directory is one.
FOREIGN: tuple[str, ...] = (
    "ckptconv.features.foreign.known",
)  # fmt: skip
# The feature that keeps input from a pipe, so that it can be read at any offset: `take_pipe` of `pipes` in its folder
# returns the name under which it is read.
PIPES = "pipes"
# The feature that finds the states of optimizers beside weights: `training` in its folder has `with_states_beside` and
# `with_optimizer`, which return a source with those in its own file, and with those in a file next to it, too.
STATES = "optimizer_states"
# The feature that names such states if they are stored by the number of their parameter. `among` in its folder has
# `told(optimizers, names, described, options)`: warnings and notes on optimizers among the weights of an output.
NUMBERS = "optimizer_numbers"
# Modules that join the distributed tensors of a file of torch.save which has all of their parts, as that of a single
# rank has. There, `read_alone` returns a source; None if parts are missing.
JOINING: tuple[str, ...] = (
    "ckptconv.features.ranks.read",
)  # fmt: skip
# The feature that opens a checkpoint rank by rank, for --per-rank: `ranks_to_convert` of `read` in its folder returns
# the numbers of the tensor-parallel ranks at a place.
BY_RANK = "deepspeed"


# The modules for outputs that hold more than weights, by their contents. There, `needs_states` tells whether options
# ask for the optimizer's states of the checkpoint at a path, and `fitted` returns a source, which was opened as that
# path, with all contents that are needed.
MADE_OF: dict[str, str] = {
    "dcp": "ckptconv.features.dcp_output.taking",
    "megatron": "ckptconv.features.megatron_output.taking",
    "universal": "ckptconv.features.universal.taking",
}
# Safetensors that are no weights: a key in the metadata of their index, and the module. There, `no_weights` returns
# what they are, and what to do with them, of their path.
NO_WEIGHTS: dict[str, str] = {
    "delta_encoding": "ckptconv.features.deltas.alone",
}
# Pipelines, which are directories of several models, each in a folder of its own: a name in one, and the module. There,
# `is_one(place, family, copies)` tells whether a directory is one where a `family` is expected, and its other files are
# copied or not; `read(place)` returns the folders of its `models`, "" for its own, and the sources of `others`, its
# other files; `together(place, sources)` all of its sources as one; `hint(place)` what to do if one model is needed.
# Those that copy files call `check_copied(source, files, options)`, which raises UsageError if a name that marks a
# pipeline is copied without it, and `cast_warnings(source, dtype, options)` about a part that is cast.
PIPELINES: dict[str, str] = {
    "model_index.json": "ckptconv.features.diffusers.pipelines",
    "modules.json": "ckptconv.features.diffusers.pipelines",
}
# If one of these families, or any, is expected, a pipeline may be meant. Otherwise its directory is not searched.
_OF_PIPELINES = ("", PIPELINE, SAFETENSORS, TORCH)


def pipelines(names: Iterable[str]) -> list[Any]:
    """Return the modules of the pipelines that one of `names` marks."""
    every = set(names)
    return [*map(import_module, dict.fromkeys(module for name, module in PIPELINES.items() if name in every))]


def reader_of(place: Location, family: str = "", *, copies: bool = True) -> Any:
    """Return the module that reads `place` as a pipeline; None if it is none, or not meant."""
    names = place.names if family in _OF_PIPELINES and place.kind == "directory" else ()
    return next((module for module in pipelines(names) if module.is_one(place, family, copies=copies)), None)


# Companions, small files of model directories that are copied with weights: how their names end, and the module with
# `ROWS` of them.
FILES_OF_MODELS: dict[str, str] = {
    "": "ckptconv.features.companions.directory",
    ".json": "ckptconv.features.diffusers.files",
}
# The modules that copy companions, by step. There, for the "source" of an output of weights, `accompanied` returns it
# with its companions, and its target; for a "plan", `planned` returns the plans of these files, with further notices,
# and `configuration` that of the output; to "verify", `with_copied` returns a source with those that an output has, and
# `compared` yields them and their originals.
COPYING: dict[str, str] = {
    "source": "ckptconv.features.companions.deciding",
    "plan": "ckptconv.features.companions.contents",
}


def copying(step: str) -> list[Any]:
    """Return the module that copies companions at a `step`; none without that feature."""
    return [import_module(COPYING[step])] if step in COPYING else []


def is_companion_name(name: str) -> bool:
    """Return whether a file of that name may be a companion, which is copied with the weights."""
    return any(name in _names_in(module) for end, module in FILES_OF_MODELS.items() if name.endswith(end))


@functools.cache
def _names_in(module: str) -> frozenset[str]:
    """Return the names of companions in the `ROWS` of a module."""
    return frozenset(name for row in import_module(module).ROWS for name in row.names.split())


# Files that describe others, which are not written: how their names end, and the module. There, `is_one` tells by a
# path and the first bytes whether that is one; `load` returns what it says: plans of the `files`, what their source was
# `called`, the `roots` that it reads from, and its own `identity`.
DESCRIBING: dict[str, str] = {
    ".virtual.json": "ckptconv.features.virtual.description",
}


def describing(path: str) -> str:
    """Return the module that reads the description at `path`, by its name; "" if that is none."""
    return next((module for suffix, module in DESCRIBING.items() if path.endswith(suffix)), "")


# Ways in which names of tensors in safetensors tell a tree: how the first name begins, and the module. There, `is_used`
# tells whether all names are such; `restored` returns the tree of the files, and the names of classes in it that are
# kept as `Opaque`; `CALLED` is what people call it.
NAMINGS: dict[str, str] = {
    "gA": "ckptconv.features.olmo.names",
}

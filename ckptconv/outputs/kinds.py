"""The kinds of output, and which options each of them heeds. Pure.

An option that no entry of a kind's tables names has its effect in every output of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.formats.model_files import SAFETENSORS, SUFFIX
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.options.table import OPTIONS, Options
from ckptconv.process import has_feature, lacking

_NONE: Mapping[str, Any] = MappingProxyType({})


def only(options: str, kind: str, hint: str = "") -> dict[str, tuple[str, str]]:
    """Return the refusals of options that apply only to outputs of one kind, with a hint."""
    return dict.fromkeys(options.split(), (f"{{}} applies only to {kind}.", hint))


# Options that are about one kind of output: the refusal of the other kinds, and the advice.
_DISTRIBUTED, _ADD = "a checkpoint of torch.distributed.checkpoint", "Add --to, such as --to dcp."
OF_CHECKPOINT = {
    **only("chunks states optimizer_key flat_optimizer fill_states", _DISTRIBUTED, _ADD),
    **only("model_key", _DISTRIBUTED, f"{_ADD} --key PATH takes a part of INPUT."),
}
OF_UNIVERSAL = only("zero_stage fresh_optimizer", "a universal checkpoint", "Add --to universal, or --universal DIR.")
OF_MODELS = only("for_hub", "weights in safetensors, with their configuration", "Leave it out.")
OF_CODES = dict.fromkeys(
    ("quantize", "requantize", "keep"),
    ("{} writes codes and scales, which programs can load only from safetensors.", "Give a directory as OUTPUT."),
)


class OutputKind(NamedTuple):
    """A kind of output.

    `holds` is the manifest's word for its content, or that of files that it describes, and `form` the word for its form
    on a disk: "file", one of `TREES`, which is replaced as a whole, or of `targets.DIRECTORIES`. `refused` are the
    options that such an output cannot have, {option: (message, hint)}; `idle` those that change nothing in it, {option:
    why}. `suffixes` are the ends of names that ask for it, and `to` is the value of `--to` that does; kinds that share
    a value are distinguished by the name. `compared` is the module whose `pairs` compares it with its source, for the
    feature `verify`, or a module of that: with its plan, unless there is a reader that says better what differs; "" if
    it is not verified. `plan` is the module whose
    `plan` plans it. `called` is the usual word for a file whose name has one of the `suffixes`. `key` is
    the key of the weights in it if the user names none. `check` raises UsageError for options that contradict it.
    `divided` returns the paths of the outputs that it consists of, below its own, with the options of each; None if it
    is one. `like` is the module whose `like` returns the targets and options of an output that is cut like the
    checkpoint that `--like` names; "" if that is a reference.
    """

    holds: str
    form: str
    refused: Mapping[str, tuple[str, str]] = _NONE
    idle: Mapping[str, str] = _NONE
    suffixes: tuple[str, ...] = ()
    to: str = ""
    compared: str = ".paired"
    plan: str = "ckptconv.outputs.planning"
    called: str = ""
    key: str = ""
    check: Callable[[Options], None] | None = None
    divided: Callable[[str, Options], dict[str, Options]] | None = None
    like: str = ""


class OfFeature(NamedTuple):
    """A kind of output that a feature writes: `kind.py` in its folder, or `entry`, if it writes several kinds. That is
    imported when an output is of this kind, and has its entry as `KIND`. `holds`, `suffixes` and `to` are those of its
    entry; `option` asks for it in addition to OUTPUT; `folders` are the names of those that it may consist of. The line
    stays in a copy without the feature: the kind is refused by name then."""

    feature: str
    holds: str
    suffixes: tuple[str, ...] = ()
    to: str = ""
    option: str = ""
    entry: str = "kind"
    folders: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return f"ckptconv.features.{self.feature}.{self.entry}"

    @property
    def exists(self) -> bool:
        return has_feature(self.feature)


ELSEWHERE = {**OF_CHECKPOINT, **OF_UNIVERSAL}
IN_SAFETENSORS = {"opaque": "has no effect on safetensors, which store objects as data; --no-structure omits these"}
_STATES = {
    **IN_SAFETENSORS,
    **dict.fromkeys(("key", "like", "partial", "fill", "master"), "has no effect: it applies only to weights"),
    **dict.fromkeys(("quantize", "requantize", "keep"), "has no effect: optimizer states are not quantized"),
    "exclude_frozen_parameters": "has no effect: frozen parameters have no optimizer states",
    "copy_config": "copies nothing: from_pretrained reads no optimizer states",
}
# The directories of a step that accelerate loads with FSDP2: of the weights, and of the optimizer's states.
ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")

# The module that compares safetensors with their source: it reads them by itself.
_READER = ".safetensors"

# Kinds by name. The path of an output and the options decide its kind.
_EVERY: Mapping[str, OutputKind | OfFeature] = {
    "file": OutputKind("weights", "file", ELSEWHERE, IN_SAFETENSORS, (SUFFIX,), SAFETENSORS, _READER),
    "directory": OutputKind("weights", "directory", ELSEWHERE, IN_SAFETENSORS, to=SAFETENSORS, compared=_READER),
    "torch": OfFeature("torch_output", "weights", TORCH_SUFFIXES, to="pt"),
    "virtual": OfFeature("virtual", "weights", (".virtual.json",)),
    "states": OutputKind("optimizer", "directory", {**ELSEWHERE, **OF_MODELS}, _STATES, compared=_READER),
    "states-file": OutputKind("optimizer", "file", {**ELSEWHERE, **OF_MODELS}, _STATES, compared=_READER),
    "universal": OfFeature("universal", "universal", to="universal", option="universal"),
    "dcp": OfFeature("dcp_output", "dcp", to="dcp"),
    "dcp-hf": OfFeature("dcp_output", "dcp", to="dcp-hf", entry="shards_kind"),
    "accelerate": OfFeature("dcp_output", "dcp", to="accelerate", entry="accelerate_kind", folders=ACCELERATE),
    "megatron": OfFeature("megatron_output", "megatron", to="megatron", folders=("release",)),
    "megatron-te": OfFeature("megatron_output", "megatron", to="megatron-te", entry="te_kind", folders=("release",)),
    "megatron-fsdp": OfFeature("megatron_fsdp", "megatron", to="megatron-fsdp", folders=("release",)),
    "torch-checkpointing": OfFeature("torch_checkpointing", "dcp", to="torch-checkpointing"),
}
KINDS = {name: kind for name, kind in _EVERY.items() if isinstance(kind, OutputKind) or kind.exists}
# The values of `--to` whose features are missing, with these features.
ABSENT = {
    kind.to: kind.feature for kind in _EVERY.values() if isinstance(kind, OfFeature) and kind.to and not kind.exists
}
# The values of `--to`, each with its kinds.
NAMED: Mapping[str, tuple[str, ...]] = {
    kind.to: tuple(name for name, other in KINDS.items() if other.to == kind.to) for kind in KINDS.values() if kind.to
}
# Words that people use for these values.
OTHER_WORDS = {
    **dict.fromkeys(("torch", "pytorch", "pth", "bin", "ckpt", "pickle"), "pt"),
    **dict.fromkeys(("st", "safetensor", "hf", "huggingface", "transformers"), "safetensors"),
    **dict.fromkeys(("deepspeed", "zero", "zero1", "zero2", "zero3", "ds", "ucp"), "universal"),
    **dict.fromkeys(("fsdp", "fsdp2", "distcp", "torchtitan", "distributed"), "dcp"),
    "torch-dist": "megatron",
    "fsdp-dtensor": "megatron-fsdp",
}
# The kinds of directories that only `--to` asks for, by its value; and those that hold what a training resumes from.
DIRECTORY_KINDS = {
    name: kind for name, kind in KINDS.items() if isinstance(kind, OfFeature) and not (kind.suffixes or kind.option)
}
CHECKPOINTS = tuple(name for name, kind in DIRECTORY_KINDS.items() if kind.holds != "weights")
# The kinds that consist of several outputs, each in a folder of a known name.
DIVIDED = {name: kind for name, kind in KINDS.items() if isinstance(kind, OfFeature) and kind.folders}
# The options that ask for further outputs.
FURTHER = ("optimizer", *(kind.option for kind in KINDS.values() if isinstance(kind, OfFeature) and kind.option))


def entry_of(name: str) -> OutputKind:
    """Return the entry of a kind of output. Raise UsageError if its feature is missing."""
    kind = KINDS.get(name) or _EVERY[name]
    if isinstance(kind, OfFeature) and name not in KINDS:
        raise lacking(f"An output of the kind {name!r}", kind.feature)
    entry: OutputKind = import_module(kind.module).KIND if isinstance(kind, OfFeature) else kind
    return entry


def further(options: Options) -> dict[str, str]:
    """Return the requested further outputs: the kind of each, and its path."""
    return {name: path for name in FURTHER if (path := options.asked(name))}


def option_for(to: str) -> str:
    """Return the option that asks for a value of `to` as a further kind of output; "" if none does."""
    kind = KINDS[NAMED[to][0]] if to else None
    return kind.option if isinstance(kind, OfFeature) else ""


def kind_by_suffix(path: str) -> str:
    """Return the kind of output that the suffix of a path asks for; "" if it has none of theirs."""
    return next((name for name, kind in {**_EVERY, **KINDS}.items() if path.endswith(kind.suffixes)), "")


def kind_of(path: str) -> str:
    """Return the kind of output of weights that a path asks for: a directory, unless it has the suffix of a file."""
    return kind_by_suffix(path) or "directory"


def flag(option: str) -> str:
    """Return the name of an option on the command line."""
    return OPTIONS[option].flags[0].partition("/")[0]


def is_set(option: str, options: Options) -> bool:
    """Return whether an option asks for something other than its default."""
    value = options.asked(option)
    return value is not None and (value is not False or OPTIONS[option].default is True)


def check_options(kinds: Iterable[str], options: Options) -> None:
    """Raise UsageError for a given option that some output refuses, if no output of `kinds` heeds it."""
    every = [entry_of(name) for name in kinds]
    for option in ("part", "per_rank", *FURTHER) if options.for_hub else ():
        if is_set(option, options):
            raise UsageError(
                f"{flag('for_hub')} writes a model to publish, and cannot be combined with {flag(option)}.",
                "Convert twice.",
            )
    for option in dict.fromkeys(option for kind in every for option in kind.refused):
        if is_set(option, options) and all(option in kind.refused or option in kind.idle for kind in every):
            message, hint = next(kind.refused[option] for kind in every if option in kind.refused)
            raise UsageError(message.format(flag(option)), hint)


def idle(kind: str, options: Options) -> dict[str, str]:
    """Return the given options that change nothing in an output of this kind, and why: {option: reason}."""
    return {flag(option): why for option, why in entry_of(kind).idle.items() if is_set(option, options)}

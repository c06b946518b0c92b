"""The options of conversions, and of `convert` alone, that features add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptconv.process import has_feature, of_feature

if TYPE_CHECKING:
    from ckptconv.errors import CkptconvError

# The options of conversions by feature: `options.py` in its folder has them as `GIVEN`, a subclass of `Given`, which
# imports nothing of the table. The lines stay where a feature is not: its options are refused by name then.
FEATURES: Mapping[str, str] = {
    "optimizer_numbers": "order",
    "quantized": "dequantize quantize requantize keep",
    "provenance": "attest",
    "maps": "map size",
    "dcp_output": "chunks model_key optimizer_key flat_optimizer fill_states",
    "like": "like partial fill",
    "universal": "universal zero_stage fresh_optimizer",
    "parts": "part",
    "steps": "last_good",
    "model_parts": "layers experts component config",
    "vocab": "vocab",
    "graft": "graft",
    "batch": "output_dir output_name",
    "cluster": "dask",
    "depfile": "depfile",
    "companions": "copy_config",
    "attacks": "inert",
    "verify": "verify",
}
# Flags of these options that are more than their names.
FLAGS: Mapping[str, tuple[str, ...]] = {"copy_config": ("--copy-config/--no-copy-config", " /--no-extras")}
# Of these, those whose options `convert` alone has, on the command line: `command.py` in the folder has
# `carry_out(words, options)`, which does what these ask for instead, and returns the exit code.
CARRIED_OUT = ("batch",)
# Of these, those whose workers carry out a conversion, on the command line, if their one option asks for it:
# `executor.py` has a context manager `executor`, from the value to a `concurrent.futures.Executor`.
EXECUTORS = ("cluster",)
# Features that change the place of a source, or a source when it is opened, in this order, and the options that ask for
# it, or `recorded`: the record in an output about the change of its source. `opening.py` in the folder has some of the
# following functions. The options `asked` have the dtype among them; `reaching` is how checkpoints are reached.
# - `placed(path, asked, reaching)` returns the path that is opened instead of `path`;
# - `wanted(wanted, asked, reaching)` returns the parts to be read;
# - `orders(asked, reaching)` returns the orders of parameters that the feature has, if it is the first that has some;
#   `states` among the options says whether they are needed already;
# - `opened(source, asked, reaching)` returns the source as the options say;
# - `warned(sources)` returns sources as outputs have them, with warnings if the options changed nothing;
# - `advise(error, path, options)` adds an option that helps to the error of a conversion of `path`.
OPENED: Mapping[str, str] = {
    "optimizer_numbers": "order",
    "like": "like",
    "steps": "last_good",
    "megatron_core": "map recorded",
    "model_parts": "layers experts component config",
    "vocab": "vocab",
    "graft": "graft",
    "quantized": "dequantize requantize",
    "maps": "map size recorded",
    "megatron_adapters": "map recorded",
    "diffusers": "",
}
# Of these, the features that do so for an output of weights alone: they make it like another checkpoint.
FITTED = ("like",)


def names_of(*features: str) -> dict[str, str]:
    """Return the names of the options of these features, each with its feature. Missing features have none."""
    return {name: feature for feature in features if has_feature(feature) for name in FEATURES[feature].split()}


def missing(name: str) -> str:
    """Return the missing feature of the option `name`; "" if no missing feature has it."""
    every = (feature for feature, names in FEATURES.items() if name in names.split())
    return next((feature for feature in every if not has_feature(feature)), "")


def several(sentence: str, words: str = "INPUT...") -> str:
    """Return `sentence` with the command that converts several inputs in place of {}; "" if no feature has one."""
    return "" if missing("output_dir") else sentence.format(f"ckptconv convert {words} --output-dir DIR")


def opening(options: Mapping[str, Any], hook: str) -> list[Callable[..., Any]]:
    """Return the functions `hook` of the features that change a source by `options`."""
    return [function for feature in _chosen(options) for function in _hooks(feature, hook)]


def placed(path: str, options: Mapping[str, Any], reaching: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path to open instead of `path`, as `options` specify, and the remaining options."""
    left = dict(options)
    for feature in _chosen(options):
        for place in _hooks(feature, "placed"):
            path = place(path, options, reaching)
            left = {name: value for name, value in left.items() if name not in OPENED[feature].split()}
    return path, left


def advise(error: CkptconvError, path: str, options: Mapping[str, Any]) -> None:
    """Add a helpful option of a feature to the error from converting `path`."""
    for feature in OPENED:
        for hook in _hooks(feature, "advise"):
            hook(error, path, options)


def _chosen(options: Mapping[str, Any]) -> list[str]:
    return [feature for feature, names in OPENED.items() if any(options.get(name) for name in names.split())]


def _hooks(feature: str, hook: str) -> list[Callable[..., Any]]:
    """Return the function `hook` of the module `opening` of a feature, if it has one."""
    module = of_feature(feature, "opening")
    return [getattr(module, hook)] if hasattr(module, hook) else []

"""PEFT's names of tensors: an adapter as its modules, each with its factors and its other trained tensors.

Source: PEFT 0.21: utils/save_and_load.py, utils/other.py (the wrappers), tuners/lora and tuners/trainable_tokens.

A module's factors are named `<module>.lora_A.weight` and `.lora_B.weight`, those of an embedding `.lora_embedding_A`
and `_B`, DoRA's lengths `.lora_magnitude_vector`, rows of tokens `.token_adapter.trainable_tokens_delta`. In a
training, the name of the adapter follows these words. Other tensors replace the base's. PEFT names the parameters of
experts by their stack, with one `base_layer` for each parameter that was wrapped before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.formats.adapter_names import ADAPTER_NAME, FACTOR, other_program
from ckptconv.tensors.dtypes import SUMMED
from ckptconv.tensors.lazy import LazyTensor, untagged
from ckptconv.text import brief, some

PREFIX = "base_model.model."
_LENGTHS = re.compile(rf"(?P<module>.+?)\.lora_magnitude_vector{ADAPTER_NAME}(?:\.weight)?")
_TOKENS = re.compile(rf"(?P<module>.+?)\.token_adapter\.trainable_tokens_(?P<what>delta|original){ADAPTER_NAME}")
# The places where wrappers hold the wrapped module, and copies of it; in the copies the adapter's name follows.
_WRAPPED = re.compile(rf"\.(?:base_layer|token_adapter|original_module|modules_to_save{ADAPTER_NAME})(?=\.)")
_ORIGINAL = ".original_module."
# The output projection of an adapted nn.MultiheadAttention, which is adapted with it.
_OUT = ".base_layer.out_proj"
# PEFT's name of an adapter that was given no name.
_DEFAULT = "default"
# The longest name of a module.
_LONGEST = 1024


class Factors(NamedTuple):
    """The factors of one product, whether they belong to an embedding, and the addition to the module's bias."""

    left: LazyTensor
    right: LazyTensor
    embedding: bool = False
    bias: LazyTensor | None = None


class Module(NamedTuple):
    """An adapter's parts of a module: its `factors`, in the order in which the parameters were wrapped; DoRA's
    `lengths`; the `rows` of tokens; and parameters that replace the base's, by their names, such as "weight". The
    factors change `parameter`. `attention`: the module is the output projection of this nn.MultiheadAttention."""

    factors: tuple[Factors, ...] = ()
    lengths: LazyTensor | None = None
    rows: LazyTensor | None = None
    whole: Mapping[str, LazyTensor] = {}
    parameter: str = "weight"
    attention: str = ""


def parsed(path: str, tensors: Mapping[str, LazyTensor], wanted: str = "") -> dict[str, Module]:
    """Return the modules of the adapter at `path`, which has these `tensors`. If there are several adapters, take the
    one called `wanted`.

    Every tensor is used once, or is the base's own (a wrapper holds it next to the trained one), or belongs to another
    adapter. Raise UsageError for several adapters if none is wanted, UnsupportedError for unknown names, CorruptError
    for two tensors that are the same part, one factor without the other, or factors that are no matrices.
    """
    if error := other_program(path, tensors):
        raise error
    prefixes: dict[str, str] = {}
    adapters: dict[str, str] = {}
    places: dict[str, _Place] = {}
    for full in tensors:
        before, prefix, name = full.rpartition(PREFIX)
        if not prefix or (before and not before.endswith(".")) or len(full) > _LONGEST:
            reason = f"{PREFIX} was expected at its beginning or after a dot"
            raise unknown(path, full, f"its name is too long ({len(full):,})" if len(full) > _LONGEST else reason)
        prefixes.setdefault(before, full)
        places[full] = place = _place(path, full, name)
        if place.adapter is not None:
            adapters.setdefault(place.adapter, full)
    if len(prefixes) > 1:
        raise CorruptError(
            f"{path} contains several models: {some([*prefixes.values()], 2)} have different prefixes before {PREFIX}",
            "Save only the adapted model.",
        )
    chosen = _chosen(path, adapters, wanted)
    parts: dict[_Part, tuple[str, LazyTensor]] = {}
    # The originals that modules_to_save replaces come last: they are used if nothing replaces them.
    for full, place in sorted(places.items(), key=lambda item: _ORIGINAL in item[0]):
        if place.part.what == "beside" or place.adapter not in (None, chosen):
            continue
        if place.part not in parts:
            parts[place.part] = full, untagged(tensors[full])
        elif _ORIGINAL not in full:
            raise CorruptError(
                f"{path} has {parts[place.part][0]!r} and {full!r}, but both are the same part of a module.",
                "The adapter is damaged, or mixes two adapters.",
            )
    if not parts:
        raise CorruptError(f"{path} contains no factors or other tensors to merge.", "Download or copy it again.")
    return _modules(path, parts)


class _Part(NamedTuple):
    """The part of a `module` that a tensor is. `what` names a field of `Module`, or is "beside" for the base's own
    tensor. For a factor: its depth, whether it belongs to an embedding, and its side; for a whole parameter, its
    name."""

    module: str
    what: str
    depth: int = 0
    embedding: bool = False
    which: str = ""


class _Place(NamedTuple):
    """A part, and the name of its adapter: "" if the name is left out, None if the part belongs to no single one."""

    part: _Part
    adapter: str | None


def _place(path: str, full: str, name: str) -> _Place:
    if match := FACTOR.fullmatch(name):
        is_bias = match["parameter"] == "bias"
        if is_bias and (match["side"] == "A" or match["embedding"]):
            raise unknown(path, full, "it is not a known LoRA factor")
        depth, side = match["depth"].count(".base_layer"), "bias" if is_bias else match["side"]
        return _Place(_Part(match["module"], "factors", depth, bool(match["embedding"]), side), match["adapter"] or "")
    if match := _LENGTHS.fullmatch(name):
        return _Place(_Part(match["module"], "lengths"), match["adapter"] or "")
    if match := _TOKENS.fullmatch(name):
        field = "rows" if match["what"] == "delta" else "beside"
        return _Place(_Part(match["module"], field), match["adapter"] or "")
    if "lora_" in name or "trainable_tokens_" in name:
        raise unknown(path, full, "it is not a known LoRA factor")
    adapter = next((match["adapter"] or "" for match in _WRAPPED.finditer(name) if "modules_to_save" in match[0]), None)
    module, _, parameter = _WRAPPED.sub("", f".{name}")[1:].rpartition(".")
    return _Place(_Part(module, "whole", which=parameter), adapter)


def _chosen(path: str, adapters: Mapping[str, str], wanted: str) -> str:
    """Return the name of the wanted adapter; "" if the tensors' names leave it out."""
    names = list(adapters)
    if wanted and wanted in adapters:
        return wanted
    if wanted and any(names):
        raise UsageError(f"{path} has no adapter {brief(wanted)}; it has {some(list(filter(None, names)))}.")
    # save_pretrained leaves the name out, and puts each adapter except the default one into a directory of its name.
    if wanted and wanted != _DEFAULT and wanted not in path.split("/")[-2:]:
        raise UsageError(
            f"{path} has no adapter {brief(wanted)}: it contains one adapter, without a name.",
            f"Omit --adapter, or specify the directory of {brief(wanted)} as ADAPTER.",
        )
    if len(names) > 1:
        if "" in adapters:
            raise CorruptError(
                f"{path} has some tensors with the name of an adapter and some without: "
                f"{some(list(adapters.values()), 2)}.",
                "The adapter is damaged, or mixes two adapters.",
            )
        raise UsageError(
            f"{path} contains {len(names)} adapters: {some(names)}.", f"Select one of them: --adapter {names[0]}"
        )
    return names[0] if names else ""


def _modules(path: str, parts: Mapping[_Part, tuple[str, LazyTensor]]) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    factors: dict[tuple[str, int], dict[_Part, tuple[str, LazyTensor]]] = {}
    for part, (full, tensor) in parts.items():
        module = modules.setdefault(part.module, Module())
        if part.what == "factors":
            factors.setdefault((part.module, part.depth), {})[part] = full, _numbers(path, full, tensor)
        elif part.what == "whole":
            modules[part.module] = module._replace(whole={**module.whole, part.which: tensor})
        elif part.what == "lengths":
            modules[part.module] = module._replace(lengths=_numbers(path, full, tensor))
        else:
            modules[part.module] = module._replace(rows=_numbers(path, full, tensor))
    for name, depth in sorted(factors, key=lambda at: (at[0], -at[1])):
        pair = _factors(path, name, factors[name, depth])
        modules[name] = modules[name]._replace(factors=(*modules[name].factors, pair))
    if lost := next((name for name, kept in modules.items() if kept.lengths is not None and not kept.factors), ""):
        raise CorruptError(f"{path} has DoRA magnitudes of {lost!r}, but no factors.")
    for name in [name for name in modules if name.endswith(_OUT)]:
        _attend(path, name.removesuffix(_OUT), modules)
    return modules


def _attend(path: str, attention: str, modules: dict[str, Module]) -> None:
    """Give the factors of an nn.MultiheadAttention the parameters that they change: its own and its projection's."""
    module, out = modules.get(attention, Module()), modules.pop(attention + _OUT)
    name = f"{attention}.out_proj"
    beside = modules.pop(name, Module())
    if not module.factors or not out.factors or beside.factors:
        raise unknown(path, attention + _OUT, "only an adapted nn.MultiheadAttention has such factors")
    if any(adapted.lengths is not None or adapted.factors[0].bias is not None for adapted in (module, out)):
        raise unknown(path, attention, "an nn.MultiheadAttention with DoRA or with a bias of its factors")
    modules[attention] = module._replace(parameter="in_proj_weight")
    modules[name] = out._replace(attention=attention, whole=beside.whole)


def _factors(path: str, module: str, parts: Mapping[_Part, tuple[str, LazyTensor]]) -> Factors:
    embedding = next(iter(parts)).embedding
    if differing := next((full for part, (full, _) in parts.items() if part.embedding != embedding), ""):
        first = next(iter(parts.values()))[0]
        raise CorruptError(f"{path} has {first!r} and {differing!r}, but only one of them is for an embedding.")
    sides = {part.which: named_tensor for part, named_tensor in parts.items()}
    if "A" not in sides or "B" not in sides:
        full = next(iter(parts.values()))[0]
        raise CorruptError(f"{path} has {full!r}, but not both factors (A and B) of {module!r}.")
    for full, tensor in (sides["A"], sides["B"]):
        if len(tensor.shape) < 2 or not tensor.numel:
            raise CorruptError(
                f"{path}: {full!r} has the shape {list(tensor.shape)}, but a matrix with elements was expected.",
                "Training with sharded parameters (ZeRO-3, FSDP) saves such factors if the parameters are not gathered "
                "first.",
            )
    bias = sides.get("bias")
    return Factors(sides["B"][1], sides["A"][1], embedding, bias[1] if bias else None)


def _numbers(path: str, full: str, tensor: LazyTensor) -> LazyTensor:
    if tensor.dtype.name not in SUMMED:
        raise UnsupportedError(
            f"{path}: {full!r} is {tensor.dtype}; only adapters of floats of 16 bits or more can be merged."
        )
    return tensor


def unknown(path: str, name: str, why: str) -> UnsupportedError:
    """Return the error for an unknown part of the adapter at `path`."""
    return UnsupportedError(f"{path}: {name!r} is not supported: {why}.")

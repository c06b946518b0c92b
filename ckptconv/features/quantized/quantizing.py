"""The choice of an output's weights to quantize, and the tensors that replace them. Pure."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Collection, Iterator, Mapping

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.quantized import making
from ckptconv.features.quantized.dequantized import MLX_EXPERTS
from ckptconv.features.quantized.options import EXACT_WAYS, Quantizing
from ckptconv.features.quantized.parts import parts_among
from ckptconv.features.quantized.table import LOADERS, WAYS
from ckptconv.formats.source import NOT_CONVERTED, Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import Computing, command_of
from ckptconv.outputs.hints import globs_like
from ckptconv.outputs.selected import Selected
from ckptconv.structure.record import Flattened
from ckptconv.tensors import casting
from ckptconv.tensors.dtypes import DTYPES, SUMMED
from ckptconv.tensors.lazy import LazyTensor, untagged
from ckptconv.text import some

# Modules that engines compute in the dtype of activations: embeddings and heads, norms, routers, what scores and
# projects beside the layers in DeepSeek's models, and towers of other senses.
_LEFT = re.compile(
    r"(^|\.)(lm_head|output_layer|embed_out|head|score|classifier|wte|wpe|router|gate|shared_expert_gate|eh_proj"
    r"|weights_proj|visual|vision\w*)(\.|$)|^output\.weight$|embed|norm",
    re.IGNORECASE,
)
_HEAD = "lm_head"
# Modules of one layer that have the same input: engines join them, and Model Optimizer gives them one scale.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
_F32 = DTYPES["float32"]


def _quantized(chosen: Selected, source: Source, options: Options, reference: Selected | None) -> Selected:
    """Return `chosen`, of `source`, with codes and scales in the place of weights.

    Raise UsageError for weights that are quantized already, and if there is none that can be.
    """
    asked = Quantizing.of(options)
    path, name = source.path, asked.quantize or asked.requantize
    if not name and asked.keep:
        # Grafts have the names that REF has, and only convert takes them.
        is_plain = (
            not (options.key or options.for_hub)
            and chosen.unmapped is None
            and all(a == b for a, b in chosen.names.items())
        )
        ref = path if is_plain and not command_of(source.computed) else "CONVERTED"
        dtype = options.dtype if options.dtype not in (None, "keep") else "bf16"
        globs = "".join(f" --exclude {shlex.quote(glob)}" for glob in asked.keep)
        grafts = "".join(f" --graft {shlex.quote(f'{ref}:{glob}')}" for glob in asked.keep)
        raise UsageError(
            "--keep has no effect without --quantize: --keep selects weights to leave unquantized.",
            f"To leave tensors in their dtype{'' if ref == path else ', write CONVERTED without --keep and --dtype'}"
            f": ckptconv convert {shlex.quote(ref)} OUTPUT --dtype {dtype}{globs}{grafts}.",
        )
    if not name:
        return chosen
    if asked.quantize and asked.requantize:
        raise UsageError("--quantize and --requantize cannot be combined.", "Give one of them.")
    if reference:
        raise UsageError(
            "--like gives tensors the dtypes of a reference, but codes must have the dtypes of their format.",
            "Convert with --like first, and quantize that output.",
        )
    way, exact = WAYS[name], bool(asked.requantize)
    if exact:
        # A product with a power of two is exact.
        way = way._replace(power=True)
    if (codes := dict.fromkeys(parts_among(chosen.tensors).values())) and not exact:
        raise UsageError(
            f"{path}: {some(codes, 3)} {'is' if len(codes) == 1 else 'are'} quantized already.",
            f"--dequantize --quantize {name} rounds the weights again."
            + (
                f" --requantize {name} changes the format without loss, where this is possible."
                if name in EXACT_WAYS
                else ""
            ),
        )
    keep = dict.fromkeys(asked.keep, 0)
    tensors: dict[str, LazyTensor] = {}
    known: dict[int, dict[str, LazyTensor]] = {}
    parts: set[str] = set()
    weights: dict[str, LazyTensor] = {}
    left, unfit = [], []
    for tensor_name, tensor in chosen.tensors.items():
        kept = [glob for glob in keep if fnmatch.fnmatchcase(tensor_name, glob)]
        keep.update((glob, keep[glob] + 1) for glob in kept)
        if tensor_name in chosen.uncastable or not (
            casting.is_decoded(tensor) if exact else _is_weight(tensor_name, tensor)
        ):
            left += [tensor_name] if len(tensor.shape) > 1 and tensor_name.endswith(".weight") else []
            is_of_mlx = len(tensor.shape) == 3 and MLX_EXPERTS in tensor_name and not exact and not kept
            unfit += [f"{tensor_name} (experts of mlx-lm)"] if is_of_mlx else []
            continue
        why = making.unfit(tensor, way, exact)
        if kept or why or (not exact and _LEFT.search(tensor_name)):
            if why and exact and not kept:
                raise _inexact(source, tensor_name, why, name)
            left.append(tensor_name)
            unfit += [f"{tensor_name} ({why})"] if why and not kept and not _LEFT.search(tensor_name) else []
            continue
        # A computed weight is quantized from its numbers before they are rounded.
        exactly = casting.unrounded(untagged(tensor))
        weights[tensor_name] = casting.cast(tensor, _F32) if exactly.dtype.itemsize > 4 else exactly
    for tensor_name, tensor in chosen.tensors.items():
        if tensor_name not in weights:
            tensors[tensor_name] = tensor
            continue
        together = [weights[other] for other in _joined(tensor_name) if other in weights and way.rule == "times"]
        named = making.parts(tensor_name, weights[tensor_name], way, exact, together)
        # Tied names have one object.
        taken = dict(zip(named, known.setdefault(id(tensor), named).values(), strict=True))
        tensors.update(taken)
        parts.update(taken)
    _check(chosen, path, asked, weights, keep, unfit)
    cut = [*dict.fromkeys(other for weight in weights for other in _joined(weight) if other in chosen.tensors)]
    cut = [weight for weight in cut if weight not in weights]
    if len(tensors) != len(chosen.tensors) - len(weights) + len(parts):
        raise UsageError("A scale would have the same name as another tensor.", "Rename that tensor with --rename.")
    counts = {name: len(weights)}
    settings = {**way.told, way.left: list(dict.fromkeys((*map(_module, left), _HEAD)))}
    unheld = [f"not quantized, because the format does not support them: {some(unfit, form=str)}."] if unfit else []
    return chosen._replace(
        names={tensor_name: tensor_name for tensor_name in tensors},
        known=tensors,
        tensors=tensors,
        described=Flattened(tensors, None, chosen.uncastable | parts),
        structured=False,
        owners={alias: owner for alias, owner in chosen.owners.items() if alias in tensors and owner in tensors},
        uncastable=chosen.uncastable | parts,
        warnings=(*chosen.warnings, *unheld),
        notes=(
            *chosen.notes,
            *_values(chosen),
            *_excluded(chosen),
            _note(name, weights, left) + ("" if exact else f" {_loaders(name, cut)}"),
        ),
        quantized={},
        unmapped=chosen.first,
        settled=frozenset(parts),
        quantization=settings,
        record={**chosen.record, "quantized": counts},
        reporters=(*chosen.reporters, lambda chosen, stored: lambda files: {"quantized": counts}),
    )


def _inexact(source: Source, tensor_name: str, why: str, name: str) -> UnsupportedError:
    """Return the error for a quantized weight that the format `name` cannot hold without loss, with the reason."""
    stored = some((source.quantized.formats if source.quantized else {}), form=str)
    only = " This format supports only MXFP4 along rows." if WAYS[name].codes == "e2m1" else ""
    return UnsupportedError(
        f"{source.path}: {tensor_name!r} has {why}, which --requantize {name} does not support. The weights are stored "
        f"as {stored}.{only}",
        "Omit --requantize to keep the weights unchanged, or use --keep for this weight; --dequantize --quantize "
        f"{name} rounds the weights again.",
    )


def _is_weight(name: str, tensor: LazyTensor) -> bool:
    """Return whether a tensor is a matrix, or a stack of experts' matrices, by its name and dtype."""
    parts = name.split(".")
    is_of_experts = "experts" in parts and not parts[-1].endswith("bias")
    return (
        tensor.dtype.name in SUMMED - {"float64"}
        and len(tensor.shape) > 1
        and (parts[-1] == "weight" or is_of_experts)
        and (len(tensor.shape) == 2 or is_of_experts)
    )


def _joined(name: str) -> list[str]:
    """Return the weights whose modules have the input of this one, itself among them."""
    layer, dot, own = name.removesuffix(".weight").rpartition(".")
    modules = next((modules for modules in _JOINED if own in modules), (own,))
    return [f"{layer}{dot}{module}.weight" for module in modules]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _check(
    chosen: Selected, path: str, asked: Quantizing, weights: Collection[str], keep: Mapping[str, int], unfit: list[str]
) -> None:
    """Raise UsageError if nothing is quantized, or a glob of `keep` matches nothing. `unfit` are the weights that the
    format cannot hold, with the reason of each."""
    if idle := [glob for glob, count in keep.items() if not count]:
        raise UsageError(f"--keep {idle[0]!r} matches no tensor of {path}.", globs_like(idle[0], [*chosen.tensors]))
    if not weights and asked.requantize:
        raise UsageError(
            f"{path} has no quantized weights to requantize.", "To quantize plain weights, use --quantize."
        )
    if not weights and unfit:
        raise UsageError(f"{path} has no weights that {asked.quantize} supports: {some(unfit, 3, str)}.")
    if not weights:
        raise UsageError(
            f"{path} has no weights to quantize: no floating-point matrix is called ….weight or belongs to experts."
        )


def _note(name: str, weights: Collection[str], left: list[str]) -> str:
    count = f"{len(weights):,} weight{'s' if len(weights) != 1 else ''}"
    return f"quantized {count} as {name}" + (f"; unchanged: {some(left)}." if left else ".")


def _loaders(name: str, cut: list[str]) -> str:
    """Return the sentence on the programs that load this quantization. `cut` are the weights that are not quantized,
    but that vLLM joins with quantized ones."""
    loaders = LOADERS.get(name, "")
    if not loaders:
        return "Tested loaders: none; transformers and vLLM were not tested."
    others = re.split("[,;] vLLM", loaders)[0]
    if not cut or others == loaders:
        return f"Tested loaders: {loaders}."
    return (
        f"Tested loaders: {others}. vLLM joins {some(cut, 2)} with quantized weights, and requires that all weights "
        "that it joins are quantized, or none."
    )


def _excluded(chosen: Selected) -> Iterator[str]:
    """Yield a note if --exclude leaves out tensors: in other programs, an option of this name leaves weights
    unquantized."""
    if count := sum(map(chosen.choice.excludes, chosen.first.known)):
        tensors = f"{count:,} tensor{'s are' if count > 1 else ' is'}"
        yield (
            f"{tensors} not in the output, because of --exclude. To keep weights in the output, unquantized, use "
            "--keep."
        )


def _values(chosen: Selected) -> Iterator[str]:
    """Yield a note on values that are no tensors: no structure record is kept."""
    if chosen.structured and (chosen.described.values or chosen.described.inert):
        values = some(chosen.described.values, form=str) or "objects of other classes"
        yield f"{NOT_CONVERTED}{values}, because --quantize writes only tensors."


COMPUTING = Computing(heading={"quantized?": {str: int}}, selected=_quantized, retold="codes")

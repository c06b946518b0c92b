"""The dtype, ties and quantization that a configuration states, compared with the weights of an output. Pure.

Sources: transformers' `modeling_utils.py`, for what its loaders do where a configuration is not true.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.configs import configs
from ckptconv.features.model_checks import stated
from ckptconv.features.model_checks.counted import contradicted
from ckptconv.formats.coded import parts_among
from ckptconv.formats.wrappers import WRAPPERS, wrapper
from ckptconv.outputs.truths import Weights
from ckptconv.tensors.lazy import LazyTensor

# The dtypes that weights are cast to.
_CAST = ("float32", "bfloat16", "float16")
_TIED = "tie_word_embeddings"
# A state in torch's optimizers, which number their parameters.
_NUMBERED = re.compile(r"(?:.*\.)?state\.\d+\.\w+")
_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


def untrue(config: Mapping[str, Any] | None, weights: Weights) -> Iterator[str]:
    """Yield a warning for each statement of `config` that is not true of the `weights` of an output. Also yield one if
    all are states of an optimizer, by number.

    Raise UsageError if all tensors to publish have the prefix of a wrapper. Code beside a model may give it any names.
    """
    before, after, tensors = weights.before, weights.after, weights.tensors
    prefix = _wrapping(tensors)
    if weights.publishing and prefix and "auto_map" not in (config or {}):
        whole = _wrapping(after)
        whole = whole if whole.endswith(prefix) else whole.removesuffix(WRAPPERS[-1])
        ends = {name.removeprefix(whole) for name in after}
        # A prefix is removed before names are changed.
        is_removable = whole.endswith(prefix) and ends.issuperset(name.removeprefix(prefix) for name in tensors)
        advice = f"Give --strip-prefix {whole}" if is_removable else "Give names without it with --rename"
        raise UsageError(
            f"All names of the output begin with {prefix!r}, the prefix of a model wrapper, so programs would not find "
            "the weights.",
            f"{advice}, or omit --for-hub to keep the names.",
        )
    if tensors and all(map(_NUMBERED.fullmatch, tensors)):
        yield (
            f"The output has optimizer states by number, such as {next(iter(tensors))!r}, but no weights. For names by "
            "parameter, convert the model, or the directory of both, with --optimizer PATH."
        )
    if config is None:
        return
    yield from stated.untrue(config, before, after, tensors)
    if len(after) < len(before):
        yield from contradicted(config, before, after)
    if not tensors:
        return
    parts = parts_among(tensors)
    yield from stated.of_vocabulary(config, tensors, {*parts, *parts.values()})
    method = next((str(value.get("quant_method")) for _, value in _quantizations(config)), "")
    if method and not parts:
        yield (
            f"config.json specifies quantized weights ({method}), but the output has none: loaders would look for "
            "codes and scales. Remove quantization_config from config.json."
        )
    elif parts and not method:
        weight = next(iter(parts.values()))
        yield f"config.json does not specify quantization, but {weight!r} of the output has codes or scales."
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and tensor.dtype.itemsize > 1 and name not in parts:
            sizes[tensor.dtype.name] += tensor.nbytes // tensor.dtype.itemsize
    said = configs.dtype_of(config)
    if said and sizes and said not in sizes and not method:
        most = sizes.most_common(1)[0][0]
        # Of weights of several dtypes, it would cast some.
        advice = (
            f" With --dtype {most}, the copy of config.json has this dtype."
            if len(sizes) == 1 and most in _CAST
            else ""
        )
        yield f"config.json has dtype {said}, but the weights of the output are {most}.{advice}"
    yield from _of_head(config, tensors)


def _wrapping(names: Collection[str]) -> str:
    """Return the prefix of wrappers that all names share, without a last `model.`, which may be a model's own."""
    prefix = wrapper(names)
    return prefix if prefix.startswith(WRAPPERS[0]) else prefix.removesuffix(WRAPPERS[-1])


def _quantizations(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    values = configs.values(config, *configs.QUANTIZING)
    return ((place, value) for place, value in values if isinstance(value, Mapping) and value.get("quant_method"))


def _of_head(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    """Yield a warning if a language model has no head of its own and needs one, or has one that it should not have. Of
    two tensors with different places it is not known whether they are equal."""
    heads, embeddings = (
        [tensor for name, tensor in tensors.items() if name.endswith(end)] for end in (_HEAD, _EMBEDDINGS)
    )
    if not embeddings or "CausalLM" not in str(config.get("architectures")):
        return
    if config.get(_TIED) is False and not heads:
        yield (f"config.json has {_TIED} false, but the output has no {_HEAD}: loaders would initialize it randomly.")
    elif config.get(_TIED) is True and heads and heads[0] not in embeddings:
        yield (
            f"config.json has {_TIED} true, but the output also has {_HEAD}: if this tensor differs from the "
            "embeddings, some loaders ignore it."
        )

"""AutoRound's integers: `auto_round/inference/convert_model.py` and `auto_round_extension/torch` of 0.16. Its other
types are in `autoround_floats`.

`packing_format` says how codes lie, and whether zero points are stored less 1. `extra_config` has what differs for a
module, under its name or a regular expression that is searched for in names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect, awq
from ckptconv.features.quantized.table import GPTQ, Format, Sizes
from ckptconv.features.quantized.words import EVERYWHERE, NOT, Words, idle, is_in
from ckptconv.storage.strict_json import OrNull

METHODS = ("auto-round", "auto_round", "intel/auto-round")
_FIRST, _LATER, NATIVE, _AWQ = "auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round", "auto_round:auto_awq"
FLOATS, FP8_STATIC = "auto_round:llm_compressor", "auto_round:fp8_static"
_BITS = {_FIRST: (2, 3, 4, 8), _LATER: range(2, 9), NATIVE: range(2, 9), _AWQ: (4,)}
_GROUP = range(-1, 1 << 31)
_SCHEME = {
    **idle("sym act_bits act_group_size act_sym act_data_type act_dynamic"),
    **dict.fromkeys(("super_bits?", "super_group_size?", "rotation_config?"), NOT),
    "fmt?": frozenset(("e4m3",)),
    "data_type?": frozenset(("int", "fp", "mx_fp", "mx_int", "nv_fp")),
}
_WORDS = {
    **EVERYWHERE,
    **_SCHEME,
    **idle(
        """
        autoround_version block_name_to_quantize to_quant_block_names quant_block_list modules_in_block_to_quantize
        enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning enable_torch_compile enable_adam
        enable_alg_ext disable_opt_rtn seqlen batch_size scale_dtype lr minmax_lr gradient_accumulate_steps iters amp
        nsamples dataset low_gpu_mem_usage low_cpu_mem_usage quant_lm_head static_kv_dtype static_attention_dtype
        """
    ),
    "bits": range(2, 9),
    "group_size": _GROUP,
    "extra_config?": OrNull({str: {**_SCHEME, "bits?": range(2, 33), "group_size?": _GROUP}}),
}
_PACKINGS = frozenset((*_BITS, FLOATS, FP8_STATIC))


def _words(config: Mapping[str, Any]) -> Words:
    """Return the allowed keys and values of a configuration. FP8 of weights alone is written without a packing."""
    is_fp8 = (config.get("data_type"), config.get("bits")) == ("fp", 8)
    return {**_WORDS, "packing_format?" if is_fp8 else "packing_format": _PACKINGS}


def scheme_of(config: Configuration, name: str) -> Mapping[str, Any]:
    """Return the scheme that a configuration states for the weight of this name."""
    module, extra = name.removesuffix(".weight"), config.told.get("extra_config") or {}
    others = (said for key, said in extra.items() if said and is_in(key, module))
    return {"data_type": "int", **config.told, **(extra[module] if module in extra else next(others, {}))}


def _of(*formats: str) -> Callable[[Configuration, str], Iterator[tuple[str, Sizes]]]:
    def sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        packing = config.told.get("packing_format")
        if config.method in METHODS and packing in formats:
            said = scheme_of(config, name)
            bits, size = said["bits"], said["group_size"]
            if said["data_type"] == "int" and bits in _BITS[packing] and size:
                offset = int(packing == _FIRST)
                yield f"AutoRound int{bits}", {"b": bits, "C": size if size > 0 else "K", "offset": offset}

    return sizes


_PACKED = {role: part for role, part in GPTQ.items() if role != "index"}
_FORMATS = (
    Format("N K", "int", _PACKED, _of(_FIRST, NATIVE), offset="offset", own=True),
    Format("N K", "int", GPTQ, _of(_LATER), offset="offset", own=True),
    Format("N K", "awq", awq.PARTS, _of(_AWQ), own=True),
)
DIALECT = Dialect(_FORMATS, dict.fromkeys(METHODS, _words))

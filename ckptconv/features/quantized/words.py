"""The keys of quantization configurations by method, with the values that each may have.

A key that is not listed, or has another value, may change the meaning of codes: it is an error by name. `object` marks
keys that do not concern stored weights: the modules left out, the quantization of activations and caches, and the
search for codes.

Sources: transformers' `utils/quantization_config.py`; compressed-tensors' `quantization` and `transform`; NVIDIA Model
Optimizer's `torch/export/quant_utils.py` and `convert_hf_config.py`; GPTQModel's `quantization/config.py`; AutoAWQ's
`models/_config.py`; vLLM's `fp8.py`; ComfyUI's `QUANTIZATION.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import UnsupportedError
from ckptconv.storage.strict_json import OrNull

# The keys of a mapping, and the shapes of their values (`strict_json.check`).
Words: TypeAlias = "Mapping[str, Any]"
# These, or what makes them of a configuration whose keys are names of modules, or whose values are of several kinds.
Speaking: TypeAlias = "Words | Callable[[Mapping[str, Any]], Words]"
# A method that is not named; names of one; and those that have a key of their own, where none is named.
UNNAMED = "unnamed"
NAMES_OF_COMPRESSED = ("compressed-tensors", "compressed_tensors", "sparseml")
_TELLING = {"quant_algo": "modelopt", "config_groups": "compressed-tensors", "group_size": "mlx"}
SIZE, _BITS = range(1, 1 << 31), range(1, 17)
# A size of groups; -1 or 0 is for one group.
GROUP = OrNull(range(-1, 1 << 31))
NOT = OrNull(frozenset((False,)))


def idle(names: str) -> dict[str, Any]:
    """Return keys that say nothing of stored weights."""
    return {f"{name}?": object for name in names.split()}


EVERYWHERE = idle(
    """
    quant_method modules_to_not_convert modules_to_convert ignored_layers ignored_modules ignore exclude_modules
    activation_scheme kv_cache_scheme kv_cache_quant_algo kv_cache_quant_method dequantize run_compressed producer
    version use_optimized_inference
    """
)


def quark_export(*packings: str) -> Words:
    """Return the keys and values that AMD Quark writes about its export, whatever the method: the ways to pack
    integers."""
    return {
        **idle("kv_cache_group min_kv_scale weight_merge_groups"),
        "pack_method": frozenset(packings),
        "weight_format": frozenset(("real_quantized",)),
    }


_FP8 = {
    **EVERYWHERE,
    "export?": quark_export("reorder", "order"),
    **idle("fmt scale_fmt is_checkpoint_fp8_serialized activation_scale_ub"),
    "weight_block_size?": OrNull((SIZE, SIZE)),
    "expert_dtype?": frozenset(("fp4", "fp8")),
}
_WEIGHTS = {
    **idle("observer observer_kwargs actorder scale_dtype zp_dtype"),
    "num_bits?": _BITS,
    "type?": frozenset(("int", "float")),
    "symmetric?": bool,
    "strategy?": OrNull(frozenset(("tensor", "channel", "group", "tensor_group", "block"))),
    "group_size?": GROUP,
    "block_structure?": OrNull([SIZE]),
    "dynamic?": NOT,
}
# Rotations: those of "weight_input" and "weight_output" are in the weights; `rotations` undoes those of inputs and
# outputs. With a gradient, weights have other names.
_TRANSFORM = {
    **idle("randomize precision"),
    "type": frozenset(("hadamard", "random-hadamard", "random-matrix")),
    "requires_grad?": NOT,
    "head_dim?": OrNull(SIZE),
    "apply": [
        {
            "targets": [str],
            "ignore?": [str],
            "inverse?": bool,
            "location": frozenset(("weight_input", "weight_output", "input", "output", "q_attn", "k_cache")),
        }
    ],
}
_FORMATS = OrNull(
    frozenset(
        """
        dense mixed-precision int-quantized float-quantized naive-quantized pack-quantized nvfp4-pack-quantized
        mxfp4-pack-quantized mxfp6-pack-quantized mxfp8-quantized
        """.split()  # noqa: SIM905
    )
)
_COMPRESSED = {
    **EVERYWHERE,
    **idle("quantization_status global_compression_ratio moe_sparsity_config"),
    "format?": _FORMATS,
    "config_groups?": OrNull(
        {
            str: {
                **idle("targets input_activations output_activations"),
                "format?": _FORMATS,
                "weights?": OrNull(_WEIGHTS),
            }
        }
    ),
    "sparsity_config?": OrNull(
        {
            **idle("ignore targets global_sparsity sparsity_structure registry_requires_subclass"),
            "format?": frozenset(("dense",)),
        }
    ),
    "transform_config?": OrNull({"config_groups?": {str: _TRANSFORM}}),
}
# Of these, what codes and scales stand for is the same.
OF_NVFP4 = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
OF_MXFP4 = ("mxfp4", "W4A8_MXFP4_FP8")
_ALGORITHMS = frozenset(
    (
        *("FP8", "FP8_PB_WO", "fp8_pb_wo", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", *OF_NVFP4, *OF_MXFP4),
        *("NVFP4_AWQ", "NVFP4_SVD", "W4A16_AWQ", "W4A8_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL"),
    )
)
_LAYER = {"group_size?": GROUP, "has_zero_point?": NOT, "pre_quant_scale?": OrNull(frozenset((True, False)))}
_MODELOPT = {
    **EVERYWHERE,
    # Groups of compressed-tensors, which say the same for other programs.
    **idle("config_groups"),
    **_LAYER,
    "quant_algo?": OrNull(_ALGORITHMS | {"MIXED_PRECISION"}),
    "quantized_layers?": OrNull({str: {**_LAYER, "quant_algo?": OrNull(_ALGORITHMS)}}),
}
_OF_GPTQ = idle(
    """
    act_group_aware activation backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment
    damp_percent dataset desc_act disable_exllama exllama_config group_offload hyb_act lm_head max_input_length meta
    method model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
    modules_in_block_to_quantize mse offload_to_disk pack_dtype pad_token_id parallel_packing quantizer static_groups
    sym tokenizer true_sequential use_cuda_fp16 use_exllama use_exllama_v2 is_awq
    """
)
_GPTQ_FORMATS = OrNull(frozenset(("gptq", "gptq_v2")))
GPTQ = {
    **EVERYWHERE,
    **_OF_GPTQ,
    "bits": _BITS,
    "group_size?": GROUP,
    "format?": _GPTQ_FORMATS,
    "checkpoint_format?": _GPTQ_FORMATS,
    "is_marlin_format?": NOT,
    "rotation?": OrNull(frozenset(("",))),
    "dynamic?": OrNull({str: {**_OF_GPTQ, "bits?": _BITS, "group_size?": GROUP}}),
}
_BITSANDBYTES = {
    **EVERYWHERE,
    **idle(
        """
        load_in_4bit _load_in_4bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type
        bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules
        llm_int8_threshold load_in_8bit _load_in_8bit
        """
    ),
}
COMFY_LAYER: Words = {
    **idle("full_precision_matrix_mult full_precision_mm orig_dtype"),
    "format": frozenset(("float8_e4m3fn", "float8_e5m2", "int8_blockwise", "int8_tensorwise")),
    "group_size?": OrNull(SIZE),
}
DIALECTS: Mapping[str, Words] = {
    "fp8": _FP8,
    "mxfp8": _FP8,
    "fbgemm_fp8": _FP8,
    "mxfp4": EVERYWHERE,
    "compressed-tensors": _COMPRESSED,
    "modelopt": _MODELOPT,
    "gptq": GPTQ,
    "bitsandbytes": _BITSANDBYTES,
    "comfy": {**idle("quant_method format_version"), "layers?": {str: COMFY_LAYER}},
    "torchao": {
        **EVERYWHERE,
        # The options that were given; the metadata next to tensors describe these.
        **idle(
            "quant_type quant_type_kwargs include_embedding include_input_output_embeddings untie_embedding_weights"
        ),
    },
}
# Methods that are not read, and the programs that read them.
ELSEWHERE: Mapping[str, str] = {
    "aqlm": "transformers with aqlm",
    "bitnet": "transformers",
    "eetq": "transformers with EETQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fouroversix": "transformers with fouroversix",
    "fp_quant": "transformers with fp_quant",
    "gemma": "transformers",
    "gguf": "llama.cpp",
    "higgs": "transformers with flute",
    "marlin": "vLLM",
    "metal": "transformers, on Apple's processors",
    "nvfp4": "transformers, on a GPU",
    "paroquant": "GPTQModel",
    "qqq": "GPTQModel",
    "quanto": "optimum-quanto",
    "quip": "QuIP#",
    "sinq": "transformers with SINQ",
    "spqr": "transformers with SpQR",
    "vptq": "VPTQ",
}


# One character of an expression, which is no quantifier.
_PLAIN = re.compile(r"(?:[\w\-.^$/]|\\[\w\-.])*")


def is_in(expression: str, module: str) -> bool:
    """Return whether a regular expression matches within a name. Expressions of characters and ".*" take linear time at
    most."""
    at = 0
    for piece in expression.split(".*"):
        if not _PLAIN.fullmatch(piece):
            raise UnsupportedError(f"The configuration has the expression {expression!r}, which is not supported.")
        match = re.compile(piece).search(module, at)
        if match is None:
            return False
        at = match.end()
    return True


class Statement(NamedTuple):
    """The statement of the file `path` on quantization, under the key `at`."""

    path: str
    at: str
    told: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.path} ({self.at})" if self.at else self.path

    @property
    def method(self) -> str:
        method = "mlx" if self.told.get("packing_format") == "mlx" else self.told.get("quant_method")
        if not isinstance(method, str):
            method = next((of for key, of in _TELLING.items() if key in self.told), UNNAMED)
        return "compressed-tensors" if method in NAMES_OF_COMPRESSED else method

"""The formats of quantized weights, beside those of `dialects`: one entry each says the names of its parts, their
dtypes and shapes, the arithmetic, and its words in configurations.

Sources: DeepSeek-V3's `inference/fp8_cast_bf16.py` and `kernel.py`; transformers' `integrations/finegrained_fp8.py` and
`integrations/mxfp4.py`; compressed-tensors' `compressors` and `quantization/lifecycle/forward.py`; NVIDIA Model
Optimizer's `torch/export`; GPTQModel, bitsandbytes' `functional.py`; ComfyUI's `QUANTIZATION.md`.

A name is that of the weight with something after it ("+_scale"), or in the place of its ".weight" ("=.scales"), or as
torchao has it ("~_qdata": `0._weight_qdata` of `0.weight`). A shape names its dimensions: "M/B" is one element for each
B of dimension M, the last of them perhaps for fewer; "K*b/32" are words of 32 bits that hold b for each element of K.
What is no dimension of the weight comes from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from ckptconv.features.quantized import telling
from ckptconv.features.quantized.configuration import Configuration, QuantizedWeights
from ckptconv.features.quantized.telling import Telling
from ckptconv.features.quantized.words import ELSEWHERE, OF_NVFP4
from ckptconv.tensors.lazy import LazyTensor

# Sizes by name, as a configuration or a part tells them; a text stands for the size of another name.
Sizes: TypeAlias = "Mapping[str, Any]"
_PARTS_OF_TORCHAO = frozenset(("qdata", "scale", "zero_point"))
FLOATS = "float32 bfloat16 float16"
_POWERS = "float8_e8m0fnu uint8"


class Part(NamedTuple):
    """A part: the names that it may have, its dtypes and its shape. `optional`: weights may lack it. `merged`: its last
    two dimensions are one in the shape; `flat`: it is bytes, whatever dtype they are stored as, in one dimension.
    `seen`: the dtype that its bytes are elements of, whatever they are stored as. `cast`: the dtype that its numbers
    are rounded to first. `tells`: it is read for sizes, and has no numbers of the weight."""

    names: str
    dtypes: str
    shape: str
    optional: bool = False
    merged: bool = False
    flat: bool = False
    seen: str = ""
    cast: str = ""
    tells: Telling | None = None


class Format(NamedTuple):
    """A format of quantized weights.

    `out` are the dimensions of the weight, and `codes` says how its codes lie (`Dequantize`); "int" stands for
    that of so many bits. `scale` may be a format itself, of scales that are quantized. `sizes` yields what a
    configuration says of the weight of a name: what such a weight is called, and sizes; nothing if it is none of
    these. `offset` is subtracted from codes. `over`: scales divide. `own`: the product is rounded to the dtype of the
    scales. `divided`: scales are divided by this first; `times`: products are multiplied by this. 0 for neither.
    `unpacked` makes of the stored codes, and of what is known of sizes, those that `parts` tells the shape of, and
    further sizes; `completed` makes the weight of what the codes are, and of the parts by role. Both raise ValueError
    if they cannot.
    """

    out: str
    codes: str
    parts: Mapping[str, Part]
    sizes: Callable[[Configuration, str], Iterator[tuple[str, Sizes]]]
    scale: Format | None = None
    offset: str | int = 0
    over: bool = False
    own: bool = False
    divided: float = 0
    times: float = 0
    unpacked: Callable[[LazyTensor, Sizes], tuple[LazyTensor, Sizes]] | None = None
    completed: Callable[[LazyTensor, Mapping[str, LazyTensor]], LazyTensor] | None = None


# ------------------------------------------------------------------------------------------ the words of configurations


def _fp8(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    if config.method in ("fp8", "mxfp8"):
        block = config.block or ((1, 32) if config.method == "mxfp8" else None)
        if block:
            yield ("MXFP8" if block == (1, 32) else "block FP8"), {"B": block[0], "C": block[1]}
            return
    for algorithm in config.algorithms(name):
        if algorithm == "MXFP8":
            yield "MXFP8", {"B": 1, "C": 32}
        elif algorithm.upper() == "FP8_PB_WO":
            yield "block FP8", {"B": 128, "C": 128}
        elif algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            yield "FP8 by rows", {"B": 1, "C": "K"}
    if config.method == "fbgemm_fp8" and not name.endswith(".weight"):
        # Experts of Llama 4, which lie transposed.
        yield "FP8 by columns", {"B": "M", "C": 1}
    elif config.method in ("", "fp8", "fbgemm_fp8") or "FP8" in config.algorithms(name):
        yield "FP8", {"B": "M", "C": "K"}
        yield "FP8 by rows", {"B": 1, "C": "K"}


def _of_groups(kind: str, bits: int, called: str, *formats: str) -> Callable[[Configuration, str], Any]:
    """Return the `Format.sizes` of weights of one kind in compressed-tensors' groups."""

    def sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        for group in config.groups:
            if group.kind == kind and group.bits in (bits or group.bits,) and group.format in formats:
                yield called.format(group.bits), _sides(group)

    return sizes


def _sides(group: QuantizedWeights) -> Sizes:
    sides: Mapping[str, tuple[Any, Any]] = {
        "tensor": ("M", "K"),
        "channel": (1, "K"),
        "group": (1, group.size),
        "tensor_group": (1, group.size),
        "block": group.block or (0, 0),
    }
    rows, columns = sides.get(group.strategy, (0, 0))
    return {"B": rows, "C": columns, "b": group.bits, "zero": not group.symmetric, "half": 1 << (group.bits - 1)}


def _fbgemm_down(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    if config.method == "fbgemm_fp8" and not name.endswith(".weight"):
        yield "FP8 by columns", {}


def _comfy_int8(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    layer = config.layer(name)
    if config.method == "comfy" and layer and layer.get("format") == "int8_blockwise":
        size = layer.get("group_size", 128)
        yield "int8", {"B": size, "C": size}
    elif config.method == "comfy" and layer and layer.get("format") == "int8_tensorwise":
        yield "int8", {"B": "M", "C": "K"}
        yield "int8", {"B": 1, "C": "K"}


def _comfy_fp8(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    layer = config.layer(name)
    if config.method == "comfy" and layer and layer.get("format") in ("float8_e4m3fn", "float8_e5m2"):
        yield "FP8", {"B": "M", "C": "K", "as": layer["format"]}


def _nvfp4(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    if not {*config.algorithms(name)}.isdisjoint(OF_NVFP4):
        yield "NVFP4", {"B": 1, "C": (config.layer(name) or config.told).get("group_size") or 16}


def _experts(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    if config.expert_dtype == "fp4":
        yield "MXFP4", {"B": 1, "C": 32}


def _mxfp4(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    if config.method in ("mxfp4", ""):
        yield "MXFP4", {}


def _gptq(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    bits, size = config.told.get("bits"), config.told.get("group_size")
    format_ = config.told.get("checkpoint_format") or config.told.get("format") or "gptq"
    if config.method == "gptq" and bits in (2, 3, 4, 8) and type(size) is int:
        yield f"GPTQ int{bits}", {"b": bits, "C": size if size > 0 else "K", "offset": int(format_ == "gptq")}


def _torchao(called: str, *classes: str) -> Callable[[Configuration, str], Any]:
    """Return the `Format.sizes` of torchao's tensors of these classes."""

    def sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        layer = config.layer(name) if config.method == "torchao" else None
        sides = layer.get("block_size") if layer and layer.get("_type") in classes else None
        known = layer is not None and _PARTS_OF_TORCHAO.issuperset(layer["parts"])
        if known and isinstance(sides, list) and [type(side) is int and side > 0 for side in sides] == [True, True]:
            yield called, {"B": sides[0], "C": sides[1]}

    return sizes


def _bitsandbytes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    if config.method in ("bitsandbytes", ""):
        yield "bitsandbytes 4-bit", {}


def always(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    """Yield an empty meaning: shapes determine scales that are quantized."""
    yield "", {}


# ---------------------------------------------------------------------------------------------------------- the formats

_OWN = "float8_e4m3fn float8_e5m2"
_SCALE_NAMES = "+_scale_inv +_scale =.scale =.qscale_weight =.scale_weight"
_GROUPED = "M/B K/C"
# Scales that are quantized: e4m3, with one scale for all of them, which multiplies, or divides.
TIMES = Format(
    "R S",
    "own",
    {
        "codes": Part("+_scale", "float8_e4m3fn", "R S"),
        "scale": Part("+_scale_2", "float32", "R/R S/S"),
    },
    always,
)
_OVER = Format(
    "R S",
    "own",
    {
        "codes": Part("+_scale", "float8_e4m3fn", "R S"),
        "scale": Part("+_global_scale", "float32", "R/R S/S"),
    },
    always,
    over=True,
)
# bitsandbytes' absmax, of 8 bits.
_NESTED = Format(
    "A",
    "table8",
    {
        "codes": Part("+.absmax", "uint8", "A"),
        "scale": Part("+.nested_absmax", "float32", "A/D"),
        "table": Part("+.nested_quant_map", "float32", "256"),
    },
    always,
)
_STATE = Part("+.quant_state.bitsandbytes__nf4 +.quant_state.bitsandbytes__fp4", "uint8", "", tells=telling.state)
_BNB = {
    "codes": Part("+", f"uint8 int8 {FLOATS} float64 float8_e4m3fn", "F*4/8", flat=True),
    "table": Part("+.quant_map", "float32", "16"),
    "state": _STATE,
}
_BLOCK_FP8 = Format(
    "M K",
    "own",
    {"codes": Part("+", _OWN, "M K"), "scale": Part(_SCALE_NAMES, f"{FLOATS} {_POWERS}", _GROUPED)},
    _fp8,
)
_PACKED_INT = Format(
    "M K",
    "int",
    {
        "codes": Part("+_packed", "int32", "M K*b/32"),
        "scale": Part("+_scale", FLOATS, _GROUPED),
        "zero": Part("+_zero_point", "int32", "M*b/32 K/C", optional=True),
        "index": Part("+_g_idx", "int32", "K", optional=True),
        "shape": Part("+_shape", "int64", "2", tells=telling.shape),
    },
    _of_groups("int", 0, "packed int{}", "pack-quantized"),
    offset="half",
    own=True,
)
NVFP4 = Format(
    "M K",
    "e2m1",
    {"codes": Part("+_packed", "uint8", "M K*4/8"), "scale": Part("", "float32", _GROUPED)},
    _of_groups("float", 4, "NVFP4", "nvfp4-pack-quantized"),
    scale=_OVER,
)
# Model Optimizer's.
_NVFP4_TIMES = Format(
    "M K",
    "e2m1",
    {"codes": Part("+", "uint8", "M K*4/8"), "scale": Part("", "float32", _GROUPED)},
    _nvfp4,
    scale=TIMES,
)
MXFP4 = Format(
    "M K",
    "e2m1",
    {"codes": Part("+_packed", "uint8", "M K*4/8"), "scale": Part("+_scale", _POWERS, _GROUPED)},
    _of_groups("float", 4, "MXFP4", "mxfp4-pack-quantized"),
)
_MXFP6 = Format(
    "M K",
    "e2m3",
    {"codes": Part("+_packed", "uint8", "M K*6/8"), "scale": Part("+_scale", _POWERS, _GROUPED)},
    _of_groups("float", 6, "MXFP6", "mxfp6-pack-quantized"),
)
FP8 = Format(
    "M K",
    "own",
    {"codes": Part("+", "float8_e4m3fn", "M K"), "scale": Part("+_scale", f"{FLOATS} {_POWERS}", _GROUPED)},
    _of_groups("float", 8, "FP8", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    own=True,
)
GPTQ = {
    "codes": Part("=.qweight", "int32", "K*b/32 N"),
    "scale": Part("=.scales", FLOATS, "K/C N"),
    "zero": Part("=.qzeros", "int32", "K/C N*b/32"),
    "index": Part("=.g_idx", "int32", "K"),
}
FORMATS: tuple[Format, ...] = (
    Format(
        "M K",
        "own",
        {"codes": Part("~_qdata", _OWN, "M K"), "scale": Part("~_scale", FLOATS, _GROUPED)},
        _torchao("torchao float8", "Float8Tensor"),
    ),
    Format(
        "M K",
        "own",
        {
            "codes": Part("~_qdata", "int8", "M K"),
            "scale": Part("~_scale", FLOATS, _GROUPED),
            "zero": Part("~_zero_point", "int8", _GROUPED, optional=True),
        },
        _torchao("torchao int8", "Int8Tensor", "IntxUnpackedToInt8Tensor"),
        own=True,
    ),
    _BLOCK_FP8,
    # The other scale of Llama 4's experts in FBGEMM's FP8: of each column, and called a row.
    Format(
        "M K",
        "own",
        {"codes": Part("+", "float8_e4m3fn", "M K"), "scale": Part("+_scale", "float32", "K M/M")},
        _fbgemm_down,
    ),
    FP8,
    Format(
        "M K",
        "own",
        {
            "codes": Part("+", "int8", "M K"),
            "scale": Part("+_scale", FLOATS, _GROUPED),
            "zero": Part("+_zero_point", "int8", _GROUPED, optional=True),
        },
        _of_groups("int", 0, "int{}", "int-quantized", "naive-quantized"),
        own=True,
    ),
    _PACKED_INT,
    # One zero point for the weight is not packed.
    _PACKED_INT._replace(parts={**_PACKED_INT.parts, "zero": Part("+_zero_point", "int8", _GROUPED)}),
    MXFP4,
    _MXFP6,
    NVFP4,
    _NVFP4_TIMES,
    Format(
        "M K",
        "e2m1",
        {"codes": Part("+", "int8 uint8", "M K*4/8"), "scale": Part("=.scale +_scale", _POWERS, _GROUPED)},
        _experts,
    ),
    Format(
        "E K R",
        "e2m1",
        {"codes": Part("+_blocks", "uint8", "E R K*4/8", merged=True), "scale": Part("+_scales", _POWERS, "E R K/32")},
        _mxfp4,
    ),
    Format("N K", "int", {**GPTQ, "index": GPTQ["index"]._replace(optional=True)}, _gptq, offset="offset", own=True),
    Format("F", "table4", {**_BNB, "scale": Part("+.absmax", "float32", "F/C")}, _bitsandbytes),
    Format("F", "table4", {**_BNB, "scale": Part("", "float32", "F/C")}, _bitsandbytes, scale=_NESTED),
    Format(
        "M K",
        "own",
        {"codes": Part("+", f"{_OWN} uint8", "M K"), "scale": Part("+_scale", FLOATS, _GROUPED)},
        _comfy_fp8,
    ),
    Format(
        "M K",
        "own",
        {"codes": Part("+", "int8", "M K"), "scale": Part("+_scale", FLOATS, _GROUPED)},
        _comfy_int8,
    ),
)
# Tensors next to quantized weights that are for activations and caches only: they go with the codes.
OF_ACTIVATIONS = frozenset(
    """
    input_scale input_scale_2 input_scale_inv input_scale_ub input_global_scale input_zero_point activation_scale
    act_scale qscale_act scale_input output_scale output_scale_2 output_zero_point k_scale v_scale q_scale kv_scale
    k_zero_point v_zero_point prob_scale prob_output_scale
    """.split()  # noqa: SIM905
)
# ComfyUI's tensor beside a quantized weight, which says how that is quantized.
MARK = "comfy_quant"
# The model's own tensors in a module with a quantized weight; and the beginnings of adapters' names.
OF_MODULES = frozenset(("bias", "e_score_correction_bias"))
OF_ADAPTERS = ("lora_", "modules_to_save", "original_module")
# Beside a quantized parameter that is not called "weight", such as stacked experts: other parameters of a module, each
# perhaps with a bias.
OF_STACKS = frozenset("weight gate_up_proj gate_proj up_proj down_proj w1 w2 w3 in_proj in_proj_weight".split())  # noqa: SIM905
# Endings of names that only parts of quantized weights have: such a part without its weight is an error.
TELLING = tuple(
    """
    _scale_inv weight_scale weight_scale_2 weight_global_scale weight_zero_point weight_packed weight_shape weight_g_idx
    .qweight .qzeros .absmax .nested_absmax .quant_map
    """.split()  # noqa: SIM905
)
# Endings of names that parts of weights have which are not read; what these weights are, and what reads them.
NOT_READ = {
    ".bitmask": ("is sparse, in a format of compressed-tensors", "compressed-tensors"),
    ".scale_packed": ("has the layout of Marlin for GPUs", ELSEWHERE["marlin"]),
    ".workspace": ("has the layout of Marlin for GPUs", ELSEWHERE["marlin"]),
    ".codebooks": ("is in the format of AQLM", ELSEWHERE["aqlm"]),
    ".dense_weights": ("is in the format of SpQR", ELSEWHERE["spqr"]),
    ".weight_scales": ("is in the format of EETQ", ELSEWHERE["eetq"]),
    ".weight._data": ("is in the format of quanto", ELSEWHERE["quanto"]),
    ".tables2": ("is in the format of HIGGS", ELSEWHERE["higgs"]),
    ".centroids.weight": ("is in the format of VPTQ", ELSEWHERE["vptq"]),
    ".q_weight": ("is in the format of EXL2", ELSEWHERE["exl2"]),
    ".trellis": ("is in the format of EXL3", ELSEWHERE["exl3"]),
    ".dqweight": ("is in the format of FP-Quant", ELSEWHERE["fp_quant"]),
    ".qbiases": ("is in the format of Apple's Metal", ELSEWHERE["metal"]),
    ".weight_sf": ("is in the NVFP4 layout of transformers", ELSEWHERE["nvfp4"]),
    ".wscales": ("is in the format of nunchaku", "nunchaku"),
    "quantized_weight_values": ("is in the format of Four Over Six", ELSEWHERE["fouroversix"]),
}


class Way(NamedTuple):
    """A way to quantize weights that needs no data: a format, read the other way. One of codes "e2m1" is for weights of
    such codes alone, with other scales.

    Parts have the first of their names there, and shapes of `sizes`. `codes` and `scale` are what codes are and the
    dtype that scales are rounded to, `stored` the dtype that they have in the file; what the largest number of a block
    becomes is `largest`, or the best of these, and with `power` scales are powers of two (`Quantize`). `told` is what
    a configuration says of it, and under the key `left` the modules that are left as they are. With a `rule`, codes
    "e2m1" are made of any weights, as that says (`QuantizeFp4`).
    """

    format: Format
    codes: str
    scale: str
    stored: str
    sizes: Sizes
    largest: tuple[float, ...]
    power: bool
    told: Mapping[str, Any]
    left: str = "modules_to_not_convert"
    rule: str = ""


_FINE_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_OF_128 = {"B": 128, "C": 128}
_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
_INT4 = {**_WEIGHTS, "type": "int", "strategy": "group", "group_size": 32}
_NVFP4_WORDS = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_MXFP4_WORDS = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def _compressed(format_: str, weights: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
    """Return the configuration of compressed-tensors for all linear layers."""
    group = {"targets": ["Linear"], "format": format_, "weights": weights, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


# Programs whose loaders were run on outputs of a way. For other ways, none was.
LOADERS = {
    "fp8-block": "transformers, vLLM",
    "fp8-block-ue8m0": "transformers, vLLM",
    "mxfp8": "transformers; vLLM with other names of scales",
    "int4-g32": "transformers with compressed-tensors, vLLM",
}

# Sources: the readers of transformers' `FineGrainedFP8Config`, vLLM's and SGLang's `fp8.py`, compressed-tensors'
# `QuantizationConfig`, and Model Optimizer.
WAYS: Mapping[str, Way] = {
    "fp8-block": Way(_BLOCK_FP8, "float8_e4m3fn", "float32", "float32", _OF_128, (448.0,), False, _FINE_FP8),
    "fp8-block-ue8m0": Way(
        _BLOCK_FP8,
        "float8_e4m3fn",
        "float32",
        "float32",
        _OF_128,
        (448.0,),
        True,
        {**_FINE_FP8, "scale_fmt": "ue8m0"},
    ),
    # Activations are quantized as they come, each token by itself.
    "fp8-dynamic": Way(
        FP8,
        "float8_e4m3fn",
        "float32",
        "float32",
        {"B": 1, "C": "K"},
        (448.0,),
        False,
        _compressed(
            "float-quantized",
            {**_WEIGHTS, "num_bits": 8, "strategy": "channel"},
            input_activations={**_WEIGHTS, "num_bits": 8, "strategy": "token", "dynamic": True},
        ),
        "ignore",
    ),
    "mxfp8": Way(
        _BLOCK_FP8,
        "float8_e4m3fn",
        "float8_e8m0fnu",
        "uint8",
        {"B": 1, "C": 32},
        (448.0,),
        True,
        {
            "quant_method": "mxfp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "scale_fmt": "ue8m0",
        },
        # As MiniMax has it: of this method, vLLM reads no other word.
        "ignored_layers",
    ),
    "int4-g32": Way(
        _PACKED_INT,
        "int4",
        "bfloat16",
        "bfloat16",
        {"B": 1, "C": 32, "b": 4},
        # That of either sign, between these, and that of one.
        (7.0, 7.5, 8.0),
        False,
        _compressed("pack-quantized", _INT4),
        "ignore",
    ),
    "mxfp4": Way(
        MXFP4,
        "e2m1",
        "float8_e8m0fnu",
        "uint8",
        {"B": 1, "C": 32},
        (),
        True,
        _compressed("mxfp4-pack-quantized", {**_WEIGHTS, **_MXFP4_WORDS}),
        "ignore",
        "mx",
    ),
    "nvfp4": Way(
        NVFP4,
        "e2m1",
        "float8_e4m3fn",
        "float8_e4m3fn",
        {"B": 1, "C": 16},
        (),
        True,
        _compressed("nvfp4-pack-quantized", {**_WEIGHTS, **_NVFP4_WORDS}),
        "ignore",
        "over",
    ),
    "nvfp4-modelopt": Way(
        _NVFP4_TIMES,
        "e2m1",
        "float8_e4m3fn",
        "float8_e4m3fn",
        {"B": 1, "C": 16},
        (),
        False,
        {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "producer": {"name": "modelopt"},
            "config_groups": {
                "group_0": {
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
        },
        "ignore",
        "times",
    ),
}

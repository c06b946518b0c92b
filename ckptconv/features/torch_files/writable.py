"""Lists of the classes and functions that a pickle written here may name, as loading a pickle runs what it names.

The lists hold what torch, numpy and Python need for data, and classes that were reviewed. Constructing one of these
from any arguments only stores them, or computes a value of them in little time and memory. None opens, connects or
looks up anything, or calls an argument. On request a pickle names others too, if `scan` would call it safe.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats.torch.objects import without_tensors
from ckptconv.options.table import Options
from ckptconv.pickles import watching
from ckptconv.pickles.machine import load
from ckptconv.pickles.nodes import COMPOSITES, Composite, Global, Opaque
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.pickles.vocabulary import WHOLE_TREES
from ckptconv.structure.attributes import PLAIN_KINDS
from ckptconv.text import brief

# Judges of a pickle that names others, which is written on request: modules of features with `Judge`, as
# `watching.Judge` has it, and `is_reviewed(name)`. Without a judge no such pickle is written.
JUDGES: dict[str, str] = {
    "scan": "ckptconv.features.scan.grammar.judge",
}


def named(*table: tuple[str, str]) -> frozenset[Global]:
    return frozenset(
        Global(module, name) for modules, names in table for module in modules.split() for name in names.split()
    )


_RNG = "MT19937 PCG64 PCG64DXSM Philox SFC64"
# Enums: a pickle gets one member by its value or its name.
ENUMS = named(
    ("uuid", "SafeUUID"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("torchao.quantization.quant_primitives", "MappingType TorchAODType ZeroPointDomain"),
    ("torchao.quantization.quantize_.common.kernel_preference", "KernelPreference"),
    ("torchao.quantization.quantize_.common.packing_format", "PackingFormat"),
    ("torchao.quantization.quantize_.common.quantization_step", "QuantizationStep"),
    ("torchao.quantization.quantize_.workflows.float8.float8_packing_format", "Float8PackingFormat"),
    ("torchao.quantization.quantize_.workflows.int4.int4_choose_qparams_algorithm", "Int4ChooseQParamsAlgorithm"),
    ("torchao.quantization.quantize_.workflows.int4.int4_packing_format", "Int4PackingFormat"),
    ("torchao.quantization.quantize_.workflows.intx.intx_choose_qparams_algorithm", "IntxChooseQParamsAlgorithm"),
    ("torchao.quantization.quantize_.workflows.intx.intx_packing_format", "IntxPackingFormat"),
    ("torchao.prototype.mx_formats.config", "ScaleCalculationMode"),
    ("torchao.float8.config", "ScalingGranularity ScalingType"),
    ("torchao.float8.float8_training_tensor torchao.float8.float8_tensor", "GemmInputRole"),
)
# Subclasses of tensors that wrap others and keep them in their state.
TENSORS = named(
    ("torchao.quantization", (
        "Float8Tensor Int4PlainInt32Tensor Int4PreshuffledTensor Int4Tensor Int4TilePackedTo4dTensor Int8Tensor "
        "IntxOpaqueTensor IntxUnpackedToInt8Tensor NF4Tensor"
    )),
    ("torchao.prototype.mx_formats.mx_tensor", "MXTensor"),
    ("torchao.prototype.mx_formats.nvfp4_tensor", "NVFP4Tensor"),
    ("torchao.quantization.quantize_.workflows.float8.float8_tensor", "Float8Tensor"),
    ("torchao.quantization.quantize_.workflows.int4.int4_tensor", "Int4Tensor"),
    ("torchao.quantization.quantize_.workflows.int8.int8_tensor", "Int8Tensor"),
    ("torchao.quantization.quantize_.workflows.nf4.nf4_tensor torchao.dtypes.nf4tensor", "NF4Tensor"),
    ("torchao.quantization.linear_activation_quantized_tensor", "LinearActivationQuantizedTensor"),
    ("torchao.optim.subclass_8bit", "OptimState8bit"),
    ("torchao.optim.subclass_4bit", "OptimState4bit"),
    ("torchao.optim.subclass_fp8", "OptimStateFp8"),
    ("torchao.float8.float8_training_tensor", "Float8TrainingTensor"),
    ("torchao.float8.float8_tensor", "Float8Tensor"),
    ("torchao.dtypes torchao.dtypes.affine_quantized_tensor", "AffineQuantizedTensor"),
    ("torchao.dtypes.uintx.plain_layout", "PlainAQTTensorImpl"),
    ("torchao.dtypes.uintx.tensor_core_tiled_layout", "TensorCoreTiledAQTTensorImpl"),
    ("torchao.dtypes.floatx.float8_layout", "Float8AQTTensorImpl"),
)  # fmt: skip
CLASSES = named(
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("pathlib pathlib._local", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"),
    ("datetime", "date datetime time timedelta timezone"),
    ("uuid", "UUID"),
    ("decimal", "Decimal"),
    ("ipaddress", "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network"),
    ("collections", "ChainMap UserDict UserList UserString"),
    # Protocol 2 uses Python 2's names of modules.
    ("UserDict", "IterableUserDict UserDict"),
    ("UserList", "UserList"),
    ("UserString", "UserString"),
    ("torch.torch_version", "TorchVersion"),
    ("numpy.random", "__RandomState_ctor"),
    ("numpy.random._pickle", "__bit_generator_ctor __generator_ctor __randomstate_ctor"),
    ("numpy.random._mt19937 numpy.random._pcg64 numpy.random._philox numpy.random._sfc64", _RNG),
    ("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
    ("omegaconf.base", "ContainerMetadata Metadata"),
    ("omegaconf.dictconfig", "DictConfig"),
    ("omegaconf.listconfig", "ListConfig"),
    ("omegaconf.nodes", "AnyNode BooleanNode FloatNode IntegerNode StringNode"),
    ("lightning.fabric.utilities.data lightning_fabric.utilities.data", "AttributeDict"),
    ("lightning.pytorch.utilities.parsing pytorch_lightning.utilities.parsing", "AttributeDict"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler LossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("torchao.quantization.granularity", "PerAxis PerBlock PerGroup PerRow PerTensor PerToken"),
    ("torchao.quantization.quantize_.workflows.int8.int8_tensor", "QuantizeTensorToInt8Kwargs"),
    ("torchao.quantization.quantize_.workflows.float8.float8_tensor", "QuantizeTensorToFloat8Kwargs"),
    ("torchao.prototype.mx_formats.mx_tensor", "QuantizeTensorToMXKwargs"),
    ("torchao.prototype.mx_formats.nvfp4_tensor", "QuantizeTensorToNVFP4Kwargs"),
    ("torchao.float8.inference", "Float8MMConfig"),
    ("torchao.float8.float8_training_tensor torchao.float8.float8_tensor", "LinearMMConfig ScaledMMConfig"),
    ("torchao.dtypes.utils", "Layout PlainLayout"),
    ("torchao.dtypes.uintx.tensor_core_tiled_layout", "TensorCoreTiledLayout"),
    ("torchao.dtypes.floatx.float8_layout", "Float8Layout"),
)
# Types that may also be mentioned as values, for instance as defaults or annotations.
MENTIONED = named(
    ("builtins __builtin__", (
        "bool bytearray bytes complex dict float frozenset int list long object set slice str tuple unicode"
    )),
    ("collections", "Counter OrderedDict defaultdict deque"),
    ("typing", "Any Dict List Optional Tuple Union"),
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Buffer Parameter"),
    ("numpy", (
        "bool bool_ bytes_ complex128 complex64 datetime64 float16 float32 float64 int16 int32 int64 int8 ndarray "
        "object_ str_ timedelta64 uint16 uint32 uint64 uint8 void"
    )),
)  # fmt: skip
# Kinds of tensors of torch's own classes, and storages that are leaves themselves.
KINDS = PLAIN_KINDS | {"storage"}
_GETATTR = named(("builtins __builtin__", "getattr"))
_DEFAULTDICT = Global("collections", "defaultdict")
_FRACTION = Global("fractions", "Fraction")
_RECONSTRUCT = named(("numpy.core.multiarray numpy._core.multiarray", "_reconstruct"))
# Numpy's arrays and scalars of elements that are not plain: objects and records.
_NUMPY = named(
    ("numpy", "dtype"),
    ("numpy.core.multiarray numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric numpy._core.numeric", "_frombuffer"),
)
_CALLED = _NUMPY | _RECONSTRUCT | _GETATTR | {_DEFAULTDICT, _FRACTION}
# Types of keys that hash quickly, and cannot be crafted to share a hash.
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})
_SMALL = 1 << 60
_RATIO = re.compile(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?")
_MEMBER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_TENSOR_NAMES = frozenset(map(str, TENSORS))


def _is_listed(node: Opaque) -> bool:
    """Return whether a call only converts its arguments to data."""
    cls, args = node.cls, node.args
    if type(cls) is not Global or type(args) is not tuple or node.call not in ("reduce", "newobj") or node.kwargs:
        return False
    if len(node.state) > 1 or not all(map(_is_state, node.state)):
        return False
    if cls in CLASSES or cls in ENUMS or cls in _NUMPY:
        return True
    if cls in _RECONSTRUCT:
        return args == (Global("numpy", "ndarray"), (0,), b"b")
    if cls == _DEFAULTDICT:
        return len(args) <= 1
    if cls == _FRACTION:
        return all(type(arg) is int or (type(arg) is str and _RATIO.fullmatch(arg)) for arg in args)
    if cls in _GETATTR:
        return len(args) == 2 and args[0] in ENUMS and type(args[1]) is str and bool(_MEMBER.fullmatch(args[1]))
    return False


def _is_state(state: Any) -> bool:
    """Return whether setting this state changes only the values of an object."""
    parts = state if type(state) is tuple else (state,)
    return not any(
        type(name) is str and name.startswith("__") for part in parts if isinstance(part, dict) for name in part
    )


def unlisted(node: Any) -> str:
    """Return the class or function that makes `node`, a node of a tree, if it is on no list; "" for all other nodes.

    The arguments of the call count too; the object's state and items do not.
    """
    kind = type(node)
    if isinstance(node, Composite):
        return "" if node.kind in COMPOSITES or node.kind in _TENSOR_NAMES else node.kind
    if kind is Global:
        listed = node in CLASSES or node in ENUMS or node in TENSORS or node in MENTIONED or node in _CALLED
        return "" if listed else str(node)
    if kind is not Opaque:
        return ""
    if not _is_listed(node):
        return str(node.name)
    for part in node.args if node.cls not in _GETATTR else ():
        if type(part) is Opaque and not _is_listed(part):
            return part.name
        if type(part) is Global and unlisted(part):
            return str(part)
    return ""


def plain_items(node: Any) -> dict[Any, Any] | None:
    """Return the items of a defaultdict as a plain dict; None for other nodes, or if keys may be slow to hash."""
    if type(node) is not Opaque or node.cls != _DEFAULTDICT or not _is_listed(node):
        return None
    plain = all(type(key) in _KEYS and (type(key) is not int or -_SMALL < key < _SMALL) for key, _ in node.items)
    return dict(node.items) if plain else None


def is_unlisted_kind(kind: str) -> bool:
    """Return whether the subclass of tensors with this full name is on no list."""
    return kind not in _TENSOR_NAMES


def unreviewed(pickle: bytes) -> str:
    """Return the first name or call in a pickle that was not reviewed, in words; "" if there is none. Raise UsageError
    if no feature judges pickles."""
    judges = _judges()
    if not judges:
        raise UsageError(
            "--opaque keep writes only objects that scan calls safe, but scan is not part of this installation."
        )
    readings: list[watching.PickleReading] = []
    for judging in judges:
        with watching.watched(readings.append, judging.Judge), refusing_attacks(False):
            load(pickle, without_tensors(), where="The output", limits=WHOLE_TREES)
    named = (brief(name, 200) for reading in readings for name in (*reading.suspects, *reading.unknown))
    calls = (call for reading in readings for call in reading.unknown_calls)
    return next(itertools.chain(named, calls), "")


def reviewed(names: list[Global]) -> set[Global]:
    """Return those of some names that a pickle may have on request."""
    judges = _judges() if names else ()
    return {name for name in names if judges and all(judging.is_reviewed(name) for judging in judges)}


def _judges() -> tuple[Any, ...]:
    return tuple(map(import_module, JUDGES.values()))


def leaving_out(options: Options) -> Callable[[str, Any], Any] | None:
    """Return the function by which `keymap.describe` leaves out objects that are not known to be data.

    If they are to be kept, it returns them, so that `describe` lists them. A defaultdict becomes a plain dict if only
    its factory is unknown. Return None if no structure record is written: then no object is written, but all tensors.
    """

    def leave_out(name: str, node: Any) -> Any:
        if not unlisted(node):
            return False
        if options.opaque == "keep":
            return node
        items = plain_items(node)
        return True if items is None else items

    return leave_out if options.structure else None

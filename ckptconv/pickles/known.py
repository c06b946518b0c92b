"""Judge what a pickle names and calls by what is known: what nobody has looked at is not called safe.

The tables here hold names that were reviewed, by exact module and name. All other names are unknown, also those that
lead to a known one by another way: pickle resolves a dotted name step by step, through whatever a module happens to
have imported. `attacks` says which of the other names are attacks.

What loading a pickle runs is judged by the names (importing a module runs it, and so does making an object of a class)
and by the calls (a function runs with arguments from the pickle).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptconv.pickles.containers import BUILTINS, CONSTANTS, today
from ckptconv.pickles.nodes import Global, Opaque


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
# The tables above say what is written too. Those below are for reading alone.

# Functions that make data of any arguments, in little time.
_FUNCTIONS = named(
    ("_codecs", "encode"),
    ("_operator operator", "itemgetter"),
    ("_struct struct", "Struct"),
    ("array", "_array_reconstructor array"),
    ("functools", "partial"),
    ("itertools", "chain count cycle repeat"),
    ("logging", "getLogger"),
    ("re", "_compile"),
    ("builtins", "enumerate object reversed zip"),
    ("numpy._core.multiarray", "_reconstruct scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.ma.core", "_mareconstruct"),
    ("pandas._libs.internals", "_unpickle_block"),
    ("pandas._libs.tslibs.nattype", "__nat_unpickle _nat_unpickle"),
    ("pandas._libs.tslibs.timedeltas", "_timedelta_unpickle"),
    ("pandas._libs.tslibs.timestamps", "_unpickle_timestamp"),
    ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.indexes.datetimes", "_new_DatetimeIndex"),
    ("pandas.core.indexes.interval", "_new_IntervalIndex"),
    ("pandas.core.indexes.period", "_new_PeriodIndex"),
    ("pandas.core.indexes.timedeltas", "_new_TimedeltaIndex"),
    ("pandas.core.internals.blocks", "new_block"),
    ("polars._utils.unpickle", "_reconstruct"),
    ("dateutil.tz.tz", "tzlocal tzoffset tzutc"),
    ("pytz", "_UTC _p"),
    ("zoneinfo", "ZoneInfo._unpickle"),
    ("sklearn.metrics._dist_metrics sklearn.neighbors._ball_tree sklearn.neighbors._kd_tree", "newObj"),
    ("torch._tensor torch.tensor", "_rebuild_from_type _rebuild_from_type_v2"),
    ("torch._utils", (
        "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy _rebuild_meta_tensor_no_storage "
        "_rebuild_nested_tensor _rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor "
        "_rebuild_sparse_csr_tensor _rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 "
        "_rebuild_wrapper_subclass _rebuild_xla_tensor"
    )),
    ("torch.jit._pickle", "build_boollist build_doublelist build_intlist build_tensorlist restore_type_tag"),
    ("torch.serialization", "_get_layout"),
    ("torch.storage", "_load_from_bytes"),
)  # fmt: skip
# Classes that keep what they get as their attributes, or their own arrays; and those that were looked at for what
# `__new__` and `__setstate__` do.
_LOADED = named(
    ("_io io", "BytesIO StringIO"),
    ("builtins", (
        "ArithmeticError AssertionError AttributeError BaseException Exception FileNotFoundError IndexError KeyError "
        "KeyboardInterrupt LookupError NotImplementedError OSError OverflowError RuntimeError StopIteration TypeError "
        "ValueError ZeroDivisionError"
    )),
    ("inspect", "Parameter Signature _ParameterKind _empty"),
    ("logging", "Logger RootLogger"),
    ("random", "Random"),
    ("zoneinfo", "ZoneInfo"),
    ("numpy", "matrix recarray record"),
    ("numpy.ma", "MaskedArray"),
    ("numpy.ma.core", "MaskedArray"),
    ("numpy.dtypes", (
        "BoolDType Complex128DType Float32DType Float64DType Int32DType Int64DType ObjectDType StrDType StringDType"
    )),
    ("numpy.random", "Generator RandomState"),
    ("numpy.random._generator", "Generator"),
    ("numpy.random.mtrand", "RandomState"),
    ("joblib.numpy_pickle", "NDArrayWrapper NumpyArrayWrapper ZNDArrayWrapper"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", (
        "BFloat16Storage BoolStorage ByteStorage CharStorage ComplexDoubleStorage ComplexFloatStorage DoubleStorage "
        "FloatStorage Generator HalfStorage IntStorage LongStorage QInt32Storage QInt8Storage QUInt2x4Storage "
        "QUInt4x2Storage QUInt8Storage ShortStorage Size UntypedStorage device dtype"
    )),
    ("torch.cuda", (
        "BFloat16Storage BoolStorage ByteStorage CharStorage DoubleStorage FloatStorage HalfStorage IntStorage "
        "LongStorage ShortStorage"
    )),
    ("torch torch.cuda", (
        "BFloat16Tensor BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor "
        "ShortTensor"
    )),
    ("torch.autograd.variable", "Variable"),
    ("torch.storage", "TypedStorage UntypedStorage _LegacyStorage _UntypedStorage"),
    ("torch._C", "DoubleStorageBase FloatStorageBase HalfStorageBase Generator"),
    ("torch.distributed._mesh_layout", "_FlatLayout _MeshLayout"),
    ("torch.distributed._shard.metadata", "ShardMetadata"),
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.shard", "Shard"),
    ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec"),
    ("torch.distributed._tensor.api torch.distributed.tensor torch.distributed.tensor._api", "DTensor"),
    ("torch.distributed._tensor.placement_types torch.distributed.tensor.placement_types", (
        "DTensorSpec Partial Replicate Shard TensorMeta _Partial _StridedShard"
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING"
    )),
    ("torch.distributed.checkpoint.planner", "SavePlan TensorWriteData WriteItem WriteItemType"),
    ("torch.distributed.device_mesh torch.distributed._tensor.device_mesh", "DeviceMesh"),
    ("torch.distributed.remote_device torch.distributed._remote_device", "_remote_device"),
    ("torch.distributed.tensor._dtensor_spec", "DTensorSpec ShardOrderEntry TensorMeta"),
    ("torch.nn.modules.activation", (
        "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish "
        "MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus Softshrink "
        "Softsign Tanh Tanhshrink Threshold"
    )),
    ("torch.nn.modules.adaptive", "AdaptiveLogSoftmaxWithLoss"),
    ("torch.nn.modules.batchnorm", (
        "BatchNorm1d BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d SyncBatchNorm"
    )),
    ("torch.nn.modules.channelshuffle", "ChannelShuffle"),
    ("torch.nn.modules.container", "Container ModuleDict ModuleList ParameterDict ParameterList Sequential"),
    ("torch.nn.modules.conv", (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d LazyConv2d LazyConv3d "
        "LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d"
    )),
    ("torch.nn.modules.distance", "CosineSimilarity PairwiseDistance"),
    ("torch.nn.modules.dropout", "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout"),
    ("torch.nn.modules.flatten", "Flatten Unflatten"),
    ("torch.nn.modules.fold", "Fold Unfold"),
    ("torch.nn.modules.instancenorm", (
        "InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d"
    )),
    ("torch.nn.modules.linear", "Bilinear Identity LazyLinear Linear NonDynamicallyQuantizableLinear"),
    ("torch.nn.modules.loss", (
        "BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss HingeEmbeddingLoss "
        "HuberLoss KLDivLoss L1Loss MSELoss MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss "
        "MultiMarginLoss NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss "
        "TripletMarginWithDistanceLoss"
    )),
    ("torch.nn.modules.module", "Module"),
    ("torch.nn.modules.normalization", "CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm"),
    ("torch.nn.modules.padding", (
        "CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d "
        "ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d "
        "ZeroPad3d"
    )),
    ("torch.nn.modules.pixelshuffle", "PixelShuffle PixelUnshuffle"),
    ("torch.nn.modules.pooling", (
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d "
        "AvgPool1d AvgPool2d AvgPool3d FractionalMaxPool2d FractionalMaxPool3d LPPool1d LPPool2d LPPool3d MaxPool1d "
        "MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d"
    )),
    ("torch.nn.modules.rnn", "GRU GRUCell LSTM LSTMCell RNN RNNCell"),
    ("torch.nn.modules.sparse", "Embedding EmbeddingBag"),
    ("torch.nn.modules.transformer", (
        "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer"
    )),
    ("torch.nn.modules.upsampling", "Upsample UpsamplingBilinear2d UpsamplingNearest2d"),
    ("torch.nn.parameter", "UninitializedBuffer UninitializedParameter"),
    ("torch.nn.utils.parametrizations", "_Orthogonal _SpectralNorm _WeightNorm"),
    ("torch.nn.utils.parametrize", "ParametrizationList"),
    ("torch.nn.utils.rnn", "PackedSequence"),
    ("torch.optim.adadelta", "Adadelta"),
    ("torch.optim.adagrad", "Adagrad"),
    ("torch.optim.adam", "Adam"),
    ("torch.optim.adamax", "Adamax"),
    ("torch.optim.adamw", "AdamW"),
    ("torch.optim.asgd", "ASGD"),
    ("torch.optim.lbfgs", "LBFGS"),
    ("torch.optim.lr_scheduler", (
        "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LRScheduler "
        "LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR StepLR"
    )),
    ("torch.optim.nadam", "NAdam"),
    ("torch.optim.optimizer", "Optimizer _RequiredParameter"),
    ("torch.optim.radam", "RAdam"),
    ("torch.optim.rmsprop", "RMSprop"),
    ("torch.optim.rprop", "Rprop"),
    ("torch.optim.sgd", "SGD"),
    ("torch.optim.sparse_adam", "SparseAdam"),
    ("torch.optim.swa_utils", "AveragedModel SWALR"),
)  # fmt: skip
# Functions of known libraries that read formats of their own, or import by name. Honest files call them, and they are
# as unknown as the classes of these libraries.
_READERS = named(
    ("keras.saving.pickle_utils keras.src.saving.pickle_utils", "deserialize_model_from_bytesio"),
    ("pyarrow.lib", "_restore_array _reconstruct_record_batch _reconstruct_table py_buffer schema type_for_alias"),
    ("toolz.functoolz", "_restore_curry"),
)
# Functions that honest pickles mention as values, such as the activation of a layer. Calling them is unknown.
_VALUES = named(
    ("builtins", "abs all any len max min print round sorted sum type"),
    ("torch._C._nn", "gelu"),
    ("torch.nn.functional", (
        "celu cross_entropy elu gelu glu hardsigmoid hardswish hardtanh leaky_relu log_softmax logsigmoid mish "
        "mse_loss normalize prelu relu relu6 selu sigmoid silu softmax softplus softsign tanh"
    )),
)  # fmt: skip


def _of_members(args: tuple[Any, ...]) -> bool:
    """Whether `getattr` gets an attribute, as enums and methods are pickled. Calling it is another matter."""
    return len(args) == 2 and type(args[1]) is str and args[1].isidentifier() and not args[1].startswith("__")


def _of_one(args: tuple[Any, ...]) -> bool:
    """Whether `iter` gets what it goes through and nothing to call, or `type` an object whose class it returns."""
    return len(args) == 1


def _of_nothing(args: tuple[Any, ...]) -> bool:
    """Whether `tzfile` gets no file to open."""
    return bool(args) and args[0] is None


def _of_calls(args: tuple[Any, ...]) -> bool:
    """Whether a function that calls its first argument with its second one makes a call that was reviewed."""
    return len(args) > 1 and type(args[1]) is tuple and is_known_call(args[0], args[1])


def _of_generics(args: tuple[Any, ...]) -> bool:
    """Whether `getitem` makes a type such as List[int]."""
    return len(args) == 2 and type(args[0]) is Global and args[0].module in ("typing", *BUILTINS)


def _of_classes(args: tuple[Any, ...]) -> bool:
    """Whether `copyreg._reconstructor` makes an object of a class on one of Python's own types."""
    return len(args) == 3 and all(type(arg) is Global for arg in args[:2]) and args[1] in MENTIONED


def _of_rebuilders(args: tuple[Any, ...]) -> bool:
    """Whether `_rebuild_from_type_v2` calls what torch has it call."""
    return bool(args) and type(args[0]) is Global and args[0].module == "torch._utils" and args[0] in _FUNCTIONS


def _of_bytes(args: tuple[Any, ...]) -> bool:
    """Whether `_load_from_bytes` loads bytes that are in the pickle, so that they can be looked at."""
    return len(args) == 1 and isinstance(args[0], (bytes, bytearray))


# Functions that are known for some arguments only.
CONDITIONS: dict[Global, Callable[[tuple[Any, ...]], bool]] = {
    Global("builtins", "getattr"): _of_members,
    Global("builtins", "iter"): _of_one,
    Global("builtins", "type"): _of_one,
    Global("dateutil.tz.tz", "tzfile"): _of_nothing,
    Global("jax._src.array", "_reconstruct_array"): _of_calls,
    Global("numba.core.types.abstract", "_type_reconstructor"): _of_calls,
    Global("_operator", "getitem"): _of_generics,
    Global("operator", "getitem"): _of_generics,
    Global("copyreg", "_reconstructor"): _of_classes,
    Global("torch._tensor", "_rebuild_from_type"): _of_rebuilders,
    Global("torch._tensor", "_rebuild_from_type_v2"): _of_rebuilders,
    Global("torch.tensor", "_rebuild_from_type"): _of_rebuilders,
    Global("torch.storage", "_load_from_bytes"): _of_bytes,
}
_GETATTR = named((" ".join(BUILTINS), "getattr"))
# What may be called with any arguments.
_CALLED = (
    ENUMS | TENSORS | CLASSES | MENTIONED | _FUNCTIONS | _LOADED | frozenset(CONDITIONS)
    | named(("numpy", "dtype"), ("fractions", "Fraction"), ("copyreg", "__newobj__ __newobj_ex__"))
    | {Global(*name) for name in CONSTANTS}
)  # fmt: skip
_KNOWN = _CALLED | _VALUES
# Attributes that unpicklers look up in an object, and call with what the pickle says.
CALLED_BY_NAME = frozenset({"__setstate__", "__class__", "add", "append", "extend"})


def current(name: Global) -> Global:
    """Return `name` as today's Python and numpy spell it."""
    module, attribute = today((name.module, name.name))
    if module.startswith("numpy.core."):
        module = f"numpy._core.{module.removeprefix('numpy.core.')}"
    return Global(module, attribute)


def is_known(name: Global) -> bool:
    """Whether a class or function that a pickle names was reviewed: importing it, or making an object of it without
    arguments and giving that a state, runs nothing but what it should."""
    return name in _KNOWN or current(name) in _KNOWN


def is_known_call(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether calling `function` with `args` runs what was reviewed, or makes an object of a class.

    Classes are told from functions by their names alone, as nothing is imported. What making an object of one runs is a
    question of the class, which is judged by its name (`is_known`).
    """
    if type(function) is Opaque and function.cls in _GETATTR and _of_members(function.args):
        owner, attribute = function.args
        function = Global(owner.module, f"{owner.name}.{attribute}") if type(owner) is Global else None
        return function in _FUNCTIONS
    if type(function) is not Global:
        # What a call returned may be anything.
        return False
    name = current(function)
    if name in CONDITIONS:
        return CONDITIONS[name](args)
    return name in _CALLED or function in _CALLED or name in _READERS or is_class(name)


def is_class(name: Global) -> bool:
    """Whether a name is that of a class by custom, or of the function by which Cython makes an object of one."""
    *outer, last = name.name.split(".")
    # A step that is spelled like no class leads through a module or an object, to anything.
    is_nested = all(step.lstrip("_")[:1].isupper() for step in outer)
    return is_nested and (last.lstrip("_")[:1].isupper() or last.startswith("__pyx_unpickle_"))


def calls_by_name(state: Any) -> bool:
    """Whether a state holds a callable under a name that unpicklers call."""
    return any(
        name in CALLED_BY_NAME and type(part[name]) in (Global, Opaque)
        for part in (state if type(state) is tuple else (state,))
        if isinstance(part, dict)
        for name in part.keys() & CALLED_BY_NAME
    )

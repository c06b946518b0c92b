"""The tables of attacks: what honest files call is not in them, and what no checkpoint has a reason to call is."""

from __future__ import annotations

import pytest

from ckptconv.features.attacks import tables
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.pickles.containers import CONSTANTS, PYTHON
from ckptconv.pickles.nodes import Global, Opaque

HONEST = [
    ("builtins", "getattr"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("functools", "partial"),
    ("argparse", "Namespace"),
    ("pathlib", "PosixPath"),
    ("os", "stat_result"),
    ("socket", "AddressFamily"),
    ("code.models", "Net"),
    ("mine.os", "Config"),
    ("mine", "Outer.Inner"),
    ("mine", "system"),
    ("mine", "eval"),
    ("operator", "attrgetter"),
    ("datetime", "datetime"),
    ("torch.fx.graph_module", "reduce_graph_module"),
    ("uuid", "UUID"),
    ("codecs", "encode"),
    ("_codecs", "encode"),
    ("operator", "itemgetter"),
    ("logging", "Logger"),
    ("logging", "getLogger"),
    ("torch.optim.adamw", "AdamW"),
    ("torch.optim.lr_scheduler", "LambdaLR"),
    ("numpy.random._pickle", "__generator_ctor"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("pandas.core.frame", "DataFrame"),
    ("pandas._libs.internals", "_unpickle_block"),
    ("scipy.sparse._csr", "csr_matrix"),
    ("omegaconf.dictconfig", "DictConfig"),
    ("lightning.fabric.utilities.data", "AttributeDict"),
    ("transformers.training_args", "TrainingArguments"),
    ("transformers.trainer_utils", "SaveStrategy"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("torchao.quantization", "Int8Tensor"),
    ("torch.distributed._shard.sharded_tensor.shard", "Shard"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.nn.modules.linear", "Linear"),
    ("cloudpickle.cloudpickle", "_make_function"),
    ("cloudpickle.cloudpickle", "_builtin_type"),
    ("types", "CodeType"),
    ("types", "FunctionType"),
    ("test.models", "Net"),
    ("compression.codec", "Config"),
    ("signal", "Signals"),
    ("typing", "Any"),
    ("mine", "load"),
    ("mine.torch", "save"),
]


@pytest.mark.parametrize("named", HONEST, ids=".".join)
def test_what_honest_files_call_is_no_attack(named: tuple[str, str]) -> None:
    assert not tables.is_suspect(Global(*named))


@pytest.mark.parametrize(
    "named",
    [
        ("os", "system"),
        ("nt", "system"),
        ("os.path", "os.system"),
        ("torch", "os"),
        ("torch.serialization", "os.system"),
        ("torch", "hub.load"),
        ("torch.hub", "load"),
        ("mine", "builtins.eval"),
        ("mine", "f.__globals__"),
        ("__builtin__", "execfile"),
        ("pip", "main"),
        ("pip._internal", "main"),
        ("importlib.util", "spec_from_file_location"),
        ("socket", "create_connection"),
        ("wave", "open"),
        ("mailbox", "mbox"),
        ("_ctypes", "dlopen"),
        ("multiprocessing.connection", "Client"),
        ("concurrent.futures.thread", "ThreadPoolExecutor"),
        ("pstats", "Stats"),
        ("xml.etree.ElementTree", "parse"),
        ("torch", "from_file"),
        ("torch", "FloatStorage.from_file"),
        ("torch._C", "PyTorchFileWriter"),
        ("torch.utils.file_baton", "FileBaton"),
        ("mine", "torch.UntypedStorage.from_file"),
        ("safetensors._safetensors_rust", "serialize_file"),
        ("numpy", "ndarray.tofile"),
        ("numpy.core.records", "fromfile"),
        ("pandas.core.frame", "DataFrame.to_pickle"),
        ("pandas.io.parsers.readers", "read_csv"),
        ("scipy.io", "savemat"),
        ("scipy.sparse", "save_npz"),
        ("a" * 10_000_000, "os.system"),
    ],
    ids=lambda named: ".".join(named)[:50],
)
def test_what_no_checkpoint_has_a_reason_to_call(named: tuple[str, str]) -> None:
    assert tables.is_suspect(Global(*named))


def test_no_table_has_a_name_that_a_vocabulary_knows_as_data() -> None:
    words = vocabulary(lambda pid: None)
    known = {*PYTHON, *CONSTANTS, *words.constructors, *words.constants, *words.classes, *words.builders}
    assert len(known) > 150
    assert [name for name in known if tables.is_suspect(Global(*name))] == []


def test_a_function_is_data_and_a_call_of_it_an_attack() -> None:
    """As cloudpickle, dill and joblib have functions: made of code that the pickle holds."""
    types = Opaque(Global("cloudpickle.cloudpickle", "_builtin_type"), ("FunctionType",))
    code = Opaque(Opaque(Global("cloudpickle.cloudpickle", "_builtin_type"), ("CodeType",)), (0,))
    for maker in (Global("types", "FunctionType"), Global("dill._dill", "_create_function"), types):
        made = Opaque(maker, (code, {}))
        assert tables.code_called(maker, (code, {})) is None, "the function itself"
        assert tables.code_called(Global("functools", "partial"), (made,)) is None
        assert tables.code_called(made, ()) is not None
        assert tables.code_called(Global("builtins", "map"), (made, [1])) is not None
    assert tables.code_called(code.cls, (0,)) is None, "code is no function yet"

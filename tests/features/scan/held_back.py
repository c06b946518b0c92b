"""Live payloads that were written after the tables of scan, and that no table was made with.

Each is the name of a file and its bytes, which make the file CANARY when Python's pickle loads them, or when the loading
program ends. `python tests/features/scan/held_back.py` loads each in a process of its own, and says which made its
canary: run it where nothing is to be lost.
"""

from __future__ import annotations

import atexit
import base64
import bz2
import contextlib
import gzip
import io
import lzma
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from attacks.assemble import called, dotted, listed, mapped, name, number, raw, several, text
from features.scan import further, later

Made = Callable[[str], bytes]
NONE, TRUE = b"N", b"\x88"
OS = called(name("importlib", "import_module"), text("os"))
NAMESPACE = name("argparse", "Namespace") + b")\x81"


def _bash(path: str) -> bytes:
    return text(f"touch {path}")


def _argv(path: str) -> bytes:
    return listed(text("touch"), text(path))


def _code(path: str) -> bytes:
    return text(f"open({path!r}, 'w').close()")


def _attribute(of: bytes, what: str) -> bytes:
    return called(name("builtins", "getattr"), of, text(what))


def _of(module: str, attribute: str, *arguments: Callable[[str], bytes] | bytes) -> Made:
    """A call of a function with these arguments."""
    function = dotted(module, attribute) if "." in attribute else name(module, attribute)
    return lambda path: called(function, *(each(path) if callable(each) else each for each in arguments))


def _path(path: str) -> bytes:
    return text(path)


def _file(path: str) -> bytes:
    return called(name("pathlib", "PosixPath"), text(path))


def _loaded(path: str) -> bytes:
    return raw(b"\x80\x04" + called(name("posix", "system"), _bash(path)) + b".")


# What is called, by name: programs that are started, code that is run, files that are written.
CALLS: dict[str, Made] = {
    "subprocess.getoutput": _of("subprocess", "getoutput", _bash),
    "subprocess.getstatusoutput": _of("subprocess", "getstatusoutput", _bash),
    "subprocess.check_call": _of("subprocess", "check_call", _argv),
    "subprocess.Popen by OBJ": lambda path: b"(" + name("subprocess", "Popen") + _argv(path) + b"o",
    "os.spawnvp": _of("os", "spawnvp", number(0), text("touch"), _argv),
    "os.posix_spawnp": _of("posix", "posix_spawnp", text("touch"), _argv, mapped()),
    "os.execvp": _of("os", "execvp", text("touch"), _argv),
    "os._execvpe": _of("os", "_execvpe", text("touch"), _argv),
    "os.open": _of("os", "open", _path, number(os.O_CREAT | os.O_WRONLY)),
    "os.mkdir": _of("posix", "mkdir", _path),
    "os.makedirs": _of("os", "makedirs", _path),
    "os.mkfifo": _of("posix", "mkfifo", _path),
    "os.symlink": _of("posix", "symlink", text("/etc/hostname"), _path),
    "os.link": _of("posix", "link", text(__file__), _path),
    "shutil.copyfile": _of("shutil", "copyfile", text("/etc/hostname"), _path),
    "shutil.copytree": _of("shutil", "copytree", text("/etc/apt"), _path),
    "pathlib.Path.touch": _of("pathlib", "Path.touch", _file),
    "pathlib.Path.mkdir": _of("pathlib", "PosixPath.mkdir", _file),
    "pathlib.Path.write_bytes": _of("pathlib", "Path.write_bytes", _file, raw(b"x")),
    "io.open": _of("io", "open", _path, text("w")),
    "_io.FileIO": _of("_io", "FileIO", _path, text("w")),
    "codecs.open": _of("codecs", "open", _path, text("w")),
    "gzip.GzipFile": _of("gzip", "GzipFile", _path, text("wb")),
    "lzma.LZMAFile": _of("lzma", "LZMAFile", _path, text("w")),
    "zipfile.ZipFile": _of("zipfile", "ZipFile", _path, text("w")),
    "tarfile.TarFile": _of("tarfile", "TarFile", _path, text("w")),
    "sqlite3.connect": lambda path: called(_attribute(called(name("sqlite3", "connect"), text(path)), "execute"), text("create table t(a)")),
    "dbm.dumb.open": lambda path: called(_attribute(called(name("dbm.dumb", "open"), text(path)), "sync")),
    "logging.FileHandler": _of("logging", "FileHandler", _path),
    "logging.handlers": _of("logging.handlers", "RotatingFileHandler", _path),
    "logging.config.dictConfig": lambda path: called(
        name("logging.config", "dictConfig"),
        mapped(text("version"), number(1), text("formatters"), mapped(text("f"), mapped(text("()"), text("os.mkdir"), text("path"), text(path)))),
    ),
    "py_compile": _of("py_compile", "compile", text(os.__file__), _path),
    "venv.EnvBuilder.create": lambda path: called(dotted("venv", "EnvBuilder.create"), called(name("venv", "EnvBuilder")), text(path)),
    "tempfile.mkdtemp": _of("tempfile", "mkdtemp", text("x"), text("y"), lambda path: called(dotted("os", "path.dirname"), text(path))),
    "timeit.timeit": _of("timeit", "timeit", _code, text("pass"), name("time", "perf_counter"), number(1)),
    "timeit.repeat": _of("timeit", "repeat", text("pass"), _code),
    "cProfile.run": _of("cProfile", "run", _code),
    "profile.run": _of("profile", "run", _code),
    "bdb.Bdb.run": lambda path: called(_attribute(called(name("bdb", "Bdb")), "runcall"), name("posix", "system"), _bash(path)),
    "trace.Trace.run": lambda path: called(_attribute(called(name("trace", "Trace"), number(0), number(0)), "run"), _code(path)),
    "runpy._run_code": _of("runpy", "_run_code", lambda path: called(name("builtins", "compile"), _code(path), text("x"), text("exec")), mapped()),
    "code.InteractiveInterpreter": lambda path: called(_attribute(called(name("code", "InteractiveInterpreter")), "runsource"), _code(path)),
    "code.InteractiveConsole.push": lambda path: called(dotted("code", "InteractiveConsole.push"), called(name("code", "InteractiveConsole")), _code(path)),
    "typing.ForwardRef": lambda path: called(_attribute(called(name("typing", "ForwardRef"), _code(path)), "_evaluate"), mapped(), mapped(), called(name("builtins", "frozenset"))),
    "pydoc.pipepager": _of("pydoc", "pipepager", text("x"), _bash),
    "imaplib.IMAP4_stream": _of("imaplib", "IMAP4_stream", _bash),
    "_osx_support": _of("_osx_support", "_read_output", _bash),
    "uuid._get_command_stdout": _of("uuid", "_get_command_stdout", text("touch"), _path),
    "webbrowser": lambda path: called(_attribute(called(name("webbrowser", "GenericBrowser"), listed(text("touch"), text("%s"))), "open"), text(path)),
    "multiprocessing.util": lambda path: called(_attribute(called(name("multiprocessing.context", "Process"), NONE, name("posix", "system"), NONE, several(_bash(path))), "run")),
    "threading.Thread": lambda path: called(dotted("threading", "Thread.run"), called(name("threading", "Thread"), NONE, name("posix", "system"), NONE, several(_bash(path)))),
    "threading.Timer": lambda path: called(_attribute(called(name("threading", "Timer"), number(0), name("posix", "system"), listed(_bash(path))), "run")),
    "a pool of threads": lambda path: called(_attribute(called(name("concurrent.futures", "ThreadPoolExecutor"), number(1)), "submit"), name("posix", "system"), _bash(path)),
    "atexit.register": _of("atexit", "register", name("posix", "system"), _bash),
    "weakref.finalize": _of("weakref", "finalize", name("argparse", "Namespace"), name("posix", "system"), _bash),
    "contextlib.ExitStack": lambda path: called(dotted("contextlib", "ExitStack.callback"), called(name("contextlib", "ExitStack")), name("posix", "system"), _bash(path)) + called(name("posix", "mkdir"), text(path)) + b"\x86",
    "operator.methodcaller": lambda path: called(called(name("operator", "methodcaller"), text("system"), _bash(path)), OS),
    "operator.attrgetter": lambda path: called(called(called(name("_operator", "attrgetter"), text("system")), OS), _bash(path)),
    "operator.call": _of("operator", "call", name("posix", "system"), _bash),
    "functools.partial": lambda path: called(called(name("functools", "partial"), name("posix", "system"), _bash(path))),
    "functools.reduce": lambda path: called(name("functools", "reduce"), name("posix", "mkdir"), listed(text(path), number(0o700))),
    "a map": lambda path: called(name("builtins", "list"), called(name("builtins", "map"), name("posix", "system"), listed(_bash(path)))),
    "a starmap": lambda path: called(name("collections", "deque"), called(name("itertools", "starmap"), name("posix", "system"), listed(several(_bash(path))))),
    "a filter": lambda path: called(name("builtins", "set"), called(name("builtins", "filter"), name("posix", "mkdir"), listed(text(path)))),
    "iter with a call": lambda path: called(name("builtins", "next"), called(name("builtins", "iter"), called(name("functools", "partial"), name("posix", "system"), _bash(path)), number(5))),
    "a default of a dict": lambda path: called(name("_operator", "getitem"), called(name("collections", "defaultdict"), called(name("functools", "partial"), name("posix", "system"), _bash(path))), text("a")),
    "__setstate__ by BUILD": lambda path: NAMESPACE + mapped(text("__setstate__"), name("posix", "system")) + b"b" + _bash(path) + b"b",
    "append by APPEND": lambda path: NAMESPACE + mapped(text("append"), name("posix", "mkdir")) + b"b" + text(path) + b"a",
    "extend by APPENDS": lambda path: NAMESPACE + mapped(text("append"), name("posix", "system")) + b"b(" + _bash(path) + b"e",
    "add by ADDITEMS": lambda path: NAMESPACE + mapped(text("add"), name("posix", "system")) + b"b(" + _bash(path) + b"\x90",
    "INST": lambda path: b"(" + _bash(path) + b"iposix\nsystem\n",
    "a nested pickle": _of("pickle", "loads", _loaded),
    "a nested pickle of C": _of("_pickle", "loads", _loaded),
    "a nested unpickler": lambda path: called(_attribute(called(name("pickle", "_Unpickler"), called(name("io", "BytesIO"), _loaded(path))), "load")),
    "multiprocessing.reduction": _of("_pickle", "Unpickler.load", lambda path: called(name("_pickle", "Unpickler"), called(name("_io", "BytesIO"), _loaded(path)))),
    "eval of base64": _of("builtins", "eval", lambda path: called(name("base64", "b64decode"), raw(base64.b64encode(f"open({path!r},'w')".encode())))),
    "exec of zlib": _of("builtins", "exec", lambda path: called(name("zlib", "decompress"), raw(zlib.compress(f"open({path!r},'w')".encode())))),
    "a function of types": lambda path: called(called(name("types", "FunctionType"), called(name("builtins", "compile"), _code(path), text(""), text("exec")), mapped(text("__builtins__"), called(name("importlib", "import_module"), text("builtins"))))),
    "numpy runstring": _of("numpy.testing", "runstring", _code, mapped()),
    "numpy.savetxt": _of("numpy", "savetxt", _path, listed(number(1))),
    "numpy.memmap": _of("numpy", "memmap", _path, text("u1"), text("w+"), number(0), number(4)),
    "numpy.ndarray.tofile": lambda path: called(dotted("numpy", "ndarray.tofile"), called(name("numpy", "zeros"), number(3)), text(path)),
    "numpy.vectorize": lambda path: called(called(name("numpy", "vectorize"), name("posix", "system")), _bash(path)),
    "numpy.random with a loader": lambda path: called(name("numpy.random._pickle", "__generator_ctor"), _bash(path), name("posix", "system")),
    "torch.save": _of("torch", "save", listed(number(1)), _path),
    "torch loads bytes": _of("torch.storage", "_load_from_bytes", lambda path: raw(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2) + b"\x80\x02" + called(name("posix", "system"), _bash(path)) + b"." + pickle.dumps([], 2))),
    "torch.utils.collect_env": _of("torch.utils.collect_env", "run", _bash),
    "torch.jit runs code": lambda path: called(dotted("torch._tensor", "_rebuild_from_type_v2"), name("posix", "system"), name("builtins", "int"), several(_bash(path)), mapped()),
    "torch._utils rebuilds": lambda path: called(name("torch._utils", "_rebuild_tensor"), several(_bash(path)), number(0), several(), called(name("posix", "system"), _bash(path))),
    "a hook of a module": lambda path: called(name("torch.nn", "Sequential") + b")R" + mapped(text("forward"), name("posix", "system")) + b"b", _bash(path)),
    "sympy.sympify": _of("sympy", "sympify", _code),
    "an item of a state": lambda path: name("collections", "OrderedDict") + b")R" + text("a") + called(name("posix", "system"), _bash(path)) + b"s",
    "a path of modules": lambda path: called(dotted("logging", "os.system"), _bash(path)),
    "a module of a class": lambda path: called(dotted("logging", "os.popen"), _bash(path)),
}  # fmt: skip


def _zipped(data: bytes, method: int = zipfile.ZIP_STORED, member: str = "archive/data.pkl") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr(member, data)
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def _tarred(data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("weights/model.pkl")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


# Files that hide a pickle, by name. Programs that unpack them load what is inside.
WRAPPED: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "x.pkl.gz": (gzip.compress, gzip.decompress),
    "x.pkl.bz2": (bz2.compress, bz2.decompress),
    "x.joblib": (lzma.compress, lzma.decompress),
    "model.z": (zlib.compress, zlib.decompress),
    "pytorch_model.bin": (_zipped, lambda data: zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")),
    "model.pt": (
        lambda data: _zipped(data, zipfile.ZIP_DEFLATED),
        lambda data: zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl"),
    ),
    "model.tar.gz": (
        _tarred,
        lambda data: gzip.decompress(data)[tarfile.BLOCKSIZE :],
    ),
    "notes.txt": (lambda data: data, lambda data: data),
}


def payloads(path: str) -> dict[str, tuple[str, bytes]]:
    """By name: a file name, and the bytes of a file that makes the file `path`."""
    more = {"later": later.CALLS, "further": further.CALLS}
    calls = CALLS | {f"{when}: {each}": make for when, of in more.items() for each, make in of.items()}
    made = {each: ("x.pkl", b"\x80\x04" + make(path) + b".") for each, make in calls.items()}
    plain = b"\x80\x04" + called(name("posix", "system"), _bash(path)) + b"."
    return made | {f"in {file}": (file, wrap(plain)) for file, (wrap, _) in WRAPPED.items()}


def live() -> list[tuple[str, bool]]:
    """Load each payload in a process of its own. Return the names, and whether the canary was made."""
    import torch  # noqa: F401

    left = {f"further: {name}" for name in further.WITHOUT_A_FILE}
    return [(each, _makes_canary(each)) for each in payloads("") if each not in left]


def _makes_canary(each: str) -> bool:
    directory = tempfile.mkdtemp()
    canary = os.path.join(directory, "canary")
    file, data = payloads(canary)[each]
    data = WRAPPED[file][1](data) if each.startswith("in ") else data
    child = os.fork()
    if child == 0:
        os.chdir(directory)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        with contextlib.suppress(BaseException):
            pickle.loads(data)
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    is_live = bool(os.listdir(directory))
    shutil.rmtree(directory)
    return is_live


def main() -> int:
    told = live()
    print(f"{len(told)} payloads; not live: {[each for each, is_live in told if not is_live]}")
    return not all(is_live for _, is_live in told)


if __name__ == "__main__":
    sys.exit(main())

"""Tells attacks from odd files: what no checkpoint has a reason to call.

Nothing that a pickle names is ever imported or called, here or anywhere; safety does not rest on these tables, and
what they lack is kept as inert data like everything else that is not known. They only decide whether a file is called
what it is: who meets an attack wants to hear of it, not to see its tensors converted as if nothing were wrong.

A pickle is an attack if it names something of the tables and calls anything that is not known to be data, or is
broken: some run before they break. A name by itself does nothing; handed to `functools.partial`, `map` or
`_rebuild_from_type_v2` it is as good as called, and so is one that lies in the state of an object. The order of the
two does not matter.

getattr is not in the tables, nor torch.storage._load_from_bytes: honest enums, bound methods and tensors that were
pickled without torch.save bring them. To get an attribute is an attack only where that leads out of an object into the
interpreter, or is something that runs programs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from .errors import UnsafeError
from .tree import Global
from .units import brief

# Modules of which nothing belongs into a checkpoint: they start programs, run code, or reach for files, networks and
# the interpreter; Python 2's too. Packages are meant with all that is in them; a module of such a name in a package of
# the user's own, or the other way round, is another thing.
_MODULES = frozenset(
    """
    _aix_support _bootsubprocess _imp _osx_support _posixshmem _posixsubprocess _socket _sqlite3 _thread _winapi
    _xxsubinterpreters antigravity bdb bsddb cgi cgitb code codeop commands compileall cProfile crypt doctest
    faulthandler fcntl fileinput ftplib http.client http.server httplib imaplib imp linecache mailcap marshal mmap
    msilib msvcrt multiprocessing.popen_fork multiprocessing.popen_spawn_posix multiprocessing.process
    multiprocessing.spawn multiprocessing.util netrc nntplib nt pdb pexpect pipes pkgutil platform popen2 poplib posix
    profile pty py_compile pydoc readline rlcompleter runpy select shelve shutil site smtpd smtplib socket socketserver
    subprocess sys sysconfig telnetlib tempfile timeit trace urllib2 webbrowser winreg zipapp zipimport
    """.split()  # noqa: SIM905
)
_PACKAGES = frozenset(
    """
    _pyrepl aiohttp asyncio ctypes dbm distutils ensurepip idlelib importlib lib2to3 numpy.distutils numpy.f2py os
    paramiko pip pkg_resources ptpython requests setuptools sqlite3 test.support
    torch.distributed.elastic.multiprocessing torch.distributed.launch torch.distributed.run torch.hub
    torch.jit.unsupported_tensor_ops torch.utils.benchmark torch.utils.bottleneck torch.utils.collect_env
    torch.utils.cpp_extension torch.utils.model_zoo urllib venv wsgiref xmlrpc zipfile
    """.split()  # noqa: SIM905
)
# Of these, what is data: answers of the system, and enums.
_HARMLESS = frozenset(
    """
    os.stat_result os.statvfs_result os.terminal_size posix.stat_result posix.times_result posix.uname_result
    platform.uname_result socket.AddressFamily socket.SocketKind urllib.parse.ParseResult urllib.parse.SplitResult
    """.split()  # noqa: SIM905
)
# Of other modules, what runs code or reaches for files and networks.
_NAMES = frozenset(
    f"{module}.{name}"
    for modules, names in (
        (
            "builtins __builtin__",
            """__import__ apply breakpoint compile delattr eval exec execfile exit file globals help input locals open
            quit raw_input reload vars""",
        ),
        ("io _io _pyio", "FileIO open open_code"),
        ("bz2 codecs gzip lzma tarfile", "BZ2File GzipFile LZMAFile TarFile open"),
        ("pathlib pathlib._local", " ".join(
            f"{kind}.{name}"
            for kind in ("Path", "PosixPath", "WindowsPath")
            for name in ("chmod", "hardlink_to", "link_to", "mkdir", "open", "read_bytes", "read_text", "rename",
                         "replace", "rmdir", "symlink_to", "touch", "unlink", "write_bytes", "write_text")
        )),
        ("pickle _pickle cPickle dill dill._dill cloudpickle joblib joblib.numpy_pickle pandas", (
            "Unpickler _Unpickler _load _loads dump load loads read_pickle"
        )),
        ("jsonpickle jsonpickle.unpickler yaml", "decode full_load load load_all unsafe_load unsafe_load_all"),
        ("logging logging.config logging.handlers", (
            "FileHandler HTTPHandler RotatingFileHandler SMTPHandler SocketHandler TimedRotatingFileHandler "
            "WatchedFileHandler basicConfig dictConfig fileConfig listen"
        )),
        ("numpy numpy.lib.npyio numpy.lib._npyio_impl", (
            "NpzFile fromfile genfromtxt load loadtxt memmap save savetxt savez"
        )),
        ("numpy.ctypeslib numpy.ctypeslib._ctypeslib", "load_library"),
        ("pandas pandas.io.pickle pandas.core.computation.eval", "eval read_pickle"),
        ("numexpr numexpr.necompiler", "evaluate"),
        ("sympy sympy.core.sympify sympy.parsing.sympy_parser", "parse_expr sympify"),
        ("cython Cython.Build.Inline", "cython_inline inline"),
        ("cffi cffi.api", "FFI"),
        ("psutil", "Popen"),
        ("keras.models keras.saving keras.src.saving.saving_api tensorflow.keras.models", "load_model"),
        ("tensorflow tensorflow.io", "load_library load_op_library write_file"),
        ("multiprocessing multiprocessing.context multiprocessing.pool torch.multiprocessing", (
            "Manager Pool Process ThreadPool spawn start_processes"
        )),
        ("torch.multiprocessing.spawn", "spawn start_processes"),
        ("concurrent.futures concurrent.futures.process concurrent.futures.thread", (
            "ProcessPoolExecutor ThreadPoolExecutor"
        )),
        ("threading", "Thread Timer"),
        ("atexit", "register"),
        ("weakref", "finalize"),
        ("numpy.testing numpy.testing._private.utils", "measure rundocs runstring"),
        ("copyreg copy_reg", "add_extension constructor pickle"),
        ("operator _operator", "call"),
        ("torch torch.serialization torch.jit torch.jit._serialization", "_legacy_load _load _open_file load save"),
        ("torch._ops torch.ops torch.classes", "load_library"),
        ("torch.export torch._export", "load save"),
        ("torch.package torch.package.package_importer", "PackageImporter"),
        ("torch._inductor.codecache", "compile_file"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression"),
        ("torch.fx.graph_module", "_exec_with_source _forward_from_src"),
        ("torch.utils._config_module", "ConfigModule.load_config load_config"),
        ("torch.utils.data.datapipes.utils.decoder", "basichandlers"),
        ("torch._dynamo.guards", "GuardBuilder.get"),
        ("torch.distributed.rpc", "remote rpc_async rpc_sync"),
        ("uuid", "_get_command_stdout"),
    )
    for module in modules.split()
    for name in names.split()
)  # fmt: skip
# Modules that are met as a name in another module, which imports them. Others may be what a function is called.
_IMPORTED = frozenset(
    """
    __builtin__ __builtins__ builtins ctypes importlib nt os pip posix pty runpy shutil subprocess sys
    """.split()  # noqa: SIM905
)
# Attributes that lead from any object to all others, and those that are only ever got to run something. No class has
# another one in it of such a name.
_WAYS_OUT = frozenset(
    """
    __base__ __bases__ __builtins__ __class__ __closure__ __code__ __dict__ __func__ __getattribute__ __globals__
    __import__ __loader__ __mro__ __self__ __spec__ __subclasses__ __wrapped__
    check_call check_output exec_module execl execle execlp execv execve execvp getoutput getstatusoutput
    import_module load_module popen posix_spawn run_code run_module run_path spawnl spawnv startfile system
    write_bytes write_text
    """.split()  # noqa: SIM905
)
_GETTERS = frozenset(
    """
    __builtin__.getattr __builtin__.setattr builtins.getattr builtins.setattr inspect.getattr_static
    _operator.attrgetter _operator.methodcaller operator.attrgetter operator.methodcaller
    """.split()  # noqa: SIM905
)
_GETTER_NAMES = frozenset(name.rpartition(".")[2] for name in _GETTERS)
# Longer names are none that anything has.
_LONGEST = 1000
# No entry of the tables has more parts, and no name of an attack needs to be looked at further.
_CLOSED = _MODULES | _PACKAGES
_PARTS = 1 + max(name.count(".") + 1 for table in (_MODULES, _PACKAGES, _HARMLESS, _NAMES) for name in table)

_refusing: ContextVar[bool] = ContextVar("refusing", default=False)


@contextlib.contextmanager
def refused(wanted: bool = True) -> Iterator[None]:
    """While this lasts, to read a pickle that is an attack raises UnsafeError; else it is only kept from running."""
    token = _refusing.set(wanted)
    try:
        yield
    finally:
        _refusing.reset(token)


def are_refused() -> bool:
    """Whether `refused` is in force."""
    return _refusing.get()


def is_suspect(named: Global) -> bool:
    """Whether no checkpoint has a reason to call what is named so."""
    module, name = named.module[:_LONGEST], named.name[:_LONGEST]
    if _leads_out(name) or _is_listed(module, name):
        return True
    steps = name.count(".") + 1
    if steps == 1:
        return False
    # A path of attributes: honest ones lead to a class inside a class, and through no module. It may be a path from a
    # module by itself ...
    heads = _heads(name)
    if name in _NAMES or (name not in _HARMLESS and not _CLOSED.isdisjoint(heads[: steps - 1])):
        return True
    # ... or lead from the module to what is listed, and then on.
    heads = _heads(f"{module}.{name}")
    before = module.count(".") + 1
    for at in range(before, len(heads)):
        inside = heads[at - 1] in _MODULES or not _PACKAGES.isdisjoint(heads[:at])
        if heads[at] in _NAMES or (inside and heads[at] not in _HARMLESS):
            return True
    return before + steps > len(heads) and not _PACKAGES.isdisjoint(heads)


@functools.lru_cache(maxsize=4096)
def _leads_out(name: str) -> bool:
    """Whether a path of attributes has a module in it that is imported elsewhere, or a way out."""
    steps = name.split(".")
    return not _IMPORTED.isdisjoint(steps) or (len(steps) > 1 and not _WAYS_OUT.isdisjoint(steps))


@functools.lru_cache(maxsize=4096)
def _steps_out(path: str) -> tuple[str, ...]:
    """The ways out in a path of attributes."""
    return tuple(step for step in path.split(".") if step in _WAYS_OUT)


def _heads(path: str) -> list[str]:
    """The first part of a dotted path, the first two, and so on: as many as an entry of the tables may have."""
    return list(itertools.accumulate(path.split(".", _PARTS)[:_PARTS], "{}.{}".format))


def _is_listed(module: str, name: str) -> bool:
    path = f"{module}.{name}"
    if path in _NAMES:
        return True
    return (module in _MODULES or not _PACKAGES.isdisjoint(_heads(module))) and path not in _HARMLESS


def ways_out(function: Global, args: tuple[Any, ...]) -> Iterator[Global]:
    """What a call of `function` gets from its first argument, if that leads out of it."""
    if function.name in _GETTER_NAMES and str(function) in _GETTERS:
        for arg in args[:3]:
            if type(arg) is str:
                owner = str(args[0]) if type(args[0]) is Global else "getattr"
                yield from (Global(owner, step) for step in _steps_out(arg[:_LONGEST]))


def error(where: str, suspects: Iterable[Global], called: Iterable[Global]) -> UnsafeError:
    """What to raise for a pickle that names `suspects` and calls `called`, or is broken."""
    named, calls = (dict.fromkeys(brief(each, 100) for each in some) for some in (suspects, called))
    names = list(named)
    direct = [name for name in names if name in calls]
    if direct:
        what = f"it calls {', '.join(direct[:3])}"
    elif not calls:
        what = f"it names {', '.join(names[:3])}, and is broken"
    else:
        what = f"it names {', '.join(names[:3])}, and calls {', '.join(list(calls)[:3])}"
    return UnsafeError(
        f"{where}: this file is an attack: {what}, which torch.load would run. Nothing was run, and nothing written.",
        "Tell whoever it came from. With --inert its tensors are converted all the same; nothing runs then either.",
    )

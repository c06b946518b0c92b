"""Decide whether a pickle is an attack, by tables of names that no checkpoint has a reason to call.

Safety does not rest on these tables. No code here or elsewhere imports or calls a name of a pickle, and a name that
the tables lack stays inert data like every other unknown name. The tables only decide whether a file is called an
attack: a user who receives one should be warned, and not see its tensors converted as if nothing were wrong.

A pickle is an attack if it names an entry of the tables and either calls anything that is not known to be data, or is
broken: some attacks run before the pickle breaks. A name by itself does nothing. But `functools.partial`, `map` or
`_rebuild_from_type_v2` may call a name that they are given, and so may an object that has one in its state. The order
of the name and the call does not matter.

The tables lack `getattr` and `torch.storage._load_from_bytes`, because honest enums, bound methods and tensors that
were pickled without torch.save contain them. Getting an attribute is an attack only if the attribute leads out of an
object into the interpreter, or runs programs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from ckptconv.errors import UnsafeError
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.text import brief

# Modules and packages of which a checkpoint needs nothing: they start programs, run code, or access files, networks or
# the interpreter. Python 2's are included. A package stands for all its submodules. Entries match from the top-level
# name on: a user's own package may hold a module of such a name, or share the name of an entry of `_MODULES`.
_MODULES = frozenset(
    """
    _aix_support _android_support _apple_support _bootsubprocess _ctypes _dbm _frozen_importlib
    _frozen_importlib_external _gdbm _imp _interpchannels _interpqueues _interpreters _ios_support _lsprof
    _msi _multiprocessing _osx_support _overlapped _posixshmem _posixsubprocess _pyio _scproxy _sitebuiltins _socket
    _sqlite3 _ssl _testbuffer _testcapi _testinternalcapi _testmultiphase _thread _tkinter _winapi _wmi
    _xxinterpchannels _xxsubinterpreters aifc antigravity asynchat asyncore bdb binhex bsddb cgi cgitb cmd code codeop
    commands compileall compression.bz2 compression.gzip compression.lzma compression.zstd compression.zstd._zstdfile
    cProfile crypt doctest dumbdbm faulthandler fcntl filecmp fileinput ftplib gdbm getpass gettext
    glob grp http.client http.cookiejar http.server httplib imaplib imghdr imp linecache mailbox mailcap marshal
    mimetypes mmap modulefinder msilib msvcrt netrc nis nntplib nt ossaudiodev pdb pexpect pipes pkgutil platform popen2
    poplib posix posixfile profile pstats pty pwd py_compile pyclbr pydoc readline resource rlcompleter runpy sched
    select selectors shelve shutil signal site smtpd smtplib sndhdr socket socketserver spwd ssl subprocess sunau sys
    sysconfig syslog tabnanny telnetlib tempfile termios timeit trace tty turtle urllib2 uu wave webbrowser
    whichdb winreg winsound zipapp zipimport
    """.split()  # noqa: SIM905
)
_PACKAGES = frozenset(
    """
    IPython _pyrepl aiohttp asyncio boto3 botocore concurrent.futures concurrent.interpreters ctypes curses dbm
    distutils ensurepip idlelib importlib lib2to3 multiprocessing numpy.distutils numpy.f2py numpy.testing os paramiko
    pip pkg_resources plumbum psycopg2 ptpython pyarrow.fs pyarrow.parquet pymysql requests safetensors scipy.datasets
    scipy.io setuptools sqlite3 test.support tkinter torch._inductor torch.distributed.elastic.multiprocessing
    torch.distributed.launch torch.distributed.rpc torch.distributed.run torch.hub torch.jit.unsupported_tensor_ops
    torch.package torch.utils.benchmark torch.utils.bottleneck torch.utils.collect_env torch.utils.cpp_extension
    torch.utils.file_baton torch.utils.model_dump torch.utils.model_zoo torch.utils.tensorboard turtledemo unittest
    urllib urllib3 venv wsgiref xmlrpc zipfile
    """.split()  # noqa: SIM905
)
# Plain data within these modules: results of system calls, and enums.
_HARMLESS = frozenset(
    """
    grp.struct_group os.stat_result os.statvfs_result os.terminal_size platform.uname_result posix.stat_result
    posix.times_result posix.uname_result pwd.struct_passwd resource.struct_rusage signal.Signals socket.AddressFamily
    socket.SocketKind urllib.parse.ParseResult urllib.parse.SplitResult
    """.split()  # noqa: SIM905
)
# Names in other modules that run code or access files and networks.
_NAMES = frozenset(
    f"{module}.{name}"
    for modules, names in (
        (
            "builtins __builtin__",
            """__build_class__ __import__ apply breakpoint compile delattr eval exec execfile exit file globals help
            input locals open quit raw_input reload vars""",
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
            "DatagramHandler FileHandler HTTPHandler NTEventLogHandler RotatingFileHandler SMTPHandler SocketHandler "
            "SysLogHandler TimedRotatingFileHandler WatchedFileHandler basicConfig dictConfig fileConfig listen"
        )),
        ("pandas pandas.core.computation.eval", "eval"),
        ("numexpr numexpr.necompiler", "evaluate"),
        ("sympy sympy.core.sympify sympy.parsing.sympy_parser", "parse_expr sympify"),
        ("cython Cython.Build.Inline", "cython_inline inline"),
        ("cffi cffi.api", "FFI"),
        ("psutil", "Popen"),
        ("keras.models keras.saving keras.src.saving.saving_api tensorflow.keras.models", "load_model"),
        ("tensorflow tensorflow.io", "load_library load_op_library write_file"),
        ("torch.multiprocessing", "Manager Pool Process spawn start_processes"),
        ("torch.multiprocessing.spawn", "spawn start_processes"),
        ("threading", "Thread Timer setprofile setprofile_all_threads settrace settrace_all_threads"),
        ("argparse", "FileType"),
        ("annotationlib typing", "ForwardRef._evaluate ForwardRef.evaluate call_evaluate_function get_type_hints"),
        ("configparser ConfigParser", " ".join(
            f"{kind}.{name}" for kind in ("ConfigParser", "RawConfigParser") for name in ("read", "write")
        )),
        ("contextlib", "ExitStack.callback chdir"),
        ("dataclasses", "_create_fn make_dataclass"),
        ("inspect", "getblock getcomments getfile getsource getsourcelines"),
        ("json.tool", "main"),
        ("symtable", "symtable"),
        ("tokenize", "open"),
        ("tracemalloc", "Snapshot.dump Snapshot.load"),
        ("xml.dom.minidom xml.dom.pulldom xml.etree.ElementTree xml.etree.cElementTree xml.sax", (
            "ElementTree.parse ElementTree.write iterparse parse"
        )),
        ("zoneinfo zoneinfo._zoneinfo", "ZoneInfo.from_file reset_tzpath"),
        ("PIL.Image", "Image.save open"),
        ("h5py h5py._hl.files", "File"),
        ("huggingface_hub", "HfApi hf_hub_download snapshot_download upload_file upload_folder"),
        ("fsspec fsspec.core", "get_mapper open open_files open_local"),
        ("pyarrow pyarrow.lib", "OSFile create_memory_map input_stream memory_map output_stream"),
        ("atexit", "register"),
        ("weakref", "finalize"),
        ("copyreg copy_reg", "add_extension constructor pickle"),
        ("operator _operator", "call"),
        ("torch.serialization", "_load _open_file"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression"),
        ("torch.fx.graph_module", "_exec_with_source _forward_from_src"),
        ("torch.utils._config_module", "ConfigModule.load_config load_config"),
        ("torch.utils.data.datapipes.utils.decoder", "basichandlers"),
        ("torch._dynamo.guards", "GuardBuilder.get"),
        ("uuid", (
            "_arp_getter _get_command_stdout _ifconfig_getter _ip_getter _ipconfig_getter _lanscan_getter "
            "_netstat_getter _popen getnode uuid1"
        )),
    )
    for module in modules.split()
    for name in names.split()
)  # fmt: skip
# By top-level package: last parts of names that read or write files in any of its modules. Many classes have such a
# method, or one function has many paths.
_VERBS = {
    "numpy": frozenset(
        """
        DataSource NpzFile _dump dump fromfile fromregex genfromtxt load load_library loadtxt memmap open_memmap save
        savetxt savez savez_compressed tofile
        """.split()  # noqa: SIM905
    ),
    "pandas": frozenset(
        """
        ExcelFile ExcelWriter HDFStore read_clipboard read_csv read_excel read_feather read_fwf read_gbq read_hdf
        read_html read_json read_orc read_parquet read_pickle read_sas read_spss read_sql read_sql_query read_sql_table
        read_stata read_table read_xml to_clipboard to_csv to_excel to_feather to_gbq to_hdf to_html to_json to_latex
        to_markdown to_orc to_parquet to_pickle to_sql to_stata to_xml
        """.split()  # noqa: SIM905
    ),
    "scipy": frozenset({"load_npz", "loadmat", "save_npz", "savemat"}),
    "torch": frozenset(
        """
        FileBaton FileStore PyTorchFileReader PyTorchFileWriter TCPStore _load_from_file _new_shared_filename
        _new_using_filename_cpu _new_with_file _save_for_lite_interpreter _set_from_file
        _share_fd_cpu_ _share_filename_cpu_ _write_file compile_file download_url_to_file export_chrome_trace
        export_memory_timeline export_stacks from_file import_ir_module init_process_group load_inline load_library
        load_state_dict_from_url load_url _legacy_load load save
        """.split()  # noqa: SIM905
    ),
}
# Callables that make a function from code in the pickle, and those that look up a type by its name. A function made so
# is data; calling it runs the code.
_FUNCTIONS = frozenset(
    f"{module}.{name}"
    for modules, names in (
        ("types", "FunctionType LambdaType"),
        ("builtins __builtin__", "function"),
        ("cloudpickle cloudpickle.cloudpickle cloudpickle.cloudpickle_fast joblib.externals.cloudpickle.cloudpickle", (
            "_fill_function _make_function _make_skel_func"
        )),
        ("pyspark.cloudpickle pyspark.cloudpickle.cloudpickle ray.cloudpickle.cloudpickle", (
            "_fill_function _make_function _make_skel_func"
        )),
        ("dill dill._dill", "_create_function"),
    )
    for module in modules.split()
    for name in names.split()
)  # fmt: skip
_TYPES_BY_NAME = frozenset({"_builtin_type", "_load_type", "_get_type"})
# Callables that call their first or second argument.
_CALLERS = frozenset(
    f"{module}.{name}"
    for modules, names in (
        ("builtins __builtin__", "filter iter map max min sorted"),
        ("functools _functools", "reduce"),
        ("itertools", "accumulate dropwhile filterfalse groupby imap starmap takewhile"),
        ("operator _operator", "call"),
    )
    for module in modules.split()
    for name in names.split()
)
# Modules that other modules import, so that an attribute path may pass through them, without underscores before the
# name. Other modules are left out, because a function may have the same name.
_IMPORTED = frozenset(
    """
    bltns builtin__ builtins builtins__ ctypes importlib nt os pip posix pty runpy shutil subprocess sys
    """.split()  # noqa: SIM905
)
# Attributes that lead from any object to every other one, and attributes that are fetched only to run something. No
# class has a nested class of such a name.
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
# Characters of a module path or name that are compared. No real one is longer.
_LONGEST = 1000
# One part more than the longest entry of the tables. Further parts of a name cannot matter.
_CLOSED = _MODULES | _PACKAGES
_PARTS = 1 + max(name.count(".") + 1 for table in (_MODULES, _PACKAGES, _HARMLESS, _NAMES) for name in table)


def of_name(mentioned: Global, spelled: Global) -> Iterator[Global]:
    """Yield the name `mentioned` if it is in the tables as `spelled`."""
    if is_suspect(spelled):
        yield mentioned


def of_call(function: Any, args: tuple[Any, ...]) -> Iterator[Global]:
    """Yield the suspects to which a call of `function` leads, which is not known to be data."""
    if type(function) is Global:
        yield from ways_out(function, args)
    maker = code_called(function, args)
    if maker is not None:
        yield maker


def is_suspect(named: Global) -> bool:
    """Return whether the tables list `named`, or an entry that its path of attributes leads to."""
    module, name = named.module[:_LONGEST], named.name[:_LONGEST]
    if _leads_out(name) or _is_listed(module, name):
        return True
    steps = name.count(".") + 1
    if steps == 1:
        return False
    # `name` is a path of attributes. Honest ones lead to a nested class and pass through no module. A dishonest one may
    # begin with a module of its own …
    if name.rpartition(".")[2] in _VERBS.get(name.partition(".")[0], ()):
        return True
    heads = _heads(name)
    if name in _NAMES or (name not in _HARMLESS and not _CLOSED.isdisjoint(heads[: steps - 1])):
        return True
    # … or lead from `module` to an entry of the tables, and perhaps on from there.
    verbs = _VERBS.get(module.partition(".")[0])
    if verbs and not verbs.isdisjoint(name.split(".")):
        return True
    heads = _heads(f"{module}.{name}")
    before = module.count(".") + 1
    for at in range(before, len(heads)):
        inside = heads[at - 1] in _MODULES or not _PACKAGES.isdisjoint(heads[:at])
        if heads[at] in _NAMES or (inside and heads[at] not in _HARMLESS):
            return True
    return before + steps > len(heads) and not _PACKAGES.isdisjoint(heads)


@functools.lru_cache(maxsize=4096)
def _leads_out(name: str) -> bool:
    """Return whether an attribute path contains a module of `_IMPORTED`, or has several parts, of which one is in
    `_WAYS_OUT`."""
    steps = name.split(".")
    # Modules import others under names of their own, such as `_os`.
    return not _IMPORTED.isdisjoint(step.lstrip("_") for step in steps) or (
        len(steps) > 1 and not _WAYS_OUT.isdisjoint(steps)
    )


@functools.lru_cache(maxsize=4096)
def _steps_out(path: str) -> tuple[str, ...]:
    """Return the parts of an attribute path that are in `_WAYS_OUT`."""
    return tuple(step for step in path.split(".") if step in _WAYS_OUT)


def _heads(path: str) -> list[str]:
    """Return the first part of a dotted path, the first two, and so on, up to `_PARTS` parts."""
    return list(itertools.accumulate(path.split(".", _PARTS)[:_PARTS], "{}.{}".format))


def _is_listed(module: str, name: str) -> bool:
    path = f"{module}.{name}"
    if path in _NAMES or name.rpartition(".")[2] in _VERBS.get(module.partition(".")[0], ()):
        return True
    return (module in _MODULES or not _PACKAGES.isdisjoint(_heads(module))) and path not in _HARMLESS


def ways_out(function: Global, args: tuple[Any, ...]) -> Iterator[Global]:
    """Yield the `_WAYS_OUT` attributes that `function` fetches, if it is `getattr` or alike, as `Global`s of the
    object."""
    if function.name in _GETTER_NAMES and str(function) in _GETTERS:
        for arg in args[:3]:
            if type(arg) is str:
                owner = str(args[0]) if type(args[0]) is Global else "getattr"
                yield from (Global(owner, step) for step in _steps_out(arg[:_LONGEST]))


def code_called(function: Any, args: tuple[Any, ...]) -> Global | None:
    """Return the callable that made a function from code in the pickle, if this call runs that function; else None.

    The function is `function` itself, or one of the first two `args` if `function` is in `_CALLERS`.
    """
    if type(function) is Global:
        functions = [arg for arg in args[:2] if type(arg) is Opaque] if str(function) in _CALLERS else []
    else:
        functions = [function] if type(function) is Opaque else []
    return next((maker for opaque in functions if (maker := _made_by(opaque)) is not None), None)


def makes_functions(named: Global) -> bool:
    """Return whether a call of `named` makes a function from code in the pickle."""
    return str(named) in _FUNCTIONS


def _made_by(function: Opaque) -> Global | None:
    """Return the callable that makes a function, if `function` is one that is made from code in the pickle."""
    maker = function.cls
    if type(maker) is Opaque and type(maker.cls) is Global and maker.cls.name in _TYPES_BY_NAME:
        named = maker.args[0] if type(maker.args) is tuple and maker.args else None
        return maker.cls if named in ("FunctionType", "LambdaType", "function") else None
    return maker if type(maker) is Global and makes_functions(maker) else None


def error(where: str, suspects: Iterable[Global], called: Iterable[Global]) -> UnsafeError:
    """Return the error for a pickle that names `suspects` and calls `called`, or, if that is empty, is broken."""
    named, calls = (dict.fromkeys(brief(name, 100) for name in some) for some in (suspects, called))
    names = list(named)
    direct = [name for name in names if name in calls]
    if direct:
        charge = f"it calls {', '.join(direct[:3])}"
    elif not calls:
        charge = f"it refers to {', '.join(names[:3])}, and is broken"
    else:
        charge = f"it refers to {', '.join(names[:3])}, and calls {', '.join(list(calls)[:3])}"
    return UnsafeError(
        f"{where}: this file is an attack: {charge}, which torch.load would run. Nothing was run, and nothing was "
        "written.",
        "Inform its sender. Use --inert to convert its tensors anyway; its code does not run then either.",
    )

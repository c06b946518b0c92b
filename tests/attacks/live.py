"""Payloads that work: each makes the file `canary` when Python's pickle, or torch.load, reads it."""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable
from types import CodeType

from .assemble import (
    FALSE,
    NONE,
    TRUE,
    called,
    dotted,
    listed,
    mapped,
    name,
    number,
    numbers,
    pickled,
    raw,
    several,
    tensor,
    text,
)

# By name: why it is of interest, and what makes the opcodes.
PAYLOADS: dict[str, tuple[str, Callable[[str], bytes]]] = {}
# Those that call nothing of our tables, but what honest files call too: kept as inert data, and converted.
ODD = {"load_from_bytes", "graph_module"}


def payload(why: str) -> Callable[[Callable[[str], bytes]], Callable[[str], bytes]]:
    def register(make: Callable[[str], bytes]) -> Callable[[str], bytes]:
        PAYLOADS[make.__name__.strip("_")] = why, make
        return make

    return register


def each(why: str, **makers: Callable[[str], bytes]) -> None:
    PAYLOADS.update({key.strip("_"): (f"{why}: {key.strip('_')}", make) for key, make in makers.items()})


def touch(canary: str) -> bytes:
    return text(f"touch '{canary}'")


def command(canary: str) -> bytes:
    return listed(text("touch"), text(canary))


def code(canary: str) -> bytes:
    return text(f"open({canary!r}, 'w').close()")


def imported(module: str) -> bytes:
    return called(name("builtins", "__import__"), text(module))


def got(owner: bytes, attribute: str) -> bytes:
    return called(name("builtins", "getattr"), owner, text(attribute))


def coded(canary: str, arguments: int = 0) -> bytes:
    """Code that makes the canary, part by part, as Python 3.11 and later have them."""
    source = f"def made({', '.join('abc'[:arguments])}): open({canary!r}, 'w').close()"
    made = next(part for part in compile(source, "x", "exec").co_consts if isinstance(part, CodeType))
    counts = (made.co_argcount, 0, 0, made.co_nlocals, made.co_stacksize, made.co_flags)
    consts = several(NONE, *(text(part) for part in made.co_consts if part is not None))
    names, variables = (several(*map(text, each)) for each in (made.co_names, made.co_varnames))
    late = sys.version_info >= (3, 11)
    return called(
        name("types", "CodeType"), *map(number, counts), raw(made.co_code), consts, names, variables, text("x"),
        text("made"), *([text("made")] if late else []), number(1),
        raw(getattr(made, "co_linetable", b"")), *([raw(made.co_exceptiontable)] if late else []),
        several(), several(),
    )  # fmt: skip


SYSTEM, GETATTR, EXEC = name("os", "system"), name("builtins", "getattr"), name("builtins", "exec")
OS_SYSTEM = "os", "system"

each(
    "starts a program",
    os_system=lambda c: called(SYSTEM, touch(c)),
    posix_system=lambda c: called(name("posix", "system"), touch(c)),
    os_popen=lambda c: called(name("builtins", "list"), called(name("os", "popen"), touch(c))),
    os_spawnlp=lambda c: called(name("os", "spawnlp"), number(0), text("touch"), text("touch"), text(c)),
    subprocess_call=lambda c: called(name("subprocess", "call"), command(c)),
    subprocess_run=lambda c: called(name("subprocess", "run"), command(c)),
    subprocess_getoutput=lambda c: called(name("subprocess", "getoutput"), touch(c)),
    subprocess_check_output=lambda c: called(name("subprocess", "check_output"), command(c)),
    uuid_command=lambda c: called(name("uuid", "_get_command_stdout"), text("touch"), text(c)),
    pydoc_pager=lambda c: called(name("pydoc", "pipepager"), text("x"), touch(c)),
    imaplib_stream=lambda c: called(name("imaplib", "IMAP4_stream"), touch(c)),
    collect_env=lambda c: called(name("torch.utils.collect_env", "run"), touch(c)),
)
each(
    "runs code",
    eval=lambda c: called(name("builtins", "eval"), code(c)),
    exec=lambda c: called(EXEC, code(c)),
    compile_and_exec=lambda c: called(
        EXEC, called(name("builtins", "compile"), code(c), text("x"), text("exec"))
    ),
    runpy_code=lambda c: called(
        name("runpy", "_run_code"), called(name("builtins", "compile"), code(c), text("x"), text("exec")), mapped()
    ),
    timeit=lambda c: called(name("timeit", "timeit"), code(c), text("pass"), name("time", "time"), number(1)),
    cprofile=lambda c: called(name("cProfile", "run"), code(c)),
    profile_run=lambda c: called(name("profile", "run"), code(c)),
    bdb_run=lambda c: called(dotted("bdb", "Bdb.run"), called(name("bdb", "Bdb")), code(c)),
    interpreter=lambda c: called(
        dotted("code", "InteractiveInterpreter.runsource"), called(name("code", "InteractiveInterpreter")), code(c)
    ),
    numpy_runstring=lambda c: called(name("numpy.testing._private.utils", "runstring"), code(c), mapped()),
    marshal_code=lambda c: called(
        called(
            name("types", "FunctionType"),
            called(name("marshal", "loads"), raw(marshal.dumps(compile(f"open({c!r}, 'w').close()", "x", "exec")))),
            called(name("builtins", "globals")),
        )
    ),
    inner_pickle=lambda c: called(
        name("pickle", "loads"), raw(pickled(called(SYSTEM, touch(c))))
    ),
    inner_checkpoint=lambda c: called(
        name("torch.serialization", "_legacy_load"),
        called(name("io", "BytesIO"), raw(pickled(called(SYSTEM, touch(c))))),
        NONE,
        name("torch.serialization", "pickle"),
    ),
    ctypes_library=lambda c: called(
        got(called(name("ctypes", "CDLL"), NONE), "system"), raw(f"touch '{c}'".encode())
    ),
)  # fmt: skip
each(
    "writes a file",
    open=lambda c: called(name("builtins", "open"), text(c), text("w")),
    io_open=lambda c: called(name("io", "open"), text(c), text("w")),
    fileio=lambda c: called(name("_io", "FileIO"), text(c), text("w")),
    codecs_open=lambda c: called(name("codecs", "open"), text(c), text("w")),
    gzip_open=lambda c: called(name("gzip", "open"), text(c), text("wb")),
    bz2_open=lambda c: called(name("bz2", "open"), text(c), text("wb")),
    lzma_open=lambda c: called(name("lzma", "open"), text(c), text("wb")),
    tarfile_open=lambda c: called(name("tarfile", "open"), text(c), text("w")),
    zipfile_open=lambda c: called(name("zipfile", "ZipFile"), text(c), text("w")),
    sqlite_connect=lambda c: called(name("sqlite3", "connect"), text(c)),
    log_file=lambda c: called(name("logging", "FileHandler"), text(c)),
    numpy_save=lambda c: called(name("numpy", "savetxt"), text(c), listed(number(1))),
    torch_save=lambda c: called(name("torch", "save"), number(1), text(c)),
    os_mkdir=lambda c: called(name("os", "mkdir"), text(c)),
    os_open=lambda c: called(name("os", "open"), text(c), number(0o101)),
    os_symlink=lambda c: called(name("os", "symlink"), text("/dev/null"), text(c)),
    shutil_copy=lambda c: called(name("shutil", "copyfile"), text("/dev/null"), text(c)),
    download=lambda c: called(name("urllib.request", "urlretrieve"), text("data:,x"), text(c)),
    path_touch=lambda c: called(dotted("pathlib", "Path.touch"), called(name("pathlib", "Path"), text(c))),
    path_write=lambda c: called(
        dotted("pathlib", "Path.write_text"), called(name("pathlib", "PosixPath"), text(c)), text("x")
    ),
)
each(
    "writes a file by what is seldom named",
    wave_open=lambda c: called(name("wave", "open"), text(c), text("wb")),
    mailbox=lambda c: called(name("mailbox", "Maildir"), text(c)),
    xml_write=lambda c: called(
        dotted("xml.etree.ElementTree", "ElementTree.write"),
        called(
            name("xml.etree.ElementTree", "ElementTree"), called(name("xml.etree.ElementTree", "Element"), text("a"))
        ),
        text(c),
    ),
    argument_type=lambda c: called(called(name("argparse", "FileType"), text("w")), text(c)),
    from_file=lambda c: called(name("torch", "from_file"), text(c), TRUE, number(4)),
    untyped_storage=lambda c: called(dotted("torch", "UntypedStorage.from_file"), text(c), TRUE, number(4)),
    storage_of_a_module=lambda c: called(dotted("torch.storage", "UntypedStorage.from_file"), text(c), TRUE, number(4)),
    file_baton=lambda c: called(
        dotted("torch.utils.file_baton", "FileBaton.try_acquire"),
        called(name("torch.utils.file_baton", "FileBaton"), text(c)),
    ),
    safetensors_numpy=lambda c: called(name("safetensors.numpy", "save_file"), mapped(), text(c)),
    safetensors_torch=lambda c: called(name("safetensors.torch", "save_file"), mapped(), text(c)),
    array_tofile=lambda c: called(
        dotted("numpy", "ndarray.tofile"), called(name("numpy", "ndarray"), numbers(1)), text(c)
    ),
    array_dump=lambda c: called(dotted("numpy", "ndarray.dump"), called(name("numpy", "ndarray"), numbers(1)), text(c)),
    storage_of_a_package=lambda c: called(
        dotted("torch.serialization", "torch.UntypedStorage.from_file"), text(c), TRUE, number(4)
    ),
)  # fmt: skip
each(
    "calls what was made of code",
    made_function=lambda c: called(called(name("types", "FunctionType"), coded(c), mapped())),
    made_lambda=lambda c: called(called(name("types", "LambdaType"), coded(c), mapped())),
    mapped_function=lambda c: called(
        name("builtins", "list"),
        called(
            name("builtins", "map"), called(name("types", "FunctionType"), coded(c, 1), mapped()), listed(NONE)
        ),
    ),
    accumulated_function=lambda c: called(
        name("builtins", "list"),
        called(
            name("itertools", "accumulate"),
            called(name("itertools", "repeat"), NONE, number(3)),
            called(name("types", "FunctionType"), coded(c, 2), mapped()),
        ),
    ),
)  # fmt: skip
each(
    "goes round a list of names",
    dotted_name_of_torch=lambda c: called(dotted("torch.serialization", "os.system"), touch(c)),
    dotted_name_of_a_package=lambda c: called(dotted("torch", "serialization.os.system"), touch(c)),
    module_inside_a_module=lambda c: called(got(name("torch.serialization", "os"), "system"), touch(c)),
    import_and_getattr=lambda c: called(got(imported("os"), "system"), touch(c)),
    importlib_and_getattr=lambda c: called(
        got(called(name("importlib", "import_module"), text("os")), "system"), touch(c)
    ),
    globals_of_a_function=lambda c: called(
        got(called(got(got(name("torch.serialization", "load"), "__globals__"), "get"), text("os")), "system"), touch(c)
    ),
    dotted_globals=lambda c: called(
        got(called(dotted("torch.serialization", "load.__globals__.get"), text("os")), "system"), touch(c)
    ),
    sys_modules=lambda c: called(
        got(called(name("operator", "getitem"), name("sys", "modules"), text("os")), "system"), touch(c)
    ),
    partial=lambda c: called(called(name("functools", "partial"), SYSTEM, touch(c))),
    partial_state=lambda c: b"cfunctools\npartial\n(cbuiltins\nprint\ntR("
    + SYSTEM + several(touch(c)) + mapped() + mapped() + b"tb" + b")R",
    reduce=lambda c: called(name("functools", "reduce"), SYSTEM, listed(), touch(c)) + b"0"
    + called(name("builtins", "list"), called(name("builtins", "map"), SYSTEM, listed(touch(c)))),
    map=lambda c: called(name("builtins", "tuple"), called(name("builtins", "map"), EXEC, listed(code(c)))),
    filter=lambda c: called(name("builtins", "set"), called(name("builtins", "filter"), SYSTEM, listed(touch(c)))),
    starmap=lambda c: called(
        name("builtins", "list"),
        called(name("itertools", "starmap"), name("subprocess", "call"), listed(several(command(c)))),
    ),
    sorted_by=lambda c: called(
        name("collections", "deque"), called(name("builtins", "map"), name("os", "mkdir"), listed(text(c)))
    ),
    methodcaller=lambda c: called(called(name("operator", "methodcaller"), text("system"), touch(c)), imported("os")),
    attrgetter=lambda c: called(called(name("operator", "attrgetter"), text("system")), imported("os")) + b"0"
    + called(SYSTEM, touch(c)),
    default_factory=lambda c: called(
        name("operator", "getitem"),
        called(name("collections", "defaultdict"), called(name("functools", "partial"), SYSTEM, touch(c))),
        text("x"),
    ),
    rebuild_from_type=lambda c: called(
        name("torch._tensor", "_rebuild_from_type_v2"), SYSTEM, name("builtins", "int"), several(touch(c)), mapped()
    ),
    rebuild_from_type_and_eval=lambda c: called(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("builtins", "eval"), name("torch", "Tensor"), several(code(c)), NONE,
    ),
    newobj_map=lambda c: called(
        name("builtins", "list"), name("builtins", "map") + several(SYSTEM, listed(touch(c))) + b"\x81"
    ),
    load_from_bytes=lambda c: called(
        name("torch.storage", "_load_from_bytes"), raw(pickled(called(SYSTEM, touch(c))))
    ),
    extension_registry=lambda c: called(
        name("copyreg", "add_extension"), text("posix"), text("system"), number(240)
    ) + b"0\x82\xf0" + several(touch(c)) + b"R",
)  # fmt: skip
each(
    "calls by another opcode",
    inst=lambda c: b"(" + touch(c) + b"ios\nsystem\n",
    obj=lambda c: b"(" + SYSTEM + touch(c) + b"o",
    name_by_parts=lambda c: called(text("os") + text("system") + b"\x93", touch(c)),
    name_from_the_memo=lambda c: text("system") + b"\x940" + text("os") + b"h\0\x93" + several(touch(c)) + b"R",
    build_sets_a_state=lambda c: b"ctypes\nSimpleNamespace\n)R" + mapped(text("a"), called(SYSTEM, touch(c))) + b"b",
)
each(
    "hides in a sound tree",
    in_a_list=lambda c: listed(number(1), called(SYSTEM, touch(c))),
    in_a_set=lambda c: b"\x8f(" + called(SYSTEM, touch(c)) + b"\x90",
    dropped=lambda c: called(SYSTEM, touch(c)) + b"0N",
    dropped_with_a_mark=lambda c: b"(" + called(SYSTEM, touch(c)) + b"1N",
    as_hooks=lambda c: tensor(hooks=called(SYSTEM, touch(c))),
    as_requires_grad=lambda c: tensor(requires_grad=called(name("os", "system"), touch(c)) + b"0\x89"),
    as_metadata=lambda c: b"ccollections\nOrderedDict\n)R" + mapped(text("_metadata"), called(SYSTEM, touch(c))) + b"b",
    as_attributes=lambda c: called(
        name("torch._utils", "_rebuild_parameter_with_state"), tensor(), FALSE, b"ccollections\nOrderedDict\n)R",
        mapped(text("a"), called(SYSTEM, touch(c))),
    ),
    in_a_shape=lambda c: tensor(size=several(number(2), called(SYSTEM, touch(c)) + b"0" + number(3))),
    in_an_optimizer=lambda c: mapped(
        text("state"), mapped(number(0), mapped(text("step"), called(SYSTEM, touch(c)))), text("param_groups"), listed()
    ),
    beside_tensors=lambda c: several(tensor(), called(SYSTEM, touch(c)), numbers(1, 2)),
)  # fmt: skip
each(
    "fires before the pickle breaks",
    then_an_unknown_opcode=lambda c: called(SYSTEM, touch(c)) + b"\xff",
    then_the_end=lambda c: called(SYSTEM, touch(c)) + b"X\xff\xff\xff\x7f",
    then_a_missing_entry=lambda c: called(SYSTEM, touch(c)) + b"h\xfe",
    then_an_empty_stack=lambda c: called(SYSTEM, touch(c)) + b"0000000000",
    then_a_wrong_tensor=lambda c: called(SYSTEM, touch(c)) + tensor(offset=1 << 40),
)

# What scanners of pickles are tested with, where it is not above.
each(
    "starts a program by a module that is seldom named",
    osx_support=lambda c: called(name("_osx_support", "_read_output"), touch(c)),
    spawnv_passfds=lambda c: called(
        name("multiprocessing.util", "spawnv_passfds"), raw(b"/bin/touch"), several(text("touch"), text(c)), listed()
    ) + b"0" + called(name("os", "wait")),
    popen_reconstructed=lambda c: called(got(called(
        name("copyreg", "_reconstructor"), name("subprocess", "Popen"), name("subprocess", "Popen"), command(c)
    ), "wait")),
    popen_wait=lambda c: called(got(called(name("subprocess", "Popen"), command(c)), "wait")),
    log_config=lambda c: called(
        name("logging.config", "dictConfig"),
        mapped(
            text("version"), number(1), text("disable_existing_loggers"), FALSE,
            text("handlers"), mapped(text("h"), mapped(text("()"), text("os.mkdir"), text("path"), text(c))),
            text("root"), mapped(text("handlers"), listed(text("h"))),
        ),
    ),
    exec_of_torch=lambda c: called(
        name("torch.jit.unsupported_tensor_ops", "execWrapper"), code(c), mapped(), mapped()
    ),
    guards=lambda c: called(
        dotted("torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression"), NONE, code(c), listed()
    ),
    decoder=lambda c: called(
        name("torch.utils.data.datapipes.utils.decoder", "basichandlers"), text("pickle"),
        raw(pickled(called(SYSTEM, touch(c)))),
    ),
    config_module=lambda c: called(
        dotted("torch.utils._config_module", "ConfigModule.load_config"), NONE, raw(pickled(called(SYSTEM, touch(c))))
    ),
    grammar=lambda c: called(
        dotted("lib2to3.pgen2.grammar", "Grammar.loads"), called(name("lib2to3.pgen2.grammar", "Grammar")),
        raw(pickled(called(SYSTEM, touch(c)))),
    ),
    calltip=lambda c: called(name("idlelib.calltip", "get_entity"), code(c)),
    trace_run=lambda c: called(dotted("trace", "Trace.run"), called(name("trace", "Trace")), code(c)),
    profile_context=lambda c: called(name("cProfile", "runctx"), code(c), mapped(), mapped()),
    pdb_run=lambda c: called(name("bdb", "Bdb")) + b"0" + called(
        dotted("bdb", "Bdb.runeval"), called(name("bdb", "Bdb")), code(c)
    ),
    thread=lambda c: called(got(called(
        name("threading", "Thread"), NONE, SYSTEM, NONE, several(touch(c))
    ), "run")),
    finalize=lambda c: called(called(name("weakref", "finalize"), name("os", "path"), SYSTEM, touch(c))),
    pool=lambda c: called(got(called(name("multiprocessing.pool", "ThreadPool"), number(1)), "apply"), SYSTEM,
                          several(touch(c))),
    graph_module=lambda c: called(
        name("torch.fx.graph_module", "reduce_graph_module"),
        mapped(text("_code"), text(f"open({c!r}, 'w').close()\ndef forward(self): pass")), text(""),
    ),
)  # fmt: skip
each(
    "sets what is called later",
    setstate_of_a_namespace=lambda c: called(name("types", "SimpleNamespace"))
    + mapped(text("__setstate__"), SYSTEM) + b"b" + touch(c) + b"b",
    setstate_of_an_ordered_dict=lambda c: called(name("collections", "OrderedDict"))
    + mapped(text("__setstate__"), SYSTEM) + b"b" + touch(c) + b"b",
    setstate_of_a_counter=lambda c: called(name("collections", "Counter"))
    + mapped(text("__setstate__"), EXEC) + b"b" + code(c) + b"b",
    attribute_by_path=lambda c: called(
        called(called(name("operator", "attrgetter"), text("os.system")), name("torch", "serialization")), touch(c)
    ),
    newobj_by_copyreg=lambda c: called(
        name("builtins", "list"),
        called(name("copyreg", "__newobj__"), name("builtins", "map"), SYSTEM, listed(touch(c))),
    ),
    newobj_ex_by_copyreg=lambda c: called(
        name("builtins", "list"),
        called(name("copyreg", "__newobj_ex__"), name("builtins", "map"), several(SYSTEM, listed(touch(c))), mapped()),
    ),
    array_of_objects=lambda c: called(
        name("numpy.core.multiarray", "_reconstruct"), name("numpy", "ndarray"), numbers(0), raw(b"b")
    ) + several(
        number(1), numbers(1), called(name("numpy", "dtype"), text("O8"), FALSE, TRUE), FALSE,
        listed(called(SYSTEM, touch(c))),
    ) + b"b",
    persistent_id=lambda c: several(
        text("storage"), called(SYSTEM, touch(c)), text("0"), text("cpu"), number(6)
    ) + b"Q",
    persistent_key=lambda c: several(
        text("storage"), name("torch", "FloatStorage"), called(SYSTEM, touch(c)) + b"0" + text("0"), text("cpu"),
        number(6),
    ) + b"Q",
)  # fmt: skip
each(
    "spells its name in another way",
    string_with_escapes=lambda c: called(b"S'o\\x73'\nS'sys\\164em'\n\x93", touch(c)),
    unicode_with_escapes=lambda c: called(b"Vo\\u0073\nVsyst\\u0065m\n\x93", touch(c)),
    name_in_quotes=lambda c: called(b'S"os"\nU\x06system\x93', touch(c)),
    memo_changed=lambda c: name("collections", "OrderedDict") + b"q\x000" + SYSTEM + b"q\x000h\0"
    + several(touch(c)) + b"R",
    memo_far=lambda c: SYSTEM + b"r\0\1\0\0000j\0\1\0\0" + several(touch(c)) + b"R",
    memo_in_text=lambda c: SYSTEM + b"p7777\n0g7777\n" + several(touch(c)) + b"R",
    doubled=lambda c: SYSTEM + b"2" * 20 + several(touch(c)) + b"R" + b"0" + b"0" * 19,
    in_a_frame=lambda c: b"\x95" + len(called(SYSTEM, touch(c))).to_bytes(8, "little") + called(SYSTEM, touch(c)),
    protocol_again=lambda c: b"\x80\x00" + called(SYSTEM, touch(c)) + b"\x80\x05",
    tuple_by_marks=lambda c: b"((" + touch(c) + b"t" + b"1" + SYSTEM + touch(c) + b"\x85R",
    many_marks=lambda c: b"(" * 50 + called(SYSTEM, touch(c)) + b"1" * 50 + b"N",
)  # fmt: skip

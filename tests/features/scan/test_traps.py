"""`scan`: known names are known with what their own pickling gives them, and with nothing else."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from attacks.assemble import called, dtype, listed, mapped, name, number, numbers, pickled, raw, several, text
from features.scan import held_back, traps
from features.scan.verdicts import fails, found

import ckptconv
from ckptconv.features.scan.report import counts


def test_no_known_name_is_safe_with_a_trap() -> None:
    payloads = traps.payloads()
    assert len(payloads) > 14_000
    assert [what for what, data in payloads.items() if not found(data)] == []


# Of known names alone, these only take time or memory, or fail.
UNKNOWN_ONLY = {
    "a fraction of a billion digits",
    "a layer of billions",
    "an LSTM of billions of layers",
    "a state with a number for a key",
    "a method of an enumeration",
    "a pattern that prints",
    "an array of more objects than its list has",
    "an optimizer whose method is an object",
    "a bound of a space that is no array",
}


def test_what_runs_something_fails_by_default() -> None:
    passed = {what for what, chain in traps.CHAINS.items() if not fails(b"\x80\x04" + chain + b".")}
    assert passed == UNKNOWN_ONLY


@pytest.mark.parametrize("what", traps.FILES)
def test_no_file_hides_a_pickle_or_a_program(what: str, tmp_path: Path) -> None:
    file, make = traps.FILES[what]
    (tmp_path / file).write_bytes(make(traps.evil(str(tmp_path / "canary"))))
    assert ckptconv.scan(tmp_path).verdict in ("unknown", "suspicious", "attack")
    assert not (tmp_path / "canary").exists()


NUMPY = "numpy._core.multiarray"


def _array(of: bytes, shape: bytes, data: bytes) -> bytes:
    made = called(name(NUMPY, "_reconstruct"), name("numpy", "ndarray"), numbers(0), raw(b"b"))
    return made + several(number(1), shape, of, b"\x89", data) + b"b"


def _of_objects(flags: int, at: int = 0) -> bytes:
    return dtype("V8", flags, fields={"a": (dtype("O8"), at)})


# With these, numpy takes bytes of the pickle for addresses, writes outside of an array, or has room for billions.
ARRAYS = {
    "objects that are no objects": _array(dtype("O8", 0), numbers(1), raw(b"A" * 8)),
    "a field that is no object": _array(_of_objects(0), numbers(1), raw(b"A" * 8)),
    "a scalar of such a field": called(name(NUMPY, "scalar"), _of_objects(0), raw(b"A" * 8)),
    "a field outside": _array(_of_objects(27, 1 << 20), numbers(1), listed(several(b"N"))),
    "a dtype that is changed afterwards": (
        called(name("numpy", "dtype"), text("V8"), b"\x89", b"\x88") + b"\x940"
        + listed(_array(b"h\0", numbers(1), raw(b"A" * 8)), _of_objects(27)[_of_objects(27).index(b"R") + 1 :])
    ),
    "more objects than there are": _array(dtype("O8"), numbers(1 << 31), listed()),
}  # fmt: skip


def test_numpy_makes_no_memory_of_what_a_pickle_says() -> None:
    assert [what for what, array in ARRAYS.items() if not found(pickled(array, 4))] == []
    sound = _array(_of_objects(27), numbers(1), listed(several(b"N"))), _array(dtype("f8"), numbers(1), raw(bytes(8)))
    assert [found(pickled(array, 4)) for array in sound] == [set(), set()]


def test_payloads_that_no_table_was_made_with_fail(tmp_path: Path) -> None:
    for what, (file, data) in held_back.payloads(str(tmp_path / "canary")).items():
        (tmp_path / file).write_bytes(data)
        found_ = ckptconv.scan(tmp_path / file)
        assert any(counts(each.rule, "call") for one in found_.files for each in one.findings), what
    assert not (tmp_path / "canary").exists()


LOADER, EVIL = name("torch.storage", "_load_from_bytes"), b"I1\n0" + called(name("os", "system"), text("true")) + b"."
RANGE = called(name("builtins", "range"), number(10**12))
# Instructions and arguments that no table of names has: by what they are, opcodes that leave a value.
UNFAMILIAR = {
    "a code of the registry": b"\x82\x01",
    "a code of two bytes": b"\x83\x01\x01",
    "a code of four bytes": b"\x84\x01\0\0\0",
    "a call of a code of the registry": b"\x82\x01)R",
    "a persistent id": text("x") + b"Q",
    "a persistent id in text": b"Pabc\n",
    "a storage of a function": several(text("storage"), LOADER, text("0"), text("cpu"), number(1)) + b"Q",
    "a class with keywords": name("argparse", "Namespace") + b")" + mapped(text("a"), LOADER) + b"\x92",
    "INST": b"(" + number(1) + b"icollections\nChainMap\n",
    "OBJ": b"(" + name("random", "Random") + text("x") + b"o",
    "slots": name("argparse", "Namespace") + b")\x81" + several(b"N", mapped(text("a"), LOADER)) + b"b",
    "a bytearray that is loaded": called(LOADER, b"\x96" + len(EVIL).to_bytes(8, "little") + EVIL),
    "a bytearray of bytes that is loaded": called(LOADER, called(name("builtins", "bytearray"), raw(EVIL))),
    "a name of many parts": called(name("logging", "getLogger"), text("." * 60_000)),
    **{
        f"{module}.{each} of {what}": called(name(module, each), arg)
        for what, arg in (("a number", number(10**12)), ("a range", RANGE))
        for module, each in (
            ("builtins", "bytes"), ("builtins", "bytearray"), ("builtins", "list"), ("builtins", "tuple"),
            ("builtins", "set"), ("builtins", "frozenset"), ("collections", "deque"), ("collections", "Counter"),
            ("torch", "Size"), ("torch", "empty"), ("numpy", "zeros"), ("builtins", "enumerate"),
        )
    },
    **{
        f"{each} of large numbers": called(name("operator", each), number(10), number(10**12))
        for each in ("mul", "pow", "lshift")
    },
    "a list of data that gets a function": (
        b"]q\x000" + called(name("torch.jit._pickle", "build_intlist"), b"h\0")
        + b"0h\0" + name("builtins", "max") + b"a"
    ),
    "a long text": called(called(name("builtins", "getattr"), text("x"), text("zfill")), number(10**12)),
    "an endless list": called(name("builtins", "list"), called(name("itertools", "count"))),
}  # fmt: skip


def test_no_unfamiliar_instruction_or_number_is_safe() -> None:
    assert [what for what, opcodes in UNFAMILIAR.items() if not found(pickled(opcodes, 4))] == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_descriptions_are_judged_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("m/models/model.json", '{"expr_str": "__import__(1)"}'.encode(encoding))
    assert ckptconv.scan(tmp_path).verdict == "unknown"


PRIME = (1 << 61) - 1
RESULT = name("transformers.trainer_utils", "TrainOutput")
COMPILE, ARRAY, FROM_BYTES = name("re", "_compile"), name("array", "array"), name("array", "_array_reconstructor")


def _masked(fill: bytes) -> bytes:
    made = called(name("numpy.ma.core", "_mareconstruct"), name("numpy.ma", "MaskedArray"), name("numpy", "ndarray"))
    made = made[:-2] + numbers(0) + raw(b"b") + b"tR"
    return made + several(number(1), numbers(1), dtype("f8"), b"\x89", raw(bytes(8)), raw(b"\0"), fill) + b"b"


def _keys(*keys: bytes) -> bytes:
    """A dict with these keys that is thrown away."""
    return b"}(" + b"".join(key + b"N" for key in keys) + b"u0N"


def _frame(*rows: int) -> bytes:
    """A manager of pandas with a block for each of these rows, which has one number."""
    blocks = [
        called(
            name("pandas._libs.internals", "_unpickle_block"),
            called(
                name("numpy._core.numeric", "_frombuffer"),
                raw(bytes(8)),
                dtype("f8"),
                several(number(1), number(1)),
                text("C"),
            ),
            called(name("builtins", "slice"), number(row), number(row + 1), number(1)),
            number(2),
        )
        for row in rows
    ]
    return called(name("pandas.core.internals.managers", "BlockManager"), several(*blocks), b"]")


# A list that holds a list twice, which holds a list twice, and so on.
LISTS = b"](K\1K\1eq\0" + b"".join(b"0](h%ch%ceq%c" % (each, each, each + 1) for each in range(28))
# What takes all time or memory, or crashes, when Python, numpy, torch, pandas or shapely load it: most were seen to do,
# the others are variants of these.
EXHAUSTING = {
    "a key that is a result of tuples without end": _keys(RESULT + b")" + b"\x85" * 200_000 + b"NN\x87\x81"),
    "fractions of one hash": _keys(
        *(called(name("fractions", "Fraction"), number(each * PRIME), number(1)) for each in range(1, 500))
    ),
    "decimals of one hash": _keys(
        *(called(name("decimal", "Decimal"), text(str(each * PRIME))) for each in range(1, 500))
    ),
    "a pattern of large ranges": called(COMPILE, text("[\0-\uffff]" * 395), number(0)),
    "a pattern of escaped ranges": called(COMPILE, text("[\\0-\\uffff]" * 150), number(2)),
    "what fills a masked array": _masked(LISTS) + b"0N",
    "strings of no bytes": _array(
        called(name("numpy", "dtype"), text("S0"), b"\x89", b"\x88")
        + several(number(3), text("|"), b"N", b"N", b"N", number(0), number(0), number(0)) + b"b",
        numbers(1 << 40), raw(b""),
    ),
    "arrays of the same bytes": (
        raw(bytes(400_000)) + b"q\0000" + FROM_BYTES + b"q\x010" + ARRAY + b"q\x020("
        + (b"h\1(h\2" + text("b") + b"K\1h\0tR") * 2_000 + b"t"
    ),
    "a formula of products": name("statsmodels.base.data", "ModelData") + b")\x81" + mapped(
        text("formula"), text("y ~ " + "*".join(f"x{each}" for each in range(26))),
        text("restore_design_info"), b"\x88",
    ) + b"b",
    "text of pyarrow without its buffers": called(name("pyarrow.lib", "_restore_array"), several(
        called(name("pyarrow.lib", "type_for_alias"), text("string")), number(1), number(0), number(0), listed(b"N"),
        b"]", b"N",
    )),
    "collections of collections": called(name("shapely.io", "from_wkb"), raw(b"\1\7\0\0\0\1\0\0\0" * 40_000)),
    "nodes of a tree at addresses": (
        name("scipy.spatial._ckdtree", "cKDTree") + b")\x81" + several(raw(bytes(80))) + b"b"
    ),
    "rows of a frame at addresses": _frame(1 << 30, 1),
    "a row of a frame twice": _frame(0, 1, 1),
    "a frame without axes": name("pandas.core.internals.managers", "BlockManager") + b")\x81" + several(
        b"]", b"]", b"]", mapped(text("0.14.1"), mapped(text("axes"), b"]", text("blocks"), b"]"))
    ) + b"b",
}  # fmt: skip
# Frames whose columns are each at a place of its own.
FRAMES = {"a frame": _frame(0), "a frame of columns in another order": _frame(1, 0)}


@pytest.mark.parametrize("after", [0, 600_000])
def test_what_exhausts_is_not_safe(after: int) -> None:
    """Also in pickles that are too long to be held."""
    rest = raw(bytes(after)) + b"0" if after else b""
    assert [what for what, opcodes in EXHAUSTING.items() if not found(pickled(rest + opcodes, 4))] == []


def test_frames_with_each_row_once_are_safe() -> None:
    assert {name: sorted(found(pickled(opcodes, 4))) for name, opcodes in FRAMES.items()} == {
        name: [] for name in FRAMES
    }


def test_what_is_loaded_and_was_not_read_is_not_safe() -> None:
    loaded = pickled(called(name("os", "system"), text("true")))
    for _ in range(10):
        loaded = pickled(called(LOADER, raw(loaded)))
    assert found(loaded) != set()
    assert found(pickled(called(LOADER, raw(b"7z\xbc\xaf\x27\x1c")))) != set()
    assert found(pickled(called(LOADER, raw(b"nothing")))) != set()


def test_arguments_in_a_list_count_as_a_call(tmp_path: Path) -> None:
    """Python's unpickler in Python takes them."""
    call = name("posix", "system") + listed(text("true")) + b"R."
    (tmp_path / "pytorch_model.bin").write_bytes(b"I1\n0" + call)
    assert ckptconv.scan(tmp_path).verdict == "attack"


@pytest.mark.parametrize(
    "target", ["torch.serialization.os.system", "_operator.attrgetter", "torch.ops.aten.from_file"]
)
def test_nodes_of_a_program_call_operators(target: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("m/models/model.json", json.dumps({"target": target, "inputs": []}))
    assert ckptconv.scan(tmp_path).verdict == "unknown"


def test_a_description_of_a_tree_imports_nothing(tmp_path: Path) -> None:
    context = json.dumps({"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []})
    spec = json.dumps([1, {"type": "collections.defaultdict", "context": context, "children_spec": []}])
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("m/models/model.json", json.dumps({"in_spec": spec}))
    assert ckptconv.scan(tmp_path).verdict == "unknown"


@pytest.mark.parametrize("member", ["../out", "/out", "link"])
def test_members_of_tar_archives_stay_inside(member: str, tmp_path: Path) -> None:
    info = tarfile.TarInfo(member)
    if member == "link":
        info.type, info.linkname = tarfile.SYMTYPE, "../../out"
    with tarfile.open(tmp_path / "model.nemo", "w") as archive:
        archive.addfile(info)
    assert ckptconv.scan(tmp_path).verdict == "attack"


def test_bytes_that_are_loaded_are_looked_at_whatever_becomes_of_the_result() -> None:
    for loaded, is_evil in ((EVIL, True), (pickled(listed()), False)):
        call = called(LOADER, raw(loaded))
        for what in (call + b"0N", call + b"\x940N", several(call) + b"0]", pickled(call) + pickled(b"N")[2:]):
            assert bool(found(b"\x80\x04" + what + b".")) == is_evil, (what, loaded)

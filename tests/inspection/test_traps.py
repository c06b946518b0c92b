"""`scan`: known names are known with what their own pickling gives them, and with nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from attacks import held_back, traps
from attacks.assemble import called, dtype, listed, mapped, name, number, numbers, pickled, raw, several, text
from verdicts import fails, found

import ckptconv
from ckptconv.inspection.scan.report import counts


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

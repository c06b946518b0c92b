"""The grammar: what a pattern takes, what a production allows, and that real objects are what the tables say."""

from __future__ import annotations

import ast
import datetime
import decimal
import pathlib
import pickle
import subprocess
import sys
import uuid
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import effort
import numpy as np
import pytest
import torch
from features.scan.verdicts import found
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.features.scan.grammar.judge import Judge
from ckptconv.features.scan.grammar.patterns import Notation
from ckptconv.features.scan.grammar.table import TABLES, Grammar, grammar
from ckptconv.features.scan.programs import is_arithmetic, programs_in
from ckptconv.pickles.nodes import Global, Opaque

PRINT, DTYPE = Global("builtins", "print"), Opaque(Global("numpy", "dtype"), ("f4",))
# Of each pattern, values that it takes, and values that it does not.
PATTERNS: dict[str, tuple[list[Any], list[Any]]] = {
    "int": ([0, -5, 2**62], [True, 1.0, "1", 2**64]),
    "long": ([2**4000], [2**5000, 1.5]),
    "text": (["", "a"], [b"a", 1, "a" * 100_000]),
    "bytes": ([b"a"], ["a", bytearray(b"a")]),
    "None | bool": ([None, True], [0, ()]),
    "'a' | 1": (["a", 1], [True, "b", 1.0]),
    "(int, text)": ([(1, "a")], [(1,), [1, "a"], ("a", 1), (1, "a", 2)]),
    "(int, ...)": ([(), (1, 2)], [(1, "a"), [1]]),
    "[int]": ([[], [1]], [["a"], (1,)]),
    "{'a': int, 'b?': text}": ([{"a": 1}, {"a": 1, "b": "c"}], [{}, {"a": 1, "c": 1}, {"a": "1"}, {"a": 1, 2: 3}]),
    "{**any}": ([{}, {"a": [1]}, OrderedDict(a=1)], [{"__class__": 1}, {1: 1}, {"a": PRINT}, {"a": (1, PRINT)}]),
    "{text: int}": ([{"a": 1}], [{1: 1}, {"a": "b"}]),
    "any": ([1, [1], Global("builtins", "int"), DTYPE], [PRINT, (1, (PRINT,)), Opaque(DTYPE, ())]),
    "data": ([1, [{"a": (1.5, None)}], DTYPE, {1, 2}, b"a"], [PRINT, [PRINT], {"a": Opaque(PRINT)}, {PRINT: 1}]),
    "numpy.dtype": ([DTYPE], ["f4", Global("numpy", "dtype"), Opaque(PRINT)]),
    "type(numpy.ndarray)": ([Global("numpy", "ndarray")], [PRINT, "numpy.ndarray"]),
    "re('[a-z]+')": (["abc"], ["a1", b"a", 1, ""]),
    "upto(9)": ([0, 9], [-1, 10, True, "1"]),
}


def test_patterns_take_what_they_say() -> None:
    for text, (taken, refused) in PATTERNS.items():
        pattern = Notation({}).pattern(ast.parse(text, mode="eval").body)
        assert [value for value in taken if not pattern(Judge(), value)] == [], text
        assert [value for value in refused if pattern(Judge(), value)] == [], text


def test_every_production_can_be_read() -> None:
    names = grammar().names
    assert len(names) > 4_000
    assert all(grammar().entry(name) for name in names)
    for line in ("a b: call(", "a b: nothing", "a b: call(other(1))"):
        with pytest.raises((ValueError, SyntaxError, KeyError)):
            Grammar(line).entry(Global("a", "b"))


def test_the_tables_are_sorted_and_say_what_they_were_made_from() -> None:
    made = Path(TABLES[1]).read_text()
    sections = made.strip().split("\n\n")[1:]
    assert sections == sorted(sections)
    for section in sections:
        head, *lines = section.split("\n")
        assert len(head.split()) == 3, head
        assert lines == sorted(lines)


@pytest.mark.parametrize("library", ["numpy", "torch", "accelerate"])
def test_a_library_writes_what_its_section_says(library: str) -> None:
    """Of libraries of which this environment has the release that the table names; `make test-grammar` has all."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "scan"))
    import grammar as script

    lines = script.parsed(Path(TABLES[1]).read_text()).get((library, version(library)))
    if lines is None:
        pytest.skip("another release than that of the table")
    # In a process of its own: it imports every module, and some of them put others in the place of torch's.
    code = f"import sys; sys.path.insert(0, {sys.path[0]!r}); import grammar; "
    code += f"print(*grammar.productions({library!r}), sep=chr(10))"
    written = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    assert written.stdout.splitlines() == lines


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
    | st.dates() | st.datetimes() | st.timedeltas() | st.decimals() | st.fractions() | st.uuids()
    | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)  # fmt: skip


@effort.examples(100)
@given(value=values, protocol=st.integers(2, 5))
def test_what_python_pickles_of_data_is_safe(value: Any, protocol: int) -> None:
    assert found(pickle.dumps(value, protocol)) == set()


REAL: dict[str, Any] = {
    "path": pathlib.PurePosixPath("/a/b"),
    "zone": datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
    "decimal": decimal.Decimal("1.5"),
    "uuid": uuid.UUID(int=5),
    "generator": np.random.default_rng(0),
    "random state": np.random.RandomState(0),
    "masked": np.ma.masked_array([1, 2], [0, 1]),
    "record": np.zeros(2, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "objects": np.array([{"a": 1}, None], object),
    "scalar": np.float32(1),
    "module": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2), torch.nn.MultiheadAttention(2, 1)),
    "optimizer": torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", REAL)
def test_real_objects_are_safe(what: str) -> None:
    for protocol in range(2, 6):
        assert found(pickle.dumps(REAL[what], protocol)) == set()


def test_arguments_of_training_are_safe(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    torch.save(TrainingArguments(output_dir=str(tmp_path), report_to=[]), tmp_path / "training_args.bin")
    assert found((tmp_path / "training_args.bin").read_bytes()) == set()


@pytest.mark.parametrize(
    ("code", "files", "unknown"),
    [
        (b"y = torch.add(x, 1)", [], []),
        (b"x = torch.save (y)", ["torch.save"], []),
        (b"x = ops.aten.from_file\t(y)", ["ops.aten.from_file"], []),
        (b"# torch.save(x)\ny = 'torch.save(x)'", [], []),
        (b"y = __torch__.torch.save(x)", [], []),
        (b"ops.mine.run(x)", [], ["ops.mine.run"]),
        (b"f = torch.save\nf(x)", ["torch.save"], []),
        (b"(torch).save(x)", [], ["torch"]),
        (b"t = ops.aten\nt.save(x)", [], ["ops.aten"]),
        (b"getattr(torch, 'save')(x)", [], ["torch"]),
        (b'"""a\\""" """\ntorch.save(x)\n""" """', ["torch.save"], []),
    ],
)
def test_programs_are_read_by_tokens(code: bytes, files: list[str], unknown: list[str]) -> None:
    assert programs_in(code) == (files, unknown)


def test_expressions_are_arithmetic() -> None:
    for text in ("s0 + 2*u1", "Max(1, s0//2)", "Eq(s77, 4)", "PythonMod(s0, 8)", "s0**2", "-1"):
        assert is_arithmetic(text), text
    for text in (
        "__import__('os')",
        "s0.x",
        "9**9**9",
        "print(1)",
        "[s0]",
        "lambda: 1",
        "((9**16)**16)**16",
        "PowByNatural(9, 10**9)",
        "'a'",
        "s0[0]",
        "(" * 5000,
    ):
        assert not is_arithmetic(text), text

"""The pickle machine: reads what Python's own reads, runs nothing, and is beaten by no pickle."""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import gc
import importlib.util
import io
import pickle
import pickletools
import struct
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
from cells import naming_attacks
from compare import assert_same
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from processes import calls

from ckptconv.errors import CkptconvError, CorruptError, LimitError, TruncatedError, UnsafeError, UnsupportedError
from ckptconv.pickles import machine
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.pickles.vocabulary import DEFAULT_LIMITS, Limits, MalformedError, Vocabulary

PROTOCOLS = range(6)
PICKLERS = {"c": pickle.dumps, "python": pickle._dumps}
# Made from the pickler that CPython has in C and the one it has in Python, which differ in details.
every_pickler = pytest.mark.parametrize("dumps", PICKLERS.values(), ids=PICKLERS)
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


def load(data: bytes, *vocabulary: Vocabulary, **kwargs: Any) -> Any:
    return machine.load(data, *vocabulary, where="a.pkl", **kwargs).value


def refusal(data: bytes, **options: Any) -> str:
    """Why a pickle is refused; empty if it is not. Anything but an error for users fails the test."""
    try:
        load(data, **options)
    except CkptconvError as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------- plain values, as Python

VALUES: list[Any] = [
    None, True, False, 0, 255, 256, 65535, 65536, -1, 2**31 - 1, 2**31, -(2**31), 2**70, -(2**70), 10**600,
    0.0, -0.0, 1.5, 1e300, float("inf"), float("nan"),
    "", "a", "é", "line\nbreak\\", "\ud800", "x" * 300, "y" * 70_000,
    b"", b"abc", b"\xff" * 300, b"z" * 70_000, bytearray(), bytearray(b"q\0"),
    [], [1, [2, []]], (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),)), (True, 1.0), (True,),
    {}, {"a": 1, 2: "b", None: 3, (1, (2, "c")): 4, 1.5: 5, b"k": 6, True: 7, 2**80: 8},
    set(), {1, "a"}, frozenset(), frozenset({1, frozenset({2})}),
    complex(1, -2), range(3, 9, 2), slice(1, None, 2), ...,
    OrderedDict(), OrderedDict(b=1, a=2), Counter("abca"), deque(), deque([1, 2]), deque([1, 2], 5),
    defaultdict(None), defaultdict(list, {1: [2]}), defaultdict(OrderedDict),
    list(range(3000)), {str(i): i for i in range(3000)}, set(range(3000)), list,
]  # fmt: skip


@every_protocol
@every_pickler
def test_reads_what_python_reads(protocol, dumps):
    for value in VALUES:
        data = dumps(value, protocol)
        loaded = machine.load(data, where="a.pkl")
        expected = Global(value.__module__, value.__name__) if isinstance(value, type) else pickle.loads(data)
        if isinstance(value, type) and protocol < 3:
            expected = Global("__builtin__", value.__name__)
        assert type(loaded.value) is type(expected)
        # repr tells what == does not: 1 from True, 0.0 from -0.0, the order of keys
        assert repr(loaded.value) == repr(expected)
        assert loaded.end == len(data)
        assert not loaded.opaque


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False) | st.just(...)
)  # fmt: skip
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.lists(inner, max_size=5).map(deque)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=5).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=5).map(lambda items: defaultdict(list, items))
        | st.sets(keys, max_size=5)
        | inner.map(lambda shared: [shared, (shared, {"again": shared})])
    ),
    max_leaves=12,
)
quick = examples(40)


@given(trees, st.sampled_from(PROTOCOLS), st.sampled_from(list(PICKLERS)))
@quick
def test_any_tree_comes_back_the_same_even_in_what_is_shared(tree, protocol, pickler):
    data = PICKLERS[pickler](tree, protocol)
    assert_same(load(data), pickle.loads(data))
    assert_same(load(pickletools.optimize(data)), pickle.loads(data))


@given(trees, st.binary(max_size=20), st.sampled_from(PROTOCOLS))
@quick
def test_a_pickle_in_the_middle_of_other_bytes(tree, around, protocol):
    data = pickle.dumps(tree, protocol)
    loaded = machine.load(around + data + around, where="a.pkl", start=len(around))
    assert_same(loaded.value, pickle.loads(data))
    assert loaded.end == len(around) + len(data)
    assert_same(load(memoryview(data)), pickle.loads(data))


# What only Python 2 wrote, or nobody: opcodes that today's picklers do not use.
OLD = {
    b"S'text'\n.": "text",
    b'S"it\'s \\n \\x41"\n.': "it's \n A",
    b"S'\\xff\\xfe'\n.": b"\xff\xfe",
    b"U\x02\xc3\xa9.": "é",
    b"U\x02\xff\x00.": b"\xff\x00",
    b"T\x03\0\0\0abc.": "abc",
    b"L123L\n.": 123,
    b"L-5\n.": -5,
    b"I01\n.": True,
    b"I00\n.": False,
    b"I1\n.": 1,
    b"F1e3\n.": 1000.0,
    b"V\\u00e9\n.": "é",
    b"(lp0\nI1\na.": [1],
    b"(dp0\nS'a'\nI1\ns.": {"a": 1},
    b"(I1\nI2\nl.": [1, 2],
    b"(S'a'\nI1\nd.": {"a": 1},
    b"(I1\nI2\nt.": (1, 2),
    b"c__builtin__\nset\n((lI1\natR.": {1},
    b"c__builtin__\nlong\n(I7\ntR.": 7,
    b"c__builtin__\nxrange\n(I2\nI5\ntR.": range(2, 5),
    b"c__builtin__\nunicode\n(S'a'\ntR.": "a",
    b"ccollections\nOrderedDict\n((l(lS'a'\naI1\naatR.": OrderedDict(a=1),
    b"(i__builtin__\nlist\n.": [],
    b"(c__builtin__\ncomplex\nF1\nF2\no.": 1 + 2j,
    b"c__builtin__\nfloat\n(S'nan'\ntR0N.": None,
    b"I1\n(I2\nI3\n1.": 1,
    b"I1\n2\x86.": (1, 1),
    b"]q\x05K\x01ah\x050h\x05.": [1],
    b"(I1\nlp2\n0g2\n.": [1],
    b"N2\x86.": (None, None),
    b"\x8a\x00.": 0,
    b"\x8b\x02\0\0\0\xff\x7f.": 32767,
    b"\x80\x03c_codecs\nencode\nX\x02\0\0\0\xc3\xbfX\x06\0\0\0latin1\x86R.": b"\xff",
    b"\x80\x02c__builtin__\nbytearray\nX\x02\0\0\0\xc3\xbfX\x07\0\0\0latin-1\x86R.": bytearray(b"\xff"),
}


@pytest.mark.parametrize("data", OLD, ids=repr)
def test_old_opcodes(data):
    value = load(data)
    assert type(value) is type(OLD[data])
    assert value == OLD[data]


def test_every_opcode_there_is_is_known():
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin-1")
        assert f"unknown opcode 0x{code.hex()}" not in refusal(code + b"\0" * 20), opcode.name
    with pytest.raises(CorruptError, match=r"unknown opcode 0xff .*at byte 1"):
        load(b"\xff")


def test_memoize_counts_entries_and_put_may_choose_any():
    # 7 is stored as 300, in place of nothing; MEMOIZE then stores 8 as 1.
    assert load(b"K\x07r\x2c\x01\0\0K\x08\x94h\x01j\x2c\x01\0\0\x87.") == (8, 8, 7)
    # Overwriting is allowed.
    assert load(b"K\x07q\x00K\x08q\x00h\x00\x87.") == (7, 8, 8)
    # 7 is stored as 2, 8 and 9 as 0 and 1: the entry after these is 3.
    assert load(b"K\x07q\x02K\x08q\x00K\x09q\x01(K\x0a\x94h\x02h\x03t.") == (10, 7, 10)


class Shares:
    """Reduces to a call whose argument tuple is part of the data as well."""

    arguments = (1.0, 2.0)

    def __reduce__(self):
        return complex, self.arguments


@every_protocol
def test_what_is_usually_referred_to_only_once_may_be_referred_to_again(protocol):
    tree = [Shares(), Shares.arguments, Shares()]
    assert load(pickle.dumps(tree, protocol)) == [1 + 2j, (1.0, 2.0), 1 + 2j]
    empty: OrderedDict[str, int] = OrderedDict()
    first, second = load(pickle.dumps([(1, empty), empty], protocol))
    assert first[1] is second
    assert type(second) is OrderedDict


@pytest.mark.parametrize("name", ["Counter", "OrderedDict", "defaultdict"])
def test_items_of_every_kind_of_dict_are_set_and_no_more(name):
    """To update a Counter is to count what is given."""
    items = b"X\x01\0\0\0aK\x03X\x01\0\0\0bK\x05X\x01\0\0\0aK\x07u."
    data = b"\x80\x02ccollections\n" + name.encode() + b"\n)R(" + items
    assert_same(load(data), pickle.loads(data))
    assert load(data) == {"a": 7, "b": 5}


def test_loads_leave_the_garbage_collector_as_it_was():
    load(b"N.")
    assert gc.isenabled()
    with pytest.raises(CorruptError):
        load(b"N")
    assert gc.isenabled()
    gc.disable()
    try:
        load(b"N.")
        assert not gc.isenabled()
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------- classes, never more than names


class Plain:
    def __init__(self):
        self.x = 1


class Slotted:
    __slots__ = ("y",)

    def __init__(self):
        self.y = 2


class ListLike(list):
    pass


class DictLike(dict):
    pass


class SetLike(set):
    pass


class New:
    def __new__(cls, *args: Any, **kwargs: Any):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (1,), {"key": 2}


def opaque(value: Any, protocol: int = 2) -> Opaque:
    loaded = machine.load(pickle.dumps(value, protocol), where="a.pkl")
    assert type(loaded.value) is Opaque
    assert loaded.value.cls in loaded.opaque
    assert loaded.value.cls in loaded.globals
    return loaded.value


@every_protocol
def test_objects_are_kept_with_their_state(protocol):
    value = opaque(argparse.Namespace(lr=0.1, names=["a"]), protocol)
    assert value.name == "argparse.Namespace"
    assert value.call == "newobj"
    assert value.args == ()
    assert value.state == [{"lr": 0.1, "names": ["a"]}]
    assert opaque(Plain(), protocol).state == [{"x": 1}]
    if protocol >= 2:
        assert opaque(Slotted(), protocol).state == [(None, {"y": 2})]


def test_containers_of_unknown_classes_keep_what_is_in_them():
    listed = ListLike([1, 2])
    listed.note = "n"
    assert opaque(listed).appended == [1, 2]
    assert opaque(listed).state == [{"note": "n"}]
    assert opaque(DictLike(a=1, b=2)).items == [("a", 1), ("b", 2)]
    assert opaque(SetLike([3])).args == ([3],)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_keywords_of_new(protocol):
    value = load(pickle.dumps(New(), protocol))
    if protocol >= 4:
        assert (value.call, value.args, value.kwargs) == ("newobj_ex", (1,), {"key": 2})
    else:
        # A functools.partial, called.
        assert value.name == "functools.partial"


def test_names_match_exactly_or_not_at_all():
    for module, name in (
        ("collections", "OrderedDict.fromkeys"),
        ("collections.OrderedDict", "fromkeys"),
        ("builtins", "builtins.set"),
        ("Collections", "OrderedDict"),
        ("builtins", "set\0"),
        ("builtins.", "set"),
        ("builtins", "eval"),
    ):
        data = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
        value = load(data + b"\x93)R.")
        assert type(value) is Opaque
        assert value.cls == Global(module, name)


def test_constructors_constants_builders_and_persistent_ids_come_from_the_vocabulary():
    made = Vocabulary(
        constructors={("m", "double"): lambda args: args[0] * 2 if args else NotImplemented},
        constants={("m", "pi"): 3},
        builders={("m", "object"): lambda value, state: NotImplemented if state is None else ("built", state)},
        persistent=lambda pid: {"id": pid},
    )
    assert load(b"cm\ndouble\nK\x04\x85R.", made) == 8
    assert type(load(b"cm\ndouble\n)R.", made)) is Opaque
    assert load(b"cm\npi\n.", made) == 3
    assert load(b"K\x05QP6\n\x86.", made) == ({"id": 5}, {"id": "6"})
    assert load(b"]cm\nobject\n)Rq\0K\x01bah\0a.", made) == [("built", 1), ("built", 1)]
    assert load(b"cm\nobject\n)RNb.", made).state == [None]
    unknown = load(b"K\x05Q.")
    assert (unknown.call, unknown.args) == ("persistent", 5)


def test_constructors_only_give_the_reason_and_the_machine_adds_the_place():
    def refuse(args: tuple[Any, ...]) -> Any:
        raise MalformedError("has a bad widget")

    with pytest.raises(CorruptError) as caught:
        load(b"\x80\x02cm\nwidget\n)R.", Vocabulary(constructors={("m", "widget"): refuse}))
    assert str(caught.value) == "a.pkl: the pickle has a bad widget (at byte 14)."


# ----------------------------------------------------------------------------------------------------------- attacks


class Call:
    """Pickles to a call."""

    def __init__(self, function: Any, *args: Any):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def attacks(canary: str) -> dict[str, bytes]:
    """Pickles that create the file `canary` when they are loaded."""
    import os
    import subprocess

    code = f"open({canary!r}, 'w').close()"
    touch = f"touch '{canary}'"
    nested = {"state_dict": OrderedDict(weight=[Call(os.system, touch)])}
    both = {
        f"{name}, protocol {protocol}": pickle.dumps(value, protocol)
        for protocol in PROTOCOLS
        for name, value in {
            "os.system": Call(os.system, touch),
            "subprocess": Call(subprocess.check_call, ["touch", canary]),
            "exec": Call(exec, code),
            "eval": Call(eval, code),
            "open": Call(open, canary, "w"),
            "in a state dict": nested,
            "as a key": {Call(os.system, touch): 1},
            "in a set": {Call(os.system, touch)},
        }.items()
    }
    code_text = b"S" + repr(code).encode() + b"\n"
    touch_text = b"S" + repr(touch).encode() + b"\n"
    execute = b"cbuiltins\nexec\n(" + code_text + b"tR"
    short = lambda text: b"\x8c" + bytes([len(text)]) + text.encode()  # noqa: E731
    return both | {
        "GLOBAL and REDUCE by hand": b"cposix\nsystem\n(" + touch_text + b"tR.",
        "INST": b"(" + touch_text + b"iposix\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + touch_text + b"o.",
        "NEWOBJ": b"cbuiltins\nlist\n(cbuiltins\nmap\n(cbuiltins\nexec\n(" + code_text + b"lt\x81tR.",
        "Python 2's name": b"c__builtin__\neval\n(" + code_text.replace(b".close()", b"") + b"tR.",
        "a dotted name": b"\x80\x04" + short("pathlib") + short("Path.touch") + b"\x93"
        + short("pathlib") + short("Path") + b"\x93"
        + short(canary) + b"\x85R\x85R.",
        "a name from the memo": short("system") + b"\x940" + short("os") + b"h\0\x93" + short(touch) + b"\x85R.",
        "a result that is called": b"cfunctools\npartial\n(cbuiltins\nexec\n" + code_text + b"tR)R.",
        "in a state": b"ctypes\nSimpleNamespace\n)R}S'x'\n" + execute + b"sb.",
        "after an import": b"cbuiltins\n__import__\n(S'os'\ntR0cos\nsystem\n(" + touch_text + b"tR.",
        "before a broken end": execute + b"garbage",
        "dropped from the stack": execute + b"0N.",
    }  # fmt: skip


def test_attacks_that_work_on_pickle_do_nothing_here(tmp_path):
    canary = tmp_path / "canary"
    for name, data in attacks(str(canary)).items():
        # The attack is real ...
        try:
            pickle.loads(data)
        except Exception:
            assert canary.exists(), name
        assert canary.exists(), name
        canary.unlink()
        # ... and is nothing but data to us; its names can be reported.
        try:
            loaded = machine.load(data, where="a.pkl")
        except CorruptError:
            assert name == "before a broken end"
        else:
            assert loaded.opaque, name
        assert not canary.exists(), name


def test_nothing_is_imported():
    for module in ("antigravity", "this", "no_such_module_at_all"):
        before = set(sys.modules)
        assert importlib.util.find_spec("this") is not None
        assert type(load(f"c{module}\nx\n)R.".encode())) is Opaque
        assert set(sys.modules) == before


def test_build_sets_no_name_that_a_class_has():
    plain = load(b"ccollections\nOrderedDict\n)R}S'_metadata'\nK\x07sb.")
    assert plain._metadata == 7
    for name in (b"items", b"__class__", b"__reduce__", b"__dict__", b"popitem"):
        with pytest.raises(CorruptError, match=name.decode()):
            load(b"ccollections\nOrderedDict\n)R}S'" + name + b"'\nK\x07sb.")
    for target in (b"K\x01", b"X\x01\0\0\0a", b"]", b"}", b"(t", b"\x8f", b"ccollections\ndeque\n)R"):
        with pytest.raises(CorruptError, match="gives a state"):
            load(target + b"}b.")


# -------------------------------------------------------------------------------------------------- malformed pickles


@every_protocol
@every_pickler
def test_a_cut_pickle_is_said_to_be_cut_wherever_it_ends(protocol, dumps):
    data = dumps(
        {"a": [1, 2.5, "text", b"bytes", 2**40, 2**90, (1, 2, 3, 4)], 300: {1}, 70000: OrderedDict(x=1)}, protocol
    )
    for end in range(len(data)):
        with pytest.raises(TruncatedError, match=r"a\.pkl: .*"):
            load(data[:end])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b".", "has no value"),
        (b"K\x01K\x02s.", "reads from an empty stack"),
        (b"t.", "reads from an empty stack"),
        (b"0.", "reads from an empty stack"),
        (b"h\x05.", "not store"),
        (b"g5\n.", "not store"),
        (b"g-1\n.", "negative index"),
        (b"Np-1\n.", "negative index"),
        (b"K\x01K\x01R.", "not a tuple"),
        (b"cm\nx\nca\nb\nR.", "not a tuple"),
        (b"I0x1f\n.", "instead of a number"),
        (b"K\x01)R.", "calls a value of type int"),
        (b"])R.", "calls a value of type list"),
        (b"])\x81.", "calls a value of type list"),
        (b"(o.", "calls a value of type NoneType"),
        (b"K\x01K\x02K\x03s.", "sets an item of a value of type int"),
        (b"}(K\x01u.", "key without a value"),
        (b"(K\x01d.", "key without a value"),
        (b"}]Ns.", "a value of type list as a key"),
        (b"}]\x85Ns.", "a value of type list as a key"),
        (b"\x8f(]\x90.", "a value of type list as a key"),
        (b"(]\x91.", "a value of type list as a key"),
        (b"NNa.", "appends to a value of type NoneType"),
        (b"]](K\x01\x90.", "adds elements to a value of type list"),
        (b"K\x01K\x02\x93.", "not text"),
        (b"cm\nx\n)K\x01\x92.", "keywords"),
        (b"cm\nx\n)}K\x01K\x02s\x92.", "keywords"),
        (b"X\x02\0\0\0\xff\xff.", "not UTF-8"),
        (b"\x8c\x02\xff\xff.", "not UTF-8"),
        (b"\x8d\x01\0\0\0\0\0\0\0\xff.", "not UTF-8"),
        (b"c\xff\n\n.", "not UTF-8"),
        (b"V\\ud8\n.", "not UTF-8"),
        (b"Iabc\n.", "instead of a number"),
        (b"I\n.", "instead of a number"),
        (b"L\n.", "instead of a number"),
        (b"Fabc\n.", "instead of a number"),
        (b"Sabc\n.", "without quotes"),
        (b"S'\n.", "without quotes"),
        (b"S'\\x4'\n.", "escape"),
        (b"T\xff\xff\xff\xff.", "negative length"),
        (b"\x8b\xff\xff\xff\xff.", "negative length"),
        (b"ccollections\nOrderedDict\n)RNb.", "not a dictionary"),
        (b"]2a.", "contains itself"),
        (b"}q\0K\x01h\0s.", "contains itself"),
        (b"c_codecs\nencode\n\x8c\x03\xe2\x82\xac\x8c\x06latin1\x86R.", r"above U\+00FF"),
    ],
    ids=repr,
)
def test_malformed_pickles(data, reason):
    with pytest.raises(CorruptError, match=rf"a\.pkl: the pickle .*{reason}.*\(at byte \d+\)") as caught:
        load(data)
    assert not isinstance(caught.value, TruncatedError)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x80\x06N.", "protocol 6"),
        (b"\x82\x01.", "extension registry"),
        (b"\x83\x01\0.", "extension registry"),
        (b"\x84\x01\0\0\0.", "extension registry"),
        (b"\x97.", "buffer"),
        (b"\x98.", "buffer"),
    ],
    ids=repr,
)
def test_what_only_a_running_python_has(data, reason):
    with pytest.raises(UnsupportedError, match=reason):
        load(data)


def test_an_object_may_lead_back_to_itself():
    thing = argparse.Namespace()
    thing.me = thing
    value = load(pickle.dumps(thing))
    assert value.state[0]["me"] is value


# Arguments that Python's types would choke on, or take for an order to allocate.
WRONG = {
    b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.": "bytearray of a length",
    b"cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.": "bytes of a length",
    b"cbuiltins\nrange\n\x8a\x01\x01]\x86R.": "range to a list",
    b"cbuiltins\nrange\n(K\x01K\x02K\x00tR.": "range in steps of 0",
    b"cbuiltins\nrange\n)R.": "range of nothing",
    b"cbuiltins\nslice\n)R.": "slice of nothing",
    b"cbuiltins\ncomplex\n\x8c\x03abc\x85R.": "complex of text",
    b"cbuiltins\nint\n\x8c\x03abc\x85R.": "int of text",
    b"cbuiltins\nint\nG\x7f\xf0\0\0\0\0\0\0\x85R.": "int of infinity",
    b"cbuiltins\nfloat\n\x8c\x03abc\x85R.": "float of text",
    b"cbuiltins\nstr\nK\x01\x85R.": "str of a number",
    b"cbuiltins\nlist\n\x8c\x03abc\x85R.": "list of text",
    b"cbuiltins\nlist\nK\x01\x85R.": "list of a number",
    b"cbuiltins\ndict\n](K\x01ea\x85R.": "dict of odd pairs",
    b"cbuiltins\ndict\nK\x01\x85R.": "dict of a number",
    b"cbuiltins\nset\ncbuiltins\nrange\nK\x05\x85R\x85R.": "set of a range",
    b"ccollections\nCounter\n\x8c\x03abc\x85R.": "counter of text",
    b"ccollections\ndeque\n]K\x01K\x02\x87R.": "deque of three",
    b"ccollections\ndeque\n]J\xff\xff\xff\xff\x86R.": "deque of negative length",
    b"ccollections\ndeque\ncbuiltins\nrange\n\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00\x85R\x85R.": "endless deque",
    b"ccollections\ndefaultdict\ncos\nsystem\n\x85R.": "defaultdict of a function",
    b"ccollections\ndefaultdict\nK\x01\x85R.": "defaultdict of a number",
    b"ccollections\nOrderedDict\n)}K\x01\x86\x92.": "keywords",
    b"c_codecs\nencode\n\x8c\x01a\x8c\x05utf-7\x86R.": "another encoding",
    b"c_codecs\nencode\nK\x01\x85R.": "encoding of a number",
    b"ccollections\nOrderedDict\n)\x8c\x01aK\x01\x86R.": "OrderedDict of two",
}


@pytest.mark.parametrize("data", WRONG, ids=WRONG.values())
def test_constructors_take_no_odd_arguments(data):
    tracemalloc.start()
    try:
        assert refusal(data) or type(load(data)) is Opaque
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


SAMPLE = {
    "state": OrderedDict(w=[1, 2.5, "text"], b=(1, 2, 3)),
    "set": {1, (2, 3)},
    "opt": argparse.Namespace(lr=0.1, betas=(0.9, 0.999)),
    "more": deque([b"bytes", 2**70], 4),
}


@given(st.data())
@examples(120)
def test_damaged_pickles_are_read_or_refused_in_words(data):
    pickled = bytearray(pickle.dumps(SAMPLE, data.draw(st.sampled_from(PROTOCOLS))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(pickled) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "delete"]))
        if kind == "set":
            pickled[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            pickled[at:at] = data.draw(st.binary(max_size=6))
        else:
            del pickled[at : at + data.draw(st.integers(1, 4))]
    refused = refusal(bytes(pickled))
    assert not refused or refused.startswith("a.pkl: the pickle ")


opcodes = st.sampled_from([opcode.code.encode("latin-1") for opcode in pickletools.opcodes])
programs = st.lists(
    opcodes
    | st.binary(max_size=4)
    | st.sampled_from(
        [b"K\x01", b"h\x00", b"q\x00", b"\x8c\x01a", b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n"]
    ),
    max_size=30,
)


@given(programs.map(b"".join))
@examples(120)
def test_any_program_at_all(program):
    refused = refusal(program + b".")
    assert not refused or refused.startswith("a.pkl: the pickle ")


# ------------------------------------------------------------------------------------------------------------- bombs

# Bombs of this size, where less is allowed than by default: the corpus has some ten to a hundred times as large.
N = 2_500
SMALL = Limits(objects=DEFAULT_LIMITS.objects // 40, key_nodes=DEFAULT_LIMITS.key_nodes // 40)


def colliding_keys(count: int, made: bytes = b"") -> bytes:
    """A dictionary whose keys are different integers with one hash, or made from such."""
    modulus = sys.hash_info.modulus
    items = b"".join(b"\x8a\x0a" + (modulus * n).to_bytes(10, "little") + made + b"N" for n in range(1, count + 1))
    return b"}(" + items + b"u."


def many_keys(made: bytes) -> bytes:
    return made + b"(" + b"".join(b"X\x06\0\0\0%06dN" % n for n in range(N // 10)) + b"u"


COPIES = b"h\1h\0\x85R" * N + b"e."
# 75 modules by 75 names, each of five hundred parts.
DOTTED = b"".join(b"X\xe6\x03\0\0" + b"%04d" % n + b".a" * 497 + b"r" + struct.pack("<I", n) for n in range(75))
DOTTED += b"".join(
    b"j" + struct.pack("<I", n) + b"j" + struct.pack("<I", m) + b"\x930" for n in range(75) for m in range(75)
)

BOMBS = {
    # name: (pickle, what is wrong with it)
    "tuples in tuples": (b")" + b"\x85" * N + b".", "nested"),
    "lists in lists": (b"]" * N + b"a" * (N - 1) + b".", "nested"),
    "dictionaries in dictionaries": (b"}K\0" * N + b"N" + b"s" * N + b".", "nested"),
    "ordered dictionaries": (b"ccollections\nOrderedDict\nq\0" + b")RK\0h\0" * N + b")R" + b"s" * N + b".", "nested"),
    "deques in deques": (b"ccollections\ndeque\nq\0)R" + b"h\0)R" * N + b"a" * N + b".", "deques inside"),
    "deques in deques, outermost first": (
        b"ccollections\ndeque\nq\0)Rq\1" + b"h\0)Rq\2ah\2" * N + b"h\1.", "already inside another"),
    "deques thrown away": (b"ccollections\ndeque\nq\0)R" + b"h\0)R" * N + b"a" * N + b"0N.", "deques inside"),
    "deques made of deques": (
        b"ccollections\ndeque\nq\0)R" + b"q\1h\0](h\1e\x85R" * N + b".", "deques inside"),
    # What many calls copy counts each time.
    "copies of a list": (b"](" + b"N" * N + b"eq\0](cbuiltins\nlist\nq\1" + COPIES, "more objects than"),
    "copies of a tuple": (b"](" + b"N" * N + b"eq\0](cbuiltins\ntuple\nq\1" + COPIES, "more objects than"),
    "copies of a deque": (b"](" + b"N" * N + b"eq\0](ccollections\ndeque\nq\1" + COPIES, "more objects than"),
    "copies of a set": (b"](" + b"N" * N + b"eq\0](cbuiltins\nset\nq\1" + COPIES, "more objects than"),
    "copies of a dict": (many_keys(b"}") + b"q\0](cbuiltins\ndict\nq\1" + COPIES, "more objects than"),
    "copies of a Counter": (many_keys(b"}") + b"q\0](ccollections\nCounter\nq\1" + COPIES, "more objects than"),
    "copies of bytes": (b"B" + struct.pack("<I", N) + bytes(N) + b"q\0](cbuiltins\nbytearray\nq\1" + COPIES, "more"),
    "copies of text": (
        b"X" + struct.pack("<I", N) + bytes(N) + b"q\0](c_codecs\nencode\nq\1"
        + b"h\1h\0X\6\0\0\0latin1\x86R" * N + b"e.", "more objects than"),
    "a number of much text": (
        b"X" + struct.pack("<I", N) + b"1" * N + b"q\0](cbuiltins\nfloat\nq\1" + COPIES, "more objects than"),
    "arguments of many calls": (b"(" + b"N" * N + b"tq\0](cm\nx\nq\1" + b"h\1h\0R" * N + b"e.", "more objects than"),
    "copies of a state": (
        many_keys(b"}") + b"q\0](ccollections\nOrderedDict\nq\1" + b"h\1)Rh\0b" * N + b"e.", "more objects than"),
    # Names.
    "a long name": (b"cm\n" + b"x." * N + b"\n.", "has a class name of"),
    "dotted names": (
        b"".join(f"c{'a.' * 450}a\n{'b.' * 450}{n}\n0".encode() for n in range(18)) + b"N.", None),
    "dotted names by reference": (DOTTED + b"N.", "more objects than"),
    "the same name": (b"".join([b"cm\nx\n0"] * N) + b"N.", None),
    "persistent ids": (b"]P" + b"x" * N + b"\na" + b"Px\na" * N + b".", None),
    "objects in objects": (b"cm\nx\nq\0)R" + b"h\0)R" * N + b"b" * N + b".", "nested"),
    "arguments of arguments": (b"cm\nx\nq\0" + b"h\0" * N + b")R" + b"\x85R" * N + b".", "nested"),
    "results of results": (b"cm\nx\n" + b")R" * N + b".", "results of calls"),
    "frozensets in frozensets": (b"(" * N + b"\x91" * N + b".", "key nested"),
    "a deep key": (b"})" + b"\x85" * N + b"Ns.", "key nested"),
    "a wide key": (b"}(" + b"N" * N + b"tNs.", "key with more than"),
    "shared tuples as a key": (b"})" + b"2\x86" * 64 + b"Ns.", "key with more than"),
    "shared tuples in a set": (b"\x8f(N2\x86" + b"2\x86" * 64 + b"\x90.", "key with more than"),
    "shared tuples": (b")" + b"2\x86" * 64 + b".", "by repeated references"),
    "shared lists": (b"]" + b"q\0]h\0ah\0a" * 64 + b".", "by repeated references"),
    "shared states": (b"cm\nx\n)R" + b"q\0cm\nx\n)Rh\0bh\0b" * 64 + b".", "by repeated references"),
    "the same key of 225 parts": (
        b"](" + b"N" * 225 + b"tq\0" + b"}h\0Ns0" * (8 * N) + b".", "too long to hash"),
    "the same large integer as a key": (
        b"]\x8b\x00\x06\x00\x00" + b"\x7f" * 1536 + b"q\0" + b"}h\0Ns0" * (8 * N) + b".",
        "too long to hash",
    ),
    "colliding integers": (colliding_keys(10_000), "same hash"),
    "colliding tuples": (colliding_keys(10_000, b"\x85"), "same hash"),
    "slices in slices": (b"cbuiltins\nslice\nq\0" + b"h\0" * N + b"K\1" + b"\x85R" * N + b".", "no pickler writes"),
    "a long integer": (b"\x8b\xff\xff\xff\x7f" + b"\x7f" * N + b".", "an integer of"),
    "many digits": (b"I" + b"9" * 4 * N + b"\n.", "digits"),
    "many digits, long": (b"L" + b"9" * 4 * N + b"L\n.", "digits"),
    "many digits, index": (b"g" + b"9" * 4 * N + b"\n.", "digits"),
    "a huge memo index": (b"Nr\xff\xff\xff\xff.", None),
    "a huge memo index, in text": (b"Np99999999999999999999\n.", None),
    "huge memo indexes": (b"N" + b"".join(b"r" + struct.pack("<I", 2**32 - 1 - n) for n in range(N)) + b".", None),
    "long text that is not there": (b"X\xff\xff\xff\xff.", ", incomplete"),
    "long bytes that are not there": (b"B\xff\xff\xff\xff.", ", incomplete"),
    "longer bytes": (b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff.", ", incomplete"),
    "longer text": (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", ", incomplete"),
    "a long bytearray": (b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", ", incomplete"),
    "a long frame": (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.", ", incomplete"),
    "many tuples": (b"(" + (b"N" + b"\x85" * 10) * N + b"t.", None),
    "many empty tuples": (b"(" + b")" * 10 * N + b"t.", None),
    "a small tuple in many": (b"(" + b"N" * 14 + b"tq\0](" + b"h\0\x85" * N + b"e.", None),
    "a long path of attributes": (
        b"cbuiltins\ngetattr\nq\0X\xe8\3\0\0" + b"a." * 500 + b"q\1" + b"h\0h\1\x85R0" * N + b"N.", None),
    "marks": (b"(" * N + b".", "no value"),
    "many empty sets": (b"(" + b"\x8f" * N + b"t.", None),
    "many more empty sets": (b"(" + b"\x8f" * 10 * N + b"t.", "more objects than"),
    "many empty lists": (b"(" + b"]" * 20 * N + b"t.", "more objects than"),
    "many empty dictionaries": (b"(" + b"}" * 20 * N + b"t.", "more objects than"),
    "many deques": (b"ccollections\ndeque\nq\0(" + b"h\0)R" * 3 * N + b"t.", "more objects than"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), BOMBS.values(), ids=BOMBS)
def test_no_pickle_takes_long_or_much(data, reason):
    tracemalloc.start()
    try:
        refused = refusal(data, limits=SMALL)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reason in refused if reason else not refused
    assert peak < (1 << 18) + 300 * len(data)
    assert calls_for(data, limits=SMALL) < 5_000 + 40 * len(data)


def test_a_tree_has_no_more_containers_than_its_length_can_be_about():
    """Tuples are counted when all is read."""
    data = b"(" + (b"N" + b"\x85" * 10) * 4_000 + b"t."
    assert "more objects than" in refusal(data, limits=SMALL)
    assert not refusal(data)


def calls_for(data: bytes, *vocabulary: Vocabulary, **options: Any) -> int:
    """How many functions are called to read a pickle, Python's own among them: as many at any speed and load."""

    def read() -> None:
        with contextlib.suppress(CkptconvError):
            load(data, *vocabulary, **options)

    return calls(read)


def test_to_give_states_takes_as_long_however_much_was_stored_before():
    """Of objects that are replaced where they are stored, as parts of a description of a checkpoint are."""
    words = Vocabulary(builders={("m", "x"): lambda value, state: (state,)})

    def program(far: int) -> tuple[bytes, bytes]:
        places = [struct.pack("<I", far + n) for n in range(500)]
        before = b"".join(b"Nr" + struct.pack("<I", n) + b"0" for n in range(far)) + b"("
        return before, b"".join(b"cm\nx\n)Rr" + at + b"K\1b" for at in places) + b"".join(b"j" + at for at in places)

    taken = []
    for far in (0, 20_000):
        before, rest = program(far)
        assert load(before + rest + b"t.", words) == ((1,),) * 1000
        taken.append(calls_for(before + rest + b"t.", words) - calls_for(before + b"t.", words))
    assert abs(taken[1] - taken[0]) < 100


@naming_attacks
def test_an_attack_of_many_names_is_told_in_a_moment():
    names = b"".join(b"X\x06\0\0\0%06dr" % n + struct.pack("<I", n) for n in range(3000))
    names += b"X\2\0\0\0os" + b"".join(b"2j" + struct.pack("<I", n) + b"\x93)R0" for n in range(3000)) + b"."
    with refusing_attacks(), pytest.raises(UnsafeError, match=r"os\.000000, os\.000001, os\.000002,"):
        load(names)
    with refusing_attacks():
        assert calls_for(names) < 20_000 + 40 * len(names)


def test_honest_keys_pass():
    plain = {(layer, name): layer for layer in range(2000) for name in ("weight", "bias")}
    assert load(pickle.dumps(plain)) == plain
    floats = {2.0**n: n for n in range(-1000, 1000)}
    assert load(pickle.dumps(floats)) == floats
    wide = {tuple(range(5000)): 1, frozenset(range(5000)): 2}
    assert load(pickle.dumps(wide)) == wide


def test_limits_can_be_set():
    nested = pickle.dumps([[[[]]]])
    assert load(nested, limits=Limits(depth=4)) == [[[[]]]]
    with pytest.raises(LimitError, match="more than 3 levels"):
        load(nested, limits=Limits(depth=3))


def test_an_opcode_takes_a_few_calls():
    tree = [(f"layer.{n}.weight", {"shape": (n, 300), "on": True, "lr": 0.5}) for n in range(2000)]
    data = pickle.dumps(tree, 2)
    count = sum(1 for _ in pickletools.genops(data))
    assert calls_for(data) < 6 * count


def test_copyreg_is_not_consulted():
    class Registered:
        pass

    copyreg.add_extension("collections", "OrderedDict", 240)
    try:
        with pytest.raises(UnsupportedError):
            load(b"\x82\xf0)R.")
    finally:
        copyreg.remove_extension("collections", "OrderedDict", 240)


def test_the_python_machine_agrees_on_what_is_left_over():
    """Values below the top of the stack at the end are dropped, as Python drops them."""
    data = b"K\x01K\x02(K\x03."
    assert load(data) == pickle._Unpickler(io.BytesIO(data)).load() == 3

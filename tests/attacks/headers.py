"""Hostile, broken and odd safetensors files: headers, structure records, names that are pickles, and sharded sets.

They are converted back to a `.pt` file, which must not run anything either, whoever loads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .assemble import DATA, many_numbers
from .corpus import CORRUPT, DONE, UNSAFE, UNSUPPORTED, Case
from .directories import Directory

FILES: dict[str, Case] = {}
SETS: dict[str, Directory] = {}


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def held(header: object, data: bytes = DATA, length: int | None = None) -> bytes:
    """A file of this header: an object, or text or bytes that are meant to be one. `length` is what it says it has."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def recorded(root: Any, nodes: Any = (), storages: Any = (), version: Any = 1, **tensors: Any) -> bytes:
    """A sound file with a structure record. Without `tensors` it has the tensor "w" alone."""
    record = {"version": version, "root": root, "nodes": nodes, "storages": storages}
    return with_record(json.dumps(record), **tensors)


def with_record(record: str, **tensors: Any) -> bytes:
    return held({"__metadata__": {"format": "pt", "ckptconv.structure": record}, **(tensors or {"w": entry()})})


def case_of(exit_code: int, file: str, why: str, made: bytes | Callable[[str], bytes], whole: bool = False) -> Case:
    """A file. It is live if it is called so: whoever unpickles its names, or values, makes the canary."""
    make = made if callable(made) else lambda canary: made
    live = "live" in file
    return Case(f"st_{file}.safetensors", "safetensors", exit_code, why, make, live=live, whole=whole)


def _add(exit_code: int, file: str, *told: Any, **more: Any) -> None:
    assert file not in FILES, file
    FILES[file] = case_of(exit_code, file, *told, **more)


def _sound(file: str, why: str, made: bytes) -> None:
    """A file that is converted to the tensor "w" as it should be."""
    _add(DONE, file, why, made, whole=True)


# ---------------------------------------------------------------------------------------------------------- headers

_sound("sound", "a valid file", held({"w": entry()}))
_sound("padded", "a header padded with spaces", held(json.dumps({"w": entry()}) + " " * 1000))
_sound("no_metadata", "empty metadata", held({"__metadata__": {}, "w": entry()}))
_sound("null_metadata", "metadata that is null", held({"__metadata__": None, "w": entry()}))
_sound("unknown_field", "a field that is not known", held({"w": {**entry(), "evil": [1, {"a": None}]}}))
_sound("alias", "a name that was tied", held({"__metadata__": {"v": "w"}, "w": entry()}))
_sound("alias_of_nothing", "a name tied to nothing", held({"__metadata__": {"v": "z"}, "w": entry()}))
_sound("scalar_and_empty", "a scalar, and no elements", held(
    {"w": entry(), "s": entry("U8", [], [24, 25]), "e": entry("F64", [0, 5], [25, 25])}, DATA + b"x"
))  # fmt: skip
_sound(
    "path", "a name that is a path", held({"w": entry(), "../../etc/passwd": entry("U8", [1], [24, 25])}, DATA + b"x")
)
_sound(
    "injection", "a name that would be opcodes in a pickle of protocol 0",
    held({"w": entry(), "x\ncos\nsystem\n(S'id'\ntR.": entry("U8", [1], [24, 25])}, DATA + b"x"),
)  # fmt: skip
_sound("nul", "names with a NUL, and without a character", held(
    {"w": entry(), "a\0b": entry("U8", [1], [24, 25]), "": entry("U8", [1], [25, 26])}, DATA + b"xy"
))  # fmt: skip
_sound(
    "dunder", "a tensor named as a method", held({"w": entry(), "__reduce__": entry("U8", [1], [24, 25])}, DATA + b"x")
)

E0 = json.dumps(entry("U8", [0], [24, 24]))


def _with(skipped: str) -> str:
    """A header of "w" whose object has one more member, of this JSON."""
    return f'{{"w":{json.dumps(entry())[:-1]},"more":{skipped}}}}}'


_sound("skipped_minus_zero", "minus zero where nothing counts", held(_with("-0")))
_sound("skipped_deep", "125 levels where nothing counts", held(_with("[" * 125 + "]" * 125)))
_sound("skipped_float", "a large float where nothing counts", held(_with("1e308")))
_sound("escaped_names", "names and a dtype that are escaped", held(
    '{"\\u0077":{"\\u0064type":"\\u004632","shape":[2,3],"data_offsets":[0,24]}}'
))  # fmt: skip
_sound("pair", "a name with a surrogate pair", held(f'{{"w":{json.dumps(entry())},"\\ud83d\\ude00":{E0}}}'))
_sound("brace_in_names", "names with braces, commas and quotes", held(
    f'{{"w":{json.dumps(entry())},"}},\\"":{E0},"{{}}}}":{E0}}}'
))  # fmt: skip
_sound("spread", "a header over several lines", held(json.dumps({"w": entry()}, indent="\t") + "\n \r\n"))
_sound("many_empty", "2,000 tensors without elements in one place", held(
    {"w": entry(), **{f"e{n}": entry("U8", [0], [24, 24]) for n in range(2_000)}}
))  # fmt: skip

W24 = json.dumps(entry())
for _file, _why, _header in (
    ("name_twice", "a name twice", f'{{"w":{W24},"w":{W24}}}'),
    ("name_twice_escaped", "a name twice, once escaped", f'{{"w":{W24},"\u0077":{W24}}}'),
    ("dtype_twice", "a dtype twice", '{"w":{"dtype":"F32","dtype":"I32","shape":[2,3],"data_offsets":[0,24]}}'),
    ("offsets_twice", "offsets twice", '{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}}'),
    ("metadata_twice", "metadata twice", f'{{"__metadata__":{{}},"__metadata__":{{}},"w":{json.dumps(entry())}}}'),
    ("key_twice", "a key of the metadata twice", f'{{"__metadata__":{{"a":"1","a":"2"}},"w":{json.dumps(entry())}}}'),
    ("nan", "an offset that is no number", {"w": entry(offsets=[0, float("nan")])}),
    ("infinity", "an extent without end", {"w": entry(shape=[float("inf")])}),
    ("huge_float", "an extent of 1e999", '{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,24]}}'),
    ("exponent", "an extent of 6e0", '{"w":{"dtype":"F32","shape":[6e0],"data_offsets":[0,24]}}'),
    ("digits", "an offset of 100,000 digits", f'{{"w":{W24.replace("24", "9" * 100_000)}}}'),
    ("deep_lists", "lists nested 100,000 levels deep", '{"w":' + "[" * 100_000),
    ("deep_closed", "the same, with an end", '{"w":' + "[" * 100_000 + "]" * 100_000 + "}"),
    ("deep_objects", "objects nested 100,000 levels deep", '{"w":' * 100_000),
    ("deep_shape", "a shape nested 500 levels deep", f'{{"w":{W24.replace("[2, 3]", "[" * 500 + "]" * 500)}}}'),
    ("array", "an array for a header", "[1,2]"),
    ("text", "text for a header", '"hello"'),
    ("not_json", "a header that is no JSON", '{"w": '),
    ("trailing", "something after the object", json.dumps({"w": entry()}) + "{}"),
    ("comma", "a comma too many", json.dumps({"w": entry()})[:-1] + ",}"),
    ("leading_space", "a space before the object", " " + json.dumps({"w": entry()})),
    ("bom", "a byte order mark before the object", b"\xef\xbb\xbf" + json.dumps({"w": entry()}).encode()),
    ("not_utf8", "a name that is not UTF-8", json.dumps({"w": entry()}).encode().replace(b"w", b"\xff")),
    ("surrogate", "a name that is half of a surrogate pair", '{"\\ud800":' + json.dumps(entry()) + "}"),
    ("control", "a control character in a name", json.dumps({"w": entry()}).replace("w", "\x01")),
    ("metadata_list", "metadata that is a list", json.dumps({"__metadata__": [], "w": entry()}).replace("[]", "[1]")),
    ("metadata_number", "metadata of a number", {"__metadata__": {"a": 1}, "w": entry()}),
    ("metadata_nested", "metadata of an object", {"__metadata__": {"a": {}}, "w": entry()}),
    ("metadata_tensor", "a tensor named __metadata__", {"__metadata__": entry()}),
    ("entry_null", "a tensor that is null", {"w": None}),
    ("entry_list", "a tensor that is a list", {"w": ["F32", [2, 3], [0, 24]]}),
    ("no_dtype", "no dtype", {"w": {"shape": [2, 3], "data_offsets": [0, 24]}}),
    ("no_shape", "no shape", {"w": {"dtype": "F32", "data_offsets": [0, 24]}}),
    ("no_offsets", "no offsets", {"w": {"dtype": "F32", "shape": [2, 3]}}),
    ("dtype_number", "a dtype that is a number", {"w": entry(7)}),
    ("dtype_null", "a dtype that is null", {"w": entry(None)}),
    ("shape_negative", "negative extents whose product is right", {"w": entry(shape=[-2, -3])}),
    ("shape_floats", "extents that are floats", {"w": entry(shape=[2.0, 3.0])}),
    ("shape_texts", "extents that are texts", {"w": entry(shape=["2", "3"])}),
    ("shape_bools", "extents that are bools", {"w": entry("U8", [True], [0, 1])}),
    ("shape_wraps", "extents whose product wraps to 6", {"w": entry(shape=[(1 << 64) + 6])}),
    ("shape_bytes_wrap", "2^62 elements, whose bytes wrap to 0", {"w": entry(shape=[1 << 62], offsets=[0, 0])}),
    ("shape_huge_and_0", "2^62 by 2^62 by 0", {"w": entry(shape=[1 << 62, 1 << 62, 0], offsets=[0, 0])}),
    ("shape_less", "fewer elements than bytes", {"w": entry(shape=[5])}),
    ("shape_more", "more elements than bytes", {"w": entry(shape=[7])}),
    ("offsets_one", "one offset", {"w": entry(offsets=[0])}),
    ("offsets_three", "three offsets", {"w": entry(offsets=[0, 12, 24])}),
    ("offsets_texts", "offsets that are texts", {"w": entry(offsets=["0", "24"])}),
    ("offsets_bools", "offsets that are bools", {"w": entry("U8", [1], [False, True])}),
    ("offsets_backwards", "an end before the beginning", {"w": entry(offsets=[24, 0])}),
    ("offsets_negative", "a negative beginning", {"w": entry(offsets=[-24, 0])}),
    ("offsets_beyond", "an end beyond the file", {"w": entry(shape=[12], offsets=[0, 48])}),
    ("offsets_huge", "offsets at 2^63", {"w": entry(offsets=[1 << 63, (1 << 63) + 24])}),
    ("offsets_wrap", "offsets that wrap at 2^64", {"w": entry(offsets=[1 << 64, (1 << 64) + 24])}),
    ("hole_first", "a hole at the beginning", {"w": entry(shape=[5], offsets=[4, 24])}),
    ("hole", "a hole in the middle", {"a": entry(shape=[2], offsets=[0, 8]), "b": entry(shape=[2], offsets=[16, 24])}),
    ("hole_last", "bytes that are no tensor's at the end", {"w": entry(shape=[5], offsets=[0, 20])}),
    ("overlap", "an overlap", {"a": entry(shape=[4], offsets=[0, 16]), "b": entry(shape=[4], offsets=[8, 24])}),
    ("same_bytes", "two tensors in one place", {"a": entry(), "b": entry()}),
    ("one_inside", "a tensor inside another", {"a": entry(), "b": entry(shape=[1], offsets=[8, 12])}),
    ("empty_inside", "an empty tensor inside another", {"a": entry(), "b": entry(shape=[0], offsets=[8, 8])}),
    ("nothing_said", "data that no tensor has", "{}"),
    ("odd_bits", "three elements of four bits", {"w": entry("F4", [3], [0, 2])}),
    ("minus_zero", "an offset of minus zero", f'{{"w":{W24.replace("[0, 24]", "[-0, 24]")}}}'),
    ("minus_zero_shape", "an extent of minus zero", f'{{"w":{W24},"e":{E0.replace("[0]", "[-0]")}}}'),
    ("minus_zero_spaced", "an offset of minus zero among spaces", f'{{"w":{W24.replace("[0, 24]", "[ -0 , 24]")}}}'),
    ("leading_zero", "an offset with a zero before it", f'{{"w":{W24.replace("24]", "024]")}}}'),
    ("plus", "an offset with a plus", f'{{"w":{W24.replace("24]", "+24]")}}}'),
    ("underscore", "an offset with an underscore", f'{{"w":{W24.replace("24]", "2_4]")}}}'),
    ("hexadecimal", "an offset in hexadecimal", f'{{"w":{W24.replace("24]", "0x18]")}}}'),
    ("other_digits", "an offset in Arabic digits", f'{{"w":{W24.replace("24]", "٢٤]")}}}'),
    ("other_space", "a space that is none in JSON", f'{{"w":\u00a0{W24}}}'),
    ("comment", "a comment", f'{{"w":{W24}/* */}}'),
    ("nul_behind", "zeros behind the object", json.dumps({"w": entry()}) + "\0\0"),
    ("feed_behind", "form feeds behind the object", json.dumps({"w": entry()}) + "\f\f"),
    ("metadata_zero", "metadata that is 0", f'{{"__metadata__":0,"w":{W24}}}'),
    ("metadata_false", "metadata that is false", f'{{"__metadata__":false,"w":{W24}}}'),
    ("metadata_empty_text", "metadata that is an empty text", f'{{"__metadata__":"","w":{W24}}}'),
    ("metadata_empty_list", "metadata that is an empty list", f'{{"__metadata__":[],"w":{W24}}}'),
    ("metadata_null_value", "metadata of null", {"__metadata__": {"a": None}, "w": entry()}),
    ("metadata_surrogate", "metadata with half of a pair", f'{{"__metadata__":{{"a":"\\ud800"}},"w":{W24}}}'),
    ("skipped_surrogate", "half of a pair where nothing counts", _with('"\\udc00"')),
    ("skipped_surrogate_inside", "the same, further in", _with('[{"a":["\\ud800x"]}]')),
    ("skipped_name_surrogate", "the same in a name", _with('{"\\ud800":1}')),
    ("skipped_too_deep", "126 levels where nothing counts", _with("[" * 126 + "]" * 126)),
    ("skipped_objects_too_deep", "126 objects where nothing counts", _with('{"a":' * 126 + "1" + "}" * 126)),
    ("skipped_huge", "1e999 where nothing counts", _with("1e999")),
    ("skipped_digits", "400 digits where nothing counts", _with("9" * 400)),
    ("skipped_nan", "NaN where nothing counts", _with("NaN")),
    ("skipped_twice", "a name twice where nothing counts", _with('{"a":1,"a":1}')),
    ("skipped_many", "three million lists where nothing counts", lambda: _with("[" + "[]," * 3_000_000 + "0]")),
    ("many_lists", "three million lists for tensors", lambda: '{"w":[' + "[]," * 3_000_000 + "[]]}"),
    ("many_numbers", "six million numbers for a shape", lambda: (
        f'{{"w":{W24.replace("[2, 3]", "[" + "1," * 6_000_000 + "6]")}}}'
    )),
    ("many_names", "1.5 million members of the metadata", lambda: (
        '{"__metadata__":{"' + many_numbers('":"","') + f'":""}},"w":{W24}}}'
    )),
    ("many_numbered", "1.5 million numbers for tensors", lambda: (
        '{"' + many_numbers('":1,"') + '":1}'
    )),
    ("name_twice_far", "a name twice, a megabyte apart", lambda: (
        "{" + ",".join([f'"e":{E0}', *(f'"e{n}":{E0}' for n in range(20_000)), f'"e":{E0}', f'"w":{W24}']) + "}"
    )),
    ("metadata_twice_far", "metadata twice, a megabyte apart", lambda: (
        '{"__metadata__":{},' + ",".join(f'"e{n}":{E0}' for n in range(20_000)) + f',"__metadata__":{{}},"w":{W24}}}'
    )),
):  # fmt: skip
    _add(CORRUPT, _file, _why, (lambda canary, made=_header: held(made())) if callable(_header) else held(_header))
for _code in ("F6_E2M3", "F16x", "f32", "", "os.system", "X" * 10_000):
    _add(UNSUPPORTED, f"dtype_{_code[:9]}", f"dtype {_code[:20]!r}", held({"w": entry(_code)}))
_add(UNSUPPORTED, "dims_65", "65 dimensions", held({"w": entry(shape=[1] * 65, offsets=[0, 4])}, DATA[:4]))
_add(UNSUPPORTED, "dims_many", "100,000 dimensions", held({"w": entry(shape=[1] * 100_000, offsets=[0, 4])}, DATA[:4]))

_header = json.dumps({"w": entry()})
for _file, _length in (
    ("0", 0), ("1", 1), ("less", len(_header) - 1), ("more", len(_header) + 1), ("all", len(_header) + 24),
    ("beyond", len(_header) + 25), ("most", 100_000_000), ("over", 100_000_001), ("2_32", 1 << 32), ("2_63", 1 << 63),
    ("2_64", (1 << 64) - 1),
):  # fmt: skip
    _add(CORRUPT, f"length_{_file}", f"a header that says it has {_length} bytes", held(_header, length=_length))
for _cut in (0, 1, 7, 8, 9, 40, len(_header), len(_header) + 8, len(_header) + 31):
    _add(CORRUPT, f"cut_at_{_cut}", f"cut at byte {_cut}", held(_header)[:_cut])
_add(CORRUPT, "data_more", "a byte after the data", held(_header) + b"x")

# -------------------------------------------------------------------------------------------------- structure records


def _record(exit_code: int, file: str, why: str, *args: Any, **facts: Any) -> None:
    _add(exit_code, f"record_{file}", f"a record with {why}", recorded(*args, **facts))


def _doubled(node: Callable[[Any], list[Any]], levels: int, last: list[Any]) -> list[Any]:
    """A table in which each node holds the next twice."""
    return [*(node(["@", index + 1]) for index in range(levels)), last]


def _colliding(index: int) -> list[str]:
    """An integer whose hash is 0."""
    return ["int", hex(index * ((1 << 61) - 1))]


W = ["dict", "w", {}]
OPAQUE = ["opaque", ["global", "os", "system"], ["tuple", "touch canary"]]

_add(DONE, "record_sound", "a sound record", recorded(["odict", None, "w", {}, "lr", ["float", "0.1"]]), whole=True)
_record(UNSUPPORTED, "version_2", "version 2", W, version=2)
_record(UNSUPPORTED, "version_huge", "version 2^70", W, version=1 << 70)
_record(UNSUPPORTED, "version_negative", "version -1", W, version=-1)
for _file, _version in (("text", "1"), ("float", 1.0), ("bool", True), ("null", None), ("list", [1])):
    _record(CORRUPT, f"version_{_file}", f"a version that is a {_file}", W, version=_version)
for _file, _why, _text in (
    ("empty", "nothing in it", ""),
    ("not_json", "no JSON in it", "{"),
    ("nan", "a NaN", '{"version":1,"root":NaN}'),
    ("list", "a list for a record", "[1]"),
    ("no_root", "no root", '{"version":1}'),
    ("deep", "100,000 lists inside one another", '{"version":1,"root":' + "[" * 100_000),
    ("deep_closed", "the same, closed", '{"version":1,"root":' + '["list",' * 99_999 + "1" + "]" * 99_999 + "}"),
    ("digits", "a number of 100,000 digits", '{"version":1,"root":' + "9" * 100_000 + "}"),
    ("many", "three million lists", '{"version":1,"root":[' + "[]," * 3_000_000 + "[]]}"),
    ("root_twice", "its root twice", '{"version":1,"root":["dict","w",{}],"root":["dict","w",{}]}'),
    ("nodes_object", "nodes that are an object", '{"version":1,"root":["dict","w",{}],"nodes":{}}'),
):  # fmt: skip
    _add(CORRUPT, f"record_{_file}", f"a record with {_why}", with_record(_text))
for _file, _why, _node, *_nodes in (
    ("float_number", "a float that is a number", 0.5),
    ("tag_unknown", "a tag that is not known", ["eval", "1+1"]),
    ("tag_number", "a tag that is a number", [7]),
    ("tag_list", "a tag that is a list", [["list"]]),
    ("node_empty", "an empty node", []),
    ("refers_beyond", "a reference beyond the table", ["@", 5]),
    ("refers_back", "a reference to node -1", ["@", -1], 1),
    ("refers_to_text", "a reference to text", ["@", "0"], 1),
    ("refers_to_true", "a reference to true", ["@", True], 1, 2),
    ("refers_far", "a reference to node 2^70", ["@", 1 << 70], 1),
    ("reference_in_table", "a node that is a reference", ["@", 0], ["@", 0]),
    ("tuple_itself", "a tuple that contains itself", ["@", 0], ["tuple", ["@", 0]]),
    ("two_tuples", "two tuples that hold each other", ["@", 0], ["tuple", ["@", 1]], ["tuple", ["@", 0]]),
    ("frozenset_itself", "a frozenset that contains itself", ["@", 0], ["frozenset", ["@", 0]]),
    ("set_twice", "an element twice", ["set", 1, True]),
    ("factory", "eval for a factory", ["defaultdict", "eval"]),
    ("factory_path", "os.system for a factory", ["defaultdict", "os.system"]),
    ("factory_node", "a function for a factory", ["defaultdict", ["global", "os", "system"]]),
    ("maxlen", "a deque of at most -1", ["deque", -1]),
    ("maxlen_huge", "a deque of at most 2^70", ["deque", 1 << 70]),
    ("maxlen_less", "a deque of at most 1 with 2", ["deque", 1, 1, 2]),
    ("attributes", "an attribute that stands in for a method", ["odict", ["dict", "items", 1]]),
    ("attributes_class", "an attribute that stands in for the class", ["odict", ["dict", "__class__", 1]]),
    ("attributes_list", "attributes that are a list", ["odict", ["list"]]),
    ("range_step", "a range of step 0", ["range", 0, 1, 0]),
    ("range_texts", "a range of texts", ["range", "0", "1", "2"]),
    ("float_text", "a float that is code", ["float", "__import__('os')"]),
    ("float_hex", "a float in another form", ["float", "0x1p3"]),
    ("int_text", "an integer in decimal", ["int", "12"]),
    ("nan_text", "a NaN that is a number", ["float", "nan:3ff0000000000000"]),
    ("bytes_text", "bytes that are no base64", ["bytes", "!!!"]),
    ("bytes_list", "bytes that are a list", ["bytes", [1, 2]]),
    ("bytearray_number", "bytearray(2^40), which would be a terabyte", ["bytearray", 1 << 40]),
    (
        "array_shape", "an array of 2^60 elements and no data",
        ["numpy.array", "<f8", ["tuple", 1 << 60], "C", ["bytes", ""]],
    ),
    ("array_negative", "an array of -1 elements", ["numpy.array", "<f8", ["tuple", -1], "C", ["bytes", ""]]),
    ("opaque_no_class", "an object without a class", ["opaque", "os.system", ["tuple"]]),
    ("opaque_call", "an object that is made by exec", ["opaque", ["global", "a", "B"], ["tuple"], "exec"]),
    ("opaque_itself", "an object of itself", ["@", 0], ["opaque", ["@", 0], ["tuple"]]),
    ("composite_kind", "a tensor of several that is of no kind", ["composite", "", "values", 1]),
    ("opaque_parts", "an object of too many parts", ["opaque", *range(9)]),
):  # fmt: skip
    _record(CORRUPT, _file, _why, [*W, "x", _node], _nodes)
for _file, _why, _root, *_nodes in (
    ("key_missing_value", "a key without a value", ["dict", "w", {}, "x"]),
    ("key_twice", "a key twice", ["dict", "w", {}, 1, None, True, None]),
    ("key_list", "a list as a key", ["dict", "w", {}, ["list"], None]),
    ("key_itself", "a dict as its own key", ["dict", "w", {}, ["@", 0], None], ["dict", ["@", 0], 1]),
    (
        "hash_bomb", "a key of 2^60 tuples",
        ["dict", "w", {}, ["@", 0], None], *_doubled(lambda ref: ["tuple", ref, ref], 60, ["tuple"]),
    ),
    (
        "key_deep", "a key of 12,000 tuples inside one another",
        ["dict", "w", {}, ["@", 0], None], *(["tuple", ["@", index + 1]] for index in range(12_000)), ["tuple"],
    ),
    (
        "colliding", "5,000 keys with one hash",
        ["dict", "w", {}, *(part for index in range(1, 5001) for part in (_colliding(index), None))],
    ),
    ("missing", "a tensor that is not there", ["dict", "w", {}, "v", {}]),
    ("extra", "no tensor that is there", ["dict"]),
    ("leaf_field", "a tensor with an unknown field", ["dict", "w", {"code": "1+1"}]),
    ("leaf_name", "a tensor whose name is a list", ["dict", "w", {"name": ["w"]}]),
    ("leaf_is", "a tensor whose number is text", ["dict", "w", {"is": "0"}]),
    ("leaf_grad", "requires_grad of text", ["dict", "w", {"requires_grad": "yes"}]),
    ("leaf_kind", "a tensor of no kind", ["dict", "w", {"kind": ""}]),
    ("leaf_strides", "strides with gaps", ["dict", "w", {"strides": [100, 1]}]),
    ("leaf_strides_many", "more strides than dimensions", ["dict", "w", {"strides": [3, 1, 1]}]),
    ("leaf_strides_negative", "negative strides", ["dict", "w", {"strides": [-3, 1]}]),
    ("leaf_view", "a dtype that there is not", ["dict", "w", {"view": "os.system"}]),
    ("leaf_view_size", "a dtype of another size", ["dict", "w", {"view": "complex128"}]),
    ("leaf_storage", "a storage that is not there", ["dict", "w", {"storage": [3, 0]}]),
    ("leaf_storage_text", "a storage that is text", ["dict", "w", {"storage": "0"}]),
    ("leaf_attributes", "attributes that are not there", ["dict", "w", {"attributes": 9}]),
):  # fmt: skip
    _record(CORRUPT, _file, _why, _root, _nodes)
for _file, _why, _leaf, _storage in (
    ("repeats", "a tensor that is said to repeat its elements", {"storage": [0, 0, [1, 0]]}, [24, "float32"]),
    ("windows", "a tensor that is said to be windows", {"storage": [0, 0, [1, 1]]}, [24, "float32"]),
    ("outside", "a tensor outside its storage", {"storage": [0, 1]}, [24, "float32"]),
    ("outside_far", "a tensor far outside its storage", {"storage": [0, 1 << 62]}, [24, "float32"]),
    ("strides_outside", "strides that lead out of the storage", {"storage": [0, 0, [1 << 40, 1]]}, [24, "float32"]),
    ("strides_negative", "negative strides in a storage", {"storage": [0, 3, [-3, 1]]}, [24, "float32"]),
    ("size_negative", "a storage of -1 bytes", {"storage": [0, 0]}, [-1, "float32"]),
    ("size_text", "a storage of text", {"storage": [0, 0]}, ["24", "float32"]),
):  # fmt: skip
    _record(CORRUPT, f"storage_{_file}", _why, ["dict", "w", _leaf], storages=[_storage])
for _name in ("data", "real", "imag", "grad", "requires_grad", "shape", "__class__", "__dict__", "__setstate__", "H"):
    _record(CORRUPT, f"attribute_{_name}", f"an attribute {_name} of a tensor", ["dict", "w", {"attributes": 0}],
            [["dict", _name, 1]])  # fmt: skip
_record(CORRUPT, "attribute_list", "a list for attributes of a tensor", ["dict", "w", {"attributes": 0}], [["list"]])
_add(CORRUPT, "record_member_twice", "a record with a member twice",
     with_record('{"version":1,"root":["dict","w",{"name":"w","name":"w"}]}'))  # fmt: skip
_record(CORRUPT, "composite_part_twice", "a part of a tensor twice",
        [*W, "x", ["composite", "my.Tensor", "a", 1, "a", 2]])  # fmt: skip


def _twice(file: str, why: str, again: dict[str, Any], data: bytes = DATA) -> None:
    """Two names, of which the record says that they are one object."""
    record = {"version": 1, "root": ["dict", "v", again, "w", {"is": 0}]}
    metadata = {"ckptconv.structure": json.dumps(record)}
    header = {"__metadata__": metadata, "v": entry(), "w": entry(offsets=(24, 48))}
    _add(DONE if file == "equal" else CORRUPT, f"record_object_{file}", f"a record with one object {why}",
         held(header, data + DATA), whole=file == "equal")  # fmt: skip


_twice("equal", "under two names", {"is": 0})
_twice("other_data", "that has other data under another name", {"is": 0}, bytes(24))
_twice("other_kind", "of two kinds", {"is": 0, "kind": "parameter"})
_twice("other_gradient", "with and without a gradient", {"is": 0, "requires_grad": True})
for _file, _why, _kind, _parts in (
    ("coo", "a sparse tensor of too few indices", "sparse_coo",
     ["indices", {"name": "i"}, "values", {"name": "w"}, "shape", ["size", 9, 3]]),
    ("coo_shape", "a sparse tensor with another shape", "sparse_coo",
     ["indices", {"name": "i"}, "values", {"name": "w"}, "shape", ["size", 9]]),
    ("csr", "a sparse tensor of other rows", "sparse_csr",
     ["crow_indices", {"name": "i"}, "col_indices", {"name": "i"}, "values", {"name": "w"}, "shape", ["size", 7, 7]]),
    ("quantized", "a quantized tensor of floats", "quantized",
     ["values", {"name": "w"}, "qscheme", ["torch", "qscheme", "per_tensor_affine"], "scale", 1, "zero_point", 0]),
    ("part", "a sparse tensor with a part that it does not have", "sparse_coo",
     ["indices", {"name": "i"}, "values", {"name": "w"}, "shape", ["size", 9, 3], "data", 1]),
):  # fmt: skip
    _used = json.dumps(_parts)
    _more = {"i": entry("I64", (1, 3), (24, 48))} if '"i"' in _used else {}
    _add(CORRUPT, f"record_fit_{_file}", f"a record with {_why}", held(
        {"__metadata__": {"ckptconv.structure": json.dumps(
            {"version": 1, "root": ["dict", "x", ["composite", _kind, *_parts]]}
        )}, "w": entry(), **_more}, DATA + (DATA if _more else b"")
    ))  # fmt: skip
for _file, _size, _more_parts in (
    ("meta", ["size", 3, 4], ["requires_grad", False]), ("meta_negative", ["size", -1], ["requires_grad", False]),
    ("meta_many", ["size", ["int", hex(1 << 62)], 8], ["requires_grad", False]),
):  # fmt: skip
    _record(CORRUPT, f"fit_{_file}", "a tensor without data whose sizes do not fit", [*W, "x", [
        "composite", "meta", "dtype", ["torch", "dtype", "float32"], "shape", _size,
        "strides", ["tuple", 1, 1] if _file == "meta_many" else ["tuple", 1], *_more_parts,
    ]])  # fmt: skip
_add(DONE, "record_storage_huge", "a record with a storage of 2^62 bytes, of which 24 are used",
     recorded(["dict", "w", {"storage": [0, 0]}], storages=[[1 << 62, "float32"]]), whole=True)  # fmt: skip
_add(DONE, "record_storage_far", "a record with a storage that is used at 2^60",
     recorded(["dict", "w", {"storage": [0, 1 << 60]}], storages=[[1 << 63, "float32"]]), whole=True)  # fmt: skip
_add(DONE, "record_list_itself", "a record with a list that contains itself",
     recorded([*W, "x", ["@", 0]], [["list", ["@", 0]]]), whole=True)  # fmt: skip
for _file, _tag in (("lists", "list"), ("tuples", "tuple")):
    _add(DONE, f"record_laughs_{_file}", f"a record with 2^60 {_file} by reference",
         recorded([*W, "x", ["@", 0]], _doubled(lambda ref, tag=_tag: [tag, ref, ref], 60, [_tag])),
         whole=True)  # fmt: skip
_add(DONE, "record_frozen", "a record with 2^60 frozensets, which know their hashes",
     recorded([*W, "x", ["set", ["@", 0]]], _doubled(lambda it: ["frozenset", it, ["tuple", it]], 60, ["frozenset"])),
     whole=True)  # fmt: skip
_add(DONE, "record_levels", "a record with 10,000 lists inside one another by reference",
     recorded([*W, "x", ["@", 0]], [*(["list", ["@", index + 1]] for index in range(10_000)), ["list"]]),
     whole=True)  # fmt: skip
_add(
    DONE,
    "record_range",
    "a record with range(2^62)",
    recorded([*W, "x", ["range", 0, ["int", hex(1 << 62)], 1]]),
    whole=True,
)
_add(DONE, "record_integer", "a record with an integer of 100,000 digits",
     recorded([*W, "x", ["int", "0x" + "f" * 100_000]]), whole=True)  # fmt: skip
for _file, _why, _node in (
    ("global", "a function by name", ["global", "os", "system"]),
    ("opaque", "a call of a function", OPAQUE),
    ("opaque_key", "a call of a function as a key", None),
    ("opaque_persistent", "a persistent id", ["opaque", ["global", "os", "system"], 1, "persistent"]),
    ("composite", "a tensor of a class", ["composite", "os.system", "args", ["tuple", "touch canary"]]),
    ("newline", "a name with instructions in it", ["global", "torch", "float32\n.cos\nsystem\n(S'id'\ntR."]),
    ("opaque_allowed", "a call of torch.load", ["opaque", ["global", "torch", "load"], ["tuple", "x.pt"]]),
):
    _root = [*W, "x", _node] if _node else [*W, OPAQUE, 1]
    _record(UNSAFE, _file, _why, _root)
_record(UNSAFE, "kind", "a tensor that is a function", ["dict", "w", {"kind": "os.system"}])
for _file, _why, _node in (
    ("dtype", "a dtype that is a function", ["torch", "dtype", "load"]),
    ("dtype_path", "a dtype that is another module's function", ["torch", "dtype", "os.system"]),
    ("constant", "a constant of a kind that there is not", ["torch", "hub", "load"]),
    ("qscheme", "a constant with instructions in it", ["torch", "qscheme", "x\n.cos\nsystem\n(S'id'\ntR."]),
    (
        "numpy_dtype", "an array with instructions in its dtype",
        ["numpy.array", "O\ncos\nsystem", ["tuple", 0], "C", ["bytes", ""]],
    ),
    ("numpy_object", "an array of objects", ["numpy.array", "|O8", ["tuple", 0], "C", ["bytes", ""]]),
    ("numpy_scalar", "a scalar of objects", ["numpy.scalar", "|O8", ["bytes", ""]]),
    ("layout", "a layout that is a function", ["torch", "layout", "os.system"]),
    ("device", "a device with instructions in it", ["torch", "device", "cpu\n.cos\nsystem\n(S'id'\ntR."]),
):  # fmt: skip
    _record(UNSUPPORTED, f"constant_{_file}", _why, [*W, "x", _node])
for _file, _why, _node in (
    ("sparse_parts", "a sparse tensor without its parts", ["composite", "sparse_coo"]),
    (
        "sparse_texts", "a sparse tensor of texts",
        ["composite", "sparse_coo", "indices", "a", "values", "b", "shape", "c"],
    ),
    (
        "quantized", "a quantized tensor of texts",
        ["composite", "quantized", "values", "a", "qscheme", "b", "scale", 1, "zero_point", 2],
    ),
    (
        "nested", "a nested tensor of numbers",
        ["composite", "nested", "values", 1, "sizes", 2, "strides", 3, "storage_offsets", 4],
    ),
    ("meta", "a tensor without data", ["composite", "meta", "dtype", 1, "shape", 2, "strides", 3, "requires_grad", 4]),
):  # fmt: skip
    _record(CORRUPT, f"tensor_{_file}", _why, [*W, "x", _node])

# ------------------------------------------------------------------------------------------------------ sharded sets

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MAP = {"a": SHARDS[0], "b": SHARDS[1]}


def _set(
    exit_code: int,
    file: str,
    why: str,
    index: object,
    change: Callable[[Path], object] = lambda place: None,
) -> None:
    """Two files and an index, which is text or an object."""

    def make(place: Path, canary: str) -> Path:
        for shard, key in zip(SHARDS, "ab", strict=True):
            (place / shard).write_bytes(held({key: entry()}))
        (place.parent / "outside.safetensors").write_bytes(held({"b": entry()}))
        change(place)
        path = place / "model.safetensors.index.json"
        made = index() if callable(index) else index
        path.write_text(made if isinstance(made, str) else json.dumps(made))
        return path

    SETS[f"st_set_{file}"] = Directory(f"st_set_{file}", "safetensors set", exit_code, why, make)


def _mapping(**changes: object) -> dict[str, object]:
    return {"metadata": {"total_size": 48}, "weight_map": {**MAP, **changes}}


def _beside(record: str) -> Callable[[Path], object]:
    return lambda place: (place / "ckptconv.structure.json").write_text(record)


_set(DONE, "sound", "a sound set", _mapping())
for _file, _entry in {
    "parent": "../outside.safetensors", "absolute": "/etc/passwd", "inside_and_out": "x/../../outside.safetensors",
    "dots": "..", "windows": "..\\outside.safetensors", "drive": "C:\\outside.safetensors", "share": "\\\\host\\share",
    "url": "http://example.com/x.safetensors", "file_url": "file:///etc/passwd", "nul": "a\0b", "empty": "",
    "memory_url": "memory://x", "chained": "simplecache::file:///etc/passwd", "newline": SHARDS[1] + "\n",
    "escape": "\x1b[2J", "space": " ", "drive_relative": "C:x", "inner_parent": "x/../" + SHARDS[1],
}.items():  # fmt: skip
    _set(UNSAFE, _file, f"an entry that is {_entry!r}", _mapping(b=_entry))
_set(CORRUPT, "surrogate", "an entry that is half of a surrogate pair", _mapping(b="\ud800"))
_set(CORRUPT, "percent", "an entry that is escaped as in a URL", _mapping(b="%2e%2e/outside.safetensors"))
_set(CORRUPT, "long", "an entry of 5,000 characters", _mapping(b="x" * 5000))
_set(CORRUPT, "twice_far", "a tensor twice, 100,000 entries apart", lambda: (
    '{"weight_map":{"a":"x",' + ",".join(f'"{n}":"x"' for n in range(100_000)) + ',"a":"y"}}'
))  # fmt: skip
_set(CORRUPT, "huge", "1.5 million tensors", lambda: (
    '{"weight_map":{"' + many_numbers('":"x","') + '":"x"}}'
))  # fmt: skip
_set(CORRUPT, "nan", "NaN in the metadata", '{"metadata":{"total_size":NaN},"weight_map":{}}')
_set(DONE, "odd_names", "files with odd names", _mapping(a="a %2e#?é.safetensors"), lambda place: (
    (place / SHARDS[0]).rename(place / "a %2e#?é.safetensors")
))  # fmt: skip
_set(CORRUPT, "pipe", "a file that is a pipe", _mapping(), lambda place: (
    (place / SHARDS[1]).unlink(), os.mkfifo(place / SHARDS[1])
))  # fmt: skip
_set(CORRUPT, "missing", "an entry that is not there", _mapping(b="model-00009-of-00009.safetensors"))
_set(CORRUPT, "itself", "an entry that is the index", _mapping(b="model.safetensors.index.json"))
_set(CORRUPT, "directory", "an entry that is the directory", _mapping(b="."))
_set(CORRUPT, "number", "an entry that is a number", _mapping(b=7))
_set(CORRUPT, "null", "an entry that is null", _mapping(b=None))
_set(CORRUPT, "other_shard", "a tensor that is in another file", _mapping(b=SHARDS[0]))
_set(CORRUPT, "unknown", "a tensor that is in no file", _mapping(c=SHARDS[0]))
_set(DONE, "fewer", "a file that is not in the index", {"weight_map": {"a": SHARDS[0]}})
_set(CORRUPT, "list", "an index that is a list", [1, 2])
_set(CORRUPT, "no_map", "an index without a map", {"metadata": {}})
_set(CORRUPT, "map_list", "a map that is a list", {"weight_map": ["a"]})
_set(CORRUPT, "metadata_list", "metadata that is a list", {**_mapping(), "metadata": [1]})
_set(DONE, "metadata_null", "metadata that is null", {**_mapping(), "metadata": None})
_set(CORRUPT, "twice", "a tensor twice", json.dumps(_mapping(c=SHARDS[0])).replace('"c"', '"b"'))
_set(CORRUPT, "not_json", "an index that is no JSON", "{")
_set(CORRUPT, "deep", "JSON nested 100,000 levels deep", '{"weight_map":' * 100_000)
_set(CORRUPT, "shard_cut", "a file that is cut", _mapping(), lambda place: os.truncate(place / SHARDS[1], 40))
_set(
    CORRUPT,
    "shard_other",
    "a file that is a zip archive",
    _mapping(),
    lambda place: (place / SHARDS[1]).write_bytes(b"PK\3\4" * 20),
)
_set(
    DONE, "symlinks", "files that are symbolic links, as in a cache", _mapping(),
    lambda place: ((place / SHARDS[1]).rename(place.parent / "blob"), (place / SHARDS[1]).symlink_to("../blob")),
)  # fmt: skip
_set(CORRUPT, "symlink_to_nothing", "a file that is a link to nothing", _mapping(), lambda place: (
    (place / SHARDS[1]).unlink(), (place / SHARDS[1]).symlink_to("nowhere")
))  # fmt: skip
_set(DONE, "record", "a sound record beside", _mapping(), _beside('{"version":1,"root":["odict",null,"a",{},"b",{}]}'))
_set(CORRUPT, "record_empty", "an empty record beside", _mapping(), _beside(""))
_set(CORRUPT, "record_deep", "a record of 100,000 levels beside", _mapping(), _beside("[" * 100_000))
_set(
    CORRUPT,
    "record_other",
    "another output's record beside",
    _mapping(),
    _beside('{"version":1,"root":["dict","c",{}]}'),
)
_set(UNSUPPORTED, "record_version", "a record of version 9 beside", _mapping(), _beside('{"version":9,"root":1}'))
_set(UNSAFE, "record_opaque", "a record with a call beside", _mapping(), _beside(
    json.dumps({"version": 1, "root": ["dict", "a", {}, "b", {}, "x", OPAQUE]})
))  # fmt: skip
_set(DONE, "record_endless", "a record that is not a file, but a link to what never ends", _mapping(), lambda place: (
    place / "ckptconv.structure.json"
).symlink_to("/dev/zero"))  # fmt: skip

"""Hostile, broken and odd safetensors files: headers, names that are pickles, and sharded sets.

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

# ------------------------------------------------------------------------------------------------------ sharded sets

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MAP = {"a": SHARDS[0], "b": SHARDS[1]}


def set_of(
    exit_code: int,
    file: str,
    why: str,
    index: object,
    change: Callable[[Path], object] = lambda place: None,
) -> Directory:
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

    return Directory(f"st_set_{file}", "safetensors set", exit_code, why, make)


def _set(exit_code: int, file: str, *told: Any) -> None:
    SETS[f"st_set_{file}"] = set_of(exit_code, file, *told)


def mapping(**changes: object) -> dict[str, object]:
    return {"metadata": {"total_size": 48}, "weight_map": {**MAP, **changes}}


_set(DONE, "sound", "a sound set", mapping())
for _file, _entry in {
    "parent": "../outside.safetensors", "absolute": "/etc/passwd", "inside_and_out": "x/../../outside.safetensors",
    "dots": "..", "windows": "..\\outside.safetensors", "drive": "C:\\outside.safetensors", "share": "\\\\host\\share",
    "url": "http://example.com/x.safetensors", "file_url": "file:///etc/passwd", "nul": "a\0b", "empty": "",
    "memory_url": "memory://x", "chained": "simplecache::file:///etc/passwd", "newline": SHARDS[1] + "\n",
    "escape": "\x1b[2J", "space": " ", "drive_relative": "C:x", "inner_parent": "x/../" + SHARDS[1],
}.items():  # fmt: skip
    _set(UNSAFE, _file, f"an entry that is {_entry!r}", mapping(b=_entry))
_set(CORRUPT, "surrogate", "an entry that is half of a surrogate pair", mapping(b="\ud800"))
_set(CORRUPT, "percent", "an entry that is escaped as in a URL", mapping(b="%2e%2e/outside.safetensors"))
_set(CORRUPT, "long", "an entry of 5,000 characters", mapping(b="x" * 5000))
_set(CORRUPT, "twice_far", "a tensor twice, 100,000 entries apart", lambda: (
    '{"weight_map":{"a":"x",' + ",".join(f'"{n}":"x"' for n in range(100_000)) + ',"a":"y"}}'
))  # fmt: skip
_set(CORRUPT, "huge", "1.5 million tensors", lambda: (
    '{"weight_map":{"' + many_numbers('":"x","') + '":"x"}}'
))  # fmt: skip
_set(CORRUPT, "nan", "NaN in the metadata", '{"metadata":{"total_size":NaN},"weight_map":{}}')
_set(DONE, "odd_names", "files with odd names", mapping(a="a %2e#?é.safetensors"), lambda place: (
    (place / SHARDS[0]).rename(place / "a %2e#?é.safetensors")
))  # fmt: skip
_set(CORRUPT, "pipe", "a file that is a pipe", mapping(), lambda place: (
    (place / SHARDS[1]).unlink(), os.mkfifo(place / SHARDS[1])
))  # fmt: skip
_set(CORRUPT, "missing", "an entry that is not there", mapping(b="model-00009-of-00009.safetensors"))
_set(CORRUPT, "itself", "an entry that is the index", mapping(b="model.safetensors.index.json"))
_set(CORRUPT, "directory", "an entry that is the directory", mapping(b="."))
_set(CORRUPT, "number", "an entry that is a number", mapping(b=7))
_set(CORRUPT, "null", "an entry that is null", mapping(b=None))
_set(CORRUPT, "other_shard", "a tensor that is in another file", mapping(b=SHARDS[0]))
_set(CORRUPT, "unknown", "a tensor that is in no file", mapping(c=SHARDS[0]))
_set(DONE, "fewer", "a file that is not in the index", {"weight_map": {"a": SHARDS[0]}})
_set(CORRUPT, "list", "an index that is a list", [1, 2])
_set(CORRUPT, "no_map", "an index without a map", {"metadata": {}})
_set(CORRUPT, "map_list", "a map that is a list", {"weight_map": ["a"]})
_set(CORRUPT, "metadata_list", "metadata that is a list", {**mapping(), "metadata": [1]})
_set(DONE, "metadata_null", "metadata that is null", {**mapping(), "metadata": None})
_set(CORRUPT, "twice", "a tensor twice", json.dumps(mapping(c=SHARDS[0])).replace('"c"', '"b"'))
_set(CORRUPT, "not_json", "an index that is no JSON", "{")
_set(CORRUPT, "deep", "JSON nested 100,000 levels deep", '{"weight_map":' * 100_000)
_set(CORRUPT, "shard_cut", "a file that is cut", mapping(), lambda place: os.truncate(place / SHARDS[1], 40))
_set(
    CORRUPT,
    "shard_other",
    "a file that is a zip archive",
    mapping(),
    lambda place: (place / SHARDS[1]).write_bytes(b"PK\3\4" * 20),
)
_set(
    DONE, "symlinks", "files that are symbolic links, as in a cache", mapping(),
    lambda place: ((place / SHARDS[1]).rename(place.parent / "blob"), (place / SHARDS[1]).symlink_to("../blob")),
)  # fmt: skip
_set(CORRUPT, "symlink_to_nothing", "a file that is a link to nothing", mapping(), lambda place: (
    (place / SHARDS[1]).unlink(), (place / SHARDS[1]).symlink_to("nowhere")
))  # fmt: skip

"""Hostile, broken and odd structure records, in safetensors files and beside sets of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.assemble import DATA
from attacks.corpus import CORRUPT, DONE, UNSAFE, UNSUPPORTED, Case
from attacks.directories import Directory
from attacks.headers import case_of, entry, held, mapping, set_of

FILES: dict[str, Case] = {}
SETS: list[Directory] = []


def recorded(root: Any, nodes: Any = (), storages: Any = (), version: Any = 1, **tensors: Any) -> bytes:
    """A sound file with a structure record. Without `tensors` it has the tensor "w" alone."""
    record = {"version": version, "root": root, "nodes": nodes, "storages": storages}
    return with_record(json.dumps(record), **tensors)


def with_record(record: str, **tensors: Any) -> bytes:
    return held({"__metadata__": {"format": "pt", "ckptconv.structure": record}, **(tensors or {"w": entry()})})


def _add(exit_code: int, file: str, *told: Any, **more: Any) -> None:
    assert file not in FILES, file
    FILES[file] = case_of(exit_code, file, *told, **more)


def _set(exit_code: int, file: str, *told: Any) -> None:
    SETS.append(set_of(exit_code, file, *told))


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


def _beside(record: str) -> Callable[[Path], object]:
    return lambda place: (place / "ckptconv.structure.json").write_text(record)


_set(DONE, "record", "a sound record beside", mapping(), _beside('{"version":1,"root":["odict",null,"a",{},"b",{}]}'))
_set(CORRUPT, "record_empty", "an empty record beside", mapping(), _beside(""))
_set(CORRUPT, "record_deep", "a record of 100,000 levels beside", mapping(), _beside("[" * 100_000))
_set(
    CORRUPT,
    "record_other",
    "another output's record beside",
    mapping(),
    _beside('{"version":1,"root":["dict","c",{}]}'),
)
_set(UNSUPPORTED, "record_version", "a record of version 9 beside", mapping(), _beside('{"version":9,"root":1}'))
_set(UNSAFE, "record_opaque", "a record with a call beside", mapping(), _beside(
    json.dumps({"version": 1, "root": ["dict", "a", {}, "b", {}, "x", OPAQUE]})
))  # fmt: skip
_set(DONE, "record_endless", "a record that is not a file, but a link to what never ends", mapping(), lambda place: (
    place / "ckptconv.structure.json"
).symlink_to("/dev/zero"))  # fmt: skip

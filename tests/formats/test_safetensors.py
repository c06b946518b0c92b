"""safetensors files as input: what the library writes is read, and whatever breaks a rule of the format is refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import bits, evaluate
from effort import every, examples
from hypothesis import given
from hypothesis import strategies as st
from processes import counted
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

import ckptconv
from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsafeError, UnsupportedError, UsageError
from ckptconv.formats import safetensors
from ckptconv.formats.detect import open_source
from ckptconv.formats.weight_map import read_index
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.tensors.dtypes import DTYPES


def written(tmp_path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file of this header, an object or its text or its bytes, and this data."""
    text = header if isinstance(header, (str, bytes)) else json.dumps(header)
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def tensors_of(path: Path) -> Any:
    return open_source(path).weights


# --------------------------------------------------------------------------------------------------------- sound files


def test_every_dtype_of_torch_is_read(tmp_path: Path) -> None:
    state = {
        name: torch.arange(48, dtype=torch.uint8).repeat(dtype.itemsize).view(getattr(torch, name)).reshape(2, 3, 8)
        for name, dtype in DTYPES.items()
        if dtype.code and name != "bool"
    } | {"bool": torch.arange(12).reshape(3, 4) % 3 == 0}
    save_file(state, tmp_path / "x.safetensors")
    read = tensors_of(tmp_path / "x.safetensors")
    assert set(read) == set(state)
    for name, tensor in state.items():
        assert (read[name].dtype.name, read[name].shape) == (name, tuple(tensor.shape)), name
        assert evaluate(read[name]) == bits(tensor), name


@examples(40)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(["float32", "int64", "bool", "bfloat16"]), st.lists(st.integers(0, 3), max_size=4)),
        max_size=6,
    ),
    st.none()
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.just("x"), min_size=1, max_size=3),
)
def test_what_the_library_writes_is_read_in_the_order_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    state = {name: torch.randint(0, 2, shape).to(getattr(torch, dtype)) for name, (dtype, shape) in shapes.items()}
    path = tmp_path_factory.mktemp("read") / "x.safetensors"
    path.write_bytes(save(state, metadata))
    read = tensors_of(path)
    with safe_open(path, "pt") as file:
        assert set(read) == set(file.keys())
    assert [tensor.offset for tensor in read.values()] == sorted(tensor.offset for tensor in read.values())
    for name, tensor in state.items():
        assert evaluate(read[name]) == bits(tensor)


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path, {"s": entry(0, 4, shape=[]), "e": entry(4, 4, shape=[0, 5]), "f": entry(4, 4, shape=[3, 0])}, b"1234"
    )
    read = tensors_of(path)
    assert {name: tensor.shape for name, tensor in read.items()} == {"s": (), "e": (0, 5), "f": (3, 0)}
    assert evaluate(read["s"]) == b"1234"


def test_a_header_may_be_padded_with_spaces_and_have_no_metadata_or_none(tmp_path: Path) -> None:
    for metadata in ("", '"__metadata__":{},', '"__metadata__":null,'):
        text = f'{{{metadata}"a":{json.dumps(entry(0, 4))}}}' + " " * 9
        assert list(tensors_of(written(tmp_path, text, b"1234"))) == ["a"]


def test_no_data_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1 << 20)}, tmp_path / "x.safetensors")
    assert open_source(tmp_path / "x.safetensors").bytes_read < 1000


def test_four_bit_elements_come_in_pairs(tmp_path: Path) -> None:
    read = tensors_of(written(tmp_path, {"q": entry(0, 3, "F4", [1, 6])}, b"abc"))
    assert (read["q"].dtype.name, read["q"].shape) == ("float4_e2m1fn_x2", (1, 3))
    with pytest.raises(UnsupportedError, match="rows of 3"):
        tensors_of(written(tmp_path, {"q": entry(0, 3, "F4", [2, 3])}, b"abc"))
    with pytest.raises(CorruptError, match="whole bytes"):
        tensors_of(written(tmp_path, {"q": entry(0, 2, "F4", [3])}, b"ab"))


# -------------------------------------------------------------------------------------------------------- broken files

# One of each kind: tests/attacks/headers.py has more, and what stands in a header is compared with the library below.
BROKEN: dict[str, tuple[Any, bytes, str]] = {
    # name: (header, data, what is said of it)
    "not an object": ("[1, 2]", b"", "begins with"),
    "not JSON": ("{nonsense", b"", "not JSON"),
    "NaN": ('{"a": NaN}', b"", "NaN"),
    "deep": ('{"a":' * 100_000, b"", "too deep"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not UTF-8"),
    "a lone surrogate": ('{"\\ud800": ' + json.dumps(entry(0, 4)) + "}", b"1234", "surrogate"),
    "a name twice": (
        f'{{"a": {json.dumps(entry(0, 4))}, "a": {json.dumps(entry(4, 8))}}}',
        b"12345678",
        "'a' twice",
    ),
    "metadata that is no object": ({"__metadata__": [1]}, b"", "metadata"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "data_offsets"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234", "dtype"),
    "a tensor that is a list": ({"a": [1]}, b"", "dtype, shape"),
    "one offset": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234", "two non-negative integers"),
    "a negative extent": ({"a": entry(0, 4, shape=[-1])}, b"1234", "list of non-negative integers"),
    "a size that is not the shape's": ({"a": entry(0, 8, shape=[1])}, b"12345678", "has 8 bytes"),
    "an overflow of the size": ({"a": entry(0, 4, shape=[1 << 62, 4])}, b"1234", "too many elements"),
    "a hole in between": ({"a": entry(0, 4), "b": entry(8, 12)}, b"x" * 12, "hole"),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, "overlaps"),
    "trailing bytes": ({"a": entry(0, 4)}, b"12345", "ends? at byte 4"),
    "data that is cut short": ({"a": entry(0, 8)}, b"1234", "cut short"),
}


@every("header, data, reason", BROKEN.values(), ids=BROKEN)
def test_what_breaks_a_rule_is_corrupt(header: Any, data: bytes, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path, header, data)
    with pytest.raises(CorruptError, match=rf"x\.safetensors.*{reason}") as caught:
        safetensors.read(Location(str(path)))
    assert len(str(caught.value)) < 600


def test_lengths_of_headers_that_cannot_be(tmp_path: Path) -> None:
    for length in (100_000_001, 1 << 40, (1 << 64) - 1):
        with pytest.raises(LimitError, match="at most 100000000"):
            safetensors.read(Location(str(written(tmp_path, "{}", length=length))))
    with pytest.raises(CorruptError, match="beyond"):
        safetensors.read(Location(str(written(tmp_path, "{}", length=3))))
    with pytest.raises(CorruptError):
        safetensors.read(Location(str(written(tmp_path, "", length=0))))
    for content in (b"", b"\0", b"\2\0\0\0\0\0\0"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(CorruptError):
            safetensors.read(Location(str(tmp_path / "x.safetensors")))


@every("code, reason", [("F6_E2M3", "six bits"), ("F6_E3M2", "six bits"), ("Q3", "not known")])
def test_dtypes_that_torch_lacks(code: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"'a'.*{code}.*{reason}"):
        safetensors.read(Location(str(written(tmp_path, {"a": entry(0, 6, code, [8])}, b"123456"))))


def test_too_many_dimensions(tmp_path: Path) -> None:
    assert tensors_of(written(tmp_path, {"a": entry(0, 4, shape=[1] * 64)}, b"1234"))["a"].numel == 1
    with pytest.raises(UnsupportedError, match="65 dimensions"):
        safetensors.read(Location(str(written(tmp_path, {"a": entry(0, 4, shape=[1] * 65)}, b"1234"))))


NUMBERS = [
    "-0",
    "0",
    "00",
    "0.0",
    "-0.0",
    "0e0",
    "1e0",
    "+0",
    "true",
    "null",
    '"0"',
    "0x0",
    "-1",
    "NaN",
    "Infinity",
    "1_0",
    "0.",
    "-",
    "[]",
    "{}",
    "01",
    "1e999",
    "18446744073709551615",
    "18446744073709551616",
    "\t0",
    "0\n",
    "\u0660",
    "\xa00",
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    "[[-0]]",
    "[1e999]",
]
DEEP = [
    text for depth in (124, 125, 126, 127) for text in ("[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth)
]
NESTED = ['{"shape":[],"data_offsets":[],"x":' + text + "}" for text in DEEP]
W = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'
PLACES = [
    f'{{"w":{{{W}}},"e":{{"dtype":"U8","shape":[0],"data_offsets":[4,%s]}}}}',
    f'{{"w":{{{W}}},"e":{{"dtype":"U8","shape":[%s,0],"data_offsets":[4,4]}}}}',
    f'{{"w":{{{W}}},"e":{{"dtype":"U8","shape":[%s],"data_offsets":[4,4]}}}}',
    f'{{"w":{{{W},"more":%s}}}}',
    f'{{"w":{{{W}}},"e":%s}}',
    f'{{"__metadata__":%s,"w":{{{W}}}}}',
    f'{{"__metadata__":{{"a":%s}},"w":{{{W}}}}}',
    f'{{"w":{{{W}}}}}%s',
]


@every("place", PLACES)
def test_a_header_is_taken_where_the_library_takes_it(place: str, tmp_path: Path) -> None:
    """Whatever stands in it, and wherever; torch counts to 2^63, where the library counts further."""
    for text in [*NUMBERS, *DEEP, *NESTED, " ", "\n\t", "\f", "\0"]:
        path = written(tmp_path, place.replace("%s", text), b"1234")
        try:
            theirs = {name: tuple(tensor.shape) for name, tensor in load_file(path).items()}
        except (SafetensorError, RuntimeError, TypeError):
            theirs = None
        try:
            ours = {name: tensor.shape for name, tensor in tensors_of(path).items()}
        except CorruptError:
            ours = None
        assert ours == theirs, text[:200]


SOUND = save({"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.int8), "c": torch.tensor(True)}, {"k": "v"})


@examples(100)
@given(st.data())
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 25))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    path.write_bytes(content)
    try:
        read = tensors_of(path)
    except CkptconvError:
        return
    try:
        theirs = load_file(path)
    except (SafetensorError, KeyError):
        return  # what the library refuses beyond the rules, such as unknown fields of a tensor
    assert {name: tensor.shape for name, tensor in read.items()} == {n: tuple(t.shape) for n, t in theirs.items()}
    assert all(evaluate(tensor) == bits(theirs[name]) for name, tensor in read.items())


def test_many_tensors_take_little(tmp_path: Path) -> None:
    header = {f"model.layers.{n}.weight": entry(4 * n, 4 * n + 4, shape=[1]) for n in range(5_000)}
    path = written(tmp_path, header, bytes(20_000))
    tracemalloc.start()
    try:
        taken, tensors = counted(lambda: tensors_of(path))
        assert len(tensors) == 5_000
        assert tracemalloc.get_traced_memory()[1] < 1258 * len(tensors)
    finally:
        tracemalloc.stop()
    assert taken < 100 * len(tensors)


# ----------------------------------------------------------------------------------------------------------------- sets


def a_set(tmp_path: Path, **changes: Any) -> Path:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"} | changes
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": files}))
    return index


def test_a_set_is_read_by_its_directory_or_its_index(tmp_path: Path) -> None:
    index = a_set(tmp_path)
    for path in (tmp_path, index):
        assert list(tensors_of(path)) == ["a", "b"]


@every("name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "..", "C:\\x", "s3://b/x", ""])
def test_an_index_may_not_lead_out_of_its_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeError, match="is outside its directory"):
        safetensors.read(Location(str(a_set(tmp_path, b=name))))


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"lacks a tensor.*'c'"):
        safetensors.read(Location(str(a_set(tmp_path, c="model-00002-of-00002.safetensors"))))
    with pytest.raises(CorruptError, match=r"cannot be found \(1 of 3\): 'model-9\.safetensors'"):
        safetensors.read(Location(str(a_set(tmp_path, c="model-9.safetensors"))))
    index = a_set(tmp_path)
    save_file({"a": torch.ones(2), "stranger": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CorruptError, match=r"contains a tensor.*'stranger'"):
        safetensors.read(Location(str(index)))
    for text in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(CorruptError, match="index"):
            safetensors.read(Location(str(index)))


def test_a_directory_without_files_of_this_format(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without safetensors files"):
        safetensors.read(Location(str(tmp_path)))


# -------------------------------------------------------------------------------------------------------------- records


def test_a_record_in_one_file_of_several_says_nothing_of_the_others(tmp_path: Path) -> None:
    index = a_set(tmp_path)
    record = '{"version":1,"root":["list",{"name":"b"}]}'
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors", {"ckptconv.structure": record})
    assert list(tensors_of(index)) == ["a", "b"]


def test_an_index_is_counted_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"metadata": {}, "weight_map": {"größe": "model.safetensors"}}', "utf-8")
    index = read_index(Location(str(path)))
    assert index is not None
    assert index.identity.content[0] == path.stat().st_size


def test_metadata_that_come_again_a_mebibyte_later_are_refused() -> None:
    entries = {f"w{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(1, 20_000)}
    text = json.dumps({"__metadata__": {"a": "1"}, **entries})
    assert len(text) > strict_json.PIECE
    places, metadata = safetensors.described(text.encode(), "x")
    assert (len(places), metadata) == (len(entries), {"a": "1"})
    with pytest.raises(CorruptError, match="'__metadata__' twice"):
        safetensors.described((text[:-1] + ', "__metadata__": {"a": "2"}}').encode(), "x")


def test_a_single_file_that_an_index_names_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"w": "model.safetensors"}}')
    assert ckptconv.convert(tmp_path, tmp_path / "out.safetensors", fsync=False).warnings == []
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    index.write_text('{"metadata": {}, "weight_map": {"w": "other.safetensors"}}')
    (warning,) = ckptconv.convert(tmp_path, tmp_path / "out.safetensors", fsync=False).warnings
    assert "model.safetensors was not read, because the directory has an index." in warning

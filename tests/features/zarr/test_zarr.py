"""Arrays of zarr in directories: they come out as they were stored, and descriptions that lie are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import every, examples
from features.compressed.packings import packed
from features.zarr import writer
from features.zarr.attacks import HOSTILE, Attack
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.errors import CkptconvError, CorruptError
from ckptconv.features.joining.values import Directories, Files
from ckptconv.features.zarr import arrays
from ckptconv.formats.values import first_bytes
from ckptconv.storage.location import Location


def stored(place: Path, values: Mapping[str, bytes]) -> Path:
    """Values by their keys, as files of a directory."""
    for key, value in values.items():
        (place / key).parent.mkdir(parents=True, exist_ok=True)
        (place / key).write_bytes(value)
    return place


def array_in(place: Path, dtype: Any = "f4", name: str = "w") -> Any:
    files = Files(Location(str(place)))
    tensor = arrays.opened(Directories(files), files, [name], has_all=False)[0][name]
    return np.frombuffer(first_bytes(tensor, tensor.nbytes, {})[0], dtype).reshape(tensor.shape)


@given(st.data())
@examples(30)
def test_an_array_of_any_shape_in_chunks_of_any_shape_comes_out(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3))
    chunks = [data.draw(st.integers(1, 9)) for _ in shape]
    array = np.arange(1, 1 + int(np.prod(shape)), dtype="f4").reshape(shape)
    values = writer.chunked("w", array, chunks, compressed=data.draw(st.booleans()))
    lacking = data.draw(st.lists(st.sampled_from(sorted({*values} - {"w/.zarray"})), max_size=2))
    place = stored(tmp_path_factory.mktemp("array"), {key: values[key] for key in values if key not in lacking})
    for key in lacking:  # a chunk that is not there is zeros
        cell = [int(at) for at in key.removeprefix("w/").split(".")] if shape else []
        array[tuple(slice(at * size, (at + 1) * size) for at, size in zip(cell, chunks, strict=True))] = 0
    assert np.array_equal(array_in(place), array)


@every("turn", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_stored_axis_i_of_a_transposed_array_is_its_axis_order_i(turn: tuple[int, ...], tmp_path: Path) -> None:
    array = np.arange(24, dtype="f4").reshape(2, 3, 4)
    codec = {"name": "transpose", "configuration": {"order": list(turn)}}
    description = writer.zarr3(array, (2, 3, 4), [codec, writer.LITTLE])
    place = stored(tmp_path, {"w/zarr.json": description, "w/c/0/0/0": array.transpose(turn).tobytes()})
    assert np.array_equal(array_in(place), array)


def test_keys_that_are_no_chunks_are_passed_over(tmp_path: Path) -> None:
    array = np.arange(8, dtype="f4").reshape(4, 2)
    values = writer.chunked("w", array, (2, 2), compressed=False)
    more = {f"w/{key}": b"x" for key in ("00.0", "0.0.0", "2.0", "0", "c/0/0", "0.0.tmp", ".zattrs")}
    assert np.array_equal(array_in(stored(tmp_path, {**values, **more})), array)


def _bools(values: bytes) -> dict[str, bytes]:
    return {"w/zarr.json": writer.zarr3(np.zeros(8, bool), (8,), [{"name": "bytes"}]), "w/c/0": values}


def _bytes(values: bytes) -> dict[str, bytes]:
    return {
        "w/zarr.json": writer.zarr3(np.zeros(8, "u1"), (8,), [{"name": "bytes"}, writer.ZSTD]), "w/c/0": values
    }  # fmt: skip


EIGHT = bytes(range(8))
# A frame of one block, which repeats a byte eight times; and one that is passed over.
REPEATED = b"\x28\xb5\x2f\xfd" + bytes([0x20, 8]) + (8 << 3 | 0b011).to_bytes(3, "little") + b"\5"
SKIPPED = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"


@every(
    "values, said",
    [
        # As tensorstore, which refuses each of them.
        (_bools(bytes([0, 1, 2, 1, 0, 1, 1, 1])), "byte 2 of its bools is 2, but 0 or 1 was expected"),
        (_bools(bytes([0, 1, 0, 1, 0, 1, 1, 255])), "byte 7 of its bools is 255"),
        (_bytes(packed(EIGHT[:4]) + packed(EIGHT[4:])), "not exactly one zstandard frame"),
        (_bytes(SKIPPED + packed(EIGHT)), "not exactly one zstandard frame"),
        (_bytes(packed(EIGHT) + SKIPPED), "not exactly one zstandard frame"),
        (_bytes(packed(EIGHT) + b"abc"), "not exactly one zstandard frame"),
        (_bytes(REPEATED + b"abc"), "not exactly one zstandard frame"),
        (_bytes(packed(EIGHT)[:-3]), "is damaged"),
    ],
)
def test_bytes_that_tensorstore_does_not_take_are_refused(
    values: Mapping[str, bytes], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptError, match=said):
        array_in(stored(tmp_path, values), "u1")


def test_bools_and_a_frame_of_several_blocks_come_out(tmp_path: Path) -> None:
    assert array_in(stored(tmp_path / "bools", _bools(b"\0\1" * 4)), bool).tolist() == [False, True] * 4
    assert array_in(stored(tmp_path / "repeated", _bytes(REPEATED)), "u1").tolist() == [5] * 8
    chance = np.random.default_rng(0)
    # Blocks of each kind: random bytes are stored, equal ones repeated, and similar ones compressed.
    parts = [chance.bytes(300_000), bytes(400_000), bytes(chance.integers(0, 3, 300_000, "u1"))]
    array = np.frombuffer(b"".join(parts), "u1")
    for level in (1, 19):
        description = writer.zarr3(array, array.shape, [{"name": "bytes"}, writer.ZSTD])
        place = stored(tmp_path / str(level), {"w/zarr.json": description, "w/c/0": packed(array.tobytes(), level)})
        assert np.array_equal(array_in(place, "u1"), array)


# What is said of those whose other numbers would be refused elsewhere too.
SAID = {
    "array_pieces": "is divided into 1000000000000 chunks",
    "array_shard_index": "a chunk of 24 bytes at byte 40 does not fit into its 84 bytes",
    "array_inflated": "it inflates to more than the 48 bytes",
    "array_both": "described twice",
    "array_filters": "is packed by 'delta', which is not supported",
    "array_blosc": "is packed by 'blosc', which is not supported",
    "array_gzip": "is packed by 'gzip', which is not supported",
    "array_zlib": "is packed by 'zlib', which is not supported",
    "array_blosc3": "is packed by 'blosc', which is not supported",
    "array_uint4": "has elements of 'uint4', which tensors do not support",
    "array_endian": "does not specify its byte order",
    "array_shard_endian": "does not specify its byte order",
    "array_shard_turned": "packed by 'sharding_indexed', but the codec 'bytes' was expected first",
    "array_int4": "has elements of 'int4', which tensors do not support",
}


@every("attack", HOSTILE, [attack.file for attack in HOSTILE])
def test_an_array_that_lies_is_refused(attack: Attack, tmp_path: Path) -> None:
    with pytest.raises(CkptconvError) as error:
        array_in(stored(tmp_path, attack.values))
    assert error.value.exit_code == attack.exit
    assert [text for text in (str(tmp_path), SAID.get(attack.file, "")) if text not in str(error.value)] == []


def test_what_is_said_is_said_of_attacks() -> None:
    assert SAID.keys() <= {attack.file for attack in HOSTILE}


def test_the_names_of_arrays_are_those_with_a_description() -> None:
    class Keys(Directories):
        def listed(self) -> list[str]:
            return ["a/.zarray", "a/0.0", "b/c/zarr.json", ".zarray", "d/x"]

    unread: Callable[..., Any] = Files
    assert [*arrays.described(Keys(unread(Location("/nowhere"))))] == ["a", "b/c", ""]

"""Archives of numpy's arrays, as numpy writes them, and as nobody should."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import VERIFY
from checkpoints import ckptconv_here, done
from effort import every
from format_suite import FormatSuite
from safetensors.torch import load_file

ARRAYS = {f"layer{number}/w": np.full((250, 300), number, np.float32) for number in (1, 2)}


class TestNpz(FormatSuite):
    command, family = "convert", "npz"

    def write(self, place: Path) -> Path:
        np.savez(place / "model.npz", **ARRAYS)
        return place / "model.npz"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        with np.load(checkpoint) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}


def test_every_order_and_dtype_comes_out(tmp_path: Path) -> None:
    kinds = ["?", "b", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", ">i2", ">f4", ">c8"]
    arrays = {kind: np.arange(12).reshape(3, 4).astype(kind) for kind in kinds}
    arrays |= {"fortran": np.asfortranarray(arrays["f4"]), "scalar": np.float32(3), "empty": np.ones((0, 3))}
    np.savez(tmp_path / "x.npz", **arrays)
    done(ckptconv_here("convert", tmp_path / "x.npz", tmp_path / "x.safetensors", "--checksum", *VERIFY))
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        native = torch.from_numpy(np.asarray(array).astype(np.asarray(array).dtype.newbyteorder("=")))
        assert found[name].dtype == native.dtype
        assert torch.equal(found[name], native), name


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", w=np.ones(9000))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[5000] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    run = ckptconv_here("convert", tmp_path / "x.npz", tmp_path / "x.safetensors", "--checksum")
    run.refused(4, "'w' has changed")


def npy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], **changed: str) -> bytes:
    """A member, with other words in its header."""
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=(1, 0))
    data = out.getvalue()
    (length,) = struct.unpack_from("<H", data, 8)
    header = data[10 : 10 + length].decode()
    for old, new in changed.items():
        header = header.replace({"shape": "(2, 3)", "descr": "<f4", "fortran": "'fortran_order'"}[old], new)
    return data[:8] + struct.pack("<H", len(header)) + header.encode() + data[10 + length :]


W = np.arange(6, dtype=np.float32).reshape(2, 3)


def objects() -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.array([{}], dtype=object))
    return out.getvalue()


@every(
    "members, code, words",
    [
        ({"w.npy": npy(W), "data.pkl": b"x"}, 4, "'data.pkl' is not an array"),
        ({"w.npy": objects()}, 5, "Python objects, which tensors do not support."),
        ({"w.npy": npy(np.ones(2, "f4,i4"))}, 5, "an array of records"),
        ({"w.npy": npy(np.array(["a"]))}, 5, "which tensors do not support."),
        ({"w.npy": npy(W, descr="|V2")}, 5, "numpy stores JAX's bfloat16 as V2. Save the array as float32, or use"),
        ({"w.npy": npy(W, descr="|V1")}, 5, "numpy stores JAX's float8 as V1"),
        ({"w.npy": npy(W)[:-1]}, 4, "23 bytes of elements, but its shape needs 24"),
        ({"w.npy": npy(W) + b"x"}, 4, "25 bytes of elements, but its shape needs 24"),
        ({"w.npy": npy(W, shape="(2, 30)")}, 4, "but its shape needs 240"),
        ({"w.npy": npy(W, shape="(2, -3)")}, 5, "its header is"),
        ({"w.npy": npy(W, shape="(6)")}, 4, "has an invalid shape: (6)"),
        ({"w.npy": npy(W, shape="(999999999999, 999999999999)")}, 4, "but its shape needs"),
        ({"w.npy": npy(W, fortran="__import__('os')")}, 5, "its header is"),
        ({"w.npy": b"\x93NUMPY\x01\x00\xff\xff{ }"}, 4, "has a header of 65545 bytes"),
        ({"w.npy": b"\x93NUMPY\x09\x00\x01\x00{"}, 4, "it begins with"),
        ({"w.npy": b""}, 4, "it begins with b''"),
        ({"w.npy": npy(W), "W.npy": npy(W), "./w.npy": npy(W)}, 4, "'w.npy' for other readers"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_tensor_is_refused(members: dict[str, bytes], code: int, words: str, tmp_path: Path) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        for name in ("x.npz", "x.pt"):
            (tmp_path / "x.npz").rename(tmp_path / name) if name != "x.npz" else None
            run = ckptconv_here("convert", tmp_path / name, tmp_path / "x.safetensors")
            run.refused(code, name, words)
        assert not (tmp_path / "x.safetensors").exists()


def two_of_one_name(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w.npy", npy(W))
        archive.writestr("v.npy", npy(W))
    path.write_bytes(path.read_bytes().replace(b"v.npy", b"w.npy"))


def cut(path: Path) -> None:
    np.savez(path, w=W)
    path.write_bytes(path.read_bytes()[:-30])


@every("make, words", [(two_of_one_name, "two members named 'w.npy'"), (cut, "the file was cut short")])
def test_an_archive_that_is_not_sound_is_refused(make: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    make(tmp_path / "x.npz")
    ckptconv_here("convert", tmp_path / "x.npz", tmp_path / "x.safetensors").refused(4, words)

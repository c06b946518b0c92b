"""Files and directories of other programs: each is called what it is, with the program that makes something of it."""

from __future__ import annotations

import os
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from attacks.readers import READERS
from cells import looking, of_features
from checkpoints import ckptconv_here
from effort import every
from features.foreign.cells import APPLE_DOUBLE, FLUTTER
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptconv.errors import UnsupportedError
from ckptconv.features.foreign.known import foreign_file, is_sign
from ckptconv.formats.run_names import POINTERS
from ckptconv.formats.torch.file import read_torch


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(number: int, data: bytes) -> bytes:
    """A field of protocol buffers."""
    return bytes([number << 3 | 2]) + varint(len(data)) + data


NODE = field(1, field(1, b"x") + field(2, b"y") + field(4, b"MatMul"))
TENSOR = b"\x08\x04\x08\xac\x02" + field(2, b"Float32") + field(3, bytes(4800))
# The beginnings of files as the programs write them, and a word of what is said.
FILES: dict[str, tuple[bytes, str]] = {
    "pytorch.onnx": (b"\x08\x0a" + field(2, b"pytorch") + field(3, b"2.13") + field(7, NODE), "onnx.numpy_helper"),
    "plain.onnx": (b"\x08\x0a" + field(7, NODE), "onnx.numpy_helper"),
    "mindspore.ckpt": (field(1, field(1, b"conv1.weight") + field(2, TENSOR)), "ckpt_to_safetensors"),
    "packed.ckpt": (
        field(1, field(1, b"w") + field(2, field(1, b"\4\3") + field(2, b"BFloat16"))),
        "ckpt_to_safetensors",
    ),
    "flax_model.msgpack": (b"\x81\xa6params\x81\xa5dense\x81\xa6kernel\xc7\x10\x01", "flax.serialization"),
    "many.msgpack": (b"\xde\x00\x14\xa2k0\x81\xa1a\xc7\x10\x01", "flax.serialization"),
    "x.tensors": (b"|TZR|\n" + bytes(90), "TensorDeserializer"),
    "x.ptd": (struct.pack("<I", 48) + b"FT01FH01" + bytes(60), ".ptd"),
    "x.pte": (struct.pack("<I", 48) + b"ET12eh00" + bytes(60), ".pte"),
    "x.tflite": (struct.pack("<I", 32) + b"TFL3" + bytes(60), "TensorFlow Lite"),
    "x.gguf": (b"GGUF" + bytes(60), "gguf_file"),
    "x.h5": (b"\x89HDF\r\n\x1a\n" + bytes(60), "Keras"),
    "x.npy": (b"\x93NUMPY" + bytes(60), "numpy.load"),
}
DIRECTORIES = {
    ("0_0.distcp", "0.metadata"): "Paddle",
    ("saved_model.pb",): "SavedModel",
    ("saved_model.cpb", "fingerprint.pb"): "SavedModel",
    ("ckpt-1.index", "ckpt-1.data-00000-of-00001"): "tf.train",
    ("flax_model.msgpack", "config.json"): "flax.serialization",
    ("model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors", "config.json"): "sharded_state",
    ("model-rank-0-part-0.safetensors", "model-rank-0-part-1.safetensors"): "sharded_state",
}


def test_a_file_of_another_program_is_called_what_it_is(tmp_path: Path) -> None:
    for name, (data, word) in FILES.items():
        for path in (tmp_path / name, tmp_path / f"{name}.pt"):
            path.write_bytes(data)
            ckptconv_here("convert", path, tmp_path / "out.safetensors").refused(5, str(path), word)


# First bytes, the exit code, and words of what is said.
BEGINNINGS: dict[str, tuple[bytes, int, list[str]]] = {
    "empty": (b"", 4, ["is empty (0 bytes)"]),
    "zeros": (bytes(100_000), 4, ["zeros"]),
    "a git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", 4, ["git-lfs", "git lfs pull"],
    ),
    "a web page": (b"\n<!DOCTYPE html><html>Sign in</html>", 4, ["web page"]),
    "an error of S3": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', 4, ["XML"]),
    "a TorchScript archive that is no zip archive": (b"PYTORCH1" + bytes(120), 5, ["TorchScript", "torch 1.0"]),
    "gzip": (b"\x1f\x8b\x08" + bytes(50), 5, ["gzip"]),
    "AppleDouble": (APPLE_DOUBLE, 5, ["is an AppleDouble file"]),
    "Flutter": (FLUTTER, 5, ["is a description of a Flutter project"]),
    "exported": (READERS["exported"].make(""), 5, ["is an archive of torch.export"]),
    "package": (READERS["package"].make(""), 5, ["is a torch.package archive"]),
}  # fmt: skip
COMMANDS = {
    "pt2safetensors": "x.safetensors",
    **{command: output for more in of_features("FORMATS") for command, output in more.items()},
}


@every("name", BEGINNINGS)
def test_a_file_is_told_by_its_beginning(name: str, tmp_path: Path) -> None:
    data, code, words = BEGINNINGS[name]
    (tmp_path / "model.pt").write_bytes(data)
    ckptconv_here("pt2safetensors", tmp_path / "model.pt").refused(code, "model.pt", *words)
    for command in looking():
        assert ckptconv_here(command, tmp_path / "model.pt").code == code, command


@every("name", [name for name in POINTERS if not name.endswith(".json")])
def test_a_file_that_says_where_a_step_is_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("20")
    run = ckptconv_here("convert", tmp_path / name, tmp_path / "out")
    run.refused(2, f"{name} contains only the name of the last step", f"Give the directory: {tmp_path}")


def test_every_command_says_what_no_command_reads(tmp_path: Path) -> None:
    for name in ("empty", "a web page", "a git-lfs pointer"):
        data, code, words = BEGINNINGS[name]
        (tmp_path / "model.pt").write_bytes(data)
        for command, output in COMMANDS.items():
            ckptconv_here(command, tmp_path / "model.pt", tmp_path / output).refused(code, "model.pt", *words)
        assert os.listdir(tmp_path) == ["model.pt"]


def test_files_that_need_another_reader(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    np.savez(tmp_path / "arrays.npz", a=np.ones(2))
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        archive.add(tmp_path / "x.safetensors", "pickle")
    reasons = {"x.safetensors": "safetensors file already", "arrays.npz": r"arrays \(.npz\)", "t.tar": "tar archive"}
    for name, reason in reasons.items():
        with pytest.raises(UnsupportedError, match=reason):
            read_torch(str(tmp_path / name))


def test_an_archive_of_another_program_is_called_what_it_is(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", "")
    ckptconv_here("convert", tmp_path / "x.keras", tmp_path / "out.safetensors").refused(5, "x.keras", "get_weights")


def test_a_directory_of_another_program_is_called_what_it_is(tmp_path: Path) -> None:
    for number, (names, word) in enumerate(DIRECTORIES.items()):
        run, steps = tmp_path / f"run{number}", tmp_path / f"steps{number}"
        for asked, directory in (
            (None, tmp_path / f"alone{number}"),
            (run, run / "1"),
            (steps, steps / "1" / "default"),
        ):
            directory.mkdir(parents=True)
            for name in names:
                (directory / name).write_bytes(b"{}")
            run_of = ckptconv_here("convert", asked or directory, tmp_path / "out.safetensors")
            run_of.refused(5, str(directory), word)


@given(st.binary(max_size=520), st.sampled_from(sorted(FILES)))
def test_no_beginning_takes_long_or_fails(noise: bytes, name: str) -> None:
    head = (FILES[name][0][:200] + noise)[:512]
    assert foreign_file(name, head, 1000) is not None
    foreign_file(name, noise[:512], 1000)
    assert is_sign("saved_model.pb")
    is_sign(noise.decode("latin-1"))

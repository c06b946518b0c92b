"""Torch's oldest format, a tar archive: every tensor comes back bit for bit as torch.load has it, or it is refused."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import bits, evaluate, numbers, same
from containers import ContainerSuite, refusal
from effort import TIMES, every
from features.tar.attacks import FILES
from tar_writer import CLASSES, Part, Writer, pack, storages, tensors
from torch import nn

from ckptconv.errors import UnsupportedError
from ckptconv.formats.torch.file import read_torch
from ckptconv.pickles.nodes import Global


def save(value: Any, path: Path, **kwargs: Any) -> Path:
    return pack(Writer(value).members(), path, **kwargs)


class TestTar(ContainerSuite):
    container = "tar archive"
    dtypes = tuple(CLASSES)
    known_from = 512
    many = 1_500 * TIMES  # to write and to read them takes long
    cost = (450, 1100, 700)

    def save(self, value: Any, path: Path, **options: Any) -> Path:
        return save(value, path, **options)


read, check = TestTar().read, TestTar().check


# ---------------------------------------------------------------------------------------------- what torch could save


@every("dtype", CLASSES)
def test_every_dtype_of_the_time(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = numbers(dtype, 3, 5)
    check({"plain": tensor, "row": tensor[1], "column": tensor[:, 2], "scalar": tensor[2, 3]}, tmp_path)


def test_bare_storages_and_parts_of_storages(tmp_path: Path) -> None:
    base = torch.arange(10, dtype=torch.int32)
    path = save({"part": Part(base, 2, 5), "none": Part(base, 10, 0), "tensor": base}, tmp_path / "model.tar")
    ours, theirs = read(path).value, torch.load(path, weights_only=False)
    for name in ("part", "none"):
        assert evaluate(ours[name]) == bytes(theirs[name]._untyped_storage)
    same(ours["tensor"], theirs["tensor"])


@every("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_every_form_of_tar(form: int, tmp_path: Path) -> None:
    check([torch.randn(3)], tmp_path, form=form)


class Model(nn.Module):
    pass


def test_classes_stand_beside_their_source(tmp_path: Path) -> None:
    path = save({"class": Model, "weight": torch.ones(2)}, tmp_path / "model.tar")
    assert read(path).value["class"] == Global(Model.__module__, "Model")


def test_a_storage_larger_than_eight_gigabytes(tmp_path: Path) -> None:
    """A sparse file. The size of its member takes an extended header, or is written in bits."""
    size = 9 << 30
    members = Writer([torch.zeros(7, dtype=torch.uint8), torch.arange(3)]).members()
    count = struct.pack("<q", 7)
    at = members["storages"].index(count + bytes(7)) + 8
    head, rest = members["storages"][: at - 8] + struct.pack("<q", size), members["storages"][at + 7 :]
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = tmp_path / "large.tar"
        info = tarfile.TarInfo("storages")
        info.size = len(head) + size + len(rest)
        with path.open("wb") as out:
            out.write(info.tobuf(form) + head)
            out.seek(size, io.SEEK_CUR)
            out.write(rest + bytes(-info.size % 512))
            buffer = pack({name: members[name] for name in ("tensors", "pickle")}, tmp_path / "rest.tar")
            out.write(buffer.read_bytes())
        small = read(path).value[1]
        assert evaluate(small) == bits(torch.arange(3))


# ------------------------------------------------------------------------------------------------- hostile and broken


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tree = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3, dtype=torch.int64)}
    return save(tree, tmp_path_factory.mktemp("sound") / "m.tar").read_bytes()


def test_what_follows_the_end_is_not_passed_over(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "long.tar"
    path.write_bytes(sound + sound)
    assert "data follows its end" in refusal(path)
    path.write_bytes(sound + bytes(5000))
    assert refusal(path) == ""


FLOATS = struct.pack("<6f", *range(6))


class Pid:
    """Stands for a persistent id."""

    def __init__(self, pid: Any) -> None:
        self.pid = pid


class PidPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Pid) else None


def pickled(pid: Any) -> bytes:
    out = io.BytesIO()
    PidPickler(out, 2).dump([Pid(pid)])
    return out.getvalue()


SIX = ((1, "cpu", torch.FloatStorage), 6, FLOATS)
ONE = ((2, 1, torch.FloatTensor), 1, (6, 1, 0))
GOOD = {"storages": storages(SIX), "tensors": tensors(ONE), "pickle": pickled(2)}

CONTRADICTIONS: dict[str, tuple[dict[str, bytes], str]] = {
    "fewer elements": ({"storages": storages(((1, "cpu", torch.FloatStorage), 5, FLOATS))}, "storage views"),
    "more elements": ({"storages": storages(((1, "cpu", torch.FloatStorage), 99, FLOATS))}, "cut short"),
    "negative elements": ({"storages": storages(((1, "cpu", torch.FloatStorage), -1, FLOATS))}, "-1 elements"),
    "huge elements": ({"storages": storages(((1, "cpu", torch.FloatStorage), 1 << 62, FLOATS))}, "cut short"),
    "an unknown class": ({"storages": storages(((1, "cpu", OrderedDict), 6, FLOATS))}, "unknown class"),
    "no class": ({"storages": storages(((1, "cpu", None), 6, FLOATS))}, "unknown class"),
    "a key of another type": ({"storages": storages((("1", "cpu", torch.FloatStorage), 6, FLOATS))}, "a storage by"),
    "a storage twice": ({"storages": storages(SIX, SIX)}, "two entries with the key 1"),
    "too many storages": ({"storages": storages(SIX, count=2)}, "a storage by"),
    "too few storages": ({"storages": storages(SIX, SIX, count=1)}, "storage views"),
    "an invalid number": ({"storages": storages(SIX, count="1")}, "for the number of storages"),
    "a huge number": ({"storages": storages(SIX, count=1 << 40)}, "a storage"),
    "views that are none": ({"storages": storages(SIX, views={})}, "no list of storage views"),
    "views of three": ({"storages": storages(SIX, views=((3, 1, 0),))}, "not four integers"),
    "a view of nothing": ({"storages": storages(SIX, views=((3, 9, 0, 1),))}, "storage 9, which does not exist"),
    "a view beyond": ({"storages": storages(SIX, views=((3, 1, 5, 2),))}, "2 elements from element 5 on"),
    "a view before": ({"storages": storages(SIX, views=((3, 1, -1, 2),))}, "2 elements from element -1 on"),
    "a view twice": ({"storages": storages(SIX, views=((1, 1, 0, 2),))}, "two entries with the key 1"),
    "something behind the storages": ({"storages": storages(SIX) + b"\0"}, "data of its member storages ends at byte"),
    "something behind the tensors": ({"tensors": tensors(ONE) + b"\0"}, "the data of its member tensors ends at byte"),
    "something behind the object": ({"pickle": pickled(2) + b"\0"}, "the data of its member pickle ends at byte"),
    "a tensor of nothing": ({"tensors": tensors(((2, 9, None), 1, (6, 1, 0)))}, "tensor 2 of storage 9"),
    "a tensor beyond": ({"tensors": tensors(((2, 1, None), 1, (7, 1, 0)))}, "extends beyond the 24 bytes"),
    "a tensor before": ({"tensors": tensors(((2, 1, None), 1, (6, 1, -1)))}, "offset is not a non-negative integer"),
    "negative sizes": ({"tensors": tensors(((2, 1, None), 1, (-6, 1, 0)))}, "not consist of non-negative integers"),
    "negative dimensions": ({"tensors": tensors(((2, 1, None), -1, (0,)))}, "-1 dimensions"),
    "endless dimensions": ({"tensors": tensors(((2, 1, None), 1 << 30, (0,)))}, f"{1 << 30} dimensions"),
    "missing dimensions": ({"tensors": tensors(((2, 1, None), 60, (0,)))}, "cut short"),
    "an unknown key": ({"pickle": pickled(3)}, "refers to 3, which is neither"),
    "an invalid key": ({"pickle": pickled((1, 2))}, "which is neither"),
    "a long key": ({"pickle": pickled("9" * 5000)}, "which is neither"),
}  # fmt: skip


def test_the_files_made_here_are_what_torch_reads(tmp_path: Path) -> None:
    path = pack(GOOD, tmp_path / "made.tar")
    same(read(path).value, torch.load(path, weights_only=False))


@every("changes, reason", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_every_contradiction_is_found(changes: dict[str, bytes], reason: str, tmp_path: Path) -> None:
    refused = refusal(pack(GOOD | changes, tmp_path / "model.tar"))
    assert reason in refused
    assert "model.tar" in refused


def test_other_tar_archives_are_called_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"a tar archive, but torch\.save did not write it: it contains a\.txt, b.* tar://NAME::"
    ):
        read_torch(str(pack({"a.txt": b"", "b": b"x"}, tmp_path / "other.tar")))
    with pytest.raises(UnsupportedError, match=r"it contains x{29}…x{30}\."):
        read_torch(str(pack({"x" * 70: b""}, tmp_path / "long.tar")))
    content = pack({"pickle": b""}, tmp_path / "one.tar").read_bytes().rstrip(b"\0")
    one = content + bytes(-len(content) % 512)
    (tmp_path / "twice.tar").write_bytes(one + one + bytes(1024))
    assert "two members named 'pickle'" in refusal(tmp_path / "twice.tar")
    (tmp_path / "endless.tar").write_bytes(
        b"".join(tarfile.TarInfo(f"f{number}").tobuf() for number in range(200)) + bytes(1024)
    )
    assert "it contains f0, f1, f2, f3, f4." in refusal(tmp_path / "endless.tar")


def test_it_is_said_what_is_read_in_two_ways(tmp_path: Path) -> None:
    cases = {case.file: case for case in FILES}
    for name, reason in {
        "two_tar_more.pt": "it contains 'readme.txt'",
        "two_tar_sparse.pt": "is not a plain file, but of type b'S'",
        "two_tar_and_pickle.pt": "begins both as a tar archive and as a pickle",
    }.items():
        path = tmp_path / name
        path.write_bytes(cases[name].make(""))
        assert reason in refusal(path), name

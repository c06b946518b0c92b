"""Torch's stream format: every tensor comes back bit for bit as torch.load has it, and no file does harm."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import SAVABLE, bits, evaluate, numbers, same
from containers import ContainerSuite, refusal
from effort import every
from features.torch_stream.attacks import FILES
from torch import nn

from ckptconv.errors import CorruptError, LimitError, UnsupportedError
from ckptconv.features.consecutive import pickles
from ckptconv.features.torch_stream.read import coalesced
from ckptconv.formats.torch.file import read_torch
from ckptconv.pickles.nodes import Global
from ckptconv.storage.reading import DESCRIPTIONS, MAX_GAP_LOCAL, MAX_GAP_REMOTE
from ckptconv.tensors.moves import File

MACHINE = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def save(value: Any, path: Path, **kwargs: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, path, _use_new_zipfile_serialization=False, **kwargs)
    return path


class TestStream(ContainerSuite):
    container = "stream"

    def save(self, value: Any, path: Path, **options: Any) -> Path:
        return save(value, path, **options)


read, check = TestStream().read, TestStream().check


# ------------------------------------------------------------------------------------------- whatever torch can save


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@every("dtype", SAVABLE)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = numbers(dtype, 3, 5)
    tree = {"plain": tensor, "row": tensor[1], "column": tensor[:, 2], "scalar": tensor[2, 3], "none": tensor[:0]}
    path = save(tree, tmp_path / "model.pt")
    try:
        theirs = torch.load(path)
    except AttributeError:
        # torch writes storages without a dtype, and cannot read them in this format.
        theirs = tree
    same(read(path).value, theirs)


@every("protocol", [1, 2, 3, 4, 5])
def test_pickle_protocols(protocol: int, tmp_path: Path) -> None:
    check(OrderedDict(w=torch.randn(3, 4), b=[torch.ones(2), {"x": (1, 2)}]), tmp_path, pickle_protocol=protocol)


class Layer(nn.Module):
    """Its source is saved with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)


def test_whole_modules_are_kept_as_data_with_their_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(Layer(), Layer())
    path = save(model, tmp_path / "model.pt")
    assert b"Its source is saved with it." in path.read_bytes()
    file = read(path)
    assert Global(Layer.__module__, "Layer") in file.opaque
    modules = file.value.state[0]["_modules"]["1"].state[0]["_modules"]
    assert evaluate(modules["inner"].state[0]["_parameters"]["weight"]) == bits(model[1].inner.weight)


# ------------------------------------------------------------------------------------------------ files made by hand


class Storage:
    """Stands for a persistent id."""

    def __init__(self, *pid: Any) -> None:
        self.pid = ("storage", *pid)


class Tensor:
    """A tensor of a storage as torch pickles it: offset, size and stride in elements."""

    def __init__(self, storage: Storage, offset: int, size: Sequence[int], stride: Sequence[int]) -> None:
        self.arguments = (storage, offset, tuple(size), tuple(stride), False, OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Storage) else None


def dumped(value: Any, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(value)
    return file.getvalue()


def stream(value: Any, storages: dict[Any, tuple[int, bytes]], *, keys: Any = None, **head: Any) -> bytes:
    """A file of `value` and of storages by key: their counts of elements, and their bytes."""
    parts = [
        dumped(head.get("magic", 0x1950A86A20F9469CFC6C)),
        dumped(head.get("version", 1001)),
        dumped(head.get("machine", MACHINE)),
        dumped(value),
        dumped(sorted(storages) if keys is None else keys),
        *(struct.pack(head.get("count", "<q"), count) + data for count, data in storages.values()),
    ]
    return b"".join(parts)


FLOATS = struct.pack("<6f", *range(6))


def six(key: Any = "7", view: Any = None, cls: type = torch.FloatStorage) -> Storage:
    """A storage of the six floats, or a view of it."""
    return Storage(cls, key, "cpu", 6, view)


def test_what_is_made_by_hand_is_what_torch_reads(tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    path.write_bytes(stream({"w": Tensor(six(), 1, (2, 2), (2, 1))}, {"7": (6, FLOATS)}))
    same(read(path).value, torch.load(path))


def test_views_of_storages(tmp_path: Path) -> None:
    """Releases before 0.4 saved a storage that is a part of another as a view of it."""
    path = tmp_path / "views.pt"
    tree = {
        "whole": Tensor(six(), 0, (6,), (1,)),
        "part": Tensor(six(view=("8", 2, 3)), 1, (2,), (1,)),
        "same part": Tensor(six(view=("8", 2, 3)), 0, (3,), (1,)),
        "nothing": Tensor(six(view=("9", 6, 0)), 0, (0,), (1,)),
    }
    path.write_bytes(stream(tree, {"7": (6, FLOATS)}))
    file = read(path)
    same(file.value, torch.load(path))
    assert file.value["part"].facts.storage == file.value["same part"].facts.storage
    assert len({leaf.facts.storage for leaf in file.value.values()}) == 3
    assert {record.crc for record in file.records} == {None}


@every(
    "view",
    [("8", 2, 5), ("8", -1, 2), ("8", 2, -1), ("8", 0, 7), ("8", True, 1), ("8", 0), (None, 0, 1), "8", ("8", 0, 1.0),
     ("8", 1 << 62, 1), (("8",), 0, 1)],
)  # fmt: skip
def test_a_view_must_lie_inside_its_storage(view: Any, tmp_path: Path) -> None:
    path = tmp_path / "view.pt"
    path.write_bytes(stream([Tensor(six(view=view), 0, (1,), (1,))], {"7": (6, FLOATS)}))
    assert "view" in refusal(path)


def test_two_views_of_one_name_must_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "view.pt"
    tree = [Tensor(six(view=("8", at, 2)), 0, (2,), (1,)) for at in (0, 1)]
    path.write_bytes(stream(tree, {"7": (6, FLOATS)}))
    assert "two different storage views with the key '8'" in refusal(path)


@every("count", ["<q", ">q"])
def test_a_big_endian_machine_wrote_little_endian_elements(count: str, tmp_path: Path) -> None:
    """torch swaps the elements when it writes, and old releases not their number."""
    path = tmp_path / "big.pt"
    machine = {**MACHINE, "little_endian": False}
    path.write_bytes(stream([Tensor(six(), 0, (6,), (1,))], {"7": (6, FLOATS)}, machine=machine, count=count))
    assert evaluate(read(path).value[0]) == FLOATS
    if count == "<q":
        same(read(path).value, torch.load(path))


def test_a_big_endian_machine_counts_as_others_do(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    content = stream([Tensor(six(), 0, (6,), (1,))], {"7": (5, FLOATS)}, machine={**MACHINE, "little_endian": False})
    path.write_bytes(content)
    assert "should have 6 elements of float32, but the file records 5" in refusal(path)


def test_complex_numbers_of_a_big_endian_machine_are_refused(tmp_path: Path) -> None:
    """torch swapped them as if they were one number of 8 bytes; later releases may not."""
    path = tmp_path / "big.pt"
    storage = Storage(torch.ComplexFloatStorage, "7", "cpu", 3, None)
    content = {"7": (3, FLOATS)}
    path.write_bytes(stream([Tensor(storage, 0, (3,), (1,))], content, machine={**MACHINE, "little_endian": False}))
    with pytest.raises(UnsupportedError, match="complex numbers from a big-endian machine"):
        read(path)
    path.write_bytes(stream([Tensor(storage, 0, (3,), (1,))], content))
    same(read(path).value, torch.load(path))


def test_keys_of_the_oldest_files_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(stream([Tensor(six(7), 0, (6,), (1,))], {7: (6, FLOATS)}))
    same(read(path).value, torch.load(path))


# ---------------------------------------------------------------------------------------------------- time and memory


def test_a_file_larger_than_four_gigabytes(tmp_path: Path) -> None:
    """A sparse file: a storage of 5 GB of zeros, another after it."""
    path, size = tmp_path / "large.pt", 5 << 30
    large = Tensor(Storage(torch.ByteStorage, "1", "cpu", size, None), 0, (size,), (1,))
    head = stream({"large": large, "small": Tensor(six("2"), 0, (6,), (1,))}, {}, keys=["1", "2"])
    with path.open("wb") as out:
        out.write(head + struct.pack("<q", size))
        out.seek(size, os.SEEK_CUR)
        out.write(struct.pack("<q", 6) + FLOATS)
    file = read(path)
    assert file.bytes_read < 100_000
    assert file.value["large"].nbytes == size
    assert evaluate(file.value["small"]) == FLOATS


# ------------------------------------------------------------------------------------------------- hostile and broken


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tree = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3, dtype=torch.int64)}
    return save(tree, tmp_path_factory.mktemp("sound") / "m.pt").read_bytes()


def test_what_follows_the_last_storage_is_not_passed_over(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "long.pt"
    path.write_bytes(sound + b"\0")
    with pytest.raises(CorruptError, match=f"ends at byte {len(sound)} of {len(sound) + 1}"):
        read_torch(str(path))
    path.write_bytes(sound + sound)
    assert torch.load(path)["w"].shape == (4, 6)
    with pytest.raises(UnsupportedError, match=f"another object follows.*head -c {len(sound)}"):
        read_torch(str(path))


ONE = Tensor(six(), 0, (6,), (1,))
DOUBLE = Tensor(six(cls=torch.DoubleStorage), 0, (6,), (1,))
CONTRADICTIONS = {
    "another version": (stream(ONE, {"7": (6, FLOATS)}, version=1002), "version 1002"),
    "facts that are none": (stream(ONE, {"7": (6, FLOATS)}, machine=[1]), "machine description is of type list"),
    "a missing storage": (stream([ONE], {}), "lacks 1 storage that its object needs, such as '7'"),
    "an unknown storage": (
        stream([ONE], {"7": (6, FLOATS), "8": (6, FLOATS)}),
        "has 1 storage that its object does not use, such as '8'",
    ),
    "a storage twice": (stream([ONE], {"7": (6, FLOATS)}, keys=["7", "7"]), "lists a storage twice"),
    "keys that are none": (stream([ONE], {"7": (6, FLOATS)}, keys={"7": 1}), "not followed by a list of the keys"),
    "keys of no type": (stream([ONE], {"7": (6, FLOATS)}, keys=[None]), "not followed by a list of the keys"),
    "fewer elements": (stream([ONE], {"7": (5, FLOATS)}), "should have 6 elements of float32, but the file records 5"),
    "more elements": (stream([ONE], {"7": (7, FLOATS)}), "but the file records 7"),
    "huge elements": (stream([ONE], {"7": (1 << 62, FLOATS)}), f"but the file records {1 << 62}"),
    "negative elements": (stream([ONE], {"7": (-6, FLOATS)}), "but the file records -6"),
    "too few bytes": (stream([ONE], {"7": (6, FLOATS[:-1])}), "cut short"),
    "two types": (stream([ONE, DOUBLE], {"7": (6, FLOATS * 2)}), "as 6 elements of float32 and as 6 of float64"),
    "beyond its storage": (stream([Tensor(six(), 1, (6,), (1,))], {"7": (6, FLOATS)}), "extends beyond the 24 bytes"),
    "a huge storage": (
        stream([Tensor(Storage(torch.FloatStorage, "7", "cpu", 1 << 60, None), 0, (1,), (1,))], {"7": (1 << 60, b"")}),
        "cut short",
    ),
    "an endless storage": (
        stream([Tensor(Storage(torch.FloatStorage, "7", "cpu", 1 << 80, None), 0, (1,), (1,))], {"7": (6, b"")}),
        f"has a storage with the invalid size of {1 << 80} elements",
    ),
    "a magic number inside": (stream(ONE, {"7": (6, FLOATS)}, magic=[0x1950A86A20F9469CFC6C]), "a plain pickle"),
}  # fmt: skip


@every("content, reason", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_every_contradiction_is_found(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert reason in refusal(path)


@every("pid", [("module", 1, None, None), ("module",), ("modul", 1), "7", ("storage",)])
def test_persistent_ids_may_be_anything(pid: Any, tmp_path: Path) -> None:
    path, storage_like = tmp_path / "pid.pt", six()
    storage_like.pid = pid
    path.write_bytes(stream([storage_like], {}))
    assert "persistent id" in refusal(path)


def test_a_pickle_that_never_ends_is_not_read_forever(
    sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "endless.pt"
    # A text of 2 GiB begins where the object should.
    head = stream(None, {})
    at = head.index(dumped(None) + dumped([]))
    with path.open("wb") as out:
        out.write(head[:at] + b"\x80\x02X\xff\xff\xff\x7f")
        out.truncate(4 << 30)
    monkeypatch.setattr(pickles, "MAX_PICKLE", 1 << 20)
    with pytest.raises(LimitError, match="the object has more than 1048576 bytes"):
        read_torch(str(path))


def test_it_is_said_what_is_read_in_two_ways(tmp_path: Path) -> None:
    path, cases = tmp_path / "model.pt", {case.file: case for case in FILES}
    for file, reason in {
        "two_stream_and_zip.pt": "begins as a stream, but ends as a zip archive",
        "two_stream_view_is_root.pt": "a view of a storage with the same key as a storage, '1'",
    }.items():
        path.write_bytes(cases[file].make(""))
        assert reason in refusal(path)


@pytest.mark.parametrize(("path", "gap"), [("model.pt", MAX_GAP_LOCAL), ("s3://models/model.pt", MAX_GAP_REMOTE)])
def test_descriptions_are_read_together_while_what_lies_between_costs_less_than_a_read(path: str, gap: int) -> None:
    near, far = 30 + gap, 31 + gap
    assert [*coalesced([0, near, near + far], 30, File(path, 1 << 30))] == [[0, near], [near + far]]
    at_once = DESCRIPTIONS // 512
    groups = [*coalesced(range(0, 3 * DESCRIPTIONS, 512), 512, File(path, 1 << 30))]
    assert [len(group) for group in groups] == [at_once] * 3

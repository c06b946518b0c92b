"""A checkpoint of many small tensors: what is done for all of them at once comes out as if done for each alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import ckptconv
from effort import TIMES

from ckptconv import convert
from ckptconv.engine.reader import TensorReader
from ckptconv.errors import CorruptError
from ckptconv.formats.detect import open_source
from ckptconv.outputs.selection import converted
from ckptconv.storage.files import Readers
from ckptconv.tensors.dtypes import DTYPES as DTYPES_BY_NAME
from ckptconv.tensors.lazy import Stored
from ckptconv.tensors.moves import File

COUNT = 1000
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float16, torch.float64, torch.int64, torch.bool)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file, and what is in it: of many dtypes and sizes, every tenth a view, every hundredth transposed."""
    dice, generator = random.Random(5), torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(COUNT):
        shape = [dice.choice((1, 2, 3, 16, 31)) for _ in range(dice.randrange(4))]
        tensor = (torch.randn(shape, generator=generator) * 1e5).to(dice.choice(DTYPES))
        if number % 10 == 0 and tensor.dim():
            tensor = tensor.repeat(3, *[1] * (tensor.dim() - 1))[1:]
        if number % 100 == 1 and tensor.dim() > 1:
            tensor = tensor.transpose(0, 1)
        tensors[f"block.{number // 7}.part.{number % 7}"] = tensor
    tensors["large"] = torch.randn(300_000, generator=generator)
    path = tmp_path_factory.mktemp("many") / "many.pt"
    torch.save(tensors, path)
    return path, tensors


@pytest.mark.parametrize("memory", [64 << 10, 8 << 20])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16", "float16", "float32"])
def test_each_is_what_torch_makes_of_it(dtype: str, memory: int, state: Any, tmp_path: Path) -> None:
    path, tensors = state
    report = convert(str(path), str(tmp_path / "out.safetensors"), dtype=dtype, memory=memory)
    made = safetensors.torch.load_file(tmp_path / "out.safetensors")
    target = None if dtype == "keep" else getattr(torch, dtype)
    infinite: Counter[str] = Counter()
    assert made.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.to(target) if target and tensor.is_floating_point() else tensor
        assert torch.equal(made[name], expected), name
        if tensor.is_floating_point():
            infinite[name] = int((expected.isinf() & tensor.isfinite()).sum())
    warnings = [warning for warning in report.warnings if "became infinite" in warning]
    if dtype != "float16":
        assert not warnings
        return
    (warning,) = warnings
    total, names = sum(infinite.values()), +infinite
    first, second, third = sorted(names, key=lambda name: (-names[name], name))[:3]
    assert warning == (
        f"{total:,} values were too large for float16 and became infinite, in '{first}', '{second}', '{third}' and "
        f"{len(names) - 3} more."
    )


def test_any_bytes_of_a_converted_tensor_can_be_asked_for(tmp_path: Path) -> None:
    values = torch.randn(9)
    (tmp_path / "values").write_bytes(values.numpy().tobytes())
    stored = Stored(File(str(tmp_path / "values"), 36), 0, DTYPES_BY_NAME["float32"], (9,), (1,))
    tensor = converted("values", stored, "bfloat16")
    whole = values.bfloat16().view(torch.uint8).numpy().tobytes()
    with Readers() as readers:
        reader = TensorReader(tensor, readers)
        for start in range(19):
            for stop in range(start, 19):
                assert bytes(reader.read(start, stop)) == whole[start:stop]


@pytest.mark.parametrize("memory", [64 << 10, 8 << 20])
def test_every_storage_is_checked_once(memory: int, state: Any, tmp_path: Path) -> None:
    path, tensors = state
    report = convert(str(path), str(tmp_path / "out.safetensors"), checksum=True, memory=memory)
    assert report.checksums == len(tensors)
    # What the views leave out of their storages is read for the checksum alone.
    left_out = sum(t.untyped_storage().nbytes() - t.nbytes for t in tensors.values())
    assert 0 < left_out <= report.extra_bytes < left_out + sum(t.nbytes for t in tensors.values() if t.dim() > 1)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=["as they are", "converted"])
def test_a_flipped_bit_in_any_is_found(options: Any, state: Any, tmp_path: Path) -> None:
    path, _ = state
    records = [record for record in open_source(path).files.records[str(path)] if record.size]
    for number in (0, len(records) // 2, len(records) - 1):
        data = bytearray(path.read_bytes())
        data[records[number].offset + records[number].size - 1] ^= 4
        damaged = tmp_path / "damaged.pt"
        damaged.write_bytes(data)
        with pytest.raises(CorruptError, match="has changed since it was written"):
            convert(str(damaged), str(tmp_path / "out.safetensors"), checksum=True, **options)
        assert not (tmp_path / "out.safetensors").exists()


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[int]]:
    """What conversions of few and of `VERY_MANY` tensors take of memory at most."""
    place = tmp_path_factory.mktemp("very_many")
    for count in (VERY_MANY, FEW):
        tensors = {f"layer.{n // 10}.{n % 10}.weight": torch.full((256,), float(n)) for n in range(count)}
        torch.save(tensors, place / f"{count}.pt")

    def peaks(*options: str) -> list[int]:
        taken = []
        for count in (VERY_MANY, FEW):
            command = ("pt2safetensors", place / f"{count}.pt", place / "m.safetensors")
            report = ckptconv(*command, "--json", "--no-progress", *options).json
            assert report["tensors"] == count
            taken.append(report["peak_rss_bytes"])
        return taken

    return peaks


VERY_MANY, FEW = 14_000 * TIMES, 2_000


@pytest.mark.parametrize("option", [[], ["--dtype", "bfloat16"], ["--checksum"]], ids=" ".join)
def test_each_takes_a_kibibyte_of_memory_at_most(option: list[str], peaks: Callable[..., list[int]]) -> None:
    most, least = peaks(*option)
    assert most <= 64 << 20
    assert most - least <= 1024 * (VERY_MANY - FEW)

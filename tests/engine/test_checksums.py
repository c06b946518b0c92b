"""--checksum: what a bit that has flipped since a checkpoint was written comes to."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, ckptconv_here, load_with_aliases
from effort import TIMES, examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.conversion import convert
from ckptconv.engine.checksums import Checksums
from ckptconv.errors import CkptconvError
from ckptconv.tensors.moves import File, Runs


def checkpoint() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    flat = torch.randn(200_000, generator=made)
    return {
        "whole": torch.randn(700, 500, generator=made),
        "transposed": torch.randn(300, 200, generator=made).t(),
        "small": torch.arange(100),
        "part": flat[1000:50_000],
        "same part": flat[1000:50_000],
        "overlapping": flat[1500:3000],
        "columns": flat[100_000:150_000].view(100, 500)[:, 3:450],
        "expanded": torch.arange(3.0).expand(4, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
    }


def saved(path: Path, tree: Any) -> Path:
    torch.save(tree, path)
    return path


def place_of(archive: Path, tensor: torch.Tensor) -> tuple[int, int]:
    """From where to where the storage of a tensor lies in its file."""
    data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
    start = archive.read_bytes().index(data)
    return start, start + len(data)


def flipped(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_is_found_and_the_tensor_named(tmp_path: Path) -> None:
    tree = checkpoint()
    path = saved(tmp_path / "model.pt", tree)
    whole = path.read_bytes()
    for name in tree:
        start, stop = place_of(path, tree[name])
        for at in {start, (start + stop) // 2, stop - 1} if stop > start else ():
            flipped(path, at)
            assert at > start or ckptconv_here("pt2safetensors", path, "--dry-run").code == 0
            run = ckptconv_here("pt2safetensors", path, "--checksum")
            assert run.code == 4, name
            assert str(path) in run.err
            assert "has changed since it was written" in run.err
            # Tensors that share a storage cannot be told apart.
            assert repr(name) in run.err or name in ("columns", "overlapping", "same part")
            assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]
            path.write_bytes(whole)


def test_whole_storages_cost_no_further_read(tmp_path: Path) -> None:
    tree = {"a": torch.randn(3_000_000), "b": torch.randn(7), "c": torch.randn(1_500_001)}
    path = saved(tmp_path / "model.pt", tree)
    for options in (["--jobs", "1"], ["--jobs", "4"], ["--memory", "256KiB"], ["--dtype", "float16"]):
        without = ckptconv_here("pt2safetensors", path, "--json", *options).json
        report = ckptconv_here("pt2safetensors", path, "--json", "--checksum", *options).json
        assert (report["checksums"], report["extra_bytes"]) == (3, 0)
        assert report["bytes_read"] == without["bytes_read"]


def test_storages_used_in_part_are_read_whole_and_the_report_says_so(tmp_path: Path) -> None:
    flat = torch.randn(500_000)
    path = saved(tmp_path / "model.pt", {"a": flat[1000:2000], "b": flat[400_000:]})
    run = ckptconv_here("pt2safetensors", path, "--json", "--checksum")
    assert run.json["extra_bytes"] == (1000 + 398_000) * 4
    assert "; checking read another 1.60 MB" in ckptconv_here("pt2safetensors", path, "--checksum").out


def test_what_is_not_used_is_not_read(tmp_path: Path) -> None:
    tree = {"wanted": torch.randn(1000), "other": torch.randn(1000)}
    path = saved(tmp_path / "model.pt", tree)
    flipped(path, place_of(path, tree["other"])[0])
    assert ckptconv_here("pt2safetensors", path, "--checksum", "--include", "wanted").code == 0
    assert ckptconv_here("pt2safetensors", path, "--checksum").code == 4


def test_an_archive_without_checksums_is_converted_with_a_warning(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "model.pt", checkpoint())
    finally:
        torch.serialization.set_crc32_options(True)
    run = ckptconv_here("pt2safetensors", path, "--checksum")
    assert run.code == 0
    assert f"warning: {path} cannot be checked: the input records no checksums" in run.err
    assert_same(load_with_aliases(tmp_path / "model.safetensors"), checkpoint())


def trees() -> dict[str, dict[str, torch.Tensor]]:
    """Every way in which a tensor lies in its storage."""
    made = torch.Generator().manual_seed(1)
    flat, table = torch.randn(2000, generator=made), torch.randn(20, 20, generator=made)
    return {
        "contiguous": {"weights": torch.randn(40, 30, generator=made), "count": torch.tensor(7)},
        "strided": {"turned": torch.randn(30, 20, generator=made).t(), "columns": flat.view(40, 50)[:, 3:40]},
        "views of one storage": {"one": flat[100:900], "other": flat[500:1500].view(10, 100), "some": flat[::3]},
        "tied": {"embedding": table, "head": table},
        "a part": {"part": flat[1000:1010]},
        "of two bytes": {
            "half": torch.randn(50, generator=made).half(),
            "b": torch.randn(60, generator=made).bfloat16(),
        },
    }


def code_of(source: Path, output: Path, **options: Any) -> int:
    """How a conversion ends that checks the checksums."""
    try:
        convert(source, output, fsync=False, checksum=True, **options)
    except CkptconvError as error:
        return error.exit_code
    return 0


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("kind", trees())
def test_random_flips_are_refused_or_do_no_harm(kind: str, dtype: str, tmp_path: Path) -> None:
    """Anywhere in the file: in weights, the pickle, the directory, local headers, padding."""
    path, output = saved(tmp_path / "model.pt", trees()[kind]), tmp_path / "out.safetensors"
    whole = path.read_bytes()
    convert(path, output, dtype=dtype, fsync=False)
    expected = load_with_aliases(output)
    output.unlink()
    chance = random.Random(0)
    refused = 0
    for _ in range(15 * TIMES):
        path.write_bytes(whole)
        flipped(path, chance.randrange(len(whole)), chance.randrange(8))
        code = code_of(path, output, dtype=dtype)
        if code:
            refused += 1
            assert code in (3, 4, 5)
            assert not output.exists()
        else:
            assert_same(load_with_aliases(output), expected)
            output.unlink()
    assert refused > 3


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 60)), max_size=12),
    st.binary(min_size=100, max_size=100),
    st.one_of(st.none(), st.integers(0, 799)),
)
@examples(50)
def test_any_pieces_in_any_order(pieces: list[tuple[int, int]], data: bytes, flip: int | None) -> None:
    """Pieces may overlap, repeat and leave gaps: in the end every byte was digested, and none twice."""
    import tempfile
    import zlib
    from array import array

    from ckptconv.errors import CorruptError
    from ckptconv.storage.files import Readers
    from ckptconv.storage.records import Records

    crc = zlib.crc32(data)
    held = bytearray(data)
    if flip is not None:
        held[flip // 8] ^= 1 << flip % 8
    with tempfile.NamedTemporaryFile() as opened, Readers() as readers:
        opened.write(b"before" + held)
        opened.flush()
        file = File(opened.name, 106)
        checksums = Checksums({opened.name: Records(array("Q", [6]), array("Q", [100]), array("I", [crc]))})
        for start, length in pieces:
            part = memoryview(bytes(held))[start : start + length]
            checksums.seen(file, Runs(6 + start, len(part)), part)
        if flip is None or not pieces:
            checksums.check(readers, [])
        else:
            with pytest.raises(CorruptError, match="has changed since it was written"):
                checksums.check(readers, [])


def test_a_byte_order_whose_name_was_damaged_is_not_overlooked(tmp_path: Path) -> None:
    """Without it the numbers would be read the wrong way round."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.arange(10)}, path)
    data = path.read_bytes()
    at = data.rindex(b"byteorder")
    path.write_bytes(data[:at] + b"cyteorder" + data[at + 9 :])
    run = ckptconv_here("pt2safetensors", path)
    assert run.code == 4
    assert "is not the member" in run.err

"""The files of a conversion without the conversion: bytes at any range, and a file system of fsspec."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from cells import of_features
from checkpoints import ZERO, contents
from hypothesis import given
from hypothesis import strategies as st
from remote import a_model
from safetensors import safe_open
from safetensors.torch import load, save_file
from stores import FAR

import ckptconv
from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.virtual_files.files import VirtualFiles
from ckptconv.features.virtual_files.filesystem import VirtualFileSystem
from ckptconv.formats.registered import DESCRIBING
from ckptconv.outputs.kinds import CHECKPOINTS
from ckptconv.storage.files import DescriptorReader

SHARDED = {"max_shard_size": 5_000_000}
# What is offered: a checkpoint, or a file that describes it, whose name ends so.
WAYS = ("", *DESCRIBING)
# What is converted, with which options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": ("zero3", {}),
    "zero3 in bfloat16": ("zero3", {"dtype": "bf16"}),
    "zero1 of bfloat16": ("zero1", {}),
    **{name: (name, {}) for more in of_features("SERVED") for name in more},
    "torch": ("model.pt", {}),
    "torch in shards": ("model.pt", SHARDED),
    "torch in bfloat16, in shards": ("model.pt", {**SHARDED, "dtype": "bf16"}),
    "nested": ("nested.pt", {"max_shard_size": 3000}),
}


@functools.cache
def place() -> Path:
    """A directory with the checkpoints, and what is made of them."""
    directory = Path(tempfile.mkdtemp(prefix="ckptconv-virtual-"))
    shutil.copytree(ZERO / "z3_fp32_w4" / "checkpoint", directory / "zero3")
    shutil.copytree(ZERO / "z1_bf16_w2" / "checkpoint", directory / "zero1")
    for name, path in itertools.chain(*(more.items() for more in of_features("SERVED"))):
        shutil.copytree(path, directory / name)
    torch.save(a_model(), directory / "model.pt")
    nested = {"model": {"a": torch.arange(999), "b": torch.ones(7, 70).t()}, "step": 3, "list": [torch.zeros(800)]}
    torch.save(nested, directory / "nested.pt")
    return directory


@functools.cache
def written(case: str) -> dict[str, bytes]:
    """What a conversion writes, but for the manifest, whose checksums are known only then."""
    name, options = CASES[case]
    output = place() / "out" / case
    output.parent.mkdir(exist_ok=True)
    ckptconv.convert(place() / name, output, fsync=False, **options)
    return {name: data for name, data in contents(output).items() if name != ".ckptconv-manifest.json"}


@functools.cache
def offered(case: str, described: str = "") -> VirtualFiles:
    """What is made of a checkpoint, or of a file that describes it: the name of that ends so."""
    name, options = CASES[case]
    if not described:
        return VirtualFiles(place() / name, **options)
    output = place() / f"{case}{described}"
    ckptconv.convert(place() / name, output, fsync=False, **options)
    return VirtualFiles(output)


@pytest.fixture(scope="module", autouse=True)
def _cleaned() -> Iterator[None]:
    yield
    for case in CASES:
        for described in WAYS:
            offered(case, described).close()
    shutil.rmtree(place())


def test_the_files_are_those_that_a_conversion_writes() -> None:
    for case in CASES:
        for described in WAYS:
            files, expected = offered(case, described), written(case)
            assert {name: files.read_bytes(name) for name in files} == expected, (case, described)
            assert {name: file.size for name, file in files.items()} == {
                name: len(data) for name, data in expected.items()
            }


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
def test_any_range_is_that_of_the_file(case: str, data: st.DataObject) -> None:
    files = offered(case, data.draw(st.sampled_from(WAYS)))
    name = data.draw(st.sampled_from(sorted(written(case))))
    whole = written(case)[name]
    start = data.draw(st.integers(0, len(whole)))
    stop = min(start + data.draw(st.integers(0, 1 << 20) | st.integers(0, 9)), len(whole))
    unit = data.draw(st.sampled_from([1, 64, 1000, 1 << 16])) if stop - start < 10_000 else 1 << 18
    pieces = [bytes(piece) for piece in files.read(name, start, stop, unit=unit)]
    assert b"".join(pieces) == whole[start:stop]
    assert max(map(len, pieces), default=0) <= -(-unit // 64) * 64


def test_many_threads_read_at_once() -> None:
    case = "torch in bfloat16, in shards"
    files = offered(case, WAYS[-1])
    wrong: list[int] = []

    def read(name: str) -> None:
        whole = written(case)[name]
        starts = range(0, len(whole), 77_777)
        wrong.extend(at for at in starts if files.read_bytes(name, at, at + 99_999) != whole[at : at + 99_999])

    threads = [threading.Thread(target=read, args=(name,)) for name in files for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_only_the_bytes_of_a_range_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    files = offered("torch")
    read: list[int] = []
    usual = DescriptorReader.fill

    def fill(self: Any, offset: int, buffers: Any) -> None:
        read.append(sum(map(len, buffers)))
        usual(self, offset, buffers)

    monkeypatch.setattr(DescriptorReader, "fill", fill)
    size = files["model.safetensors"].size
    files.read_bytes("model.safetensors", size - 10_000, size - 5000)
    assert 0 < sum(read) <= 5000 + 4096
    read.clear()
    files.read_bytes("model.safetensors", 0, 8)
    assert read == []


def test_a_range_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="start 5 and stop 3 are not a range"):
        offered("nested").read_bytes("model-00001-of-00003.safetensors", 5, 3)
    with pytest.raises(KeyError):
        offered("nested").read_bytes("other")


def test_a_source_that_has_changed_gives_no_byte(tmp_path: Path) -> None:
    for number, how in enumerate(("in place", "replaced", "gone", "cut")):
        model = tmp_path / f"{number}.pt"
        torch.save({"a": torch.arange(100_000)}, model)
        described = [tmp_path / f"{number}{suffix}" for suffix in DESCRIBING]
        for path in described:
            ckptconv.convert(model, path, fsync=False)
        with contextlib.ExitStack() as stack:
            offers = [stack.enter_context(VirtualFiles(path)) for path in (*described, model)]
            begun = [(files, files.read("model.safetensors", unit=65536)) for files in offers]
            for _, pieces in begun:
                next(pieces)
            if how == "in place":
                with model.open("r+b") as file:
                    file.seek(600_000)
                    file.write(b"\1")
            elif how == "cut":
                os.truncate(model, 300_000)
            else:
                model.unlink()
                if how == "replaced":
                    torch.save({"a": torch.ones(100_000, dtype=torch.int64)}, model)
            for files, pieces in begun:
                with pytest.raises(CorruptError, match=f"{re.escape(str(model))} (changed while|ends at)"):
                    next(pieces)
                with pytest.raises(CorruptError):
                    files.read_bytes("model.safetensors", 5000, 5001)


def test_files_next_to_the_source_decide_the_names_as_in_a_conversion(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "epoch_5.pt")
    (tmp_path / "open_clip_config.json").write_text("{}")
    ckptconv.convert(tmp_path / "epoch_5.pt", tmp_path / "out", for_hub=True, fsync=False)
    with VirtualFiles(tmp_path / "epoch_5.pt") as files:
        assert {*files} == {path.name for path in (tmp_path / "out").iterdir()}


def test_it_tells_what_a_conversion_would(tmp_path: Path) -> None:
    telling: list[tuple[str, dict[str, Any]]] = [
        ("zero3", {"raw": True}),
        ("nested.pt", {"key": "list", "strip_prefix": "layers"}),
        *itertools.chain(*of_features("TELLING")),
    ]
    for source, options in telling:
        report = ckptconv.convert(place() / source, tmp_path / "out", dry_run=True, **options)
        with VirtualFiles(place() / source, **options) as files:
            assert (files.warnings, files.notes) == (report.warnings, report.notes), options
            assert files.warnings or files.notes, options


def test_a_note_says_what_the_configuration_says_now(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    with ckptconv.VirtualFiles(tmp_path, dtype="bf16") as files:
        assert json.loads(files.read_bytes("config.json"))["dtype"] == "bfloat16"
        assert (
            "The copy of config.json has the dtype of the output's weights, bfloat16, instead of float32."
            in " ".join(files.notes)
        )
    with ckptconv.VirtualFiles(tmp_path) as files:
        assert "config.json" not in " ".join(files.notes)


@pytest.mark.filterwarnings("error")
def test_values_that_become_infinite_are_warned_of(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000), "b": torch.tensor([1e9, 1.0])}, tmp_path / "m.pt")
    with VirtualFiles(tmp_path / "m.pt", dtype="float16") as files:
        header = files["model.safetensors"].size - 2004
        files.read_bytes("model.safetensors", 0, header + 2000)
        with pytest.raises(UserWarning, match=r"model\.safetensors: at least 1 value was too large for float16"):
            files.read_bytes("model.safetensors")
    told: list[str] = []
    with VirtualFiles(tmp_path / "m.pt", dtype="float16") as files:
        files.lost.warn = told.append
        for _ in range(2):
            files.read_bytes("model.safetensors")
        assert told == ["model.safetensors: at least 1 value was too large for float16 and became infinite, in 'b'."]


def test_what_is_not_made_of_weights_of_all_ranks_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": "x"}, "weights"),
        *(({"to": to}, "weights") for to in CHECKPOINTS),
        ({"nonsense": 1}, "no option"),
    ]
    for options, said in wrong:
        with pytest.raises(UsageError, match=said):
            VirtualFiles(place() / "zero3", **options)


# ---------------------------------------------------------------------------------------------------------- file system


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system under its name, which an installed package has from its entry point."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    entry = re.search(r'\[project\.entry-points\."fsspec\.specs"\]\nckptconv = "(.*):(.*)"\n', text)
    assert entry is not None
    assert getattr(importlib.import_module(entry[1]), entry[2]) is VirtualFileSystem
    fsspec.register_implementation("ckptconv", VirtualFileSystem, clobber=True)


@pytest.mark.usefixtures("protocol")
class TestFileSystem:
    def test_it_gives_the_files_of_a_conversion(self) -> None:
        for case in ("zero3", "zero3 in bfloat16", "zero1 of bfloat16", "torch in shards"):
            name, options = CASES[case]
            fs = fsspec.filesystem("ckptconv", source=place() / name, **options)
            for file in fs.glob("*.safetensors"):
                assert fs.cat_file(file) == written(case)[file], (case, file)

    def test_it_lists_the_files(self) -> None:
        fs = fsspec.filesystem("ckptconv", source=place() / "nested.pt", max_shard_size=3000)
        assert sorted(fs.ls("", detail=False)) == sorted(written("nested"))
        assert fs.find("") == sorted(written("nested"))
        assert fs.size("ckptconv.structure.json") == len(written("nested")["ckptconv.structure.json"])
        assert fs.isdir("")
        assert not fs.exists("x")
        with pytest.raises(FileNotFoundError):
            fs.open("x")
        with pytest.raises(UsageError, match="cannot be written"):
            fs.open("model.safetensors", "wb")

    def test_an_open_file_is_a_file(self) -> None:
        whole = written("torch")["model.safetensors"]
        with VirtualFileSystem(place() / "model.pt").open("model.safetensors", block_size=10_000) as file:
            assert file.size == len(whole)
            assert file.read(8) == whole[:8]
            file.seek(-50, os.SEEK_END)
            assert file.read() == whole[-50:]
            file.seek(1_000_000)
            assert file.read(30_000) == whole[1_000_000:1_030_000]

    def test_chained_urls_lead_through_it(self) -> None:
        for described in WAYS:
            offered("zero3", described)
            with fsspec.open(f"ckptconv://model.safetensors::{place() / 'zero3'}{described}") as file:
                assert file.read() == written("zero3")["model.safetensors"]

    def test_ranges_are_as_those_of_other_file_systems(self) -> None:
        fs, whole = VirtualFileSystem(place() / "zero1"), written("zero1 of bfloat16")["model.safetensors"]
        for start, end in ((None, None), (0, 8), (-9, None), (None, -9), (50, 20), (5, 1 << 70)):
            assert fs.cat_file("model.safetensors", start, end) == whole[start:end], (start, end)

    def test_numpy_reads_a_tensor_from_the_middle(self) -> None:
        with fsspec.open(f"ckptconv://model.safetensors::{place() / 'model.pt'}") as file:
            length = int.from_bytes(file.read(8), "little")
            told = json.loads(file.read(length))["transposed"]
            file.seek(8 + length + told["data_offsets"][0])
            data = file.read(told["data_offsets"][1] - told["data_offsets"][0])
        expected = a_model()["transposed"].contiguous().numpy()
        assert np.array_equal(np.frombuffer(data, "<f4").reshape(told["shape"]), expected)


@FAR
def test_a_source_on_a_store_is_read_by_ranges(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/virtual/model.pt", (place() / "model.pt").read_bytes())
    whole = written("torch in bfloat16, in shards")
    options: dict[str, Any] = {"dtype": "bf16", **SHARDED}
    for suffix in DESCRIBING:
        ckptconv.convert("memory://virtual/model.pt", tmp_path / f"x{suffix}", **options)
    described = [VirtualFiles(tmp_path / f"x{suffix}") for suffix in DESCRIBING]
    for files in (VirtualFiles("memory://virtual/model.pt", **options), *described):
        with files:
            assert {name: files.read_bytes(name) for name in files} == whole
            name = max(whole, key=lambda each: len(whole[each]))
            assert files.read_bytes(name, 1_000_001, 1_400_003) == whole[name][1_000_001:1_400_003]
            pieces = files.read(name)  # what is not read to its end leaves no thread behind
            next(pieces)
            pieces.close()
    store.rm("/virtual", recursive=True)


def test_safetensors_opens_what_is_mounted(tmp_path: Path) -> None:
    pytest.importorskip("fuse", reason="fusepy is not installed", exc_type=Exception)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or not shutil.which("fusermount"):
        pytest.skip("there is no FUSE here")
    program = (
        "import sys; from fsspec.fuse import run; from ckptconv import VirtualFileSystem\n"
        "run(VirtualFileSystem(sys.argv[1]), '', sys.argv[2], foreground=True, threads=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, place() / "zero3", tmp_path])
    try:
        while not os.path.ismount(tmp_path):
            assert process.poll() is None
            time.sleep(0.05)
        with safe_open(tmp_path / "model.safetensors", "pt") as opened:
            got = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    finally:
        subprocess.run(["fusermount", "-u", tmp_path], check=False)
        process.wait()
    expected = load(written("zero3")["model.safetensors"])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in got.items())


def test_it_is_pickled_by_what_it_is_made_of_and_closed_is_closed(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "x.pt")
    files = VirtualFiles(tmp_path / "x.pt", dtype="bf16")
    with pickle.loads(pickle.dumps(files)) as again:
        assert again.version == files.version
        assert again.read_bytes("model.safetensors") == files.read_bytes("model.safetensors")
    told = pickle.dumps(files)
    files.close()
    for use in (lambda: files.read_bytes("model.safetensors"), lambda: pickle.dumps(files), lambda: files["x"]):
        with pytest.raises(UsageError, match="is closed"):
            use()
    torch.save({"w": torch.arange(5.0)}, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="changed"):
        pickle.loads(told)

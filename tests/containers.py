"""What every container of torch's files promises: a suite that the tests of each inherit."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoints import ckptconv_here, load_with_aliases
from compare import Attack, bits, evaluate, numbers, same
from effort import TIMES, examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from processes import calls, open_files
from stores import FAR

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.formats.detect import open_source
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.file import read_torch
from ckptconv.pickles.nodes import Global
from ckptconv.tensors.lazy import LazyTensor

READ = (
    "import sys; from ckptconv.formats.torch import file; file.read_torch(sys.argv[1])\n"
    "print([m for m in ('torch', 'numpy', 'pickle') if m in sys.modules])"
)


def refusal(path: Path) -> str:
    """Why a file is refused; empty if it is not. Anything but an error for users fails the test."""
    try:
        read_torch(str(path))
    except CkptconvError as error:
        return str(error)
    return ""


def read_leaves(path: Path) -> None:
    """Read every tensor of a file's dict."""
    value = read_torch(str(path)).value
    for leaf in value.values() if isinstance(value, dict) else ():
        if isinstance(leaf, LazyTensor):
            evaluate(leaf)


class ContainerSuite:
    """Inherit it, say what the container is called, which dtypes it can hold, and how torch writes it."""

    container: str
    dtypes: Sequence[torch.dtype] = (torch.uint8, torch.float16, torch.float32, torch.int64)
    # From which byte on a file that is cut is known to be cut.
    known_from = 40
    # Calls of functions, of a fifth as many, and bytes at most and in the end, for each of so many tensors.
    many = 2_500 * TIMES
    cost = (200, 1100, 700)

    def save(self, value: Any, path: Path, **options: Any) -> Path:
        """Write `value` as torch does, and return `path`."""
        raise NotImplementedError

    def read(self, path: Path) -> TorchFile:
        file = read_torch(str(path))
        assert file.container == self.container
        return file

    def check(self, value: Any, place: Path, **options: Any) -> TorchFile:
        """Save `value` in `place`, and compare what we read with what torch.load does."""
        path = self.save(value, place / "model.pt", **options)
        file = self.read(path)
        same(file.value, torch.load(path, weights_only=False))
        return file

    @pytest.fixture(scope="class")
    def sound(self, tmp_path_factory: pytest.TempPathFactory) -> bytes:
        tree = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3, dtype=torch.int64)}
        return self.save(tree, tmp_path_factory.mktemp("sound") / "sound.pt").read_bytes()

    # -------------------------------------------------------------------------------------------------------- values

    def test_nothing_but_plain_values(self, tmp_path: Path) -> None:
        assert list(self.check({"epoch": 3, "names": ["a", "b"]}, tmp_path).records) == []

    def test_views_share_their_storage(self, tmp_path: Path) -> None:
        base = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
        views = OrderedDict(base=base, transposed=base.transpose(0, 3), strided=base[:, ::2, 1::2, ::3], again=base)
        file = self.check({**views, "other": torch.ones(3)}, tmp_path)
        assert len({leaf.facts.storage for leaf in file.value.values()}) == 2
        assert sorted(record.size for record in file.records) == [12, 480]

    @given(data=st.data())
    @examples(30, HealthCheck.differing_executors)
    def test_any_tensors(self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
        dtypes = data.draw(st.lists(st.sampled_from(list(self.dtypes)), max_size=6))
        shapes = [data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)) for _ in dtypes]
        tree = [numbers(dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
        self.check(tree, tmp_path_factory.mktemp("any"))

    def test_it_is_converted_like_any_other_file(self, tmp_path: Path) -> None:
        tree = OrderedDict(b=torch.randn(300, 500), a=torch.arange(7), t=torch.randn(64, 32).t())
        tree["tied"] = tree["b"]
        path = self.save(tree, tmp_path / "model.bin")
        run = ckptconv_here("pt2safetensors", path, "--json")
        assert run.code == 0, run.err
        assert run.json["aliases"] == {"tied": "b"}
        converted = load_with_aliases(tmp_path / "model.safetensors")
        assert {name: bits(tensor) for name, tensor in converted.items()} == {
            name: bits(tensor) for name, tensor in tree.items()
        }
        assert open_source(path).format == f"torch {self.container}"

    # ---------------------------------------------------------------------------------------------- what is done for it

    def test_only_descriptions_are_read(self, tmp_path: Path) -> None:
        tree = {str(n): torch.zeros(200_000) for n in range(20)}
        file = self.read(self.save(tree, tmp_path / "model.pt"))
        assert file.file.size > 16_000_000
        assert file.bytes_read < 100_000

    def test_many_tensors_open_fast_and_small(self, tmp_path: Path) -> None:
        count, few = self.many, self.many // 5
        tree = OrderedDict((f"model.layers.{n}.self_attn.q_proj.weight", torch.full((2, 3), n)) for n in range(count))
        path = self.save(tree, tmp_path / "many.pt")
        part = self.save(OrderedDict(itertools.islice(tree.items(), few)), tmp_path / "few.pt")
        tracemalloc.start()
        file = self.read(path)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(file.value) == count
        each, most, left = self.cost
        assert calls(lambda: self.read(part)) / few < each
        assert peak < (1 << 20) + count * most  # and what is read at once
        assert kept / count < left
        for n in (0, 1, count // 2 - 1, count - 1):
            assert evaluate(list(file.value.values())[n]) == bits(torch.full((2, 3), n))

    @FAR
    def test_a_remote_file_is_read_by_ranges(self, tmp_path: Path) -> None:
        data = self.save({"w": torch.arange(3)}, tmp_path / "model.pt").read_bytes()
        url = f"memory://{type(self).__name__}/model.pt"
        with fsspec.open(url, "wb") as out:
            out.write(data)
        leaf = read_torch(url).value["w"]
        start = leaf.tensor.offset
        assert data[start : start + 24] == bits(torch.arange(3))

    def test_torch_is_not_imported(self, tmp_path: Path) -> None:
        path = self.save({"w": torch.ones(2)}, tmp_path / "model.pt")
        done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=False)
        assert done.stdout == "[]\n", done.stderr

    def test_readers_are_closed(self, tmp_path: Path) -> None:
        path = self.save({"w": torch.ones(2)}, tmp_path / "model.pt")
        before = open_files()
        for _ in range(3):
            self.read(path)
        assert not open_files() - before

    # --------------------------------------------------------------------------------------------- hostile and broken

    def test_an_attack_that_works_on_torch_load_does_nothing_here(self, tmp_path: Path) -> None:
        canary = tmp_path / "canary"
        path = self.save({"w": torch.ones(2), "x": Attack(canary)}, tmp_path / "evil.pt")
        torch.load(path, weights_only=False)
        assert canary.exists()
        canary.unlink()
        file = self.read(path)
        assert not canary.exists()
        assert Global("posix", "system") in file.opaque
        assert evaluate(file.value["w"]) == bits(torch.ones(2))

    def test_a_cut_file_is_corrupt_wherever_it_was_cut(self, sound: bytes, tmp_path: Path) -> None:
        path = tmp_path / "cut.pt"
        end = len(sound.rstrip(b"\0"))
        for stop in [*range(0, end, 7), end - 1]:
            path.write_bytes(sound[:stop])
            with pytest.raises((CorruptError, UnsupportedError), match=r"cut\.pt"):
                read_torch(str(path))
            assert stop < self.known_from or "cut short" in refusal(path), stop

    @given(data=st.data())
    @examples(100, HealthCheck.differing_executors)
    def test_a_damaged_file_is_read_or_refused_in_words(
        self, data: st.DataObject, sound: bytes, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        damaged = bytearray(sound)
        # Mostly where the structure is: at both ends.
        end = len(damaged.rstrip(b"\0"))
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, end - 1) | st.integers(max(0, end - 900), end - 1))
            damaged[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, ord("9")]) | st.integers(0, 255))
        path = tmp_path_factory.mktemp("damaged") / "m.pt"
        path.write_bytes(damaged)
        refused = refusal(path)
        assert "m.pt" in refused or not refused
        if not refused:
            read_leaves(path)

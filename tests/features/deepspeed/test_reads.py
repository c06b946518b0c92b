"""What is read of a run's files: the weights, and no byte of the optimizer's states."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here, done

from ckptconv.storage import files as storage

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import make_example


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Every interval that is read of a local file, by name."""
    found: dict[str, list[tuple[int, int]]] = {}
    read_at, fill = storage.LocalReader.read_at, storage.LocalReader.fill

    def traced_read_at(self: storage.LocalReader, offset: int, length: int) -> bytes:
        found.setdefault(self.file.path, []).append((offset, offset + length))
        return read_at(self, offset, length)

    def traced_fill(self: storage.LocalReader, offset: int, buffers: Sequence[memoryview]) -> None:
        found.setdefault(self.file.path, []).append((offset, offset + sum(map(len, buffers))))
        fill(self, offset, buffers)

    monkeypatch.setattr(storage.LocalReader, "read_at", traced_read_at)
    monkeypatch.setattr(storage.LocalReader, "fill", traced_fill)
    return found


def where_it_lies(tensor: torch.Tensor, content: bytes) -> tuple[int, int]:
    """The interval of a file that holds the bytes of `tensor`."""
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    start = content.find(data)
    assert start > 0
    assert content.find(data, start + 1) < 0
    return start, start + len(data)


def test_no_byte_of_an_optimizer_state_is_read(tmp_path: Path, reads: dict[str, list[tuple[int, int]]]) -> None:
    for stage in (1, 2, 3):
        run, output = tmp_path / f"stage{stage}", tmp_path / f"{stage}.safetensors"
        example = make_example.Example(params=400_000, ranks=2, stage=stage)
        make_example.write(example, run)
        done(ckptconv_here("zero-to-fp32", run, output))
        assert make_example.differences(example, output) == []
        moments = 0
        for path in run.rglob("*optim_states.pt"):
            content = path.read_bytes()
            with make_example.stand_ins():
                state = torch.load(path, weights_only=False)["optimizer_state_dict"]
            inner = state["optimizer_state_dict"] if stage == 3 else state["base_optimizer_state"]
            for values in inner["state"].values():
                for name in ("exp_avg", "exp_avg_sq"):
                    start, stop = where_it_lies(values[name], content)
                    moments += stop - start
                    assert not [at for at in reads[str(path)] if at[0] < stop and at[1] > start], stage
        assert moments > 2 * 4 * 390_000, stage

"""What is written: laid out as the safetensors library lays it out, and published whole or not at all."""

from __future__ import annotations

import json
import random
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from ckptconv import convert
from ckptconv.engine.execute import carry_out
from ckptconv.errors import CkptconvError, FailedError, UsageError
from ckptconv.outputs import safetensors as output
from ckptconv.outputs.shards import index_plan, pack, shard_names
from ckptconv.plan import FilePlan, Literal
from ckptconv.storage.files import Readers, look
from ckptconv.storage.writing import LocalWriter
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, Stored
from ckptconv.tensors.strides import contiguous_strides

DTYPES_OF_BOTH = [name for name, dtype in DTYPES.items() if dtype.code and dtype.code not in ("F4", "F8_E8M0")]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ------------------------------------------------------------------------------------------------------- the layout


def test_a_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    chance = random.Random(0)
    tensors, lazy, content = {}, {}, bytearray()
    for number in range(2000):
        dtype = chance.choice(DTYPES_OF_BOTH)
        shape = tuple(chance.randint(0 if chance.random() < 0.05 else 1, 20) for _ in range(chance.randint(0, 3)))
        shape = (300, 1100) if number % 700 == 0 else shape
        tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
        content += b"\7" * chance.choice([0, 1, 64, 5000])
        name = f"{chance.choice(['é', 'a', 'Z', chr(127), '…'])}{number}\n"
        tensors[name], lazy[name] = tensor, (len(content), DTYPES[dtype], shape)
        content += raw(tensor)
    source = tmp_path / "source"
    source.write_bytes(content)
    file = look(str(source)).file
    stored = {k: Stored(file, at, dtype, shape, contiguous_strides(shape)) for k, (at, dtype, shape) in lazy.items()}
    expected = save(tensors, {"format": "pt"})
    plan = output.file_plan("x", stored, {"format": "pt"})
    assert plan.size == len(expected)
    for jobs, memory in [(1, 8 << 20), (2, 8 << 20), (3, 1 << 18)]:
        writer = LocalWriter(str(tmp_path / "written"), plan.size)
        with Readers() as readers:
            tally = carry_out(plan, writer, readers, jobs=jobs, memory=memory)
        writer.close()
        assert (tmp_path / "written").read_bytes() == expected
        assert tally.bytes_written == len(expected)
        (tmp_path / "written").unlink()


def test_transposed_tensors_larger_than_the_buffers_come_out_right(tmp_path: Path) -> None:
    tensor = torch.arange(1500 * 1100, dtype=torch.int32).reshape(1500, 1100)
    source = tmp_path / "source"
    source.write_bytes(raw(tensor))
    lazy = Stored(look(str(source)).file, 0, DTYPES["int32"], (1100, 1500), (1, 1100))
    plan = output.file_plan("x", {"w": lazy}, {"format": "pt"})
    for jobs in (1, 2):
        writer = LocalWriter(str(tmp_path / "written"), plan.size)
        with Readers() as readers:
            carry_out(plan, writer, readers, jobs=jobs, memory=1 << 20)
        writer.close()
        assert (tmp_path / "written").read_bytes() == save({"w": tensor.t().contiguous()}, {"format": "pt"})


def test_names_and_metadata_that_safetensors_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Inline(b"\0", DTYPES["uint8"], ())
    with pytest.raises(UsageError, match="do not allow a tensor named __metadata__"):
        output.file_plan("x", {"__metadata__": tensor}, {})
    with pytest.raises(UsageError, match="surrogate"):
        output.file_plan("x", {"a\ud800": tensor}, {})
    with pytest.raises(CkptconvError, match="complex128"):
        output.file_plan("x", {"a": Inline(bytes(16), DTYPES["complex128"], ())}, {})
    assert output.MAX_HEADER == 100_000_000
    monkeypatch.setattr(output, "MAX_HEADER", 1000)
    with pytest.raises(FailedError, match="safetensors allow 1000"):
        output.file_plan("x", {"a": tensor}, {"much": "x" * 1000})


# --------------------------------------------------------------------------------------------------------- sharding


@given(
    st.lists(st.integers(0, 100), max_size=40),
    st.integers(1, 150),
)
def test_shards_keep_the_order_hold_everything_once_and_keep_to_the_limit(sizes: list[int], limit: int) -> None:
    named = {f"t{number}": size for number, size in enumerate(sizes)}
    groups = pack(named, limit)
    assert sorted(name for group in groups for name in group) == sorted(named)
    for group in groups:
        assert len(group) == 1 or sum(named[name] for name in group) <= limit
        assert group == sorted(group, key=list(named).index)


def test_a_tensor_over_the_limit_gets_a_file_of_its_own_and_the_shard_before_it_goes_on() -> None:
    assert pack({"a": 4, "big": 20, "b": 4, "c": 4}, 10) == [["big"], ["a", "b"], ["c"]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_shards_are_those_of_huggingface_hub(sizes: list[int]) -> None:
    state = {f"t{number}": torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    theirs = huggingface_hub.split_torch_state_dict_into_shards(state, max_shard_size=20).filename_to_tensors
    assert pack({name: tensor.nbytes for name, tensor in state.items()}, 20) == list(theirs.values())


def test_one_file_is_as_large_as_a_shard_may_be(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.safetensors", max_shard_size=800)
    convert(tmp_path / "in.pt", tmp_path / "out", max_shard_size=800)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "out.safetensors").read_bytes()
    with pytest.raises(UsageError, match=r"would have 800 bytes of tensors, more than --max-shard-size allows \(799\)"):
        convert(tmp_path / "in.pt", tmp_path / "out.safetensors", max_shard_size=799)


def test_shards_are_numbered_from_one() -> None:
    assert shard_names("model", ".safetensors", [1]) == ["model.safetensors"]
    assert shard_names("model", ".safetensors", [1, 2]) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_the_index_is_sorted_and_counts_tensor_bytes() -> None:
    one, two = Inline(bytes(4), DTYPES["float32"], ()), Inline(bytes(6), DTYPES["int16"], (3,))
    plan = index_plan({"f1": {"z": one}, "f2": {"a": two}}, {"tied": "a"}, "model")
    (part,) = plan.parts
    assert isinstance(part, Literal)
    assert json.loads(part.data) == {
        "metadata": {"tied": "a", "total_size": 10},
        "weight_map": {"a": "f2", "z": "f1"},
    }
    assert part.data.endswith(b"}\n")


def test_a_plan_whose_parts_leave_a_hole_is_never_carried_out(tmp_path: Path) -> None:
    plan = FilePlan("x", 10, (Literal(0, b"12345"), Literal(6, b"6789")))
    with pytest.raises(ValueError, match="begins at 6"), Readers() as readers:
        carry_out(plan, LocalWriter(str(tmp_path / "x"), 10), readers, jobs=1, memory=1 << 20)

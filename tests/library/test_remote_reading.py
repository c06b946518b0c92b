"""Checkpoints on a store are read by few requests for what is asked for, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from remote import S3, Proxy, fresh, proxy_to
from zero_writer import Model, Save, write

import ckptconv
from ckptconv import CorruptError

KIB = 1 << 10
ROWS, COLUMNS, RANKS = 2000, 700, 4
MATRIX = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
SMALL = {f"layer{number}.bias": torch.full((50,), float(number)) for number in range(300)}


@pytest.fixture
def proxy(s3: S3) -> Iterator[Proxy]:
    with proxy_to(s3) as made:
        yield made


@pytest.fixture(scope="module")
def step(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ZeRO-3 step of four ranks."""
    place = tmp_path_factory.mktemp("step")
    write(place / "step", Model([{"w": MATRIX, **SMALL}]), Save(3, RANKS))
    return s3.put(place / "step", fresh())


def test_a_slice_is_fetched_with_a_request_for_each_partition(step: str, s3: S3, proxy: Proxy) -> None:
    with ckptconv.open(step, storage_options=s3.through(proxy.endpoint)) as ck:
        assert torch.equal(ck["w"][3, 5:8], MATRIX[3, 5:8])  # what is done once
        for key, count in ((slice(10, 20), 1), (slice(480, 520), 2), ((slice(None), slice(None, None, 2)), 4)):
            before = len(proxy.asked)
            part = ck["w"][key]
            asked = [each for each in proxy.asked[before:] if each.range]
            assert torch.equal(part, MATRIX[key])
            wanted = MATRIX.nbytes if count == 4 else part.nbytes
            assert sum(last - first + 1 for first, last in (each.range for each in asked)) <= wanted + 64 * KIB * count
            assert len(asked) <= count + wanted // (1 << 20)


def test_many_small_tensors_take_few_requests(step: str, s3: S3, proxy: Proxy) -> None:
    expected = {"w": MATRIX, **SMALL}
    with ckptconv.open(step, storage_options=s3.through(proxy.endpoint)) as ck:
        assert len(ck) == 301
        for read in (ck.get_tensors, lambda: dict(ck.forward())):
            before = len(proxy.asked)
            found = read()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            assert len(proxy.asked) - before < 40


def test_an_object_that_is_replaced_while_it_is_open_is_corrupt(s3: S3, tmp_path: Path) -> None:
    torch.save({"w": MATRIX}, tmp_path / "x.pt")
    name = fresh()
    url = s3.put(tmp_path / "x.pt", f"{name}/x.pt")
    with ckptconv.open(url, storage_options=s3.options) as ck:
        assert torch.equal(ck["w"][7], MATRIX[7])
        torch.save({"w": MATRIX + 1}, tmp_path / "x.pt")
        s3.put(tmp_path / "x.pt", f"{name}/x.pt")
        with pytest.raises(CorruptError, match="changed while it was read"):
            ck["w"][1000:]


def test_a_model_loads_from_a_store(step: str, s3: S3) -> None:
    loaded = ckptconv.load_state_dict(step, storage_options=s3.options, dtype="bf16")
    assert torch.equal(loaded["w"], MATRIX.bfloat16())
    assert loaded.keys() == {"w", *SMALL}

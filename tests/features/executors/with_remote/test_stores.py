"""Shards on stores that the workers of an executor write, and single files, which this process sends."""

from __future__ import annotations

from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import COUNT, PLACES, SHARD_OF_SIX, Output, Place, of_six

from ckptconv import convert
from ckptconv.errors import FailedError


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    """An output on a store, or on a disk that is reached through fsspec."""
    if request.param == "local":
        return Output(Place(f"local://{tmp_path}/out", {}))
    return Output(PLACES[request.param]())


@pytest.mark.parametrize("store", [*PLACES, "local"], indirect=True)
@pytest.mark.parametrize("make", [lambda: ThreadPoolExecutor(2), lambda: ProcessPoolExecutor(1, get_context("spawn"))])
def test_an_executor_makes_shards_where_it_sees_the_store(make: Any, store: Output, tmp_path: Path) -> None:
    model, other = of_six(tmp_path / "model.pt"), of_six(tmp_path / "other.pt", COUNT + 1, 0.0)
    convert(model, tmp_path / "whole", max_shard_size=SHARD_OF_SIX)
    executor: Executor
    with make() as executor:
        if store.url.startswith("memory:") and isinstance(executor, ProcessPoolExecutor):
            with pytest.raises(FailedError, match="the store has no such location"):
                store.whole(model, executor=executor)
            return
        store.whole(other)
        store.whole(model, executor=executor)
    assert store.contents() == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}


def test_with_an_executor_one_file_is_sent_by_this_process(store: Output, tmp_path: Path) -> None:
    """In several parts, where that is a store's way."""
    large = tmp_path / "large.pt"
    torch.save({f"layer{n}": torch.full((1000, 1000), float(n)) for n in range(3)}, large)
    convert(large, tmp_path / "out.safetensors")
    with ThreadPoolExecutor(2) as pool:
        convert(large, f"{store.url}/out.safetensors", executor=pool, storage_options=store.options)
    assert store.contents() == {"out.safetensors": (tmp_path / "out.safetensors").read_bytes()}

"""Parts of an output on stores: shards without an index, by processes that know nothing of each other, and `finish`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoints import ZERO
from stores import COUNT, INDEX, MANIFEST, PLACES, SHARD_OF_SIX, Output, Place, is_model, of_six

from ckptconv import convert
from ckptconv.cli.reports import of_conversion
from ckptconv.errors import CkptconvError, CorruptError, FailedError, UsageError
from ckptconv.features.parts.finish import finish
from ckptconv.options.kinds import OptionWarning

THIRD = "model-00003-of-00006.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_six(tmp_path_factory.mktemp("model") / "model.pt")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, of one shard more, whose shards have the same sizes."""
    return of_six(tmp_path_factory.mktemp("other") / "other.pt", COUNT + 1, 0.0)


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    """An output on a store, or on a disk that is reached through fsspec (`ON_A_DISK`)."""
    if request.param == "local":
        return Output(Place(f"local://{tmp_path}/out", {}))
    return Output(PLACES[request.param]())


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, bytes]:
    convert(model, model.parent / "whole", max_shard_size=SHARD_OF_SIX)
    return {path.name: path.read_bytes() for path in (model.parent / "whole").iterdir()}


# Where the times of files and workers that see them matter.
ON_A_DISK = pytest.mark.parametrize("store", [*PLACES, "local"], indirect=True)


# ------------------------------------------------------------------------------------------------- parts, and finish


@ON_A_DISK
def test_parts_and_finish_make_what_one_run_makes(model: Path, expected: dict[str, bytes], store: Output) -> None:
    for number in (1, 0, 2):
        report = store.part(model, number, 3)
        assert len(report.outputs) in (2, 3)
        assert "This replaces" not in " ".join(report.notes)
        assert not is_model(store.shown())
    assert set(store.shown()) == {name for name in expected if name.endswith(".safetensors")}
    report = store.finish()
    assert report.tensors == COUNT
    assert store.contents() == expected
    with pytest.raises(UsageError, match=r"nothing to publish\. .* exists: an earlier finish may have published it"):
        store.finish()


def test_an_index_is_never_over_shards_of_another_output(
    model: Path, other: Path, expected: dict[str, bytes], store: Output
) -> None:
    store.whole(other)
    assert INDEX in store.shown()
    with pytest.warns(OptionWarning, match=r"parts replace an earlier output .* immediately, .* use another OUTPUT"):
        report = store.part(model, 0)
    assert f"uploaded {report.outputs[0].path}" in of_conversion(report, verbose=True)[0]
    # What lies there now is of the first part.
    assert "This replaces" not in " ".join(store.part(model, 1).notes)
    assert INDEX not in store.shown()
    with pytest.raises(CkptconvError):
        convert(store.url, "memory://read/back.pt", family="safetensors", storage_options=store.options)
    store.finish()
    assert store.contents() == expected


def test_an_output_of_one_shard_stays_until_it_is_finished(
    model: Path, expected: dict[str, bytes], store: Output, tmp_path: Path
) -> None:
    torch.save({"nested": {"weight": torch.ones(9)}}, tmp_path / "old.pt")
    convert(tmp_path / "old.pt", store.url, storage_options=store.options)
    old = {name: data for name, data in store.shown().items() if name != MANIFEST}
    assert {"model.safetensors", "ckptconv.structure.json"} <= old.keys()
    for number in range(2):
        store.part(model, number)
        assert old.items() <= store.shown().items()
    store.finish()
    assert store.contents() == expected


def test_a_part_run_twice_sends_nothing_again(model: Path, expected: dict[str, bytes], store: Output) -> None:
    store.part(model, 0)
    before = store.contents()
    report = store.part(model, 0)
    assert report.bytes_written == 0
    assert report.reused == len(report.outputs) >= COUNT // 2
    assert store.contents() == before
    store.part(model, 1)
    store.finish()
    assert store.contents() == expected


def test_parts_of_different_plans_never_come_together(model: Path, store: Output) -> None:
    store.part(model, 0)
    store.part(model, 1, exclude=("layer0",))
    with pytest.raises(UsageError, match="2 different conversions"):
        store.finish()
    assert not is_model(store.shown())


def test_outputs_of_a_deepspeed_checkpoint(store: Output, tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2/checkpoint"
    settings: dict[str, Any] = {"family": "deepspeed", "max_shard_size": 100}
    convert(source, tmp_path / "w", optimizer=str(tmp_path / "o"), **settings)
    outputs = [f"{store.url}/w", f"{store.url}/o"]
    for number in range(3):
        convert(source, outputs[0], optimizer=outputs[1], part=(number, 3), storage_options=store.options, **settings)
    finish(outputs, storage_options=store.options)
    for name in "wo":
        made = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert len(made) > 3
        assert store.place.at(name).contents() == made


# ---------------------------------------------------------------------------------------- leftovers that do not count


@ON_A_DISK
def test_a_shard_that_was_replaced_since_is_not_taken_for_that_of_the_part(
    model: Path, expected: dict[str, bytes], store: Output
) -> None:
    """By one of the same name and size."""
    for number in range(2):
        store.part(model, number)
    time.sleep(0.01)
    store.put(THIRD, bytes(len(expected[THIRD])))
    with pytest.raises(FailedError, match=THIRD):
        store.finish()
    assert not is_model(store.shown())
    assert sum(store.part(model, number).reused for number in range(2)) == len(expected) - 2
    store.finish()
    assert store.contents() == expected


def test_a_shard_that_is_gone_is_missed(model: Path, store: Output) -> None:
    for number in range(2):
        store.part(model, number)
    fs, inner = fsspec.core.url_to_fs(store.url, **store.options)
    fs.rm_file(f"{inner}/{THIRD}")
    with pytest.raises(FailedError, match=THIRD):
        store.finish()
    assert not is_model(store.shown())


def test_a_conversion_of_the_whole_replaces_parts_and_their_records(
    model: Path, other: Path, expected: dict[str, bytes], store: Output
) -> None:
    store.part(other, 0)
    store.part(model, 1)
    assert store.whole(model).reused == 0
    assert store.contents() == expected


# What is put into a description, and into the record of a shard.
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/.plan.json", {"files": [["../../elsewhere", 1, 1]]}),
    ("/.plan.json", {"plan": "../x"}),
    ("/.plan.json", {"parts": 10**20}),
    ("/.record-", {"version": ["x"]}),
    ("/.record-", {"size": "1"}),
    ("/.record-", {"name": "model-00099-of-00006.safetensors"}),
]


def test_what_is_read_back_is_checked_before_it_is_used(model: Path, expected: dict[str, bytes], store: Output) -> None:
    store.part(model, 0, 1)
    for kind, change in (*WRONG, ("/.plan.json", None)):
        names = store.contents()
        name = next(name for name in names if kind in name)
        store.put(name, b"[" * 9999 if change is None else json.dumps({**json.loads(names[name]), **change}).encode())
        with pytest.raises(CorruptError):
            store.finish()
        assert not is_model(store.shown()), change
        store.part(model, 0, 1)
    store.finish()
    assert store.contents() == expected


@ON_A_DISK
def test_finish_reads_everything_again_if_it_is_asked_to(
    model: Path, expected: dict[str, bytes], store: Output, tmp_path: Path
) -> None:
    for number in range(2):
        store.part(model, number)
    if store.url.startswith("local:"):
        # A change that shows in nothing but the bytes.
        path = tmp_path / "out" / THIRD
        found = path.stat()
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        with pytest.raises(CorruptError, match=THIRD):
            store.finish(checksum=True)
        assert not is_model(store.shown())
        assert sum(store.part(model, number).reused for number in range(2)) == len(expected) - 2
    read: list[int] = []
    total: list[int] = []
    report = store.finish(checksum=True, progress=read.append, on_total=total.append)
    assert report.checksums == COUNT
    assert [sum(read)] == total == [sum(len(data) for name, data in expected.items() if name != MANIFEST)]
    assert store.contents() == expected


def test_an_output_of_one_file_is_refused_in_parts(model: Path, store: Output) -> None:
    for name in ("out.safetensors", "out"):
        with pytest.raises(UsageError, match="is a single file"):
            convert(model, f"{store.url}/{name}", part=(0, 2), storage_options=store.options)
    assert not store.contents()

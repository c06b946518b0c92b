"""Parts of an output on stores: shards without an index, by processes that know nothing of each other, and `finish`."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoints import ZERO
from prepared import PROGRAM, Process, prepared
from remote import BUCKET, S3, Proxy, fresh, proxy_to

from ckptconv import convert, verify
from ckptconv.errors import CkptconvError, CorruptError, FailedError, UsageError
from ckptconv.publish.finish import finish

INDEX = "model.safetensors.index.json"
MANIFEST = ".ckptconv-manifest.json"
COUNT, SHARD = 6, 400_000
THIRD = "model-00003-of-00006.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is converted to six shards."""
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save({f"layer{n}": torch.full((100, 1000), float(n)) for n in range(COUNT)}, path)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, bytes]:
    convert(model, model.parent / "whole", max_shard_size=SHARD)
    return {path.name: path.read_bytes() for path in (model.parent / "whole").iterdir()}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, of one shard more, whose shards have the same sizes."""
    path = tmp_path_factory.mktemp("other") / "other.pt"
    torch.save({f"layer{n}": torch.zeros(100, 1000) for n in range(COUNT + 1)}, path)
    return path


class Store:
    """An output on a store, through fsspec. `options` are what that needs."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url, options

    def part(self, model: Path, number: int, count: int = 2, **options: Any) -> Any:
        settings = {"max_shard_size": SHARD, "storage_options": self.options, **options}
        return convert(model, self.url, part=(number, count), **settings)

    def whole(self, model: Path, **options: Any) -> Any:
        return convert(model, self.url, max_shard_size=SHARD, storage_options=self.options, **options)

    def finish(self, **options: Any) -> Any:
        return finish([self.url], storage_options=self.options, **options)

    def contents(self) -> dict[str, bytes]:
        fs, inner = fsspec.core.url_to_fs(self.url, **self.options)
        fs.invalidate_cache()
        return {path[len(inner) :].lstrip("/"): fs.cat_file(path) for path in fs.find(inner)}

    def shown(self) -> dict[str, bytes]:
        """What is there under final names."""
        return {name: data for name, data in self.contents().items() if "/" not in name}

    def put(self, name: str, data: bytes) -> None:
        fs, inner = fsspec.core.url_to_fs(self.url, **self.options)
        fs.pipe_file(f"{inner}/{name}", data)

    def through(self, proxy: Proxy) -> Store:
        return Store(self.url, {**self.options, "endpoint_url": proxy.endpoint})


class OnS3(Store):
    """What is there is asked the store itself, which takes less than s3fs."""

    def __init__(self, s3: S3, prefix: str) -> None:
        super().__init__(f"s3://{BUCKET}/{prefix}", s3.options)
        self._s3, self._prefix = s3, prefix

    def contents(self) -> dict[str, bytes]:
        return self._s3.contents(f"{self._prefix}/")

    def put(self, name: str, data: bytes) -> None:
        self._s3.ask("PUT", f"{self._prefix}/{name}", data)


@pytest.fixture
def on_s3(s3: S3) -> Store:
    return OnS3(s3, fresh())


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An output on S3, in the memory of this process, or on a disk that is reached through fsspec (`ON_A_DISK`)."""
    if request.param == "s3":
        found: Store = request.getfixturevalue("on_s3")
        return found
    return Store(f"memory://{fresh()}/out" if request.param == "memory" else f"local://{tmp_path}/out", {})


# Where the times of files and workers that see them matter.
ON_A_DISK = pytest.mark.parametrize("store", ["s3", "memory", "local"], indirect=True)


def uploads(store: Store, s3: S3) -> list[str]:
    return s3.uploads(store.url.removeprefix(f"s3://{BUCKET}/"))


def part_of(model: Path, store: Store, which: str) -> Process:
    """A process that makes a part."""
    words = ("pt2safetensors", model, store.url, "--json", "--part", which, "--max-shard-size", SHARD)
    return prepared().python(PROGRAM, *words, "--storage-options", json.dumps(store.options))


def _records(proxy: Proxy) -> int:
    return sum(asked.method == "PUT" and "/.record-" in asked.path for asked in proxy.asked)


def is_model(shown: dict[str, bytes]) -> bool:
    return INDEX in shown or "model.safetensors" in shown


# ------------------------------------------------------------------------------------------------- parts, and finish


@ON_A_DISK
def test_parts_and_finish_make_what_one_run_makes(model: Path, expected: dict[str, bytes], store: Store) -> None:
    for number in (1, 0, 2):
        report = store.part(model, number, 3)
        assert len(report.outputs) in (2, 3)
        assert not is_model(store.shown())
    assert set(store.shown()) == {name for name in expected if name.endswith(".safetensors")}
    report = store.finish()
    assert report.tensors == COUNT
    assert store.contents() == expected
    with pytest.raises(UsageError, match="nothing to finish"):
        store.finish()


def test_two_processes_of_which_one_is_killed_and_finish_make_what_one_run_makes(
    model: Path, expected: dict[str, bytes], on_s3: Store, s3: S3
) -> None:
    with proxy_to(s3) as proxy:
        # Two of its shards are finished, and the third is not.
        proxy.rule = lambda asked: "held" if asked.method == "PUT" and _records(proxy) > 2 else ""
        first, second = part_of(model, on_s3, "0/2"), part_of(model, on_s3.through(proxy), "1/2")
        while second.poll() is None and _records(proxy) < 3:
            time.sleep(0.01)
        second.send_signal(signal.SIGKILL)
        assert second.wait() == -signal.SIGKILL
        proxy.release()
        assert first.wait() == 0
    assert not is_model(on_s3.shown())
    with pytest.raises(FailedError, match=r"part 1/2 .*model-0000\d-of-00006"):
        on_s3.finish()
    assert not is_model(on_s3.shown())
    again = on_s3.part(model, 1)
    assert 1 <= again.reused < len(again.outputs)
    assert on_s3.finish().tensors == COUNT
    assert on_s3.contents() == expected


def test_an_index_is_never_over_shards_of_another_output(
    model: Path, other: Path, expected: dict[str, bytes], store: Store
) -> None:
    store.whole(other)
    assert INDEX in store.shown()
    for number in range(2):
        store.part(model, number)
        assert INDEX not in store.shown()
    with pytest.raises(CkptconvError):
        convert(store.url, "memory://read/back.pt", family="safetensors", storage_options=store.options)
    store.finish()
    assert store.contents() == expected


def test_an_index_is_never_over_shards_of_which_some_are_replaced(
    model: Path, other: Path, on_s3: Store, s3: S3
) -> None:
    on_s3.whole(other)
    with proxy_to(s3) as proxy:
        proxy.rule = lambda asked: "403" if asked.method == "POST" and f"{THIRD}?uploadId" in asked.path else ""
        with pytest.raises(FailedError, match=THIRD):
            on_s3.through(proxy).whole(model)
    assert "model-00001-of-00006.safetensors" in on_s3.shown()
    assert not is_model(on_s3.shown())


def test_an_output_stays_until_a_shard_of_a_part_is_whole(model: Path, other: Path, on_s3: Store, s3: S3) -> None:
    on_s3.whole(other)
    before = on_s3.contents()
    with proxy_to(s3) as proxy:
        proxy.rule = lambda asked: "403" if "partNumber=" in asked.path else ""
        with pytest.raises(FailedError, match=r"\.safetensors cannot be written"):
            on_s3.through(proxy).part(model, 0)
    assert on_s3.shown() == before
    assert not uploads(on_s3, s3)


def test_an_output_of_one_shard_stays_until_it_is_finished(
    model: Path, expected: dict[str, bytes], store: Store, tmp_path: Path
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


def test_the_index_is_put_there_last(model: Path, on_s3: Store, s3: S3) -> None:
    for number in range(2):
        on_s3.part(model, number)
    with proxy_to(s3) as proxy:
        on_s3.through(proxy).finish()
        written = [asked.path for asked in proxy.asked if asked.method == "PUT" and "/.ckptconv-" not in asked.path]
    assert written[-1].endswith(INDEX)
    assert len(written) == 1


def test_a_finish_that_is_killed_goes_on(
    model: Path, other: Path, expected: dict[str, bytes], on_s3: Store, s3: S3
) -> None:
    """While it writes the index, before that when it removes what is old, and after that when it cleans up."""
    for method, rest in (("PUT", False), ("DELETE", False), ("DELETE", True)):
        on_s3.whole(other)
        for number in range(2):
            on_s3.part(model, number)
        with proxy_to(s3) as proxy:
            proxy.rule = lambda asked, method=method, rest=rest: (
                "403" if asked.method == method and rest == ("/.ckptconv-" in asked.path) else ""
            )
            if rest:
                on_s3.through(proxy).finish()
            else:
                with pytest.raises(FailedError, match=r"denied|403|orbidden"):
                    on_s3.through(proxy).finish()
        assert is_model(on_s3.shown()) == rest, method
        on_s3.finish()
        assert on_s3.contents() == expected, (method, rest)


def test_a_part_run_twice_sends_nothing_again(model: Path, expected: dict[str, bytes], store: Store) -> None:
    store.part(model, 0)
    before = store.contents()
    report = store.part(model, 0)
    assert report.bytes_written == 0
    assert report.reused == len(report.outputs) >= COUNT // 2
    assert store.contents() == before
    store.part(model, 1)
    store.finish()
    assert store.contents() == expected


def test_parts_of_different_plans_never_come_together(model: Path, store: Store) -> None:
    store.part(model, 0)
    store.part(model, 1, exclude=("layer0",))
    with pytest.raises(UsageError, match="2 different conversions"):
        store.finish()
    assert not is_model(store.shown())


def test_outputs_of_a_deepspeed_checkpoint(store: Store, tmp_path: Path) -> None:
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
        assert Store(f"{store.url}/{name}", store.options).contents() == made


# ---------------------------------------------------------------------------------------- leftovers that do not count


@ON_A_DISK
def test_a_shard_that_was_replaced_since_is_not_taken_for_that_of_the_part(
    model: Path, expected: dict[str, bytes], store: Store
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


def test_a_shard_that_is_gone_is_missed(model: Path, store: Store) -> None:
    for number in range(2):
        store.part(model, number)
    fs, inner = fsspec.core.url_to_fs(store.url, **store.options)
    fs.rm_file(f"{inner}/{THIRD}")
    with pytest.raises(FailedError, match=THIRD):
        store.finish()
    assert not is_model(store.shown())


def test_a_conversion_of_the_whole_replaces_parts_and_their_records(
    model: Path, other: Path, expected: dict[str, bytes], store: Store
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


def test_what_is_read_back_is_checked_before_it_is_used(model: Path, expected: dict[str, bytes], on_s3: Store) -> None:
    on_s3.part(model, 0, 1)
    for kind, change in (*WRONG, ("/.plan.json", None)):
        names = on_s3.contents()
        name = next(name for name in names if kind in name)
        on_s3.put(name, b"[" * 9999 if change is None else json.dumps({**json.loads(names[name]), **change}).encode())
        with pytest.raises(CorruptError):
            on_s3.finish()
        assert not is_model(on_s3.shown()), change
        on_s3.part(model, 0, 1)
    on_s3.finish()
    assert on_s3.contents() == expected


@ON_A_DISK
def test_finish_reads_everything_again_if_it_is_asked_to(
    model: Path, expected: dict[str, bytes], store: Store, tmp_path: Path
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


def test_what_fails_for_good_takes_its_shards_and_records_back(
    model: Path, on_s3: Store, s3: S3, tmp_path: Path
) -> None:
    short = tmp_path / "model.pt"
    short.write_bytes(model.read_bytes())
    with proxy_to(s3) as proxy:

        def spoil(asked: Any) -> str:
            if "/.record-" in asked.path and asked.method == "PUT":
                short.write_bytes(b"")  # what is left to be read is not there
            return ""

        proxy.rule = spoil
        with pytest.raises(Exception, match=r"truncated|changed|expected"):
            on_s3.through(proxy).part(short, 0, 1)
        assert _records(proxy)
    assert not uploads(on_s3, s3)
    assert not on_s3.shown()
    assert not any(".record-" in name for name in on_s3.contents())


# ---------------------------------------------------------------------------------------- one file, and an executor


def test_an_output_of_one_file_is_refused_in_parts(model: Path, store: Store) -> None:
    for name in ("out.safetensors", "out"):
        with pytest.raises(UsageError, match="is one file"):
            convert(model, f"{store.url}/{name}", part=(0, 2), storage_options=store.options)
    assert not store.contents()


@ON_A_DISK
@pytest.mark.parametrize("make", [lambda: ThreadPoolExecutor(2), lambda: ProcessPoolExecutor(1, get_context("spawn"))])
def test_an_executor_makes_shards_where_it_sees_the_store(
    make: Any, model: Path, other: Path, expected: dict[str, bytes], store: Store
) -> None:
    executor: Executor
    with make() as executor:
        if store.url.startswith("memory:") and isinstance(executor, ProcessPoolExecutor):
            with pytest.raises(FailedError, match="does not exist"):
                store.whole(model, executor=executor)
            return
        store.whole(other)
        store.whole(model, executor=executor)
    assert store.contents() == expected


def test_with_an_executor_one_file_is_sent_by_this_process(store: Store, tmp_path: Path) -> None:
    """In several parts, where that is a store's way."""
    large = tmp_path / "large.pt"
    torch.save({f"layer{n}": torch.full((1000, 1000), float(n)) for n in range(3)}, large)
    convert(large, tmp_path / "out.safetensors")
    with ThreadPoolExecutor(2) as pool:
        convert(large, f"{store.url}/out.safetensors", executor=pool, storage_options=store.options)
    assert store.contents() == {"out.safetensors": (tmp_path / "out.safetensors").read_bytes()}


def test_a_universal_checkpoint_is_made_in_parts_and_named_last(store: Store, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 3)}, tmp_path / "m.pt")
    settings: dict[str, Any] = {"universal": f"{store.url}/step3", "storage_options": store.options}
    for part in ("0/2", "1/2"):
        convert(tmp_path / "m.pt", part=part, **settings)
        assert "latest_universal" not in store.contents()
    finish(settings["universal"], storage_options=store.options)
    before = store.contents()
    assert before["latest_universal"] == b"step3"
    assert not [name for name in before if ".record-" in name or ".plan" in name]
    assert verify(tmp_path / "m.pt", **settings).tensors == 5
    convert(tmp_path / "m.pt", zero_stage=3, **settings)  # it has other files
    gone = before.keys() - store.contents().keys()
    assert gone == {"step3/zero/weight/step.pt", "step3/mp_rank_00_model_states.pt"}

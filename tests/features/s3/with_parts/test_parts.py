"""Parts of an output on S3, over links that break, by processes that are killed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from features.s3.server import S3, OnS3, proxy_to
from processes import PROGRAM, Process, prepared
from remote import Proxy
from stores import COUNT, INDEX, SHARD_OF_SIX, Output, is_model, of_six

from ckptconv import convert
from ckptconv.errors import FailedError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_six(tmp_path_factory.mktemp("model") / "model.pt")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, of one shard more, whose shards have the same sizes."""
    return of_six(tmp_path_factory.mktemp("other") / "other.pt", COUNT + 1, 0.0)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, bytes]:
    convert(model, model.parent / "whole", max_shard_size=SHARD_OF_SIX)
    return {path.name: path.read_bytes() for path in (model.parent / "whole").iterdir()}


THIRD = "model-00003-of-00006.safetensors"


class OnS3Output(Output):
    """An output on S3, which can be reached through a link."""

    place: OnS3

    def through(self, link: Proxy) -> OnS3Output:
        return OnS3Output(OnS3(self.place.s3, self.place.prefix, self.place.s3.through(link.endpoint)))


@pytest.fixture
def on_s3(s3: S3) -> OnS3Output:
    return OnS3Output(OnS3(s3))


def test_two_processes_of_which_one_is_killed_and_finish_make_what_one_run_makes(
    model: Path, expected: dict[str, bytes], on_s3: OnS3Output, s3: S3
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


def test_an_index_is_never_over_shards_of_which_some_are_replaced(
    model: Path, other: Path, on_s3: OnS3Output, s3: S3
) -> None:
    on_s3.whole(other)
    with proxy_to(s3) as proxy:
        proxy.rule = lambda asked: "403" if asked.method == "POST" and f"{THIRD}?uploadId" in asked.path else ""
        with pytest.raises(FailedError, match=THIRD):
            on_s3.through(proxy).whole(model)
    assert "model-00001-of-00006.safetensors" in on_s3.shown()
    assert not is_model(on_s3.shown())


def test_an_output_stays_until_a_shard_of_a_part_is_whole(model: Path, other: Path, on_s3: OnS3Output, s3: S3) -> None:
    on_s3.whole(other)
    before = on_s3.contents()
    with proxy_to(s3) as proxy:
        proxy.rule = lambda asked: "403" if "partNumber=" in asked.path else ""
        with pytest.raises(FailedError, match=r"\.safetensors cannot be written"):
            on_s3.through(proxy).part(model, 0)
    assert on_s3.shown() == before
    assert not on_s3.place.unfinished()


def test_the_index_is_put_there_last(model: Path, on_s3: OnS3Output, s3: S3) -> None:
    for number in range(2):
        on_s3.part(model, number)
    with proxy_to(s3) as proxy:
        on_s3.through(proxy).finish()
        written = [asked.path for asked in proxy.asked if asked.method == "PUT" and "/.ckptconv-" not in asked.path]
    assert written[-1].endswith(INDEX)
    assert len(written) == 1


def test_a_finish_that_is_killed_goes_on(
    model: Path, other: Path, expected: dict[str, bytes], on_s3: OnS3Output, s3: S3
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


def test_what_fails_for_good_takes_its_shards_and_records_back(
    model: Path, on_s3: OnS3Output, s3: S3, tmp_path: Path
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
    assert not on_s3.place.unfinished()
    assert not on_s3.shown()
    assert not any(".record-" in name for name in on_s3.contents())


def part_of(model: Path, store: Output, which: str) -> Process:
    """A process that makes a part."""
    words = ("pt2safetensors", model, store.url, "--json", "--part", which, "--max-shard-size", f"{SHARD_OF_SIX}B")
    return prepared().python(PROGRAM, *words, "--storage-options", json.dumps(store.options))


def _records(proxy: Proxy) -> int:
    return sum(asked.method == "PUT" and "/.record-" in asked.path for asked in proxy.asked)

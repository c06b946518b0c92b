"""Places on stores for tests that ask the same of each, and the suites that the tests of a store inherit.

Features have the places in their cells, as `PLACES` and `REPOSITORIES`.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cells import VERIFIED, of_features
from checkpoints import ZERO, contents
from processes import Process, prepared
from remote import KIB, MIB, SHARD, Asked, Proxy, a_model, converted_here, fresh
from safetensors.torch import load_file

from ckptconv import convert
from ckptconv.errors import CorruptError, FailedError, UsageError
from ckptconv.formats.detect import open_source
from ckptconv.outputs.kinds import NAMED


class Place:
    """A place on a store, where nothing is at first. `options` are what fsspec needs to reach it."""

    # Whether outputs can be written to it.
    writable = True

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url, options

    def at(self, name: str) -> Place:
        """A place below this one."""
        return Place(f"{self.url}/{name}", self.options)

    def put(self, path: Path, name: str) -> str:
        """Upload a file, or the files of a directory. Returns its URL."""
        for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
            self.write(name if file == path else f"{name}/{file.relative_to(path)}", file.read_bytes())
        return f"{self.url}/{name}"

    def write(self, name: str, data: bytes) -> None:
        fs, inner = fsspec.core.url_to_fs(self.url, **self.options)
        fs.pipe_file(f"{inner}/{name}", data)

    def contents(self) -> dict[str, bytes]:
        """All files that are there, by their names."""
        fs, inner = fsspec.core.url_to_fs(self.url, **self.options)
        fs.invalidate_cache()
        return {path[len(inner) :].lstrip("/"): fs.cat_file(path) for path in fs.find(inner)}


def in_memory() -> Place:
    """A place in the memory of this process."""
    return Place(f"memory://{fresh()}", {})


# Places of each kind, none of which was used before: those that outputs can be written to, and all that can be read.
PLACES: dict[str, Callable[[], Place]] = {
    name: made for places in of_features("PLACES") for name, made in places.items()
}
SOURCES = {**PLACES, **{name: made for places in of_features("REPOSITORIES") for name, made in places.items()}}

# Tests that read or write a URL, and stand next to those of the same thing on a disk.
FAR = pytest.mark.skipif("memory" not in PLACES, reason="no feature reaches URLs")


class Served(Place):
    """A place on a store that a server plays, with links to it that can be broken."""

    def link(self) -> AbstractContextManager[Proxy]:
        """A link to the server, for as long as the block runs."""
        raise NotImplementedError

    def through(self, link: Proxy) -> Served:
        """The place as it is reached by a link."""
        raise NotImplementedError

    def sends(self, asked: Asked) -> bool:
        """Whether a request sends a part of a file, which nobody sees yet."""
        raise NotImplementedError

    def shows(self, asked: Asked) -> bool:
        """Whether a request has a file appear under its name."""
        raise NotImplementedError

    def unfinished(self) -> list[str]:
        """The names of uploads that are under way, or were left."""
        return []


class PlaceSuite:
    """Conversions from and to a store. A class that inherits this has a fixture `place`."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("model") / "model.pt"
        torch.save(a_model(), path)
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, model: Path) -> Path:
        return converted_here(model)

    def test_any_mix_of_places_gives_the_same_files(
        self, model: Path, plain: Path, place: Place, tmp_path: Path
    ) -> None:
        there = place.put(model, "model.pt")
        for source, is_far in ((str(model), True), (there, False), (there, True)):
            output = place.at(fresh()) if is_far else Place(str(tmp_path), {})
            report = convert(source, f"{output.url}/one.safetensors", storage_options=place.options)
            convert(source, f"{output.url}/dir", max_shard_size=SHARD, storage_options=place.options)
            assert report.bytes_written == (plain / "plain.safetensors").stat().st_size
            found = output.contents() if is_far else contents(tmp_path)
            shards = {f"dir/{name}": data for name, data in contents(plain / "plain").items()}
            assert found == {"one.safetensors": (plain / "plain.safetensors").read_bytes(), **shards}

    @pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
    def test_a_torch_file_is_written_although_its_checksums_come_late(
        self, plain: Path, place: Place, tmp_path: Path
    ) -> None:
        url = place.put(plain / "plain", "plain")
        convert(url, f"{place.url}/back.pt", storage_options=place.options)
        (tmp_path / "back.pt").write_bytes(place.contents()["back.pt"])
        back = torch.load(tmp_path / "back.pt", weights_only=True)
        model = a_model()
        assert back.keys() == model.keys()
        assert all(torch.equal(back[key], tensor) for key, tensor in model.items())
        assert back["tied"].data_ptr() == back["layers.0.weight"].data_ptr()

    def test_a_zero_checkpoint_is_found_through_latest(self, place: Place, tmp_path: Path) -> None:
        for case in ("z3_bf16_w2", "z1_bf16_w2", "z2_bf16_frozen_w2"):
            checkpoint = ZERO / case / "checkpoint"
            url = place.put(checkpoint, case)
            made = place.at(f"{case}-out")
            convert(url, made.url, max_shard_size=300, storage_options=place.options, **VERIFIED)
            convert(checkpoint, tmp_path / case, max_shard_size=300)
            assert made.contents() == contents(tmp_path / case), case

    def test_a_new_output_replaces_an_old_one_whole(
        self, model: Path, plain: Path, place: Place, tmp_path: Path
    ) -> None:
        torch.save({f"w{i}": torch.full((1000,), float(i)) for i in range(9)}, tmp_path / "other.pt")
        convert(tmp_path / "other.pt", place.url, max_shard_size=4000, storage_options=place.options)
        assert "model-00009-of-00009.safetensors" in place.contents()
        place.write("README.md", b"mine")
        convert(model, place.url, max_shard_size=SHARD, storage_options=place.options)
        files = place.contents()
        assert files.pop("README.md") == b"mine"
        assert files == contents(plain / "plain")
        with pytest.raises(FailedError, match="--no-clobber"):
            convert(model, place.url, clobber=False, storage_options=place.options)

    def test_without_an_output_it_goes_beside_the_input(self, model: Path, plain: Path, place: Place) -> None:
        convert(place.put(model, "model.pt"), storage_options=place.options)
        assert place.contents()["model.safetensors"] == (plain / "plain.safetensors").read_bytes()

    def test_what_is_not_there_is_named(self, place: Place) -> None:
        with pytest.raises(UsageError, match=r"nowhere/x\.pt does not exist"):
            convert(f"{place.url}/nowhere/x.pt", "memory://x/out.safetensors", storage_options=place.options)


class ServedSuite(PlaceSuite):
    """The same over links that break. A class that inherits this has a fixture `place` that is `Served`."""

    @pytest.fixture
    def link(self, place: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
        """A link that can be broken, to a server that is not waited for long before it is asked again."""
        monkeypatch.setattr("ckptconv.features.remote.access.WAITS", (0.01,) * 2)
        with place.link() as link:
            yield link

    def test_nothing_appears_before_everything_is_sent_and_the_index_appears_last(
        self, model: Path, place: Served, link: Proxy
    ) -> None:
        convert(model, place.url, max_shard_size=SHARD, storage_options=place.through(link).options)
        sent = [at for at, asked in enumerate(link.asked) if place.sends(asked)]
        shown = [at for at, asked in enumerate(link.asked) if place.shows(asked)]
        assert sent
        assert max(sent) < min(shown)
        assert len(shown) == len(place.contents())
        assert "model.safetensors.index.json" in link.asked[shown[-1]].path

    def test_what_fails_halfway_leaves_nothing_under_a_new_name_and_an_old_output_as_it_was(
        self, model: Path, place: Served, link: Proxy
    ) -> None:
        place.write("old.safetensors", b"old")
        for output in ("new", "old"):
            link.asked.clear()
            link.rule = lambda asked: "403" if place.sends(asked) and sum(map(place.sends, link.asked)) > 1 else ""
            url = f"{place.url}/{output}.safetensors"
            with pytest.raises(FailedError, match=f"{output}.safetensors"):
                convert(model, url, storage_options=place.through(link).options)
            assert sum(map(place.sends, link.asked)) > 1
        assert place.contents() == {"old.safetensors": b"old"}
        assert not place.unfinished()

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_what_is_stopped_halfway_leaves_nothing_and_the_next_run_completes(
        self, number: signal.Signals, model: Path, plain: Path, place: Served, link: Proxy
    ) -> None:
        process = self.uploading(model, place, link)
        process.send_signal(number)
        if number == signal.SIGTERM:
            assert process.stdout is not None
            assert process.stdout.read(1) == "!"
        link.release()
        _, said = process.communicate()
        assert process.wait() == {signal.SIGKILL: -9, signal.SIGTERM: 143}[number], said
        assert not place.contents()
        assert number == signal.SIGKILL or not place.unfinished()
        convert(model, f"{place.url}/out.safetensors", storage_options=place.through(link).options)
        assert place.contents() == {"out.safetensors": (plain / "plain.safetensors").read_bytes()}

    @staticmethod
    def uploading(model: Path, place: Served, link: Proxy) -> Process:
        """A conversion in a process of its own whose second part does not arrive."""
        link.rule = lambda asked: "held" if place.sends(asked) and sum(map(place.sends, link.asked)) > 1 else ""
        words = ("pt2safetensors", model, f"{place.url}/out.safetensors")
        options = json.dumps(place.through(link).options)
        process = prepared().python(HEARING, *words, "--storage-options", options)
        while process.poll() is None and sum(map(place.sends, link.asked)) < 2:
            time.sleep(0.01)
        return process

    @pytest.mark.parametrize("fault", ["drop", "503", "cut", "short", "long"])
    def test_a_fault_that_passes_is_tried_again(
        self, fault: str, model: Path, plain: Path, place: Served, link: Proxy
    ) -> None:
        """Every range is spoiled once; where it is not the answer's body that is, all that sends and shows is too."""
        url = place.put(model, "model.pt")
        of_bodies = ("cut", "short", "long")

        def at_first(asked: Asked) -> str:
            spoiled = asked.reads_range or (fault not in of_bodies and (place.sends(asked) or place.shows(asked)))
            return fault if spoiled and not asked.before else ""

        link.rule = at_first
        convert(url, f"{place.url}/out.safetensors", storage_options=place.through(link).options)
        assert place.contents()["out.safetensors"] == (plain / "plain.safetensors").read_bytes()

    def test_a_lost_answer_to_the_last_request_does_no_harm(
        self, model: Path, plain: Path, place: Served, link: Proxy
    ) -> None:
        """The file is there already when the request is sent once more."""
        link.rule = lambda asked: "lost" if place.shows(asked) and not asked.before else ""
        convert(model, f"{place.url}/out.safetensors", storage_options=place.through(link).options)
        assert place.contents() == {"out.safetensors": (plain / "plain.safetensors").read_bytes()}

    @pytest.mark.parametrize("fault", ["drop", "503", "cut", "short", "long"])
    def test_a_fault_that_stays_is_a_clear_error(self, fault: str, model: Path, place: Served, link: Proxy) -> None:
        url = place.put(model, "model.pt")
        link.rule = lambda asked: fault if asked.range is not None and asked.range[0] > MIB else ""
        with pytest.raises(FailedError, match=r"model\.pt cannot be read"):
            convert(url, f"{place.url}/out.safetensors", storage_options=place.through(link).options)
        assert list(place.contents()) == ["model.pt"]
        assert not place.unfinished()

    def test_what_may_not_be_read_is_not_asked_for_again(self, model: Path, place: Served, link: Proxy) -> None:
        url = place.put(model, "model.pt")
        link.rule = lambda asked: "403" if asked.reads_range else ""
        with pytest.raises(FailedError, match=r"(?i)forbidden|denied|403"):
            convert(url, "memory://never/out.safetensors", storage_options=place.through(link).options)
        assert sum(asked.reads_range for asked in link.asked) == 1

    def test_a_file_that_changes_meanwhile_is_found_out(
        self, model: Path, place: Served, link: Proxy, tmp_path: Path
    ) -> None:
        url = place.put(model, "model.pt")
        torch.save(a_model(seed=1), tmp_path / "other.pt")
        assert (tmp_path / "other.pt").stat().st_size == model.stat().st_size
        replaced: list[str] = []

        def replace(asked: Asked) -> str:
            if asked.range is not None and asked.range[0] > MIB and not replaced:
                replaced.append(place.put(tmp_path / "other.pt", "model.pt"))
            return ""

        link.rule = replace
        with pytest.raises(CorruptError, match="changed while it was read"):
            convert(url, tmp_path / "out.safetensors", storage_options=place.through(link).options)
        assert replaced
        assert not (tmp_path / "out.safetensors").exists()

    def test_opening_a_file_reads_kilobytes_of_it(self, place: Served, link: Proxy, tmp_path: Path) -> None:
        torch.save({"first": torch.zeros(2_000_000), "second": torch.zeros(2_000_000)}, tmp_path / "model.pt")
        url = place.put(tmp_path / "model.pt", "model.pt")
        source = open_source(url, storage_options=place.through(link).options)
        assert [*source.weights] == ["first", "second"]
        assert any(asked.reads_range for asked in link.asked)
        assert link.bytes_asked < 400 * KIB

    def test_a_conversion_reads_little_more_than_it_writes(
        self, model: Path, place: Served, link: Proxy, tmp_path: Path
    ) -> None:
        url = place.put(model, "model.pt")
        report = convert(url, tmp_path / "out.safetensors", storage_options=place.through(link).options)
        assert link.bytes_asked < 1.05 * report.bytes_written
        loaded = load_file(tmp_path / "out.safetensors")
        assert all(name == "tied" or torch.equal(loaded[name], tensor) for name, tensor in a_model().items())


# Says "!" on stdout when a signal has come.
HEARING = """
import os, sys
from ckptconv.cli import main, signals
stop = signals.stop
def stopped(number, frame):
    os.write(1, b"!")
    stop(number, frame)
signals.stop = stopped
main.main(sys.argv[1:])
"""


# ------------------------------------------------------------------------------------------------------------- parts

# A model that is converted to so many shards.
COUNT, SHARD_OF_SIX = 6, 400_000
INDEX, MANIFEST = "model.safetensors.index.json", ".ckptconv-manifest.json"


def of_six(path: Path, count: int = COUNT, value: float | None = None) -> Path:
    """A file of `count` tensors, each of a shard; all of one value, or each of its own."""
    torch.save({f"layer{n}": torch.full((100, 1000), float(n) if value is None else value) for n in range(count)}, path)
    return path


class Output:
    """An output of several shards at a place, made whole or in parts."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.url, self.options = place.url, place.options

    def part(self, model: Path, number: int, count: int = 2, **options: Any) -> Any:
        settings = {"max_shard_size": SHARD_OF_SIX, "storage_options": self.options, **options}
        return convert(model, self.url, part=(number, count), **settings)

    def whole(self, model: Path, **options: Any) -> Any:
        return convert(model, self.url, max_shard_size=SHARD_OF_SIX, storage_options=self.options, **options)

    def finish(self, **options: Any) -> Any:
        from ckptconv import finish

        return finish([self.url], storage_options=self.options, **options)

    def contents(self) -> dict[str, bytes]:
        return self.place.contents()

    def shown(self) -> dict[str, bytes]:
        """What is there under final names."""
        return {name: data for name, data in self.contents().items() if "/" not in name}

    def put(self, name: str, data: bytes) -> None:
        self.place.write(name, data)


def is_model(shown: Mapping[str, bytes]) -> bool:
    """Whether the files that have final names are a model."""
    return INDEX in shown or "model.safetensors" in shown

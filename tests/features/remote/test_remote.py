"""Checkpoints on stores: as any that fsspec opens, and what is asked of a store."""

from __future__ import annotations

import errno
import itertools
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_forked, ckptconv_here, done
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from remote import MIB, a_model
from safetensors.torch import load_file, save_file
from stores import Place, PlaceSuite, in_memory

from ckptconv import convert
from ckptconv.errors import MissingError, UsageError
from ckptconv.features.remote import access, prefetch, stores
from ckptconv.features.remote.prefetch import coalesce
from ckptconv.features.remote.staging import notes
from ckptconv.features.remote.uploads import failure, part_size
from ckptconv.formats.detect import open_source
from ckptconv.storage.reading import Range
from ckptconv.tensors.moves import File


class TestMemory(PlaceSuite):
    @pytest.fixture
    def place(self) -> Place:
        return in_memory()


def test_a_scheme_that_nothing_opens_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    run = ckptconv_here("pt2safetensors", tmp_path / "model.pt", "nosuchscheme://x/out.safetensors")
    run.refused(2, "nosuchscheme")


def test_without_its_feature_a_scheme_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STORES", {**stores.STORES, "lost": "lost"})
    for url in ("lost://bucket/x.pt", "simplecache::lost://bucket/x.pt"):
        for words in (("convert", url, "x.safetensors"), ("convert", "x.pt", url)):
            ckptconv_here(*words).refused(2, "lost:// needs the feature lost, which is not installed")


def test_the_memory_of_a_command_is_no_place_for_an_output(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    for words in (["memory://m/a.safetensors"], [tmp_path / "a.safetensors", "--manifest=memory://m/a.json"]):
        told = ckptconv_forked("convert", tmp_path / "a.pt", *words).refused(2)
        assert "A memory:// URL refers to the memory of this process, which is lost when the command ends" in told
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_an_output_is_not_taken_for_a_remote_input_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "there.pt")
    assert "INPUT comes first. Is it 'there.pt'?" in ckptconv_here("convert", "25.pt", "there.pt").refused(2)
    told = ckptconv_here("convert", "memory://run/25.pt", "there.pt").refused(2)
    assert "memory://run/25.pt does not exist" in told
    assert "INPUT comes first" not in told


def test_an_error_of_the_file_system_of_this_package_stays_what_it_is() -> None:
    with pytest.raises(MissingError, match=r"^gone\.pt does not exist\.$"):
        open_source("ckptconv://model.safetensors", storage_options={"source": "gone.pt"})


def test_a_checkpoint_inside_an_archive_is_read_where_it_is(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        torch.save(a_model(), tmp_path / "model.pt")
        archive.write(tmp_path / "model.pt", "run/model.pt")
    convert(f"zip://run/model.pt::file://{tmp_path}/all.zip", tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert torch.equal(loaded["transposed"], a_model()["transposed"])


def test_an_archive_of_files_is_refused_with_an_address_that_works(place: Path) -> None:
    torch.save({"w": torch.ones(2)}, "a.pt")
    with zipfile.ZipFile("both.zip", "w") as archive, tarfile.open("both.tar.gz", "w:gz") as packed:
        for name in ("a.pt", "b.pt"):
            archive.write("a.pt", name)
            packed.add("a.pt", name)
    ckptconv_here("convert", "both.zip", "x").refused(5, "It contains a.pt, b.pt.", "zip://NAME::both.zip")
    for at, source in enumerate(("zip://b.pt::both.zip", "tar://b.pt::both.tar.gz")):
        done(ckptconv_here("convert", source, f"{at}.safetensors"))
        assert load_file(f"{at}.safetensors")["w"].tolist() == [1, 1]


@pytest.mark.parametrize("top", ["", "hf"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_set_in_an_archive_is_read_by_its_directory_and_by_its_index(kind: str, top: str, place: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.zeros(3)}, "both.safetensors")
    convert("both.safetensors", "set", max_shard_size=12)
    names = [path.name for path in Path("set").iterdir() if not path.name.startswith(".")]
    with zipfile.ZipFile("set.zip", "w") as archive, tarfile.open("set.tar", "w") as packed:
        for name in names:
            archive.write(f"set/{name}", f"{top}/{name}".lstrip("/"))
            packed.add(f"set/{name}", f"{top}/{name}".lstrip("/"))
    # The whole directory is offered if the archive has one that holds all.
    url = f"{kind}://{top or 'NAME'}::set.{kind}"
    ckptconv_here("convert", f"set.{kind}", "x").refused(5, f"one file or directory in it: {url}")
    shard = f"{kind}://{top}/model-00001-of-00002.safetensors::set.{kind}".replace(":///", "://")
    directory, index = (
        f"{kind}://{top}::set.{kind}",
        shard.replace("-00001-of-00002.safetensors", ".safetensors.index.json"),
    )
    ckptconv_here("convert", shard, "x").refused(5, f"Give the directory of the set, {directory}, or its index")
    for at, source in enumerate((directory, index)):
        done(ckptconv_here("convert", source, f"{at}.safetensors"))
        assert load_file(f"{at}.safetensors")["a"].tolist() == [1, 1, 1]


def test_how_an_archive_is_compressed_is_told_by_its_name(place: Path) -> None:
    torch.save({"w": torch.ones(2)}, "a.pt")
    for name in ("packed", "packed.bin"):
        with tarfile.open(name, "w:gz") as packed:
            packed.add("a.pt")
    ckptconv_here("convert", "tar://a.pt::packed", "x").refused(2, "For a local file of that name, use ./packed")
    for name in ("./packed", "packed.bin"):
        told = ckptconv_here("convert", f"tar://a.pt::{name}", "x").refused(1)
        assert "If the archive is compressed, its name must end in .tar.gz" in told


def test_an_archive_that_ends_early_is_not_said_to_have_another_name(place: Path) -> None:
    torch.save({"w": torch.randn(9000)}, "a.pt")
    for name in ("cut.tar", "cut.tar.gz"):
        with tarfile.open(name, "w:gz" if name.endswith(".gz") else "w") as archive:
            archive.add("a.pt")
        Path(name).write_bytes(Path(name).read_bytes()[:20000])
        told = ckptconv_here("convert", f"tar://a.pt::{name}", "x").refused(1, "The archive is incomplete")
        assert "name must end" not in told


class EndpointConnectionError(ConnectionError):
    """botocore's, raised when it has tried several times to connect."""


@pytest.mark.parametrize(("patience", "attempts"), [(60.0, 4), (0.0005, 1)])
def test_a_server_that_cannot_be_connected_to_is_tried_for_a_while(
    patience: float, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "WAITS", (0.001,) * 3)
    monkeypatch.setattr(access, "PATIENCE", patience)
    errors = [EndpointConnectionError() for _ in range(9)]

    def connect() -> None:
        raise errors.pop()

    with pytest.raises(EndpointConnectionError):
        access.retrying(connect)
    assert 9 - len(errors) == attempts


def test_a_connection_that_breaks_is_tried_again_however_long_it_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "WAITS", (0.001,) * 3)
    monkeypatch.setattr(access, "PATIENCE", 0.0)
    errors = [ConnectionResetError(), ConnectionResetError()]

    def read() -> str:
        if errors:
            raise errors.pop()
        return "read"

    assert access.retrying(read) == "read"


# ------------------------------------------------------------------------------------------------ ranges, part sizes


FILES = [File(f"s3://bucket/{name}", 1 << 40) for name in "ab"]


@given(
    st.lists(
        st.tuples(st.sampled_from(FILES), st.integers(0, 1 << 22), st.integers(1, 1 << 16)).map(
            lambda drawn: Range(drawn[0], drawn[1], drawn[1] + drawn[2])
        ),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([1 << 12, 1 << 16, 1 << 22]),
)
@examples(80)
def test_requests_cover_every_range_without_overlap_and_with_little_waste(ranges: list[Range], request: int) -> None:
    extents = coalesce(ranges, request)
    for file in FILES:
        covered = sorted((each.start, each.stop) for each in extents if each.file == file)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(covered))
        for start, stop in merged(ranges, file):
            assert sum(max(min(stop, last) - max(start, first), 0) for first, last in covered) == stop - start
    assert all(0 < each.nbytes < 2 * request or each.nbytes < 2 * request + prefetch.GAP for each in extents)
    # Little more than is wanted is fetched, unless the requests would be tiny.
    wanted = sum(stop - start for file in FILES for start, stop in merged(ranges, file))
    fetched = sum(each.nbytes for each in extents)
    assert fetched <= 1.04 * wanted + prefetch.GAP * len(ranges) or wanted < prefetch.SMALL_REQUEST * len(ranges)


def merged(ranges: list[Range], file: File) -> list[tuple[int, int]]:
    """The bytes of a file that are wanted, each once."""
    found: list[tuple[int, int]] = []
    for _, start, stop in sorted(each for each in ranges if each.file == file):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


@given(st.integers(0, 4 << 40), st.integers(1, 1 << 31))
def test_parts_are_as_many_and_as_large_as_a_store_takes(size: int, memory: int) -> None:
    part = part_size(size, memory)
    assert 5 * MIB <= part <= 5 << 30
    assert -(-size // part) <= 10_000
    if size < 40 << 30:
        assert part <= max(memory // 2, 5 * MIB)


def test_parts_that_are_larger_than_memory_allows_are_told() -> None:
    assert notes([("small", 40 << 30)], 12 * MIB) == []
    (note,) = notes([("small", 40 << 30), ("large", 100 << 30)], 12 * MIB)
    assert note.startswith("large is uploaded in parts of 11")


def test_a_file_that_no_store_takes_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-shard-size"):
        part_size(1 << 50, 8 * MIB)


def test_why_a_store_does_not_take_a_file_is_said() -> None:
    for error, said in (
        (OSError(errno.ENOSYS, "not implemented"), "the server does not support this request. It was not published."),
        (
            FileNotFoundError(),
            "the store has no such location. It was not published. Check that the bucket or container exists.",
        ),
    ):
        assert str(failure("s3://b/x", error)) == f"s3://b/x cannot be written: {said}"

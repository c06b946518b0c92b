"""Deflated storages give what plain ones give, and leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cells import looking
from checkpoints import ckptconv, ckptconv_here, load_with_aliases
from compare import numbers, same
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from processes import open_files
from spooling import MIB, plain_and_expected, spooled, without_nameless

from ckptconv.conversion import convert
from ckptconv.errors import CorruptError, FailedError, LimitError
from ckptconv.features.compressed import unpacking
from ckptconv.formats.torch.file import read_torch
from ckptconv.storage.files import Readers
from ckptconv.tensors.moves import File, Packed


def deflated(source: Path, path: Path, level: int = 6) -> Path:
    """`source` packed again as `zip` does it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return path


both, plain, expected = plain_and_expected()


@pytest.mark.parametrize(("level", "jobs"), [(0, 1), (9, 1), (1, 3)])
def test_a_deflated_archive_is_converted_like_the_plain_one(
    level: int, jobs: int, plain: Path, expected: bytes, tmp_path: Path
) -> None:
    path = deflated(plain, tmp_path / "model.pt", level)
    if level == 1:
        same(read_torch(str(path)).value, torch.load(plain))
    report = convert(path, tmp_path / "out.safetensors", jobs=jobs)
    assert (tmp_path / "out.safetensors").read_bytes() == expected
    # Every byte of the file once, a little of its directory twice, and once more what three tensors are views of.
    assert path.stat().st_size * 0.95 < report.bytes_read < 2 * path.stat().st_size + 70_000
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "out.safetensors"]


@pytest.mark.skipif(shutil.which("zip") is None, reason="zip is not installed")
def test_an_archive_that_the_program_zip_packs(plain: Path, expected: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(plain) as old:
        old.extractall(tmp_path / "unpacked")
    subprocess.run(["zip", "-q", "-r", tmp_path / "packed.pt", "model"], cwd=tmp_path / "unpacked", check=True)
    convert(tmp_path / "packed.pt", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == expected


@given(data=st.data())
@examples(25)
def test_any_tensors(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("any")
    dtypes = data.draw(st.lists(st.sampled_from([torch.uint8, torch.float16, torch.int64]), min_size=1, max_size=5))
    sizes = st.lists(st.integers(0, 70), max_size=2)
    torch.save({str(n): numbers(dtype, *data.draw(sizes)) for n, dtype in enumerate(dtypes)}, directory / "plain.pt")
    deflated(directory / "plain.pt", directory / "model.pt")
    for name in ("plain", "model"):
        convert(directory / f"{name}.pt", directory / f"{name}.safetensors")
    assert (directory / "plain.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_a_copy_of_the_process_unpacks_into_a_file_of_its_own(tmp_path: Path) -> None:
    """Both would put what they unpack next at the same place of one file."""
    contents = [bytes([n]) * 1000 for n in range(3)]
    files = []
    for n, content in enumerate(contents):
        packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        data = packer.compress(content) + packer.flush()
        path = tmp_path / str(n)
        path.write_bytes(data)
        packed = Packed(File(str(path), len(data)), 0, len(data), zlib.crc32(content), "deflate")
        files.append(File(f"{n} unpacked", len(content), "", packed))

    def read(readers: Readers, n: int, start: int, stop: int) -> bool:
        buffer = bytearray(stop - start)
        with readers.reading(files[n]) as reader:
            reader.fill(start, [memoryview(buffer)])
        return buffer == contents[n][start:stop]

    waiting, going = os.pipe()
    with Readers() as readers:
        assert read(readers, 0, 0, 500)
        assert readers.unpacked() == files[0].stored.size
        pid = os.fork()
        if not pid:
            os.read(waiting, 1)
            done = read(readers, 1, 0, 500) and readers.unpacked() == files[1].stored.size
            os._exit(not (done and read(readers, 0, 500, 1000)))
        assert read(readers, 2, 0, 500)
        os.write(going, b"!")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert all(read(readers, n, 500, 1000) for n in (0, 2))
        assert readers.unpacked() == files[2].stored.size
    os.close(waiting)
    os.close(going)


def test_big_endian_storages_are_swapped_after_they_are_unpacked(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5, dtype=torch.int32)}, tmp_path / "little.pt")
    with zipfile.ZipFile(tmp_path / "little.pt") as old:
        members = {name: old.read(name) for name in old.namelist()}
    members["little/byteorder"] = b"big"
    members["little/data/0"] = struct.pack(">5i", *range(5))
    with zipfile.ZipFile(tmp_path / "big.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in members.items():
            new.writestr(name, content)
    for name in ("little", "big"):
        convert(tmp_path / f"{name}.pt", tmp_path / f"{name}.safetensors")
    assert (tmp_path / "little.safetensors").read_bytes() == (tmp_path / "big.safetensors").read_bytes()


def test_only_what_is_used_is_unpacked(plain: Path, tmp_path: Path) -> None:
    path = deflated(plain, tmp_path / "model.pt")
    zeros = read_torch(str(path)).value["zeros"].tensor.file
    damaged = bytearray(path.read_bytes())
    damaged[zeros.packed.offset + 5] ^= 1
    path.write_bytes(damaged)
    for command in looking():
        assert ckptconv_here(command, path).code == 0, command
    assert ckptconv_here("pt2safetensors", path, "--exclude", "zeros").code == 0
    run = ckptconv_here("pt2safetensors", path)
    assert run.code == 4
    assert f"{path}/model/data/1 is damaged" in run.err
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.safetensors"]


def test_archives_whose_checksums_alone_differ_are_told_apart(tmp_path: Path) -> None:
    """A stored storage that is the same in both, and a deflated one that is not."""
    plans = set()
    for fill in (1, 2):
        torch.save({"same": torch.arange(4), "other": torch.full((999,), fill)}, tmp_path / "model.pt")
        with zipfile.ZipFile(tmp_path / "model.pt") as old, zipfile.ZipFile(tmp_path / f"{fill}.pt", "w") as new:
            for info in old.infolist():
                method = zipfile.ZIP_DEFLATED if info.filename == "model/data/1" else zipfile.ZIP_STORED
                new.writestr(info.filename, old.read(info), method)
        plans.add(read_torch(str(tmp_path / f"{fill}.pt")).records.digest())
    assert len(plans) == 2


def test_memory_stays_small_and_does_not_depend_on_the_size(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(24 * MIB, dtype=torch.int32)}, tmp_path / "plain.pt")
    deflated(tmp_path / "plain.pt", tmp_path / "model.pt", 1)
    (tmp_path / "plain.pt").unlink()
    run = ckptconv("pt2safetensors", tmp_path / "model.pt", "--json", "--no-fsync")
    assert run.code == 0, run.err
    assert run.json["peak_rss_bytes"] < 64 * MIB
    assert (tmp_path / "model.safetensors").stat().st_size > 96 * MIB


# ---------------------------------------------------------------------------------------------------- hostile storages


class Member(NamedTuple):
    """A member of an archive as it is written, and as the directory says it is."""

    name: str
    data: bytes
    method: int
    crc: int
    size: int


def archive(members: list[Member]) -> bytes:
    body, directory = b"", b""
    for name, data, method, crc, size in members:
        fields = (20, 0, method, 0, 0, crc, len(data), size, len(name), 0)
        entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, *fields, 0, 0, 0, 0, len(body))
        body += struct.pack("<4s5H3I2H", b"PK\3\4", *fields) + name.encode() + data
        directory += entry + name.encode()
    count = len(members)
    return body + directory + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)


def deflate(data: bytes, level: int = 9) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


CONTENT = struct.pack("<1000f", *range(1000))
GOOD = deflate(CONTENT)
CRC = zlib.crc32(CONTENT)


def checkpoint_of(tmp_path: Path, data: bytes, size: int = 4000, crc: int = CRC, numel: int = 1000) -> Path:
    """A checkpoint whose only storage, of a thousand floats, is `data` and said to be of `size` and `crc`."""
    torch.save({"w": torch.zeros(numel)}, tmp_path / "zeros.pt")
    with zipfile.ZipFile(tmp_path / "zeros.pt") as old:
        pickled = old.read("zeros/data.pkl")
    path = tmp_path / "model.pt"
    description = Member("m/data.pkl", pickled, 0, zlib.crc32(pickled), len(pickled))
    path.write_bytes(archive([description, Member("m/data/0", data, 8, crc, size)]))
    return path


def converted(path: Path) -> str:
    """Why a file cannot be converted; empty if it can."""
    try:
        convert(path, path.with_suffix(".safetensors"))
    except CorruptError as error:
        assert not path.with_suffix(".safetensors").exists()
        return str(error)
    return ""


def test_the_archives_made_here_are_sound(tmp_path: Path) -> None:
    assert converted(checkpoint_of(tmp_path, GOOD)) == ""
    assert load_with_aliases(tmp_path / "model.safetensors")["w"].tolist() == list(range(1000))
    assert converted(checkpoint_of(tmp_path, GOOD, crc=0)) == ""  # not recorded


DAMAGED = {
    "more than is recorded": (deflate(CONTENT + b"\0"), "inflates to more than the 4000 bytes"),
    "a bomb": (deflate(bytes(8 * MIB)), "inflates to more than the 4000 bytes"),
    "less": (deflate(CONTENT[:-1]), "inflates to 3999 bytes, but 4000 bytes are recorded"),
    "unfinished": (GOOD[:-9], "data is cut short, after"),
    "something behind it": (GOOD + b"\0", "data follows its end"),
    "another content": (deflate(CONTENT[::-1]), "its checksum is"),
    "no deflate": (b"\xff" * 900, "cannot be inflated"),
}


@pytest.mark.parametrize(("data", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_storage_that_is_not_what_it_should_be(data: bytes, reason: str, tmp_path: Path) -> None:
    why = converted(checkpoint_of(tmp_path, data))
    assert reason in why
    assert "model.pt/m/data/0" in why
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "zeros.pt"]


def test_what_follows_a_long_storage_ends_the_reading(tmp_path: Path) -> None:
    """zlib keeps what it has not taken: of a storage of several chunks, that is never used up."""
    data = deflate(bytes(4 * MIB)) + b"more"
    assert "data follows its end" in converted(checkpoint_of(tmp_path, data, 4 * MIB, 0, MIB))


@given(data=st.data())
@examples(50)
def test_a_flipped_bit_is_found_wherever_it_is(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    bit = data.draw(st.integers(0, 8 * len(GOOD) - 1))
    flipped = bytearray(GOOD)
    flipped[bit // 8] ^= 1 << bit % 8
    path = checkpoint_of(tmp_path_factory.mktemp("flipped"), bytes(flipped))
    # Some bits of deflate, such as the unused ones at its end, mean nothing.
    with contextlib.suppress(zlib.error):
        if zlib.decompress(flipped, -zlib.MAX_WBITS) == CONTENT:
            assert converted(path) == ""
            return
    assert "model.pt/m/data/0 is damaged" in converted(path)


def test_sizes_that_deflate_cannot_reach_are_refused_unread(tmp_path: Path) -> None:
    size = 4 * (len(GOOD) * 258 + 1)
    path = checkpoint_of(tmp_path, GOOD, size=size, numel=size // 4)
    with pytest.raises(LimitError, match=f"should inflate from {len(GOOD)} to {size} bytes"):
        read_torch(str(path))
    # All zeros come close to the limit.
    zeros = deflate(bytes(4 * MIB))
    assert 4 * MIB / len(zeros) > 1000
    assert converted(checkpoint_of(tmp_path, zeros, 4 * MIB, 0, MIB)) == ""


def test_no_more_is_unpacked_than_there_is_room_for(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = deflated(plain, tmp_path / "model.pt")
    real = os.statvfs

    def full(directory: Any) -> os.statvfs_result:
        values = list(real(directory))
        values[4] = 100  # blocks that are free
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(FailedError, match=r"Unpacking .* needs 2.00 MB, .*--spool-dir"):
        convert(path, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_full_disk_is_told_in_words(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = deflated(plain, tmp_path / "model.pt")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FailedError, match="no space left on device"):
        convert(path, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["model.pt"]


# ------------------------------------------------------------------------------------------------ the temporary file


def test_conversion_needs_no_files_without_names(
    plain: Path, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = deflated(plain, tmp_path / "model.pt")
    without_nameless(monkeypatch)
    convert(path, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == expected


def test_no_descriptor_is_left_open(plain: Path, tmp_path: Path) -> None:
    path = deflated(plain, tmp_path / "model.pt")
    before = open_files()
    convert(path, tmp_path / "out.safetensors")
    assert not open_files() - before


def test_the_directory_to_unpack_into(plain: Path, tmp_path: Path) -> None:
    path = deflated(plain, tmp_path / "model.pt")
    words = ["pt2safetensors", path, tmp_path / "out.safetensors", "--json", "--spool-dir"]
    run = ckptconv_here(*words, tmp_path / "nowhere")
    assert run.code == 2
    assert f"--spool-dir {tmp_path / 'nowhere'} is not a directory" in run.err
    assert os.listdir(tmp_path) == ["model.pt"]
    assert ckptconv_here(*words, tmp_path).json["notes"] == []


def packed_file(content: bytes, path: Path) -> File:
    """A file with this content, deflated in another."""
    path.write_bytes(deflate(content, 1))
    whole = File(str(path), path.stat().st_size)
    return File(f"{path}/content", len(content), "", Packed(whole, 0, whole.size, zlib.crc32(content)))


def test_what_was_read_makes_room_for_what_comes(tmp_path: Path) -> None:
    files = {packed_file(bytes([fill]) * MIB, tmp_path / str(fill)): fill for fill in range(5)}
    before = spooled(os.getpid())
    with Readers(directory=str(tmp_path)) as readers:
        for file, fill in [*files.items(), *files.items()]:
            with readers.reading(file) as reader:
                for at in range(0, MIB, MIB // 4):
                    assert reader.read_at(at, MIB // 4) == bytes([fill]) * (MIB // 4)
        assert spooled(os.getpid()) - before == MIB
        # The second time, all were unpacked again.
        assert readers.bytes_unpacked == 2 * sum(file.packed.nbytes for file in files if file.packed)


@given(data=st.data())
@examples(50)
def test_what_is_read_once_without_a_checksum_is_unpacked_where_it_is_wanted(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytes(range(200))
    checked = packed_file(content, tmp_path_factory.mktemp("packed") / "content")
    assert checked.packed is not None
    file = checked._replace(packed=checked.packed._replace(crc=None))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, 199)))), 200]
    pieces = list(itertools.pairwise(cuts))
    order = data.draw(st.permutations(pieces) | st.lists(st.sampled_from(pieces)) | st.just(pieces))
    most_kept, unpacking.MOST_KEPT = unpacking.MOST_KEPT, data.draw(st.sampled_from([2, 64]))
    written = 0
    try:
        with Readers(directory=str(tmp_path_factory.getbasetemp())) as readers:
            readers.expect({file: len(content)})
            write_at = readers.spool.write_at

            def counted(offset: int, made: bytes | memoryview) -> None:
                nonlocal written
                written += len(made)
                write_at(offset, made)

            readers.spool.write_at = counted  # type: ignore[method-assign]
            for start, stop in order:
                with readers.reading(file) as reader:
                    assert reader.read_at(start, stop - start) == content[start:stop]
    finally:
        unpacking.MOST_KEPT = most_kept
    if order == pieces:
        assert written == 0
    if len(set(order)) == len(order):
        # Where too many ranges were passed over, all is unpacked once more, with those that were kept.
        assert written < 2 * len(content)


def test_many_threads_unpack_a_storage_once(tmp_path: Path) -> None:
    content = numbers(torch.uint8, 3 * MIB).numpy().tobytes()
    file = packed_file(content, tmp_path / "packed")
    wrong: list[int] = []
    with Readers(directory=str(tmp_path)) as readers:

        def read(start: int) -> None:
            for at in range(start, len(content), 5 * 99_991):
                with readers.reading(file) as reader:
                    if reader.read_at(at, 1) != content[at : at + 1]:
                        wrong.append(at)

        threads = [threading.Thread(target=read, args=(start * 99_991,)) for start in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert file.packed is not None
        assert readers.bytes_unpacked == file.packed.nbytes
    assert wrong == []

"""A file is read as torch.load reads it, or refused: archives of every tool, and damaged ones."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.assemble import Member, zipped
from attacks.corpus import DONE, M, P
from attacks.every import ALL
from attacks.readers import READERS, THREE, entry, record, tar
from cells import torch_containers
from checkpoints import ckptconv_here
from compare import same
from effort import every, examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.formats.torch.file import read_torch
from ckptconv.storage import archive as zip_archives
from ckptconv.storage.tar_header import is_tar
from ckptconv.storage.zip_directory import normal

TREE = {"w": torch.arange(6.0).reshape(2, 3), "none": torch.zeros(0), "b": torch.ones(3, dtype=torch.bfloat16)}


def tree_saved(**options: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(TREE, buffer, **options)
    return buffer.getvalue()


def loaded(path: Path) -> Any:
    """What torch.load makes of a file, or its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, weights_only=False)
        except Exception as error:
            return error


# ------------------------------------------------------------------------------------------- what tools and torch write


class Pipe(io.RawIOBase):
    """A file that can only be written, from its beginning to its end."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.file.write(data)


def by_zipfile(data: bytes, out: Any, **options: Any) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            with new.open(info.filename, "w", **options) as member:
                member.write(old.read(info))


def through_a_pipe(data: bytes, path: Path, **options: Any) -> None:
    out = io.BytesIO()
    by_zipfile(data, Pipe(out), **options)
    path.write_bytes(out.getvalue())


def by_zip(*options: str) -> Callable[[bytes, Path], None]:
    def pack(data: bytes, path: Path) -> None:
        if shutil.which("zip") is None:
            pytest.skip("zip is not installed")
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            old.extractall(path.parent / "unpacked")
        command = ["zip", "-q", "-r", *options, "-", "archive"]
        path.write_bytes(
            subprocess.run(command, cwd=path.parent / "unpacked", stdout=subprocess.PIPE, check=True).stdout
        )

    return pack


TOOLS: dict[str, Callable[[bytes, Path], Any]] = {
    "torch": lambda data, path: path.write_bytes(data),
    "zipfile": by_zipfile,
    "zipfile, with zip64 fields": lambda data, path: by_zipfile(data, path, force_zip64=True),
    "zipfile, through a pipe": through_a_pipe,
    "zipfile, through a pipe with zip64 fields": lambda data, path: through_a_pipe(data, path, force_zip64=True),
    "zip, stored": by_zip("-0"),
    "zip, without directories": by_zip("-0", "-D"),
}


@every("pack", TOOLS.values(), ids=TOOLS)
def test_archives_of_every_tool_are_read(pack: Callable[[bytes, Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    pack(tree_saved(), path)
    run = ckptconv_here("pt2safetensors", path, tmp_path / "model.safetensors", "--no-fsync")
    assert run.code == DONE, run.err
    same(read_torch(str(path)).value, loaded(path))


@every("alignment", [64, 4096])
def test_every_alignment_of_storages_is_read(alignment: int, tmp_path: Path) -> None:
    config = pytest.importorskip("torch.utils.serialization").config
    path = tmp_path / "model.pt"
    with config.patch("save.storage_alignment", alignment):
        path.write_bytes(tree_saved())
    same(read_torch(str(path)).value, loaded(path))


def test_what_is_left_out_by_skip_data_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with torch.serialization.skip_data():
        path.write_bytes(tree_saved())
    same(read_torch(str(path)).value, loaded(path))


@every("case", [case for case in ALL if case.family == "readers" and case.exit == DONE])
def test_what_of_the_corpus_is_converted_is_what_torch_reads(case: Any, tmp_path: Path) -> None:
    path = tmp_path / case.file
    path.write_bytes(case.make(""))
    theirs = loaded(path)
    if isinstance(theirs, Exception):
        assert "is not in a subdirectory" in str(theirs)
    else:
        same(read_torch(str(path)).value, theirs)


# ------------------------------------------------------------------------------------------------------------- damage

SOUND = [
    tree_saved(),
    *(tree_saved(**options) for options in torch_containers().values() if options),
    zipped(M),
    zipped(M, comment=b"a comment of some length" * 2),
    tar(THREE),
    tar(entry("x", record("size", "0") + record("mtime", "1.5"), b"x"), THREE),
]


@given(data=st.data())
@examples(80)
def test_what_is_read_of_a_damaged_file_is_what_torch_reads(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes of its structure are changed, put in, taken out, or there twice."""
    damaged = bytearray(data.draw(st.sampled_from(SOUND)))
    for _ in range(data.draw(st.integers(1, 3))):
        marks = [at for at in range(len(damaged)) if damaged.startswith((b"PK", b"ustar", b"\x80\2"), at)] or [0]
        place = data.draw(st.sampled_from(marks)) + data.draw(st.integers(0, 60))
        at = min(place, len(damaged) - 1)
        few = data.draw(st.integers(1, 80))
        match data.draw(st.sampled_from(["change", "case", "put", "take", "twice"])):
            case "change":
                damaged[at] = data.draw(st.sampled_from([0, 1, 8, 0x20, 0x2F, 0x5C, 0xFF]) | st.integers(0, 255))
            case "case":
                damaged[at] ^= 0x20
            case "put":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "take":
                del damaged[at : at + few % 9]
            case _:
                damaged[at:at] = damaged[few : few + 76]
    path = tmp_path_factory.mktemp("damaged") / "m.pt"
    path.write_bytes(damaged)
    try:
        ours = read_torch(str(path)).value
    except CkptconvError:
        return
    theirs = loaded(path)
    if not isinstance(theirs, Exception):
        same(ours, theirs)


@given(data=st.data())
@examples(80)
def test_a_tar_archive_is_what_tarfile_takes_for_one(data: st.DataObject) -> None:
    """By its checksum, whatever the magic, and however that is written."""
    block = bytearray(entry(data.draw(st.binary(max_size=99)), magic=data.draw(st.sampled_from([b"", b"ustar"]))))
    for _ in range(data.draw(st.integers(0, 2))):
        block[data.draw(st.integers(146, 158))] = data.draw(st.sampled_from(b"\0 0123456789+_ox\x80\xff"))
    try:
        tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
    except tarfile.TarError:
        return
    assert is_tar(bytes(block))


@every("name", [b"\x7f\x80", b"\xff"])
def test_the_checksum_of_a_tar_header_may_be_that_of_signed_bytes(name: bytes) -> None:
    header = entry(name, signed=True)
    tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    assert is_tar(header)


# ------------------------------------------------------------------------------------------------- messages and limits


def refusal(content: bytes, tmp_path: Path) -> CkptconvError:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CkptconvError) as caught:
        read_torch(str(path))
    return caught.value


def test_it_is_said_what_is_read_in_two_ways(tmp_path: Path) -> None:
    for file, reason in {
        "end_empty": "the comment contains another end record",
        "zip64_count": "its two end records contradict each other",
        "byte_before": "it begins with 1 unknown bytes,",
        "hole": "100 bytes from byte",
        "name_case_byteorder": "member 'archive/BYTEORDER' is 'archive/byteorder' for other readers",
        "name_nul": "contains a NUL,",
        "name_unicode": "has a different name, 'archive/data/0', for other readers",
        "pickle_in_case_sound": "its data.pkl has the name 'archive/DATA.PKL'",
        "zip_and_tar": "is valid as the beginning of a zip archive and of a tar archive",
    }.items():
        error = refusal(READERS[file].make(""), tmp_path)
        assert isinstance(error, CorruptError), file
        assert reason in error.message, error.message


@every(
    "file, what",
    [
        ("protocol_0", "is a plain pickle"),
        ("protocol_1", "is a plain pickle"),
        ("protocol_0_number", "is a plain pickle"),
    ],
)
def test_pickles_are_called_what_they_are(file: str, what: str, tmp_path: Path) -> None:
    error = refusal(READERS[file].make(""), tmp_path)
    assert isinstance(error, UnsupportedError)
    assert what in error.message
    assert error.hint


def test_a_file_of_text_is_no_pickle(tmp_path: Path) -> None:
    for content in (b"config\nvalues\nmore\n", b"(see below)\n", b"]\n", b"global_step3"):
        assert isinstance(refusal(content, tmp_path), CorruptError)


def test_how_many_members_an_archive_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [*M, *(Member(f"archive/./{number}") for number in range(20))]
    monkeypatch.setattr(zip_archives, "MAX_ODD", 10)
    assert isinstance(refusal(zipped(odd), tmp_path), LimitError)
    monkeypatch.setattr(zip_archives, "MAX_MEMBERS", 3)
    error = refusal(zipped(M), tmp_path)
    assert isinstance(error, LimitError)
    assert "and 4 members; at most" in error.message


@every(
    "given, expected",
    [
        ("data/0", "data/0"),
        ("Data/0", "data/0"),
        ("data\\0", "data/0"),
        ("./data//0", "data/0"),
        ("/data/../0", "data/0"),
        (".data/x..y", ".data/x..y"),
    ],
)
def test_names_as_other_readers_take_them(given: str, expected: str) -> None:
    assert normal(given) == expected


def test_no_file_is_written_beside_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(zipped(M, before=P))
    run = ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors")
    assert run.code == CorruptError.exit_code
    assert os.listdir(tmp_path) == ["x.pt"]

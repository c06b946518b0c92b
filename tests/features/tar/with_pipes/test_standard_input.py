"""A tar archive of other files from standard input: no file in it can be named."""

from __future__ import annotations

from pathlib import Path

from checkpoints import ckptconv_forked
from tar_writer import pack


def test_a_file_in_an_archive_from_standard_input_is_not_offered(tmp_path: Path) -> None:
    archive = pack({"model.pt": b"x"}, tmp_path / "other.tar")
    with archive.open("rb") as file:
        run = ckptconv_forked("convert", "-", tmp_path / "out.safetensors", stdin=file)
    run.refused(5, "<stdin> is a tar archive", "save it as a file and specify one member: tar://NAME::FILE")

"""Copies of small files are compared with those of the source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptconv import DifferenceError, convert, verify

FILES = {
    "config.json": b'{"torch_dtype": "float32"}',
    "tokenizer.json": b"{" + b" " * 300_000 + b"}",
    "vocab.txt": b"",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The directory of a model with its configuration and tokenizer."""
    directory = tmp_path / "source"
    directory.mkdir()
    torch.save({"weight": torch.ones(3)}, directory / "pytorch_model.bin")
    for name, data in FILES.items():
        (directory / name).write_bytes(data)
    return directory


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.txt"])
def test_a_copy_that_differs_is_found(name: str, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", copy_config=True)
    copy = tmp_path / "out" / name
    data = copy.read_bytes()
    for other in (data[:-1] + b"?", data + b" ", None):
        if other is None:
            copy.unlink()
        else:
            copy.write_bytes(other)
        with pytest.raises(DifferenceError, match=name) as caught:
            verify(source, tmp_path / "out")
        if other and len(other) > len(data):
            assert f"has {len(other)} bytes, but" in str(caught.value)
    copy.write_bytes(data)
    verify(source, tmp_path / "out")
    (source / name).unlink()
    with pytest.raises(DifferenceError, match=name):
        verify(source, tmp_path / "out")

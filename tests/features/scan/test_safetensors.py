"""Whole safetensors files, whose first bytes, the length of the header, may be the opcodes of a pickle."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptconv

# Headers below and above the most digits of a number, and the longest pickle that is read at once.
LENGTHS = [256, 5_120, 600_064]
# Without the end of a line, which would end many of the opcodes.
ZEROS = bytes(5 << 20)


def safetensors(length: int, data: bytes) -> bytes:
    """Return a file whose header has `length` bytes, most of them the name of its tensor."""

    def header(name: str) -> bytes:
        return json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()

    return struct.pack("<Q", length) + header("a" * (length - len(header("")))) + data


def every_low_byte(length: int) -> Iterator[int]:
    return iter(range(length, length + 256))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("data", [b"\n\x2b\0" * 100, ZEROS], ids=["lines", "zeros"])
def test_a_safetensors_file_is_safe_whatever_the_length_of_its_header(length: int, data: bytes, tmp_path: Path) -> None:
    # Long files take long, and one of each opcode with a line of text shows the same.
    lows = every_low_byte(length) if len(data) < 1_000 else (length + ord(low) for low in "FILPSVXcgipU\x95(")
    reports = {}
    for size in lows:
        file = tmp_path / "model.safetensors"
        file.write_bytes(safetensors(size, data))
        reports[size & 0xFF] = ckptconv.scan(file)
    # Python reads a line of text of any length, and may go on after it, which is too far to judge.
    unknown = {ord("V")} if len(data) > 1_000 else set()
    assert {low for low, report in reports.items() if report.verdict != "safe"} <= unknown, {
        low: [finding.message for finding in report.files[0].findings] for low, report in reports.items()
    }


@pytest.mark.parametrize("read", [pickle.loads, lambda data: pickle._Unpickler(io.BytesIO(data)).load()])  # type: ignore[attr-defined]
def test_python_runs_nothing_of_such_a_file(read: object) -> None:
    for length in LENGTHS[:2]:
        for size in every_low_byte(length):
            with pytest.raises(Exception):  # noqa: B017, PT011
                read(safetensors(size, b"\n\x2b\0" * 100))  # type: ignore[operator]


@pytest.mark.parametrize("begin", [b"Np1", b"NI1", b"NL1"])
def test_a_number_that_a_null_byte_ends_is_one_to_the_unpickler_in_c(begin: bytes, tmp_path: Path) -> None:
    """Its line goes on to the data, where an attack may follow."""
    length = int.from_bytes(begin.ljust(8, b"\0"), "little")
    attack = b"\ncposix\ngetpid\n(tR."
    data = safetensors(length, attack)
    assert isinstance(pickle.loads(data), int)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert ckptconv.scan(tmp_path / "model.safetensors").verdict == "attack"

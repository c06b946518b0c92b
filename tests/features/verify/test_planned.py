"""An output of a new kind needs no reader to be verified: every byte of it is compared with its plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.errors import DifferenceError
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import kinds, planning
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.targets import Target
from ckptconv.plan import Data, FilePlan, Literal, Part, Trailer
from ckptconv.storage.paths import basename


def sums(crcs: Mapping[str, int]) -> bytes:
    return b"".join(crc.to_bytes(4, "little") for _, crc in sorted(crcs.items()))


def plan(source: Source, target: Target, options: Options) -> planning.Output:
    """A file of the names, then the tensors, then their CRC-32."""
    chosen = selected(source, options)
    tensors = {name: chosen.cast(name) for name in chosen.tensors}
    parts: list[Part] = [Literal(0, "\n".join(tensors).encode())]
    at = parts[0].nbytes
    for name, tensor in tensors.items():
        parts.append(Data(at, tensor, name))
        at += tensor.nbytes
    parts.append(Trailer(at, 4 * len(tensors), sums))
    files = (FilePlan(basename(target.path), at + 4 * len(tensors), tuple(parts)),)
    return planning.output_of(target.holds, [source], target, options, files, {})


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kind = kinds.entry_of("file")._replace(suffixes=(".flat",), compared=".paired", plan=__name__)
    monkeypatch.setitem(kinds.KINDS, "flat", kind)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or SimpleNamespace(plan=plan))
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, tmp_path / "in.safetensors")
    return tmp_path / "out.flat"


def test_it_is_written_and_verified(output: Path) -> None:
    given = output.with_name("in.safetensors")
    ckptconv.convert(given, output, verify=True, checksum=True, dtype="bf16")
    assert output.read_bytes()[:3] == b"a\nb"
    report = ckptconv.verify(given, output, dtype="bf16")
    assert (report.tensors, report.bytes_compared) == (2, 24)
    with pytest.raises(DifferenceError):
        ckptconv.verify(given, output)


def test_no_byte_of_it_goes_unchecked(output: Path) -> None:
    given = output.with_name("in.safetensors")
    ckptconv.convert(given, output)
    whole = output.read_bytes()
    for at in range(len(whole)):
        output.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DifferenceError):
            ckptconv.verify(given, output)
    for other in (whole[:-1], whole + b"\0", b""):
        output.write_bytes(other)
        with pytest.raises(DifferenceError):
            ckptconv.verify(given, output)


def test_its_manifest_gives_its_options_and_is_checked(output: Path) -> None:
    given, manifest = output.with_name("in.safetensors"), output.with_name("manifest.json")
    ckptconv.convert(given, output, manifest=str(manifest), checksum=True, dtype="bf16")
    assert ckptconv.verify(given, output, manifest=str(manifest)).options == {"dtype": "bfloat16"}
    told = json.loads(manifest.read_text())
    told["files"]["out.flat"]["tensors"]["a"] = "00000000"
    manifest.write_text(json.dumps(told))
    with pytest.raises(DifferenceError, match="checksum of 'a'"):
        ckptconv.verify(given, output, manifest=str(manifest))

"""A kind of output that is a directory of its own form, as a feature adds it: by its line in `KINDS`, its entry and its
plan. It has no comparator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cells import VERIFIED, verified, verify, verifying
from effort import every

import ckptconv
from ckptconv import DifferenceError, UsageError
from ckptconv.formats.run_names import TREES
from ckptconv.formats.source import Source
from ckptconv.options.table import OPTIONS, Options
from ckptconv.outputs import kinds, targets
from ckptconv.outputs.kinds import OfFeature, OutputKind
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.targets import MANIFEST, Directory, Target
from ckptconv.plan import Data, FilePlan, Literal

INDEX = "raw.json"
LINE = OfFeature("raw", "weights", to="raw")
WEIGHT = torch.arange(6.0)
STATE = {"a": WEIGHT, "tied": WEIGHT, "turned": WEIGHT.view(2, 3).T, "empty": torch.zeros(0)}


def check(options: Options) -> None:
    if options.key == "no":
        raise UsageError("There is no such key.")


def plan(source: Source, target: Target, options: Options) -> Output:
    chosen = selected(source, options)
    aliases = chosen.aliases()
    tensors = chosen.stored(aliases).items()
    files = [FilePlan(f"{name}.raw", tensor.nbytes, (Data(0, tensor, name),)) for name, tensor in tensors]
    index = json.dumps({name: aliases.get(name, name) for name in chosen.tensors}).encode()
    files.append(FilePlan(INDEX, len(index), (Literal(0, index),)))
    return output_of(target.holds, [source], target, options, tuple(files), aliases)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the line of a feature makes of the tables."""
    module: Any = ModuleType(LINE.module)
    module.plan = plan
    module.KIND = OutputKind(
        "weights", "raw", to="raw", plan=LINE.module, called="a directory of raw bytes", check=check
    )
    module.DIRECTORY = Directory(INDEX, lambda name: name in (INDEX, MANIFEST) or name.endswith(".raw"))
    monkeypatch.setitem(sys.modules, LINE.module, module)
    monkeypatch.setitem(kinds.KINDS, "raw", LINE)
    monkeypatch.setitem(kinds.NAMED, "raw", ("raw",))  # type: ignore[arg-type]
    monkeypatch.setitem(kinds.DIRECTORY_KINDS, "raw", LINE)
    monkeypatch.setitem(targets.DIRECTORIES, "raw", LINE.module)  # type: ignore[arg-type]


def convert(here: Path, **options: Any) -> ckptconv.Report:
    here.mkdir(exist_ok=True)
    torch.save(STATE, here / "x.pt")
    (here / "config.json").write_text("{}")
    return ckptconv.convert(here / "x.pt", here / "out", to="raw", **options)


def test_a_kind_of_a_feature_is_such_a_directory_unless_a_suffix_or_an_option_asks_for_it() -> None:
    for name, kind in kinds.KINDS.items():
        if isinstance(kind, OfFeature):
            form = kinds.entry_of(name).form
            assert (name in kinds.DIRECTORY_KINDS) == (form != "file" and not kind.option), name
            assert form in ("file", *TREES) or targets.directory_of(form), name


def test_it_is_written_written_again_and_compared_with_its_plan(tmp_path: Path) -> None:
    for _ in range(2):
        report = convert(tmp_path, **VERIFIED)
        assert report.aliases == {"tied": "a"}
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {"a.raw", "turned.raw", "empty.raw", INDEX, MANIFEST}
    assert (tmp_path / "out" / "turned.raw").read_bytes() == STATE["turned"].contiguous().numpy().tobytes()
    for verification in verified(tmp_path / "x.pt", tmp_path / "out"):
        assert (verification.tensors, verification.aliases) == (3, {"tied": "a"})


@verifying
@every("fault", ["element", "index", "missing", "more", "manifest"])
def test_verify_finds_a_fault(fault: str, tmp_path: Path) -> None:
    convert(tmp_path / fault)
    out = tmp_path / fault / "out"
    data = bytearray((out / "a.raw").read_bytes())
    if fault == "element":
        (out / "a.raw").write_bytes(bytes([1, *data[1:]]))
    elif fault == "index":
        (out / INDEX).write_bytes((out / INDEX).read_bytes().replace(b"tied", b"tidy"))
    elif fault == "missing":
        (out / "a.raw").unlink()
    elif fault == "more":
        (out / "b.raw").write_bytes(data)
    else:
        (out / MANIFEST).write_text((out / MANIFEST).read_text().replace('"tied"', '"tidy"'))
    with pytest.raises(DifferenceError):
        verify(tmp_path / fault / "x.pt", out)


def test_its_own_check_refuses_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such key"):
        convert(tmp_path, key="no")


@pytest.mark.skipif("copy_config" not in OPTIONS, reason="no file is copied")
def test_no_companion_is_copied_and_the_report_says_so(tmp_path: Path) -> None:
    report = convert(tmp_path, copy_config=True)
    assert not (tmp_path / "out" / "config.json").exists()
    assert any("--copy-config copies nothing: an output of this kind" in text for text in report.warnings)


def test_the_name_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(UsageError, match="a directory of raw bytes is a directory"):
        convert(tmp_path)

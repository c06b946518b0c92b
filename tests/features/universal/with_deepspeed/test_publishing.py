"""Universal checkpoints are made, named, resumed and verified like every output."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, looking, of_features, verified, verified_here, verify, verifying
from checkpoints import ZERO, ckptconv_here, done, widened
from effort import every
from format_suite import FormatSuite
from processes import AT_SHARD, contents, dying, in_child
from safetensors.torch import load_file
from stores import MANIFEST, PLACES, Output

import ckptconv
from ckptconv import convert
from ckptconv.errors import DifferenceError
from ckptconv.options.table import OPTIONS


def difference(*outputs: Any, **more: Any) -> Any:
    """What differs, which has to be found."""
    with pytest.raises(DifferenceError) as found:
        verify(*outputs, **more)
    return found.value.difference


def flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def test_the_pointer_to_a_universal_checkpoint_is_told_of_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = ZERO / "z3_bf16_w2" / "checkpoint"
    for out in ("run_universal", "at/step_universal/"):
        Path(out).parent.mkdir(exist_ok=True)
        asked = ["zero-to-fp32", source, "--universal", out]
        whole = done(ckptconv_here(*asked, "--json")).json["outputs"]
        if "part" in OPTIONS:
            done(ckptconv_here(*asked, "--part", "0/1"))
            assert done(ckptconv_here("finish", out, "--json")).json["outputs"] == whole
        (pointer,) = [output["path"] for output in whole if output["path"].endswith("latest_universal")]
        assert pointer == os.path.join(os.path.dirname(out.rstrip("/")), "latest_universal")
        assert Path(pointer).read_text() == Path(out).name
        verified_here(source, "--universal", out)


@pytest.mark.parametrize("parts", [False, True] if "part" in OPTIONS else [False])
def test_a_universal_checkpoint_behind_a_link_is_named_beside_itself(parts: bool, tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2" / "checkpoint"
    (tmp_path / "disk" / "step9_universal").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "link"
    link.symlink_to("../disk/step9_universal")
    run = done(ckptconv_here("zero-to-fp32", source, "--universal", link, *(["--part", "0/1"] if parts else [])))
    run = done(ckptconv_here("finish", link)) if parts else run
    assert str(tmp_path / "disk" / "latest_universal") in run.out
    assert (tmp_path / "disk" / "latest_universal").read_text() == "step9_universal"
    assert os.listdir(tmp_path / "run") == ["link"]
    verified_here(source, "--universal", link)
    for command in looking():
        done(ckptconv_here(command, tmp_path / "disk"))


@verifying
@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
@pytest.mark.parametrize("place", PLACES)
def test_it_is_made_in_parts_on_a_store_and_named_last(place: str, tmp_path: Path) -> None:
    store = Output(PLACES[place]())
    torch.save({"weight": torch.ones(2, 3)}, tmp_path / "m.pt")
    settings: dict[str, Any] = {"universal": f"{store.url}/step3", "storage_options": store.options}
    for part in ("0/2", "1/2"):
        convert(tmp_path / "m.pt", part=part, **settings)
        assert "latest_universal" not in store.contents()
    ckptconv.finish(settings["universal"], storage_options=store.options)
    before = store.contents()
    assert before["latest_universal"] == b"step3"
    assert not [name for name in before if ".record-" in name or ".plan" in name]
    assert verify(tmp_path / "m.pt", **settings).tensors == 5
    convert(tmp_path / "m.pt", zero_stage=3, **settings)  # it has other files
    gone = before.keys() - store.contents().keys()
    assert gone == {"step3/zero/weight/step.pt", "step3/mp_rank_00_model_states.pt"}


@pytest.mark.skipif("depfile" not in OPTIONS, reason="there are no rules for make")
def test_what_names_it_is_an_input(tmp_path: Path) -> None:
    done(ckptconv_here("zero-to-fp32", ZERO / "z3_bf16_w2/checkpoint", "--universal", tmp_path / "step_universal"))
    done(ckptconv_here("zero-to-fp32", tmp_path, tmp_path / "again", "--depfile", tmp_path / "again.d"))
    assert str(tmp_path / "latest_universal") in (tmp_path / "again.d").read_text().split()


@verifying
@pytest.mark.parametrize("case", ["z2_bf16_w2", "z3_bf16_w2"])
def test_what_differs_is_named(case: str, tmp_path: Path) -> None:
    source = ZERO / case / "checkpoint"
    outputs = {"optimizer": str(tmp_path / "states.safetensors"), "universal": str(tmp_path / "steps/universal")}
    (tmp_path / "steps").mkdir()
    convert(source, tmp_path / "model", **VERIFIED, **outputs)
    verified(source, tmp_path / "model", **outputs)
    parameter = tmp_path / "steps/universal/zero/l1.weight/exp_avg.pt"
    data = parameter.read_bytes()
    sign = data.index(struct.pack("<f", torch.load(parameter)["param" if "z2" in case else ...].flatten()[5].item()))
    flip(parameter, sign + 3, 7)
    found = difference(source, tmp_path / "model", **outputs)
    assert found["file"] == str(parameter)
    parameter.write_bytes(data)
    (parameter.parent / "more.pt").write_bytes(b"")
    assert difference(source, tmp_path / "model", **outputs)["file"].endswith("more.pt")


def test_a_tree_that_cannot_be_put_in_its_place_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = ZERO / "z3_bf16_w2/checkpoint", tmp_path / "u"
    done(ckptconv_here("zero-to-fp32", ZERO / "z2_bf16_w2/checkpoint", "--universal", out))
    before = contents(out)
    usual = os.rename
    calls = [0]

    def rename(*arguments: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(5, "Input/output error")
        usual(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        assert ckptconv_here("zero-to-fp32", source, "--universal", out).code == 1
    assert contents(out) == before

    def killed() -> None:
        at = iter(range(9))
        os.rename = lambda *names, **options: (  # type: ignore[assignment]
            os.kill(os.getpid(), signal.SIGKILL) if next(at) == 1 else usual(*names, **options)
        )
        ckptconv.convert(source, universal=str(out))

    assert in_child(killed) == -signal.SIGKILL
    assert not out.exists()
    # Whoever comes next puts the earlier one back before it begins.
    full = type("Full", (), {"f_bavail": 0, "f_frsize": 1})()
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        assert ckptconv_here("zero-to-fp32", ZERO / "z3_fp32_w4/checkpoint", "--universal", out).code == 1
    assert contents(out) == before
    done(ckptconv_here("zero-to-fp32", source, "--universal", out))
    verified_here(source, "--universal", out)
    assert {path.name for path in tmp_path.iterdir()} == {"u", "latest_universal"}


def test_a_universal_checkpoint_does_not_replace_the_directory_that_it_is_made_of(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(ZERO / "z2_bf16_w2/checkpoint", tmp_path / "checkpoint"))
    before = contents(checkpoint)
    (checkpoint / "zero").mkdir()
    run = ckptconv_here("zero-to-fp32", checkpoint, "--universal", checkpoint)
    assert run.code == 2
    assert contents(checkpoint) == before


def test_its_directories_and_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        done(ckptconv_here("zero-to-fp32", ZERO / "z3_bf16_w2/checkpoint", "--universal", tmp_path / "u"))
    finally:
        os.umask(before)
    for path in (tmp_path / "u", *(tmp_path / "u").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_its_files_have_digests(tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2" / "checkpoint"
    convert(source, digest="sha256", universal=tmp_path / "step_u")
    told = json.loads((tmp_path / "step_u" / MANIFEST).read_text())["files"]
    for name, entry in told.items():
        path = tmp_path / name if name == "latest_universal" else tmp_path / "step_u" / name
        assert entry["digests"]["file"] == hashlib.sha256(path.read_bytes()).hexdigest()
    verified(source, universal=tmp_path / "step_u")


def test_a_universal_checkpoint_goes_on_too(tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2" / "checkpoint"
    expected, out = tmp_path / "expected" / "u", tmp_path / "out" / "u"
    for path in (expected, out):
        path.parent.mkdir()
    assert ckptconv_here("zero-to-fp32", source, "--universal", expected).code == 0
    at_file = AT_SHARD.replace('"{0}" in name', "len(begun) == {0}").format(7, "SIGKILL")
    done = dying(at_file, "zero-to-fp32", source, "--universal", out)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert ckptconv_here("zero-to-fp32", source, "--universal", out, "--json").json["reused"] == 7
    one, other = (
        {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        for place in (expected.parent, out.parent)
    )
    assert one == other
    assert {path.name for path in out.parent.iterdir()} == {"u", "latest_universal"}


@every("source, name", [case for cases in of_features("QUANTIZED_MODELS") for case in cases])
def test_products_of_quantized_weights_are_in_float32(source: Path, name: str, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", dequantize=True, universal=tmp_path / "universal", **VERIFIED)
    made = torch.load(tmp_path / "universal" / "zero" / name / "fp32.pt", weights_only=True)["param"]
    assert made.dtype == torch.float32
    expected = load_file(source / "expected.safetensors")[name]
    assert torch.equal(made.reshape(expected.shape).bfloat16(), expected)


def test_a_universal_checkpoint_is_told_of_in_a_few_lines(tmp_path: Path) -> None:
    run = done(
        ckptconv_here("zero-to-fp32", ZERO / "z3_fp32_w4/checkpoint", "--universal", tmp_path / "step_universal")
    )
    assert len(run.out.splitlines()) < 10
    assert f"files in {tmp_path / 'step_universal'} (" in run.out


def test_what_others_put_into_it_stays(tmp_path: Path) -> None:
    source, out = ZERO / "z3_bf16_w2" / "checkpoint", tmp_path / "u"
    done(ckptconv_here("zero-to-fp32", source, "--universal", out))
    (out / "notes.md").write_text("mine")
    before = contents(out)
    for words in ([], ["--overwrite"]):
        ckptconv_here("zero-to-fp32", source, "--universal", out, *words).refused(2, "notes.md")
    assert contents(out) == before


class TestUniversal(FormatSuite):
    command, family = "zero-to-fp32", "deepspeed"
    weights = "fp32.pt"

    def write(self, place: Path) -> Path:
        universal = place / "global_step_universal"
        done(ckptconv_here("zero-to-fp32", ZERO / "z3_fp32_w4/checkpoint", "--universal", universal))
        return universal

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        expected = load_file(ZERO / "z3_fp32_w4/expected.safetensors")
        return {name: widened(tensor) for name, tensor in expected.items()}

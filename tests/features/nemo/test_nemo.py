"""Models of NeMo, packed as its connector packs them, and as nobody should."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cells import naming_attacks
from checkpoints import ckptconv_here, done
from effort import every
from format_suite import FormatSuite
from safetensors.torch import load_file

STATE = {f"layer{number}": torch.full((250, 300), float(number)) for number in (1, 2)}
STATE["tied"] = STATE["layer1"]


def saved(state: Any = STATE) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def packed(path: Path, mode: str = "w:", **members: bytes) -> Path:
    """Pack a directory as NeMo does: all that is in it, as `.`."""
    folder = path.parent / "packed"
    for name, data in members.items():
        file = folder / name.replace("__", "/").replace("_ckpt", ".ckpt").replace("_yaml", ".yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        archive.add(folder, arcname=".")
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()
    return path


class TestNemo(FormatSuite):
    command, family = "convert", "nemo"

    def write(self, place: Path) -> Path:
        return packed(place / "model.nemo", model_weights_ckpt=saved(), model_config_yaml=b"target: x\n")

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        with tarfile.open(checkpoint) as archive:
            weights = archive.extractfile("./model_weights.ckpt")
            assert weights
            return torch.load(io.BytesIO(weights.read()), weights_only=True)  # type: ignore[no-any-return]


class TestGzip(TestNemo):
    command = "pt2safetensors"

    def write(self, place: Path) -> Path:
        torch.manual_seed(0)
        noise = {name: tensor + torch.rand(tensor.shape) for name, tensor in STATE.items()}
        return packed(place / "model.nemo", "w:gz", model_weights_ckpt=saved(noise), model_config_yaml=b"target: x\n")


def test_what_is_beside_the_weights_is_named_and_checksums_are_checked(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.nemo", model_weights_ckpt=saved(), model_config_yaml=b"target: x\n")
    run = done(ckptconv_here("convert", path, tmp_path / "x.safetensors", "--checksum"))
    assert "not read in" in run.out
    assert "model_config.yaml" in run.out
    assert load_file(tmp_path / "x.safetensors").keys() == {"layer1", "layer2"}
    data = bytearray(path.read_bytes())
    data[200_000] ^= 1
    path.write_bytes(data)
    ckptconv_here("convert", path, tmp_path / "y.safetensors", "--checksum").refused(4, "has changed")


@every(
    "members, words",
    [
        ({"model_config_yaml": b""}, "it has no model_weights.ckpt, but contains model_config.yaml"),
        ({"mp_rank_00__model_weights_ckpt": saved()}, "model-parallel ranks: mp_rank_00/model_weights.ckpt"),
        ({"model_weights__metadata.json": b"{}"}, "its weights are a"),
        ({"model_weights_ckpt": b"x"}, "not a zip archive of torch.save"),
    ],
)
def test_weights_that_are_elsewhere_are_named(members: dict[str, bytes], words: str, tmp_path: Path) -> None:
    for mode in ("w:", "w:gz"):
        path = packed(tmp_path / "x.nemo", mode, **members)
        ckptconv_here("convert", path, tmp_path / "x.safetensors").refused(5, words, "tar -xf")


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE) -> tuple[tarfile.TarInfo, bytes]:
    found = tarfile.TarInfo(name)
    found.size, found.type = len(data), kind
    found.linkname = "/etc/passwd" if kind == tarfile.SYMTYPE else ""
    return found, data


@every(
    "members, words",
    [
        (
            [member("model_weights.ckpt", saved()), member("./model_weights.ckpt", saved())],
            "two members with the same name, one of them with a leading './'.",
        ),
        ([member("model_weights.ckpt", saved()), member("model_weights.ckpt", saved())], "two members named"),
        ([member("model_weights.ckpt", kind=tarfile.SYMTYPE)], "is not a plain file"),
        ([member("model_weights.ckpt", saved()[:-30])], "In its model_weights.ckpt"),
    ],
)
def test_archives_with_two_readings_are_refused(
    members: list[tuple[tarfile.TarInfo, bytes]], words: str, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "x.nemo", "w:") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    plain = (tmp_path / "x.nemo").read_bytes()
    for data in (plain, gzip.compress(plain, 1)):
        (tmp_path / "x.nemo").write_bytes(data)
        ckptconv_here("convert", tmp_path / "x.nemo", tmp_path / "x.safetensors").refused(4, words)


def test_what_is_cut_or_no_gzip_is_refused(tmp_path: Path) -> None:
    plain = packed(tmp_path / "x.nemo", model_weights_ckpt=saved()).read_bytes()
    small = gzip.compress(plain, 1)
    for data, words in (
        (plain[:-20_000], "it was cut short"),
        (small[:-9], "x.nemo"),
        (small[:12], "it was cut short"),
        (small[:9], "a gzip header."),
        (small[:3] + b"\xff" + small[4:], "a gzip header."),
        (small[:-8] + bytes(4) + small[-4:], "x.nemo"),
        (small + small, "x.nemo"),
    ):
        (tmp_path / "x.nemo").write_bytes(data)
        ckptconv_here("convert", tmp_path / "x.nemo", tmp_path / "x.safetensors").refused(4, words)


@naming_attacks
def test_an_attack_in_it_is_one(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return eval, ("print('this must never be printed')",)

    for mode in ("w:", "w:gz"):
        path = packed(tmp_path / "x.nemo", mode, model_weights_ckpt=saved({"w": torch.ones(2), "x": Attack()}))
        run = ckptconv_here("convert", path, tmp_path / "x.safetensors")
        run.refused(3, "it calls __builtin__.eval")
        assert "never" not in run.out

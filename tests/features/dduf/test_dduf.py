"""Pipelines in one file, as huggingface_hub writes them, and as nobody should."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from cells import VERIFY
from checkpoints import ckptconv_here, done
from effort import every
from format_suite import FormatSuite
from huggingface_hub import export_entries_as_dduf, read_dduf_file
from safetensors.torch import load_file

INDEX = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "U"], "vae": ["diffusers", "V"]}
UNET = {f"layer{number}": torch.full((250, 300), float(number)) for number in (1, 2)}
VAE = {"conv": torch.arange(6.0).reshape(2, 3).bfloat16()}


def entries(index: Any = INDEX, **others: bytes) -> list[tuple[str, bytes]]:
    return [
        ("model_index.json", json.dumps(index).encode()),
        ("unet/config.json", b"{}"),
        ("unet/diffusion_pytorch_model.safetensors", safetensors.torch.save(UNET)),
        ("vae/config.json", b"{}"),
        ("vae/diffusion_pytorch_model.safetensors", safetensors.torch.save(VAE)),
        *((name.replace("__", "/"), data) for name, data in others.items()),
    ]


class TestDduf(FormatSuite):
    command, family = "convert", "dduf"

    def write(self, place: Path) -> Path:
        export_entries_as_dduf(place / "model.dduf", entries())
        return place / "model.dduf"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        found = {}
        for name, entry in read_dduf_file(checkpoint).items():
            if name.endswith(".safetensors"):
                with entry.as_mmap() as data:
                    found.update(
                        {f"{name.split('/')[0]}/{own}": each for own, each in safetensors.torch.load(data).items()}
                    )
        return found


def test_one_of_its_models_is_chosen_by_its_folder(tmp_path: Path) -> None:
    export_entries_as_dduf(tmp_path / "x.dduf", entries())
    options = ("--include", "vae/*", "--strip-prefix", "vae/", "--checksum", *VERIFY)
    done(ckptconv_here("convert", tmp_path / "x.dduf", tmp_path / "vae.safetensors", *options))
    assert load_file(tmp_path / "vae.safetensors")["conv"].equal(VAE["conv"])


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    export_entries_as_dduf(tmp_path / "x.dduf", entries())
    data = bytearray((tmp_path / "x.dduf").read_bytes())
    data[5000] ^= 1
    (tmp_path / "x.dduf").write_bytes(data)
    ckptconv_here("convert", tmp_path / "x.dduf", tmp_path / "x", "--checksum").refused(4, "has changed")


@every(
    "index, others, method, words",
    [
        (INDEX, {}, zipfile.ZIP_DEFLATED, "is compressed, but DDUF stores members uncompressed."),
        ([], {}, zipfile.ZIP_STORED, "its model_index.json is not a JSON object"),
        ({"unet": []}, {}, zipfile.ZIP_STORED, "'vae/config.json' is not allowed in DDUF."),
        (INDEX, {"unet__x.bin": b""}, zipfile.ZIP_STORED, "'unet/x.bin' is not allowed in DDUF."),
        (INDEX, {"unet__in__x.txt": b""}, zipfile.ZIP_STORED, "'unet/in/x.txt' is not allowed in DDUF."),
        (
            INDEX,
            {"vae__b.safetensors": safetensors.torch.save(VAE)},
            zipfile.ZIP_STORED,
            "two of its files contain 'vae/conv'",
        ),
        (INDEX, {"vae__b.safetensors": safetensors.torch.save(VAE)[:-2]}, zipfile.ZIP_STORED, "'vae/b.safetensors': "),
        (INDEX, {"vae__b.safetensors": safetensors.torch.save(VAE) + b"x"}, zipfile.ZIP_STORED, "has 13"),
        (INDEX, {"vae__b.safetensors": b"\xff" * 9}, zipfile.ZIP_STORED, "'vae/b.safetensors': "),
        (INDEX, {"VAE__conFig.json": b"", "vae__CONFIG.json": b""}, zipfile.ZIP_STORED, "x.dduf"),
    ],
)
def test_what_no_pipeline_has_is_refused(
    index: Any, others: dict[str, bytes], method: int, words: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "x.dduf", "w", method) as archive:
        for name, data in entries(index, **others):
            archive.writestr(name, data)
    run = ckptconv_here("convert", tmp_path / "x.dduf", tmp_path / "x.safetensors")
    assert run.code in (4, 5), run.err
    run.refused(run.code, "x.dduf", words)


def test_an_archive_without_an_index_or_cut_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "none.dduf", "w") as archive:
        archive.writestr("unet/config.json", "{}")
    ckptconv_here("convert", tmp_path / "none.dduf", tmp_path / "x").refused(4, "no member 'model_index.json'")
    export_entries_as_dduf(tmp_path / "cut.dduf", entries())
    (tmp_path / "cut.dduf").write_bytes((tmp_path / "cut.dduf").read_bytes()[:-40])
    ckptconv_here("convert", tmp_path / "cut.dduf", tmp_path / "x").refused(4, "the file was cut short")

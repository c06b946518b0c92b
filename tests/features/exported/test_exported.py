"""Archives of torch.export, as torch writes them, as it once wrote them, and as nobody should."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED
from checkpoints import ckptconv_here, done
from effort import every
from format_suite import FormatSuite
from safetensors.torch import load_file
from torch import nn

import ckptconv

CONFIG = "data/weights/model_weights_config.json"


class Model(nn.Module):
    """Weights that share storages, in part too, of several dtypes; and buffers. One may be `turned`."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(300, 250)
        self.second = nn.Linear(300, 250)
        self.second.weight = self.first.weight
        whole = torch.arange(24.0).reshape(4, 6)
        self.rows, self.turned = nn.Parameter(whole[1:3]), nn.Parameter(whole.t() if turned else whole)
        self.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all of them."""
        used = self.rows.sum() + self.turned.sum() + self.small.sum() + self.count + self.none.sum()
        return self.first(x) + self.second(x) + used


@pytest.mark.filterwarnings("ignore")
def export(path: Path, model: nn.Module | None = None) -> Path:
    torch.manual_seed(0)
    torch.export.save(torch.export.export(model or Model(), (torch.ones(1, 300),)), path)
    return path


class TestExported(FormatSuite):
    command, family = "convert", "exported"

    def write(self, place: Path) -> Path:
        return export(place / "model.pt2")

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return {name: each.detach() for name, each in torch.export.load(checkpoint).state_dict.items()}


class TestOlder(TestExported):
    """As torch 2.1 to 2.6 wrote them: a file of torch.save in a zip archive of Python's."""

    command = "pt2safetensors"

    def write(self, place: Path) -> Path:
        state = io.BytesIO()
        torch.save(Model().state_dict(), state)
        with zipfile.ZipFile(place / "model.pt2", "w") as archive:
            archive.writestr("serialized_exported_program.json", "{}")
            archive.writestr("serialized_state_dict.pt", state.getvalue())
            archive.writestr("version", "8.1")
        return place / "model.pt2"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        with zipfile.ZipFile(checkpoint) as archive:
            return torch.load(io.BytesIO(archive.read("serialized_state_dict.pt")))  # type: ignore[no-any-return]


def test_tied_weights_are_stored_once_and_checksums_are_checked(tmp_path: Path) -> None:
    export(tmp_path / "x.pt2")
    report = ckptconv.convert(tmp_path / "x.pt2", tmp_path / "x.safetensors", checksum=True, **VERIFIED, fsync=False)
    assert report.aliases == {"second.weight": "first.weight"}
    data = bytearray((tmp_path / "x.pt2").read_bytes())
    data[5000] ^= 1
    (tmp_path / "x.pt2").write_bytes(data)
    ckptconv_here("convert", tmp_path / "x.pt2", tmp_path / "y", "--checksum").refused(4, "has changed")


def test_weights_of_any_layout_come_out(tmp_path: Path) -> None:
    model = Model(turned=True)
    ckptconv.convert(export(tmp_path / "x.pt2", model), tmp_path / "x.safetensors", **VERIFIED, fsync=False)
    assert load_file(tmp_path / "x.safetensors")["turned"].equal(model.turned)


Changed = Callable[[dict[str, Any]], object]


def meta(**changed: Any) -> Changed:
    return lambda told: told["rows"]["tensor_meta"].update(changed)


def sizes(*numbers: int) -> list[dict[str, int]]:
    return [{"as_int": number} for number in numbers]


@every(
    "change, code, words",
    [
        (lambda told: told["rows"].update(use_pickle=True), 5, "'rows' is stored as an object"),
        (lambda told: told["rows"].update(tensor_meta=None), 5, "'rows' is stored as an object"),
        (lambda told: told["rows"].update(path_name="../x"), 4, "'path_name'"),
        (lambda told: told["rows"].update(path_name="weight_99"), 4, "weight_99, which the archive does not contain"),
        (lambda told: told["rows"].update(other=1), 4, "'other', which is not known"),
        (meta(layout=1), 5, "'rows' is stored as an object"),
        (meta(dtype=77), 5, "'rows' is stored as an object"),
        (meta(dtype=4), 4, "but another weight in weight_"),
        (meta(sizes=sizes(4, 7)), 4, "ends at element"),
        (meta(sizes=sizes(2)), 4, "an invalid layout:"),
        (meta(sizes=[{"as_expr": "s0"}]), 4, "lacks 'as_int'"),
        (meta(strides=sizes(1 << 40, 1)), 4, "ends at element"),
        (meta(storage_offset={"as_int": -1}), 4, "is not a count"),
    ],
)
def test_weights_that_are_not_what_they_should_be_are_refused(
    change: Changed, code: int, words: str, tmp_path: Path
) -> None:
    if not (tmp_path / "../sound.pt2").exists():
        export(tmp_path / "../sound.pt2")
    with zipfile.ZipFile(tmp_path / "../sound.pt2") as sound, zipfile.ZipFile(tmp_path / "x.pt2", "w") as archive:
        for name in sound.namelist():
            data = sound.read(name)
            if name.endswith(CONFIG):
                told = json.loads(data)
                change(told["config"])
                data = json.dumps(told).encode()
            archive.writestr(name, data)
    ckptconv_here("convert", tmp_path / "x.pt2", tmp_path / "x.safetensors").refused(code, "x.pt2", words)


def written(path: Path, members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


@every(
    "members, code, words",
    [
        ({"x/archive_format": b"pt2", "x/data/aotinductor/model/a.so": b""}, 5, "contains no weights"),
        (
            {"x/archive_format": b"pt2", f"x/{CONFIG}": b"{}", "x/data/weights/b_weights_config.json": b"{}"},
            5,
            "b_weig",
        ),
        ({"x/archive_format": b"pt2", f"x/{CONFIG}": b"[]"}, 4, "it is not an object"),
        ({"x/archive_format": b"pt2", f"x/{CONFIG}": b'{"config": {"a": 1, "a": 1}}'}, 4, "'a' twice"),
        ({"x/archive_format": b"pt2", f"x/{CONFIG}": b'{"config": {}}', "x/byteorder": b"big"}, 5, "big-endian"),
        ({"serialized_state_dict.pt": b"cut"}, 4, "In member 'serialized_state_dict.pt'"),
    ],
)
def test_archives_without_weights_are_refused(
    members: Mapping[str, bytes], code: int, words: str, tmp_path: Path
) -> None:
    written(tmp_path / "x.pt2", members)
    ckptconv_here("convert", tmp_path / "x.pt2", tmp_path / "x.safetensors").refused(code, words)


def test_an_attack_in_an_older_archive_is_one(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return print, ("this must never be printed",)

    state = io.BytesIO()
    torch.save({"w": torch.ones(2), "x": Attack()}, state)
    for method, words in ((zipfile.ZIP_STORED, "not a state dict of tensors"), (zipfile.ZIP_DEFLATED, "is compressed")):
        written(tmp_path / "x.pt2", {"serialized_state_dict.pt": state.getvalue()}, method)
        run = ckptconv_here("convert", tmp_path / "x.pt2", tmp_path / "x.safetensors")
        run.refused(5, words)
        assert "printed" not in run.out


def test_an_archive_that_is_cut_is_refused(tmp_path: Path) -> None:
    done(ckptconv_here("convert", export(tmp_path / "x.pt2"), tmp_path / "whole"))
    (tmp_path / "x.pt2").write_bytes((tmp_path / "x.pt2").read_bytes()[:-50])
    ckptconv_here("convert", tmp_path / "x.pt2", tmp_path / "x").refused(4, "the file was cut short")

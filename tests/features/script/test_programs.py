"""The code in a TorchScript archive: read once, and never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks.assemble import Member, mapped, members, name, pickled, tensor, text, zipped

from ckptconv.errors import UnsupportedError
from ckptconv.features.script import weights as torch_script
from ckptconv.formats.torch.file import read
from ckptconv.storage.location import Location


def module(kind: str, *state: bytes) -> bytes:
    """The opcodes of a module of a script."""
    return name("__torch__", kind) + b")\x81" + mapped(*state) + b"b"


def script(path: Path, root: bytes, code: str) -> str:
    constants, source = Member("archive/constants.pkl", b"\x80\2)."), Member("archive/code/__torch__.py", code.encode())
    path.write_bytes(zipped([*members(pickled(root)), constants, source]))
    return str(path)


def test_the_code_of_a_script_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many modules it describes."""
    kinds = [f"M{number}" for number in range(50)]
    code = "".join(f'class {kind}(Module):\n  __parameters__ = ["w", ]\n  __buffers__ = []\n' for kind in kinds)

    inner = [part for kind in kinds[1:] for part in (text(kind), module(kind, text("w"), tensor()))]
    path = script(tmp_path / "script.pt", module("M0", *inner), code)
    files: list[str] = []
    plain = torch_script.modules_in
    monkeypatch.setattr(torch_script, "modules_in", lambda code: files.append(code) or plain(code))
    assert len(read(Location(str(path))).weights) == 49
    assert len(files) == 1


def test_modules_nested_without_end_are_refused(tmp_path: Path) -> None:
    root = module("M")
    for _ in range(3000):
        root = module("M", text("a"), root)
    path = script(tmp_path / "deep.pt", root, "class M(Module):\n  __parameters__ = []\n  __buffers__ = []\n")
    with pytest.raises(UnsupportedError, match="nested more than 200 levels deep"):
        read(Location(str(path)))

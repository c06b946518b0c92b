"""Files that are odd and yet sound: torch reads them, and so do we, to the same tensors."""

from __future__ import annotations

import argparse
import io
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attacks.assemble import Member, called, mapped, members, name, pickled, tensor, text, wide, zipped
from cells import looking, torch_containers
from checkpoints import assert_same, ckptconv_here, done, load_with_aliases
from effort import every
from samples import saved

from ckptconv import CorruptError, convert
from ckptconv.process import has_feature


class Pair(NamedTuple):
    """A class of the user's, which torch looks up, and we do not."""

    one: Any
    other: Any


class Config(dict[str, Any]):
    """A dict with a name of its own, as frameworks have."""


def repacked(data: bytes, change: Callable[[list[Member]], list[Member]], **options: Any) -> bytes:
    """The members of an archive, put together again in another way."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [Member(info.filename, archive.read(info)) for info in archive.infolist()]
    return zipped(change(parts), **options)


def prefixed(prefix: str) -> Callable[[list[Member]], list[Member]]:
    return lambda parts: [part.changed(name=prefix + "/" + str(part.name).partition("/")[2]) for part in parts]


def without(*names: str) -> Callable[[list[Member]], list[Member]]:
    return lambda parts: [part for part in parts if str(part.name).partition("/")[2] not in names]


PLAIN = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5), "c": torch.ones(3, dtype=torch.bfloat16)}
SOUND = saved(PLAIN)
LONG = "a" * 200
NAMES = [
    "a/b",
    "../c",
    "/etc/passwd",
    "ключ",
    "鍵",
    "\U0001f600",
    " ",
    "a b",
    "tab\t",
    "x" * 5000,
    "__metadata",
    "C:\\d",
    "0",
]


def each(**changes: Any) -> Callable[[list[Member]], list[Member]]:
    return lambda parts: [part.changed(**changes) for part in parts]


def deflated(wanted: str) -> Callable[[list[Member]], list[Member]]:
    return lambda parts: [part.changed(method=8) if wanted in str(part.name) else part for part in parts]


ARCHIVES: dict[str, bytes] = {
    "a comment": repacked(SOUND, list, comment=b"made by hand"),
    "another prefix": repacked(SOUND, prefixed("another name")),
    "a prefix that is not ASCII": repacked(SOUND, lambda parts: each(flags=0x800)(prefixed("модель")(parts))),
    "a long prefix": repacked(SOUND, prefixed(LONG)),
    "members the other way round": repacked(SOUND, lambda parts: parts[::-1]),
    "the pickle last": repacked(SOUND, lambda parts: [*parts[1:], parts[0]]),
    "members by name": repacked(SOUND, lambda parts: sorted(parts, key=lambda part: str(part.name))),
    "no byteorder": repacked(SOUND, without("byteorder")),
    "no alignment": repacked(SOUND, without(".format_version", ".storage_alignment", ".data/serialization_id")),
    "no checksums": repacked(SOUND, each(crc=0)),
    "more members": repacked(SOUND, lambda parts: [*parts, Member("archive/readme.txt", b"hello")]),
    "padding in front of the data": repacked(SOUND, each(local_extra=b"FB\x3c\0" + bytes(60))),
    "a deflated pickle": repacked(SOUND, deflated("data.pkl")),
    "records of zip64": wide(members(pickled(mapped(text("a"), tensor())))),
    "numbers for keys": saved({1: torch.ones(2), (1, 2): torch.zeros(3)}),
    "a pickle in the words of Python 2": zipped(members(pickled(mapped(
        b"U\x01a", tensor(), b"T\x01\0\0\0l", called(name("__builtin__", "long"), b"L5L\n"),
        b"S's'\n", called(name("__builtin__", "set"), b"]"),
    )))),
}  # fmt: skip

# tests/states.py has those that come back; these are of the user's classes, or odd for safetensors.
TREES: dict[str, Any] = {
    "names of every kind": {key: torch.full((2,), float(index)) for index, key in enumerate(NAMES)},
    "a named tuple": {"x": torch.ones(2), "p": Pair(torch.ones(1), 2)},
    "a dict of a class": {"x": torch.ones(2), "config": Config(a=1)},
    "arguments of a program": {"x": torch.ones(2), "args": argparse.Namespace(lr=0.1, path=Path("x"))},
    "sixty-four dimensions": {"a": torch.ones((1,) * 64)},
}  # fmt: skip


# A tensor in an object of the user's goes by what the object was to be made from.
EXPECTED = {
    "a named tuple": {"x": torch.ones(2), "p.args.0": torch.ones(1)},
    "a dict of a class": {"x": torch.ones(2)},
}


def tensors_of(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors in containers of Python's, by the names that they get."""
    if isinstance(tree, torch.Tensor):
        return {prefix or "tensor": tree.detach().resolve_conj()}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if type(tree) in (list, tuple, deque) else ()
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        inner = ".".join(map(str, key)) if type(key) is tuple else str(key)
        found |= tensors_of(value, f"{prefix}.{inner}" if prefix else inner)
    return found


def check(path: Path, data: bytes, expected: Any = None) -> None:
    path.write_bytes(data)
    output = path.with_suffix(".safetensors")
    done(ckptconv_here("pt2safetensors", path, output, "--no-fsync"))
    for command in looking():
        assert ckptconv_here(command, path).code == 0, command
    expected = tensors_of(torch.load(path, weights_only=False) if expected is None else expected)
    assert expected
    assert_same(load_with_aliases(output), expected)


@every("odd", ARCHIVES)
def test_archives(odd: str, tmp_path: Path) -> None:
    check(tmp_path / "model.pt", ARCHIVES[odd])


@every("odd", TREES)
@every("options", torch_containers().values(), ids=torch_containers())
def test_trees(odd: str, options: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path / "model.pt", saved(TREES[odd], **options), EXPECTED.get(odd))


def test_the_name_of_a_file_means_nothing(tmp_path: Path) -> None:
    for file in ("a b.pt", "модель.bin", "x" * 200 + ".ckpt", ".pt", "model", "-.pth"):
        check(tmp_path / file, SOUND)


class _Device:
    def __reduce__(self) -> Any:
        return torch.device, ("cuda", 1 << 20_000)


@pytest.mark.skipif(not has_feature("optimizer_states"), reason="no feature finds the states of optimizers")
def test_integers_that_python_does_not_print_are_no_names(tmp_path: Path) -> None:
    weight, number = torch.ones(2), 1 << 20_000
    states = {number: {"exp_avg": weight}}
    for title, optimizer in (
        ("states", {"state": states, "param_groups": [{"params": [0]}]}),
        ("groups", {"state": {}, "param_groups": [{"params": [number]}]}),
        ("device", {"state": {}, "param_groups": [{"params": [0], "of": _Device()}]}),
    ):
        path = tmp_path / f"{title}.pt"
        torch.save({"model": {"w": weight}, "optimizer": optimizer}, path)
        with pytest.raises(CorruptError, match=r"with too many digits.|torch\.device"):
            convert(path, tmp_path / title, optimizer=tmp_path / f"{title}-states")

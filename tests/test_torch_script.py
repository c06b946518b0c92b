"""TorchScript archives: their weights are what torch.jit.load(...).state_dict() gives, or they are refused."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, ckptconv_here, load_with_aliases
from torch import nn
from torch_reference import same

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.formats.torch_container import TorchFile
from ckptconv.formats.torch_file import read_torch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.ao")


class Tied(nn.Module):
    """A tie, a shared module, buffers that are not kept, and tensors that are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Linear(4, 4)
        self.two = self.one
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("lost", torch.arange(3.0), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.plain = torch.full((2,), 7.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(self.embed(x)))) + self.plain.sum() + self.kept.sum() + self.lost.sum()


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))])
        self.named = nn.ModuleDict({"a": nn.LayerNorm(2), "b": nn.PReLU()})
        self.held = [torch.ones(3), torch.zeros(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.named["b"](self.named["a"](x)) + self.held[0].sum()


class Counter(nn.Module):
    """Neither parameters nor buffers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 2),
    "half": lambda: nn.Linear(3, 2).to(torch.bfloat16),
    "mlp": lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.BatchNorm1d(2), nn.Dropout()),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3)))),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=2),
    "tied": Tied,
    "listed": Listed,
}


def script(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(module).save(str(path))
    return path


def compare(path: Path) -> TorchFile:
    file = read_torch(str(path))
    assert file.container == "script archive"
    theirs = torch.jit.load(str(path), map_location="cpu").state_dict()
    assert list(file.value) == list(theirs)
    for name, tensor in theirs.items():
        same(file.value[name], tensor)
    return file


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_scripted_modules(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    compare(script(make(), tmp_path / "model.pt"))


@pytest.mark.parametrize("name", ["linear", "half", "mlp", "tied", "lstm"])
def test_traced_modules(name: str, tmp_path: Path) -> None:
    module = MODULES[name]().eval()
    example = torch.arange(4) if name == "tied" else torch.ones(2, 3).to(next(module.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module, example).save(str(tmp_path / "model.pt"))
    compare(tmp_path / "model.pt")


def test_what_is_neither_parameter_nor_buffer_is_told(tmp_path: Path) -> None:
    file = compare(script(Tied(), tmp_path / "model.pt"))
    assert "1 attributes hold tensors" in file.warnings[0]
    assert "not converted: plain" in file.warnings[0]
    assert "held" in compare(script(Listed(), tmp_path / "model.pt")).warnings[0]
    # The list of weights that an LSTM keeps beside them is no news.
    assert compare(script(nn.LSTM(2, 2), tmp_path / "model.pt")).warnings == ()


def test_deflated_archives(tmp_path: Path) -> None:
    path = script(Tied(), tmp_path / "model.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    theirs = torch.jit.load(str(path)).state_dict()
    for name, tensor in theirs.items():
        same(read_torch(str(tmp_path / "packed.pt")).value[name], tensor)


def test_the_command_line_converts_the_weights(tmp_path: Path) -> None:
    path = script(Tied(), tmp_path / "model.pt")
    run = ckptconv_here("pt2safetensors", path, "--json")
    assert run.code == 0, run.err
    assert run.json["format"] == "torch script archive"
    assert run.json["aliases"] == {"head.weight": "embed.weight", "two.weight": "one.weight", "two.bias": "one.bias"}
    assert "plain" in run.json["warnings"][0]
    assert run.json["opaque"] == []
    assert_same(load_with_aliases(tmp_path / "model.safetensors"), torch.jit.load(str(path)).state_dict())
    assert ckptconv_here("inspect", path).code == 0


# ------------------------------------------------------------------------------------------------------ what is refused


def refusal(path: Path) -> str:
    with pytest.raises(UnsupportedError) as caught:
        read_torch(str(path))
    assert "torch.jit.load" in str(caught.value)
    return str(caught.value)


def test_frozen_modules_have_their_weights_in_the_program(tmp_path: Path) -> None:
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))
    frozen.save(str(tmp_path / "frozen.pt"))
    assert "neither parameters nor buffers" in refusal(tmp_path / "frozen.pt")
    assert "neither parameters nor buffers" in refusal(script(Counter(), tmp_path / "counter.pt"))


def test_packed_weights_are_not_lost_silently(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        except (RuntimeError, AttributeError) as error:
            pytest.skip(f"torch cannot quantize here: {error}")
        path = script(quantized, tmp_path / "model.pt")
    why = refusal(path)
    assert "packed" in why or "state of its own making" in why


@pytest.fixture
def sound(tmp_path: Path) -> dict[str, bytes]:
    """The members of an archive."""
    with zipfile.ZipFile(script(nn.Sequential(nn.Linear(2, 2)), tmp_path / "sound.pt")) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(members: dict[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_without_the_code_nothing_can_be_told(sound: dict[str, bytes], tmp_path: Path) -> None:
    members = {name: content for name, content in sound.items() if "/code/" not in name}
    assert "whose class its code tells" in refusal(packed(members, tmp_path / "model.pt"))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"  __buffers__ = []\n", b"", "does not say which"),
        (b'  __parameters__ = ["weight", "bias", ]\n', b"", "does not say which"),
        (b'["weight", "bias", ]', b'["weight", "bi\\"as", ]', "cannot be read"),
        (b'["weight", "bias", ]', b"weight", "cannot be read"),
        (b'["weight", "bias", ]', b'["weight", "bias", "training", ]', "is no tensor"),
        (b"class Linear(Module)", b"class Linear", ""),
    ],
)
def test_code_that_does_not_say_what_is_what(
    old: bytes, new: bytes, reason: str, sound: dict[str, bytes], tmp_path: Path
) -> None:
    linear = next(name for name in sound if "/linear" in name and name.endswith(".py"))
    assert old in sound[linear]
    sound[linear] = sound[linear].replace(old, new)
    assert reason in refusal(packed(sound, tmp_path / "model.pt"))


def module(members: dict[str, bytes], state: bytes) -> dict[str, bytes]:
    """The archive with a module of a state that these opcodes make."""
    code = b'class M(Module):\n  __parameters__ = ["p", ]\n  __buffers__ = []\n'
    pickled = b"\x80\x02c__torch__\nM\n)\x81q\x00" + state + b"b."
    return {**members, "sound/code/__torch__.py": code, "sound/data.pkl": pickled}


def attributes(**opcodes: bytes) -> bytes:
    pairs = (b"X" + len(key).to_bytes(4, "little") + key.encode() + value + b"s" for key, value in opcodes.items())
    return b"}" + b"".join(pairs)


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
    b"K\0K\x04\x85K\x01\x85\x89NtR"
)
PACKED = b"c__torch__.torch.classes.quantized\nPacked\n)\x81)b"


@pytest.mark.parametrize(
    ("state", "kind", "reason"),
    [
        (attributes(p=TENSOR, child=b"h\x00"), CorruptError, "child, that contains itself"),
        (attributes(training=b"\x88"), UnsupportedError, "neither parameters nor buffers"),
        (attributes(p=TENSOR, child=PACKED), UnsupportedError, "its child is packed"),
        (attributes(p=TENSOR, child=b"](K\x01" + PACKED + b"e"), UnsupportedError, "its child is packed"),
        (attributes(p=b"K\x01"), UnsupportedError, "parameter p is no tensor"),
        (b")", UnsupportedError, "state of its own making"),
        (b"}K\x01K\x01s", UnsupportedError, "state of its own making"),
        (b"}b}", UnsupportedError, "state of its own making"),
        (b"", CkptconvError, "sound"),
    ],
)
def test_hostile_modules(
    state: bytes, kind: type[CkptconvError], reason: str, sound: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.raises(kind, match=reason):
        read_torch(str(packed(module(sound, state), tmp_path / "sound.pt")))


def test_the_modules_made_here_are_read(sound: dict[str, bytes], tmp_path: Path) -> None:
    path = packed(module(sound, attributes(p=TENSOR, training=b"\x88", q=TENSOR)), tmp_path / "sound.pt")
    assert list(read_torch(str(path)).value) == ["p"]


def test_other_objects_are_no_modules(sound: dict[str, bytes], tmp_path: Path) -> None:
    for content in (b"\x80\x02}.", b"\x80\x02K\x01.", b"\x80\x02ccollections\nCounter\n)R."):
        sound["sound/data.pkl"] = content
        assert "does not hold a module" in refusal(packed(sound, tmp_path / "model.pt"))

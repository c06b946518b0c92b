"""TorchScript archives: their weights are what torch.jit.load(...).state_dict() gives, or they are refused."""

from __future__ import annotations

import enum
import functools
import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cells import VERIFY, looking
from checkpoints import assert_same, ckptconv_here, done, load_with_aliases
from compare import bits, evaluate, same
from effort import every
from format_suite import FormatSuite
from reading import state_in
from torch import nn

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.file import read_torch
from ckptconv.pickles.nodes import Composite
from ckptconv.pickles.vocabulary import WHOLE_TREES
from ckptconv.structure.keymap import flatten
from ckptconv.tensors.lazy import LazyTensor

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


class Layout(enum.Enum):
    ROWS = "rows"
    COLUMNS = "columns"


class Enumerated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layout = Layout.COLUMNS
        self.register_buffer("eye", torch.eye(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.eye if self.layout == Layout.ROWS else x


class Rare(nn.Module):
    """Layouts and dtypes that TorchScript writes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coordinates", torch.eye(3).to_sparse())
        self.register_buffer("rows", torch.eye(3).to_sparse_csr())
        for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bits8):
            self.register_buffer(str(dtype).rpartition(".")[2], torch.arange(3, dtype=torch.uint8).view(dtype))
        for dtype in (torch.uint16, torch.uint64, torch.complex32):
            self.register_buffer(str(dtype).rpartition(".")[2], torch.arange(3).to(dtype))


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
    "enumerated": Enumerated,
}


def script(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(module).save(str(path))
    return path


def compare(path: Path) -> TorchFile:
    file = read_torch(str(path))
    assert file.container == "script archive"
    module = torch.jit.load(str(path), map_location="cpu")
    theirs = module.state_dict()
    assert [name for name in file.value if name in theirs] == list(theirs)
    for name, tensor in theirs.items():
        same(file.value[name], tensor)
    for name in file.value.keys() - theirs.keys():
        if not name.startswith("CONSTANTS."):
            same_value(file.value[name], attribute(module, name))
    return file


def attribute(module: Any, path: str) -> Any:
    """What a loaded module has under a path; what C++ packed, unpacked by its own operators."""
    owner, _, name = path.rpartition(".")
    for step in owner.split(".") if owner else ():
        module = getattr(module, step)
    kind = getattr(module, "original_name", "")
    if kind == "Conv2d" and name in ("weight", "bias"):
        return torch.ops.quantized.conv2d_unpack(module._packed_params)[name == "bias"]
    if kind == "LinearPackedParams" and name == "_packed_params":
        return dict(zip(("weight", "bias"), torch.ops.quantized.linear_unpack(module._packed_params), strict=True))
    return getattr(module, name)


def same_value(ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for name, value in ours.items():
            same_value(value, theirs[name])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same_value(one, other)
    elif isinstance(ours, Composite):
        values = ours.parts["values"]
        assert str(values.dtype) == str(theirs.dtype).removeprefix("torch.")
        assert (values.shape, evaluate(values)) == (theirs.shape, bits(theirs.int_repr()))
        if theirs.qscheme() == torch.per_tensor_affine:
            assert ours.parts["scale"] == theirs.q_scale()
        else:
            assert evaluate(ours.parts["scales"]) == bits(theirs.q_per_channel_scales())
    elif isinstance(ours, LazyTensor):
        # A number is a tensor, as in a state dict.
        theirs = theirs if isinstance(theirs, torch.Tensor) else torch.tensor(theirs)
        assert (str(ours.dtype), ours.shape) == (str(theirs.dtype).removeprefix("torch."), theirs.shape)
        assert evaluate(ours) == bits(theirs)
    else:
        assert ours == theirs


@every("make", MODULES.values(), ids=MODULES)
def test_scripted_modules(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    compare(script(make(), tmp_path / "model.pt"))


@every("name", ["linear", "half", "mlp", "tied", "lstm"])
def test_traced_modules(name: str, tmp_path: Path) -> None:
    module = MODULES[name]().eval()
    example = torch.arange(4) if name == "tied" else torch.ones(2, 3).to(next(module.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module, example).save(str(tmp_path / "model.pt"))
    compare(tmp_path / "model.pt")


def test_what_is_neither_parameter_nor_buffer_is_told(tmp_path: Path) -> None:
    file = compare(script(Tied(), tmp_path / "model.pt"))
    assert "1 attribute with tensors" in file.notes[0]
    assert "and buffers: plain" in file.notes[0]
    assert "held" in compare(script(Listed(), tmp_path / "model.pt")).notes[0]
    # The list of weights that an LSTM keeps beside them is no news.
    assert compare(script(nn.LSTM(2, 2), tmp_path / "model.pt")).notes == ()


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
    run = done(ckptconv_here("pt2safetensors", path, "--json"))
    assert run.json["format"] == "torch script archive"
    assert run.json["aliases"] == {"head.weight": "embed.weight", "two.weight": "one.weight", "two.bias": "one.bias"}
    assert "plain" in run.json["notes"][0]
    assert run.json["warnings"] == []
    assert run.json["opaque"] == []
    theirs = {**torch.jit.load(str(path)).state_dict(), "plain": torch.jit.load(str(path)).plain}
    assert_same(load_with_aliases(tmp_path / "model.safetensors"), theirs)
    for command in looking():
        assert ckptconv_here(command, path).code == 0, command


# ------------------------------------------------------------------------------- frozen, quantized and mobile archives


def test_frozen_modules_have_their_weights_in_the_program(tmp_path: Path) -> None:
    path = tmp_path / "frozen.pt"
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval())
    torch.jit.freeze(model).save(str(path))
    ours, graph = read_torch(str(path)), torch.jit.load(str(path)).graph
    constants = [node.t("value") for node in graph.findAllNodes("prim::Constant") if node.kindOf("value") == "t"]
    assert len(ours.value) == len(constants) >= 2
    for name, tensor in ours.value.items():
        assert name.startswith("CONSTANTS.c")
        assert any(tuple(tensor.shape) == tuple(theirs.shape) for theirs in constants)
    assert "CONSTANTS.c0" in ours.notes[0]
    done(ckptconv_here("pt2safetensors", path, *VERIFY, "--checksum"))
    found = load_with_aliases(tmp_path / "frozen.safetensors")
    assert all(any(torch.equal(tensor, theirs) for theirs in constants) for tensor in found.values())


def test_archives_without_a_tensor_are_refused(tmp_path: Path) -> None:
    assert "no tensor" in refusal(script(Counter(), tmp_path / "counter.pt"))


class Quantizable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv, self.bare, self.fc = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, bias=False), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dequant(self.fc(self.bare(self.conv(self.quant(x))).mean([2, 3])))
        return out


@functools.cache
def quantized(kind: str) -> nn.Module:
    """A module quantized by torch, which nobody changes: static by convolutions, or dynamic."""
    engines = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = next(each for each in ("fbgemm", "qnnpack") if each in engines)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "dynamic":
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
            made: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
            return made
        stub = Quantizable().eval()
        stub.qconfig = torch.ao.quantization.get_default_qconfig(torch.backends.quantized.engine)
        prepared = torch.ao.quantization.prepare(stub)
        prepared(torch.randn(2, 3, 4, 4))
        converted: nn.Module = torch.ao.quantization.convert(prepared)
        return converted


@every("kind", ["static", "dynamic"])
@every("how", ["scripted", "traced", "mobile"])
def test_quantized_modules(kind: str, how: str, tmp_path: Path) -> None:
    model, path = quantized(kind), tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = torch.ones(1, 4) if kind == "dynamic" else torch.ones(1, 3, 2, 2)
        made = torch.jit.trace(model, example) if how == "traced" else torch.jit.script(model)
        made.save(str(path))
        names = set((read_torch(str(path)) if how == "traced" else compare(path)).value)
        if how == "mobile":
            made._save_for_lite_interpreter(str(path))
            assert set(read_torch(str(path)).value) == names
    layer = "0" if kind == "dynamic" else "fc"
    expected = {f"{layer}._packed_params._packed_params"}
    if kind == "static":
        expected |= {"conv.weight", "conv.bias", "bare.weight", "conv.scale", "conv.zero_point", "quant.scale"}
    assert expected <= names
    done(ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors", *VERIFY, "--json"))
    back = state_in(tmp_path / "out.safetensors")
    weight = back[f"{layer}._packed_params._packed_params"]["weight"]
    assert torch.equal(weight.int_repr(), (model.fc if kind == "static" else model[0]).weight().int_repr())


@every("kind", ["static", "dynamic"])
def test_frozen_quantized_modules(kind: str, tmp_path: Path) -> None:
    model, path = quantized(kind), tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.freeze(torch.jit.script(model)).save(str(path))
    file = read_torch(str(path))
    weights = [held["weight"] for held in file.value.values() if isinstance(held, dict)]
    layers = [model[0]] if kind == "dynamic" else [model.conv, model.bare, model.fc]
    assert len(weights) == len(layers)
    for ours, layer in zip(weights, layers, strict=True):
        same_value(ours, layer.weight())


class Holding(nn.Module):
    """Attributes of all kinds that hold tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.many = [torch.ones(2), torch.zeros(3)]
        self.named = {"a": torch.ones(4)}
        self.maybe = torch.jit.Attribute(torch.ones(1), torch.Tensor | None)
        self.pair, self.plain = (torch.ones(5), 3), torch.ones(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maybe = self.maybe
        if maybe is not None:
            x = x + maybe
        return x + self.many[0].sum() + self.named["a"].sum() + self.pair[0].sum() + self.plain.sum()


def test_attributes_that_hold_tensors(tmp_path: Path) -> None:
    file = compare(script(Holding(), tmp_path / "model.pt"))
    assert set(file.value) == {"many", "named", "maybe", "pair", "plain"}
    done(ckptconv_here("pt2safetensors", tmp_path / "model.pt", *VERIFY, "--json"))
    names = set(load_with_aliases(tmp_path / "model.safetensors"))
    assert names == {"many.0", "many.1", "named.a", "maybe", "pair.0", "plain"}


@pytest.mark.filterwarnings("ignore:.*(CSR|ComplexHalf)")
def test_layouts_and_dtypes_that_torchscript_writes_in_its_own_way(tmp_path: Path) -> None:
    module = Rare()
    found = read_torch(str(script(module, tmp_path / "model.pt"))).value
    for name, theirs in module.state_dict().items():
        if theirs.layout == torch.strided:
            assert (str(found[name].dtype), found[name].shape) == (name, theirs.shape)
            assert evaluate(found[name]) == bits(theirs.view(torch.uint8))
            continue
        parts = found[name].parts
        assert found[name].kind == str(theirs.layout).removeprefix("torch.")
        assert parts["shape"] == theirs.shape
        for part, tensor in parts.items():
            if part != "shape":
                same(tensor, getattr(theirs.coalesce() if theirs.is_sparse else theirs, part)())


# ------------------------------------------------------------------------------------------------------ what is refused


def refusal(path: Path) -> str:
    with pytest.raises(UnsupportedError) as caught:
        read_torch(str(path))
    # It would lose weights of some of these too.
    assert "torch.jit.load" not in str(caught.value)
    return str(caught.value)


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


def test_without_the_code_all_tensors_come_out(sound: dict[str, bytes], tmp_path: Path) -> None:
    members = {name: content for name, content in sound.items() if "/code/" not in name}
    file = read_torch(str(packed(members, tmp_path / "model.pt")))
    assert {name: list(held) for name, held in file.value.items()} == {
        "0": ["weight", "bias", "training", "_is_full_backward_hook"]
    }
    assert "and buffers: 0" in file.notes[0]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'["weight", "bias", ]', b'["weight", "bi\\"as", ]', "cannot be read"),
        (b'["weight", "bias", ]', b"weight", "cannot be read"),
        (b'["weight", "bias", ]', b'["weight", "bias", "training", ]', "is not a tensor"),
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
HELD = b"c__torch__.torch.classes.quantized\nLinearPackedParamsBase\n)\x81(" + TENSOR + TENSOR + b"tb"


@every(
    "state, kind, reason",
    [
        (attributes(p=TENSOR, child=b"h\x00"), CorruptError, "child, that contains itself"),
        (attributes(p=TENSOR, child=b"]q\x01(h\x01e"), CorruptError, "child, that contains itself"),
        (attributes(p=TENSOR, child=PACKED[:-2] + b"q\x01(h\x01tb"), CorruptError, "child, that contains itself"),
        (attributes(p=TENSOR, child=b"(" * 210 + TENSOR + b"t" * 210), LimitError, "nested"),
        (attributes(training=b"\x88"), UnsupportedError, "no tensor"),
        (attributes(child=PACKED), UnsupportedError, "no tensor"),
        (attributes(p=b"K\x01"), UnsupportedError, "parameter p is not a tensor"),
        (b")", UnsupportedError, "no tensor"),
        (b"}K\x01K\x01s", UnsupportedError, "no tensor"),
        (b"}b}", UnsupportedError, "no tensor"),
        (b"", CkptconvError, "sound"),
    ],
)
def test_hostile_modules(
    state: bytes, kind: type[CkptconvError], reason: str, sound: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.raises(kind, match=reason):
        read_torch(str(packed(module(sound, state), tmp_path / "sound.pt")), limits=WHOLE_TREES)


def test_the_modules_made_here_are_read(sound: dict[str, bytes], tmp_path: Path) -> None:
    path = packed(module(sound, attributes(p=TENSOR, training=b"\x88", q=TENSOR)), tmp_path / "sound.pt")
    assert list(read_torch(str(path)).value) == ["p"]
    # Whatever the states of objects are, the tensors in them come out.
    for state, names in ((b"(" + TENSOR + b"t", ["state.0"]), (attributes(q=HELD), ["q.weight", "q.bias"])):
        path = packed(module(sound, state), tmp_path / "sound.pt")
        assert list(flatten(read_torch(str(path)).value)[0]) == names


def test_other_objects_are_no_modules(sound: dict[str, bytes], tmp_path: Path) -> None:
    for content in (b"\x80\x02}.", b"\x80\x02K\x01.", b"\x80\x02ccollections\nCounter\n)R."):
        sound["sound/data.pkl"] = content
        assert "does not contain a module" in refusal(packed(sound, tmp_path / "model.pt"))


def test_paths_take_no_more_memory_than_there_is_room_for(sound: dict[str, bytes], tmp_path: Path) -> None:
    inner = b"c__torch__\nM\n)\x81" + attributes(p=TENSOR, **{f"a{number}": b"N" for number in range(1000)}) + b"b"
    with pytest.raises(LimitError, match="paths"):
        read_torch(str(packed(module(sound, attributes(**{"x" * (1 << 18): inner})), tmp_path / "sound.pt")))


# ------------------------------------------------------------------------------------------------- the first releases


def test_classes_that_name_no_buffers(sound: dict[str, bytes], tmp_path: Path) -> None:
    """Of torch 1.3 to 1.6: then every tensor that is no parameter is a buffer, and with no names at all, all are."""
    whole = {"p": TENSOR, "training": b"\x88", "q": TENSOR, "none": b"N", "held": b"](" + TENSOR + b"e"}
    members = module(sound, attributes(**whole))
    for lines, names in (
        (b'  __parameters__ = ["q", ]\n', ["q", "p"]),
        (b"  __parameters__ = []\n  training : bool\n", ["p", "q"]),
        (b"  training : bool\n", ["p", "q"]),
    ):
        members["sound/code/__torch__.py"] = b"class M(Module):\n" + lines
        assert list(read_torch(str(packed(members, tmp_path / "sound.pt"))).value) == names


class Described:
    """An archive of torch 1.0 to 1.2, as model.json describes it."""

    CODES: ClassVar = {
        torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.float16: "FLOAT16", torch.int64: "INT64",
        torch.int32: "INT32", torch.int16: "INT16", torch.int8: "INT8", torch.uint8: "UINT8", torch.bool: "BOOL",
        torch.quint8: "UINT8", torch.qint8: "INT8", torch.qint32: "INT32",
    }  # fmt: skip

    def __init__(self, module: nn.Module, version: int) -> None:
        self.version = version
        self.members: dict[str, bytes] = {"m/version": b"1\n", "m/code/m.py": b"op_version_set = 1\n"}
        self.tensors: list[dict[str, Any]] = []
        self.keys: dict[int, str] = {}
        self.attributes: list[bytes] = []
        self.main = self.described(module, "m")

    def described(self, module: nn.Module, name: str) -> dict[str, Any]:
        parameters = [
            self.parameter(each, tensor, False) for each, tensor in module._parameters.items() if tensor is not None
        ]
        attributes = []
        for each, tensor in module._buffers.items():
            if self.version < 3:
                parameters.append(self.parameter(each, tensor, True))
            if self.version > 1:
                attributes.append((each, "Tensor", self.reference(tensor)))
        if self.version > 1:
            attributes.append(("training", "bool", b"\x88"))
        for each, value in vars(module).items():
            if each == "held":
                items = b"".join(self.reference(tensor) for tensor in value)
                attributes.append((each, "List[Tensor]", b"](" + items + b"e"))
        made: dict[str, Any] = {"torchscriptArena": {"key": "code/m.py"}, "name": name, "optimize": True}
        made["parameters"] = parameters
        made["attributes"] = [{"type": kind, "name": each, "id": str(self.put(it))} for each, kind, it in attributes]
        made["submodules"] = [self.described(child, each) for each, child in module._modules.items() if child]
        return {key: value for key, value in made.items() if value != []}

    def parameter(self, name: str, tensor: torch.Tensor, buffer: bool) -> dict[str, Any]:
        return {"isBuffer": buffer, "tensorId": str(self.number(tensor)), "name": name}

    def put(self, opcodes: bytes) -> int:
        self.attributes.append(opcodes)
        return len(self.attributes) - 1

    def reference(self, tensor: torch.Tensor) -> bytes:
        number = b"J" + self.number(tensor).to_bytes(4, "little")
        if self.version == 2:
            return b"c__main__\nTensorID\n)\x81" + number + b"b"
        return b"ctorch.jit._pickle\nbuild_tensor_from_id\n(" + number + b"tR"

    def number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = self.keys.setdefault(storage.data_ptr(), f"tensors/{len(self.tensors)}")
        self.members["m/" + key] = bytes(storage.tolist())
        self.tensors.append(
            {
                "dims": [str(each) for each in tensor.shape],
                "offset": str(tensor.storage_offset()),
                "strides": [str(each) for each in tensor.stride()],
                "requiresGrad": tensor.requires_grad,
                "dataType": self.CODES[tensor.dtype],
                "data": {"key": key},
                "device": "cpu",
            }
            | {key: value for key, value in [("isQuantized", tensor.is_quantized)] if self.version > 3}
            | ({"scale": tensor.q_scale(), "zeroPoint": str(tensor.q_zero_point())} if tensor.is_quantized else {})
        )
        return len(self.tensors) - 1

    def model(self) -> dict[str, Any]:
        return {
            "protoVersion": str(self.version), "mainModule": self.main, "producerName": "pytorch",
            "producerVersion": "1.0", "tensors": self.tensors,
        }  # fmt: skip

    def write(self, path: Path, model: object = None) -> Path:
        members = dict(self.members)
        if self.version > 1:
            marks = (b"](", b"e.") if self.version == 2 else (b"(", b"t.")
            members["m/attributes.pkl"] = b"\x80\x02" + marks[0] + b"".join(self.attributes) + marks[1]
        members["m/model.json"] = json.dumps(self.model() if model is None else model).encode()
        return packed(members, path)


class Old(nn.Module):
    """A tie, views, all dtypes of the time, scalars and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
        base = torch.arange(12.0).reshape(3, 4)
        self.turned = nn.Parameter(base.t())
        self.register_buffer("row", base[1])
        for dtype in (torch.float64, torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
            self.register_buffer(str(dtype).partition(".")[2], torch.tensor([[0, 1]]).to(dtype))
        self.register_buffer("empty", torch.empty(0, 3))


@every("version", [1, 2, 3, 4, 5])
def test_archives_with_model_json(version: int, tmp_path: Path) -> None:
    model = Old()
    path = Described(model, version).write(tmp_path / "model.pt")
    with pytest.raises(RuntimeError):
        torch.jit.load(str(path))  # no longer
    file, theirs = read_torch(str(path)), model.state_dict()
    assert file.container == "script archive"
    assert list(file.value) == list(theirs)
    for name, tensor in theirs.items():
        same(file.value[name], tensor)
    assert (file.opaque, file.warnings) == ((), ())


def test_archives_with_model_json_are_converted(tmp_path: Path) -> None:
    model = Old()
    path = Described(model, 5).write(tmp_path / "model.pt")
    run = done(ckptconv_here("pt2safetensors", path, "--json"))
    assert run.json["aliases"]["head.weight"] == "embed.weight"
    assert_same(load_with_aliases(tmp_path / "model.safetensors"), model.state_dict())
    for command in looking():
        assert ckptconv_here(command, path).code == 0, command


def test_tensors_in_other_attributes_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.held = [torch.ones(3)]
    for version in (2, 5):
        file = read_torch(str(Described(model, version).write(tmp_path / "model.pt")))
        assert list(file.value) == ["weight", "bias", "held"]
        same_value(file.value["held"], model.held)
        assert "and buffers: held" in file.notes[0]


def test_quantized_tensors_of_model_json(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(4), 0.5, 3, torch.quint8))
    codes = read_torch(str(Described(model, 5).write(tmp_path / "model.pt"))).value["codes"]
    assert codes.kind == "quantized"
    assert (codes.parts["qscheme"].name, codes.parts["scale"], codes.parts["zero_point"]) == (
        "per_tensor_affine", 0.5, 3,
    )  # fmt: skip
    assert codes.parts["values"].dtype.name == "quint8"


def change(where: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set a member, by the path that leads to it; None takes it away."""

    def apply(model: Any) -> None:
        *steps, last = (int(step) if step.isdigit() else step for step in where.split("."))
        for step in steps:
            model = model[step]
        if value is None:
            del model[last]
        else:
            model[last] = value

    return apply


@every(
    "where, value, kind, reason",
    [
        ("tensors.0.offset", "1", CorruptError, "extends beyond"),
        ("tensors.0.offset", "-1", CorruptError, "offset"),
        ("tensors.0.dims", ["3", "2"], CorruptError, "extends beyond"),
        ("tensors.0.dims", ["2"], CorruptError, "1 dimensions and 2 strides"),
        ("tensors.0.strides", ["-2", "1"], CorruptError, "non-negative integers"),
        ("tensors.0.dims", ["9" * 19, "2"], CorruptError, "64-bit"),
        ("tensors.0.dims", "2", CorruptError, "a list was expected"),
        ("tensors.0.dims", ["0x2", "2"], CorruptError, "64-bit"),
        ("tensors.0.dims", [True, "2"], CorruptError, "64-bit"),
        ("tensors.0.dataType", "INT64", CorruptError, "requires gradients"),
        ("tensors.1.dataType", "DOUBLE", CorruptError, "extends beyond"),
        ("tensors.0.dataType", "STRING", UnsupportedError, "unknown type"),
        ("tensors.0.dataType", None, CorruptError, "dataType"),
        ("tensors.0.data.key", "tensors/9", CorruptError, "does not contain"),
        ("tensors.0.data.key", "version", CorruptError, "does not contain"),
        ("tensors.1.data.key", "tensors/2", CorruptError, "as another dtype"),
        ("tensors.0.data", None, CorruptError, "object"),
        ("tensors.0.device", None, CorruptError, "device"),
        ("tensors.0.requiresGrad", 1, CorruptError, "but true or false was expected"),
        ("mainModule.parameters.0.tensorId", "3", CorruptError, "tensor 3, but has 3"),
        ("mainModule.parameters.0.tensorId", "-1", CorruptError, "tensor -1, but has 3"),
        ("mainModule.parameters.0.name", "bias", CorruptError, "twice"),
        ("mainModule.parameters.0.name", "", CorruptError, "name"),
        ("mainModule.parameters.0.tensor_id", "1", CorruptError, "differently"),
        ("mainModule.attributes.0.id", "9", CorruptError, "attribute 9, but has 2"),
        ("mainModule.getStateAttributeId", "2", CorruptError, "attribute 2, but has 2"),
        ("mainModule.submodules", [[]], CorruptError, "object"),
        ("mainModule", None, CorruptError, "object"),
        ("protoVersion", "6", UnsupportedError, "version 6"),
        ("protoVersion", "x", CorruptError, "64-bit"),
    ],
)
def test_descriptions_that_cannot_be_right(
    where: str, value: object, kind: type[CkptconvError], reason: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    archive = Described(model, 5)
    description = archive.model()
    read_torch(str(archive.write(tmp_path / "sound.pt", description)))
    change(where, value)(description)
    with pytest.raises(kind, match=reason):
        read_torch(str(archive.write(tmp_path / "model.pt", description)))


def test_archives_with_model_json_that_are_not_whole(tmp_path: Path) -> None:
    def archive() -> Described:
        return Described(nn.BatchNorm1d(2), 5)

    path = tmp_path / "model.pt"
    nested: dict[str, Any] = archive().main
    for _ in range(300):
        nested = {"name": "a", "submodules": [nested]}
    with pytest.raises(CkptconvError, match="nested"):
        read_torch(str(archive().write(path, {**archive().model(), "mainModule": nested})))
    with pytest.raises(UnsupportedError, match="no tensor"):
        read_torch(str(Described(nn.ReLU(), 5).write(path)))
    long = archive().main
    long["attributes"] = [{"name": str(each), "type": "bool", "id": "0"} for each in range(1000)]
    long = {"name": "m", "submodules": [{**long, "name": "x" * (1 << 18)}]}
    with pytest.raises(LimitError, match="paths"):
        read_torch(str(archive().write(path, {**archive().model(), "mainModule": long})))
    far = archive()
    far.attributes[0] = b"ctorch.jit._pickle\nbuild_tensor_from_id\n(K\x09tR"
    with pytest.raises(CorruptError, match="tensor 9 of"):
        read_torch(str(far.write(path)))
    with zipfile.ZipFile(archive().write(path)) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    for name in ("m/attributes.pkl", "m/tensors/0"):
        with pytest.raises(CorruptError):
            read_torch(str(packed({each: data for each, data in members.items() if each != name}, path)))
    for text in (b"", b"[]", b"\xff", b'{"tensors": [], "tensors": []}'):
        with pytest.raises(CorruptError, match=r"model\.json"):
            read_torch(str(packed({**members, "m/model.json": text}, path)))


def test_which_description_counts_is_not_guessed(sound: dict[str, bytes], tmp_path: Path) -> None:
    members = {**sound, "sound/model.json": b"{}"}
    with pytest.raises(CorruptError, match=r"both data\.pkl and model\.json"):
        read_torch(str(packed(members, tmp_path / "sound.pt")))


def test_a_program_without_a_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.save(torch.jit.freeze(torch.jit.script(torch.nn.ReLU().eval())), path)
    ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors").refused(5, "TorchScript", "state_dict()")


@every("path", sorted((Path(__file__).parent / "data").glob("*/*.pt")))
def test_programs_of_old_releases_are_read_and_come_back(path: Path, tmp_path: Path) -> None:
    ours, theirs = read_torch(str(path)).value, torch.jit.load(str(path)).state_dict()
    assert [name for name in ours if not name.startswith("CONSTANTS.")] == list(theirs)
    for name, tensor in theirs.items():
        same(ours[name], tensor)
    done(ckptconv_here("pt2safetensors", path, tmp_path / "x.safetensors"))
    back = {name: tensor.detach() for name, tensor in state_in(tmp_path / "x.safetensors").items()}
    assert back.keys() == ours.keys()
    assert_same(dict(theirs), {name: back[name] for name in theirs})


class TestTorchScript(FormatSuite):
    command, family = "pt2safetensors", "torch"

    def write(self, place: Path) -> Path:
        torch.manual_seed(0)
        torch.jit.save(torch.jit.script(nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))), place / "model.pt")  # type: ignore[no-untyped-call]
        return place / "model.pt"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return torch.jit.load(checkpoint).state_dict()  # type: ignore[no-untyped-call,no-any-return]

"""Whole modules: what torch.save(model) wrote becomes what model.state_dict() gives, and no class is imported."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFY, looking, torch_containers, verified_here, verifying
from checkpoints import ckptconv_here, done
from effort import every, examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from reading import state_in, state_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.features.modules.whole import taken
from ckptconv.formats.detect import open_source
from ckptconv.outputs.kinds import NAMED
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.structure.keymap import flatten
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


class Odd(nn.Module):
    """A tie, a shared module, what is not saved, what is None, and attributes of all kinds."""

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
        self.register_module("empty", None)
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.bent = nn.Parameter(torch.ones(2, 3).t().to(torch.bfloat16))
        self.stride = torch.tensor([8.0, 16.0, 32.0])
        self.names = {0: "person", 1: "bicycle"}
        self.yaml = {"nc": 80, "backbone": [[-1, 1, "Conv", [64, 3, 2]]]}
        self.friend = [self.one]


class Subclass(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.extra = {"why": object.__name__}


class Slotted(nn.Linear):
    __slots__ = ("more",)

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.more = 3


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_state_dict_post_hook(a_hook)
    return model


def a_hook(*_: Any) -> None:
    """Change nothing."""


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.utils.spectral_norm(nn.Linear(2, 2)))


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU()))


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


def wrapped() -> nn.Module:
    inner = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))))
    return nn.DataParallel(inner)


class Quantizable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv, self.bare, self.fc = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, bias=False), nn.Linear(4, 5)
        self.sum = torch.ao.nn.quantized.FloatFunctional()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.quant(x))
        x = self.sum.add(self.bare(x), x)
        out: torch.Tensor = self.dequant(self.fc(x.mean([2, 3])))
        return out


def static() -> nn.Module:
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in torch.backends.quantized.supported_engines else "qnnpack"
    model = Quantizable().eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig(torch.backends.quantized.engine)
    prepared = torch.ao.quantization.prepare(model)
    prepared(torch.randn(2, 3, 4, 4))
    made: nn.Module = torch.ao.quantization.convert(prepared)
    return made


def observed() -> nn.Module:
    model = Quantizable().eval()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    made: nn.Module = torch.ao.quantization.prepare_qat(model.train())
    for module in made.modules():
        vars(module).pop("qconfig", None)  # local functions, which cannot be pickled
    return made


def dynamic() -> nn.Module:
    made: nn.Module = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), {nn.Linear}, dtype=torch.qint8
    )
    return made


MODELS = {
    "odd": Odd,
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 8),
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "norms": lambda: nn.Sequential(
        nn.BatchNorm2d(3), nn.BatchNorm1d(3, affine=False), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3), nn.RMSNorm(3)
    ),
    "lists": lambda: nn.ParameterList([nn.Parameter(torch.ones(2)), torch.zeros(3)]),
    "dicts": lambda: nn.ModuleDict(
        {"p": nn.ParameterDict({"z": nn.Parameter(torch.ones(1)), "a": torch.zeros(2)}), "q": nn.ModuleList([Odd()])}
    ),
    "subclass": lambda: Subclass(3, 2),
    "slotted": lambda: Slotted(3, 2),
    "weight_norm": weight_normed,
    "pruned": pruned,
    "empty": lambda: nn.Sequential(nn.ReLU()),
    "one": lambda: nn.Linear(2, 2),
    "traced": traced,
    "wrapped": wrapped,
    "static": static,
    "observed": observed,
    "dynamic": dynamic,
    "hooked": hooked,
    "complex": lambda: nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
}


def saved(model: Any, path: Path, **how: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(model, path, **how)
    return path


def same(ours: Any, theirs: Any, where: str = "") -> None:
    """Assert that a loaded value is that of a state dict."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), where
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        if theirs.is_quantized:
            assert torch.equal(ours.int_repr(), theirs.int_repr()), where
            assert torch.equal(ours.dequantize(), theirs.dequantize()), where
        else:
            assert torch.equal(ours, theirs), where
    elif isinstance(theirs, tuple):
        assert type(ours) is tuple
        assert len(ours) == len(theirs)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same(one, other, f"{where}.{number}")
    else:
        assert ours == theirs, where


def compare(ours: Any, theirs: Any) -> None:
    assert type(ours) is OrderedDict
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        same(ours[name], value, name)


@every("kind", MODELS)
def test_a_module_is_its_state_dict(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    theirs = model.state_dict()
    for container, options in torch_containers().items():
        path = saved(model, tmp_path / f"{container}.pt", **options)
        compare(state_of(path), theirs)
    run = done(ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors", *VERIFY, "--json"))
    assert run.json["opaque"] == []
    compare(state_in(tmp_path / "out.safetensors"), theirs)
    verified_here(path, tmp_path / "out.safetensors")
    if "pt" in NAMED:
        assert ckptconv_here("safetensors2pt", tmp_path / "out.safetensors", tmp_path / "back.pt").code == 0
        compare(torch.load(tmp_path / "back.pt", weights_only=True), theirs)


def test_ties_are_stored_once_under_the_first_name(tmp_path: Path) -> None:
    run = ckptconv_here("pt2safetensors", saved(Odd(), tmp_path / "model.pt"), "--json")
    assert run.json["aliases"] == {"head.weight": "embed.weight", "two.weight": "one.weight", "two.bias": "one.bias"}
    assert run.json["warnings"] == []
    assert "state_dict()" in run.json["notes"][0]
    assert "lost" in run.json["notes"][1]
    assert "stride" in run.json["notes"][1]


# -------------------------------------------------------------------------------------------- several, and other values


def a_run() -> dict[str, Any]:
    model, ema = Odd(), Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {
        "epoch": 7,
        "model": model,
        "ema": ema,
        "again": [model.one, (model.one, "kept", (ema,))],
        "optimizer": optimizer.state_dict(),
        "train_args": {"lr0": 0.01, "data": "coco.yaml"},
    }


def test_modules_anywhere_are_taken_and_the_rest_stays(tmp_path: Path) -> None:
    run = a_run()
    path = saved(run, tmp_path / "run.pt")
    report = done(ckptconv_here("pt2safetensors", path, tmp_path / "run.safetensors", "--json"))
    assert "2 more" not in report.json["notes"][0]
    found = state_in(tmp_path / "run.safetensors")
    assert list(found) == list(run)
    assert (found["epoch"], found["train_args"]) == (7, run["train_args"])
    assert found["optimizer"] == run["optimizer"]
    for key in ("model", "ema"):
        compare(found[key], run[key].state_dict())
    compare(found["again"][0], run["model"].one.state_dict())
    compare(found["again"][1][0], run["model"].one.state_dict())
    assert found["again"][1][1] == "kept"
    compare(found["again"][1][2][0], run["ema"].state_dict())


def test_a_key_takes_one_of_several(tmp_path: Path) -> None:
    run = a_run()
    path = saved(run, tmp_path / "run.pt")
    done(ckptconv_here("pt2safetensors", path, tmp_path / "ema.safetensors", "--key", "ema", *VERIFY, "--json"))
    compare(state_in(tmp_path / "ema.safetensors"), run["ema"].state_dict())


def test_modules_are_shown_by_name_and_values_beside_them(tmp_path: Path) -> None:
    path = saved(a_run(), tmp_path / "run.pt")
    for command in looking():
        run = done(ckptconv_here(command, path, "--json"))
        assert {"model.embed.weight", "ema.one.bias"} <= {row["name"] for row in run.json["tensors"]}
        values = run.json["values"]
        assert (values["epoch"], values["train_args.lr0"]) == (7, 0.01)
        assert (values["Odd.names.0"], values["Odd.yaml.nc"]) == ("person", 80)
        shown = ckptconv_here(command, path).out
        assert "epoch: 7" in shown
        assert "Odd.yaml.nc: 80" in shown
        assert "more value" in shown
        assert "more value" not in ckptconv_here(command, path, "--verbose").out


@verifying
def test_raw_takes_the_objects(tmp_path: Path) -> None:
    path = saved(nn.Sequential(nn.Linear(2, 2)), tmp_path / "model.pt")
    run = done(ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors", "--raw", "--json"))
    assert "not a usable model. Without --raw, whole modules" in run.json["warnings"][0]
    source = open_source(path, raw=True)
    assert "state.0._modules.0.state.0._parameters.weight" in flatten(source.weights)[0]
    verified_here(path, tmp_path / "out.safetensors", "--raw")
    assert ckptconv_here("verify", path, tmp_path / "out.safetensors").code != 0


def test_objects_that_hold_modules_keep_them_as_state_dicts(tmp_path: Path) -> None:
    path = saved(Trainer(nn.Linear(2, 2)), tmp_path / "model.pt")
    source = open_source(path)
    assert list(flatten(source.weights)[0]) == ["state.0.model.weight", "state.0.model.bias"]
    assert source.files.opaque == [f"{Trainer.__module__}.Trainer"]


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


def test_hooks_did_not_run(tmp_path: Path) -> None:
    assert "Hooks" in open_source(saved(hooked(), tmp_path / "model.pt")).warnings[0]
    for kind in ("weight_norm", "wrapped"):
        assert open_source(saved(MODELS[kind](), tmp_path / "model.pt")).warnings == []


def test_a_lazy_module_has_no_weights_yet(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    run = ckptconv_here("pt2safetensors", saved(model, tmp_path / "model.pt"))
    assert run.code == 5
    assert "never initialized" in run.err
    done(ckptconv_here("pt2safetensors", tmp_path / "model.pt", "--exclude", "0.*"))
    same(state_in(tmp_path / "model.safetensors")["1.weight"], model[1].weight.detach())


def test_modules_of_the_first_releases(tmp_path: Path) -> None:
    """They lack what came later: which buffers are not saved, and most kinds of hooks."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    theirs = model.state_dict()
    for module in model.modules():
        for name in list(vars(module)):
            if name == "_non_persistent_buffers_set" or (name.endswith("_hooks") and name != "_forward_hooks"):
                del vars(module)[name]
        module._backend = Odd
        for name in ("_parameters", "_buffers", "_modules"):
            vars(module)[name] = OrderedDict(vars(module)[name])
    compare(state_of(saved(model, tmp_path / "model.pt")), theirs)


# ------------------------------------------------------------------------------------------------------- random modules


def trees() -> st.SearchStrategy[nn.Module]:
    names = st.text("ab_1ß", min_size=1, max_size=3)
    tensors = st.lists(st.integers(0, 3), max_size=3).map(torch.ones)

    def grown(inner: st.SearchStrategy[nn.Module | None]) -> st.SearchStrategy[nn.Module]:
        return st.builds(
            made,
            st.dictionaries(names, st.none() | tensors, max_size=3),
            st.dictionaries(names, st.none() | st.tuples(tensors, st.booleans()), max_size=3),
            st.dictionaries(names, inner, max_size=3),
        )

    shared: list[nn.Module] = [nn.Linear(1, 2), nn.BatchNorm1d(2)]
    leaves: st.SearchStrategy[nn.Module | None] = st.none() | st.sampled_from(shared)
    return grown(st.recursive(leaves, grown, max_leaves=8))


def made(parameters: dict[str, Any], buffers: dict[str, Any], modules: dict[str, Any]) -> nn.Module:
    module = nn.Module()
    for name, tensor in parameters.items():
        module.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
    for name, buffer in buffers.items():
        if not hasattr(module, name):
            module.register_buffer(name, *(buffer or (None,)))
    for name, child in modules.items():
        if not hasattr(module, name):
            module.register_module(name, child)
    return module


@examples(40, HealthCheck.function_scoped_fixture)
@given(model=trees())
def test_any_tree_of_modules(model: nn.Module, tmp_path: Path) -> None:
    compare(state_of(saved(model, tmp_path / "model.pt")), model.state_dict())


# ------------------------------------------------------------------------------------------------------ hostile modules


def cyclic() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0]._modules["up"] = model
    return model


def doubling() -> nn.Module:
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(12):
        outer = nn.Module()
        outer._modules.update({"a" * 4000: model, "b" * 4000: model})
        model = outer
    return model


def with_field(name: str, value: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    vars(model)[name] = value
    return model


def deep() -> nn.Module:
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(250):
        outer = nn.Module()
        outer._modules["m"] = model
        model = outer
    return model


def twice() -> nn.Module:
    model = nn.Module()
    model._modules.update({"a.b": nn.Linear(1, 1), "a": nn.Sequential(OrderedDict(b=nn.Linear(1, 1)))})
    return model


class Private(nn.Module):
    """A module whose state is of its own making."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Private, (), (1, torch.ones(2))


HOSTILE = {
    "cyclic": (cyclic, CorruptError, "contains itself"),
    "doubling": (doubling, LimitError, "paths"),
    "deep": (deep, UnsupportedError, "levels deep"),
    "modules": (lambda: with_field("_modules", [nn.Linear(1, 1)]), CorruptError, "_modules is not a dictionary"),
    "parameters": (lambda: with_field("_parameters", None), CorruptError, "_parameters is not a dictionary"),
    "a number": (lambda: with_field("_parameters", {"weight": 3}), CorruptError, "'weight', that is not a tensor"),
    "no text": (lambda: with_field("_buffers", {3: torch.ones(1)}), CorruptError, "named 3, but names must be text"),
    "no module": (lambda: with_field("_modules", {"a": 3}), CorruptError, "'a' among its modules"),
    "private": (lambda: nn.Sequential(Private()), UnsupportedError, "a custom state"),
    "twice": (twice, CorruptError, "two parameters named"),
}


def test_tuples_shared_many_times_are_searched_once() -> None:
    cls = Global("models", "Model")
    value: Any = (Opaque(cls, state=[{"_parameters": {}, "_buffers": {}, "_modules": {}}]),)
    for _ in range(100):
        value = (value, value)
    found = taken({"v": value}, (cls,), "file").tree["v"]
    for _ in range(100):
        assert found[0] is found[1]
        found = found[1]
    assert found == (OrderedDict(),)


def test_the_module_inside_a_compiled_one_has_the_name_that_torch_gives_it() -> None:
    cls, compiled = Global("models", "Model"), Global("torch._dynamo.eval_frame", "OptimizedModule")
    weight = Inline(bytes(4), DTYPES["float32"], ())
    inner = Opaque(cls, state=[{"_parameters": {"w": weight}, "_buffers": {}, "_modules": {}}])
    settings = Opaque(Global("torch._dynamo.eval_frame", "OptimizeContext"))
    module = Opaque(compiled, (inner, settings), None, "reduce")
    outer = Opaque(cls, state=[{"_parameters": {}, "_buffers": {}, "_modules": {"net": module}}])
    found = taken({"whole": module, "part": outer}, (cls, compiled), "file")
    assert found.tree == {"whole": {"_orig_mod.w": weight}, "part": {"net._orig_mod.w": weight}}
    assert not found.opaque
    empty = Opaque(compiled, (), None, "reduce")
    assert taken({"whole": empty}, (compiled,), "file").tree == {"whole": empty}


@every("kind", HOSTILE)
def test_modules_without_a_state_dict_are_refused(kind: str, tmp_path: Path) -> None:
    make, error, reason = HOSTILE[kind]
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        path = saved(make(), tmp_path / "model.pt")
    finally:
        sys.setrecursionlimit(usual)
    with pytest.raises(error, match=reason):
        open_source(path)
    try:
        open_source(path, raw=True)
    except CkptconvError:
        pytest.fail("--raw reads it")

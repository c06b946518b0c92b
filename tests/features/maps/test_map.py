"""Conversions with a map: what they write, what verify finds in it, and the way back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, looking, of_features, offered, verified, verifying
from checkpoints import ckptconv_here, done
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

import ckptconv
from ckptconv import convert
from ckptconv.errors import CorruptError, DifferenceError, UsageError
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import NAMED

MAP = """
drop = ["*._extra_state"]
[[rule]]
megatron = "layers.{l}.linear_qkv : (g (q + k + v) d) h"
hf = ["model.{l}.q : (g q d) h", "model.{l}.k : (g k d) h", "model.{l}.v : (g v d) h"]
[[rule]]
megatron = "layers.{l}.experts.{e}.fc1 : (f + f) h"
hf = "model.{l}.gate_up : e h (f + f)"
[[rule]]
megatron = "embedding : (vocabulary + _) h"
hf = "model.embed : vocabulary h"
[[rule]]
megatron = "output : (vocabulary + _) h"
hf = "head : vocabulary h"
[[rule]]
megatron = "layers.{l}.norm"
hf = "model.{l}.norm"
[sizes]
g = ["num_key_value_heads"]
d = ["head_dim", "hidden_size / num_attention_heads"]
vocabulary = "vocab_size"
k = 1
v = 1
"""
G, Q, D, H, E, F, VOCABULARY = 2, 3, 4, 6, 3, 5, 7
CONFIG = {"num_key_value_heads": G, "hidden_size": 24, "num_attention_heads": 6, "vocab_size": VOCABULARY}
SIZES = {"g": G, "d": D, "vocabulary": VOCABULARY}


def weights() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCABULARY + 2, H, generator=generator)
    embedding[VOCABULARY:] = 0
    made["embedding"] = embedding
    for layer in range(2):
        made[f"layers.{layer}.linear_qkv"] = torch.randn(G * (Q + 2) * D, H, generator=generator)
        made[f"layers.{layer}.norm"] = torch.randn(H, generator=generator)
        for expert in range(E):
            made[f"layers.{layer}.experts.{expert}.fc1"] = torch.randn(2 * F, H, generator=generator)
    made["output"] = embedding
    return made


def expected(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the map makes, by torch."""
    made = {"model.embed": state["embedding"][:VOCABULARY], "head": state["output"][:VOCABULARY]}
    for layer in range(2):
        groups = state[f"layers.{layer}.linear_qkv"].reshape(G, Q + 2, D, H)
        made[f"model.{layer}.q"] = groups[:, :Q].reshape(-1, H)
        made[f"model.{layer}.k"] = groups[:, Q].reshape(-1, H)
        made[f"model.{layer}.v"] = groups[:, Q + 1].reshape(-1, H)
        made[f"model.{layer}.norm"] = state[f"layers.{layer}.norm"]
        experts = [state[f"layers.{layer}.experts.{expert}.fc1"].T for expert in range(E)]
        made[f"model.{layer}.gate_up"] = torch.stack(experts)
    return made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(MAP)
    torch.save(weights(), "model.pt")
    return tmp_path


def same(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_a_map_gives_names_and_layouts(place: Path) -> None:
    report = convert("model.pt", "hf.safetensors", map="my.toml", size=SIZES, **VERIFIED)
    assert report.aliases == {"head": "model.embed"}
    assert [warning for warning in report.warnings if "padding" in warning] == [
        f"left out as padding: {2 * H} elements of 'embedding', {2 * H} elements of 'output'"
    ]
    found = load_file("hf.safetensors")
    wanted = expected(weights())
    del wanted["head"]
    same(found, wanted)


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_the_report_says_in_which_direction_a_map_was_applied(place: Path) -> None:
    report = convert("model.pt", "hf.safetensors", map="my.toml", size=SIZES)
    assert "map my.toml: names of megatron → names of hf" in report.notes
    report = convert("hf.safetensors", "back.pt")
    assert "map my.toml: names of hf → names of megatron" in report.notes


def test_names_of_another_program_are_not_published_beside_a_configuration_of_transformers(place: Path) -> None:
    convert("model.pt", "hf/", map="my.toml", size=SIZES)
    Path("hf/config.json").write_text(json.dumps({**CONFIG, "model_type": "my"}))
    with pytest.raises(UsageError, match=r"the output would get the config\.json of transformers"):
        convert("hf", "published", map="my.toml", for_hub=True)
    assert not Path("published").exists()
    convert("hf", "published", map="my.toml", for_hub=True, copy_config=False)
    Path("config.json").write_text(json.dumps({**CONFIG, "model_type": "my"}))
    convert("model.pt", "hub", map="my.toml", for_hub=True)
    assert Path("hub/config.json").exists()


def test_sizes_come_from_the_configuration_beside_a_checkpoint(place: Path) -> None:
    Path("config.json").write_text(json.dumps(CONFIG))
    convert("model.pt", "hf.safetensors", map="my.toml", tied="duplicate")
    same(load_file("hf.safetensors"), expected(weights()))


@verifying
@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_with_a_reference_the_sizes_come_from_its_configuration_and_its_shapes(place: Path) -> None:
    reference = {name: torch.zeros_like(tensor).bfloat16() for name, tensor in expected(weights()).items()}
    del reference["head"]  # which it ties
    torch.save(reference, "base.pt")
    convert("base.pt", "base/", max_shard_size=500)
    Path("base/config.json").write_text(json.dumps({**CONFIG, "vocab_size": 1000}))
    my_map = MAP.replace('vocabulary = "vocab_size"\n', "")
    Path("my.toml").write_text(my_map)
    convert("model.pt", "hf/", map="my.toml", like="base/", exclude="output", **VERIFIED)
    names = sorted(path.name for path in Path("base").glob("*.safetensors"))
    assert sorted(path.name for path in Path("hf").glob("*.safetensors")) == names
    wanted = expected(weights())
    del wanted["head"]
    found = {name: tensor for file in names for name, tensor in load_file(f"hf/{file}").items()}
    same(found, {name: tensor.bfloat16() for name, tensor in wanted.items()})
    assert ckptconv.verify("model.pt", "hf/").tensors == len(wanted)
    convert("hf/", "back.pt")
    assert torch.load("back.pt")["embedding"].shape == weights()["embedding"].shape


@verifying
def test_renaming_comes_before_the_map_and_a_cast_after_it(place: Path) -> None:
    torch.save({f"module.{name}": tensor for name, tensor in weights().items()}, "model.pt")
    convert("model.pt", "hf/", map="my.toml", size=SIZES, strip_prefix="module.", dtype="bf16", include=["*linear_qkv"])
    wanted = {name: tensor for name, tensor in expected(weights()).items() if name[-2:] in (".q", ".k", ".v")}
    same(load_file("hf/model.safetensors"), {name: tensor.bfloat16() for name, tensor in wanted.items()})
    assert ckptconv.verify("model.pt", "hf/").tensors == len(wanted)


@verifying
def test_verify_knows_the_map_by_the_manifest(place: Path) -> None:
    convert("model.pt", "hf/", map="my.toml", size=SIZES, max_shard_size=500)
    Path("my.toml").unlink()
    assert ckptconv.verify("model.pt", "hf/").bytes_compared == sum(
        tensor.nbytes for name, tensor in expected(weights()).items() if name != "head"
    )
    with safe_open(sorted(Path("hf").glob("*.safetensors"))[0], "pt") as opened:
        record = json.loads(opened.metadata()["ckptconv.map"])
    assert (record["name"], record["from"], record["to"], record["text"]) == ("my.toml", "megatron", "hf", MAP)
    assert record["sha256"] == hashlib.sha256(MAP.encode()).hexdigest()
    assert record["sizes"]["g"] == G
    assert record["sizes"]["3._"] == 2


@verifying
def test_verify_finds_two_tensors_that_were_exchanged(place: Path) -> None:
    convert("model.pt", "hf/", map="my.toml", size=SIZES)
    path = Path("hf/model.safetensors")
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    tensors["model.0.k"], tensors["model.0.v"] = tensors["model.0.v"], tensors["model.0.k"]
    save_file(tensors, path, metadata)
    with pytest.raises(DifferenceError, match=r"model\.0\.k"):
        ckptconv.verify("model.pt", "hf/")


@verifying
@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_the_way_back_needs_no_words(place: Path) -> None:
    convert("model.pt", "hf/", map="my.toml", size=SIZES)
    convert("hf/", "back.pt", **VERIFIED, manifest="back.json")
    back = torch.load("back.pt")
    same(back, weights())
    assert back["output"].data_ptr() == back["embedding"].data_ptr()
    assert ckptconv.verify("hf/", "back.pt", manifest="back.json").tensors == len(back)
    convert("hf/", "as-it-is.pt", map="none", **VERIFIED, manifest="none.json")
    same(torch.load("as-it-is.pt"), expected(weights()))
    verified("hf/", "as-it-is.pt", manifest="none.json")


def test_the_map_itself_leads_back_with_the_sizes_that_were_recorded(place: Path) -> None:
    convert("model.pt", "hf/", map="my.toml", size=SIZES)
    convert("hf/", "again.safetensors", map="my.toml", tied="duplicate")
    same(load_file("again.safetensors"), weights())


def test_a_dry_run_lists_what_is_made_of_what(place: Path) -> None:
    run = ckptconv_here(
        *("convert", "model.pt", "hf.safetensors", "--map", "my.toml", "--dry-run"),
        *("--size", f"g={G}", "--size", f"d={D}", "--size", f"vocabulary={VOCABULARY}"),
    )
    assert "model.0.q ← layers.0.linear_qkv\n" in run.out.replace("'", "")
    assert "model.1.gate_up ← layers.1.experts.0.fc1, layers.1.experts.1.fc1, layers.1.experts.2.fc1\n" in run.out
    made_of = convert("model.pt", "hf.safetensors", map="my.toml", size=SIZES, dry_run=True).made_of
    assert made_of["model.0.norm"] == ["layers.0.norm"]
    assert not Path("hf.safetensors").exists()


def test_what_a_map_makes_is_shown(place: Path) -> None:
    sizes = [word for name, size in SIZES.items() for word in ("--size", f"{name}={size}")]
    for command in looking():
        found = done(ckptconv_here(command, "model.pt", "--map", "my.toml", *sizes, "--json")).json
        assert {tensor["name"]: tuple(tensor["shape"]) for tensor in found["tensors"]} == {
            name: tuple(tensor.shape) for name, tensor in expected(weights()).items()
        }
        assert found["made_of"]["model.0.v"] == ["layers.0.linear_qkv"]
        assert found["aliases"] == {"head": "model.embed"}


def test_the_side_to_make_can_be_said(place: Path) -> None:
    Path("turn.toml").write_text('[[rule]]\none = "w : (n e two) h"\nother = "w : (n two e) h"\n')
    save_file({"w": torch.arange(24.0).reshape(12, 2)}, "w.safetensors")
    sizes = {"n": 2, "e": 3}
    with pytest.raises(UsageError, match="on its side 'one', and the same number on its side 'other'"):
        convert("w.safetensors", "x.safetensors", map="turn.toml", size=sizes)
    for side, shape, swapped in (("other", (2, 3, 2, 2), (2, 2, 3, 2)), ("one", (2, 2, 3, 2), (2, 3, 2, 2))):
        convert("w.safetensors", "x.safetensors", map=f"turn.toml:{side}", size=sizes)
        turned = torch.arange(24.0).reshape(shape).transpose(1, 2)
        assert turned.shape == swapped
        assert torch.equal(load_file("x.safetensors")["w"], turned.reshape(12, 2))
    with pytest.raises(UsageError, match="not 'third'"):
        convert("w.safetensors", "x.safetensors", map="turn.toml:third", size=sizes)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda state: state.pop("layers.1.experts.1.fc1"), CorruptError, r"'layers\.1\.experts\.1\.fc1' is missing"),
        (lambda state: state.update(extra=torch.ones(2)), UsageError, "no rule for 1 tensor.*'extra'"),
        (lambda state: state.update({"layers.0.linear_qkv": torch.ones(41, 6)}), UsageError, r"layers\.0\.linear_qkv"),
        (
            lambda state: state.update({"layers.0.experts.0.fc1": state["layers.0.experts.0.fc1"].half()}),
            UsageError,
            "different dtypes: float16, float32",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    place: Path, change: Any, error: type[Exception], told: str
) -> None:
    state = weights()
    change(state)
    torch.save(state, "model.pt")
    with pytest.raises(error, match=told):
        convert("model.pt", "hf/", map="my.toml", size=SIZES)
    assert not Path("hf").exists()


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_a_record_that_is_none_is_one_sentence(place: Path) -> None:
    save_file({"a": torch.ones(2)}, "x.safetensors", {"ckptconv.map": "[" * 100_000})
    with pytest.raises(UsageError, match="the record of its map is not valid:"):
        convert("x.safetensors", "x.pt")
    convert("x.safetensors", "x.pt", map="none")


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_a_record_that_does_not_fit_any_more_is_said_to_be_one(place: Path) -> None:
    convert("model.pt", "hf.safetensors", map="my.toml", size=SIZES)
    convert("hf.safetensors", "renamed.safetensors", strip_prefix="model.")
    with pytest.raises(
        UsageError, match=r"was written with a map, but the reverse of that map does not match its names\..*--map none"
    ):
        convert("renamed.safetensors", "x.pt")


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_scalars_that_differ_cannot_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.toml").write_text('[[rule]]\na = ["x : f", "y : f"]\nb = "xy : (f + f)"\n')
    state = {
        name: {"exp_avg": torch.ones(3) * step, "step": torch.tensor(float(step))} for step, name in enumerate("xy")
    }
    torch.save({"state": state, "param_groups": [{"params": ["x", "y"]}]}, "o.pt")
    convert("o.pt", "o.safetensors")
    with pytest.raises(CorruptError, match=r"xy\.step"):
        convert("o.safetensors", "back.pt", map="m.toml")


def test_a_map_may_be_named_by_a_file_url(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    (tmp_path / "own.toml").write_text('[[rule]]\na = "w"\nb = "v"\n')
    here = f"file://{tmp_path}"
    ckptconv.convert(f"{here}/m.pt", f"{here}/out", map=f"{here}/own.toml", fsync=False)
    ckptconv.convert(f"{here}/m.pt", f"{here}/more", map=f"{here}/own.toml:b", fsync=False)
    for words in (["show", f"{here}/own.toml"], ["check", f"{here}/own.toml", f"{here}/m.pt"]):
        run = ckptconv_here("maps", *words)
        assert run.code == 0, run.err


def test_a_map_is_applied_to_what_is_described(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    (tmp_path / "own.toml").write_text('[[rule]]\na = "w"\nb = "v"\n')
    for suffix in DESCRIBING:
        ckptconv.convert(tmp_path / "m.pt", tmp_path / f"x{suffix}", fsync=False)
    for source in ("m.pt", *(f"x{suffix}" for suffix in DESCRIBING)):
        for files in offered(tmp_path / source, map=tmp_path / "own.toml"):
            assert load(files.read_bytes("model.safetensors")).keys() == {"v"}
        for offer in of_features("OFFERING"):
            with pytest.raises(UsageError, match="The map 'nope' does not exist"):
                offer(tmp_path / source, map="nope")


def test_values_that_are_no_tensors_are_named_in_a_note(place: Path) -> None:
    torch.save({**weights(), "common": {"iteration": 7}}, "run.pt")
    report = convert("run.pt", "hf.safetensors", map="my.toml", size=SIZES)
    assert "Not converted: common, because --map writes only tensors." in report.notes
    assert not [warning for warning in report.warnings if "common" in warning]

"""Every option for every kind of output: it has its effect, or is refused, or the report says that it has none."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cells import of_features
from checkpoints import DATA, ZERO, contents
from effort import every
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import CkptconvError, UsageError
from ckptconv.options.table import OPTIONS, Options
from ckptconv.outputs.kinds import FURTHER, KINDS, check_options, entry_of, flag
from ckptconv.process import has_feature

# What asks for an output of each kind of the trunk.
OWN: dict[str, dict[str, Any]] = {
    "file": {"output": "x.safetensors"},
    "directory": {"output": "x"},
    "states": {"optimizer": "x"},
    "states-file": {"optimizer": "x.safetensors"},
}
# Kinds of features: what asks for them, and what becomes of each option.
OF_FEATURES = {kind: told for kinds in of_features("KINDS") for kind, told in kinds.items()}
ASKED: dict[str, dict[str, Any]] = {**OWN, **{kind: asked for kind, (asked, _) in OF_FEATURES.items()}}
HEEDED, REFUSED, SAID = "hrs"
# A checkpoint of the kind that an output can be like.
LIKE = "../like"


class Row(NamedTuple):
    """What becomes of an option, by kind in the order of `OWN`: heeded, refused, or said to have no effect.

    `given` is the option, `beside` others that it needs. `source` has what it is about.
    """

    kinds: str
    given: dict[str, Any]
    beside: tuple[tuple[str, Any], ...] = ()
    source: str = "model"


MATRIX = {
    "max_shard_size": Row("rhhr", {"max_shard_size": 300}),
    "dtype": Row("hhss", {"dtype": "bf16"}),
    "key": Row("hhss", {"key": "m"}, source="nested"),
    "include": Row("hhhh", {"include": "l1.*"}),
    "exclude": Row("hhhh", {"exclude": "l1.*"}),
    "strip_prefix": Row("hhhh", {"strip_prefix": "l1."}),
    "rename": Row("hhhh", {"rename": "^l1=q"}),
    "tied": Row("hhhh", {"tied": "duplicate"}),
    "structure": Row("hhhh", {"structure": False}, source="nested"),
    "states": Row("rrrr", {"states": "../zero"}),
    "opaque": Row("ssss", {"opaque": "drop"}, source="opaque"),
    "for_hub": Row("hhrr", {"for_hub": True}, source="nested"),
    "exclude_frozen_parameters": Row("hhss", {"exclude_frozen_parameters": True}, source="zero"),
    "clobber": Row("hhhh", {"clobber": False}),
    "checksum": Row("hhhh", {"checksum": True}),
    "manifest": Row("hhhh", {"manifest": "manifest.json"}),
    "digest": Row("hhhh", {"digest": "sha256"}, (("manifest", "manifest.json"),)),
    "dry_run": Row("hhhh", {"dry_run": True}),
    **{option: Row(*row) for rows in of_features("ROWS_OF_KINDS") for option, row in rows.items()},
}
# Options that name the outputs, or are about how the input is reached and read, or how fast: they know of no kind.
OTHERS = {"to", *FURTHER, "per_rank", "drop_opaque", "jobs", "memory", "fsync", "spool_dir"}
OTHERS |= {"overwrite", "storage_options", "raw", "alone", "family", "tag", "master", "unstack"}
OTHERS = OTHERS.union(*of_features("OF_INPUTS"))


def outcomes(option: str) -> dict[str, str]:
    """What becomes of an option, by kind."""
    added = {kind: told[option] for kind, (_, told) in OF_FEATURES.items()}
    return {**dict(zip(OWN, MATRIX[option].kinds, strict=True)), **added}


class Thing:
    """Is known to ckptconv by its name only."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the inputs are, and directories to work in beside them."""
    here = tmp_path_factory.mktemp("kinds")
    zero = ZERO / "z2_bf16_frozen_w2" / "checkpoint"
    (here / "zero").symlink_to(zero)
    ckptconv.convert(zero, here / "model")
    ckptconv.convert(zero, here / "opaque")
    weights = load_file(here / "model" / "model.safetensors")
    weights["head.weight"] = weights["emb.weight"]
    (here / "model" / "config.json").write_text("{}")
    torch.save({"m": weights, "epoch": 3}, here / "nested.pt")
    torch.save({"m": weights["scale"], "thing": Thing()}, here / "opaque.pt")
    for name in ("nested", "opaque"):
        ckptconv.convert(here / f"{name}.pt", here / name)
    apart = {name: tensor.clone() for name, tensor in weights.items()}
    save_file({**apart, "more": torch.ones(2)}, here / "more.safetensors")
    save_file({**apart, "scale": apart["scale"].double()}, here / "like.safetensors")
    for make in of_features("make_like"):
        make(here)
    (here / "quantized").mkdir()
    save_file(
        {"w.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "w.weight_scale": torch.tensor([2.0])},
        here / "quantized" / "model.safetensors",
    )
    _save_layers(here / "layered")
    others = [name for name in weights if name != "l1.weight"]
    (here / "map.toml").write_text(f"keep = {others}\n{(DATA / 'turned.toml').read_text()}")
    return here


def _save_layers(here: Path) -> None:
    """Put a model of text and images, with layers and experts, into a directory."""
    here.mkdir()
    at = "language_model.model"
    shapes = {f"{at}.embed_tokens.weight": (4, 2), "vision_tower.norm.weight": (3,)}
    for layer in range(2):
        shapes[f"{at}.layers.{layer}.mlp.gate.weight"] = (2, 2)
        shapes |= {f"{at}.layers.{layer}.mlp.experts.{expert}.up.weight": (2, 2) for expert in range(2)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, here / "model.safetensors")
    text = {"num_hidden_layers": 2, "num_experts": 2, "vocab_size": 4}
    (here / "config.json").write_text(json.dumps({"text_config": text}))


@pytest.fixture
def make(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that converts in a directory of its own: what it makes there, as far as options may change it, and
    what it says; or the error."""

    def make(kind: str, source: str, options: Mapping[str, Any], *before: Mapping[str, Any]) -> Any:
        monkeypatch.chdir(tempfile.mkdtemp(dir=place))
        for each in before:
            convert(kind, source, each)
        try:
            report = convert(kind, source, options)
        except CkptconvError as error:
            return error
        # Manifests, and the plan id in a virtual checkpoint, record the options, whatever becomes of them.
        files = {name: re.sub(rb'"plan":"\w+"', b"", data) for name, data in contents(Path()).items()}
        digests = {name: b"digests" in files.pop(name) for name in list(files) if "manifest" in name}
        checked = report.checksums, any("cannot be checked" in each for each in report.warnings)
        return (files, digests, checked, bool(report.bytes_verified)), [*report.warnings, *report.notes]

    return make


def convert(kind: str, source: str, options: Mapping[str, Any]) -> ckptconv.Report:
    words = {**ASKED[kind], **options}
    if words.get("like") == LIKE:
        holds = entry_of(kind).holds
        words["like"] += f".{holds}" if holds in ("dcp", "megatron") else ".safetensors"
    return ckptconv.convert(f"../{source}", words.pop("output", None), fsync=False, jobs=1, **words)


BASES: dict[Any, Any] = {}
# Options that need the structure record of their source, which a feature reads.
UNREAD = () if has_feature("unflattening") else ("key", "opaque")


@pytest.mark.parametrize("option", [option for option in MATRIX if option not in UNREAD])
@every("kind", ASKED)
def test_an_option_is_heeded_or_refused_or_said_to_have_no_effect(
    option: str, kind: str, make: Callable[..., Any]
) -> None:
    row = MATRIX[option]
    expected = outcomes(option)[kind]
    # Only some checkpoints have states of an optimizer, and only safetensors become a `.pt` file.
    has_states = entry_of(kind).holds in FURTHER
    source = "zero" if has_states else "model" if (kind, row.source) == ("torch", "zero") else row.source
    given = {**dict(row.beside), **row.given}
    outcome = make(kind, source, given, *([{}] if option == "clobber" else []))
    if expected == REFUSED or option == "clobber":
        assert isinstance(outcome, CkptconvError)
        assert any(flag(each) in str(outcome) for each in given)
        return
    assert not isinstance(outcome, CkptconvError), outcome
    base = kind, source, row.beside
    if base not in BASES:
        BASES[base] = make(kind, source, dict(row.beside))
    without = BASES[base]
    if expected == HEEDED:
        # An option may also be what makes a conversion possible.
        assert isinstance(without, CkptconvError) or outcome[0] != without[0]
    else:
        assert outcome[0] == without[0]
        assert any(flag(option) in told for told in outcome[1]), outcome[1]


def test_the_matrix_has_every_option_and_every_kind() -> None:
    assert MATRIX.keys() | OTHERS == OPTIONS.keys()
    assert ASKED.keys() == KINDS.keys()
    assert {len(row.kinds) for row in MATRIX.values()} == {len(OWN)}


@every("option", [name for name in ("tied", "quantize", "requantize", "include", "copy_config") if name in MATRIX])
def test_of_several_outputs_one_refuses_an_option_where_none_heeds_it(option: str) -> None:
    by_kind = outcomes(option)
    options = Options(**dict(MATRIX[option].beside), **MATRIX[option].given)
    for kinds in itertools.combinations(ASKED, 2):
        told = {by_kind[kind] for kind in kinds}
        if HEEDED in told or REFUSED not in told:
            check_options(kinds, options)
        else:
            with pytest.raises(UsageError):
                check_options(kinds, options)


@pytest.mark.skipif("torch" not in KINDS, reason="no feature writes .pt files")
@every("name", ["x.pt", "x.pth", "x.bin", "x.ckpt"])
def test_optimizer_states_are_not_written_under_the_name_of_another_kind(
    name: str, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="optimizer states are written as safetensors"):
        ckptconv.convert(place / "zero", tmp_path / "model", optimizer=tmp_path / name)
    assert list(tmp_path.iterdir()) == []

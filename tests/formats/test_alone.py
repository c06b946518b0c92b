"""One file of many, a rank's or a shard, is taken for a model only by whoever says so."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from cells import VERIFY, loaded, looking, of_features, offered, opened, verified, verified_here
from checkpoints import ckptconv_here, contents, done
from effort import every
from lone_files import STATE, Make, W, making
from reading import state_in
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import CorruptError, UnsupportedError
from ckptconv.cli.registered import COMMANDS
from ckptconv.formats.detect import open_source
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import FURTHER

QUIETLY = ("--no-fsync", "--quiet")


SHARD = {"model": {"w": torch.zeros(6)}, "shard_metadata": {"rank": 0, "world_size": 2, "shard_info": {}}}
# A file of each family, and what is to be named in its place.
PARTS: dict[str, tuple[Make, str]] = {
    "a shard": (making(STATE, "pytorch_model-00001-of-00003.bin"), "or its index"),
    "a shard of safetensors": (making(STATE, "model-00002-of-00002.safetensors"), "or its index"),
    "a shard of DeepSeek": (making(STATE, "model-00001-of-000163.safetensors"), "or its index"),
    "a shard of very many": (making(STATE, "pytorch_model-100000-of-100001.bin"), "or its index"),
    "a shard of a variant": (making(STATE, "model-00002-of-00002.fp16.safetensors"), "or its index"),
    "a shard beside its index": (
        making(STATE, "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        "or its index",
    ),
    "torch_xla": (making(SHARD, "model_rank-00000000-of-00000002.pth"), "consolidate_sharded_ckpts"),
    "vLLM": (making(STATE, "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"), "ranks"),
    "TensorRT-LLM": (making(STATE, "rank1.safetensors"), "ranks"),
    "DeepSeek": (making(STATE, "model0-mp8.safetensors"), "ranks"),
    "fairseq": (making(STATE, "checkpoint_last-model_part-1.pt"), "ranks"),
    **{name: part for parts in of_features("PARTS") for name, part in parts.items()},
}


@every("family", PARTS)
def test_one_file_of_many_is_not_a_model(family: str, tmp_path: Path) -> None:
    make, instead = PARTS[family]
    path = make(tmp_path)
    before = contents(tmp_path)
    run = ckptconv_here("convert", path, tmp_path / "o.safetensors", *QUIETLY)
    run.refused(5, path, instead.format(path), ". To convert only this file, use --alone.")
    assert contents(tmp_path) == before
    for command in looking():
        shown = done(ckptconv_here(command, path, "--json"))
        assert any(str(path) in each and "--alone" in each for each in shown.json["warnings"]), command


@every("family", ["a shard", *itertools.chain(*of_features("TAKEN_ALONE"))])
def test_it_is_converted_if_it_is_asked_for_alone(family: str, tmp_path: Path) -> None:
    path = PARTS[family][0](tmp_path)
    run = ckptconv_here("convert", path, tmp_path / "o", "--alone", "--opaque", "drop", "--no-fsync", "--json")
    assert run.code == 0, run.err
    assert any("Only this file was converted." in note for note in run.json["notes"])
    verified_here(path, tmp_path / "o")  # the manifest says how it was made
    # The way back needs no further word, in one file or several.
    for output in (tmp_path / "o", tmp_path / "o.safetensors"):
        if output.suffix:
            assert ckptconv_here("convert", path, output, "--alone", "--opaque", "drop", "--no-fsync").code == 0
        assert state_in(output)


WHOLE: dict[str, Make] = {
    "a model": making(STATE, "model.pt", "other.pt"),
    "Mistral's, whose heads are narrower than the model": making(
        {
            "tok_embeddings.weight": torch.zeros(8, 5),
            "layers.0.attention.wo.weight": torch.zeros(5, 4),
            "norm.weight": torch.ones(5),
        },
        "consolidated.safetensors",
    ),
    "the only shard": making(STATE, "model-00001-of-00001.safetensors"),
    "DeepSeek's only rank": making(STATE, "model0-mp1.safetensors"),
    "vLLM's only rank": making(STATE, "model-rank-0-part-0.safetensors"),
    "steps beside each other": making(STATE, "model_100.pt", "model_200.pt"),
    "a directory called zero": making(STATE, "zero/run/model.pt"),
    "a parameter called param": making({"param": W}, "model.pt"),
    **{name: make for whole in of_features("WHOLE_FILES") for name, make in whole.items()},
}


@every("name", WHOLE)
def test_a_file_that_is_whole_is_converted(name: str, tmp_path: Path) -> None:
    path = WHOLE[name](tmp_path)
    run = done(ckptconv_here("convert", path, tmp_path / "o.safetensors", "--no-fsync", "--json"))
    assert run.json["warnings"] == []
    idle = ckptconv_here("convert", path, tmp_path / "o.safetensors", "--alone", "--no-fsync", "--json")
    assert idle.json["warnings"] == [f"--alone has no effect: {path} is not one file of a set."]


@every("make, words", [*itertools.chain(*of_features("MAYBE_WHOLE"))])
def test_a_file_that_may_be_all_is_converted_with_a_warning(make: Make, words: str, tmp_path: Path) -> None:
    run = done(ckptconv_here("convert", make(tmp_path), tmp_path / "o.safetensors", "--no-fsync", "--json"))
    assert words in run.json["warnings"][0]


@every("family", ["a shard of safetensors", *itertools.chain(*of_features("LONELY"))])
def test_a_directory_with_one_of_them_lacks_the_others(family: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = PARTS[family][0](tmp_path / "in")
    directory = path.parent.parent if family.startswith("Megatron") else path.parent
    run = ckptconv_here("convert", directory, tmp_path / "o.safetensors", *QUIETLY)
    run.refused(4, path, f"{directory} lacks the other files.", "--alone")


def test_a_shard_becomes_a_shard_of_the_same_number(tmp_path: Path) -> None:
    path = PARTS["a shard"][0](tmp_path)
    run = done(ckptconv_here("pt2safetensors", path, *VERIFY, "--json"))
    reports = verified(path, tmp_path / "model-00001-of-00003.safetensors")
    for warnings in (run.json["warnings"], *(verification.warnings for verification in reports)):
        assert any("is one file of a sharded set" in warning for warning in warnings)
    assert load_file(tmp_path / "model-00001-of-00003.safetensors").keys() == STATE.keys()


def test_a_set_without_its_index_is_told(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": W}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    shard = tmp_path / "model-00001-of-00002.safetensors"
    ckptconv_here("convert", tmp_path, tmp_path / "o").refused(2, tmp_path, "model.safetensors.index.json", "--alone")
    ckptconv_here("convert", shard, tmp_path / "o").refused(
        5, shard, f"the directory of the set, {tmp_path}", "--alone"
    )
    assert ckptconv_here("convert", shard, tmp_path / "o", "--alone").code == 0
    assert open_source(tmp_path / "o").weights.keys() == open_source(shard).weights.keys() == {"w1"}


def test_no_way_takes_it_for_a_model(tmp_path: Path) -> None:
    path = PARTS["a shard of safetensors"][0](tmp_path)
    other = making(STATE, "other/model.safetensors")(tmp_path)
    # The tensors of a named shard are whole.
    for ck in opened(path):
        assert [*ck] == [*load_file(path)]
    for offer in (*of_features("OFFERING"), *of_features("LOADER")):
        with pytest.raises(UnsupportedError, match="--alone"):
            offer(path)
    for command in (
        *itertools.chain(*(words(path, tmp_path) for words in of_features("refused_alone"))),
        *([("safetensors2pt", path, tmp_path / "x.pt")] if "safetensors2pt" in COMMANDS else []),
        *([("convert", other, tmp_path / "o.safetensors", "--like", path)] if "like" in OPTIONS else []),
        *(("convert", path, f"--{name}", tmp_path / "further") for name in FURTHER if name != "optimizer"),
    ):
        ckptconv_here(*command).refused(5, path, "--alone")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model-00002-of-00002.safetensors", "other"]


def test_who_asks_for_it_alone_has_it_everywhere(tmp_path: Path) -> None:
    path = PARTS["a shard of safetensors"][0](tmp_path)
    ckptconv.convert(path, tmp_path / "o.safetensors", alone=True, fsync=False)
    assert load_file(tmp_path / "o.safetensors").keys() == STATE.keys()
    for state in loaded(path, alone=True):
        assert state.keys() == STATE.keys()
    for ck in opened(path, alone=True):
        assert list(ck) == list(STATE)
        ckptconv.convert(ck, tmp_path / "again.safetensors", fsync=False)
        assert load_file(tmp_path / "again.safetensors").keys() == STATE.keys()
    for files in offered(path, alone=True):
        assert files.keys() == {"model.safetensors"}


def test_an_index_says_that_its_files_are_all(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(STATE, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done(ckptconv_here("convert", tmp_path, tmp_path / "o.safetensors", *QUIETLY))


def test_what_a_file_of_a_directory_holds_is_an_error_of_the_directory(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CorruptError, match="lacks the other files"):
        open_source(tmp_path).check_weights()

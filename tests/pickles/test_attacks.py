"""The corpus of hostile, broken and odd files: nothing runs, nothing explodes, nothing is misread."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import corpus
from attacks.assemble import VALUES
from attacks.corpus import CASES, Case
from attacks.directories import Directory
from attacks.ending import LARGE, Ending, ending_of, size_of
from attacks.every import ALL, ALL_DIRECTORIES
from attacks.live import ODD
from cells import looking, of_features
from checkpoints import ckptconv_here
from effort import TIMES
from safetensors.torch import load_file

import ckptconv
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.pickles import attacks
from ckptconv.pickles.containers import CONSTANTS, PYTHON
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.process import has_feature

# What a file takes at most, in calls of functions.
MOST_CALLS = 4_000_000
# What the process that converts them takes at most.
MOST_MEMORY = 320 << 20
FAMILIES = sorted({case.family for case in ALL})
LIVE = [case for case in CASES.values() if case.live]
W = torch.tensor(VALUES).reshape(2, 3)


def written(case: Case, directory: Path) -> Path:
    path = directory / case.file
    path.write_bytes(case.make(str(directory / "canary")))
    return path


def filled(directory: Directory, place: Path) -> Path:
    """A directory of the corpus, in another of its name; the input of the conversion."""
    inside = place / directory.file / "in"
    inside.mkdir(parents=True)
    return directory.make(inside, str(place / "canary"))


def output_of(command: str, place: Path) -> Path:
    return place / ("model.pt" if command == "safetensors2pt" else "model.safetensors")


def loaded(output: Path) -> Any:
    """What an output holds, read as carelessly as can be."""
    return torch.load(output, weights_only=False) if output.suffix == ".pt" else load_file(output)


def test_the_manifest_says_what_the_corpus_is() -> None:
    assert corpus.MANIFEST.read_text() == corpus.manifest_text(), "python -m attacks.corpus --manifest, in tests/"
    assert len(CASES) >= 150
    assert Counter(case.exit for case in LIVE)[corpus.UNSAFE] > 90


def load_carelessly(path: Path) -> None:
    """Load a file with torch.load, or as programs load safetensors that a feature reads."""
    if path.suffix == ".pt":
        torch.load(path, weights_only=False)
        return
    for load in of_features("CARELESS"):
        load(path)


def be_a_victim(paths: Sequence[Path], canary: Path, told: Path) -> None:
    """Load every file, and tell the names of those that made the canary."""
    with told.open("w") as telling:
        for path in paths:
            with contextlib.suppress(BaseException):
                load_carelessly(path)
            if os.path.lexists(canary):
                print(path.name, file=telling, flush=True)
                shutil.rmtree(canary) if canary.is_dir() else canary.unlink()


@pytest.mark.filterwarnings("ignore")
def test_the_live_files_are_live(tmp_path: Path) -> None:
    """Else it would be no wonder that they do nothing here."""
    paths = [written(case, tmp_path) for case in ALL if case.live]
    for directory in ALL_DIRECTORIES:
        if directory.live:
            # The file alone, under the name of the directory.
            filled(directory, tmp_path)
            paths.append((tmp_path / directory.file / "in" / directory.live).rename(tmp_path / f"{directory.file}.pt"))
    victim = os.fork()  # what they do, they do to a process of its own
    if not victim:
        try:
            os.chdir(tmp_path)
            be_a_victim(paths, tmp_path / "canary", tmp_path / "told")
        finally:
            os._exit(0)
    os.waitpid(victim, 0)
    assert set((tmp_path / "told").read_text().split()) ^ {path.name for path in paths} == set()


def assert_ended(case: Case | Directory, source: Path, output: Path, ending: Ending) -> Any:
    """A conversion ended as `case` says. What it wrote, if it wrote something."""
    assert ending.called < MOST_CALLS, case.file
    # Safetensors made of safetensors keep as data what a file for torch.load would have to call.
    assert ending.code == case.exit or (case.command, ending.code) == ("convert", corpus.DONE), (
        f"{case.file}: {ending.err}"
    )
    assert not ending.canary, case.file
    assert ending.peak < MOST_MEMORY, case.file
    assert "Traceback" not in ending.err, ending.err
    assert "bug in ckptconv" not in ending.err, ending.err
    if not ending.code:
        return loaded(output)
    assert ending.written == [], case.file
    assert len(ending.err.splitlines()) == 1, ending.err
    assert str(source) in ending.err or str(output) in ending.err, ending.err
    return None


def codes_of_reading(path: Path) -> set[int]:
    """The exit codes of the errors of features that read a checkpoint into programs; 0 for none."""
    codes = set()
    for read_all in of_features("read_all"):
        try:
            # It takes long, and loads in the same way again.
            read_all(path, briefly=size_of(path) > LARGE)
            codes.add(0)
        except ckptconv.CkptconvError as error:
            codes.add(error.exit_code)
    return codes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_ends_as_it_should_and_so_does_the_library(family: str, tmp_path: Path) -> None:
    cases = [case for case in ALL if case.family == family]
    canary = tmp_path / "canary"
    for case in cases:
        source = written(case, tmp_path)
        output = output_of(case.command, tmp_path / "out" / case.file)
        output.parent.mkdir(parents=True)
        ending = ending_of(case.command, source, output, canary)
        tensors = assert_ended(case, source, output, ending)
        assert not canary.exists(), case.file
        if tensors is not None and case.whole:
            # Safetensors made of safetensors have an object of two names, v and w, under the first.
            name = "v" if case.command == "convert" and "w" not in tensors else "w"
            assert torch.equal(tensors[name].view(torch.int32), W.view(torch.int32)), case.file
        if TIMES > 1 or size_of(source) <= LARGE:
            codes = codes_of_reading(source)
            assert not canary.exists(), case.file
            # A file for torch.load is not written with objects that are harmless to read, and views take no memory.
            if case.command == "pt2safetensors" and case.file != "tensor_gigabytes_twice.pt":
                assert codes <= {case.exit}, case.file
        source.unlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted({directory.family for directory in ALL_DIRECTORIES}))
def test_every_directory_ends_as_it_should_and_so_does_the_library(family: str, tmp_path: Path) -> None:
    directories = [directory for directory in ALL_DIRECTORIES if directory.family == family]
    canary = tmp_path / "canary"
    for directory in directories:
        source = filled(directory, tmp_path)
        output = output_of(directory.command, tmp_path / directory.file / "out")
        output.parent.mkdir()
        ending = ending_of(directory.command, source, output, canary)
        assert_ended(directory, source.parent, output, ending)
        assert output.exists() == (ending.code == 0)
        assert not canary.exists(), directory.file
        codes = codes_of_reading(source)
        assert not canary.exists(), directory.file
        if directory.command != corpus.BACK:
            assert codes <= {directory.exit}, directory.file


def test_with_inert_an_attack_is_converted_and_still_does_nothing(tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    for case in LIVE:
        path = written(case, tmp_path)
        run = ckptconv_here("pt2safetensors", path, output, "--no-fsync", "--inert")
        assert run.code != corpus.UNSAFE or case.exit == corpus.UNSAFE, run.err
        assert not (tmp_path / "canary").exists(), case.file
        if output.exists():
            assert run.code == 0
            assert "kept as inert data, never run" in run.out
            if case.whole:
                assert torch.equal(load_file(output)["w"], W), case.file
            output.unlink()


def test_with_inert_what_readers_read_differently_is_refused_all_the_same(tmp_path: Path) -> None:
    """Its tensors are others for whoever reads it in another way: there is nothing to convert."""
    output = tmp_path / "model.safetensors"
    seen = 0
    for case in [case for case in ALL if case.family == "readers"]:
        if case.live and case.file != "two_tar_v7_live.pt":
            run = ckptconv_here("pt2safetensors", written(case, tmp_path), output, "--no-fsync", "--inert")
            assert run.code == corpus.CORRUPT, f"{case.file}: {run.err}"
            assert not (tmp_path / "canary").exists(), case.file
            seen += 1
    # Half of them are tar archives.
    assert seen > (20 if has_feature("tar") else 9)


@pytest.mark.skipif(corpus.BACK == "convert", reason="no feature writes .pt files")
def test_what_is_left_of_a_safetensors_file_with_calls_in_it_runs_nothing(tmp_path: Path) -> None:
    """With --drop-opaque and --inert, whatever can be written is; whoever loads it runs none of it."""
    output = tmp_path / "model.pt"
    ends: Counter[int] = Counter()
    for case in [case for case in ALL if case.family == "safetensors"]:
        path = written(case, tmp_path)
        if size_of(path) > LARGE:  # as they are refused without these options
            continue
        run = ckptconv_here("safetensors2pt", path, output, "--no-fsync", "--drop-opaque", "--inert")
        ends[run.code] += 1
        if not run.code:
            loaded(output)
            output.unlink()
        assert not (tmp_path / "canary").exists(), case.file
        path.unlink()
    assert ends[corpus.DONE] > 30


MENTIONED = {"os.system", "torch._utils._rebuild_tensor_v2", "torch.FloatStorage", "collections.OrderedDict"}


def test_they_are_not_shown_either_and_with_inert_every_class_is_that_they_mention(tmp_path: Path) -> None:
    path = written(CASES["live_os_system.pt"], tmp_path)
    for command in looking():
        assert ckptconv_here(command, path).code == corpus.UNSAFE
        run = ckptconv_here(command, path, "--inert")
        assert run.code == 0
        assert [name for name in MENTIONED if name not in run.out] == []
        described = ckptconv_here(command, path, "--inert", "--json").json
        assert described["opaque"] == ["os.system"]
        assert set(described["classes"]) == MENTIONED


HONEST = [
    ("builtins", "getattr"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("functools", "partial"),
    ("argparse", "Namespace"),
    ("pathlib", "PosixPath"),
    ("os", "stat_result"),
    ("socket", "AddressFamily"),
    ("code.models", "Net"),
    ("mine.os", "Config"),
    ("mine", "Outer.Inner"),
    ("mine", "system"),
    ("mine", "eval"),
    ("operator", "attrgetter"),
    ("datetime", "datetime"),
    ("torch.fx.graph_module", "reduce_graph_module"),
    ("uuid", "UUID"),
    ("codecs", "encode"),
    ("_codecs", "encode"),
    ("operator", "itemgetter"),
    ("logging", "Logger"),
    ("logging", "getLogger"),
    ("torch.optim.adamw", "AdamW"),
    ("torch.optim.lr_scheduler", "LambdaLR"),
    ("numpy.random._pickle", "__generator_ctor"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("pandas.core.frame", "DataFrame"),
    ("pandas._libs.internals", "_unpickle_block"),
    ("scipy.sparse._csr", "csr_matrix"),
    ("omegaconf.dictconfig", "DictConfig"),
    ("lightning.fabric.utilities.data", "AttributeDict"),
    ("transformers.training_args", "TrainingArguments"),
    ("transformers.trainer_utils", "SaveStrategy"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("torchao.quantization", "Int8Tensor"),
    ("torch.distributed._shard.sharded_tensor.shard", "Shard"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.nn.modules.linear", "Linear"),
    ("cloudpickle.cloudpickle", "_make_function"),
    ("cloudpickle.cloudpickle", "_builtin_type"),
    ("types", "CodeType"),
    ("types", "FunctionType"),
    ("test.models", "Net"),
    ("compression.codec", "Config"),
    ("signal", "Signals"),
    ("typing", "Any"),
    ("mine", "load"),
    ("mine.torch", "save"),
]


@pytest.mark.parametrize("named", HONEST, ids=".".join)
def test_what_honest_files_call_is_no_attack(named: tuple[str, str]) -> None:
    assert not attacks.is_suspect(Global(*named))


@pytest.mark.parametrize(
    "named",
    [
        ("os", "system"),
        ("nt", "system"),
        ("os.path", "os.system"),
        ("torch", "os"),
        ("torch.serialization", "os.system"),
        ("torch", "hub.load"),
        ("torch.hub", "load"),
        ("mine", "builtins.eval"),
        ("mine", "f.__globals__"),
        ("__builtin__", "execfile"),
        ("pip", "main"),
        ("pip._internal", "main"),
        ("importlib.util", "spec_from_file_location"),
        ("socket", "create_connection"),
        ("wave", "open"),
        ("mailbox", "mbox"),
        ("_ctypes", "dlopen"),
        ("multiprocessing.connection", "Client"),
        ("concurrent.futures.thread", "ThreadPoolExecutor"),
        ("pstats", "Stats"),
        ("xml.etree.ElementTree", "parse"),
        ("torch", "from_file"),
        ("torch", "FloatStorage.from_file"),
        ("torch._C", "PyTorchFileWriter"),
        ("torch.utils.file_baton", "FileBaton"),
        ("mine", "torch.UntypedStorage.from_file"),
        ("safetensors._safetensors_rust", "serialize_file"),
        ("numpy", "ndarray.tofile"),
        ("numpy.core.records", "fromfile"),
        ("pandas.core.frame", "DataFrame.to_pickle"),
        ("pandas.io.parsers.readers", "read_csv"),
        ("scipy.io", "savemat"),
        ("scipy.sparse", "save_npz"),
        ("a" * 10_000_000, "os.system"),
    ],
    ids=lambda named: ".".join(named)[:50],
)
def test_what_no_checkpoint_has_a_reason_to_call(named: tuple[str, str]) -> None:
    assert attacks.is_suspect(Global(*named))


def test_no_table_has_a_name_that_a_vocabulary_knows_as_data() -> None:
    words = vocabulary(lambda pid: None)
    known = {*PYTHON, *CONSTANTS, *words.constructors, *words.constants, *words.classes, *words.builders}
    assert len(known) > 150
    assert [name for name in known if attacks.is_suspect(Global(*name))] == []


def test_a_function_is_data_and_a_call_of_it_an_attack() -> None:
    """As cloudpickle, dill and joblib have functions: made of code that the pickle holds."""
    types = Opaque(Global("cloudpickle.cloudpickle", "_builtin_type"), ("FunctionType",))
    code = Opaque(Opaque(Global("cloudpickle.cloudpickle", "_builtin_type"), ("CodeType",)), (0,))
    for maker in (Global("types", "FunctionType"), Global("dill._dill", "_create_function"), types):
        made = Opaque(maker, (code, {}))
        assert attacks.code_called(maker, (code, {})) is None, "the function itself"
        assert attacks.code_called(Global("functools", "partial"), (made,)) is None
        assert attacks.code_called(made, ()) is not None
        assert attacks.code_called(Global("builtins", "map"), (made, [1])) is not None
    assert attacks.code_called(code.cls, (0,)) is None, "code is no function yet"


def test_odd_payloads_are_few() -> None:
    assert {"load_from_bytes", "graph_module"} == ODD

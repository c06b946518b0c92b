"""`scan`: what loading a file would run is found wherever it is, nothing is run, and no honest file is accused."""

from __future__ import annotations

import argparse
import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import jsonschema
import numpy as np
import pytest
import torch
from attacks import corpus
from attacks.assemble import (
    Member,
    archive,
    called,
    listed,
    mapped,
    members,
    name,
    number,
    pickled,
    raw,
    several,
    tensor,
    text,
    zipped,
)
from attacks.every import ALL
from attacks.live import ODD, SYSTEM
from cells import of_features, trained
from checkpoints import ckptconv_here
from safetensors.torch import save_file
from stores import FAR

import ckptconv
from ckptconv.features.scan.report import RULES, VERDICTS, counts

DATA = Path(__file__).parents[2] / "data"
SCHEMAS = Path(ckptconv.__file__).parent / "cli" / "schemas"
ATTACK = pickled(called(SYSTEM, text("true")))
SOUND = pickled(mapped(text("a"), number(1)))


def scanned(*paths: Path) -> ckptconv.ScanReport:
    return ckptconv.scan(*paths)


def verdict(path: Path, data: bytes) -> str:
    """The verdict on a file of these bytes in a directory; "" if it is skipped."""
    path.write_bytes(data)
    found = [file for file in scanned(path.parent).files if file.path == str(path)]
    return found[0].verdict if found else ""


def rules(path: Path, data: bytes | None = None) -> set[str]:
    if data is not None:
        path.write_bytes(data)
    return {finding.rule for file in scanned(path).files for finding in file.findings}


# ----------------------------------------------------------------------------------------------------- the whole corpus


def test_every_live_file_of_the_corpus_is_found_and_nothing_runs(tmp_path: Path) -> None:
    of_two_readers = (case for case in ALL if case.family == "readers")
    cases = {
        case.file: case for case in (*corpus.CASES.values(), *of_two_readers) if case.file != "zip_many_members.pt"
    }
    for case in cases.values():
        (tmp_path / case.file).write_bytes(case.make(str(tmp_path / "canary")))
    found = {Path(file.path).name: file for file in scanned(tmp_path).files}
    assert not (tmp_path / "canary").exists()
    live = {file for file, case in cases.items() if case.live}
    assert len(live) > 200
    # The one that is no attack carries code, which honest modules of torch.fx do too.
    assert {file for file in live if found[file].verdict != "attack"} == {"live_graph_module.pt"}
    assert found["live_graph_module.pt"].verdict == "suspicious"
    # What is refused as an attack is called one.
    assert {case.file for case in cases.values() if case.exit == 3 and found[case.file].verdict != "attack"} == set()
    # Of the files that are sound, these name or hold something dangerous that loading them does not run. Others name
    # somebody's classes.
    sound = {file: found[file].findings for file, case in cases.items() if case.exit == 0 and not case.live}
    assert {file for file, findings in sound.items() if any(counts(each.rule, "call") for each in findings)} == {
        "live_nested_archive.pt",
        "only_a_name.pt",
        "scan_evil_member.pt",
    }
    # What contradicts itself is not passed, unless it only cannot be converted, or nothing that is read says so.
    passed = {case.file for case in cases.values() if case.exit == 4 and not found[case.file].findings}
    assert {file for file in passed if not file.startswith("module_")} <= {
        "tensor_four_terabytes.pt",
        "tensor_gigabytes_twice.pt",
        "zip_inflate_garbage.pt",
    }
    assert {f"live_{each}.pt" for each in ODD} <= live


def test_no_file_that_a_real_program_wrote_is_accused() -> None:
    # Beside those of the trunk, all that features have of the formats of trainings.
    steps = trained()
    report = scanned(DATA, *of_features("RELEASES"), *(step.parents[1] for step in steps))
    assert [(file.path, file.findings) for file in report.files if file.findings] == []
    assert len(report.files) > 50 + 90 * len(steps)
    assert report.verdict == "safe"


# ------------------------------------------------------------------------------------------------------ kinds of files


def written(made: Callable[[io.BytesIO], Any]) -> bytes:
    out = io.BytesIO()
    made(out)
    return out.getvalue()


STATE = OrderedDict(w=torch.arange(6.0), n=torch.tensor(3))
SAFE = {
    "zip": lambda out: torch.save(STATE, out),
    "stream": lambda out: torch.save(STATE, out, _use_new_zipfile_serialization=False),
    "module": lambda out: torch.save(torch.nn.Linear(2, 2), out),
    "optimizer": lambda out: torch.save(torch.optim.Adam(torch.nn.Linear(2, 2).parameters()).state_dict(), out),
    "script": lambda out: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), out),
    "pickle": lambda out: out.write(pickle.dumps({"a": [1, 2.0, None], "b": np.arange(3), "c": argparse.Namespace()})),
    "pickled tensors": lambda out: out.write(pickle.dumps({"w": torch.arange(3)})),
    "two pickles": lambda out: out.write(pickle.dumps(1) + pickle.dumps("two", 0)),
    "npy": lambda out: np.save(out, np.arange(3)),
    "objects": lambda out: np.save(out, np.array([{"a": 1}, None], dtype=object), allow_pickle=True),
    "npz": lambda out: np.savez_compressed(out, a=np.arange(3), b=np.array([{}], dtype=object)),
    "gzip": lambda out: out.write(gzip.compress(pickle.dumps([1]))),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", SAFE)
def test_sound_files_are_safe_whatever_they_are_called(kind: str, tmp_path: Path) -> None:
    data = written(SAFE[kind])
    for file in ("model.pt", "notes.txt", "no_suffix"):
        assert verdict(tmp_path / file, data) == "safe", file


def tarred(data: bytes) -> bytes:
    def made(out: io.BytesIO) -> None:
        with tarfile.open(fileobj=out, mode="w") as archive:
            member = tarfile.TarInfo("model/weights.ckpt")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

    return written(made)


def in_zip(data: bytes, file: str = "inner/x.pkl", method: int = zipfile.ZIP_DEFLATED) -> bytes:
    def made(out: io.BytesIO) -> None:
        with zipfile.ZipFile(out, "w", method) as archive:
            archive.writestr("readme.txt", "words")
            archive.writestr(file, data)

    return written(made)


HEADER = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
AROUND: dict[str, Callable[[bytes], bytes]] = {
    "alone": lambda attack: attack,
    "after another pickle": lambda attack: SOUND + attack,
    "zip": in_zip,
    "zip, stored": lambda attack: in_zip(attack, method=zipfile.ZIP_STORED),
    "zip, any name": lambda attack: in_zip(attack, "picture.png"),
    "zip in a zip in a tar": lambda attack: tarred(in_zip(in_zip(attack), "a.zip", zipfile.ZIP_STORED)),
    "tar": tarred,
    "gzip": gzip.compress,
    "gzip, after nothing": lambda attack: gzip.compress(b"") + gzip.compress(attack),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zlib": zlib.compress,
    "compressed tar": lambda attack: gzip.compress(tarred(attack)),
    "array of objects": lambda attack: b"\x93NUMPY\x01\x00" + len(HEADER).to_bytes(2, "little") + HEADER + attack,
    "beside the state": lambda attack: zipped([*members(SOUND), Member("archive/extra/x.pkl", attack)]),
    "beside it, under a name that torch reads elsewhere": lambda attack: zipped(
        [*members(SOUND), Member("other/constants.pkl", attack), Member("archive/attributes.pkl", attack)]
    ),
    "checkpoint in a zip": lambda attack: in_zip(zipped(members(attack)), "model.pt"),
    "bytes that torch loads": lambda attack: pickled(called(name("torch.storage", "_load_from_bytes"), raw(attack))),
}


@pytest.mark.parametrize("file", ["model.pt", "notes.txt"])
@pytest.mark.parametrize("around", AROUND)
def test_an_attack_is_found_wherever_it_is(around: str, file: str, tmp_path: Path) -> None:
    assert verdict(tmp_path / file, AROUND[around](ATTACK)) == "attack"
    # And nothing else is wrong with that.
    assert verdict(tmp_path / file, AROUND[around](SOUND)) in ("safe", "")


def tar_header(kind: bytes, data: bytes = b"") -> bytes:
    header = tarfile.TarInfo("m")
    header.type, header.size = kind, len(data)
    return header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def sparse(layout: bytes) -> bytes:
    """A member of a tar archive with holes, as pax 1.0 has it: what lies where stands before the bytes."""
    records = (
        b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n23 GNU.sparse.name=a.bin\n30 GNU.sparse.realsize=8388609\n"
    )
    return tar_header(b"x", records) + tar_header(b"0", layout.ljust(tarfile.BLOCKSIZE, b"\0") + b"x")


def test_members_with_holes_are_unknown_and_hide_no_others(tmp_path: Path) -> None:
    end = bytes(2 * tarfile.BLOCKSIZE)
    for what, layout in (("a map", b"1\n8388608\n1\n"), ("no number", b"1\nx\n1\n"), ("too many", b"99999999\n")):
        for file in (tmp_path / "notes.txt", tmp_path / "model.tar"):
            assert verdict(file, tar_header(b"0", SOUND) + sparse(layout) + end) == "unknown", what
            assert verdict(file, sparse(layout) + end) == "unknown", what
            assert verdict(file, tar_header(b"0", ATTACK) + sparse(layout) + end) == "attack", what
        assert verdict(tmp_path / "model.nemo", sparse(layout) + end) in ("unknown", "unreadable"), what


def test_headers_of_tar_archives_are_bounded(tmp_path: Path) -> None:
    values = b"".join(b"12 k%05d=v\n" % number for number in range(2_000))
    member, end = tar_header(b"0", SOUND), bytes(2 * tarfile.BLOCKSIZE)
    headers = {
        "values that are copied for each member": tar_header(b"g", values),
        "a header that is read as a whole": tar_header(b"x", bytes(2 << 20)),
        "headers that add up": 2 * tar_header(b"x", bytes(600 << 10)),
        "headers of headers": 600 * tar_header(b"x"),
    }
    for what, header in headers.items():
        for file in ("model.pt", "notes.txt"):
            assert verdict(tmp_path / file, header + member + end) == "suspicious", (what, file)
    usual = tar_header(b"g", values[: 12 * 100]) + tar_header(b"L", b"name" * 100)
    assert verdict(tmp_path / "notes.txt", usual + tar_header(b"0", ATTACK) + end) == "attack"


@pytest.mark.parametrize("protocol", range(6))
def test_an_attack_of_any_protocol_is_found(protocol: int, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    assert verdict(tmp_path / "x", pickle.dumps(Evil(), protocol)) == "attack"


def entry(state: Any) -> bytes:
    return written(lambda out: torch.save(state, out))


# The shortest calls there are: of a name of one letter in a module of one letter.
SHORTEST = {
    "REDUCE of GLOBAL": b"ca\nb\n)R",
    "INST": b"(ia\nb\n.",
    "REDUCE of STACK_GLOBAL": b"\x8c\1a\x8c\1b\x93)R",
    "OBJ": b"(ca\nb\no",
}


@pytest.mark.parametrize("what", SHORTEST)
@pytest.mark.parametrize("file", ["notes.txt", "archive/extra"])
def test_no_call_is_too_short_to_be_seen(what: str, file: str, tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    torch.save({"a": 1}, path)
    with zipfile.ZipFile(path, "a") as made:
        made.writestr(file, SHORTEST[what])
    (tmp_path / "notes.txt").write_bytes(SHORTEST[what])
    for each in (path, tmp_path / "notes.txt"):
        assert any(finding.rule == "unknown-call" for one in scanned(each).files for finding in one.findings)


def test_entries_of_distributed_checkpoints_are_read_without_their_description(tmp_path: Path) -> None:
    sound = [entry(torch.arange(n)) for n in range(1, 5)]
    assert verdict(tmp_path / "__0_0.distcp", b"".join(sound)) == "safe"
    evil = zipped(members(ATTACK))
    assert verdict(tmp_path / "__0_0.distcp", b"".join([*sound[:2], evil, *sound[2:]])) == "attack"
    # Elsewhere two archives are two readings.
    assert verdict(tmp_path / "model.pt", b"".join(sound)) == "suspicious"


REASONS: dict[str, tuple[str, bytes]] = {
    "a directory that is read in part": ("two-readings", in_zip(SOUND)[::-1].replace(b"\2\1KP", b"\3\1KP", 1)[::-1]),
    "a name": ("dangerous-name", pickled(SYSTEM)),
    "a function": ("unknown-call", pickled(called(name("torch.jit.annotations", "_eval_no_call"), text("a")))),
    "a class": ("unknown-name", pickled(name("invoke.context", "Context") + b")\x81")),
    "an archive in an archive": ("not-opened", in_zip(b"7z\xbc\xaf\x27\x1c" + bytes(60), "x.7z", zipfile.ZIP_STORED)),
    "a decoder": ("unusual-call", pickled(called(name("base64", "b64decode"), text("AAAA")))),
    "a function of Python 2": ("unusual-call", pickled(called(name("__builtin__", "map"), text("a"), listed()))),
    "code of cloudpickle": ("carries-code", pickled(called(name("cloudpickle.cloudpickle", "_make_function")))),
    "a module of torch.fx": (
        "carries-code", archive(called(name("torch.fx.graph_module", "reduce_graph_module"), mapped(), text("")))
    ),
    "a package": ("carries-code", zipped([Member("p/.data/extern_modules", b"x"), Member("p/a.py", b"import os")])),
    "a program": ("carries-code", zipped([*members(SOUND), Member("archive/code/m.py", b'torch.save(x, "y")')])),
    "a library": ("carries-code", in_zip(b"\x7fELF" + bytes(60), "data/aotinductor/x.so")),
    "bytes": ("hidden", pickled(listed(raw(ATTACK)))),
    "two members of a name": ("two-readings", zipped([*members(SOUND), *members(SOUND)])),
    "a tensor beyond its storage": ("two-readings", archive(tensor(offset=1))),
    "a bomb": ("excessive", pickled(b"]" + b"".join(b"q%c0]h%ch%c\x86a" % (n, n, n) for n in range(60)))),
    "a pickle that is cut short": ("unreadable", SOUND[:-3]),
    "an archive that is cut short": ("unreadable", zipped(members(SOUND))[:-40]),
    "a pointer of git-lfs": ("unreadable", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "nothing": ("unreadable", b""),
    "zstandard": ("unreadable", b"\x28\xb5\x2f\xfd" + bytes(50)),
    "deep": ("excessive", None),  # type: ignore[dict-item]
    **{what: told for each in of_features("SCANNED") for what, told in each.items()},
}  # fmt: skip


@pytest.mark.parametrize("what", REASONS)
def test_each_reason_is_given_for_what_it_is(what: str, tmp_path: Path) -> None:
    rule, data = REASONS[what]
    if what == "deep":
        data = SOUND
        for _ in range(20):
            data = in_zip(data, "x.zip", zipfile.ZIP_STORED)
    assert rules(tmp_path / "model.pt", data) == {rule}


def test_every_rule_is_tried() -> None:
    assert {*(rule for rule, _ in REASONS.values()), "dangerous-call", "path-outside", "repository-code"} == set(RULES)
    assert {rule.verdict for rule in RULES.values()} == set(VERDICTS) - {"safe"}


OTHERS = {
    "readme.md": b"# A model\n",
    "angles.txt": b"cos\nsin\ntan\n",
    "words.txt": b"commands\nopen\n(texts)\n",
    "data.csv.gz": gzip.compress(b"a,b\n" * 1000),
    "package.whl": in_zip(b"\x7fELF" + bytes(60), "package/x.so"),
    "page.zip": in_zip(b"<html>", "index.html"),
    "config.json": b"{}",
    "random.dat": bytes(range(256)) * 20,
    "opcodes.dat": b"\x80\x02\xff\xff" * 100,
    "empty.txt": b"",
    "end.txt": b"PK\x05\x06abc",
}


@pytest.mark.parametrize("file", OTHERS)
def test_what_is_no_checkpoint_is_skipped_and_counted(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(OTHERS[file])
    report = scanned(tmp_path)
    assert (report.files, report.skipped, report.verdict) == ([], 1, "safe")


MODELS = {
    "model.gguf": b"GGUF" + bytes(100),
    "weights.bin": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "model.keras": in_zip(b"\x89HDF\r\n\x1a\n", "model.weights.h5"),
    "saved_model.pb": b"\x08\x01",
}


@pytest.mark.parametrize("file", MODELS)
def test_models_that_are_not_judged_are_unknown(file: str, tmp_path: Path) -> None:
    assert (verdict(tmp_path / file, MODELS[file]), rules(tmp_path)) == ("unknown", {"not-opened"})


def test_what_has_the_name_of_a_checkpoint_or_begins_like_an_archive_is_not_skipped(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(5000)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    whole = (tmp_path / "pytorch_model-00001-of-00002.bin").read_bytes()
    torch.save({"w": torch.ones(5000)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    for file in ("pytorch_model.bin", "model.th", "weights"):
        for size in (100, len(whole) // 2, len(whole) - 30):
            assert verdict(tmp_path / file, whole[:size]) == "unreadable", (file, size)
    assert verdict(tmp_path / "old.bin", (tmp_path / "old").read_bytes()[:300]) == "unreadable"
    # Other data: unknown, until an index says that it is a shard.
    name = "pytorch_model-00002-of-00002.bin"
    for data in (b"", bytes(3000), b"<html></html>", bytes(range(256)) * 20):
        assert verdict(tmp_path / name, data) == "unknown"
        assert ckptconv_here("scan", tmp_path / name).code == 0
        ckptconv_here("scan", tmp_path / name, "--fail-on", "unknown").refused(3, "is unknown")
    index = {"metadata": {}, "weight_map": {"w": "pytorch_model-00001-of-00002.bin", "x": name, "y": "part.data"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert verdict(tmp_path / "part.data", b"<html></html>") == "unreadable"
    assert verdict(tmp_path / "other.data", b"<html></html>") == ""
    assert verdict(tmp_path / name, b"<html></html>") == "unreadable"


def test_what_was_named_and_is_not_judged_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_bytes(b"words")
    assert scanned(tmp_path).files == []
    (file,) = scanned(tmp_path / "readme.md").files
    assert (file.verdict, [each.rule for each in file.findings]) == ("unknown", ["not-opened"])


def test_classes_of_other_packages_are_unknown_and_listed(tmp_path: Path) -> None:
    named = [name("my_project.config", "Config"), name("code.models", "Net"), name("datetime", "timedelta")]
    (tmp_path / "x.pt").write_bytes(archive(several(*(each + b")\x81" for each in named))))
    (file,) = scanned(tmp_path).files
    assert {finding.rule for finding in file.findings} == {"unknown-name"}
    assert file.classes == ["my_project.config.Config", "code.models.Net"]


# --------------------------------------------------------------------------------------------- directories and stores


def test_a_directory_is_searched_to_its_depth_and_links_to_files_are_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    inside = tmp_path / "inside" / ".hidden" / "deep"
    for place in (outside, inside):
        place.mkdir(parents=True)
        (place / "x.pt").write_bytes(ATTACK)
    (inside / "loop").symlink_to(tmp_path / "inside")
    (inside / "there.pt").symlink_to(outside / "x.pt")
    report = scanned(tmp_path / "inside")
    assert [file.path for file in report.files] == [str(inside / name) for name in ("there.pt", "x.pt")]
    assert report.links == 1
    # A path that was given is followed.
    assert scanned(inside / "there.pt").verdict == "attack"
    # Each file is one file, however often it is named.
    assert len(ckptconv.scan(outside, outside / "x.pt").files) == 1
    (inside / "x.pt").unlink()
    for words in (["--quiet"], ["--fail-on", "unknown"]):
        assert ckptconv_here("scan", tmp_path / "inside", *words).code == 3


def test_names_that_lead_out_are_attacks(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"w": "../secret.safetensors"}}))
    assert rules(index) == {"path-outside"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"w": "not-there.safetensors"}}))
    assert rules(index) == set()


def test_a_file_that_cannot_be_opened_is_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.pt").write_bytes(SOUND)

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    (file,) = scanned(tmp_path).files
    assert file.verdict == "unreadable"
    assert "permission denied" in file.findings[0].message


@FAR
def test_stores_are_scanned_like_disks() -> None:
    store = fsspec.filesystem("memory")
    store.pipe({"/scan/a/x.pt": ATTACK, "/scan/y.pt": entry(STATE), "/scan/readme": b"words"})
    report = ckptconv.scan("memory://scan")
    assert {file.path: file.verdict for file in report.files} == {
        "memory://scan/a/x.pt": "attack",
        "memory://scan/y.pt": "safe",
    }
    assert (report.skipped, report.others) == (1, ["memory://scan/readme"])


def test_the_names_of_files_that_are_not_judged_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(entry(STATE))
    (tmp_path / "run.py").write_text("import os")
    assert "run.py" not in ckptconv_here("scan", tmp_path).out
    run = ckptconv_here("scan", "--verbose", tmp_path)
    assert f"1 file skipped: it is not a checkpoint\n  {tmp_path / 'run.py'}\n" in run.out
    assert ckptconv_here("scan", "--json", tmp_path).json["others"] == [str(tmp_path / "run.py")]


def test_no_tensor_data_is_read(tmp_path: Path) -> None:
    """Of a file of 8 GiB, most of it a hole, only the ends are."""
    save_file({"w": torch.zeros(4)}, tmp_path / "x.safetensors")
    header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 33], "data_offsets": [0, 1 << 33]}}).encode()
    with open(tmp_path / "large.safetensors", "wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + (1 << 33))
    report = scanned(tmp_path)
    assert report.verdict == "safe"
    assert max(file.bytes for file in report.files) > 1 << 33


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file, data in {
        "safe.pt": SOUND,
        "attack of ours.pt": ATTACK,
        "suspicious.pt": pickled(SYSTEM),
        "cut.pt": SOUND[:-3],
        "readme.md": b"words",
    }.items():
        (tmp_path / file).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["safe.pt"], 0),
        (["readme.md"], 0),
        (["safe.pt", "cut.pt"], 4),
        (["suspicious.pt", "cut.pt"], 3),
        (["attack of ours.pt", "safe.pt"], 3),
        (["--fail-on", "attack", "suspicious.pt"], 0),
        (["--fail-on", "attack", "suspicious.pt", "cut.pt"], 4),
        (["--fail-on", "attack", "."], 3),
        (["--allow-suspicious", "suspicious.pt"], 0),
        (["--allow-suspicious", "."], 3),
        (["--allow-suspicious", "--fail-on", "attack", "suspicious.pt"], 0),
        (["--allow-suspicious", "--fail-on", "call", "suspicious.pt"], 2),
        (["--fail-on", "suspicious", "suspicious.pt"], 3),
        (["--fail-on", "nothing", "suspicious.pt"], 2),
        (["class.pkl", "notes.7z"], 0),
        (["--fail-on", "unknown", "class.pkl"], 3),
        (["--fail-on", "unknown", "notes.7z"], 3),
        (["function.pkl", "cut.pt"], 3),
        (["--fail-on", "suspicious", "function.pkl"], 0),
        (["nothing.pt"], 2),
        ([], 2),
        (["--sarif", "not/there.sarif", "safe.pt"], 2),
        (["--sarif", "safe.pt", "safe.pt"], 2),
    ],
)
def test_the_exit_code_is_that_of_the_worst_verdict_that_counts(arguments: list[str], code: int) -> None:
    Path("class.pkl").write_bytes(pickled(name("invoke.context", "Context") + b")\x81"))
    Path("function.pkl").write_bytes(pickled(called(name("invoke", "run"), text("true"))))
    Path("notes.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(60))
    run = ckptconv_here("scan", *arguments)
    assert run.code == code, run.err
    assert "Traceback" not in run.err


@pytest.mark.usefixtures("place")
def test_the_report_names_what_is_wrong_and_counts_the_rest() -> None:
    run = ckptconv_here("scan", ".")
    assert "attack: ./attack of ours.pt (pickle, " in run.out
    assert "  dangerous-call: ./attack of ours.pt (the pickle) calls os.system." in run.out
    assert "safe.pt" not in run.out
    assert re.search(r"scanned 4 files in .* s: 1 safe, 1 unreadable, 1 suspicious, 1 attack\n1 file skipped", run.out)
    assert run.err == (
        "ckptconv: Of 4 files, 1 is an attack, 1 is suspicious, 1 cannot be judged. "
        "Do not load the files that are attacks.\n"
    )
    assert "safe: ./safe.pt" in ckptconv_here("scan", "--verbose", ".").out


def test_all_attacks_in_a_file_are_named_ten_of_each_pickle(tmp_path: Path) -> None:
    functions = [f"os.{name}" for name in ("system", "popen", "remove", "unlink", "rmdir", "removedirs", "rename")]
    functions += [f"shutil.{name}" for name in ("rmtree", "move", "copytree")] + ["subprocess.Popen", "builtins.eval"]
    (tmp_path / "one.pkl").write_bytes(
        pickled(several(*(called(name(*each.split(".")), text("x")) for each in functions)))
    )
    (report,) = scanned(tmp_path / "one.pkl").files
    message = next(finding.message for finding in report.findings if finding.rule == "dangerous-call")
    assert message.endswith(f"calls {', '.join(functions[:10])} and 2 more.")
    apart = b"".join(pickled(called(name(*each.split(".")), text("x"))) for each in functions[:6])
    (tmp_path / "apart.pkl").write_bytes(apart)
    (report,) = scanned(tmp_path / "apart.pkl").files
    assert [finding.message.rpartition(" ")[2] for finding in report.findings] == [f"{each}." for each in functions[:6]]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("path", "ok"), [(".", False), ("safe.pt", True)])
def test_json_is_of_its_schema(path: str, ok: bool) -> None:
    from cli.test_json import check

    found = check(ckptconv_here("scan", "--json", path), "scan")
    assert found["ok"] is ok
    assert ("error" in found) is not ok
    assert set(found["counts"]) == set(VERDICTS)
    told = json.loads((SCHEMAS / "scan.json").read_text())
    file = told["$defs"]["scanned"]["properties"]["files"]["items"]["properties"]
    assert file["findings"]["items"]["properties"]["rule"]["enum"] == list(RULES)


# What the schema of SARIF 2.1.0 asks for of the parts that are written, and what GitHub's documentation adds.
TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 1}}, "required": ["text"]}
LEVEL = {"enum": ["none", "note", "warning", "error"]}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


LOCATION = closed(
    physicalLocation=closed(artifactLocation=closed(uri={"type": "string", "pattern": r"^[^\s\\%]|%[0-9A-F]{2}"}))
)
RULE = closed(
    id={"type": "string"},
    shortDescription=TEXT,
    fullDescription=TEXT,
    help=TEXT,
    helpUri={"type": "string", "pattern": "^https://"},
    defaultConfiguration=closed(level=LEVEL),
    properties=closed(**{"security-severity": {"type": "string", "pattern": r"^\d+\.\d$"}}, tags={"type": "array"}),
)
RESULT = closed(
    ruleId={"enum": list(RULES)},
    ruleIndex={"type": "integer", "minimum": 0},
    level=LEVEL,
    message=TEXT,
    locations={"type": "array", "items": LOCATION, "minItems": 1},
)
DRIVER = closed(
    name={"const": "ckptconv"},
    version={"type": "string"},
    informationUri={"type": "string"},
    rules={"type": "array", "items": RULE, "uniqueItems": True},
)
SARIF = closed(
    **{"$schema": {"type": "string"}},
    version={"const": "2.1.0"},
    runs={
        "type": "array",
        "items": closed(
            tool=closed(driver=DRIVER),
            columnKind={"const": "unicodeCodePoints"},
            results={"type": "array", "items": RESULT},
        ),
    },
)


def test_sarif_has_a_rule_for_each_reason_and_names_files_from_here(place: Path, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("outside") / "x.pt"
    outside.write_bytes(ATTACK)
    run = ckptconv_here("scan", "--sarif", "found.sarif", ".", outside)
    assert run.code == 3
    found = json.loads((place / "found.sarif").read_text())
    jsonschema.Draft202012Validator(SARIF).validate(found)
    (told,) = found["runs"]
    listed_rules = told["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in listed_rules] == list(RULES)
    page = (Path(__file__).parents[3] / "docs" / "scan.md").read_text()
    for rule in listed_rules:
        assert f"\n### {rule['helpUri'].partition('#')[2]}\n" in page
    levels = {}
    for result in told["results"]:
        assert listed_rules[result["ruleIndex"]]["id"] == result["ruleId"]
        levels[result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]] = result["level"]
    assert levels == {
        "attack%20of%20ours.pt": "error",
        "cut.pt": "note",
        "suspicious.pt": "warning",
        f"file://{outside}": "error",
    }


def test_messages_of_sarif_have_no_control_characters(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J\u202eb.pt").write_bytes(ATTACK)
    run = ckptconv_here("scan", "--sarif", tmp_path / "found.sarif", tmp_path)
    assert run.code == 3
    (result,) = json.loads((tmp_path / "found.sarif").read_text())["runs"][0]["results"]
    assert result["message"]["text"].isprintable()
    assert "a\\x1b[2J\\u202eb.pt" in result["message"]["text"]


def test_a_notebook_shows_the_verdict_of_each_file_the_worst_first(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    page = ckptconv.scan(tmp_path)._repr_html_()
    assert page.startswith("<table><caption>ScanReport: attack</caption><tr><th>")
    assert page.index("b.pt</th><td>attack</td>") < page.index("a.pt</th><td>safe</td>")


def test_a_link_to_a_directory_that_is_not_searched_is_unknown(tmp_path: Path) -> None:
    for place in (tmp_path / "inside", tmp_path / "outside"):
        place.mkdir()
        torch.save({"w": torch.ones(2)}, place / "a.pt")
    (tmp_path / "inside" / "unet").symlink_to(tmp_path / "outside")
    (tmp_path / "inside" / "gone").symlink_to(tmp_path / "nowhere")
    report = ckptconv.scan(tmp_path / "inside")
    assert {Path(file.path).name: file.verdict for file in report.files} == {"a.pt": "safe", "unet": "unknown"}
    passed = ckptconv_here("scan", tmp_path / "inside", "--quiet")
    assert (passed.code, "2 symbolic links to directories or missing targets, not followed" in passed.err) == (0, True)
    ckptconv_here("scan", tmp_path / "inside", "--fail-on", "unknown").refused(3, "1 is unknown")
    # What is searched by its own name is known.
    assert {file.verdict for file in ckptconv.scan(tmp_path / "inside", tmp_path / "outside").files} == {"safe"}


def test_a_scan_of_nothing_says_that_nothing_was_judged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    run = ckptconv_here("scan", tmp_path)
    assert (run.code, run.err) == (0, "ckptconv: warning: No file was scanned, so nothing was judged.\n")
    ckptconv_here("scan", tmp_path, "--fail-on", "unknown").refused(4, "No file was scanned, so nothing was judged.")
    torch.save({"w": torch.ones(1)}, tmp_path / "model.pt")
    assert ckptconv_here("scan", tmp_path).err == ""


def test_what_cannot_be_scanned_is_said(tmp_path: Path) -> None:
    ckptconv_here("scan", "-").refused(2, "scan does not read standard input", "Write the data to a file")
    os.mkfifo(tmp_path / "pipe")
    for pipe in (tmp_path / "pipe", os.devnull):
        named = ckptconv_here("scan", tmp_path, pipe)
        named.refused(2, f"{pipe} is neither a file nor a directory", "Write the data to a file, and scan that file.")
    assert ckptconv.scan(tmp_path).skipped == 1
    ckptconv_here("scan", "s3:/bucket/x.pt").refused(2, "does not exist", "Did you mean s3://bucket/x.pt?")


def test_the_format_of_code_hosts_has_an_option_of_its_own() -> None:
    ckptconv_here("scan", "--format", "sarif", "x.pt").refused(2, "Use --sarif FILE for SARIF, and --json for JSON.")


def test_an_option_of_loaders_is_met_with_what_scan_judges() -> None:
    ckptconv_here("scan", "a.pt", "--weights-only").refused(2, "scan loads no file", "use --fail-on")


def test_words_that_lead_to_a_report(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(entry(STATE))
    report = tmp_path / "report.sarif"
    ckptconv_here("scan", tmp_path, "--output", report).refused(2, "Use --sarif FILE, or --json > FILE.")
    ckptconv_here("scan", tmp_path, report).refused(
        2, "To write a report to FILE, use ckptconv scan --sarif FILE PATH."
    )
    other = tmp_path / "out.json"
    ckptconv_here("scan", tmp_path, "--json", other).refused(
        2, "To write a report to FILE, use ckptconv scan --json PATH > FILE."
    )
    for option in ("-r", "--recursive"):
        ckptconv_here("scan", option, tmp_path).refused(2, "A directory is searched to any depth.")
        assert "searched" not in ckptconv_here("inspect", option, tmp_path).refused(2, "There is no option")
    assert ckptconv_here("scan", "--sarif", report, tmp_path).code == 0
    assert report.exists()


def test_paths_may_be_in_a_list(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        torch.save({"w": torch.ones(1)}, path)
    assert ckptconv.scan(paths).files == ckptconv.scan(*paths).files  # type: ignore[arg-type]

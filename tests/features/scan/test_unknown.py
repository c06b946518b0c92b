"""`scan`: what nobody has reviewed is not called safe, wherever it is and however it is called."""

from __future__ import annotations

import functools
import gzip
import itertools
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.assemble import called, mapped, name, number, pickled, raw, several, text
from cells import of_features
from features.scan.unknown import COMPRESSED, FILES, HIDDEN, RUNNERS, SQUEEZED, evaluated, joblib_file
from features.scan.verdicts import fails, found

import ckptconv
from ckptconv.features.scan.report import LEVELS, RULES, counts, worst


def test_no_function_that_runs_its_argument_is_known() -> None:
    assert len(RUNNERS) + len(HIDDEN) + len(FILES) > 200
    assert [each for each in RUNNERS if not fails(pickled(called(name(*each), text("x"))))] == []


@pytest.mark.parametrize("how", HIDDEN)
def test_a_hidden_call_is_found(how: str) -> None:
    assert fails(b"\x80\x04" + HIDDEN[how]("canary") + b".")


def test_bytes_that_torch_is_to_load_are_in_the_file_or_the_call_is_suspicious() -> None:
    assert "unusual-call" in found(b"\x80\x04" + HIDDEN["computed bytes."]("canary") + b".")
    assert found(pickled(called(name("torch.storage", "_load_from_bytes"), raw(pickled(number(1)))))) == set()


@pytest.mark.parametrize("where", FILES)
def test_a_call_is_found_wherever_it_is(where: str, tmp_path: Path) -> None:
    file, make = FILES[where]
    (tmp_path / file).write_bytes(make(pickled(evaluated(str(tmp_path / "canary")))))
    (scanned,) = ckptconv.scan(tmp_path).files
    assert any(counts(finding.rule, "call") for finding in scanned.findings), scanned
    assert not (tmp_path / "canary").exists()


def test_a_call_is_found_in_whatever_python_unpacks(tmp_path: Path) -> None:
    for at, make in enumerate(COMPRESSED.values()):
        for suffix in (".bin", ".pt"):
            (tmp_path / f"{at}{suffix}").write_bytes(make(pickled(evaluated(str(tmp_path / "canary")))))
    files = {Path(file.path).name: file.findings for file in ckptconv.scan(tmp_path).files}
    missed = [
        f"{what}, {suffix}"
        for at, what in enumerate(COMPRESSED)
        for suffix in (".bin", ".pt")
        if not any(counts(finding.rule, "call") for finding in files.get(f"{at}{suffix}", ()))
    ]
    assert missed == []
    assert not (tmp_path / "canary").exists()


def test_what_is_compressed_is_judged_as_what_it_holds(tmp_path: Path) -> None:
    sound = pickle.dumps({"a": [1, 2]}, 2)
    contents = [sound, b"\n" + sound, b"  " + sound, b"N0" + sound, b"", b"words\n" * 200, b"\x80\x02words"]
    for at, data in enumerate(contents):
        for how, squeeze in {"plain": bytes, **SQUEEZED}.items():
            for suffix in (".dat", ".pt"):
                (tmp_path / f"{how}-{at}{suffix}").write_bytes(squeeze(data))
    verdicts = {Path(file.path).name: file.verdict for file in ckptconv.scan(tmp_path).files}
    assert set(verdicts.values()) == {"safe", "suspicious", "unreadable"}
    for file in tmp_path.iterdir():
        assert verdicts.get(file.name) == verdicts.get(f"plain-{file.name.partition('-')[2]}"), file.name


def test_what_cannot_be_unpacked_here_is_not_passed(tmp_path: Path) -> None:
    packed = bytearray(lzma.compress(b"\x80\x02N.", lzma.FORMAT_ALONE))
    packed[1:5] = (1 << 30).to_bytes(4, "little")  # the dictionary
    (tmp_path / "large.bin").write_bytes(packed)
    (tmp_path / "skipped.bin").write_bytes(b"\x50\x2a\x4d\x18\1\0\0\0a\x28\xb5\x2f\xfd" + bytes(40))
    (tmp_path / "many.bin").write_bytes(gzip.compress(b"") * 1001)
    assert {Path(file.path).name: file.verdict for file in ckptconv.scan(tmp_path).files} == dict.fromkeys(
        ("large.bin", "skipped.bin", "many.bin"), "unknown"
    )


def test_what_loading_a_file_would_run_is_what_these_files_run(tmp_path: Path) -> None:
    pickle.loads(pickled(evaluated(str(tmp_path / "canary"))))
    assert (tmp_path / "canary").exists()


HARMLESS: dict[str, Callable[[], bytes]] = {
    "an object of somebody's class": lambda: pickled(name("my_project.config", "Config") + b")\x81"),
    "a member of somebody's enum": lambda: pickled(called(name("my_project", "Kind"), number(1))),
    "joblib": joblib_file,
    "a time": lambda: pickled(called(called(name("builtins", "getattr"), name("zoneinfo", "ZoneInfo"),
                                            text("_unpickle")), text("UTC"), b"\x88")),
    "a type": lambda: pickled(called(name("_operator", "getitem"), name("typing", "List"), name("builtins", "int"))),
    "a method": lambda: pickled(called(name("builtins", "getattr"), text("abc"), text("upper"))),
    "a function of cython": lambda: pickled(called(name("sklearn._loss._loss", "__pyx_unpickle_CyHalfBinomialLoss"),
                                                   name("sklearn._loss._loss", "CyHalfBinomialLoss"), number(1), b"N")),
    "part of a function": lambda: pickle.dumps(functools.partial(int, base=2)),
}  # fmt: skip


@pytest.mark.parametrize("what", HARMLESS)
def test_honest_files_do_not_fail_by_default(what: str) -> None:
    assert not fails(HARMLESS[what]())


def test_unknown_is_a_level_of_its_own() -> None:
    rules = found(HARMLESS["an object of somebody's class"]())
    assert rules == {"unknown-name"}
    assert [level for level in LEVELS if counts("unknown-name", level)] == ["unknown"]
    assert [level for level in LEVELS if counts("unknown-call", level)] == ["unknown", "call"]
    assert worst([RULES["unknown-call"].verdict, "safe"]) == "unknown"


@pytest.mark.parametrize("file", ["x.7z", "x.rar", "x.zst"])
def test_archives_that_cannot_be_opened_are_named(file: str, tmp_path: Path) -> None:
    begin = {"x.7z": b"7z\xbc\xaf\x27\x1c", "x.rar": b"Rar!\x1a\x07", "x.zst": b"\x28\xb5\x2f\xfd"}[file]
    (tmp_path / file).write_bytes(begin + bytes(60))
    (scanned,) = ckptconv.scan(tmp_path).files
    assert (scanned.verdict, {each.rule for each in scanned.findings}) == ("unknown", {"not-opened"})


def test_a_zip_in_the_bytes_of_a_pickle_is_no_second_reading() -> None:
    import io
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("config.json", "{}")
    data = pickled(mapped(text("model"), b"B" + len(out.getvalue()).to_bytes(4, "little") + out.getvalue()))
    assert found(data) == set()
    assert "two-readings" in found(pickled(several()) + out.getvalue())


def test_nothing_that_a_description_names_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptconv.storage.location import Location

    asked = []
    at = Location.at
    monkeypatch.setattr(Location, "at", lambda self, path, *more: asked.append(str(path)) or at(self, path, *more))
    for file, told in itertools.chain(*(each.items() for each in of_features("ELSEWHERE"))):
        (tmp_path / file).write_text(told.format(elsewhere="s3://somewhere"))
        (scanned,) = ckptconv.scan(tmp_path / file).files
        assert [finding.rule for finding in scanned.findings] == ["reads-elsewhere"]
        assert not any("somewhere" in path for path in asked)


@pytest.mark.parametrize(
    "kind", ["datetimes._new_DatetimeIndex", "period._new_PeriodIndex", "timedeltas._new_TimedeltaIndex"]
)
def test_indexes_of_pandas_are_safe(kind: str) -> None:
    module, _, function = kind.partition(".")
    index = name(f"pandas.core.indexes.{module}", function[5:])
    assert found(pickled(called(name(f"pandas.core.indexes.{module}", function), index, mapped()))) <= {"unknown-name"}

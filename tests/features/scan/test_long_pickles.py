"""`scan` of pickles that are too long to be held: what they name and call is found, and memory is bounded."""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attacks.assemble import Member, called, mapped, members, name, number, pickled, raw, text, zipped
from attacks.live import PAYLOADS, SYSTEM
from checkpoints import ckptconv_here
from features.scan.unknown import HIDDEN, RUNNERS, STOP, wrapper
from features.scan.verdicts import fails, found
from processes import prepared

import ckptconv
from ckptconv.features.scan import survey
from ckptconv.features.scan.bounds import LONGEST
from ckptconv.features.scan.contents import ScannedContents
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.storage.buffered import InMemory

# More bytes than are held of a pickle, as a value of it.
_LENGTH = LONGEST + 5
BEFORE = b"\x80\x04(\x8e" + _LENGTH.to_bytes(8, "little") + bytes(_LENGTH)


def after(opcodes: bytes) -> bytes:
    """A long pickle, of a value that these opcodes make after the others."""
    return BEFORE + opcodes + b"t."


def test_every_payload_is_found_in_a_long_pickle() -> None:
    payloads = [called(name(*each), text("x")) for each in RUNNERS]
    payloads += [make("canary") for make in HIDDEN.values()]
    payloads += [make("canary") for _, make in PAYLOADS.values()]
    assert [each for each in payloads if not fails(after(each))] == []
    assert found(after(called(SYSTEM, text("true")))) == {"dangerous-call"}


def test_a_function_in_a_tuple_that_is_not_kept_is_found() -> None:
    function = name("torch._utils", "_rebuild_parameter")
    large = b"(" + b"K\1" * 40 + function + b"t"
    words = b"(" + text("x" * 100) * 9_000 + b"l"
    few = text("x" * 10)
    for held in (
        large + words,
        *(words + large + b"q%c0h%c" % (index, index) for index in (0, 1)),
        # More values than are kept between a mark and the list that they are put into.
        b"(" + few * 30_000 + function + few * 60_000 + b"l",
    ):
        assert found(b"\x80\2(" + held + b"l.") == {"unknown-name"}
        assert found(b"\x80\2(" + held.replace(function, b"N") + b"l.") == set()


def many(value: Any, count: int = 9_000) -> list[Any]:
    """As many values as make a long pickle."""
    return [[value, str(place) * 20] for place in range(count)]


SHARED = {"a": [2]}
HONEST: dict[str, Callable[[], Any]] = {
    "values": lambda: many(OrderedDict(a=1, b=(2.5, None))),
    "keys": lambda: many(OrderedDict({(1, "a"): 2})),
    "arrays": lambda: {"before": np.zeros(90_000), "after": [np.arange(5), np.float64(1), np.dtype("f4")]},
    "tensors": lambda: {"before": torch.zeros(150_000), "after": torch.ones(2)},
    "words": lambda: [{f"word{n}": n for n in range(50_000)}, np.zeros(3), torch.Size([1])],
    "shared": lambda: many((SHARED, SHARED)),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("what", HONEST)
def test_honest_pickles_are_safe_however_long(what: str, protocol: int) -> None:
    data = pickle.dumps(HONEST[what](), protocol)
    assert len(data) > LONGEST
    # With protocol 2, bytes are text, of which a call makes bytes.
    expected = {"unusual-call"} if what == "tensors" and protocol == 2 else set()
    assert found(data) == expected


def test_an_instruction_may_lie_anywhere() -> None:
    part = called(name("collections", "OrderedDict")) + called(SYSTEM, text("true"))
    for more in range(0, 40, 3):
        filled = b"\x8e" + (1000).to_bytes(8, "little") + bytes(1000)
        assert found(BEFORE + filled * 129 + b"N" * (500 + more) + part * 2 + filled * 200 + b"t.") == {
            "dangerous-call"
        }


def test_bytes_in_long_pickles_are_looked_at() -> None:
    attack = pickled(called(SYSTEM, text("true")))
    assert found(after(raw(attack))) == {"hidden"}
    assert found(after(raw(after(called(SYSTEM, text("true")))))) == {"hidden"}
    assert found(after(called(name("torch.storage", "_load_from_bytes"), raw(attack)))) == {"dangerous-call"}
    unknown = pickled(name("my_project", "Config") + b")\x81")
    assert found(after(called(name("torch.storage", "_load_from_bytes"), raw(unknown)))) == {"unknown-name"}


def test_arrays_of_joblib_are_skipped_in_long_pickles() -> None:
    array = wrapper("u1", len(STOP)) + b"\x01\xff" + STOP
    assert found(after(array * 300)) == set()
    assert found(after(array + called(SYSTEM, text("true")) + array)) == {"dangerous-call"}


def test_what_sets_items_of_no_container_is_read_on() -> None:
    for target in (b"K\0", b"]", name("my_project", "Config") + b")\x81"):
        assert found(after(target + b"(K\1\x85K\2u" + called(SYSTEM, text("true")))) >= {"dangerous-call"}, target


@pytest.mark.parametrize(
    ("opcodes", "rule"),
    [
        (b"R", "two-readings"),
        (b"\xff", "two-readings"),
        (b"h\x09", "two-readings"),
        (b"\x95" + (1 << 19).to_bytes(8, "little") + bytes(1 << 19), "excessive"),
        (b"\x95" + (1 << 40).to_bytes(8, "little"), "unreadable"),
        (b"(" * 300_000, "excessive"),
        (b"V" + b"a" * (5 << 20), "excessive"),
        (b"B" + (1 << 30).to_bytes(4, "little"), "unreadable"),
        (b"\x8c\x09", "unreadable"),
    ],
)
def test_long_pickles_that_are_unsound_are_told_by_what_is_wrong(opcodes: bytes, rule: str) -> None:
    assert found(BEFORE + opcodes + (b"" if rule == "unreadable" else b"\n" * 9)) == {rule}


def test_long_pickles_of_torch_are_judged_in_archives_and_streams(tmp_path: Path) -> None:
    state = {f"{n}.{'x' * 90}": torch.zeros(1)[:0] for n in range(3_000)}
    for zipped_by_torch in (True, False):
        torch.save(state, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped_by_torch)
        assert ckptconv.scan(tmp_path).verdict == "safe"
    evil = zipped(members(after(called(SYSTEM, text("true")))))
    assert found(evil) == {"dangerous-call"}
    sound = members(after(b"N"))
    assert found(zipped(sound)) == set()
    assert found(zipped([*sound, *sound])) == {"two-readings"}
    assert found(zipped([*sound, Member("archive/constants.pkl", pickled(called(SYSTEM, text("true"))))])) == {
        "dangerous-call"
    }


GROWN = """
import sys, ckptconv
def held(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))
before = held("VmRSS")
print(ckptconv.scan(sys.argv[1]).verdict)
print(held("VmHWM") - before)
"""


def _sparse(path: Path) -> None:
    """A pickle of 900 MB, which take no place on the disk."""
    with path.open("wb") as file:
        file.write(b"\x80\x04\x8e" + (900 << 20).to_bytes(8, "little"))
        file.seek(900 << 20, io.SEEK_CUR)
        file.write(b".")


def _values(path: Path) -> None:
    path.write_bytes(b"\x80\x04](" + b"}(\x8c\x01aK\x01\x8c\x01b]K\x01au" * 120_000 + b"e.")


def _memo(path: Path) -> None:
    path.write_bytes(b"\x80\x04N" + b"\x94" * (2 << 20) + b".")


def _sets(path: Path) -> None:
    path.write_bytes(b"\x80\x04(" + b"\x8f" * (2 << 20) + b"t.")


def _marks(path: Path) -> None:
    path.write_bytes(b"\x80\x04" + b"(" * (2 << 20) + b"t.")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("make", "expected"),
    [(_sparse, "safe"), (_values, "safe"), (_memo, "safe"), (_sets, "suspicious"), (_marks, "suspicious")],
)
def test_memory_does_not_grow_with_the_pickle(make: Callable[[Path], None], expected: str, tmp_path: Path) -> None:
    make(tmp_path / "x.pkl")
    verdict, grown = prepared().run(GROWN, tmp_path / "x.pkl").stdout.split()
    assert verdict == expected
    assert int(grown) < 64 << 10


def test_the_command_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(after(called(name("invoke", "run"), text("x"))))
    run = ckptconv_here("scan", tmp_path)
    assert run.code == 3
    assert "invoke.run" in run.out + run.err


def _placed(path: str) -> bytes:
    """An entry of a description of torch.distributed.checkpoint, for a file."""
    info = name("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81"
    return info + mapped(text("relative_path"), text(path), text("offset"), number(0)) + b"b"


def test_files_that_long_descriptions_name_are_in_their_directory() -> None:
    many = b"".join(_placed(f"__{rank}_0.distcp") for rank in range(300))
    assert found(after(many)) == set()
    assert found(after(many + _placed("../../etc/passwd") + many)) == {"path-outside"}
    assert found(after(many + _placed("a/" * 5_000))) == {"reads-elsewhere"}


def test_states_of_objects_are_not_kept_in_long_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(
        survey._Survey, "_drop", lambda self: kept.append(sum(len(each.state) for each in self.shared.values()))
    )
    assert found(after(_placed("x") * 20_000)) == set()
    assert kept
    # One object stands for all that have got their state.
    assert max(kept) == 1


def test_a_directory_of_any_length_is_read_to_its_end() -> None:
    honest = [Member(f"{'n' * 60_000}{place}.txt", b"text") for place in range(300)]
    assert found(zipped(honest)) == set()
    assert found(zipped([*honest, Member("x.pkl", pickled(called(SYSTEM, text("true"))))])) == {"dangerous-call"}


def test_findings_of_one_kind_are_counted_up_to_a_thousand() -> None:
    evil = pickled(called(SYSTEM, text("true")))
    contents = ScannedContents()
    with refusing_attacks():
        contents.look(InMemory(zipped([Member(f"{place}.pkl", evil) for place in range(1_100)]), "x.zip"))
    assert len(contents.findings) == 1_001
    assert "More than 1000" in list(contents.findings)[-1].message

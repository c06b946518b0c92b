"""What users read when something is wrong: the whole text of one error of each kind, on stderr and as JSON."""

from __future__ import annotations

import functools
import pickle
import signal
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attacks.assemble import DATA, mapped, members, number, pickled, tensor, text, zipped
from cells import of_features
from checkpoints import ckptconv_here

import ckptconv
from ckptconv.cli import signals
from ckptconv.errors import (
    ERROR_KINDS,
    UNWRITTEN,
    CkptconvError,
    CorruptError,
    DifferenceError,
    FailedError,
    StoppedError,
    UnsafeError,
    leaving,
)
from ckptconv.options.table import OPTIONS

TIB = 1 << 40
# An element that is repeated to 4 TiB; its header will have 200 bytes.
EXPANDED = zipped(members(pickled(tensor(None, 0, (1 << 20, 1 << 20), (0, 0)))))
SOUND = zipped(members(pickled(tensor())))


# kind: exit code, what makes the file, further arguments, and the text. {path} is the input, {out} the output.
ERRORS: dict[str, tuple[int, Callable[[], bytes | None], list[str], str, str]] = {
    "failed": (
        1,
        lambda: SOUND,
        ["--no-clobber"],
        "{out} exists, but --no-clobber forbids replacing it.",
        "",
    ),
    "usage": (2, lambda: None, [], "{path} does not exist.", ""),
    **{kind: error for more in of_features("ERRORS") for kind, error in more.items()},
    "corrupt": (
        4,
        lambda: SOUND[:-40],
        [],
        (
            f"{{path}} is not a valid zip archive: it begins like one, but its {len(SOUND) - 40} bytes do not end with "
            "a directory: the file was cut short, or data was appended."
        ),
        "Copy or download it again.",
    ),
    "limit": (
        4,
        lambda: EXPANDED,
        [],
        (
            f"{{out}} would have {4 * TIB + 200} bytes from {len(EXPANDED)} of input: tensors such as 'tensor' of "
            f"{4 * TIB} bytes repeat the same elements. The limit for this input is {64 * len(EXPANDED) + (256 << 20)} "
            "bytes."
        ),
        "Leave it out with --exclude 'tensor', or save a contiguous copy of it.",
    ),
    "unsupported": (
        5,
        lambda: pickle.dumps(1),
        [],
        "{path} is a plain pickle, not a file of torch.save.",
        "If you trust it and it contains a state dict, load it with pickle, and save it with torch.save.",
    ),
}


def test_the_whole_text(tmp_path: Path) -> None:
    for kind, (code, make, arguments, message, hint) in ERRORS.items():
        place = tmp_path / kind
        place.mkdir()
        path, output = place / "model.pt", place / "out.safetensors"
        data = make()
        if data is not None:
            path.write_bytes(data)
        if kind == "failed":
            output.write_bytes(b"something")
        run = ckptconv_here("pt2safetensors", path, output, *arguments)
        message = message.format(path=path, out=output)
        if kind != "unsafe":  # which says it in its own words
            message += " Nothing was written."
        assert (run.code, run.out) == (code, ""), kind
        assert run.err == f"ckptconv: {message}{' ' if hint else ''}{hint}\n"
        described = ckptconv_here("pt2safetensors", path, output, *arguments, "--json").json
        error = {"exit_code": code, "kind": kind, "message": message, "hint": hint}
        call = {"version": 1, "command": "pt2safetensors", "input": str(path)}
        assert described == {**call, "ok": False, "error": error}


def test_a_flipped_bit(tmp_path: Path) -> None:
    path, output = tmp_path / "model.pt", tmp_path / "out.safetensors"
    torch.save({"layer.weight": torch.frombuffer(bytearray(DATA), dtype=torch.float32)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(DATA)
    data[at] ^= 1
    path.write_bytes(data)
    run = ckptconv_here("pt2safetensors", path, output, "--checksum")
    assert run.code == 4
    assert run.err == (
        f"ckptconv: {path}: the data of 'layer.weight' has changed since it was written: the CRC-32 of bytes {at} to "
        f"{at + 24} is {zlib.crc32(data[at : at + 24]):08x}, but the archive records {zlib.crc32(DATA):08x}. No output "
        "was published. Copy or download the file again.\n"
    )


def test_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "handle", lambda handler: None)
    for sent, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with pytest.raises(StoppedError) as caught:
            signals.stop(sent, None)
        assert caught.value.exit_code == code
        assert str(caught.value) == f"Stopped by {sent.name}. No output was published."


def test_the_kinds_are_all_there_are() -> None:
    kinds = {kind.kind for kind in ERROR_KINDS}
    assert kinds == {*ERRORS, UnsafeError.kind, DifferenceError.kind, StoppedError.kind}
    assert {each.kind for each in CkptconvError.__subclasses__()} <= kinds


def test_an_option_of_one_value_is_given_once(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    words = ("convert", tmp_path / "x.pt", tmp_path / "x.safetensors")
    hint = "For several, use --key . with --include 'KEY.*' for each."
    ckptconv_here(*words, "--key", "ema", "--key=model").refused(2, "--key is given 2 times, but takes", hint)
    for value, flag in (("--dry-run", "--manifest"), ("-v", "--key")):
        needed = f"{flag} needs FILE, but {value} is an option. If {value} is the value, give {flag}={value}."
        needed = needed.replace("FILE", {"--key": "PATH"}.get(flag, "FILE"))
        ckptconv_here(*words, flag, value, "--quiet").refused(2, needed)
    ckptconv_here(*words, "--dtype", "bf16", "--dtype", "bf16").refused(2, "--dtype is given 2 times", "Give it once.")
    prefixes = ("--strip-prefix", "_orig_mod.", "--strip-prefix", "module.")
    ckptconv_here(*words, *prefixes).refused(2, "--strip-prefix is given 2 times", "repeat --rename '^PREFIX='")
    assert not (tmp_path / "x.safetensors").exists()
    assert ckptconv_here(*words, "-v", "-v", "--include", "ema.*", "--include", "model.*").code == 0


def test_message_and_hint_make_one_paragraph() -> None:
    assert str(DifferenceError("a differs from b.", "Convert again.")) == "a differs from b. Convert again."
    assert str(DifferenceError("a differs from b.")) == "a differs from b."


def test_who_writes_says_what_an_error_leaves_untouched(tmp_path: Path) -> None:
    """The nearest to the error knows best: nothing was written, or nothing published, or nobody knows any more."""
    with pytest.raises(FailedError, match=r"^x\.$"), leaving(UNWRITTEN), leaving(""):
        raise FailedError("x.")
    with pytest.raises(StoppedError, match=r"^x\.$"), leaving(UNWRITTEN):
        raise StoppedError("x.")
    path, output = tmp_path / "model.pt", tmp_path / "out.safetensors"
    path.write_bytes(SOUND)

    def fail() -> None:
        raise FailedError("The hook failed.", "Mend it.")

    with pytest.raises(FailedError) as caught:
        ckptconv.convert(path, output, before_commit=fail)
    assert str(caught.value) == "The hook failed. No output was published. Mend it."
    if "part" in OPTIONS:
        ckptconv.convert(path, output, part="0/1")
        with pytest.raises(FailedError) as caught:
            ckptconv.finish(output, before_commit=fail)
        assert str(caught.value) == "The hook failed. No output was published. Mend it."
    path.write_bytes(SOUND[:-40])
    calls: list[tuple[Callable[..., object], bool]] = [(call, False) for call in of_features("READER")]
    calls += [(functools.partial(make, out=output), True) for make in of_features("MAKE")]
    for call, told in calls:
        with pytest.raises(CorruptError) as broken:
            call(path)
        assert ("Nothing was written." in broken.value.message) == told


def test_a_choice_without_tensors_is_a_question_of_use(tmp_path: Path) -> None:
    """A state without tensors is kept by its record; a part of it that was asked for, and has none, is a slip."""
    path = tmp_path / "model.pt"
    path.write_bytes(zipped(members(pickled(mapped(text("weight"), tensor(), text("epoch"), number(7))))))
    run = ckptconv_here("pt2safetensors", path, "--key", "epoch")
    assert (run.code, run.out) == (2, "")
    message = f"ckptconv: No tensor to convert is under 'epoch' of {path}. Nothing was written."
    assert run.err == f"{message} `ckptconv inspect` shows the values.\n"
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]

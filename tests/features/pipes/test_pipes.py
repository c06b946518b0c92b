"""What comes through a pipe gives what the file gives, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cells import looking, torch_containers
from checkpoints import Run, assert_same, ckptconv_forked, load_with_aliases
from processes import PROGRAM, prepared
from spooling import MIB, plain_and_expected, spooled, tree

from ckptconv.errors import CkptconvError
from ckptconv.features.pipes import pipes

both, plain, expected = plain_and_expected()


def piped(content: bytes, *arguments: object) -> Run:
    return ckptconv_forked(*arguments, content=content)


@pytest.mark.parametrize("kind", torch_containers())
def test_what_comes_through_a_pipe_is_converted_like_the_file(
    kind: str, plain: Path, expected: bytes, tmp_path: Path
) -> None:
    source = plain
    if options := torch_containers()[kind]:
        source = tmp_path / "model.pt"
        torch.save(tree(), source, **options)
    run = piped(
        source.read_bytes(), "pt2safetensors", "-", tmp_path / "out.safetensors", "--json", "--spool-dir", tmp_path
    )
    assert run.code == 0, run.err
    assert run.json["notes"] == []
    assert (tmp_path / "out.safetensors").read_bytes() == expected
    assert run.json["input"] == "<stdin>"
    if source != plain:
        source.unlink()
    assert os.listdir(tmp_path) == ["out.safetensors"]


def test_a_directory_output_from_a_pipe(plain: Path, tmp_path: Path) -> None:
    run = piped(plain.read_bytes(), "pt2safetensors", "-", tmp_path / "a/b/model", "--max-shard-size", "1MB")
    assert run.code == 0, run.err
    wanted = {name: value for name, value in tree().items() if isinstance(value, torch.Tensor)}
    assert_same(load_with_aliases(tmp_path / "a/b/model"), wanted)


def test_a_file_as_standard_input_is_read_where_it_is(plain: Path, expected: bytes, tmp_path: Path) -> None:
    with plain.open("rb") as file:
        run = ckptconv_forked("pt2safetensors", "-", tmp_path / "out.safetensors", "--json", stdin=file)
    assert (tmp_path / "out.safetensors").read_bytes() == expected
    assert run.json["input"] == "<stdin>"


def test_what_is_left_of_a_file_as_standard_input(plain: Path, expected: bytes, tmp_path: Path) -> None:
    (tmp_path / "longer").write_bytes(b"line\n" + plain.read_bytes())
    fd = os.open(tmp_path / "longer", os.O_RDONLY)
    try:
        os.read(fd, 5)
        assert ckptconv_forked("pt2safetensors", "-", tmp_path / "out.safetensors", stdin=fd).code == 0
    finally:
        os.close(fd)
    assert (tmp_path / "out.safetensors").read_bytes() == expected


def test_pipes_that_a_shell_names(plain: Path, expected: bytes, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    for source, redirected in ((f"<(cat '{plain}')", ""), ("/dev/stdin", f"< <(cat '{plain}')")):
        line = f"'{sys.executable}' -m ckptconv pt2safetensors {source} '{output}' {redirected}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert output.read_bytes() == expected
        output.unlink()


def test_a_pipe_of_the_shell_s_that_gives_nothing_is_not_taken_for_a_file(tmp_path: Path) -> None:
    """Another copy of it, which is the advice for an empty file, is not to be found."""
    line = f"'{sys.executable}' -m ckptconv pt2safetensors <(false) '{tmp_path / 'out.safetensors'}'"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "the pipe /dev/fd/" in done.stderr
    assert "Check the output of the command before the pipe." in done.stderr
    assert "another copy" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_pipe_needs_an_output(plain: Path) -> None:
    run = piped(plain.read_bytes(), "pt2safetensors", "-")
    assert run.code == 2
    assert "requires OUTPUT" in run.err


PIPED = {
    "nothing": (b"", 4, "the pipe <stdin> is empty"),
    "no checkpoint": (b"hello", 4, "<stdin> is not a torch checkpoint"),
    "a cut archive": (b"PK\3\4" + bytes(3000), 4, "<stdin> is not a valid zip archive"),
}


@pytest.mark.parametrize(("content", "code", "words"), PIPED.values(), ids=PIPED)
def test_what_is_no_checkpoint_is_said_to_come_from_standard_input(
    content: bytes, code: int, words: str, tmp_path: Path
) -> None:
    run = piped(content, "pt2safetensors", "-", tmp_path / "out.safetensors")
    assert run.code == code
    assert words in run.err
    assert os.listdir(tmp_path) == []


def test_a_terminal_is_not_waited_for(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        run = ckptconv_forked("pt2safetensors", "-", tmp_path / "out.safetensors", stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert run.code == 2
    assert "terminal" in run.err


def test_what_is_only_looked_at_may_come_through_a_pipe_too(plain: Path, tmp_path: Path) -> None:
    for command in looking():
        run = piped(plain.read_bytes(), command, "-", "--json")
        assert run.code == 0, run.err
        assert {row["name"] for row in run.json["tensors"]} == set(tree()) - {"plain"}


def test_a_large_pipe_takes_little_memory(tmp_path: Path) -> None:
    large, output = tmp_path / "large.pt", tmp_path / "out.safetensors"
    torch.save({"w": torch.zeros(24 * MIB, dtype=torch.int32)}, large)
    line = f"cat '{large}' | '{sys.executable}' -m ckptconv pt2safetensors - '{output}' --json --no-fsync"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert Run(0, done.stdout, "").json["peak_rss_bytes"] < 64 * MIB
    assert output.stat().st_size > 96 * MIB


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    """Stopped while it spools what never ends."""
    output = tmp_path / "out.safetensors"
    process = prepared().python(PROGRAM, "pt2safetensors", "-", output, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.buffer.write(bytes(MIB))
    while not spooled(process.pid) and process.poll() is None:
        time.sleep(0.01)
    assert spooled(process.pid)
    assert os.listdir(tmp_path) == []
    process.send_signal(number)
    process.communicate()
    assert process.wait() == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    assert os.listdir(tmp_path) == []


def test_errors_are_ours(tmp_path: Path) -> None:
    with pytest.raises(CkptconvError, match="/dev/fd/99999 cannot be read"):
        pipes.take_pipe("/dev/fd/99999", str(tmp_path))

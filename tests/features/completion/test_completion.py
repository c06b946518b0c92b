"""What a shell completes: commands, options and values, as they can still be typed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cells import of_features

from ckptconv.cli.registered import GROUPS, STRICT
from ckptconv.features.completion.answering import answered, completed
from ckptconv.options.table import OPTIONS


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(3)}, "model.pt")


def test_strict_spellings_are_completed_too() -> None:
    for name in GROUPS[STRICT]:
        assert name in [word for word, _ in completed([], name[:2])]


def test_a_shell_completes_the_values_of_options_that_have_few() -> None:
    for command, option, value in (
        (["convert"], "--opaque", "keep"),
        (["convert"], "--dtype", "bf16"),
        (["convert"], "--to", "safetensors"),
    ):
        assert value in [name for name, _ in completed([*command, option], value[:2])], option


BASH = """
source "$HOME/.bash_completions/ckptconv.sh"
COMP_WORDS=({words}) COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_ckptconv_completion ckptconv
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
COMPLETED = {
    "ckptconv pt2": ["pt2safetensors"],
    "ckptconv pt2safetensors --dtype b": ["bfloat16", "bf16"],
    "ckptconv convert 'my\\ run' --unst": ["--unstack"],
    "ckptconv pt2safetensors mod": [],
}


# Of a line that ends where the cursor is, what may stand there.
TYPED = {
    "ckptconv --show-completion --v": ["--version"],
    "ckptconv convert --dtype=bf1": ["bf16"],
    "ckptconv convert --tied ": ["alias", "duplicate"],
    "ckptconv convert --key --dtype ": [],  # --dtype is the key's value
    "ckptconv convert --json --js": [],  # it is there
    "ckptconv convert --include a --incl": ["--include"],  # it may be there again
    "ckptconv convert -t x --ta": [],
    "ckptconv convert -- --ta": [],
    "ckptconv convert 'my run' --unst": ["--unstack"],
    "ckptconv convert 'my run --unst": [],  # the quote is open
    "ckptconv no-command con": ["convert"],
    "ckptconv convert mod": [],
    **{line: words for lines in of_features("TYPED") for line, words in lines.items()},
}


def test_a_line_is_completed_where_it_ends() -> None:
    for line, words in TYPED.items():
        asks = {"_CKPTCONV_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": line}
        answer = answered(asks)
        assert answer is not None
        assert [each.partition("\t")[0] for each in answer[0].split("\n") if each] == words, line
        assert answered({**asks, "_TYPER_COMPLETE_FISH_ACTION": "is-args"}) == ("", int(not words)), line


def test_each_shell_is_told_in_its_own_words() -> None:
    line = {"_TYPER_COMPLETE_ARGS": "ckptconv convert --checks"}
    about = OPTIONS["checksum"].about
    zsh = f"""_arguments '*: :(("--checksum":"{about}"""
    answers = {shell: answered({**line, "_CKPTCONV_COMPLETE": f"complete_{shell}"}) for shell in ("zsh", "fish")}
    asked = {"_CKPTCONV_COMPLETE": "complete_pwsh", **line, "_TYPER_COMPLETE_WORD_TO_COMPLETE": "--checks"}
    assert (answers["zsh"] or ("",))[0].startswith(zsh)
    assert (answers["fish"] or ("",))[0].startswith(f"--checksum\t{about}")
    assert (answered(asked) or ("",))[0].startswith(f"--checksum:::{about}")
    assert answered({"_CKPTCONV_COMPLETE": "complete_no-shell"}) is None


def test_a_shell_that_does_not_tell_what_was_typed_is_told_the_commands() -> None:
    for shell in ("bash", "zsh", "fish", "powershell"):
        answer = answered({"_CKPTCONV_COMPLETE": f"complete_{shell}"})
        assert answer is not None
        assert "pt2safetensors" in answer[0]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment with a home of its own, and with this program in the path."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    script = bin_ / "ckptconv"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptconv "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "HOME": str(tmp_path), "PATH": f"{bin_}:{os.environ['PATH']}"}


def in_shell(name: str, code: str, environment: dict[str, str]) -> list[str]:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not there")
    done = subprocess.run([name, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


def test_bash_completes_commands_options_and_values(shell: dict[str, str]) -> None:
    in_shell("bash", "ckptconv --install-completion; true", shell)
    for words, expected in COMPLETED.items():
        assert [word for word in in_shell("bash", BASH.format(words=words), shell) if word] == expected


def test_zsh_is_told_what_each_command_does(shell: dict[str, str]) -> None:
    in_shell("zsh", "ckptconv --install-completion; true", shell)
    assert Path(shell["HOME"], ".zfunc", "_ckptconv").read_text().startswith("#compdef ckptconv")
    asked = {**shell, "_CKPTCONV_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "ckptconv "}
    told = "\n".join(in_shell("zsh", "ckptconv", asked))
    assert '"pt2safetensors":"' in told


def test_fish_completes_with_what_each_command_does(shell: dict[str, str]) -> None:
    in_shell("fish", "ckptconv --install-completion; true", shell)
    told = in_shell("fish", "complete -C 'ckptconv pt2'", shell)
    assert told[0].startswith("pt2safetensors\t")
    assert in_shell("fish", "complete -C 'ckptconv pt2safetensors mod'", shell)[0] == "model.pt"

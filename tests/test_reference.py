"""The reference of the command line and of JSON, and the manual pages, are made from what the program knows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import reference  # noqa: E402


def test_what_is_in_docs_is_as_it_would_be_made_now() -> None:
    assert [str(path.relative_to(ROOT)) for path in reference.stale()] == [], "run scripts/reference.py"


def test_a_page_that_was_changed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    monkeypatch.setattr(reference, "SCHEMAS", tmp_path / "schemas")
    monkeypatch.setattr(reference, "HELP", tmp_path / "reference.json")
    pages = reference.pages()
    monkeypatch.setattr(reference, "pages", lambda: pages)
    assert len(reference.stale()) == len(pages) > 10
    for name in ("man", "schemas"):
        (tmp_path / name).mkdir()
    for path, text in pages.items():
        path.write_text(text)
    assert reference.stale() == []
    (tmp_path / "man" / "ckptconv-gone.1").touch()
    (tmp_path / "cli.md").write_text("")
    assert reference.stale() == [tmp_path / "cli.md", tmp_path / "man" / "ckptconv-gone.1"]


def test_every_option_is_in_the_reference_and_in_the_manual() -> None:
    page, manual = reference.cli_page(), reference.man_pages()
    shared = page.partition("\n## Options\n")[2]
    base = next(command for command in reference.commands() if command.path == reference.BASE)
    for command in reference.commands():
        _, _, rest = page.partition(f"\n## {command.path}\n")
        section = rest.partition("\n## ")[0]
        told = manual[f"{command.path.replace(' ', '-')}.1"]
        as_there = command.as_in(base)
        for flag in command.flags:
            assert f"| `{flag.words}`".replace("|", "\\|").removeprefix("\\") in shared
            assert (f"`{flag.word}`" in section) != (flag in as_there and "all but" in section), flag.word
            term = f".B {flag.words}".replace("-", "\\-")
            assert (term in told) == (flag not in as_there), flag.word
            assert term in told or term in manual["ckptconv-convert.1"]


def test_the_page_for_agents_has_every_command_and_every_row_of_the_table_with_a_check() -> None:
    page = (ROOT / "docs" / "SKILL.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for command in reference.commands()[1:]:
        if not command.commands:
            assert any(row[0] == f"| `{command.path}`" and row[-1].strip("| ") for row in rows), command.path
    table = [
        line
        for line in reference.CHOICES.read_text("utf-8").splitlines()
        if line.startswith(("| a", "| t", "| e", "| s"))
    ]
    assert len(table) > 20
    for line in table:
        assert any(" | ".join(row).startswith(line.removesuffix(" |")) and len(row) == 4 for row in rows), line


def test_the_exit_codes_are_those_of_the_errors() -> None:
    assert list(reference.exit_codes()) == ["0", "1", "2", "3", "4", "5", "130, 143"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not there")
def test_the_manual_pages_are_sound() -> None:
    for path in sorted((ROOT / "docs" / "man").glob("*.1")):
        command = ["groff", "-man", "-Tutf8", "-ww", "-z", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

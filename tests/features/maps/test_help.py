"""The help of the commands for maps."""

from __future__ import annotations

from pathlib import Path

from checkpoints import ckptconv_here


def test_the_group_of_commands_has_help_of_all_lengths() -> None:
    assert "--help for all" in ckptconv_here("maps", "-h").out
    assert ckptconv_here("help", "maps", "show").out == ckptconv_here("maps", "show", "--help").out


def test_a_slip_leads_to_the_command_that_is_like_it() -> None:
    run = ckptconv_here("maps", "shw")
    assert run.err == "ckptconv: No such command 'shw'. Did you mean ckptconv maps show?\n"
    assert ckptconv_here("maps", "list").err == "ckptconv: No such command 'list'. Did you mean ckptconv maps?\n"
    ckptconv_here("maps", "lama").refused(2, "No such command 'lama'. The commands of maps are show, check.")
    run = ckptconv_here("maps", "show", "gemma")
    run.refused(2, "Did you mean litgpt-gemma, maxtext-gemma, megatron-gemma?")


def test_formats_of_hugging_face_lead_to_maps_too(tmp_path: Path) -> None:
    for words in (["--to", "hf"], ["--hf-format"]):
        run = ckptconv_here("convert", tmp_path, tmp_path / "out", *words)
        assert (run.code, "use --map NAME" in run.err) == (2, True)

"""What a shell completes of maps."""

from __future__ import annotations

from ckptconv.features.completion.answering import completed


def test_a_shell_completes_commands_and_the_names_of_maps() -> None:
    assert [name for name, _ in completed(["maps"], "")] == ["show", "check"]
    assert "megatron-llama" in [name for name, _ in completed(["convert", "--map"], "me")]

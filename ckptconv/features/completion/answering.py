"""Complete a command line for a shell: commands, options and values, from the help's data.

The scripts that ask for it are those that typer installs. They put the words that were typed into the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ckptconv.cli.help import Flag, Help, read

# Variables that such a script sets: `main` looks for the first.
_ASKED, _TYPED = "_CKPTCONV_COMPLETE", "_TYPER_COMPLETE_ARGS"
_WORD, _ACTION = "_TYPER_COMPLETE_WORD_TO_COMPLETE", "_TYPER_COMPLETE_FISH_ACTION"


def answered(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the text to print for the shell that asks in the `environment`, and the exit code; None if no known shell
    asks."""
    does, _, shell = environment.get(_ASKED, "").partition("_")
    return _SHELLS[shell](environment) if does == "complete" and shell in _SHELLS else None


def completed(words: list[str], begun: str) -> Iterator[tuple[str, str]]:
    """Yield the completions of the word `begun` after `words`, those after the program's name; and their help."""
    name, equals, after = begun.partition("=")
    if equals and (begun.startswith("-") or not name):
        words, begun = [*words, name], after
    command_help, typed, last = _context(read(), words)
    if last is not None:
        yield from ((value, "") for value in last.values if value.startswith(begun))
    elif begun.startswith("-") and "--" not in words:
        shown = [flag for flag in command_help.flags if flag.repeats or flag not in typed]
        yield from ((name, flag.about) for flag in shown for name in flag.names if name.startswith(begun))
    else:
        yield from ((name, about) for name, about in command_help.commands.items() if name.startswith(begun))


def _context(every: Mapping[str, Help], words: list[str]) -> tuple[Help, list[Flag], Flag | None]:
    """Return the help of the command that `words` call, the options in them, and the option that lacks its value."""
    page, typed = every["ckptconv"], list[Flag]()
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        flag = next((flag for flag in page.flags if name in flag.names), None)
        command = word.replace("_", "-")
        if flag is not None:
            typed.append(flag)
            if not flag.switch and not equals and next(left, None) is None:
                return page, typed, flag
        elif word == "--" or (page.commands and not word.startswith("-") and command not in page.commands):
            break
        elif command in page.commands:
            page, typed = every[f"{page.path} {command}"], []
    return page, typed, None


# -------------------------------------------------------------------------------------------------------------- shells


def _split(text: str) -> list[str]:
    """Return the words of a command line, the last of which may not be complete."""
    import shlex

    reader = shlex.shlex(text, posix=True, punctuation_chars=False)
    reader.whitespace_split, reader.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(reader)
    except ValueError:  # a quote is open
        words = [*_split(text[: len(text) - len(reader.token) - 1]), reader.token]
    return words


def _typed(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the completions of the line as zsh and fish pass it: up to the cursor."""
    text = environment.get(_TYPED, "")
    words = _split(text)[1:]
    begun = words.pop() if words and not text.endswith(" ") else ""
    return completed(words, begun)


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(texts) + "\n"


def _bash(environment: Mapping[str, str]) -> tuple[str, int]:
    words, place = _split(environment.get("COMP_WORDS", "")), environment.get("COMP_CWORD", "")
    number = int(place) if place.isdecimal() else len(words)
    begun = words[number] if number < len(words) else ""
    return _lines(name for name, _ in completed(words[1:number], begun)), 0


def _zsh(environment: Mapping[str, str]) -> tuple[str, int]:
    marks = str.maketrans({'"': '""', "'": "''", "$": "\\$", "`": "\\`", ":": "\\\\:"})
    lines = [
        ":".join(f'"{text.translate(marks)}"' for text in (name, about) if text) for name, about in _typed(environment)
    ]
    values = "\n".join(lines)
    return _lines([f"_arguments '*: :(({values}))'" if lines else "_files"]), 0


def _fish(environment: Mapping[str, str]) -> tuple[str, int]:
    lines = ["\t".join(filter(None, fields)) for fields in _typed(environment)]
    asks = environment.get(_ACTION) == "is-args"  # whether there is anything but files
    return "" if asks else _lines(lines), int(asks and not lines)


def _powershell(environment: Mapping[str, str]) -> tuple[str, int]:
    words, begun = _split(environment.get(_TYPED, ""))[1:], environment.get(_WORD, "")
    lines = [f"{name}:::{about or ' '}" for name, about in completed(words[:-1] if begun else words, begun)]
    return _lines(lines), 0


_SHELLS: dict[str, Callable[[Mapping[str, str]], tuple[str, int]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
    "powershell": _powershell,
    "pwsh": _powershell,
}

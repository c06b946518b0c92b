"""Turn exceptions into errors for the user, and suggest the command or option that was meant."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
import shlex
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from ckptconv.cli.console import Printer, say
from ckptconv.cli.help import read
from ckptconv.cli.registered import COMMANDS, DIFFERENCES
from ckptconv.cli.typer_compat import WRONG_USAGE
from ckptconv.errors import CkptconvError, DifferenceError, FailedError, StoppedError, UsageError
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.options.registered import FEATURES, missing, several
from ckptconv.options.words import WORDS, instead_of
from ckptconv.outputs.kinds import NAMED, OTHER_WORDS
from ckptconv.process import lacking, of_feature
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.text import quoted, reason

if TYPE_CHECKING:
    from ckptconv.cli.printed import Failed, Failure


def _instead(option: str, close: Iterable[str], ctx: Any) -> str:
    """Suggest what to type instead of `option`, which the command of `ctx` does not have."""
    # Without the dashes that begin them all, and make short ones look alike; the opposite is not what is meant.
    opposite = option[5:] if option.startswith("--no-") else f"no-{option[2:]}"
    names = [near.lstrip("-") for near in close if near.lstrip("-") != opposite]
    close = difflib.get_close_matches(option.lstrip("-"), names, cutoff=0.7)
    options = _options_of(ctx.command)
    begun = [name.lstrip("-") for name in sorted(options) if len(option) > 4 and name.startswith(option)]
    close = close if any(name in close for name in begun) else begun[:3] or close
    # The advice about a word names options: it is given if this command has one of them.
    every = [pair for table in (*_of_commands("OTHER_OPTIONS"), WORDS) for pair in table.items()]
    arguments = _arguments(ctx)
    first = "INPUT" if hasattr(ctx.command, "commands") else re.sub(r"\W", "", arguments.split()[1])
    # A word without dashes names the command that it is for alone.
    own = next((text for words, text in every if {ctx.info_name, option} <= {*words.split()}), "")
    texts = (text for words, text in every if option in words.split() and words[0] == "-")
    texts = (text for text in texts if all(word in arguments for word in re.findall(r"\bOUTPUT\b|\bSOURCE\b", text)))
    named = ((text, {*re.findall(r"(?<![\w-])--[\w-]+", text)}) for text in texts)
    if own:
        meant = f"{own} "
    elif advice := [(len(names - options), text) for text, names in named if not names or names & options]:
        meant = f"{min(advice, key=itemgetter(0))[1].replace('Name INPUT', f'Name {first}')} "
    elif option in _options_below(ctx.command):
        meant = f"Give it after a command: {ctx.command_path} COMMAND {option}. "
    elif owner := next((path for path, page in read().items() if any(option in flag.names for flag in page.flags)), ""):
        meant = f"{owner} has {option}. "
    else:
        meant = f"Did you mean {' or '.join(f'--{near}' for near in sorted(close))}? " if close else ""
    if files := sorted(glob.glob(f"{glob.escape(option)}*")):
        meant = f"For the file {files[0]}, give ./{files[0]}. "
    return f"{meant}See {ctx.command_path} --help."


def _options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


def _arguments(ctx: Any) -> str:
    return re.sub(r"{|}(\.{3})?", "", " ".join(ctx.command.collect_usage_pieces(ctx)))


def _options_below(group: Any) -> set[str]:
    """Return the options of the commands in `group` and in its subgroups; for a command, none."""
    commands = getattr(group, "commands", {}).values()
    return set().union(*map(_options_of, commands), *map(_options_below, commands))


def _input_words() -> dict[str, Sequence[str]]:
    """Return the words for inputs, by command. A feature's words are in the module of its command."""
    words = {
        command: [to, *(word for word, meant in OTHER_WORDS.items() if meant == to)]
        for command, to in (("pt2safetensors", "pt"), ("convert", "safetensors"))
    }
    return dict(words, **{command: more for table in _of_commands("INPUT_WORDS") for command, more in table.items()})


_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", ".json", ".distcp", "/")


def _of_commands(name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the tables called `name` of the modules of commands and of features' options that have one."""
    modules = dict.fromkeys(place.partition(":")[0] for place in COMMANDS.values())
    for module in (*map(import_module, modules), *(of_feature(feature, "options") for feature in FEATURES)):
        yield getattr(module, name, {})


def meant_by(word: str) -> str:
    """Return the command that a user means by `word`, such as zero2fp32, pt2dcp, show; "" if that is not known."""
    word = word.lower().removesuffix(".py").replace("_", "-")
    others = [pair for table in _of_commands("OTHER_WORDS") for pair in table.items()]
    if command := next((command for command, words in others if word in words), ""):
        return command
    source, _, target = word.replace("-to-", "2").partition("2")
    inputs = _input_words().items()
    command = next((command for command, words in inputs if source.partition("-")[0] in words), "")
    to = target if target in NAMED else OTHER_WORDS.get(target.partition("-")[0], "safetensors")
    if not command or to == "safetensors":
        return command
    return "safetensors2pt" if (command, to) == ("convert", "pt") else f"convert --to {to}"


def _no_command(word: str, group: Any) -> UsageError:
    """Return the error for `word`, which is not a command of the group with the context `group`."""
    known = list(group.command.commands)
    if group.parent is None and (os.path.exists(word) or "://" in word or word.endswith(_SUFFIXES)):
        path = shlex.quote(word)
        shown = f"ckptconv inspect {path} shows its contents; " if "inspect" in known else ""
        return UsageError(
            f"{word} is not a command.",
            f"ckptconv convert {path} OUTPUT converts it; {shown}ckptconv --help lists the commands.",
        )
    path = group.command_path
    meant = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    options = {name for parameter in group.command.get_params(group) for name in parameter.opts}
    if named := sorted(name for name in options if f"-{name}".endswith(f"-{word}") and name.startswith("--")):
        meant = [" or ".join(named)]
    elif other := meant_by(f"{path} {word}".partition(" ")[2]):
        path, meant = "ckptconv", [other]
    listed = f"The commands of {group.info_name} are {', '.join(known)}. See {path} --help."
    if os.path.exists(word):  # the group's name was taken for an option's
        every = (pair for table in _of_commands("OTHER_OPTIONS") for pair in table.items())
        listed = " ".join([*(text for words, text in every if f"--{group.info_name}" in words.split()), listed])
    hint = instead_of(word) or (f"Did you mean {path} {meant[0]}?" if meant else listed)
    return UsageError(f"No such command '{word}'.", hint)


def meant_by_input(source: str, target: str | None, hint: str) -> str:
    """Return the `hint` about a missing INPUT, or say that it is a command, or was swapped with OUTPUT."""
    from ckptconv.publish.earlier import Directory, file_made_as

    if source in COMMANDS:
        return f"The command comes first: ckptconv {source} {shlex.quote(target or 'PATH')}"
    is_vague = not hint or hint.startswith(("Did you mean", "Its directory contains"))
    with contextlib.suppress(CkptconvError):
        if is_vague and target and os.path.exists(target) and not is_remote(source):
            place = Location(target)
            if not Directory(place).manifest and not file_made_as(place, "weights"):
                return f"INPUT comes first. Is it {quoted(target)}? {hint.replace('Did', 'Or did', 1)}".rstrip()
    return hint


def with_blanks(words: Sequence[str]) -> str:
    """Return the path that exists and that the shell cut into `words` at its blanks; "" if there is none."""
    joined = (" ".join(words[at:end]) for at in range(len(words)) for end in range(at + 2, len(words) + 1))
    return next(filter(os.path.exists, joined), "")


def described(error: CkptconvError) -> Failure:
    """Return `error` as --json prints it."""
    facts: dict[str, Any] = {name: getattr(error, name) for name in ("exit_code", "kind", "message", "hint")}
    return cast("Failure", {**facts, "difference": error.difference} if isinstance(error, DifferenceError) else facts)


def failure_of(error: BaseException) -> CkptconvError | None:
    """Return `error` as a CkptconvError; None if it is not an error."""
    if isinstance(error, CkptconvError):
        return error
    if isinstance(error.__cause__, StoppedError):  # a signal while a class was made, which Python 3.11 reports so
        return error.__cause__
    if isinstance(error, WRONG_USAGE):
        command = error.ctx.command_path if error.ctx else "ckptconv"
        unknown = getattr(error, "option_name", "")
        # An error about an option that exists has no such list.
        if unknown and hasattr(error, "possibilities"):
            if feature := missing(unknown.lstrip("-").removeprefix("no-").replace("-", "_")):
                return lacking(unknown, feature)
            owner = f" of {command} itself" if getattr(error.ctx.command, "commands", None) else ""
            return UsageError(
                f"There is no option {unknown}{owner}.", _instead(unknown, error.possibilities or (), error.ctx)
            )
        message = " ".join(error.format_message().replace("Value error, ", "").split())
        usage = f"Usage: {command} {_arguments(error.ctx)}" if error.ctx else ""
        if more := re.fullmatch(r"Got unexpected extra argument(?:\(s\)|s)? \((.*)\)", message):
            options = _options_of(error.ctx.command) if error.ctx else set()
            other = several("Several inputs: {}. ") if "--dry-run" in options else ""
            meant = {"--delta", "--remove", *(["--port"] if more[1].isdecimal() else ())} if " " not in more[1] else ()
            for option in options.intersection(meant):
                other = f"Did you mean {option} {more[1]}? "
            given = [value for value in error.ctx.params.values() if isinstance(value, str)] if error.ctx else []
            if name := with_blanks([*given, *more[1].split()]):
                other = f"Quote it: {shlex.quote(name)}. "
            elif more[1].endswith(".json") and error.ctx.params.get("json"):
                other = f"--json takes no file: --json > {more[1]}. "
            elif "--include" in options and "OUTPUT" not in usage and not more[1].isdecimal():
                globs = " ".join(f"--include {shlex.quote(word)}" for word in more[1].split())
                other += f"To select tensors, use {globs}. "
            return UsageError(f"Too many arguments: {more[1]}.", f"{other}{usage}.")
        if error.ctx and (named := re.match(r"No such command '(.*?)'\.", message)):
            return _no_command(named[1], error.ctx)
        usage = f"{usage}. " if message.startswith("Missing argument") else ""
        if error.ctx and message.endswith("requires an argument."):
            values = (option.metavar for option in error.ctx.command.params if unknown in option.opts)
            usage = f"Give {unknown} {next(values, None) or 'VALUE'}. "
        return UsageError(message if message.endswith((".", "?")) else f"{message}.", f"{usage}See {command} --help.")
    if isinstance(error, MemoryError):
        return FailedError("Out of memory. No output was published.", "Lower --memory or --jobs.")
    if isinstance(error, Exception) and os.environ.get("CKPTCONV_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return FailedError(f"Error from the operating system: {where}{reason(error)}. No output was published.")
    if isinstance(error, Exception):
        from ckptconv.formats.registered import PLUGINS

        text = f"{type(error).__name__}: {error}. No output was published."
        advice = "Run the command again with CKPTCONV_DEBUG=1, and report its complete output."
        plugins = of_feature(PLUGINS, "entries")
        if plugins and (brought := plugins.suspects()):
            return FailedError(f"This is a bug in {', or in '.join(brought)}, or in ckptconv: {text}", advice)
        return FailedError(f"This is a bug in ckptconv itself: {text}", advice)
    return None


def report(printer: Printer, error: CkptconvError, source: str | None) -> None:
    """Print the error that ended a command. `source` is its input, as far as it is known."""
    if printer.json:
        with contextlib.suppress(FailedError):
            failed: Failed = {"input": source, "error": described(error)}
            printer.print_json(False, failed)
    say(str(error))
    difference = getattr(error, "difference", {})
    module = DIFFERENCES.get(difference.get("what", ""))
    if module and not printer.json:
        for line in import_module(module).differences(difference):
            say(line, "")

"""The page for agents, and for people in a hurry: from a checkpoint to a command, and to a check of its result.

Pure: from the help of the commands, the exit codes, and the table of docs/commands.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckptconv.cli.help import Help

_FRONT = """\
---
name: ckptconv
description: >-
  Convert, inspect, compare and check model checkpoints offline: PyTorch files, DeepSpeed ZeRO, FSDP and
  torch.distributed.checkpoint, safetensors. Use it to convert a checkpoint, to inspect it without loading it, to
  find differences, to average or merge models, or to resume training in another framework.
---

# ckptconv, for agents and people"""
_RULES = """\
1. Install it with `pip install ckptconv`. It needs no torch and no GPU, and runs no code from a checkpoint.
2. Look first: `ckptconv inspect PATH` shows the format, the tensors, and the command that converts the checkpoint.
3. Choose a new name for OUTPUT: an existing file may be replaced. `--dry-run` shows a conversion without writing.
4. Check the exit code. After an error no output is published: fix the cause, and run the same command again.
5. In programs, use `--json`: it prints one JSON object, also after an error ([its fields](json.md)).
6. Do not load an untrusted file with `torch.load`: `ckptconv scan PATH` reports whether loading it runs code.
7. `ckptconv help COMMAND` explains a command and all its options."""
_VERIFY = "`--verify`, or `ckptconv verify {} OUTPUT` {}"
# Without a manifest, `verify` does not know the options, nor what else an output was computed of.
_SAME, _WITH_MANIFEST = "with the same options", "if OUTPUT has a manifest (single files and `--for-hub` have none)"
# The first argument of `verify`, where it is no INPUT.
_SOURCES = {"average": "LAST-STEP", "merge": "BASE"}
# Checks of commands without --verify, and of those whose outputs `verify` does not compare.
_OTHERS = {
    "inspect": "`--stats` reads all values, and lists tensors with NaN or infinity",
    "diff": "exit code 0: equal; 1: different",
    "verify": "exit code 0: equal, bit for bit; 1: different",
    "scan": "exit code 0: passed; 3: failed; 4: unreadable",
    "steps": "exit code 0: the newest step is good; 4: not good",
    "thin": "before: run it without `--yes`; after: `ckptconv steps RUN`",
    "serve": "`ckptconv convert` with the same options and `--verify`",
    "virtual": "`ckptconv diff INPUT OUTPUT`",
    "patch": "`ckptconv verify BASE OUTPUT`",
    "finish": "`--checksum`, or `ckptconv verify INPUT OUTPUT`",
    "rows": "`--verify`, then `ckptconv rows check`",
    "rows split": "`--verify`, then `ckptconv rows check`",
    "rows pack": "`--verify`, then `ckptconv rows check`",
    "rows check": "exit code 0: sound; 1: not sound",
}
_DONE = "exit code 0"


def page(commands: Sequence[Help], codes: Mapping[str, str], table: str, made: str) -> str:
    """Return the page in Markdown. `table` is the text of docs/commands.md, and `made` the line on how it is made."""
    checks = {help_of.path.partition(" ")[2]: _check(help_of) for help_of in commands}
    rows = [f"| {have} | {want} | {command} | {_of(command, checks)} |" for have, want, command in _rows(table)]
    lines = [_FRONT, "", f"<!-- {made} -->", "", _RULES, ""]
    lines += ["## From a checkpoint to a command", "", "| you have | you want | command | check |", "|---|---|---|---|"]
    lines += [*rows, "", "## Commands", "", "| command | | check |", "|---|---|---|"]
    for help_of in commands[1:]:
        if not help_of.commands:
            lines.append(f"| `{help_of.path}` | {help_of.summary} | {checks[help_of.path.partition(' ')[2]]} |")
    lines += ["", "## Exit codes", "", "| code | |", "|---|---|"]
    lines += [f"| {code} | {about} |" for code, about in codes.items()]
    return "\n".join(lines) + "\n"


def _rows(table: str) -> list[tuple[str, str, str]]:
    """The rows of the table: checkpoint, goal, command."""
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
    return [(row[0], row[1], row[2]) for row in cells if len(row) == 3 and "`ckptconv " in row[2]]


def _check(help_of: Help) -> str:
    name = help_of.path.partition(" ")[2]
    if name not in _OTHERS and any("--verify" in flag.names for flag in help_of.flags):
        return _VERIFY.format(_SOURCES.get(name, "INPUT"), _WITH_MANIFEST if name in _SOURCES else _SAME)
    return _OTHERS.get(name, _DONE)


def _of(command: str, checks: Mapping[str, str]) -> str:
    """The check of the last command that a cell names, or of the group that it is in."""
    names = re.findall(r"ckptconv ([\w-]+)", command)
    return checks[names[-1]]

"""Carry out `convert --output-dir DIR`."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ckptconv.cli.failures import with_blanks
from ckptconv.cli.options import output_of
from ckptconv.cli.progress import shown_by
from ckptconv.errors import UsageError
from ckptconv.features.batch import running
from ckptconv.features.batch.naming import InputWord, output_paths
from ckptconv.formats.alone import OF_INDEX, matching
from ckptconv.formats.model_files import SUFFIX
from ckptconv.options.registered import EXECUTORS, names_of
from ckptconv.options.table import COMMAND, OPTIONS, Options
from ckptconv.outputs.default_names import suffix_of
from ckptconv.outputs.kinds import option_for
from ckptconv.storage.files import look
from ckptconv.storage.paths import basename, dirname, is_pipe, is_remote, normalize
from ckptconv.text import Proposed

# Options that name one output, or spread one conversion: they do not apply to several inputs.
_OF_ONE = ("optimizer", "states", "universal", "manifest", "attest", "depfile", "part", *names_of(*EXECUTORS))


def carry_out(words: Sequence[str], options: dict[str, Any]) -> int:
    """Convert each of `words`, the arguments of `convert`, with its `options`; return the exit code.

    Raise UsageError for options that apply to one conversion.
    """
    directory, template = options.pop("output_dir", None), options.pop("output_name", "")
    if directory is None:
        raise UsageError("--output-name requires an output directory.", "Specify the directory too: --output-dir DIR.")
    if "into" in options:
        raise UsageError("-o names one output, but --output-dir is for several.", "Leave one of them out.")
    started = time.monotonic()
    for name in _OF_ONE:
        if options.get(name):
            flag = {**OPTIONS, **COMMAND}[name].flags[0]
            raise UsageError(
                f"{flag} applies to one conversion, but --output-dir runs several.", "Leave one of them out."
            )
    if option_for(to := options.get("to", "")):
        raise UsageError(
            f"--to {to} applies to one conversion, but --output-dir runs several.", "Leave one of them out."
        )
    if any(map(is_pipe, words)):
        raise UsageError("Input from a pipe must be converted alone.", "Leave --output-dir out.")
    shown = output_of("convert", options)
    stores = options.get("storage_options", {})
    inputs = []
    for word in words:
        # An error here becomes the failure of that input, later.
        entry = None
        with contextlib.suppress(Exception):
            entry = look(normalize(word), dict(stores)) if word else None
        inputs.append((InputWord(word, entry is not None and entry.kind == "directory"), entry))
    missing = [source.word for source, entry in inputs if entry is not None and entry.kind == "missing"]
    if len(words) == 2 and missing == [words[1]] and not is_remote(words[1]) and dirname(words[1]) in ("", "."):
        raise UsageError(
            f"{words[1]} does not exist, and with --output-dir every argument is an input.",
            f"Leave it out, or give it as OUTPUT without --output-dir: {shlex.join(['ckptconv', 'convert', *words])}",
        )
    suffix = suffix_of(to)
    outputs = output_paths([source for source, _ in inputs], normalize(directory), template, suffix=suffix)
    files = [output for output in outputs if isinstance(output, str) and output.endswith(SUFFIX)]
    if options.get("digest") and files:
        raise UsageError(
            f"{files[0]} is a single file and has no manifest to record the digests in.",
            "Convert each input to a directory, which has a manifest: --output-name '{stem}'.",
        )
    hint = "Use another --output-dir or --output-name, or --overwrite to replace it."
    tasks = [
        running.Conversion(
            source.word, Proposed(output, hint), entry.file.size if entry is not None and entry.kind == "file" else 0
        )
        if isinstance(output, str)
        else running.Conversion(source.word, "", error=output)
        for (source, entry), output in zip(inputs, outputs, strict=True)
    ]
    at_once, each_one = shares(options, len(words), any(map(is_remote, (*words, directory))))
    with shown_by(shown) as progress:
        results, stopped = running.run(tasks, each_one, at_once, progress)
    running.report(shown, results, stopped, time.monotonic() - started, dry_run=options.get("dry_run", False))
    return running.exit_code(results, stopped)


def instead(words: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return advice about `words`, too many arguments of `convert` with `options`: shards are converted as a set,
    others each."""
    if option := next((word for word in words if word.startswith("--")), ""):
        return f"After --, every argument is a file name, including {option}: put options before --. "
    if name := with_blanks(words):
        return f"Quote it: {shlex.quote(name)}. "
    if words[-1].endswith(".json") and not os.path.exists(words[-1]):
        return f"To write a report to {words[-1]}, use --json > {shlex.quote(words[-1])}. "
    for odd in words:
        flags = [option.flags[0] for option in OPTIONS.values() if odd in option.kind.choices]
        if flags and not os.path.exists(odd):
            meant = " or ".join(f"{flag} {odd}" for flag in flags)
            return f"If {odd!r} is the value of an option, use {meant}; an option takes one value. "
    shards = [word for word in words if matching(OF_INDEX, basename(word))]
    directories = {dirname(shard) or "." for shard in shards}
    if len(shards) > 1 and len(directories) == 1:
        output = next((word for word in words if word not in shards), options.get("into", "OUTPUT"))
        return f"Convert the shards together: ckptconv convert {shlex.join([*directories, output])}. "
    output = f"-o {shlex.quote(options['into'])}" if "into" in options else "OUTPUT"
    return f"To convert several inputs separately, use --output-dir DIR instead of {output}. "


def shares(options: Mapping[str, Any], inputs: int, far: bool) -> tuple[int, dict[str, Any]]:
    """Return how many of `inputs` to convert at once, and the options of each: they share threads and memory.

    Without --jobs it is one after the other, each with the threads that suit the machine.
    """
    chosen = Options(**options)
    at_once = min(chosen.jobs or 1, inputs)
    if at_once == 1:
        return 1, dict(options)
    memory = max(chosen.buffers(far) // at_once, 1)
    return at_once, {**options, "jobs": max((chosen.jobs or 1) // at_once, 1), "memory": memory}

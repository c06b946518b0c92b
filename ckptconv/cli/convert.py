"""`ckptconv convert`: recognize each input, and do the same as the command for its format."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ckptconv.cli.making import convert_one
from ckptconv.cli.options import CONVERTING, destination, named, output_of, taking
from ckptconv.cli.registered import COMMANDS
from ckptconv.errors import UNWRITTEN, CorruptError, UsageError, leaving
from ckptconv.options.registered import advise
from ckptconv.options.table import COMMAND, EXECUTORS, OPTIONS
from ckptconv.text import UNSET, Proposed, some

# Options that name one output, or spread one conversion: they do not apply to several inputs.
_OF_ONE = ("optimizer", "states", "universal", "manifest", "attest", "depfile", "part", *EXECUTORS)
OTHER_WORDS = {
    "convert": ("to", "cast", "reshard", "consolidate", "unshard", "save", "export"),
    "convert INPUT hf://organization/model": ("upload", "push-to-hub", "publish"),
    "convert hf://organization/model": ("download", "pull"),
    "convert --max-shard-size 5GB": ("shard", "split"),
    "convert --output-dir DIR": ("batch", "convert-all"),
}


@taking(
    *named("into output_dir output_name to chunks states model_key optimizer_key flat_optimizer fill_states tag"),
    *named("exclude_frozen_parameters master unstack optimizer order for_hub universal zero_stage fresh_optimizer"),
    *named("last_good per_rank raw alone opaque drop_opaque safe_serialization"),
    *CONVERTING,
)
def convert_(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT... [OUTPUT]",
            show_default=False,
            help="The input, then the output; with --output-dir, every argument is an input.",
        ),
    ],
    **options: Any,
) -> None:
    """Convert a checkpoint of any format.

    A .pt file or a sharded set becomes safetensors, a DeepSpeed checkpoint its fp32 weights, a directory of
    torch.distributed.checkpoint safetensors: as with the command for each format. Safetensors can be cast, merged,
    split, renamed and selected, or become a .pt file if OUTPUT has such a name. --to selects
    other outputs, such as a checkpoint to resume training from. Without OUTPUT, the output goes next to the input.

    \b
    Examples:
      ckptconv convert model.pt
      ckptconv convert runs/7b/checkpoints model/
      ckptconv convert --dtype bf16 model.safetensors smaller.safetensors
      ckptconv convert --to dcp model/ checkpoints/step-0
      ckptconv convert *.pt --output-dir out
      ckptconv convert */x.pt --output-dir out --output-name '{parent}-{stem}'
    """
    options.pop("safe_serialization", None)
    directory, template = options.pop("output_dir", None), options.pop("output_name", "")
    with leaving(UNWRITTEN):
        if directory == "":
            # Without it, the last input would be taken for the output, and replaced.
            raise UsageError("--output-dir is empty.", UNSET)
        if directory is not None and "into" in options:
            raise UsageError("-o names one output, but --output-dir takes several.", "Leave one of them out.")
        if directory is not None:
            raise typer.Exit(_several(words, directory, template, options))
        if template:
            raise UsageError("--output-name names outputs in a directory.", "Give the directory too: --output-dir DIR.")
        output = destination(words[1] if len(words) > 1 else None, options)
        if len(words) > 2:
            combining = some([name for name in ("average", "merge") if name in COMMANDS], form=str)
            hint = "To convert each of several inputs, give --output-dir DIR instead of OUTPUT."
            hint += f" Commands that combine inputs: {combining}." if combining else ""
            if any(re.fullmatch("[KMGT]i?B", word) for word in words):
                hint = "Write a size in one word: 5GB."
            raise UsageError(f"Expected INPUT and OUTPUT, but found {len(words)} arguments.", hint)
    try:
        convert_one("convert", "", words[0], output, options)
    except (CorruptError, UsageError) as error:
        advise(error, words[0], options)
        raise


def shares(options: Mapping[str, Any], inputs: int, far: bool) -> tuple[int, dict[str, Any]]:
    """Return how many of `inputs` to convert at once, and the options of each: they share threads and memory.

    Without --jobs it is one after the other, each with the threads that suit the machine.
    """
    from ckptconv.options.table import Options

    chosen = Options(**options)
    at_once = min(chosen.jobs or 1, inputs)
    if at_once == 1:
        return 1, dict(options)
    memory = max(chosen.buffers(far) // at_once, 1)
    return at_once, {**options, "jobs": max((chosen.jobs or 1) // at_once, 1), "memory": memory}


def _several(words: Sequence[str], directory: str, template: str, options: dict[str, Any]) -> int:
    """Convert each of `words` to an output in `directory`; return the exit code."""
    from ckptconv.cli import batch
    from ckptconv.cli.naming import InputWord, output_paths
    from ckptconv.outputs.kinds import option_for
    from ckptconv.outputs.targets import suffix_of
    from ckptconv.storage.files import look
    from ckptconv.storage.paths import is_pipe, is_remote, normalize

    started = time.monotonic()
    for name in _OF_ONE:
        if options.get(name):
            flag = {**OPTIONS, **COMMAND}[name].flags[0]
            raise UsageError(
                f"{flag} applies to one conversion, but --output-dir makes several.", "Leave one of them out."
            )
    if option_for(to := options.get("to", "")):
        raise UsageError(f"--to {to} is for one conversion, and --output-dir for several.", "Leave one of them out.")
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
    suffix = suffix_of(to)
    outputs = output_paths([source for source, _ in inputs], normalize(directory), template, suffix=suffix)
    hint = "Give another --output-dir or --output-name, or --overwrite to replace it."
    tasks = [
        batch.Conversion(
            source.word, Proposed(output, hint), entry.file.size if entry is not None and entry.kind == "file" else 0
        )
        if isinstance(output, str)
        else batch.Conversion(source.word, "", error=output)
        for (source, entry), output in zip(inputs, outputs, strict=True)
    ]
    at_once, each_one = shares(options, len(words), any(map(is_remote, (*words, directory))))
    with shown.progress() as progress:
        results, stopped = batch.run(tasks, each_one, at_once, progress)
    batch.report(shown, results, stopped, time.monotonic() - started, dry_run=options.get("dry_run", False))
    return batch.exit_code(results, stopped)

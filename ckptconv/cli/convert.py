"""`ckptconv convert`: recognize each input, and do the same as the command for its format."""

from __future__ import annotations

import os
import re
import shlex
from typing import Annotated, Any

import typer

from ckptconv.cli.making import convert_one
from ckptconv.cli.options import CONVERTING, destination, named, taking
from ckptconv.cli.registered import COMMANDS
from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.options.registered import CARRIED_OUT, missing, names_of, several
from ckptconv.process import of_feature
from ckptconv.storage.paths import is_remote
from ckptconv.text import Proposed, some

_MANY = "" if missing("output_dir") else "; with --output-dir, every argument is an input"
OTHER_WORDS = {
    "convert": (
        *("to", "cast", "reshard", "consolidate", "unshard", "join", "merge-shards", "save", "export"),
        *("concat", "combine", "merge-tp", "tp-merge", "orbax2safetensors", "convert-checkpoint", "merge-weights"),
    ),
    "convert --dtype bf16": ("bf16", "fp16", "half"),
    "convert --rename REGEX=REPL": ("rename", "rename-keys", "strip-prefix"),
    "convert hf://organization/model": ("download", "pull", "hf", "huggingface-cli"),
    "convert --max-shard-size 5GB": ("shard", "split"),
    "convert --optimizer PATH": ("optimizer", "optimizer-states", "states"),
}


@taking(
    *named("into"),
    *named(" ".join(names_of(*CARRIED_OUT))),
    *named("to chunks states model_key optimizer_key flat_optimizer fill_states tag"),
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
            help="The input, then the output: a file if its name ends in .safetensors, .pt, .pth, .bin or .ckpt, else "
            f"a directory{_MANY}.",
        ),
    ],
    **options: Any,
) -> None:
    """Convert a checkpoint of any format.

    A .pt file, a sharded set or a checkpoint of torch.distributed.checkpoint becomes safetensors, a
    DeepSpeed checkpoint its fp32 weights, as with the command for each format. Safetensors can be cast, merged,
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
    with leaving(UNWRITTEN):
        for feature in CARRIED_OUT:
            if names_of(feature).keys() & options.keys():
                raise typer.Exit(of_feature(feature, "command").carry_out(words, options))
        second = words[1] if len(words) > 1 else None
        # A shell's pattern that matches two inputs, or a user who swaps INPUT and OUTPUT, gives a checkpoint here.
        if second and (is_remote(second) or (os.path.isfile(second) and os.path.getsize(second))):
            more = several("If it is another input, use {}. ")
            second = Proposed(second, f"INPUT comes before OUTPUT. {more}To replace it, use -o {shlex.quote(second)}.")
        if len(words) > 2:
            combining: list[str] = [name for name in ("average", "merge") if name in COMMANDS]
            combining += [] if missing("graft") else ["convert A OUTPUT --graft 'B:*' for different tensors"]
            hint = "".join(of_feature(feature, "command").instead(words, options) for feature in CARRIED_OUT)
            hint += f"Commands that combine inputs: {some(combining, form=str)}." if combining else ""
            if any(re.fullmatch("[KMGT]i?B", word) for word in words):
                hint = "Write a size without a space: 5GB."
            if odd := next(filter(re.compile("(?i:yes|no|true|false|on|off)|to|into").fullmatch, words[1:]), ""):
                hint = f"Leave out {odd!r}: OUTPUT follows INPUT, and switches such as --verify take no value."
            raise UsageError(f"Expected INPUT and OUTPUT, but found {len(words)} arguments.", hint.strip())
        output = destination(second, options)
    convert_one("convert", "", words[0], output, options)

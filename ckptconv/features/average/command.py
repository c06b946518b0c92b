"""`ckptconv average`: the average of several checkpoints, and differences of them."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any

import typer

from ckptconv.cli.options import CONVERTING_SEVERAL, divided, named, taking
from ckptconv.errors import CkptconvError
from ckptconv.features.average.options import AVERAGING

OTHER_WORDS = {
    "average": (
        *("mean", "avg", "soup", "swa", "ema", "model-soup", "average-checkpoints", "task-vector", "mergekit-yaml"),
    ),
}
# Messages on options of other programs.
OTHER_OPTIONS = {
    "--ema": (
        "For the EMA weights in one checkpoint, use --key, such as --key ema, or --include '*model_ema.*'. For a "
        "moving average of several checkpoints, use ckptconv average --ema."
    ),
    "--last --last-n --num --inputs --num-epoch-checkpoints --num-update-checkpoints": (
        "Specify the steps before OUTPUT (with --ema, the oldest first). `ckptconv steps RUN` lists the steps of a run."
    ),
    "--subtract --sub": "Use --minus BASE.",
    "--decay --ema-decay": "Use --ema DECAY, such as --ema 0.9.",
    "--scale --scaling --scaling-factor --lambda --lam": (
        "With --minus, give the weights: average BASE TUNED OUTPUT --minus BASE --weights 1,0.5 adds half of the "
        "difference."
    ),
    "--alphas --coefficients --coeffs --ratio --ratios": "Use --weights with one number per STEP: --weights 0.3,0.7.",
    "--method --merge-method --slerp --ties --dare --alpha": (
        "ckptconv average computes the weighted mean of tensors, with --weights, or task arithmetic, with --minus."
    ),
}
# The commands that print the report of a conversion.
OF_CONVERSIONS = ("average",)


@taking(
    *(AVERAGING[name] for name in ("weights", "ema", "minus")),
    *named("into"),
    AVERAGING["to"],
    *named("chunks model_key for_hub tag exclude_frozen_parameters master unstack raw opaque drop_opaque"),
    *CONVERTING_SEVERAL,
)
def average(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="STEP... OUTPUT",
            show_default=False,
            help=(
                "Checkpoints in any format, in order; then the output: a directory, or a name that ends in "
                ".safetensors."
            ),
        ),
    ],
    **options: Any,
) -> None:
    """Average the weights of several checkpoints: model soups, moving averages (--ema), task arithmetic (--minus).

    The checkpoints may have different formats. Every tensor must be in each of them, with the same name and shape. Each
    element is the weighted mean of the corresponding elements, summed in float64 in the order given, and rounded once.
    Tensors without an average, such as integers, come from the last STEP, as do config.json and the structure record.
    Optimizer states are never averaged: a .pt file's are those of the last STEP, unless --key names the weights alone.

    \b
    Examples:
      ckptconv average step-1000/ step-2000/ step-3000/ model/ --copy-config
      ckptconv average --key model a.pt b.pt c.pt model.safetensors
      ckptconv average --weights 1,1,2 a.pt b.pt checkpoints/ model.safetensors
      ckptconv average --ema 0.9 step-80/ step-90/ step-100/ model/
      ckptconv average --weights 1,0.5 base/ tuned/ --minus base/ model/
    """
    from ckptconv.cli.making import make
    from ckptconv.features.average.averaging import average as averaged

    steps, target = divided(words, options, "average needs at least one STEP and an OUTPUT.")
    try:
        make("average", averaged, steps, target, options)
    except CkptconvError as error:
        at = words.index("-") if "-" in words[1:-1] else 0
        if at and re.match("<stdin>|Standard input", error.message):
            minuend, subtrahend = map(shlex.quote, (words[at - 1], words[at + 1]))
            error.hint = f"For a difference: ckptconv average {minuend} --minus {subtrahend} OUTPUT. {error.hint}"
        raise

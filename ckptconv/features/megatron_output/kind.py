"""Steps of Megatron-core as an output: their entry in the table of kinds."""

from __future__ import annotations

import re

from ckptconv.errors import UsageError
from ckptconv.features.dcp_output.kind import KIND as DCP
from ckptconv.features.dcp_output.kind import check_states
from ckptconv.options.table import Options
from ckptconv.storage.paths import basename, join

# The names of steps that Megatron-LM looks for in the directory of `--load`: weights alone, and a numbered step.
RELEASE, NUMBERED = "release", re.compile(r"iter_(\d{7})")


def divided(path: str, options: Options) -> dict[str, Options]:
    """Return the directory of the step, with its options: that of `path` if it is called like one, else the release in
    the run `path`. Raise UsageError for states, which Megatron-LM loads from a numbered step only."""
    name = basename(path.rstrip("/"))
    if options.states and not NUMBERED.fullmatch(name):
        raise UsageError(
            f"{path}: --states requires a numbered step, because Megatron-LM loads optimizer states only from "
            "numbered steps.",
            f"Specify a step directory as OUTPUT, such as {join(path, 'iter_0001000')}.",
        )
    is_step = name == RELEASE or NUMBERED.fullmatch(name)
    return {path if is_step else join(path, RELEASE): options}


KIND = DCP._replace(
    holds="megatron",
    form="step",
    refused={
        **DCP.refused,
        **dict.fromkeys(
            ("model_key", "optimizer_key", "flat_optimizer"),
            ("{} cannot be used here: Megatron-core prescribes the keys of tensors.", ""),
        ),
        "fresh_optimizer": (
            "{} applies only to a universal checkpoint: without states, Megatron-LM creates a new optimizer.",
            "Leave out both this option and --states.",
        ),
    },
    idle={
        **DCP.idle,
        "copy_config": "copies nothing: Megatron-LM does not read configurations of transformers",
        "tied": "has no effect on a step of Megatron-core, which stores tied embeddings once",
    },
    to="megatron",
    compared="ckptconv.features.megatron_output.with_verify",
    plan="ckptconv.features.megatron_output.output",
    called="a step of Megatron-core",
    check=check_states,
    divided=divided,
    like="ckptconv.features.megatron_output.imitating",
)

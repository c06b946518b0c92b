"""Steps of torch_checkpointing as an output: its entries in the tables of kinds and of directories."""

from __future__ import annotations

import re

from ckptconv.features.dcp_output.kind import CALLED, OF_WEIGHTS, check_of_ranks
from ckptconv.formats.run_names import STEP_METADATA
from ckptconv.outputs.kinds import OF_CODES, OF_MODELS, OF_UNIVERSAL, OutputKind
from ckptconv.outputs.targets import MANIFEST, Directory

_NAMES = rf"[^/]+_\d+\.(?:pt|safetensors)|{re.escape(STEP_METADATA)}|{re.escape(MANIFEST)}"
DIRECTORY = Directory(STEP_METADATA, lambda name: re.fullmatch(_NAMES, name) is not None)
KIND = OutputKind(
    "dcp",
    "torch-checkpointing",
    {
        **OF_UNIVERSAL,
        **OF_WEIGHTS,
        **OF_MODELS,
        **OF_CODES,
        "like": ("{} applies only to checkpoints of torch.distributed.checkpoint.", "Give --chunks N."),
    },
    {
        "copy_config": "copies nothing: from_pretrained reads no torch_checkpointing step",
        "tied": "has no effect on a torch_checkpointing step, where tied names do not share data",
    },
    compared="ckptconv.features.torch_checkpointing.with_verify",
    plan="ckptconv.features.torch_checkpointing.output",
    to="torch-checkpointing",
    called=CALLED,
    key="model",
    check=check_of_ranks,
)

"""Safetensors shards of torch.distributed.checkpoint as an output: their entries in the tables of kinds and of
directories."""

from __future__ import annotations

import re

from ckptconv.features.dcp.names import shard_name
from ckptconv.features.dcp_output.kind import KIND as DCP
from ckptconv.features.dcp_output.kind import check_of_ranks
from ckptconv.outputs.targets import MANIFEST, Directory

_NAMES = re.escape(shard_name(0)).replace("00000", r"\d{5}", 1) + f"|{re.escape(MANIFEST)}"
# They have no index: the first comes last. Without it, readers see that the others are no checkpoint.
DIRECTORY = Directory(shard_name(1), lambda name: re.fullmatch(_NAMES, name) is not None)
KIND = DCP._replace(
    form="dcp-hf",
    idle={
        **DCP.idle,
        "tied": "has no effect on safetensors shards, where tied names do not share data",
        **dict.fromkeys(("opaque", "structure"), "has no effect on safetensors shards, which store only tensors"),
    },
    to="dcp-hf",
    check=check_of_ranks,
)

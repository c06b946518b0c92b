"""The commands, in the order in which help lists them."""

from __future__ import annotations

# "module:name" of each command, or group of commands. The module is imported when the command is called. It may have a
# `CLASS` for the command; `OTHER_WORDS`, {command: words that people use for it}; and `OTHER_OPTIONS`, {options of
# other programs: a sentence that says what to do}.
COMMANDS: dict[str, str] = {
    "convert": "ckptconv.cli.convert:convert_",
    "pt2safetensors": "ckptconv.cli.pt2safetensors:pt2safetensors",
    "safetensors2pt": "ckptconv.cli.safetensors2pt:safetensors2pt",
    "zero-to-fp32": "ckptconv.cli.zero_to_fp32:zero_to_fp32",
    "dcp2safetensors": "ckptconv.cli.dcp2safetensors:dcp2safetensors",
    "safetensors2dcp": "ckptconv.cli.safetensors2dcp:safetensors2dcp",
    "verify": "ckptconv.cli.verify:verify_",
    "average": "ckptconv.features.average.command:average",
    "merge": "ckptconv.features.merge.command:merge",
    "diff": "ckptconv.cli.compare:diff",
    "patch": "ckptconv.features.deltas.command:patch",
    "scan": "ckptconv.features.scan.command:scan",
    "virtual": "ckptconv.cli.virtual:virtual",
    "serve": "ckptconv.features.serve.command:serve",
    "finish": "ckptconv.cli.finish:finish_",
    "inspect": "ckptconv.cli.inspect:inspect_",
    "steps": "ckptconv.features.steps.command:steps",
    "thin": "ckptconv.features.thin.command:thin",
    "maps": "ckptconv.cli.maps:maps",
    "rows": "ckptconv.features.rows.command:rows",
}

"""The commands, in the groups and the order in which help lists them."""

from __future__ import annotations

# The group of commands that `convert` can replace.
STRICT = "Strict spellings of convert, for scripts"
# "module:name" of each command, or group of commands. The module is imported when the command is called. It may have
# `OTHER_WORDS`, {command: words that people use for it}; `INPUT_WORDS`, {command: words for what it reads}; and
# `OTHER_OPTIONS`, {options of other programs: a sentence that says what to do}.
GROUPS: dict[str, dict[str, str]] = {
    "Convert": {
        "convert": "ckptconv.cli.convert:convert_",
        "pt2safetensors": "ckptconv.cli.pt2safetensors:pt2safetensors",
        "zero-to-fp32": "ckptconv.features.deepspeed.command:zero_to_fp32",
    },
    "Look": {
        "inspect": "ckptconv.features.inspect.command:inspect_",
        "diff": "ckptconv.features.diff.command:diff",
        "verify": "ckptconv.features.verify.command:verify_",
        "steps": "ckptconv.features.steps.command:steps",
        "scan": "ckptconv.features.scan.command:scan",
    },
    "Derive": {
        "average": "ckptconv.features.average.command:average",
        "merge": "ckptconv.features.merge.command:merge",
        "patch": "ckptconv.features.deltas.command:patch",
    },
    "Serve": {
        "serve": "ckptconv.features.serve.command:serve",
    },
    "More": {
        "finish": "ckptconv.features.parts.command:finish_",
        "thin": "ckptconv.features.thin.command:thin",
        "maps": "ckptconv.features.maps.command:maps",
        "rows": "ckptconv.features.rows.command:rows",
    },
    STRICT: {
        "dcp2safetensors": "ckptconv.features.dcp.dcp2safetensors:dcp2safetensors",
        "safetensors2pt": "ckptconv.features.torch_output.command:safetensors2pt",
        "safetensors2dcp": "ckptconv.features.dcp_output.safetensors2dcp:safetensors2dcp",
        "virtual": "ckptconv.features.virtual.command:virtual",
    },
}
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}
# The module that completes command lines. Its `answered(environment)` returns the text for a shell, and an exit code.
COMPLETING: tuple[str, ...] = (
    "ckptconv.features.completion.answering",
)  # fmt: skip
# Fields of a report that are tables, and differences between inputs, by what they are: the module of each whose
# `summary(value, verbose)` and `differences(difference)` return lines of text.
SUMMARIES: dict[str, str] = {
    "like": "ckptconv.features.like.tables",
}
DIFFERENCES: dict[str, str] = {
    "reference": "ckptconv.features.like.tables",
}
# Modules: `of_classes(names, most, verbose)` yields lines about the classes, known by name only, that an output keeps.
OF_CLASSES: tuple[str, ...] = (
    "ckptconv.features.torch_output.classes",
)  # fmt: skip

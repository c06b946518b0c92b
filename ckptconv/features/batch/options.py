"""The options of `convert` for several inputs."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH, TEXT
from ckptconv.options.option import Given, option

# Words of other programs for it, and an option of theirs that other commands have not.
OTHER_WORDS = {"convert --output-dir DIR": ("batch", "convert-all")}
_DIRECTORIES = "--out-dir --outdir --save-dir --save-directory --export-dir --target-dir --local-dir"
OTHER_OPTIONS = {
    "--output-dir": "Specify OUTPUT last. ckptconv convert writes one output per input.",
    # Only commands with --output-dir get this advice.
    _DIRECTORIES: "Name OUTPUT last. For several inputs, use --output-dir DIR instead.",
    f"--save-merged --out-path --output-model --output-model-path {_DIRECTORIES}": "Name OUTPUT last.",
}


class BatchOptions(Given):
    """The directory of the outputs, and their names in it."""

    output_dir: str = option(
        PATH,
        "Convert every INPUT to a separate output in DIR, N at the same time with --jobs N. If one fails, the "
        "others continue.",
        metavar="DIR",
        group=OUTPUT,
        common=True,
    )
    output_name: str = option(
        TEXT,
        "The names of outputs in DIR: text with {stem}, {name}, {parent} or {number}. A name with an extension such "
        "as .safetensors is a file; any other name is a directory.",
        metavar="TEMPLATE",
        group=OUTPUT,
        fallback="x.pt becomes x.safetensors; a directory keeps its name",
    )


GIVEN = BatchOptions

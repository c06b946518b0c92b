"""The options of `convert` for several inputs."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH, TEXT
from ckptconv.options.option import Given, option

# Words of other programs for it, and an option of theirs that other commands have not.
OTHER_WORDS = {"convert --output-dir DIR": ("batch", "convert-all")}
OTHER_OPTIONS = {"--output-dir": "Name OUTPUT last; ckptconv convert writes an output for each of several inputs."}


class BatchOptions(Given):
    """The directory of the outputs, and their names in it."""

    output_dir: str = option(
        PATH,
        "Convert every INPUT, each to an output of its own in DIR, N at once with --jobs N. One that fails does not "
        "stop the others.",
        metavar="DIR",
        group=OUTPUT,
        common=True,
    )
    output_name: str = option(
        TEXT,
        "The names of outputs in DIR: text with {stem}, {name}, {parent} or {number}. A name with an ending such as "
        ".safetensors is a file, any other a directory.",
        metavar="TEMPLATE",
        group=OUTPUT,
        fallback="x.pt becomes x.safetensors, a directory keeps its name",
    )


GIVEN = BatchOptions

"""The options of conversions about a reference."""

from __future__ import annotations

from ckptconv.options import NAMING
from ckptconv.options.kinds import FLAG, PATH
from ckptconv.options.option import Given, deciding, naming


class LikeOptions(Given):
    """The checkpoint that an output is to be like, and the options about tensors that only it has."""

    like: str = naming(
        PATH,
        "Write the output with the names, files and dtypes of the checkpoint REF, and copy its config.json and "
        "tokenizer. Missing tensors, extra tensors and different shapes are errors before any file is written. An "
        "output of torch.distributed.checkpoint gets the chunks of REF, with warnings about these differences; an "
        "output of Megatron-core gets the form of the step REF.",
        metavar="REF",
        fallback={"verify": "from the manifest"},
        common=True,
    )
    partial: bool = deciding(FLAG, "Omit the tensors of REF that the input lacks, and list them.", group=NAMING)
    fill: bool = deciding(FLAG, "Copy the tensors that the input lacks from REF.", group=NAMING)


GIVEN = LikeOptions
# Other words for it, as options.
OTHER_OPTIONS = {
    "--keep-dtype": "--like REF casts each tensor to its dtype in REF.",
    "--hf-assets-path": "--like REF copies config.json and the tokenizer of the model REF.",
}

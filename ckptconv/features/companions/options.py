"""The option of conversions about the small files of a model's directory."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import SWITCH
from ckptconv.options.option import Given, option
from ckptconv.options.registered import FLAGS


class CompanionOptions(Given):
    """Whether companions are copied; None: those of some inputs (see `deciding`)."""

    copy_config: bool | None = option(
        SWITCH,
        "Copy config.json, the tokenizer and similar files to the directory OUTPUT, for from_pretrained. "
        "--no-extras is an alias of --no-copy-config.",
        flags=FLAGS["copy_config"],
        group=OUTPUT,
        common="convert",
        fallback="on if INPUT is a directory whose config.json also describes OUTPUT",
    )


GIVEN = CompanionOptions
# Options of Hugging Face's programs.
OTHER_OPTIONS = {
    "--token --hub-token --hf-token --use-auth-token": "Set HF_TOKEN, or run: hf auth login.",
    "--revision --branch": "Put the revision into the URL: hf://organization/model@revision.",
    "--model-id --model-path --model-name-or-path --pretrained-model-name-or-path --hf-model": "Name INPUT first.",
    "convert --no-safe-serialization --no-use-safetensors": (
        "For a file for torch.load, give OUTPUT a name that ends in .bin."
    ),
    "convert --use-safetensors": "The name of OUTPUT selects the format; a directory gets safetensors.",
    "merge --safe-serialization --use-safetensors": "The output is safetensors.",
    "average --safe-serialization --use-safetensors": "The output is safetensors.",
    "merge --no-safe-serialization --no-use-safetensors": (
        "The output is safetensors; ckptconv safetensors2pt converts it to a file for torch.load."
    ),
    "average --no-safe-serialization --no-use-safetensors": (
        "The output is safetensors; ckptconv safetensors2pt converts it to a file for torch.load."
    ),
    "--tokenizer --tokenizer-name --tokenizer-path --copy-tokenizer --save-tokenizer --with-tokenizer": (
        "Use --copy-config: it copies the tokenizer too."
    ),
    "--tie-weights --tie-embeddings --tie-word-embeddings": ("Tied tensors are stored once, as with --tied alias."),
    "--untie --untie-weights --untie-embeddings --no-tie-word-embeddings": (
        "Use --tied duplicate: each tied tensor is stored under each of its names."
    ),
    "--low-cpu-mem-usage --low-cpu-memory --low-memory --lazy-unpickle --mmap --offload-folder": (
        "ckptconv does not load a whole model into memory."
    ),
    "--variant": "Use --dtype. Output names have no variant; a variant is read if it is the only one.",
    "--use-ema --ema-weights": "Use --key PATH for other weights, such as --key ema; ckptconv inspect lists the keys.",
    "--subfolder": "Put the folder into INPUT, such as hf://organization/model/folder.",
    "--push-to-hub --hub-model-id --repo-id --upload --repo --commit-message --create-pr --hub-private-repo": (
        "Write a directory with --for-hub, then `hf upload`."
    ),
}

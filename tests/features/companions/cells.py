"""What tests of the trunk ask of the files beside weights too."""

from __future__ import annotations

from typing import Any

# Of the option: its default, a value, and how that may be written; values that it has not; and what becomes of it in
# each kind of output, beside an option without which the directory's configuration is copied unasked.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"copy_config": (None, True, [True])}
REFUSED_VALUES: dict[str, list[Any]] = {"copy_config": [1, "yes", "auto"]}
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"copy_config": ("shss", {"copy_config": True}, (("rename", "^l1=q"),))}
# Options that other programs do not have, and the advice on what is alike.
OTHER_OPTIONS = {
    "--copy": "Did you mean --copy-config?",
    "--copy-tokenizer": "Use --copy-config: it copies the tokenizer too.",
    "--push-to-hub": "hf upload",
    "--commit-message": "hf upload",
    "--token": "HF_TOKEN",
    "--model-name-or-path": "Name INPUT first.",
    "--no-safe-serialization": "give OUTPUT a name that ends in .bin",
    "--use-safetensors": "The name of OUTPUT selects the format",
    "--tie-word-embeddings": "stored once, as with --tied alias",
    "--untie": "Use --tied duplicate",
    "--mmap": "does not load a whole model into memory",
    "--use-ema": "such as --key ema",
    "--variant": "Use --dtype. Output names have no variant",
    "--subfolder": "hf://organization/model/folder",
}
# Words of a command that succeeds, and what of others it replaces.
DONE: dict[str, set[str]] = {"convert a.pt configured --copy-config": set()}

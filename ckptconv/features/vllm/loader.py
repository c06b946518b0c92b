"""A model loader of vLLM: `--load-format ckptconv` loads weights from a checkpoint of any format.

Source: vllm/model_executor/model_loader/base_loader.py of vLLM 0.33.0, and `register_model_loader` next to it: a loader
is registered by name, and passes the weights to the model as pairs of name and tensor. vLLM calls `register` through
its entry points.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.arrays.checkpoint import open_checkpoint
from ckptconv.storage import strict_json
from ckptconv.text import brief

NAME = "ckptconv"
# The entry of `--model-loader-extra-config` that names the checkpoint; the others are options of `open`.
_CHECKPOINT = "checkpoint"


def register() -> None:
    """Register the loader with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Loader(BaseModelLoader):  # type: ignore[misc]
        """Loads the weights that `weights` yields; vLLM cuts them for its ranks."""

        def download_model(self, model_config: Any) -> None:
            """Download nothing: a remote checkpoint is read where it is."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Load the weights into `model`. Raise a CkptconvError if they cannot be read."""
            model.load_weights(weights(model_config.model, self.load_config.model_loader_extra_config))

    register_model_loader(NAME)(Loader)


def weights(model: str, extra: Mapping[str, Any] | str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the names and torch tensors of a checkpoint, one after another in the order of the files.

    The checkpoint is `model`, the directory from which vLLM reads the configuration, unless `extra` has another under
    "checkpoint". The other entries of `extra`, a mapping or JSON, are options of `ckptconv.open`. Raise UsageError for
    other values.
    """
    try:
        options = strict_json.object_of(strict_json.parse(extra), "it") if isinstance(extra, str) else dict(extra or {})
        path = options.pop(_CHECKPOINT, model)
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"model_loader_extra_config is {brief(extra)}, but a JSON object was expected.") from None
    with open_checkpoint(path, **options) as checkpoint:
        for name in checkpoint.offset_keys():
            yield name, checkpoint[name].torch()

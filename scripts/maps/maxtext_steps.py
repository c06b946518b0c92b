"""Tiny models of MaxText with random numbers, computed with and saved by MaxText itself, in its own environment:

    PYTHON -I scripts/maps/maxtext_steps.py DIRECTORY ID ...

DIRECTORY gets the run of each model, with stacked and with numbered layers, and its logits for a text of these IDs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_backend_optimization_level=0")

import jax
import numpy as np
import optax
from flax import nnx
from maxtext.common import checkpointing
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

_COMMON = {
    "run_name": "tiny", "model_name": "default", "hardware": "cpu", "skip_jax_distributed_system": True,
    "override_model_config": True, "base_emb_dim": 12, "base_mlp_dim": 10, "base_num_query_heads": 3,
    "base_num_kv_heads": 1, "head_dim": 6, "vocab_size": 40, "normalization_layer_epsilon": 1e-6,
    "dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest", "attention": "dot_product",
    "per_device_batch_size": 1, "enable_dropout": False, "async_checkpointing": False, "dataset_type": "synthetic",
}  # fmt: skip
_GEMMA = {"mlp_activations": ["gelu", "linear"], "logits_via_embedding": True}
_AFTER = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
# The settings of each model. Layers of Gemma 2 are pairs, a local and a global one. Of Gemma 3, six layers are stacked
# by themselves, and two are left over. Its converter has the root of the hidden size in bfloat16, so that is a whole
# number here.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"decoder_block": "llama2", "base_num_decoder_layers": 2},
    "llama3.1": {
        "decoder_block": "llama2", "base_num_decoder_layers": 2, "rope_type": "llama3.1", "rope_use_scale": False,
    },
    "gemma": {"decoder_block": "gemma", "base_num_decoder_layers": 2, **_GEMMA},
    "gemma2": {
        "decoder_block": "gemma2", "base_num_decoder_layers": 2, "final_logits_soft_cap": 30.0,
        "attn_logits_soft_cap": 50.0, "sliding_window_size": 4, **_GEMMA, **_AFTER,
    },
    "gemma3": {
        "model_name": "gemma3-4b", "decoder_block": "gemma3", "base_num_decoder_layers": 8, "base_emb_dim": 16,
        "base_num_query_heads": 4, "sliding_window_size": 4, "rope_linear_scaling_factor": 8.0, **_GEMMA, **_AFTER,
    },
}  # fmt: skip


def save(place: Path, settings: dict[str, Any], ids: list[int]) -> None:
    """Write the logits of a model to `place`.npy, and a step of it below the directory `place`."""
    words = (f"{key}={value}" for key, value in {**_COMMON, **settings, "max_target_length": len(ids)}.items())
    config = pyconfig.initialize(["", str(Path(MAXTEXT_CONFIGS_DIR, "base.yml")), *words])
    model = model_creation_utils.from_config(config, mesh=maxtext_utils.get_mesh_from_config(config), rngs=nnx.Rngs(0))
    chance = np.random.default_rng(0)

    def drawn(array: Any) -> Any:
        # Numbers of bfloat16: MaxText rounds embeddings to these where it computes logits with them.
        numbers = chance.normal(scale=0.3, size=array.shape)
        return jax.numpy.asarray(numbers, "bfloat16").astype(array.dtype)

    nnx.update(model, jax.tree.map(drawn, nnx.state(model, nnx.Param)))
    positions = np.arange(len(ids))[None]
    logits = model(np.array([ids]), positions, decoder_segment_ids=np.ones_like(positions), enable_dropout=False)
    np.save(f"{place}.npy", np.asarray(logits))
    state = nnx.state(TrainStateNNX(model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)))
    manager = checkpointing.create_orbax_checkpoint_manager(str(place), True, False, 1)
    checkpointing.save_checkpoint(manager, 3, state, config, force=True)
    checkpointing.wait_until_finished(manager)


if __name__ == "__main__":
    for name, settings in MODELS.items():
        for kind, is_scanned in (("", True), ("-numbered", False)):
            save(Path(sys.argv[1], name + kind), {**settings, "scan_layers": is_scanned}, [*map(int, sys.argv[2:])])

"""The settings of adapters in the configuration of a training by Megatron-Bridge.

Source: Megatron-Bridge 067f987d, peft/lora.py and training/checkpointing.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.megatron_bridge.run_config import TARGET, run_config
from ckptconv.text import brief, some

_CLASSES = ("megatron.bridge.peft.lora.LoRA", "megatron.bridge.peft.canonical_lora.CanonicalLoRA")
_NUMBERS = ("dim", "alpha", "dropout")
# Settings that change no adapter of a matrix, or that are read here. Others may change what adapters mean.
_KNOWN = (
    *_NUMBERS, "dropout_position", "target_modules", "exclude_modules", "canonical_mapping", "lora_dtype",
    "lora_A_init_method", "lora_B_init_method", "a2a_experimental", "sequence_parallel_input_regather",
    "normalize_moe_lora", "share_expert_adapters", "experts_shared_outer_loras", "params_to_save", TARGET,
)  # fmt: skip
# Where the name of the model may be, in the order in which Megatron-Bridge looks for it.
_NAMES = (("checkpoint", "hf_source_path"), ("model", "hf_model_id"), ("tokenizer", "tokenizer_model"))


class Trained(NamedTuple):
    """The rank, alpha and dropout that a training states in the file `path`, the modules that it adapts, and its model;
    the first two are None, for the reason `why`, if they are not known. Dropout may be `after` the first factor.
    `ranks` is the number of tensor-parallel ranks, if the file says it."""

    dim: float | None = None
    alpha: float | None = None
    dropout: float | None = None
    modules: Sequence[str] = ()
    model: str = ""
    after: bool = False
    ranks: Any = None
    path: str = ""
    why: str = ""


def trained(path: str, stores: Mapping[str, Any]) -> Trained:
    """Return the settings next to the step at `path`.

    Raise CorruptError for a file that is no configuration, UnsupportedError for adapters of another class.
    """
    config = run_config(path, stores)
    file, peft = config.path, config.part("peft")
    if not peft:
        return Trained(why=config.why or f"{file} does not mention adapters")
    if peft.get(TARGET) not in _CLASSES:
        raise UnsupportedError(
            f"{file}: its adapters are of the class {brief(peft.get(TARGET))}, but maps support only {some(_CLASSES)}."
        )
    unknown = [name for name, value in peft.items() if name not in _KNOWN and value]
    if unknown:
        raise UnsupportedError(f"{file}: its adapters have the unknown settings {some(unknown)}.")
    stated, modules = {"dropout": 0.0, **peft}, peft.get("target_modules") or []
    for name in _NUMBERS:
        if type(stated.get(name)) not in (int, float):
            raise CorruptError(
                f"{file}: {name} of its adapters is {brief(stated.get(name))}, but a number was expected."
            )
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise CorruptError(f"{file}: target_modules is {brief(modules)}, but a list of names was expected.")
    names = (config.part(section).get(key) for section, key in _NAMES)
    return Trained(
        **{name: stated[name] for name in _NUMBERS},
        modules=modules,
        model=next((name for name in names if isinstance(name, str) and name), ""),
        after=peft.get("dropout_position") == "post",
        ranks=config.part("model").get("tensor_model_parallel_size"),
        path=file,
    )

"""Has Megatron-Bridge load adapters of PEFT that we convert, on the CPU with gloo.

    test_megatron_adapters.py [MODEL...]

Tiny models of transformers become steps of Megatron-core, and an adapter of PEFT for each becomes a step too. LoRA of
Megatron-Bridge wraps the model of Megatron-core, and loads the adapters with StrictHandling.RAISE_ALL, so that every
key must be there and no other. The logits must be those of transformers with the adapter added to its weights: on one
rank, and with two ranks in tensor and in pipeline parallelism. Then Megatron-core saves the adapters. They become an
adapter of PEFT again, which must have the tensors of the first, bit for bit, and a configuration that follows from
run_config.yaml. Of an adapter of some modules, the factors of zeros must stay so in training. The exit code is 1 if
anything differs.

Of Megatron-Bridge only `peft` is imported: its package imports Transformer Engine, which needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
import types
import typing
import warnings
from importlib import import_module, util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).resolve().parents[1]
LOADING = runpy.run_path(str(ROOT / "scripts/test_megatron.py"))
IDS = LOADING["IDS"]
MODELS = ("llama", "qwen3")
MESHES = ((1, 1, 1), (2, 1, 1), (1, 2, 1))
# Those of RUN_CONFIG.
RANK, ALPHA = 4, 6
# Modules that share a first factor in Megatron-core, by the name of their group.
JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1", "up_proj": "fc1"}
MODULES = (*JOINED, "o_proj", "down_proj")
# The modules of each form of adapters, as Megatron-Bridge calls them, and the module of its class. In the second form,
# each module has a first factor.
FORMS = {"LoRA": "lora", "CanonicalLoRA": "canonical_lora"}
TARGETS = {
    "LoRA": {"o_proj": "linear_proj", "down_proj": "linear_fc2"}
    | {module: f"linear_{group}" for module, group in JOINED.items()},
    "CanonicalLoRA": {
        "q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "o_proj": "linear_proj",
        "gate_proj": "linear_fc1_gate", "up_proj": "linear_fc1_up", "down_proj": "linear_fc2",
    },
}  # fmt: skip
# Adapters of all modules, in both forms, and of some.
CASES = (
    ("LoRA", MODULES),
    ("CanonicalLoRA", MODULES),
    ("CanonicalLoRA", ("q_proj", "v_proj")),
    ("CanonicalLoRA", ("o_proj", "up_proj")),
)
RUN_CONFIG = """model:
  tensor_model_parallel_size: {2}
peft:
  _target_: megatron.bridge.peft.{0}
  target_modules: [{1}]
  dim: 4
  alpha: 6
  dropout: 0.0
"""


def targets(form: str, modules: tuple[str, ...]) -> list[str]:
    """Return the modules that Megatron-Bridge adapts for an adapter of these: all that Megatron-core joins."""
    groups = {JOINED.get(module, module) for module in modules}
    return [*dict.fromkeys(TARGETS[form][module] for module in MODULES if JOINED.get(module, module) in groups)]


def adapter_of(
    weights: dict[str, torch.Tensor], place: Path, form: str, modules: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Save an adapter of PEFT with random factors for these modules, and return the weights with it."""
    place.mkdir()
    torch.manual_seed(1)
    factors: dict[str, torch.Tensor] = {}
    first: dict[str, torch.Tensor] = {}
    merged = dict(weights)
    for name, weight in weights.items():
        above, _, module = name.removesuffix(".weight").rpartition(".")
        if module not in modules:
            continue
        left = torch.randn(weight.shape[0], RANK) / 8
        group = JOINED.get(module, module) if form == "LoRA" else module
        right = first.setdefault(f"{above}.{group}", torch.randn(RANK, weight.shape[1]) / 8)
        full = f"base_model.model.{above}.{module}.lora"
        factors |= {f"{full}_A.weight": right.clone(), f"{full}_B.weight": left}
        merged[name] = weight + ALPHA / RANK * (left @ right)
    save_file(factors, place / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    (place / "adapter_config.json").write_text(json.dumps({**config, "target_modules": [*modules]}))
    return merged


def logits_of(place: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of the model of transformers at `place` with these weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place).float().eval()
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logits: torch.Tensor = model(IDS).logits
    return logits


class Parts(type):
    """The type of a class that has itself as every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Absent


class Absent(torch.nn.Module, metaclass=Parts):
    """Any class of Transformer Engine: nothing is one of them."""


def without_engine() -> None:
    """Have `megatron.bridge.peft` imported without its package, without Transformer Engine, and in Python 3.11."""
    any_typing: Any = typing
    any_typing.override = lambda method: method
    engine, inner = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    any_of: Any = inner
    any_of.__getattr__ = lambda name: getattr(Absent, name)
    any_engine: Any = engine
    any_engine.pytorch, any_engine.__version__ = inner, "1.0.0"
    bridge = types.ModuleType("megatron.bridge")
    (place,) = [path for above in sys.path if (path := Path(above or ".") / "megatron/bridge").is_dir()]
    bridge.__path__ = [str(place)]
    sys.modules |= {"transformer_engine": engine, "transformer_engine.pytorch": inner, "megatron.bridge": bridge}
    import_module("megatron.bridge.peft.utils").HAVE_TE = False  # type: ignore[attr-defined]


def check_training(model: Any) -> None:
    """Train the adapters for two steps: factors of zeros must stay so, and others change."""
    adapters = {key: factor for key, factor in model.named_parameters() if ".adapter." in key}
    before = {key: factor.detach().clone() for key, factor in adapters.items()}
    for factor in adapters.values():
        factor.requires_grad_()
    optimizer = torch.optim.AdamW(adapters.values(), lr=0.1, weight_decay=0.1)
    mask = torch.triu(torch.ones(IDS.numel(), IDS.numel(), dtype=torch.bool), 1)[None, None]
    for _ in range(2):
        logits = model(IDS, torch.arange(IDS.numel())[None], mask)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits[0], IDS[0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    zeros = {key for key, factor in before.items() if not factor.any()}
    same = {key for key, factor in adapters.items() if torch.equal(factor, before[key])}
    if not zeros or zeros != same:
        raise SystemExit(f"factors that training left as they were: {sorted(same)}, and zeros are {sorted(zeros)}")


def load(
    rank: int, world: int, name: str, form: str, modules: tuple[str, ...], place: Path, mesh: tuple[int, int, int]
) -> None:
    """Load the model and its adapters on a rank, compare the logits, and save the adapters again."""
    warnings.filterwarnings("ignore")
    store = FileStore(str(place / f"store-{'-'.join(map(str, mesh))}"), world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    LOADING["on_cpu"]()
    parallel_state.initialize_model_parallel(*mesh[:2], expert_model_parallel_size=mesh[2])
    model = LOADING["build"](name, mesh)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    base = model.sharded_state_dict(metadata=metadata)
    state = dist_checkpointing.load(base, str(place / "run/release"))
    model.load_state_dict({key: value for key, value in state.items() if key in base})
    without_engine()
    settings = {"dim": RANK, "alpha": ALPHA, "target_modules": targets(form, modules)}
    lora = getattr(import_module(f"megatron.bridge.peft.{FORMS[form]}"), form)(**settings)
    model = lora(model, training=False)

    def adapters() -> dict[str, Any]:
        """What Megatron-Bridge loads and saves of a model (apply_peft_adapter_filter_to_state_dict)."""
        whole = model.sharded_state_dict(metadata=metadata)
        return {key: of for key, of in whole.items() if lora.adapter_key_filter(key) and "_extra_state" not in key}

    wanted = adapters()
    step = place / f"adapters-{mesh[0]}/iter_0000007"
    state = dist_checkpointing.load(wanted, str(step), strict=StrictHandling.RAISE_ALL)
    lost = model.load_state_dict({key: value for key, value in state.items() if key in wanted}, strict=False)
    if (
        not wanted
        or lost.unexpected_keys
        or any(".adapter." in key and "_extra" not in key for key in lost.missing_keys)
    ):
        raise SystemExit(f"{name}, {form} at {mesh}: not all of the adapters were loaded: {lost}")
    made = LOADING["computed"](model, rank, world, mesh)
    if made is not None:
        logits, without = (torch.load(place / f"{which}.pt") for which in ("adapted", "logits"))
        differs = (made[..., : logits.shape[-1]] - logits).abs().max().item()
        if not differs < LOADING["CLOSE"] < (logits - without).abs().max().item() / 100:
            raise SystemExit(f"{name}, {form} at {mesh}: the logits differ by {differs}")
    again = place / f"again-{'-'.join(map(str, mesh))}/iter_0000008"
    if rank == 0:
        again.mkdir(parents=True)
        adapted = ", ".join(targets(form, modules))
        (again / "run_config.yaml").write_text(RUN_CONFIG.format(f"{FORMS[form]}.{form}", adapted, mesh[0]))
    torch.distributed.barrier()
    dist_checkpointing.save(adapters(), str(again))
    torch.distributed.barrier()
    if world == 1 and modules != MODULES:
        check_training(model)


def run(name: str, form: str, modules: tuple[str, ...]) -> None:
    """Prove one form of adapters of these modules of one model."""
    convert = LOADING["convert"]
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        LOADING["make"](name, place)
        weights = load_file(place / "hf/model.safetensors")
        merged = adapter_of(weights, place / "peft", form, modules)
        torch.save(logits_of(place / "hf", merged), place / "adapted.pt")
        words = ("--map", f"megatron-{name}", "--config", place / "hf/config.json")
        convert(
            "convert", place / "hf", place / "run", "--to", "megatron", *words[:2], "--size", f"_={LOADING['PADDING']}"
        )
        for mesh in MESHES:
            world, step = max(mesh), place / f"adapters-{mesh[0]}/iter_0000007"
            if not step.exists():
                size = ("--size", f"t={mesh[0]}") if form != "LoRA" else ()
                convert("convert", place / "peft", step, "--to", "megatron", *words, *size, "--verify")
            spawn(load, (world, name, form, modules, place, mesh), nprocs=world)  # type: ignore[no-untyped-call]
            saved = place / f"again-{'-'.join(map(str, mesh))}/iter_0000008"
            back = place / f"back-{'-'.join(map(str, mesh))}"
            convert("convert", saved, back, *words, "--verify")
            factors, other = (load_file(path / "adapter_model.safetensors") for path in (place / "peft", back))
            config = json.loads((back / "adapter_config.json").read_text())
            if factors.keys() != other.keys() or not all(torch.equal(factors[key], other[key]) for key in factors):
                raise SystemExit(
                    f"{name}, {form} at {mesh}: the adapter that was saved again is not the one that was converted"
                )
            if (config["r"], config["lora_alpha"], config["target_modules"]) != (RANK, ALPHA, sorted(modules)):
                raise SystemExit(f"{name}, {form} at {mesh}: another configuration: {config}")
            step = place / f"like-{'-'.join(map(str, mesh))}/iter_0000009"
            convert("convert", back, step, "--to", "megatron", *words, "--like", saved, "--verify")
            some = f" of {', '.join(modules)}" if modules != MODULES else ""
            what = f"{name}: {form}{some} loaded, computed and saved again"
            print(f"{what} with {mesh} (tensor, pipeline, expert)", flush=True)


def main() -> None:
    """Prove the models."""
    import megatron.core

    if util.find_spec("megatron.bridge") is None:
        raise SystemExit("Megatron-Bridge is not installed: PYTHONPATH names its place.")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    names = parser.parse_args().models or [*MODELS]
    releases = {"megatron-core": megatron.core.__version__, "megatron-bridge": version("megatron-bridge")}
    print(json.dumps({"torch": torch.__version__, **releases}))
    for name in names:
        for form, modules in CASES:
            run(name, form, modules)


if __name__ == "__main__":
    main()

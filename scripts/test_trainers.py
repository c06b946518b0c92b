"""Takes the optimizer's states out of what trainers save: each must be that of its parameter, bit for bit.

    test_trainers.py [--directory build/trainers] [--only NAME]

Each trainer trains a tiny model for two steps on the CPU, and saves as it does by default. The states are read by
`ckptconv.open`, and from what `convert --optimizer` and `convert --to dcp` wrote. Where nothing tells the names, the
error's advice is followed. The exit code is 1 if a state is not the parameter's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from formats import verified
from ports import free_port
from torch import nn

import ckptconv

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
MOMENTS = "exp_avg", "exp_avg_sq"
# What a trainer left: its checkpoint, the options that opening it takes, and the states of each parameter by name.
Left = tuple[Path, dict[str, Any], dict[str, torch.Tensor]]


def llama(layers: int = 12, **settings: Any) -> Any:
    """A model whose layers are of one shape, and more than ten: sorted names have another order."""
    import transformers

    own = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": layers, **settings}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**own))


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(6) + at, "labels": torch.arange(6) + at}


def states(model: nn.Module, *optimizers: Any) -> dict[str, torch.Tensor]:
    """The states of the optimizers by the names that files have."""
    names = {parameter: name.replace(".default", "") for name, parameter in model.named_parameters()}
    bare = [getattr(each, "optimizer", each) for each in optimizers]
    found = {(names[parameter], key): value for each in bare for parameter, own in each.state.items()
             for key, value in own.items()}  # fmt: skip
    return {f"{name}.{key}": value for (name, key), value in found.items() if isinstance(value, torch.Tensor)}


def arguments(place: Path) -> dict[str, Any]:
    return {
        "output_dir": str(place),
        "max_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "disable_tqdm": True,
        "weight_decay": 0.1,
        "learning_rate": 1e-2,
    }


def by_trainer(place: Path, model: Any, **more: Any) -> Left:
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(model, TrainingArguments(**{**arguments(place), **more}), train_dataset=Words())
    trainer.train()
    return place / "checkpoint-2", {}, states(model, trainer.optimizer)


def of_llama(place: Path) -> Left:
    return by_trainer(place, llama())


def of_tied(place: Path) -> Left:
    return by_trainer(place, llama(tie_word_embeddings=True))


def of_frozen(place: Path) -> Left:
    """The first layers are frozen: of equal shapes, only the groups' names tell which."""
    model = llama()
    for layer in model.model.layers[:6]:
        layer.requires_grad_(False)
    step, _, expected = by_trainer(place, model)
    names = {name: each for name, each in model.named_parameters() if each.requires_grad}
    groups = [[name for name, each in names.items() if (each.ndim > 1) is decayed] for decayed in (True, False)]
    (place / "order.json").write_text(json.dumps(groups))
    return step, {"order": place / "order.json"}, expected


def of_gpt2(place: Path) -> Left:
    import transformers

    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 11, "n_head": 2, "n_positions": 16}
    return by_trainer(place, transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))


def of_bert(place: Path) -> Left:
    import transformers

    return by_trainer(place, transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, num_hidden_layers=11)))


def adapted(place: Path, saved: bool) -> tuple[Any, Path]:
    from peft import LoraConfig, get_peft_model

    base = place / "base"
    model = llama()
    model.save_pretrained(base)
    model = type(model).from_pretrained(base) if saved else model
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=modules, task_type="CAUSAL_LM")), base


def of_peft(place: Path) -> Left:
    model, _ = adapted(place, saved=True)
    return by_trainer(place, model)


def of_peft_without_base(place: Path) -> Left:
    model, base = adapted(place, saved=False)
    step, _, expected = by_trainer(place, model)
    return step, {"order": base}, expected


def by_optimizer(name: str) -> Callable[[Path], Left]:
    """The Trainer with another optimizer than AdamW."""
    return lambda place: by_trainer(place, llama(3), optim=name)


def of_zero(stage: int) -> Callable[[Path], Left]:
    """The Trainer with DeepSpeed on one rank."""

    def train(place: Path) -> Left:
        import deepspeed
        from accelerate.state import AcceleratorState
        from deepspeed.utils import safe_get_full_optimizer_state
        from transformers import Trainer, TrainerCallback, TrainingArguments

        found: dict[str, torch.Tensor] = {}

        class Noting(TrainerCallback):  # type: ignore[misc]
            def on_save(self, _: Any, state: Any, *__: Any, model: nn.Module, **___: Any) -> None:
                for name, parameter in model.named_parameters():
                    found[f"{name}.step"] = torch.tensor(float(state.global_step))
                    for key in MOMENTS:
                        found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()

        config = {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": 2,
        }
        # Or else accelerate takes no DeepSpeed on the CPU. gloo does without the extension, which would be compiled.
        os.environ.pop("ACCELERATE_USE_CPU", None)
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "MASTER_PORT": str(free_port()), **alone}
        vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
        AcceleratorState._reset_state(reset_partial_state=True)
        deepspeed.logger.setLevel("ERROR")
        own = {"deepspeed": config, "weight_decay": 0.0, "use_cpu": False}
        settings = TrainingArguments(**{**arguments(place), **own})
        Trainer(llama(), settings, train_dataset=Words(), callbacks=[Noting()]).train()
        return place / "checkpoint-2", {}, found

    return train


def of_trl(place: Path, adapter: bool = False) -> Left:
    """SFTTrainer, with a dataset that is tokenized already, or with a LoRA."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(at): at for at in range(32)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
    rows = Dataset.from_list([{"input_ids": list(range(at, at + 6))} for at in range(8)])
    model = llama()
    settings = SFTConfig(**arguments(place), bf16=False, gradient_checkpointing=False)
    if adapter:
        model.save_pretrained(place / "base")
        model = type(model).from_pretrained(place / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM") if adapter else None
    trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer, peft_config=lora)
    trainer.train()
    return place / "checkpoint-2", {}, states(trainer.model, trainer.optimizer)


def of_trl_with_lora(place: Path) -> Left:
    return of_trl(place, adapter=True)


def of_accelerate(place: Path) -> Left:
    """save_state in one process: model.safetensors and optimizer.bin, without a configuration."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    words = Words()[0]["input_ids"][None]
    accelerator.backward(model(input_ids=words, labels=words).loss)
    optimizer.step()
    accelerator.save_state(str(place / "saved"))
    torch.save(model.state_dict(), place / "order.pt")
    return place / "saved", {"order": place / "order.pt"}, states(model, optimizer)


def of_lightning(place: Path, strategy: str = "auto") -> Left:
    """Its Trainer's .ckpt, of two optimizers: Muon for matrices, AdamW for the rest."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)), nn.LayerNorm(4))

        def training_step(self, batch: torch.Tensor, at: int) -> None:
            self.manual_backward(self.layers(batch).square().mean())
            for each in self.optimizers():
                each.step()
                each.zero_grad()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            matrices = [each for each in self.parameters() if each.ndim == 2]
            others = [each for each in self.parameters() if each.ndim == 1]
            return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    own = {"accelerator": "cpu", "devices": 1, "strategy": strategy, "default_root_dir": place}
    trainer = lightning.Trainer(max_steps=4, **own, **quiet)
    rows: Any = list(torch.randn(8, 4))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    trainer.save_checkpoint(place / "last.ckpt")
    return place / "last.ckpt", {}, states(module, *trainer.optimizers)


def of_lightning_with_ddp(place: Path) -> Left:
    left = of_lightning(place, "ddp")
    torch.distributed.destroy_process_group()
    return left


class Absent(MetaPathFinder, Loader):
    """Has anything of what Composer imports for images, and for its makers' own machines: neither is needed to save."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        return ModuleSpec(name, self, is_package=True) if package in ("torchvision", "mcli") else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return unittest.mock.MagicMock(__spec__=spec, __path__=[])

    def exec_module(self, module: Any) -> None:
        pass


def of_composer(place: Path) -> Left:
    """Composer's Trainer, whose optimizer's states have names."""
    absent = Absent()
    sys.meta_path.append(absent)
    import composer

    class Module(composer.models.ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(batch)
            return out

        def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return outputs.square().mean()

    module = Module()
    optimizer = torch.optim.AdamW(module.parameters())
    rows: Any = list(torch.randn(8, 4))
    trainer = composer.Trainer(
        model=module,
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=2),
        max_duration="3ba",
        optimizers=optimizer,
        device="cpu",
        save_folder=str(place / "saved"),
        save_interval="3ba",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    sys.meta_path.remove(absent)
    saved = next(each for each in sorted((place / "saved").iterdir()) if each.is_file() and not each.is_symlink())
    return saved, {}, states(module, optimizer)


TRAINERS: dict[str, Callable[[Path], Left]] = {
    "transformers: Llama": of_llama,
    "transformers: Llama, tied": of_tied,
    "transformers: Llama, half of it frozen": of_frozen,
    "transformers: GPT-2": of_gpt2,
    "transformers: BERT": of_bert,
    "transformers: Llama, Adafactor": by_optimizer("adafactor"),
    "transformers: Llama, 8-bit AdamW": by_optimizer("adamw_bnb_8bit"),
    "transformers: Llama, Lion": by_optimizer("lion_32bit"),
    "transformers: Llama, schedule-free AdamW": by_optimizer("schedule_free_adamw"),
    "PEFT: LoRA": of_peft,
    "PEFT: LoRA, base elsewhere": of_peft_without_base,
    "TRL: SFTTrainer": of_trl,
    "TRL: SFTTrainer, LoRA": of_trl_with_lora,
    "accelerate: save_state": of_accelerate,
    "Lightning: Trainer, Muon and AdamW": of_lightning,
    "Lightning: Trainer with DDP, Muon and AdamW": of_lightning_with_ddp,
    "Composer: Trainer": of_composer,
    # These leave their environment to what follows.
    "transformers: Llama, DeepSpeed ZeRO-2": of_zero(2),
    "transformers: Llama, DeepSpeed ZeRO-3": of_zero(3),
}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    found = {name.replace("__bnb_optimizer_quant_state__.", ""): each for name, each in found.items()}
    return [name for name in {**expected, **found} if name not in found or name not in expected
            or not torch.equal(found[name], expected[name])]  # fmt: skip


def universal_faults(step: Path, options: dict[str, Any], expected: dict[str, torch.Tensor], place: Path) -> list[str]:
    """What is wrong with a universal checkpoint's moments; other states are refused, with advice."""
    moments = {name: each.float() for name, each in expected.items() if not name.endswith(".step")}
    asked: dict[str, Any] = {"universal": place / "universal" / "step", "fsync": False, **options}
    try:
        ckptconv.convert(step, **asked)
    except ckptconv.UnsupportedError as error:
        if "--fresh-optimizer" not in error.hint:
            return ["--universal is refused without advice"]
        ckptconv.convert(step, **{**asked, "universal": place / "fresh" / "step", "fresh_optimizer": True})
        return []
    with ckptconv.open(place / "universal" / "step") as written:
        found = {name: each for name, each in written.optimizer.get_tensors().items() if not name.endswith(".step")}
    return [f"universal: {name}" for name in differing(found, moments)]


def faults(step: Path, options: dict[str, Any], expected: dict[str, torch.Tensor], place: Path) -> Iterator[str]:
    """Yield what is wrong with the states by each way out of a checkpoint."""
    if options:
        try:
            with ckptconv.open(step) as checkpoint:
                wrong = differing(dict(checkpoint.optimizer.get_tensors()), expected)
            yield from (["names them wrongly without --order"] if wrong else [])
        except ckptconv.CkptconvError as error:
            yield from ([] if "--order" in error.hint else ["is refused without advice"])
    with ckptconv.open(step, **options) as checkpoint:
        yield from differing(dict(checkpoint.optimizer.get_tensors()), expected)[:3]
    ckptconv.convert(step, optimizer=place / "states", fsync=False, **verified(), **options)
    with ckptconv.open(place / "states") as written:
        yield from differing(dict(written.get_tensors()), expected)[:3]
    for_torch: dict[str, Any] = {"to": "dcp", "states": step}
    ckptconv.convert(step, place / "dcp", fsync=False, **for_torch, **options)
    with ckptconv.open(place / "dcp") as written:
        yield from differing(dict(written.optimizer.get_tensors()), expected)[:3]
    yield from universal_faults(step, options, expected, place)[:3]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, default=None, help="keep the checkpoints there")
    parser.add_argument("--only", default="", help="trainers whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["ACCELERATE_USE_CPU"] = "1"
    directory = options.directory or Path(tempfile.mkdtemp())
    wrong = 0
    for name, train in TRAINERS.items():
        if options.only.lower() not in name.lower():
            continue
        place = directory / name.replace(": ", "-").replace(" ", "_").replace(",", "")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        torch.manual_seed(1)
        try:
            step, opening, expected = train(place)
            found = list(faults(step, opening, expected, place))
        except Exception:
            traceback.print_exc()
            found, expected = ["failed"], {}
        how = f"; with --order {opening['order'].name}" if expected and opening else ""
        print(f"{name}: {len(expected)} states {'WRONG: ' + ', '.join(found) if found else 'right'}{how}")
        wrong += bool(found)
    if options.directory is None:
        shutil.rmtree(directory)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The Trainer of transformers: it saves after each step, and removes old steps if it is told to keep few."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_kills import FIRST, THIRD, Saver

NEEDED = ("torch", "transformers", "accelerate")


def prepare() -> None:
    import accelerate  # noqa: F401
    import transformers.trainer

    assert transformers.trainer.Trainer
    assert transformers.LlamaForCausalLM


def trainer_of(run: Path, steps: int, keep: int | None) -> Any:
    """A trainer of a small model that saves each tenth step."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.set_seed(0)

    class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.arange(2) + at % 8, "labels": torch.arange(2) + at % 8}

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=256, intermediate_size=512, num_attention_heads=2, num_hidden_layers=4
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(run),
        max_steps=steps,
        save_steps=FIRST,
        save_total_limit=keep,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=1,
    )
    return transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=Words())


def train(run: Path, rank: int, begun: Callable[[], None], ended: Callable[[], None], keep: int | None = None) -> None:
    """Train for three saves."""
    import transformers

    class Telling(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == THIRD:
                begun()

        def on_save(self, _: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == THIRD and keep is None:
                ended()

    trainer = trainer_of(run, THIRD, keep)
    trainer.add_callback(Telling())
    trainer.train()
    if keep is not None:
        ended()


def load(run: Path, step: Path, rank: int) -> None:
    """Train on from a step, for one more."""
    number = int(step.name.removeprefix("checkpoint-"))
    trainer = trainer_of(run, number + 1, None)
    trainer.train(resume_from_checkpoint=str(step))
    assert trainer.state.global_step == number + 1


SAVERS = {"trainer": Saver(train, load), "trainer-rotating": Saver(functools.partial(train, keep=1), load)}

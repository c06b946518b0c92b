"""Files of torch.save with the states of several optimizers."""

from __future__ import annotations

from pathlib import Path

import torch


def muon_saved(path: Path) -> dict[str, torch.Tensor]:
    """Save a model with Muon for its matrices and AdamW for the rest; return the states by name."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12)), torch.nn.LayerNorm(4))
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim == 1]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    for at, each in enumerate(model.parameters()):
        each.grad = torch.full_like(each, at + 1.0)
    for optimizer in optimizers:
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}, path)
    states = {parameter: own for each in optimizers for parameter, own in each.state.items()}
    named = model.named_parameters()
    return {f"{name}.{key}": value for name, each in named for key, value in states[each].items()}

"""Tensors of torch before 0.4, in the pickles of that time: objects that are made empty, and then given their state."""

from __future__ import annotations

from pathlib import Path

import torch
from attacks.assemble import (
    FALSE,
    HOOKS,
    NONE,
    TRUE,
    called,
    listed,
    mapped,
    members,
    name,
    number,
    numbers,
    pickled,
    several,
    storage,
    tensor,
    text,
    zipped,
)
from cells import VERIFY
from checkpoints import ckptconv_here, done, torch_loaded
from compare import same
from effort import every
from reading import state_in
from safetensors.torch import load_file

from ckptconv.formats.torch.file import read_torch

STORED = storage()
PARAMETER, VARIABLE = ("torch.nn.parameter", "Parameter"), ("torch.autograd.variable", "Variable")


def built(made: bytes, *state: bytes) -> bytes:
    """An object, and a BUILD that gives it this state."""
    return made + several(*state) + b"b"


def typed(
    kind: str = "FloatTensor", held: bytes = STORED, offset: int = 0, size: bytes = numbers(2, 3), module: str = "torch"
) -> bytes:
    """A tensor as torch 0.1.10 saved it."""
    return built(called(name(module, kind)), held, number(offset), size, numbers(3, 1))


def with_three(cls: tuple[str, str], data: bytes, requires_grad: bytes = TRUE) -> bytes:
    """A Variable as torch 0.2 and 0.3 saved it."""
    return built(called(name(*cls), data), requires_grad, FALSE, HOOKS)


def with_five(cls: tuple[str, str], data: bytes, requires_grad: bytes = TRUE) -> bytes:
    """A Variable as torch 0.1.9 saved it."""
    return built(name(*cls) + b")\x81", data, NONE, HOOKS, requires_grad, FALSE)


OLD_TENSOR = tensor(STORED, function="_rebuild_tensor").replace(FALSE + HOOKS, b"")
SOUND = {
    "typed": typed(),
    "typed_view": typed(offset=1, size=numbers(1, 2)),
    "parameter_of_three": with_three(PARAMETER, typed()),
    "parameter_without_gradient": with_three(PARAMETER, typed(), FALSE),
    "parameter_of_three_rebuilt": with_three(PARAMETER, OLD_TENSOR),
    "parameter_of_five": with_five(PARAMETER, typed()),
    "variable_of_three": with_three(VARIABLE, typed()),
    "variable_of_three_frozen": with_three(VARIABLE, typed(), FALSE),
}


def state_dict(value: bytes, tied: bytes | None = None) -> bytes:
    """A file of an object that is there under two names; `tied` is the second mention of it."""
    return zipped(members(pickled(mapped(text("w"), value, text("tied"), value if tied is None else tied))))


@every("case", SOUND)
def test_what_torch_reads_of_them_is_what_we_read(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(state_dict(SOUND[case]))
    same(read_torch(str(path)).value, torch_loaded(path))


@every("case", SOUND)
def test_they_are_converted_and_go_back(case: str, tmp_path: Path) -> None:
    path, flat = (tmp_path / file for file in ("model.pt", "model.safetensors"))
    path.write_bytes(state_dict(SOUND[case]))
    run = done(ckptconv_here("pt2safetensors", path, flat, *VERIFY, "--json"))
    assert run.json["opaque"] == []
    assert list(run.json["aliases"]) == ["tied"]
    theirs = torch_loaded(path)
    assert torch.equal(load_file(flat)["w"], theirs["w"])
    again = state_in(flat)
    assert type(again["w"]) is type(theirs["w"])
    assert again["w"].requires_grad == theirs["w"].requires_grad
    assert torch.equal(again["w"], theirs["w"])


def test_one_object_that_is_mentioned_twice_is_one_tensor(tmp_path: Path) -> None:
    made = called(name("torch", "FloatTensor")) + b"q\x00" + several(STORED, number(0), numbers(2, 3), numbers(3, 1))
    path = tmp_path / "model.pt"
    path.write_bytes(state_dict(made + b"b", b"h\x00"))
    same(read_torch(str(path)).value, torch_loaded(path))


def test_one_that_is_mentioned_before_it_has_its_state_is_refused(tmp_path: Path) -> None:
    early = listed(called(name("torch", "FloatTensor")) + b"q\x63") + b"0h\x63"
    path = tmp_path / "model.pt"
    held = several(STORED, number(0), numbers(2, 3), numbers(3, 1))
    path.write_bytes(state_dict(early + held + b"b", b"h\x63"))
    run = ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors")
    assert run.code == 4, (run.code, run.err)


def test_tensors_of_a_gpu_are_those_of_the_processor(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(state_dict(typed("FloatTensor", module="torch.cuda")))
    done(ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors", "--json"))
    assert load_file(tmp_path / "out.safetensors")["w"].shape == (2, 3)


FLAT = (STORED, number(0), numbers(2), numbers(1))
WRONG = {
    "another_dtype": typed("DoubleTensor"),
    "beyond_the_storage": typed(offset=1),
    "no_storage": typed(held=number(1)),
    "not_of_four": built(called(name("torch", "FloatTensor")), STORED, number(0), numbers(2, 3)),
    "twice": built(typed(), STORED, number(0), numbers(2, 3), numbers(3, 1)),
    "made_of_something": built(
        called(name("torch", "FloatTensor"), number(6)), STORED, number(0), numbers(2), numbers(1)
    ),
    "parameter_of_four": built(called(name(*PARAMETER), typed()), TRUE, FALSE, HOOKS, NONE),
    "parameter_of_nothing": built(name(*PARAMETER) + b")\x81", TRUE, FALSE, HOOKS),
    "parameter_of_a_number": with_three(PARAMETER, number(3)),
    "gradient_is_a_number": with_three(PARAMETER, typed(), number(1)),
}


@every("case", WRONG)
def test_states_that_fit_no_release_are_corrupt(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(state_dict(WRONG[case]))
    run = ckptconv_here("pt2safetensors", path, tmp_path / "out.safetensors")
    assert run.code == 4, (run.code, run.err)
    assert not (tmp_path / "out.safetensors").exists()

"""The docstrings of the public names: each is there, and the examples in them run."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import DATA
from optimizer_files import by_names

import ckptconv
from ckptconv import errors
from ckptconv.process import has_feature, of_feature
from ckptconv.structure.leaves import LIVE

DOCUMENTED = [name for name in ckptconv.__all__ if callable(getattr(ckptconv, name))]
EXAMPLES = {name: doc for name in DOCUMENTED if ">>>" in (doc := inspect.getdoc(getattr(ckptconv, name)) or "")}
EXAMPLES["errors"] = inspect.getdoc(errors) or ""
FUNCTIONS = [name for name in DOCUMENTED if inspect.isfunction(getattr(ckptconv, name))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which the examples run: a model, a checkpoint of its training, a base and an adapter of it, an
    embedding table of whole rows."""
    monkeypatch.chdir(tmp_path)
    # In the order of a file of safetensors, which then has no record.
    torch.save({"bias": torch.zeros(3), "weight": torch.ones(3, 4)}, "model.pt")
    linear = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(linear.parameters())
    linear(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"model": linear.state_dict(), "optimizer": by_names(linear, optimizer)[0]}, "train.pt")
    for part in ("base", "adapter"):
        shutil.copytree(DATA / "peft" / "dora" / part, part)
    rows = torch.zeros(10, 76, dtype=torch.float16)
    rows.view(torch.int64)[:, 0] = torch.arange(10)
    rows.view(torch.uint8)[:, 15] = 0x80
    torch.save({"emb.embeddings.t.weight": rows, "emb.embeddings.t.weight_id": torch.arange(10)[:, None]}, "kv.pt")
    return tmp_path


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str, place: Path) -> None:
    if name in ("flatten", "unflatten") and of_feature(LIVE, "tensors") is None:
        return  # their trees hold tensors of torch
    if name == "Checkpoint" and not has_feature("optimizer_states"):
        return  # it shows those of an optimizer
    known = {"ckptconv": ckptconv, "torch": torch}
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], known, name, None, None)
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert not told, "".join(told)


def test_every_call_has_an_example_and_names_its_errors() -> None:
    for name in FUNCTIONS:
        doc = inspect.getdoc(getattr(ckptconv, name)) or ""
        assert name in EXAMPLES, name
        assert re.search(r"\bRaises?\s", doc), name


def test_the_help_of_a_call_has_its_own_parameters_above_the_first_sentence() -> None:
    for name in FUNCTIONS:
        head, sentence = pydoc.plaintext.document(getattr(ckptconv, name)).splitlines()[:2]
        assert len(head) < 200, head
        assert re.match(r" {4}[A-Z].*", sentence), sentence


def test_every_public_name_says_what_it_is() -> None:
    for name in DOCUMENTED:
        assert len(inspect.getdoc(getattr(ckptconv, name)) or "") > 10, name


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    drawn: list[tuple[str, str, list[int]]] = []
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.fullmatch(r"    ([│├└─ ]*)(\w+Error) +([\d, ]+?)(    .*|$)", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            drawn.append((path[depth - 1] if depth else "Exception", found[2], [int(n) for n in found[3].split(",")]))
    classes = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, Exception)]
    assert {name for _, name, _ in drawn} == {each.__name__ for each in classes} <= set(ckptconv.__all__)
    for above, name, codes in drawn:
        cls = getattr(errors, name)
        assert cls.__bases__[0].__name__ == above
        assert cls("x").exit_code in codes


def test_nothing_public_is_hidden_from_dir() -> None:
    assert {*ckptconv.__all__} <= {*dir(ckptconv)}


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    shown = re.findall(r"^::: ckptconv\.(\w+)$", page, re.MULTILINE)
    assert {*shown} - {"errors"} == {*ckptconv.__all__} - {"__version__"}

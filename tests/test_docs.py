"""What the documentation shows, works: examples run as they are written, and every command and option exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import of_features
from checkpoints import ckptconv_here
from processes import prepared
from safetensors.torch import save_file

from ckptconv.cli.commands import app
from ckptconv.options.registered import missing
from ckptconv.process import has_feature

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import measured  # noqa: E402
import site_pages as site  # noqa: E402
from said import saying  # noqa: E402


def _commands(group: Any, above: str = "") -> Iterator[str]:
    """All commands, those in groups first."""
    for name, command in group.commands.items():
        yield from _commands(command, f"{above}{name} ") if hasattr(command, "commands") else ()
        yield f"{above}{name}"


PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
# An example, and what it prints: the text after it, or after one sentence that ends in a colon.
_FENCED = re.compile(
    r"^```(python|sh)\n(.*?)^```$(?:\n\n(?:(?!```)[^\n]+\n)*[^\n]*:)?(?:\n\n```text\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
# What differs from run to run.
_MEASURED = re.compile(r"\d+\.\d\d s\b|(?<=peak memory )\d+ MiB")
_COMMAND = re.compile(rf"ckptconv ({'|'.join(_commands(app.made()))})(?![\w-])")


# Checkpoints that examples read, each by the feature of its format, and those that are here.
_INPUTS = {"deepspeed": "checkpoints", "dcp": "step-1000"}
_STEPS = {_INPUTS[steps[0].parents[2].name]: steps[0] for steps in of_features("TRAINED")}
_ABSENT = [rf"\b{name}\b" for name in _INPUTS.values() if name not in _STEPS]
# The optimizer's states in another one are numbered.
_ABSENT += [r"--states train\.pt\b", r"\btrain\.pt \S+ --to universal\b"] if missing("order") else []
# A file with a structure record cannot be read where the feature that reads the record is missing.
_ABSENT += [] if has_feature("unflattening") else [r"\bckptconv (?:convert|diff model\.pt) model\.safetensors\b"]
# It says that it copies no file.
_ABSENT += [] if has_feature("companions") else [r"--for-hub\b"]
_ABSENT += [] if has_feature("like") else [r"\blike="]
_ABSENT += [] if has_feature("pipes") else [r"\| ckptconv \S+ - "]


def examples(language: str) -> list[tuple[str, str, str]]:
    """Page and text of every example in this language, and what the page says that it prints; without those that read
    what no feature here reads."""
    blocks = [(page.name, match) for page in PAGES for match in _FENCED.findall(page.read_text())]
    return [
        (page, text, shown)
        for page, (kind, text, shown) in blocks
        if kind == language and not any(re.search(name, text) for name in _ABSENT)
    ]


def assert_shown(shown: str, printed: str, page: str) -> None:
    """What is shown is what was printed, but for times and what is left out: `…` in a line, or `…` for lines."""
    lines = [re.escape(_MEASURED.sub("…", line.rstrip())) for line in shown.splitlines() if line.strip()]
    pattern = "".join("(?:.*\n)*?" if line == "…" else line.replace("…", ".*") + "\n" for line in lines)
    text = "".join(f"{line.rstrip()}\n" for line in printed.splitlines() if line.strip())
    assert re.fullmatch(pattern, text), f"{page} shows\n{shown}\nfor an example that prints\n{text}"


def whole_rows() -> dict[str, torch.Tensor]:
    """Ten used rows of 64 float16 items with Adagrad's state, and their ids."""
    rows = torch.zeros(10, 76, dtype=torch.float16)
    rows.view(torch.int64)[:, 0] = torch.arange(10)
    rows.view(torch.uint8)[:, 15] = 0x80
    return {"emb.embeddings.t.weight": rows, "emb.embeddings.t.weight_id": torch.arange(10)[:, None]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """What the examples find where they run: a model, a model's checkpoint of a trainer, a run of DeepSpeed, a step
    of FSDP, and an embedding table of whole rows."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 3)
    torch.save(linear.state_dict(), tmp_path / "model.pt")
    trained = {f"model.{name}": tensor for name, tensor in linear.state_dict().items()}
    optimizer = torch.optim.Adam(linear.parameters())
    linear(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"state_dict": trained, "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "epoch=3.ckpt")
    torch.save(state, tmp_path / "train.pt")
    torch.save(whole_rows(), tmp_path / "kv.pt")
    torch.save({"layers.0.attention.wq.weight": torch.randn(64, 8)}, tmp_path / "consolidated.00.pth")
    (tmp_path / "my-map.toml").write_text(
        '[[rule]]\ntitan = "layers.{l}.attention.wq.weight : (n e two) h"\n'
        'hf = "model.layers.{l}.self_attn.q_proj.weight : (n two e) h"\n[sizes]\nn = "num_attention_heads"\ntwo = 2\n'
    )
    _save_release(tmp_path / "release")
    for name, step in _STEPS.items():
        shutil.copytree(step, tmp_path / name)
    return tmp_path


def _save_release(place: Path) -> None:
    """Put a model with layers and experts into a directory, of which parts are taken."""
    place.mkdir()
    shapes = {"model.embed_tokens.weight": (64, 16), "lm_head.weight": (64, 16)}
    for layer in range(6):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (16,), f"{at}.mlp.gate.weight": (8, 16)}
        shapes |= {f"{at}.mlp.experts.{expert}.up_proj.weight": (4, 16) for expert in range(8)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, place / "model.safetensors")
    told = {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 64}
    (place / "config.json").write_text(json.dumps({**told, "layer_types": ["sliding_attention", "full_attention"] * 3}))


def run(command: list[str], place: Path, *programs: Path) -> str:
    """What the command prints; programs are looked for in the directories `programs` first."""
    paths = [*programs, Path(sys.executable).parent, os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        command, check=False, cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(("page", "text", "shown"), examples("python"))
def test_examples_in_python_run(page: str, text: str, shown: str, place: Path) -> None:
    process = prepared("torch").python(text, cwd=place, stderr=subprocess.STDOUT)
    printed, _ = process.communicate()
    assert process.wait() == 0, printed
    assert_shown(shown, printed, page)


@pytest.mark.parametrize(("page", "text", "shown"), examples("sh"))
def test_examples_for_the_shell_run_and_print_what_is_shown(
    page: str, text: str, shown: str, place: Path, program: Path
) -> None:
    assert_shown(shown, run(["bash", "-euo", "pipefail", "-c", text], place, program), page)


def commands() -> list[tuple[str, str, str]]:
    """Page, command and rest of the line of every mention of a command."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            for mention in _COMMAND.finditer(line):
                rest = re.split(r"[`#|]|, then", line[mention.end() :])[0]
                found.append((page.name, mention[1], rest))
    return found


def options_of(command: str, known: dict[str, set[str]]) -> set[str]:
    if command not in known:
        told = ckptconv_here(*command.split(), "--help")
        assert told.code == 0, told.err
        known[command] = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", told.out.replace(",", " ")))
    return known[command]


def test_every_option_that_is_mentioned_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    known: dict[str, set[str]] = {}
    assert commands()
    for page, command, rest in commands():
        for option in re.findall(r"(?<!\S)(--?[a-z][a-z_-]*)", rest):
            if page == "benchmarks.md" and missing(option.strip("-").replace("-", "_")):
                continue  # measured where it was
            assert option.replace("_", "-") in options_of(command, known), f"{page}: {command} has no {option}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            path = re.sub(f"^({site.FILES}|{site.PICTURES})", f"{ROOT}/", target)
            if ":" not in path:
                assert (page.parent / path).exists(), f"{page.name} links to {target}"


def test_links_of_the_readme_work_on_a_package_index() -> None:
    for shown, target in re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith(("https://", "#")), target
        assert target.startswith(site.PICTURES) or not shown, f"{target} is a page that shows the picture"


def test_the_readme_shows_the_figures_of_the_benchmarks() -> None:
    table, picture = measured.made((ROOT / "docs" / "benchmarks.md").read_text())
    assert f"{measured.BEGIN}\n\n{table}\n\n{measured.END}" in measured.README.read_text()
    assert measured.PICTURE.read_text() == picture


def test_the_first_sentences_of_the_readme_say_what_its_picture_and_its_table_say() -> None:
    report = (ROOT / "docs" / "benchmarks.md").read_text()
    first = (ROOT / "README.md").read_text().partition("```")[0]
    for heading, wanted in measured.TABLES.items():
        row = measured.rows(report, heading)[wanted["ckptconv --no-fsync"]]
        assert f"{float(row['÷ `cp`']):.1f} times as long as `cp`" in first
        assert f"about {round(int(row['peak RSS, MiB']), -1)} MiB of memory" in " ".join(first.split())


def test_messages_that_are_quoted_are_those_of_the_program() -> None:
    page = _FENCED.sub("", (ROOT / "docs" / "troubleshooting.md").read_text())
    quotes = "".join(re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)).splitlines()
    assert len(quotes) > 25
    for quote in quotes:
        assert saying(quote), f"the program does not say {quote!r}"

"""inspect: what is shown of a checkpoint, on screens of any width, as JSON, and as a page in a real browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ZERO, ckptconv, ckptconv_here
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptconv as library
from ckptconv.inspection.module_tree import rows, tree
from ckptconv.inspection.overview import cells, cut, overview, padded
from ckptconv.inspection.page import page_of
from ckptconv.inspection.summary import summarize

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = {
    "</script><script>document.title='run'</script>": torch.ones(3, 3),
    "<img src=x onerror=\"document.title='run'\">.weight": torch.ones(2, 2),
    "'\"&amp;.\u202egnp.exe": torch.ones(2),
    "\x1b[2J\n\r\x07": torch.ones(1),
    "名前.重み": torch.ones(7),
    "": torch.ones(1),
    "a": torch.ones(2),
    "a.b": torch.ones(5),
    "a..c": torch.ones(1),
    "x" * 300: torch.ones(1),
    "empty": torch.ones(0, 4),
}


def write_header(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> Path:
    """A file of safetensors of any size, which has its header and holes: dtype, shape and bytes by name."""
    at, header = 0, {}
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + at)
    return path


def layered(path: Path, layers: int = 24) -> Path:
    """A model of 24 layers that are alike, of about 20 GB."""
    tensors = {"model.embed.weight": ("BF16", [50000, 8192], 50000 * 8192 * 2)}
    for layer in range(layers):
        for name in ("attention.q", "attention.k", "mlp.up", "mlp.down"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ("BF16", [8192, 12288], 8192 * 12288 * 2)
        tensors[f"model.layers.{layer}.norm.weight"] = ("F32", [8192], 8192 * 4)
    tensors["model.norm.weight"] = ("F32", [8192], 8192 * 4)
    return write_header(path, tensors)


def lines_of(path: Path, **options: Any) -> list[str]:
    """The overview as plain lines."""
    summary = summarize(library.open(path).source)
    return ["".join(span.text for span in line) for line in overview(str(path), summary, **options)]


# ------------------------------------------------------------------------------------------------------- the modules


def row(name: str, shape: tuple[int, ...] = (2,), dtype: str = "float32") -> dict[str, Any]:
    elements = 1
    for extent in shape:
        elements *= extent
    return {"name": name, "dtype": dtype, "shape": list(shape), "bytes": 4 * elements}


def labels(names: list[str], depth: int | None = None, **options: Any) -> list[tuple[int, str, int]]:
    return [(each.depth, each.label, each.alike) for each in rows(tree(list(map(row, names)), {}), depth, **options)]


def test_modules_that_are_alike_and_numbered_become_one_row() -> None:
    names = [f"h.{n}.{part}" for n in range(5) for part in ("w", "b")] + ["h.7.w", "h.7.b", "h.8.w", "end"]
    assert labels(names) == [
        (1, "h", 1),
        (2, "0…4", 5),
        (3, "w", 1),
        (3, "b", 1),
        (2, "7", 1),
        (3, "w", 1),
        (3, "b", 1),
        (2, "8.w", 1),
        (1, "end", 1),
    ]
    assert [label for _, label, _ in labels(names, fold=False)].count("w") == 6
    assert labels(names, 1) == [(1, "h", 1), (1, "end", 1)]


def test_modules_of_other_shapes_or_dtypes_are_not_alike() -> None:
    tensors = [row("l.0.w", (2, 3)), row("l.1.w", (3, 2)), row("l.2.w", (3, 2)), row("l.3.w", (3, 2), "float16")]
    assert [(each.label, each.alike) for each in rows(tree(tensors, {}), None)] == [
        ("l", 1), ("0.w", 1), ("1…2.w", 2), ("3.w", 1),
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("a0.1", max_size=8), min_size=1, max_size=20, unique=True),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 3)),
)
def test_every_tensor_is_in_one_row(names: list[str], fold: bool, most: int | None) -> None:
    root = tree(list(map(row, names)), {})
    assert (root.tensors, root.nbytes, root.elements) == (len(names), 8 * len(names), 2 * len(names))
    counted = 0
    for each in rows(root, 1, most, fold):
        assert each.depth == 1
        counted += each.module.tensors * each.alike if each.module else sum(m.tensors for m in each.hidden)
    assert counted == len(names)
    if not fold and most is None:
        leaves = [each.module for each in rows(root, None, None, fold=False) if each.module.shape is not None]
        assert len(leaves) == len(names)


def test_a_name_of_many_dots_is_no_trouble() -> None:
    name = "." * 5000
    assert len(list(rows(tree([row(name)], {}), None))) == 1


# ----------------------------------------------------------------------------------------------------------- screens


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_line_is_wider_than_the_screen(width: int, tmp_path: Path) -> None:
    save_file(
        {**HOSTILE, **{f"long.{'name.' * 20}{n}": torch.ones(n) for n in range(1, 9)}}, tmp_path / "a.safetensors"
    )
    for path in (tmp_path / "a.safetensors", layered(tmp_path / "b.safetensors")):
        shown = lines_of(path, width=width)[1:]
        assert not [line for line in shown if cells(line) > width]
        assert all(line.isprintable() for line in shown)
    if width >= 80:
        assert any("layers.0…23. (24 alike)" in line for line in shown)
        assert any("9.66 GB" in line or "19.3 GB" in line for line in shown)


@pytest.mark.parametrize(
    ("width", "label"), [(80, "layers.0…23. (24 alike) "), (60, "layers.0…23. ×24 "), (45, "laye…0…23. ×24 ")]
)
def test_how_many_layers_are_alike_is_told_in_little_room(width: int, label: str, tmp_path: Path) -> None:
    lines = lines_of(layered(tmp_path / "model.safetensors"), width=width)
    assert [line.startswith(f"    {label}") for line in lines].count(True) == 1, lines


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_options_for_another_kind_of_checkpoint_are_said_to_be_of_no_use(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "model.pt")
    assert ckptconv_here("pt2safetensors", "model.pt").code == 0
    paths = ["model.pt", "model.safetensors"][: 2 if command == "verify" else 1]
    run = ckptconv_here(command, *paths, "--tag", "global_step9")
    assert run.code == 0
    assert run.err == (
        "ckptconv: warning: --tag is of no use: model.pt is a single file, and it is for DeepSpeed's checkpoints.\n"
    )
    assert ckptconv_here(command, *paths, "--tag", "9", "--json").json["warnings"][0].startswith("--tag is of no use")
    checkpoint = ZERO / "z2_bf16_tags_w2" / "checkpoint"
    assert ckptconv_here("inspect", checkpoint, "--tag", "global_step2").err == ""


def test_what_is_piped_is_whole(tmp_path: Path) -> None:
    save_file(HOSTILE, tmp_path / "a.safetensors")
    run = ckptconv_here("inspect", tmp_path / "a.safetensors")
    assert "x" * 300 in run.out
    assert "…" not in run.out.replace("… and", "")
    assert not set(run.out) & {"\x1b", "\x07", "\r", "\u202e"}
    assert r"\x1b[2J\n\r\x07" in run.out
    assert r"\u202egnp" in run.out


def test_depth_folds_modules_and_verbose_shows_all(tmp_path: Path) -> None:
    path = layered(tmp_path / "model.safetensors")
    top = ckptconv_here("inspect", path, "--depth", "1").out
    assert "122 tensors" in top
    assert "attention" not in top.split("largest")[0]
    every = ckptconv_here("inspect", path, "-v").out
    assert every.count("attention.") >= 24
    assert "alike" not in every
    assert ckptconv_here("inspect", path, "--depth", "none").code == 2
    assert not ckptconv_here("inspect", path, "-q").out


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    torch.save({f"t{n}": torch.ones(n + 1) for n in range(30)}, tmp_path / "model.pt")
    run = ckptconv_here("inspect", tmp_path / "model.pt")
    tree_shown = run.out.split("largest")[0]
    assert "t19 " in tree_shown
    assert "t20 " not in tree_shown
    assert "and 10 more of 255 elements" in tree_shown
    assert "t29 " in run.out.split("largest")[1]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=30), st.integers(3, 40))
def test_text_is_cut_to_cells(text: str, width: int) -> None:
    assert cells(cut(text, width)) <= max(width, 0)
    assert cut(text, cells(text)) == text
    assert cells(padded(text, 50)) == max(cells(text), 50)


def on_terminal(columns: int, *arguments: object, **environment: str) -> str:
    """What the command shows on a terminal of so many columns."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "ckptconv", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=follower, stderr=subprocess.PIPE, env={**clean, "TERM": "xterm-256color", **environment}
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            ready, _, _ = select.select([leader], [], [], 600)
            try:
                piece = os.read(leader, 65536) if ready else b""
            except OSError:
                break
            if not piece:
                break
            shown += piece
        assert process.wait() == 0
    os.close(leader)
    return shown.decode()


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_has_colours_and_no_line_too_long(columns: int, tmp_path: Path) -> None:
    path = layered(tmp_path / "model.safetensors")
    shown = on_terminal(columns, "inspect", path, "--as", "fp32")
    assert "\x1b[" in shown
    plain = on_terminal(columns, "inspect", path, "--as", "fp32", NO_COLOR="1")
    assert re.sub(r"\x1b\[[0-9;]*m", "", plain) == re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3|4|9|10)\d", plain)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", plain).splitlines()
    # The path and the command are whole, to be copied.
    assert all(cells(line) <= columns or str(path) in line for line in lines)


# --------------------------------------------------------------------------------------------------- what it would be


@pytest.mark.parametrize(
    ("asked", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("float16", "float16"), ("keep", "keep")]
)
def test_what_a_conversion_gives_is_what_it_then_gives(asked: str, dtype: str, tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.randn(100, 10) for n in range(5)} | {"half": torch.randn(9).half()}, tmp_path / "m.pt")
    told = ckptconv_here("inspect", tmp_path / "m.pt", "--as", asked, "--max-shard-size", "5kB", "--json").json
    made = library.convert(tmp_path / "m.pt", tmp_path / "out", dtype=dtype, max_shard_size=5000)
    assert told["conversion"]["bytes"] == made.bytes_written
    assert [file["bytes"] for file in told["conversion"]["files"]] == [file.bytes for file in made.outputs]
    assert told["conversion"]["shards"] == sum(file.tensors > 0 for file in made.outputs) > 1
    assert told["conversion"]["bytes_to_read"] == pytest.approx(made.bytes_read, rel=0.05)
    assert not (tmp_path / "OUTPUT").exists()


@pytest.mark.parametrize("case", ["z3_bf16_w2", "z2_bf16_w2", "z1_bf16_frozen_w2"])
def test_what_is_read_of_zero_checkpoints_is_told(case: str, tmp_path: Path) -> None:
    source = ZERO / case / "checkpoint"
    told = ckptconv_here("inspect", source, "--as", "fp32", "--json").json["conversion"]
    made = library.convert(source, tmp_path / "out", dtype="float32")
    assert told["bytes"] == made.bytes_written
    assert told["bytes_to_read"] == pytest.approx(made.bytes_read, rel=0.15)
    assert "zero-to-fp32" in told["command"]


def test_json_has_all_that_is_shown(tmp_path: Path) -> None:
    shared = torch.ones(3, 3)
    torch.save({"a": shared, "b": shared, "c": torch.ones(5).half()}, tmp_path / "m.pt")
    told = ckptconv_here("inspect", tmp_path / "m.pt", "--json").json
    assert (told["bytes"], told["elements"]) == (46, 14)
    assert told["aliases"] == {"b": "a"}
    assert told["largest"] == ["a", "c"]
    assert ckptconv_here("inspect", tmp_path / "m.pt", "--as", "int4").code == 2


def test_no_tensor_data_is_read_of_a_large_file(tmp_path: Path) -> None:
    path = layered(tmp_path / "model.safetensors")
    run = ckptconv("inspect", path, "--html", tmp_path / "model.html", "--json")
    assert run.json["bytes_read"] < 100_000
    assert run.json["bytes"] > 19 * 10**9


# ---------------------------------------------------------------------------------------------------------- the page


def page(path: Path, tmp_path: Path) -> Path:
    target = tmp_path / "page.html"
    run = ckptconv_here("inspect", path, "--html", target, "-q")
    assert run.code == 0, run.err
    return target


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    save_file(HOSTILE, tmp_path / "hostile.safetensors")
    text = page(tmp_path / "hostile.safetensors", tmp_path).read_text("utf-8")
    around = re.sub(r'(<script type="application/json" id="data">).*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href|action)\s*=|@import|url\(|https?://""", around)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for kind, content in re.findall(r"<(style|script)>(.*?)</(?:style|script)>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "style=" not in text.split("<script>")[0].split("</style>")[1]
    # Nothing of the checkpoint is seen by a parser of HTML.
    assert text.count("<script") == 2
    assert "<img" not in text
    assert not any(character in text for character in "\u202e\x1b\x07\r")
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert len(json.loads(embedded)["names"]) == len(HOSTILE)


def test_the_title_is_escaped(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    text = page_of("/x/<b>&\"'", summarize(library.open(tmp_path / "a.safetensors").source))
    (title,) = re.findall("<title>(.*?)</title>", text)
    assert html.unescape(title).startswith("<b>&\"'")
    assert "<b>" not in text


def test_a_page_replaces_only_what_it_may(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(1)}, path)
    before = path.read_bytes()
    os.link(path, tmp_path / "same.html")
    for target in (path, tmp_path / "same.html", tmp_path, tmp_path / "missing" / "page.html", "s3://bucket/page.html"):
        assert ckptconv_here("inspect", path, "--html", target).code == 2
    assert path.read_bytes() == before
    old = tmp_path / "old.html"
    old.write_text("old")
    assert "wrote" in ckptconv_here("inspect", path, "--html", old).err
    assert old.read_text().startswith("<!doctype html>")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.pt", "old.html", "same.html"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Opens a page in Chromium without a screen: what became of it, as HTML; with a picture, if a path is given."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    profile = tmp_path_factory.mktemp("profile")

    def opened(path: Path, fragment: str = "", *, picture: Path | None = None, size: str = "1300,1000") -> str:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", "--virtual-time-budget=5000", f"--window-size={size}"]
        command += [f"--screenshot={picture}"] if picture else ["--dump-dom"]
        done = subprocess.run([*command, f"{path.as_uri()}#{fragment}"], capture_output=True, text=True, check=False)
        assert "Content Security Policy" not in done.stderr
        return done.stdout

    return opened


def cells_of(dom: str) -> list[list[str]]:
    """The rows of the table that are there."""
    (body,) = re.findall("<tbody>(.*?)</tbody>", dom, re.DOTALL)
    found = [
        re.findall("<td[^>]*>(.*?)</td>", each, re.DOTALL) for each in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    ]
    return [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in each] for each in found]


def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    target = page(layered(tmp_path / "model.safetensors"), tmp_path)
    dom = browser(target)
    assert 'data-ready="true"' in dom
    assert "122 of 122 · 20.1 GB" in dom
    assert cells_of(dom)[0] == ["model.embed.weight", "bfloat16", "50000 × 8192", "409,600,000", "819 MB", "4.1%"]
    found = cells_of(browser(target, "q=mlp%20layers.7."))
    assert [each[0] for each in found] == ["model.layers.7.mlp.up.weight", "model.layers.7.mlp.down.weight"]
    inside = browser(target, "in=model.layers.3&colour=dtype&theme=dark")
    assert "5 of 122" in inside
    assert 'data-theme="dark"' in inside
    # A tile for every module and tensor that has a pixel: of the five tensors asked for, one is too small.
    drawn = [int(re.search(r'data-tiles="(\d+)"', each)[1]) for each in (dom, inside)]
    assert drawn[0] > 24 * 6
    assert 5 <= drawn[1] <= 9


def test_hostile_names_are_text_in_a_browser(browser: Any, tmp_path: Path) -> None:
    save_file(HOSTILE, tmp_path / "hostile.safetensors")
    dom = browser(page(tmp_path / "hostile.safetensors", tmp_path))
    assert 'data-ready="true"' in dom
    (title,) = re.findall("<title>(.*?)</title>", dom)
    assert title == "hostile.safetensors · ckptconv"
    names = [each[0] for each in cells_of(dom)]
    assert len(names) == len(HOSTILE)
    assert "</script><script>document.title='run'</script>" in names


def test_a_hundred_thousand_tensors_stay_usable(browser: Any, tmp_path: Path) -> None:
    tensors = {f"layers.{n // 500}.experts.{n % 500}.w": ("BF16", [8, 8], 128) for n in range(100_000)}
    target = page(write_header(tmp_path / "many.safetensors", tensors), tmp_path)
    assert target.stat().st_size < 10_000_000
    dom = browser(target, "q=199.experts.7.")
    assert "1 of 100,000" in dom
    every = browser(target)
    # Rows that are not seen are not there.
    assert 5 < len(cells_of(every)) < 200


def test_pictures_in_light_and_dark_are_not_empty(browser: Any, tmp_path: Path) -> None:
    target = page(layered(tmp_path / "model.safetensors"), tmp_path)
    for theme, size in (("light", "1400,1000"), ("dark", "420,900")):
        browser(target, f"theme={theme}", picture=tmp_path / f"{theme}.png", size=size)
        picture = (tmp_path / f"{theme}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        # A page without anything on it is a tenth of this.
        assert len(picture) > 40_000

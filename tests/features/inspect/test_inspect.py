"""inspect: what is shown of a checkpoint, on screens of any width, as JSON, and as a page in a real browser."""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import ZERO, ckptconv, ckptconv_here
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from processes import on_terminal
from safetensors.torch import save_file

import ckptconv as library
from ckptconv.cells import cells, cut, padded
from ckptconv.cli.lines import Line
from ckptconv.errors import UsageError
from ckptconv.features.inspect.module_tree import rows, tree
from ckptconv.features.inspect.overview import overview
from ckptconv.features.inspect.page import page_of
from ckptconv.features.inspect.summary import summarize
from ckptconv.features.reporting.tensor_info import TensorInfo
from ckptconv.formats.detect import open_source
from ckptconv.options.registered import missing

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Where `make test-page` installs it.
AXE = Path(__file__).parents[2] / "build/axe/node_modules/axe-core/axe.min.js"
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
    summary = summarize(open_source(path), path=str(path))
    return shown_lines(overview(summary, **options))


def shown_lines(lines: Iterable[Line]) -> list[str]:
    return ["".join(span.text for span in line) for line in lines]


# ------------------------------------------------------------------------------------------------------- the modules


def row(name: str, shape: tuple[int, ...] = (2,), dtype: str = "float32") -> TensorInfo:
    elements = 1
    for extent in shape:
        elements *= extent
    return TensorInfo(name, dtype, shape, 4 * elements)


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


@examples(80)
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


def test_rows_of_different_names_differ_in_any_width(tmp_path: Path) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{way}_proj.weight"
        for layer in (1, 11) for expert in (7, 17) for way in ("up", "down")
    ]  # fmt: skip
    save_file({name: torch.zeros(3, 4) for name in names}, tmp_path / "a.safetensors")
    summary = library.inspect(tmp_path / "a.safetensors", stats=True)
    for width in (40, 50, 60, 80, 100, 200, None):
        of_values = shown_lines(overview(summary, width=width, verbose=True))
        lines = of_values[next(at for at, line in enumerate(of_values) if "values:" in line) + 1 :]
        text = "".join(line.strip() for line in lines)
        assert all(name in text for name in names) or len({*lines}) == len(lines) == len(names) + 1, width
        assert width is None or not [line for line in lines if cells(line) > width], width


@pytest.mark.parametrize("width", [40, 50, 60])
def test_sizes_are_shown_in_little_room(width: int, tmp_path: Path) -> None:
    shown = "\n".join(lines_of(layered(tmp_path / "b.safetensors"), width=width))
    wide = lines_of(tmp_path / "b.safetensors", width=200)
    sizes = [size for line in wide for size in re.findall(r"[0-9.]+ [kMG]B(?=  +[0-9<])", line)]
    assert len(sizes) > 3
    assert [size for size in sizes if size not in shown] == []


@pytest.mark.parametrize(
    ("width", "label"),
    [(80, "layers.0…23. (24 alike) "), (60, "layers.0…23. ×24 "), (45, "layers.0…23. ×24 "), (30, "layer…0…23. ×24 ")],
)
def test_how_many_layers_are_alike_is_told_in_little_room(width: int, label: str, tmp_path: Path) -> None:
    lines = lines_of(layered(tmp_path / "model.safetensors"), width=width)
    assert [line.startswith(f"    {label}") for line in lines].count(True) == 1, lines


def test_options_for_another_kind_of_checkpoint_are_said_to_be_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, problem = ["inspect", "model.safetensors", "--raw"], "model.safetensors is in safetensors already"
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "model.pt")
    assert ckptconv_here("pt2safetensors", "model.pt").code == 0
    told = f"{words[-1]} has no effect: {problem}, but the option applies only to torch.save's checkpoints."
    run = ckptconv_here(*words)
    assert run.code == 0
    assert run.err == f"ckptconv: warning: {told}\n"
    assert ckptconv_here(*words, "--json").json["warnings"] == [told]
    # One that selects what is read.
    ckptconv_here(*words[:-1], "--tag", "9").refused(2, f"--tag has no effect: {problem}", "or leave --tag out")
    run = ckptconv_here("convert", "model.pt", "o.safetensors", "--unstack")
    run.refused(2, "--unstack has no effect: model.pt is written by torch.save", "only to Megatron-core's checkpoints")
    assert not Path("o.safetensors").exists()
    checkpoint = ZERO / "z2_bf16_tags_w2" / "checkpoint"
    assert ckptconv_here("inspect", checkpoint, "--tag", "global_step2").err == ""
    told = [ckptconv_here("convert", path, "out", "--raw").err for path in ("model.safetensors", "model.pt")]
    assert ["--raw has no effect:" in each for each in told] == [True, False]


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


@examples(80)
@given(st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=30), st.integers(3, 40))
def test_text_is_cut_to_cells(text: str, width: int) -> None:
    assert cells(cut(text, width)) <= max(width, 0)
    assert cut(text, cells(text)) == text
    assert cells(padded(text, 50)) == max(cells(text), 50)


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
    text = page_of(summarize(open_source(tmp_path / "a.safetensors"), path="/x/<b>&\"'"))
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
    ckptconv_here("inspect", path, "--html", old).refused(2, "ckptconv did not write")
    assert old.read_text() == "old"
    old.write_text('<!doctype html><meta name="generator" content="ckptconv">an earlier page')
    assert "wrote" in ckptconv_here("inspect", path, "--html", old).err
    assert old.read_text().startswith("<!doctype html>")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.pt", "old.html", "same.html"]


class Page:
    """A page in Chromium, driven over the pipe of its developers' protocol: keys are pressed, scripts evaluated."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        taken, self._out = os.pipe()
        self._in, given = os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=1300,1000"]
        # Chromium reads commands from descriptor 3 and answers on 4.
        begin = (
            "import os, sys; os.dup2(int(sys.argv[1]), 100); os.dup2(int(sys.argv[2]), 101); "
            "os.dup2(100, 3); os.dup2(101, 4); os.execv(sys.argv[3], sys.argv[3:])"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", begin, str(taken), str(given), *command, "about:blank"],
            stderr=subprocess.DEVNULL,
            pass_fds=(taken, given),
        )
        os.close(taken)
        os.close(given)
        self._rest, self._count, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        (target,) = [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        text = json.dumps({"id": self._count, "method": method, "params": parameters, **session})
        os.write(self._out, text.encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                piece = os.read(self._in, 1 << 16)
                assert piece, "Chromium is gone"
                self._rest += piece
            line, _, self._rest = self._rest.partition(b"\0")
            told = json.loads(line)
            if told.get("id") == self._count:
                assert "error" not in told, told
                return told["result"]
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(told["params"]))
            if told.get("method") == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])

    def js(self, expression: str) -> Any:
        """The value of an expression in the page, or of the promise that it is."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def settle(self, condition: str) -> None:
        """Wait until a condition holds in the page."""
        self.js(
            f"new Promise((done) => {{ const look = () => ({condition}) ? done(1) : setTimeout(look, 5); look(); }})"
        )

    def open(self, path: Path, fragment: str = "") -> None:
        self.ask("Page.navigate", url="about:blank")
        self.settle("location.href === 'about:blank'")
        self.ask("Page.navigate", url=f"{path.as_uri()}#{fragment}")
        self.settle("document.documentElement && document.documentElement.dataset.ready")

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"Enter": "\r"}.get(key, "")
            code = {"Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "End": 35}.get(key, 0)
            kind = "keyDown" if text else "rawKeyDown"
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def text(self, selector: str) -> str:
        found: str = self.js(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def fragment(self) -> dict[str, str]:
        found: dict[str, str] = self.js("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A page that can be driven."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    page = Page(tmp_path_factory.mktemp("driven"))
    yield page
    page.close()


@pytest.fixture
def browser(driven: Page) -> Any:
    """Opens a page: what became of it, as HTML; with a picture, if a path is given."""

    def opened(path: Path, fragment: str = "", *, picture: Path | None = None, size: tuple[int, int] = (0, 0)) -> str:
        driven.ask(
            "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
        )
        driven.open(path, fragment)
        if picture:
            picture.write_bytes(base64.b64decode(driven.ask("Page.captureScreenshot")["data"]))
        assert not driven.errors
        dom: str = driven.js("document.documentElement.outerHTML")
        return dom

    return opened


def test_the_map_goes_by_keys_and_links_follow(driven: Page, tmp_path: Path) -> None:
    target = page(layered(tmp_path / "model.safetensors"), tmp_path)
    driven.open(target)
    driven.js("byId('map').focus()")
    # The only module that is at the top is passed through: what is in it is shown at once.
    assert driven.text("#tile").startswith("layers.0…23 (24 alike): 120 tensors, 19.3 GB")
    driven.press("ArrowRight")
    assert driven.text("#tile").startswith("embed.weight: bfloat16, 50000 × 8192")
    driven.press("Home", "Enter")
    assert driven.fragment() == {"in": "model.layers.0…23"}
    assert driven.text("#crumbs").endswith("layers.0…2319.3 GB · 96% · 120 tensors")
    driven.press("End", "Enter")
    assert driven.fragment() == {"in": "model.layers.23"}
    assert driven.text("#found") == "5 of 122 · 805 MB"
    driven.press("Escape")
    assert driven.fragment() == {"in": "model.layers.0…23"}
    assert driven.text("#tile").startswith("23: 5 tensors")
    driven.js("history.back()")
    driven.settle("zoom.path === 'model.layers.23'")
    assert driven.text("#found") == "5 of 122 · 805 MB"
    # A tensor is shown in the table.
    driven.press("Home", "Enter", "Home", "Enter")
    assert driven.js("document.activeElement.tagName") == "TR"
    shared = driven.js("location.hash.slice(1)")
    found = driven.text("#found"), driven.text("#crumbs")
    driven.open(target, shared)
    assert (driven.text("#found"), driven.text("#crumbs")) == found
    assert not driven.errors
    assert all(url.startswith(("file:", "about:")) for url in driven.requests)


def test_the_table_goes_by_keys_and_names_are_copied(driven: Page, tmp_path: Path) -> None:
    driven.open(page(layered(tmp_path / "model.safetensors"), tmp_path))
    driven.js("document.querySelector('tbody tr[tabindex=\"0\"]').focus()")
    row = "document.activeElement.getAttribute('aria-rowindex')"
    seen = []
    for key in ("ArrowDown", "ArrowUp", "End", "Home", "PageDown"):
        driven.press(key)
        seen.append(int(driven.js(row)))
    assert seen[:4] == [3, 2, 123, 2]
    assert 10 < seen[4] < 40
    driven.press("Home", "Enter")
    assert driven.fragment() == {"at": "model.embed.weight"}
    driven.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    driven.js("document.querySelector('tbody .copy').click()")
    driven.settle("window.copied")
    assert driven.js("window.copied") == "model.embed.weight"
    # Where nothing may be copied, the text can be selected.
    driven.js("navigator.clipboard.writeText = async () => { throw 1; }; document.execCommand = () => false;")
    driven.js("byId('link').click()")
    driven.settle("document.activeElement.tagName === 'TEXTAREA'")
    assert driven.js("document.activeElement.value === location.href")


def test_all_rows_are_printed(driven: Page, tmp_path: Path) -> None:
    driven.open(page(layered(tmp_path / "model.safetensors"), tmp_path))
    rows = "document.querySelectorAll('tbody tr:not(.space)').length"
    assert driven.js(rows) < 122
    driven.js("dispatchEvent(new Event('beforeprint'))")
    assert driven.js(rows) == 122
    assert driven.js("[...document.querySelectorAll('details')].every((each) => each.open)")
    driven.js("dispatchEvent(new Event('afterprint'))")
    assert driven.js(rows) < 122


# What cuts text off, or keeps it in place while the rest is scrolled.
CUTTING = re.compile(
    r"(overflow|max-height|contain|white-space|position|min-width): "
    r"(?:hidden|auto|nowrap|pre|sticky|content|clamp|\d{3})"
)


def test_what_cuts_text_off_on_a_screen_does_not_on_paper() -> None:
    template = (Path(library.__file__).parent / "features/reporting/page.html").read_text()
    style, paper = template[template.index("<style>") : template.index("{{end}}</style>")].split("@media print {")
    rule = re.compile(r"([^{}]+)\{([^{}]*)\}")

    def told(css: str) -> list[tuple[str, str]]:
        return [(each.strip(), body) for names, body in rule.findall(css) for each in names.split(",")]

    printed = {(name, each.split(":")[0].strip()) for name, body in told(paper) for each in body.split(";")}
    hidden = {name for name, body in told(paper) if "display: none" in body}
    cut = {(name, each) for name, body in told(style) for each in CUTTING.findall(body)}
    assert len(cut) > 12
    # A bar holds no text, and the other is read aloud only.
    assert {name for name, _ in cut - printed} - hidden <= {".bar", ".unseen"}


def test_nothing_is_cut_off_on_paper(driven: Page, tmp_path: Path) -> None:
    name = f"model.layers.0.{'a_long_name_' * 12}.weight"
    save_file({name: torch.ones(3, 4), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    target = tmp_path / "page.html"
    assert ckptconv_here("inspect", tmp_path / "model.safetensors", "--stats", "--html", target, "-q").code == 0
    driven.open(target)
    driven.js("document.documentElement.dataset.theme = 'dark'")
    driven.ask("Emulation.setEmulatedMedia", media="print")
    driven.ask("Emulation.setDeviceMetricsOverride", width=718, height=1000, deviceScaleFactor=1, mobile=False)
    try:
        driven.js("dispatchEvent(new Event('beforeprint'))")
        cells = "[...document.querySelectorAll('th, td, .name span, li')].filter((each) => each.offsetWidth)"
        assert driven.js(f"{cells}.filter((each) => each.scrollWidth > each.clientWidth + 1 && each.clientWidth)") == []
        assert driven.js("document.documentElement.scrollWidth") <= 718
        assert (
            driven.js("[...document.querySelectorAll('.name')].some((each) => each.innerText.includes('…'))") is False
        )
        assert driven.js(
            "[...document.querySelectorAll('thead th')]"
            ".every((each) => each.offsetWidth || each.className.includes('share'))"
        )
        assert driven.js("getComputedStyle(document.body).color") == "rgb(28, 33, 39)"
    finally:
        driven.ask("Emulation.setEmulatedMedia", media="")


def test_statistics_are_columns_and_broken_tensors_are_marked(driven: Page, tmp_path: Path) -> None:
    tensors = {f"layers.{n}.mlp.{part}": torch.full((40, 40), float(n)) for n in range(12) for part in ("up", "down")}
    tensors["layers.7.mlp.up"][3, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    target = tmp_path / "page.html"
    assert ckptconv_here("inspect", "--stats", "--html", target, tmp_path / "model.safetensors").code == 0
    driven.open(target, "sort=-mean")
    heads = driven.js("[...document.querySelectorAll('thead th')].map((head) => head.textContent)")
    assert heads[-7:] == ["min", "max", "mean", "std", "Zeros", "NaN", "Inf"]
    assert driven.text("tbody tr:nth-child(2)").startswith("layers.11.mlp.down")
    # The layer that is broken is not folded with the others.
    assert driven.js("root.kids.get('layers').items.map((item) => item.name)") == ["0…6", "7", "8…11"]
    assert driven.text("#warnings").startswith("1 tensor with NaN or infinities.")
    driven.js("document.querySelector('#warnings button').click()")
    assert driven.text("#found").startswith("1 of 24")
    assert driven.text("tbody tr.broken").startswith("!layers.7.mlp.up")
    assert driven.fragment()["broken"] == "1"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: make test-page installs it")
def test_axe_finds_nothing(theme: str, driven: Page, tmp_path: Path) -> None:
    for number, path in enumerate((layered(tmp_path / "model.safetensors"), tmp_path / "hostile.safetensors")):
        save_file(HOSTILE, tmp_path / "hostile.safetensors")
        target = tmp_path / f"{number}.html"
        assert ckptconv_here("inspect", *["--stats"] * number, "--html", target, path).code == 0
        driven.open(target, f"theme={theme}")
        driven.js(AXE.read_text("utf-8") + "; 0")
        assert driven.js("axe.run().then((found) => found.violations.map((each) => each.help))") == []


def test_what_the_page_is_given_of_statistics(tmp_path: Path) -> None:
    save_file(
        {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([2**62, 1]), "c": torch.ones(0)},
        tmp_path / "m.safetensors",
    )
    target = tmp_path / "page.html"
    assert ckptconv_here("inspect", "--stats", "--html", target, tmp_path / "m.safetensors").code == 0
    (embedded,) = re.findall(r'id="data">(.*?)</script>', target.read_text("utf-8"), re.DOTALL)
    told = json.loads(embedded, parse_constant=pytest.fail)
    by_name = dict(zip(told["names"], told["stats"], strict=True))
    assert by_name["a"] == [1, 1, 1, 0, 0, 1, 0]
    assert by_name["b"][:2] == [1, str(2**62)]
    assert by_name["c"] == [None, None, None, None, 0, 0, 0]
    (embedded,) = re.findall(
        r'id="data">(.*?)</script>', page(tmp_path / "m.safetensors", tmp_path).read_text("utf-8"), re.DOTALL
    )
    assert json.loads(embedded)["stats"] is None


def cells_of(dom: str) -> list[list[str]]:
    """The rows of the table that are there."""
    (body,) = re.findall("<tbody>(.*?)</tbody>", dom, re.DOTALL)
    found = [
        re.findall("<td[^>]*>(.*?)</td>", each, re.DOTALL)
        for each in re.findall(r"<tr [^>]*aria-rowindex[^>]*>(.*?)</tr>", body, re.DOTALL)
    ]
    return [[html.unescape(re.sub("<button.*?</button>|<[^>]*>", "", cell)) for cell in each] for each in found]


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
    # A tile for every module and tensor, and one for layers that are alike, until they are opened.
    opened = browser(target, "in=model.layers.0…23")
    drawn = [int(re.search(r'data-tiles="(\d+)"', each)[1]) for each in (dom, opened, inside)]
    assert 8 < drawn[0] < 20
    assert drawn[1] >= 24 * 6
    assert 5 <= drawn[2] <= 9


def test_hostile_names_are_text_in_a_browser(browser: Any, tmp_path: Path) -> None:
    save_file(HOSTILE, tmp_path / "hostile.safetensors")
    dom = browser(page(tmp_path / "hostile.safetensors", tmp_path))
    assert 'data-ready="true"' in dom
    (title,) = re.findall("<title>(.*?)</title>", dom)
    assert title == "hostile.safetensors · ckptconv"
    names = [each[0] for each in cells_of(dom)]
    assert len(names) == len(HOSTILE)
    assert "</script><script>document.title='run'</script>" in names


def test_twenty_thousand_tensors_stay_usable(browser: Any, tmp_path: Path) -> None:
    tensors = {f"layers.{n // 500}.experts.{n % 500}.w": ("BF16", [8, 8], 128) for n in range(20_000)}
    target = page(write_header(tmp_path / "many.safetensors", tensors), tmp_path)
    assert target.stat().st_size < 2_000_000
    dom = browser(target, "q=39.experts.7.")
    assert "1 of 20,000" in dom
    every = browser(target)
    # Rows that are not seen are not there.
    assert 5 < len(cells_of(every)) < 200


def test_pictures_in_light_and_dark_are_not_empty(browser: Any, tmp_path: Path) -> None:
    target = page(layered(tmp_path / "model.safetensors"), tmp_path)
    for theme, size in (("light", (1400, 1000)), ("dark", (420, 900))):
        browser(target, f"theme={theme}", picture=tmp_path / f"{theme}.png", size=size)
        picture = (tmp_path / f"{theme}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        # A page without anything on it is a tenth of this.
        assert len(picture) > 40_000


def test_values_are_typed_and_on_the_page(tmp_path: Path) -> None:
    held = {"epoch": 2, "lr": 0.1, "done": True, "worst": float("nan"), "w": torch.zeros(2)}
    torch.save(held, tmp_path / "x.pt")
    run = ckptconv_here("inspect", tmp_path / "x.pt", "--json", "--html", tmp_path / "x.html")
    values = run.json["values"]
    assert (values["epoch"], values["lr"], values["done"], values["worst"]) == (2, 0.1, True, "nan")
    assert '["epoch","2"]' in (tmp_path / "x.html").read_text()


def test_values_are_those_of_json_and_others_are_documented_texts(tmp_path: Path) -> None:
    values = {
        "betas": ((0.9, None, True), [0.9, None, True]),
        "name": ("O'Neil", "O'Neil"),
        "long": ("x" * 300, "x" * 199 + "…"),
        "many": (list(range(30)), [*range(20), "…"]),
        "dtype": (torch.float16, "torch.float16"),
        "bytes": (b"\x00\xff", "00ff"),
        "complex": (1 + 2j, "1+2j"),
        "big": (2**70, "1180591620717411303424"),
        "worst": (float("-inf"), "-inf"),
        "best": (np.float64(0.3), 0.3),
        "half": (np.float16(0.5), 0.5),
        "seen": (np.int64(7), 7),
        "over": (np.bool_(True), True),
        "lost": (np.float32("nan"), "nan"),
        "rates": ([np.float64(0.1), 0.2], [0.1, 0.2]),
    }
    torch.save({"w": torch.ones(2), **{name: value for name, (value, _) in values.items()}}, tmp_path / "x.pt")
    wanted = {name: plain for name, (_, plain) in values.items()}
    assert ckptconv_here("inspect", tmp_path / "x.pt", "--json").json["values"] == wanted
    assert library.inspect(tmp_path / "x.pt").values == wanted
    shown = ckptconv_here("inspect", tmp_path / "x.pt", "--verbose").out
    assert "  betas: [0.9, null, true]\n" in shown
    assert "  name: O'Neil\n" in shown


class Slotted:
    """An object with a slot, beside a dict of attributes."""

    __slots__ = ("__dict__", "rank")

    def __init__(self) -> None:
        self.rank, self.host = 3, "a"


def test_the_attributes_of_objects_are_values(tmp_path: Path) -> None:
    inner = argparse.Namespace(lr=3e-4, arch="vit", betas=[0.9, 0.95], inner=argparse.Namespace(seed=1))
    inner.itself, inner.weight = inner, torch.ones(1)
    torch.save({"model": {"w": torch.ones(2)}, "args": inner, "slots": Slotted()}, tmp_path / "x.pt")
    values = library.inspect(tmp_path / "x.pt").values
    expected = {"lr": 3e-4, "arch": "vit", "betas": [0.9, 0.95], "inner.seed": 1}
    assert values == {**{f"args.{name}": value for name, value in expected.items()}, "slots.rank": 3, "slots.host": "a"}
    assert library.inspect(tmp_path / "x.pt", key="args").values == expected
    run = ckptconv_here("convert", tmp_path / "x.pt", tmp_path / "out", "--key", "slots")
    run.refused(2, "No tensor to convert is under 'slots'", "`ckptconv inspect` shows the values.")


def test_an_option_that_only_convert_has_is_refused_by_name(tmp_path: Path) -> None:
    for name, hint in (
        ("rename", ""),
        ("dtype", "In inspect, this option is as_: as_='bf16' shows the output of a cast."),
    ):
        with pytest.raises(UsageError, match=f"inspect has no option {name}, unlike convert; inspect has ") as caught:
            library.inspect(tmp_path / "x.pt", **{name: "a=b"})
        assert " stats, " in caught.value.message
        assert caught.value.hint == hint


def test_dtype_is_said_to_be_as_here(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    ckptconv_here("inspect", tmp_path / "m.pt", "--dtype", "bf16").refused(2, "In inspect, this option is --as DTYPE.")
    ckptconv_here("inspect", tmp_path / "m.pt", "--layer", "0").refused(2, "There is no option --layer. Use --include")
    words = ckptconv_here("inspect", tmp_path / "m.pt", "a.weight", "b.weight")
    words.refused(2, "Too many arguments", "To select tensors, use --include a.weight --include b.weight.")
    words = ckptconv_here("inspect", tmp_path / "m.pt", "--json", "out.json")
    words.refused(2, "Too many arguments", "--json takes no file: --json > out.json.")


@pytest.mark.skipif(bool(missing("order")), reason="no feature names states that are stored by numbers")
def test_options_of_conversions_are_named_with_their_command(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    state = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    torch.save(state, tmp_path / "optimizer.pt")
    text = " ".join(ckptconv_here("inspect", tmp_path, "--stats").out.split())
    left = tmp_path / "optimizer.pt"
    assert f"Not read: {left}. Use convert --optimizer PATH for its states." in text
    assert f"values: all values are finite in the 1 tensor read; not read: {left}" in text
    alone = ckptconv_here("inspect", tmp_path / "model.safetensors", "--stats").out
    assert "values: all values are finite in the 1 tensor read\n" in alone

"""What tests of the trunk ask of conversions of several inputs too."""

from __future__ import annotations

# ---------------------------------------------------------------------------------------------------- what is printed

MEANT = {"convert-all": "convert --output-dir DIR"}
# Words that are wrong, the exit code, and what is said.
LONG = "x" * 300
SAID = [(f"convert model.pt --output-dir {LONG}", 1, f"{LONG} cannot be written;too long")]
LACKING = [("convert a.pt b.pt -o out --output-dir d", "-o names one output")]

# --------------------------------------------------------------------------------------------------- what is replaced

REFUSED = """\
convert model.pt --output-dir .
convert a.pt --output-dir out
convert a.pt b.pt --output-dir out --output-name a.safetensors
convert hf --output-dir . --output-name step1
convert hf --output-dir . --output-name g1.safetensors
convert a.pt --output-dir . --output-name g1.safetensors
"""
DONE: dict[str, set[str]] = {
    "convert a.pt --output-dir out --overwrite": {"out/a.safetensors"},
    "convert b.pt --output-dir out": set(),
}
AGAIN = """\
convert a.pt b.pt --output-dir fresh
convert hf bin --output-dir fresh
"""
BY_BYTES = {"convert a.pt b.pt --output-dir fresh"}
REFUSED_THERE = ["convert a.pt --output-dir {place}"]
AGAIN_THERE = ["convert b.pt --output-dir {place}"]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "output-dir": ("x", ("convert", "MODEL", "--output-dir", "PATH")),
}
# Options of other programs, and the advice.
OTHER_OPTIONS = {
    "--out-dir": "Name OUTPUT last. For several inputs, use --output-dir DIR instead.",
    "--out-path": "Name OUTPUT last.",
}

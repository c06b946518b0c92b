"""Runs every command but `serve`, and the library, once, on whatever Python and libraries it is started with.

What extras bring is tried where it is installed. Inputs are written here, or are the small ones in tests/data. Prints
what was done; ends with an exit code.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import runpy
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
# The package of this checkout, wherever another is installed.
sys.path.insert(0, str(DATA.parents[1]))
LIBRARIES = (
    *("fsspec", "numpy", "rich", "safetensors", "tomli", "tqdm", "typer"),
    *("adlfs", "aiohttp", "blake3", "distributed", "gcsfs", "google-crc32c"),
    *("huggingface_hub", "s3fs", "torch", "xxhash", "zlib-ng", "zstandard"),
)
# A row of four items without a state: an id, a word of metadata, the weight.


class Smoke:
    """Runs commands in a directory of its own, and counts them."""

    def __init__(self, place: Path) -> None:
        from ckptconv.process import has_feature

        self.place = place
        self.count = 0
        # Has a conversion verify its output, where a feature does so.
        self.verifying = ["--verify"] if has_feature("verify") else []
        # Has the output that features read written without a structure record, where no feature reads one.
        self.readable = [] if has_feature("unflattening") else ["--no-structure"]

    def run(self, *arguments: object, code: int = 0, stdin: bytes = b"") -> str:
        """What a command prints; it has to end with `code`, and without a traceback."""
        command = [sys.executable, "-W", "error::SyntaxWarning", "-m", "ckptconv", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        done = subprocess.run(command, cwd=self.place, env=environment, input=stdin, capture_output=True, check=False)
        out, err = done.stdout.decode(), done.stderr.decode()
        if done.returncode != code or "Traceback" in err or "mistake in ckptconv" in err:
            raise SystemExit(f"{' '.join(command[3:])} ended with {done.returncode}:\n{out}{err}")
        self.count += 1
        return out

    def verify(self, *arguments: object, code: int = 0) -> None:
        """Verify an output, where a feature does so."""
        if self.verifying:
            self.run("verify", *arguments, code=code)

    def same(self, one: str, other: str) -> None:
        """The two files have the same bytes."""
        if (self.place / one).read_bytes() != (self.place / other).read_bytes():
            raise SystemExit(f"{one} and {other} differ, and should not.")


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file of {name: (dtype, shape, data)}."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def write_torch(path: Path, storages: dict[str, tuple[str, bytes, bytes]]) -> None:
    """A file of torch.save of flat tensors {name: (storage class, size as a pickle has it, data)}."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    tensors = b"".join(
        text(name)
        + b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + text("storage")
        + f"ctorch\n{cls}\n".encode()
        + text(str(number))
        + text("cpu")
        + size
        + b"tQK\0"
        + size
        + b"\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
        for number, (name, (cls, size, _)) in enumerate(storages.items())
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\2}(" + tensors + b"u.")
        for number, (_, _, data) in enumerate(storages.values()):
            archive.writestr(f"archive/data/{number}", data)
        archive.writestr("archive/version", b"3\n")


def convert(smoke: Smoke) -> None:
    """pt2safetensors."""
    numbers = {"a.weight": ("F32", [2, 3], struct.pack("<6f", *range(6))), "b": ("I64", [2], struct.pack("<2q", 7, 8))}
    write_safetensors(smoke.place / "first.safetensors", numbers)
    floats, counts = struct.pack("<6f", *range(6)), struct.pack("<2q", 7, 8)
    storages = {"a.weight": ("FloatStorage", b"K\6", floats), "b": ("LongStorage", b"K\2", counts)}
    write_torch(smoke.place / "model.pt", storages)
    smoke.run("pt2safetensors", "model.pt", *smoke.readable)
    smoke.verify("model.pt", "model.safetensors", *smoke.readable)
    smoke.run(
        "pt2safetensors", "model.pt", "half.safetensors", "--dtype", "bf16", "--exclude", "b", *smoke.verifying, "-v"
    )
    smoke.verify("model.pt", "half.safetensors", "--dtype", "bfloat16", "--exclude", "b")
    smoke.verify("model.pt", "half.safetensors", code=1)
    several = ["pt2safetensors", "model.pt", "several", "--max-shard-size", "30B", "--no-structure"]
    smoke.run(*several, "--manifest", "m.json", "--rename", "^=x.", "--jobs", "2")
    smoke.verify("model.pt", "several")
    report = json.loads(smoke.run(*several, "--dry-run", "--json"))
    if not (report["ok"] and report["dry_run"]):
        raise SystemExit(f"A dry run said {report}.")
    smoke.run("pt2safetensors", "model.pt", "--max_shard_size", "30B", "--dtype", "int4", code=2)
    smoke.run("pt2safetensors", "missing.pt", "--json", code=2)


def any_input(smoke: Smoke) -> None:
    """convert: one input, and safetensors to safetensors."""
    smoke.run("convert", "model.pt", "any.safetensors", *smoke.readable, *smoke.verifying)
    smoke.same("model.safetensors", "any.safetensors")
    smoke.run("convert", "first.safetensors", "cast.safetensors", "--dtype", "bf16", "--rename", "^a=c")
    smoke.verify("first.safetensors", "cast.safetensors", "--dtype", "bf16", "--rename", "^a=c")


def look(smoke: Smoke) -> None:
    """help, completion."""
    commands = ["convert", "pt2safetensors"]
    for words in ([], *([each] for each in commands)):
        if "Usage" not in smoke.run(*words, "--help"):
            raise SystemExit(f"The help of {words} says nothing of its usage.")
    if "--dtype" not in smoke.run("pt2safetensors", "--help"):
        raise SystemExit("--dtype is missing in the help.")
    smoke.run(code=2)
    print(f"  {smoke.run('--version').splitlines()[0]}")


def library(place: Path) -> None:
    """Every public name, and some calls."""
    os.chdir(place)
    import ckptconv
    from ckptconv.formats.detect import open_source

    for name in ckptconv.__all__:
        getattr(ckptconv, name)
    report = ckptconv.convert("model.pt", "library.safetensors", include=["a.*"])
    if report.tensors != 1:
        raise SystemExit(f"The library converted {report}.")
    source = open_source("model.pt")
    if set(ckptconv.flatten(source.weights)[0]) != {"a.weight", "b"}:
        raise SystemExit("The library lost a tensor.")
    try:
        ckptconv.convert("missing.pt", "x.safetensors")
    except ckptconv.UsageError:
        pass
    else:
        raise SystemExit("A missing input was converted.")


def extras(smoke: Smoke) -> None:
    """What the extras bring; of those for stores, that the package for the protocol can be imported."""
    smoke.run("convert", "model.pt", "digests", "--digest", "blake3", code=0 if installed("blake3") else 2)
    import fsspec

    for protocol, package in (("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs"), ("hf", "huggingface_hub")):
        if installed(package):
            fsspec.get_filesystem_class(protocol)
        else:
            smoke.run("convert", f"{protocol}://bucket/model.pt", "x", code=2)


def installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def of_features() -> Iterator[Callable[[Smoke], None]]:
    """Yield what tries the commands of each feature: `run` of smoke.py in the folder of its tests."""
    for path in sorted(Path(__file__).resolve().parents[1].glob("tests/features/*/smoke.py")):
        yield runpy.run_path(str(path))["run"]


def main() -> None:
    print(f"Python {sys.version.split()[0]}: {', '.join(f'{name} {version_of(name)}' for name in LIBRARIES)}")
    with tempfile.TemporaryDirectory() as directory:
        smoke = Smoke(Path(directory))
        for work in (convert, any_input, *of_features(), look, extras):
            work(smoke)
        library(smoke.place)
        print(f"  {smoke.count} commands and the library did what they should")


if __name__ == "__main__":
    main()

"""Plants faults into a copy of the package, one after the other, and says which of them the tests let live.

    python scripts/mutants.py              all of them
    python scripts/mutants.py untie safe   those whose place or text contains one of these words
    python scripts/mutants.py --check      runs nothing; exit code 1 where a fault is no longer a line of the package

Each is a line that somebody might have written wrong: the tests that are named with it must fail. Exit code 1 if they
do not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 2


class Mutant(NamedTuple):
    """In the module `place`, `right` becomes `wrong`; then one of `tests`, as pytest takes them, must fail."""

    place: str
    right: str
    wrong: str
    tests: str


MUTANTS = [
    Mutant(
        "plan",
        r"of-(?P<of>\d{5,6})",
        r"of-(?P<of>\d{5})",
        "tests/formats/test_alone.py",
    ),
    Mutant(
        "text",
        "least <= count <= most",
        "least <= count < most",
        "tests/test_text.py tests/test_options.py",
    ),
    Mutant(
        "tensors/strides",
        "            if stride != step:",
        "            if stride < step:",
        "tests/tensors",
    ),
    Mutant(
        "tensors/geometry",
        "        if step <= most:",
        "        if step < most:",
        "tests/tensors/test_lazy.py",
    ),
    Mutant(
        "formats/torch/zip",
        "        if size != nbytes:",
        "        if size < nbytes:",
        "tests/formats/torch/test_zip.py",
    ),
    Mutant(
        "storage/archive",
        "        if at != len(directory):",
        "        if False:",
        "tests/formats/torch/test_zip.py",
    ),
    Mutant(
        "tensors/kernels",
        "            result[special] = source[special]",
        "            pass",
        "tests/tensors",
    ),
    Mutant(
        "tensors/kernels",
        "    values &= values.dtype.type((1 << kernel.width) - 1)\n",
        "",
        "tests/tensors",
    ),
    Mutant(
        "structure/encoder",
        "if leaf.group not in self.shared:",
        "if True:",
        "tests/structure/test_keymap.py",
    ),
    Mutant(
        "tensors/lazy",
        "    if tensor.numel == 0:\n        return None",
        "    if tensor.numel == 0:\n        return ()",
        "tests/outputs tests/tensors",
    ),
    Mutant(
        "outputs/shards",
        "if current and filled + size > limit:",
        "if current and filled + size >= limit:",
        "tests/outputs",
    ),
    Mutant(
        "plan",
        "    for name in sorted(inputs):",
        "    for name in sorted(inputs)[:1]:",
        "tests/formats/test_source.py",
    ),
    Mutant(
        "storage/strict_json",
        '        raise TwiceError(f"it has {name[:100]!r} twice")',
        "        return made",
        "tests/storage/test_strict_json.py",
    ),
    Mutant(
        "storage/strict_json",
        "    if cost > MOST:",
        "    if cost > 100 * MOST:",
        "tests/storage/test_strict_json.py",
    ),
    Mutant(
        "pickles/machine",
        "pos += 1\n                        value = memo[index] if index < len(memo) else self.get(index)\n"
        "                        if value is HOLE:\n                            raise NotStoredError\n",
        "pos += 1\n                        value = memo[index] if index < len(memo) else self.get(index)\n",
        "tests/pickles",
    ),
    Mutant(
        "structure/keymap",
        "        new = (aliases or {}).get(new, new)\n",
        "",
        "tests/structure tests/outputs/test_selection.py",
    ),
    Mutant(
        "structure/reading",
        "if known != name and known in flat and name in flat:",
        "if known == name:",
        "tests/structure/test_keymap.py -k record_gives",
    ),
    Mutant(
        "formats/safetensors",
        "    if length > size - 8:",
        "    if length > size:",
        "tests/formats/test_safetensors.py",
    ),
    Mutant(
        "formats/safetensors",
        "                if metadata is not None:\n",
        "                if False:\n",
        "tests/formats/test_safetensors.py tests/storage/test_strict_json.py",
    ),
    Mutant(
        "pickles/nodes",
        "    return node.name if type(node) is Opaque else",
        "    return node.name if type(node) is Composite else",
        "tests/pickles/test_nodes.py",
    ),
    Mutant(
        "outputs/selection",
        "    return {alias: aliases.get(owner, owner) for alias, owner in aliases.items()}",
        "    return aliases",
        "tests/outputs/test_selection.py -k alias",
    ),
    Mutant(
        "outputs/selection",
        "    return source if widen_only and (source.itemsize > target.itemsize or source.itemsize == 1) else target",
        "    return source if widen_only and source.itemsize > target.itemsize else target",
        "tests/outputs/test_selection.py -k widened",
    ),
    Mutant(
        "outputs/kinds",
        "all(option in kind.refused or option in kind.idle for kind in every)",
        "all(option in kind.refused for kind in every)",
        "tests/outputs/test_kinds.py -k several_outputs",
    ),
    Mutant(
        "outputs/kinds",
        "(value is not False or OPTIONS[option].default is True)",
        "value is not False",
        "tests/outputs/test_kinds.py -k structure",
    ),
    Mutant(
        "publish/present",
        "    if not options.clobber:\n        raise",
        "    if False:\n        raise",
        "tests/outputs/test_kinds.py -k clobber",
    ),
    Mutant(
        "publish/present",
        "        if _is_like(claim, file_made_as(place, claim.made_as)):",
        "        if True:",
        "tests/publish/test_replacing.py -k not_replaced",
    ),
    Mutant(
        "publish/present",
        "        if foreign:\n            listed =",
        "        if False:\n            listed =",
        "tests/publish/test_replacing.py -k not_replaced",
    ),
    Mutant(
        "storage/marks",
        "        return label if (int(size), int(time)) == (status.st_size, status.st_mtime_ns) else CHANGED",
        "        return label",
        "tests/publish/test_replacing.py -k changed_since",
    ),
    Mutant(
        "outputs/targets",
        '    if kind in ("file", "directory"):\n        return',
        "    if True:\n        return",
        "tests/outputs/test_kinds.py -k another",
    ),
    Mutant(
        "formats/source",
        "            return cls(*values)",
        "            return tuple.__new__(cls, values)",
        "tests/formats/test_source.py -k checked",
    ),
    Mutant(
        "publish/staging/local",
        "or now.st_size != size or",
        "or",
        "tests/publish/test_resume.py tests/publish/test_crash.py",
    ),
    Mutant(
        "storage/syncing",
        "        for thread in self._running:",
        "        for thread in self._running[1:]:",
        "tests/storage/test_writing.py",
    ),
    Mutant(
        "publish/staging/local",
        "sorted(names, key=lambda name: (name == self.index, name == MANIFEST))",
        "sorted(names, key=lambda name: (name != self.index, name == MANIFEST))",
        "tests/publish/test_crash.py -k any_moment",
    ),
    Mutant(
        "storage/syncing",
        "self._stopped |= kind is not None",
        "self._stopped = kind is not None",
        "tests/storage/test_writing.py",
    ),
    Mutant(
        "outputs/targets",
        "if said and said not in NAMED[to]:",
        "if said not in NAMED[to] and said not in KINDS:",
        "tests/outputs/test_to.py -k another_kind",
    ),
    Mutant(
        "outputs/targets",
        'if output is None or kind_of(output) in NAMED[to]:\n            options = options.replaced(to="")',
        "if False:\n            pass",
        "tests/outputs/test_to.py -k the_same",
    ),
]
# Those of features stand in the folders of their tests.
for _path in sorted([*ROOT.glob("tests/features/*/mutants.json"), *ROOT.glob("tests/features/*/with_*/mutants.json")]):
    MUTANTS += [Mutant(*fault) for fault in json.loads(_path.read_text("utf-8"))]


def faults() -> Iterator[str]:
    """Yield what is wrong with the table: a fault that is not exactly once in its module, tests that are not there."""
    for mutant in MUTANTS:
        count = _module(ROOT, mutant).read_text("utf-8").count(mutant.right)
        if count != 1 or mutant.right == mutant.wrong:
            yield f"{mutant.place} has {count} times: {mutant.right}"
        for path in mutant.tests.split(" -k ")[0].split():
            if not (ROOT / path).exists():
                yield f"there is no {path}"


def _module(root: Path, mutant: Mutant) -> Path:
    return root / "ckptconv" / f"{mutant.place}.py"


def lives(mutant: Mutant) -> bool:
    """Whether all tests pass with this fault."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        shutil.copytree(ROOT / "ckptconv", copy / "ckptconv")
        for name in (
            "tests",
            "scripts",
            "docs",
            "examples",
            "pyproject.toml",
            "CONTRIBUTING.md",
            "README.md",
            "CHANGELOG.md",
        ):
            (copy / name).symlink_to(ROOT / name)
        module = _module(copy, mutant)
        module.write_text(module.read_text("utf-8").replace(mutant.right, mutant.wrong), "utf-8")
        tests, _, chosen = mutant.tests.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--basetemp", f"{copy}/t"]
        command += [*tests.split(), *(["-k", chosen] if chosen else [])]
        environment = {**os.environ, "PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.place}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main(words: list[str]) -> int:
    wrong = list(faults())
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if wrong or words == ["--check"]:
        return bool(wrong)
    chosen = [each for each in MUTANTS if not words or any(word in each.place + each.right for word in words)]
    alive = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for each, living in zip(chosen, pool.map(lives, chosen), strict=True):
            if living:
                alive.append(each)
                print(f"lives: {each.place}: {each.right!r} as {each.wrong!r}, with {each.tests}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} faults were found.")
    return bool(alive)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Loads what the grammar of scan allows, with traps in the place of objects, and says which names call a trap.

    python scripts/scan/traps.py [--python PYTHON …] [--rounds N] [--seed N]

For each name in ckptconv/features/scan/grammar it makes pickles that a production allows. Wherever a production takes
any object, it puts a trap; a state also gets a trap for each method that the class has, and each name that its
`__setstate__` looks up. Those that scan calls safe are loaded by PYTHON, an interpreter that has the libraries (this
one, if none is named). An object is hashed and compared too, as a key of a dict is. The exit code is 1 if loading
calls a trap, calls one of its attributes, starts something, opens a file to write it, or takes more than five seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# Run by PYTHON. "names": of each class, its methods and the names that its setter looks up; "load": what fires.
VICTIM = r"""
import base64, collections, importlib, io, json, os, pickle, resource, signal, sys, warnings
warnings.simplefilter("ignore")
told, sys.stdout = sys.stdout, open(os.devnull, "w")
fired, on = [], False
for name in "numpy torch transformers sklearn pandas accelerate xgboost torchao networkx".split():
    # What a first import does counts for no name.
    try:
        importlib.import_module(name)
    except BaseException:
        pass
try:
    # Nor does what is imported when tensors without storage are first compared, as below: a whole compiler.
    empty = sys.modules["torch"].empty_strided((1,), (1,), device="meta")
    empty == empty, empty == 1
except BaseException:
    pass
def get(module, name):
    value = importlib.import_module(module)
    for step in name.split("."):
        value = getattr(value, step)
    return value
def names_of(cls):
    found = {name for name in dir(cls) if not name.startswith("__") and callable(getattr(cls, name, None))}
    for base in cls.__mro__:
        for each in ("__setstate__", "__hash__", "__eq__", "__getattr__"):
            code = getattr(vars(base).get(each), "__code__", None)
            if code is not None:
                words = (*code.co_names, *code.co_consts)
                found |= {word for word in words if type(word) is str and word.isidentifier()}
    return sorted(name for name in found if not name.startswith("__"))[:300]
class Called:
    def __init__(self, name):
        self.name = name
    def __call__(self, *args, **kwargs):
        fired.append(f"calls .{self.name}")
        return Trap()
class Trap:
    def __getattr__(self, name):
        # No state that the grammar takes has such a name.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Called(name)
    def __setstate__(self, state):
        pass
    def __call__(self, *args, **kwargs):
        fired.append("calls it")
def special(name):
    def method(self, *args):
        fired.append(f"looks {name}")
        raise TypeError(name)
    return method
for name in "getitem len iter contains index int float add mul lt setitem enter next fspath".split():
    setattr(Trap, f"__{name}__", special(f"__{name}__"))
class Unpickler(pickle.Unpickler):
    def persistent_load(self, pid):
        return None
    def find_class(self, module, name):
        return Trap if (module, name) == ("argparse", "Namespace") else super().find_class(module, name)
BAD = ("os.", "subprocess.", "shutil.", "socket.", "pty.", "webbrowser")
def hook(event, args):
    is_bad = event.startswith(BAD) and event not in ("os.listdir", "os.scandir")
    if on and (is_bad or event == "open" and args[1] not in ("r", "rb", None)):
        fired.append(f"does {event} {args}"[:150])
    # Classes of data compile their own methods; the text in a pickle names `__import__`.
    if on and event == "compile" and "__import__(" in str(args[0]):
        fired.append(f"does {event} {args}"[:150])
sys.addaudithook(hook)
def late(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, late)
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
if sys.argv[1] == "names":
    out = {}
    for line in sys.stdin:
        module, name = json.loads(line)
        signal.alarm(120)
        try:
            value = get(module, name)
            out[f"{module} {name}"] = names_of(value) if isinstance(value, type) else []
        except BaseException:
            pass
        signal.alarm(0)
    print(json.dumps(out), file=told)
else:
    for line in sys.stdin:
        module, name, data = json.loads(line)
        fired.clear()
        result = "made"
        try:
            get(module, name)
        except BaseException:
            print(json.dumps([module, name, "is not at hand", []]), file=told, flush=True)
            continue
        on = True
        signal.alarm(5)
        try:
            value = Unpickler(io.BytesIO(base64.b64decode(data))).load()
            try:
                hash(value), value == value, value == 1
            except TimeoutError:
                raise
            except BaseException:
                pass
        except TimeoutError:
            fired.append("takes time")
        except MemoryError:
            fired.append("takes memory")
        except BaseException as error:
            result = f"raises {type(error).__name__}"
        signal.alarm(0)
        on = False
        print(json.dumps([module, name, result, sorted(set(fired))]), file=told, flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="an interpreter that has the libraries")
    parser.add_argument("--rounds", type=int, default=3, help="pickles for each name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="say what looks into a trap, too")
    asked = parser.parse_args()
    code = 0
    # They run in a directory of their own.
    for python in map(os.path.abspath, asked.python or [sys.executable]):
        counts, lines = run(python, asked.rounds, asked.seed)
        grave = [line for line in lines if asked.verbose or " looks " not in line]
        print(f"{python}: {counts}", *grave, sep="\n  ")
        code |= any(" looks " not in line for line in grave)
    return code


def run(python: str, rounds: int, seed: int) -> tuple[str, list[str]]:
    """Load pickles of all names that `python` has. Return what was counted, and each name with what it did."""
    from features.scan.sampling import Sampler
    from features.scan.verdicts import found

    sampler = Sampler(random.Random(seed))
    sampler.has_traps = True
    every = list(sampler.lines)
    sampler.methods = json.loads(_victim(python, "names", every)[0])
    at_hand = [name for name in every if " ".join(name) in sampler.methods]
    made, refused, missed = [], set(), set()
    for module, name in at_hand:
        for _ in range(rounds):
            try:
                data = b"\x80\x04" + sampler.made(module, name) + b"."
            except ValueError:
                missed.add((module, name))
                continue
            if found(data):
                refused.add((module, name))
            else:
                made.append((module, name, data))
    results = _loaded(python, made)
    did: dict[str, None] = {}
    loaded = set()
    for module, name, result, fired in results:
        if result == "made":
            loaded.add((module, name))
        did |= dict.fromkeys(f"{module}.{name} {what}" for what in fired)
    names = {(module, name) for module, name, _ in made}
    counts = (
        f"{len(at_hand)} of {len(every)} names at hand, {len(names)} with what the grammar allows, "
        f"{len(loaded)} loaded, "
        f"{len(made)} pickles; {len(refused - names)} only refused, {len(missed - names)} not made"
    )
    return counts, sorted(did)


def _victim(python: str, what: str, lines: Sequence[tuple[str, ...]]) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        text = "\n".join(map(json.dumps, lines))
        command = [python, "-c", VICTIM, what]
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=directory, check=False)
        return done.stdout.splitlines()


def _loaded(python: str, made: list[tuple[str, str, bytes]]) -> list[tuple[str, str, str, list[str]]]:
    """Load pickles; where one kills the interpreter, say so, and go on after it."""
    import base64

    results: list[tuple[str, str, str, list[str]]] = []
    todo = [(module, name, base64.b64encode(data).decode()) for module, name, data in made]
    while todo:
        told = [json.loads(line) for line in _victim(python, "load", todo)]
        results += [tuple(each) for each in told]
        if len(told) == len(todo):
            break
        module, name, _ = todo[len(told)]
        results.append((module, name, "ends", ["crashes the interpreter"]))
        todo = todo[len(told) + 1 :]
    return results


if __name__ == "__main__":
    sys.exit(main())

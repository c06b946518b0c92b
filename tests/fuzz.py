"""Changes sound checkpoints in ways that writers and attackers might, converts them, and reads them as others do.

    python tests/fuzz.py [--seconds 60] [--seed N] [--only KIND] [--keep DIRECTORY]

Conversions (`READERS`): each ends in success or in one of our errors, soon and in little memory. A success has to be
what torch reads, where torch can read it. What fails is kept, with the seed and round that make it again.

Comparisons (`differential`): what we read is what Python, torch, zipfile and safetensors read, or we refuse. What is
found is printed, and with `--keep` written there, as small as a short search can make it. A kind of both, such as zip,
is converted for half of its time, and compared for the other.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import io
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import computed
import torch
from attacks.assemble import DATA, Member, zipped
from cells import VERIFIED, of_features, verify
from differential.cases import KINDS
from differential.hunt import Hunter, limited, told
from differential.trees import bits
from mutations import VALUES, members_of, of_bytes, of_json, of_members, of_pickle
from records import read_by_the_book
from safetensors import safe_open
from safetensors.torch import load_file
from samples import TREES, ZIPS

from ckptconv.conversion import convert
from ckptconv.errors import CkptconvError
from ckptconv.options.table import OPTIONS
from ckptconv.outputs import planning
from ckptconv.outputs.kinds import NAMED
from ckptconv.outputs.targets import MANIFEST
from ckptconv.structure.record import METADATA_KEY

# What safetensors are converted to.
BACK = "out.pt" if "pt" in NAMED else "out.safetensors"
SECONDS_EACH = 10
MEMORY = 512 << 20


# ----------------------------------------------------------------------------------------------------- checkpoints


def changed_zip(chance: random.Random) -> bytes:
    parts = members_of(chance.choice(ZIPS))
    kind = chance.randrange(4)
    if kind == 0:
        return of_bytes(zipped(parts), chance)
    if kind == 1:
        return of_members(parts, chance)
    at = next(index for index, part in enumerate(parts) if str(part.name).endswith("data.pkl"))
    parts[at] = parts[at].changed(data=of_pickle(parts[at].data, chance))
    return zipped(parts)


def network() -> torch.nn.Module:
    """A tie, a module at two places, and buffers that are not saved."""
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2), torch.nn.LSTM(2, 2)
    )
    model.again = model[0]
    model[2].bias = torch.nn.Parameter(model[0].weight[:, 0].detach())
    model.register_buffer("passing", torch.ones(2), persistent=False)
    return model.eval()


def quantized() -> torch.nn.Module:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: torch.nn.Module = torch.ao.quantization.quantize_dynamic(layers, {torch.nn.Linear}, dtype=torch.qint8)
    return made


@functools.cache
def modules() -> list[list[Member]]:
    """Archives of whole modules."""
    found = []
    for each in (network(), {"epoch": 1, "model": network(), "ema": (network(),)}, quantized()):
        buffer = io.BytesIO()
        torch.save(each, buffer)
        found.append(members_of(buffer.getvalue()))
    return found


def changed_module(chance: random.Random) -> bytes:
    parts = [*chance.choice(modules())]
    at = next(index for index, part in enumerate(parts) if str(part.name).endswith("data.pkl"))
    parts[at] = parts[at].changed(data=of_pickle(parts[at].data, chance))
    return zipped(parts)


# ----------------------------------------------------------------------------------------------------------- checks


def ending(call: Callable[[], object]) -> str:
    """Make a call; the kind of error it ends with, or "done"."""
    started = time.process_time()
    try:
        call()
        kind = "done"
    except CkptconvError as error:
        kind = error.kind if error.message else "nothing said"
    assert kind != "nothing said"
    assert time.process_time() - started < SECONDS_EACH, "it took too long"
    return kind


def outcome(path: Path, output: Path, **options: Any) -> str:
    """Convert and inspect a file; the kind of error it ends with, or "done"."""
    kind = ending(
        lambda: (
            convert(path, output, fsync=False, jobs=1, **options),
            *(look(path) for look in of_features("look_at")),
        )
    )
    assert kind == "done" or not output.exists(), "an output of a conversion that failed"
    return kind


def paired(theirs: Any, ours: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor, Any]]:
    """The strided tensors of a tree that torch has read, and what stands in their places in ours."""
    seen: set[int] = set()
    stack = [(path, theirs, ours)]
    while stack:
        path, theirs, ours = stack.pop()
        if isinstance(theirs, torch.Tensor):
            if not (theirs.is_quantized or theirs.is_nested or theirs.is_meta) and theirs.layout == torch.strided:
                yield path, theirs, ours
        elif isinstance(theirs, (dict, list, tuple)) and id(theirs) not in seen:
            seen.add(id(theirs))
            assert isinstance(ours, type(theirs)), f"{path} is another container"
            assert len(ours) == len(theirs), f"{path} has another length"
            if not isinstance(theirs, dict):
                stack.extend((f"{path}.{at}", *both) for at, both in enumerate(zip(theirs, ours, strict=True)))
                continue
            for key, value in theirs.items():
                if type(key) in (str, int):
                    assert key in ours, f"{path}.{key} is missing"
                    stack.append((f"{path}.{key}", value, ours[key]))


def check_tensors(tree: Any, output: Path) -> None:
    """All tensors of a tree that torch has read have to be in the output, in their places."""
    with safe_open(output, "pt") as opened:
        structure = (opened.metadata() or {}).get(METADATA_KEY)
    for name, tensor, found in paired(tree, read_by_the_book(load_file(output), structure)):
        assert isinstance(found, torch.Tensor), f"{name} is no tensor"
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), f"{name} has another dtype or shape"
        assert bits(found) == bits(tensor), f"{name} is wrong"


def check_success(path: Path, output: Path) -> bool:
    """Whether torch reads the file too; if it does, all its tensors have to be there again."""
    try:
        with limited():
            tree = torch.load(path, weights_only=True, map_location="cpu")
    except BaseException:
        return False
    check_tensors(tree, output)
    return True


def fuzz_files(make: Callable[[random.Random], bytes], chance: random.Random, place: Path) -> str:
    path, output = place / "model.pt", place / "out.safetensors"
    path.write_bytes(make(chance))
    kind = outcome(path, output)
    if kind == "done":
        kind += ", as torch reads it" if check_success(path, output) else ", which torch does not read"
        output.unlink()
    return kind

    output.unlink(missing_ok=True)
    return ended


def fuzz_bits(chance: random.Random, place: Path) -> str:
    """One flipped bit, with --checksum: refused, or right."""
    which = chance.randrange(2)  # of the others not everything is a tensor by its own name
    data = bytearray(ZIPS[which])
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path, output = place / "model.pt", place / "out.safetensors"
    path.write_bytes(data)
    kind = outcome(path, output, checksum=True)
    if kind == "done":
        check_tensors(TREES[which], output)
        output.unlink()
    return kind


# ------------------------------------------------------------------------------------------------------ safetensors


def tree_of_all() -> dict[str, Any]:
    """A tree with as many kinds of nodes as a record has."""
    shared = torch.arange(12.0)
    network = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {
        "views": [shared[:6].view(2, 3), shared[3:9], shared.view(3, 4).t()],
        "optimizer": optimizer.state_dict(),
        "others": (1.5, None, b"x", {1, 2}, 1 << 70, torch.Size([2]), torch.float16, torch.device("cpu"), slice(1)),
        "sparse": torch.eye(2).to_sparse(),
        "double": torch.ones(2, dtype=torch.complex128),
    }


@functools.cache
def flat_files() -> list[tuple[dict[str, Any], bytes]]:
    """Sound safetensors files: header and data."""
    files = []
    with tempfile.TemporaryDirectory() as place:
        for index, tree in enumerate([*TREES, tree_of_all()]):
            path, output = Path(place) / "model.pt", Path(place) / f"{index}.safetensors"
            torch.save(tree, path)
            convert(path, output, fsync=False)
            data = output.read_bytes()
            stop = 8 + int.from_bytes(data[:8], "little")
            files.append((json.loads(data[8:stop]), data[stop:]))
    return files


def held(header: str, data: bytes) -> bytes:
    raw = header.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + data


def changed_safetensors(chance: random.Random) -> bytes:
    header, data = chance.choice(flat_files())
    record = header["__metadata__"].get("ckptconv.structure")
    kind = chance.randrange(10)
    if kind == 0:
        return of_bytes(held(json.dumps(header), data), chance)
    others = of_features("SAFETENSORS")
    if kind == 1 and others:
        tensors, metadata = chance.choice(others)(chance)
        return held(json.dumps({**({"__metadata__": metadata} if metadata else {}), **tensors}), DATA)
    if kind < 7 and record:
        changed = of_json(json.loads(record), chance)
        metadata = {**header["__metadata__"], "ckptconv.structure": changed}
        return held(json.dumps({**header, "__metadata__": metadata}), data)
    return held(of_json(header, chance), data)


def spans_of(data: bytes) -> set[bytes]:
    """The bytes of every tensor of a safetensors file."""
    stop = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:stop])
    header.pop("__metadata__", None)
    return {data[stop:][slice(*entry["data_offsets"])] for entry in header.values()}


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    """The strided tensors of a tree that is no cycle."""
    stack, seen = [tree], set()
    while stack:
        node = stack.pop()
        if isinstance(node, torch.Tensor):
            if node.layout == torch.strided and not node.is_quantized and not node.is_meta:
                yield node
        elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            stack += node.values() if isinstance(node, dict) else node


def fuzz_way_back(source: Path, output: Path, files: list[bytes]) -> str:
    """To a file for torch.load, or another of safetensors: it holds no bytes but those of a tensor of `files`."""
    kind = outcome(source, output)
    if kind == "done":
        try:
            tree = torch.load(output, weights_only=False) if output.suffix == ".pt" else load_file(output)
        except (RuntimeError, TypeError, ValueError):
            kind += ", which torch does not read"  # the record may say what no tensor can be
        else:
            kind += ", as torch reads it"
            spans = set.union(*map(spans_of, files))
            for leaf in leaves(tree):
                assert bits(leaf) in spans, "a tensor is wrong"
        output.unlink()
    return kind


def fuzz_safetensors(chance: random.Random, place: Path) -> str:
    """One file: its header, its record, or names that are pickles."""
    path, output = place / "model.safetensors", place / BACK
    data = changed_safetensors(chance)
    path.write_bytes(data)
    return fuzz_way_back(path, output, [data])


def fuzz_set(chance: random.Random, place: Path) -> str:
    """Several files, their index, and the record beside."""
    header, data = flat_files()[0]
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    names = [f"model-0000{number}-of-0000{len(entries)}.safetensors" for number in range(1, len(entries) + 1)]
    directory, output = place / "set", place / BACK
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    files = {}
    for file, (name, entry) in zip(names, entries.items(), strict=True):
        start, stop = entry["data_offsets"]
        files[file] = held(json.dumps({name: {**entry, "data_offsets": [0, stop - start]}}), data[start:stop])
    index = {"metadata": {"total_size": len(data)}, "weight_map": dict(zip(entries, names, strict=True))}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    root = ["odict", None, *itertools.chain.from_iterable((name, {}) for name in entries)]
    files["ckptconv.structure.json"] = json.dumps({"version": 1, "root": root}).encode()
    victim = chance.choice(sorted(files))
    if victim.endswith(".json"):
        files[victim] = of_json(json.loads(files[victim]), chance).encode()
    else:
        files[victim] = of_bytes(files[victim], chance)
    for file, content in files.items():
        (directory / file).write_bytes(content)
    return fuzz_way_back(directory, output, [files[name] for name in names])


# ----------------------------------------------------------------------------------------- descriptions of computations


def quantized_cases() -> list[Path]:
    """The checkpoints of every dialect."""
    every = (path for dialects in of_features("DIALECTS") for path in dialects.QUANTIZED.iterdir())
    return sorted(path for path in every if (path / "config.json").exists())


def changed_record(names: list[str], chance: random.Random) -> str:
    """The record of a flat state of these tensors, changed."""
    root = ["odict", None, *itertools.chain.from_iterable((name, {}) for name in names)]
    return of_json({"version": 1, "root": root}, chance)


# Words of expressions.
WORDS = ["own", "e2m1", "int4", "int3", "awq", "table4", "table8", "int9", "scale", "zero", "index", "table", "shift"]
WORDS += ["float32", "bfloat16", "float16", "float8_e8m0fnu", "int8", "uint8", "int32", "codes", "scales", "global", ""]


def fuzz_quantized(chance: random.Random, place: Path) -> str:
    """A quantized checkpoint whose configuration, header, structure record or bytes are changed: weights, or a
    refusal."""
    directory, output = place / "quantized", place / "out.safetensors"
    shutil.rmtree(directory, ignore_errors=True)
    case = chance.choice(quantized_cases())
    shutil.copytree(case, directory, ignore=shutil.ignore_patterns("expected*", "*.md"))
    victim = chance.choice(sorted(directory.iterdir()))
    data = victim.read_bytes()
    if victim.suffix == ".json":
        victim.write_text(of_json(json.loads(data), chance))
    elif chance.random() < 0.7:
        stop = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:stop])
        changed = of_json(header, chance)
        if chance.random() < 0.4:
            names = [name for name in header if name != "__metadata__"]
            changed = json.dumps({**header, "__metadata__": {METADATA_KEY: changed_record(names, chance)}})
        victim.write_bytes(held(changed, data[stop:]))
    else:
        victim.write_bytes(of_bytes(data, chance))
    ended = outcome(directory, output, dequantize=True, **VERIFIED)
    assert ended != "difference", "what was written is not what verify computes"
    output.unlink(missing_ok=True)
    return ended


# ------------------------------------------------------------------------------------------ what is left for later runs


@functools.cache
def outputs() -> list[tuple[Path, Path]]:
    """Sources, and outputs of them with manifests: of what is computed, shards, and states."""
    here = Path(tempfile.mkdtemp(prefix="made-"))
    atexit.register(shutil.rmtree, here, ignore_errors=True)
    computed.sources(here)
    (here / "made").mkdir()
    made = []
    for way, (job, name) in computed.JOBS.items():
        job(here, name, here / "made" / way)
        made.append((here / name, here / "made" / way))
    source = here / "trained.pt"
    torch.save({f"l{number}.weight": torch.arange(40.0).reshape(5, 8) + number for number in range(9)}, source)
    convert(source, here / "shards", max_shard_size=500, digest="sha256", fsync=False)
    others = ((source, make(source, here)) for make in of_features("with_manifest"))
    return [*made, (source, here / "shards"), *others]


def changed_manifest(path: Path, chance: random.Random) -> str:
    """A manifest with something changed, or with an option that the conversion did not have."""
    told = json.loads(path.read_text())
    if chance.random() < 0.4:
        told["options"][chance.choice(sorted(OPTIONS))] = chance.choice([*VALUES, *WORDS])
        return json.dumps(told)
    return of_json(told, chance)


def fuzz_manifest(chance: random.Random, place: Path) -> str:
    """A changed manifest, given to `verify`, or in the directory of an output that is made again. A file that no
    manifest has is still there afterwards."""
    source, output = chance.choice(outputs())
    manifest = place / "manifest.json"
    manifest.write_text(changed_manifest(output / MANIFEST, chance))
    if VERIFIED and chance.random() < 0.7:
        return ending(lambda: verify(source, output, manifest=manifest))
    again = place / "again"
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(output, again)
    (again / "notes.txt").touch()
    shutil.copy(manifest, again / MANIFEST)
    ended = ending(lambda: convert(source, again, overwrite=chance.random() < 0.5, fsync=False))
    assert (again / "notes.txt").exists(), "a file of others is gone"
    return ended


READERS: dict[str, Callable[[random.Random, Path], str]] = {
    "zip": lambda chance, place: fuzz_files(changed_zip, chance, place),
    "module": lambda chance, place: fuzz_files(changed_module, chance, place),
    "safetensors": fuzz_safetensors,
    "set": fuzz_set,
    "bits": fuzz_bits,
    **({"quantized": fuzz_quantized} if quantized_cases() else {}),
    "manifest": fuzz_manifest,
    **{name: work for works in of_features("FUZZED") for name, work in works.items()},
}


def memory() -> int:
    """The most memory that this process has held."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def run(reader: str, seed: int, *, seconds: float = 0, rounds: int = 0) -> Counter[str]:
    """Fuzz `reader` for so many seconds or rounds; how often it ended how. AssertionError says what makes it again."""
    ends: Counter[str] = Counter()
    stop = time.monotonic() + seconds if seconds else float("inf")
    room, planning.ROOM_TO_GROW = planning.ROOM_TO_GROW, 1 << 20
    before = memory()
    try:
        with tempfile.TemporaryDirectory() as place:
            while time.monotonic() < stop and (not rounds or sum(ends.values()) < rounds):
                number = sum(ends.values())
                try:
                    ends[READERS[reader](random.Random(f"{seed} {number}"), Path(place))] += 1
                    assert memory() - before < MEMORY, "it took too much memory"
                except Exception as error:
                    kept = Path(tempfile.mkdtemp(prefix="fuzz-"))
                    shutil.copytree(place, kept, dirs_exist_ok=True)
                    raise AssertionError(f"{reader}, seed {seed}, round {number}, kept in {kept}: {error!r}") from error
    finally:
        planning.ROOM_TO_GROW = room
    return ends


def compare(kind: str, seed: int, *, seconds: float = 0, cases: int = 0, keep: Path | None = None) -> list[str]:
    """What was found in so many cases of a kind of the comparisons, or in those of so many seconds, for people."""
    with tempfile.TemporaryDirectory() as place, Hunter([kind], Path(place)) as hunter:
        hunt = hunter.hunt(kind, seed, seconds=seconds, cases=cases, keep=keep)
        print(f"{kind}: {hunt.ends.total()} cases: {', '.join(f'{n} {end}' for end, n in hunt.ends.most_common())}")
        return list(told(hunt))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=sorted({*READERS, *KINDS}))
    parser.add_argument("--keep", type=Path, help="where inputs of findings are written")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    works = [(names, each) for names in (READERS, KINDS) for each in names if asked.only in (None, each)]
    print(f"seed {seed}")
    found: list[str] = []
    for names, each in works:
        if names is KINDS:
            found += compare(each, seed, seconds=asked.seconds / len(works), keep=asked.keep)
            continue
        ended = run(each, seed, seconds=asked.seconds / len(works))
        print(f"{each}: {sum(ended.values())} rounds: {', '.join(f'{n} {k}' for k, n in ended.most_common())}")
    print(*found, sep="\n")
    sys.exit(bool(found))

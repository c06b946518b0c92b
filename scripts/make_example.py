"""Makes checkpoints to convert: a DeepSpeed ZeRO directory as DeepSpeed 0.19 lays it out, or a plain model `.pt`.

    make_example.py DIRECTORY [--params 100e6] [--ranks 4] [--stage 3]      a ZeRO checkpoint
    make_example.py --pt FILE [--size 2e9] [--no-buffers]                   a model, in bfloat16 and float32
    make_example.py --check RESULT DIRECTORY                                is RESULT exactly what DIRECTORY holds?

Needs torch alone. Every number is a function of the parameter's name and the element's index, so that any result can
be checked bit for bit without the original. The tensors are never in memory: torch writes the files with holes
(`torch.serialization.skip_data`), which are then filled, and the checksums with them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import math
import struct
import sys
import types
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

# What a storage is filled with, piece by piece.
Filling: TypeAlias = Callable[[], Iterator[torch.Tensor]]
Shape: TypeAlias = tuple[int, ...]

CHUNK = 1 << 18
VERSION = "0.19.8"
TAG = "global_step3"


# ---------------------------------------------------------------------------------------------------------- the model


@dataclasses.dataclass(frozen=True)
class Example:
    """What an example is made from; kept beside it as `example.json`.

    `sparse`: the moments are holes in the files, zeros that take no room on the disk.
    """

    params: int = 100_000_000
    ranks: int = 4
    stage: int = 3
    seed: int = 0
    frozen_blocks: int = 0
    sub_group_size: int = 1_000_000_000
    sparse: bool = False


def parameter_shapes(params: int) -> dict[str, Shape]:
    """A GPT of about `params` parameters: some 70 % of them in its blocks, the rest in its vocabulary."""
    width = 8 * max(1, round((0.7 * params * 64 / 12) ** (1 / 3) / 8))
    depth, context = max(1, width // 64), min(1024, width)
    shapes: dict[str, Shape] = {"transformer.wpe.weight": (context, width)}
    for block in range(depth):
        at = f"transformer.h.{block}"
        shapes |= {
            f"{at}.ln_1.weight": (width,),
            f"{at}.ln_1.bias": (width,),
            f"{at}.attn.c_attn.weight": (3 * width, width),
            f"{at}.attn.c_attn.bias": (3 * width,),
            f"{at}.attn.c_proj.weight": (width, width),
            f"{at}.attn.c_proj.bias": (width,),
            f"{at}.ln_2.weight": (width,),
            f"{at}.ln_2.bias": (width,),
            f"{at}.mlp.c_fc.weight": (4 * width, width),
            f"{at}.mlp.c_fc.bias": (4 * width,),
            f"{at}.mlp.c_proj.weight": (width, 4 * width),
            f"{at}.mlp.c_proj.bias": (width,),
        }
    shapes |= {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}
    vocabulary = max(8, (params - sum(map(math.prod, shapes.values()))) // width)
    return {"transformer.wte.weight": (vocabulary, width), **shapes}


TIED = {"lm_head.weight": "transformer.wte.weight"}


def buffers(params: int) -> dict[str, torch.Tensor]:
    context = parameter_shapes(params)["transformer.wpe.weight"][0]
    return {
        "transformer.rotary.inv_freq": 1e4 ** -(torch.arange(0, 64, 2) / 64),
        "transformer.mask": torch.arange(context) % 3 > 0,
        "transformer.seen": torch.tensor(2**53 + 1),
    }


def state_dict(params: int, weights: Mapping[str, torch.Tensor]) -> OrderedDict[str, torch.Tensor]:
    """What the model's `state_dict()` returns: `weights` in the model's order, the tied name, and the buffers."""
    state = OrderedDict((name, weights[name]) for name in parameter_shapes(params))
    state.update({alias: state[owner] for alias, owner in TIED.items()} | buffers(params))
    modules = ["", *(name.rpartition(".")[0] for name in state)]
    state._metadata = OrderedDict((module, {"version": 1}) for module in modules)  # type: ignore[attr-defined]
    return state


def is_frozen(example: Example, name: str) -> bool:
    return any(name.startswith(f"transformer.h.{block}.") for block in range(example.frozen_blocks))


def values(seed: int, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Elements `start` to `stop` of the float32 tensor `name`: numbers of ±1/32 that look random and are not."""
    key = zlib.crc32(f"{seed}:{name}".encode()) - (1 << 31)
    for at in range(start, stop, CHUNK):
        bits = torch.arange(at, min(at + CHUNK, stop), dtype=torch.int32)
        yield bits.mul_(-1640531527).add_(key).float().mul_(2.0**-36)


def expected(example: Example) -> dict[str, tuple[Shape, torch.dtype, Filling]]:
    """Every weight and buffer that a conversion has to find: shape, dtype, and values (to be cast to that dtype)."""
    found: dict[str, tuple[Shape, torch.dtype, Filling]] = {}
    for name, shape in parameter_shapes(example.params).items():
        dtype = torch.bfloat16 if is_frozen(example, name) else torch.float32
        found[name] = shape, dtype, _whole(example.seed, name, shape, dtype)
    for alias, owner in TIED.items():
        found[alias] = found[owner]
    for name, buffer in buffers(example.params).items():
        found[name] = tuple(buffer.shape), buffer.dtype, _given(buffer)
    return found


def _whole(seed: int, name: str, shape: Shape, dtype: torch.dtype) -> Filling:
    return lambda: (part.to(dtype) for part in values(seed, name, 0, math.prod(shape)))


def _given(tensor: torch.Tensor) -> Filling:
    return lambda: iter([tensor.reshape(-1)])


# ---------------------------------------------------------------------------------- torch.save, and the data afterwards


class Saver:
    """Hands out tensors without data, and saves them with the data they were promised."""

    def __init__(self) -> None:
        # By address; the tensor is kept so that the address stays its own.
        self._fillings: dict[int, tuple[torch.Tensor, Filling | None]] = {}

    def tensor(self, numel: int, dtype: torch.dtype, filling: Filling | None) -> torch.Tensor:
        """A flat tensor; of zeros, without a filling. Its memory is never touched, and so takes none."""
        tensor = torch.empty(numel, dtype=dtype)
        if numel:
            self._fillings[tensor.data_ptr()] = tensor, filling
        return tensor

    def save(self, tree: Any, path: Path) -> None:
        """Write `tree` as `torch.save` does, to the byte; only the serialization id is another."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with stand_ins(), torch.serialization.skip_data():
            torch.save(tree, path)
        storages: dict[int, torch.Tensor] = {}
        for tensor in _tensors(tree):
            storages.setdefault(tensor.untyped_storage()._cdata, tensor)
        with path.open("r+b") as file:
            self._fill(file, list(storages.values()))

    def _fill(self, file: BinaryIO, tensors: Sequence[torch.Tensor]) -> None:
        """Put the data of `tensors`, one for every record in order, into the archive, and correct its checksums."""
        with zipfile.ZipFile(file) as archive:
            directory = archive.start_dir
            records = [record for record in archive.infolist() if "/data/" in record.filename]
        checksums: dict[str, int] = {}
        for record, tensor in zip(records, tensors, strict=True):
            storage = tensor.untyped_storage()
            own = torch.empty(0, dtype=tensor.dtype).set_(storage)
            _, filling = self._fillings.get(storage.data_ptr(), (own, _given(own)))
            if filling is None:
                continue
            file.seek(record.header_offset + 26)
            file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
            size = checksum = 0
            for piece in filling():
                data = piece.contiguous().view(torch.uint8).numpy().data
                size += file.write(data)
                checksum = zlib.crc32(data, checksum)
            if size != record.file_size:
                raise ValueError(f"{record.filename}: {size} bytes for a storage of {record.file_size}")
            if size:  # An empty record has no data descriptor.
                file.seek(4, 1)
                file.write(struct.pack("<I", checksum))
            checksums[record.filename] = checksum
        file.seek(directory)
        while (entry := file.read(46))[:4] == b"PK\x01\x02":
            name, extra, comment = struct.unpack("<HHH", entry[28:34])
            filename = file.read(name).decode()
            after = file.seek(extra + comment, 1)
            if filename in checksums:
                file.seek(after - extra - comment - name - 30)
                file.write(struct.pack("<I", checksums[filename]))
                file.seek(after)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree in the order in which they are pickled."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, tree.values()))
    elif isinstance(tree, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tensors, tree))


# ----------------------------------------------------------------------------------- DeepSpeed's classes, in name only


def _named(cls: type, module: str) -> type:
    cls.__module__, cls.__qualname__ = module, cls.__name__
    return cls


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


@dataclasses.dataclass
class fragment_address:  # noqa: N801 - as it is called there
    numel: int
    start: int


CLASSES = (
    _named(ZeroStageEnum, "deepspeed.runtime.zero.config"),
    _named(LossScaler, "deepspeed.runtime.fp16.loss_scaler"),
    _named(fragment_address, "deepspeed.utils.tensor_fragment"),
)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """While this lasts the classes above are found under DeepSpeed's names, as pickle demands."""
    modules: dict[str, types.ModuleType] = {}
    for cls in CLASSES:
        for name in itertools.accumulate(cls.__module__.split("."), "{}.{}".format):
            modules.setdefault(name, types.ModuleType(name))
        setattr(modules[cls.__module__], cls.__name__, cls)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# --------------------------------------------------------------------------------------------------- ZeRO checkpoints


def write(example: Example, directory: Path) -> None:
    """Write `example` into `directory`: the tag's directory, and `latest` and `example.json` beside it."""
    if example.ranks < 1 or example.params < 1 or example.stage not in (1, 2, 3):
        raise ValueError(f"no such checkpoint: {example}")
    write_stage = _write_stage_3 if example.stage == 3 else _write_stage_1_or_2
    write_stage(example, directory / TAG)
    (directory / "example.json").write_text(json.dumps(dataclasses.asdict(example)) + "\n")
    (directory / "latest").write_text(TAG)


def _groups(example: Example) -> list[dict[str, Shape]]:
    """The trained parameters by optimizer group: those with weight decay, and those without."""
    trained = {n: s for n, s in parameter_shapes(example.params).items() if not is_frozen(example, n)}
    decayed = {name: shape for name, shape in trained.items() if len(shape) > 1}
    return [decayed, {name: shape for name, shape in trained.items() if name not in decayed}]


def _frozen(example: Example) -> dict[str, Shape]:
    return {n: s for n, s in parameter_shapes(example.params).items() if is_frozen(example, n)}


def _sub_groups(example: Example, group: dict[str, Shape]) -> Iterator[dict[str, Shape]]:
    """Groups as ZeRO-3 divides them: one is closed when a rank's share of it reaches `sub_group_size`."""
    current: dict[str, Shape] = {}
    size = 0
    for name, shape in group.items():
        current[name] = shape
        size += _piece(shape, example.ranks)
        if size >= example.sub_group_size:
            yield current
            current, size = {}, 0
    if current:
        yield current


def _piece(shape: Shape, ranks: int) -> int:
    return -(-math.prod(shape) // ranks)


def _file(directory: Path, kind: str, rank: int | None = None) -> Path:
    zero = "" if rank is None else f"{'bf16_' if kind == 'optim' else ''}zero_pp_rank_{rank}_"
    return directory / f"{zero}mp_rank_00_{kind}_states.pt"


def _param_groups(members: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    usual = {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-08,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
    return [
        {"weight_decay": decay, **usual, "params": list(params)}
        for decay, params in zip((0.1, 0.0), members, strict=True)
    ]


def _ds_config(example: Example) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": example.stage, "sub_group_size": example.sub_group_size},
        "bf16": {"enabled": True},
    }


def _adam(
    saver: Saver, numel: int, elements: Callable[[str], Iterator[torch.Tensor]], sparse: bool
) -> dict[str, torch.Tensor]:
    """Adam's state for a flat group: its moments are made like the weights, under other names."""
    moments = {
        name: saver.tensor(numel, torch.float32, None if sparse else functools.partial(elements, f".{name}"))
        for name in ("exp_avg", "exp_avg_sq")
    }
    return {"step": torch.tensor(3.0), **moments}


def _state_values(seed: int, name: str, suffix: str, start: int, stop: int) -> Iterator[torch.Tensor]:
    parts = values(seed, name + suffix, start, stop)
    return (part.abs_() for part in parts) if suffix == ".exp_avg_sq" else parts


def _optim_states(example: Example, optimizer: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer_state_dict": optimizer, "ds_config": _ds_config(example), "ds_version": VERSION}


def _model_states(
    example: Example,
    weights: Mapping[str, torch.Tensor],
    param_shapes: Sequence[dict[str, Shape]],
    fragments: Mapping[str, torch.Tensor] | None,
    first: bool,
) -> dict[str, Any]:
    frozen = {name: torch.Size(shape) for name, shape in _frozen(example).items()}
    return {
        "module": state_dict(example.params, weights),
        "buffer_names": list(buffers(example.params)),
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in param_shapes],
        "frozen_param_shapes": None if fragments is None else OrderedDict(frozen),
        "shared_params": dict(TIED) if first else {},
        "frozen_param_fragments": None if fragments is None else OrderedDict(fragments),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 6 * example.ranks,
        "dp_world_size": example.ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _ds_config(example),
        "ds_version": VERSION,
    }


def _write_stage_3(example: Example, directory: Path) -> None:
    by_group = [list(_sub_groups(example, group)) for group in _groups(example)]
    sub_groups = list(itertools.chain.from_iterable(by_group))
    numbers = itertools.count()
    members = [[next(numbers) for _ in group] for group in by_group]
    identities = itertools.count()
    ids = [[next(identities) for _ in group] for group in sub_groups]
    for rank in range(example.ranks):
        saver = Saver()
        state: dict[int, Any] = {}
        masters = []
        for number, group in enumerate(sub_groups):
            size = sum(_piece(shape, example.ranks) for shape in group.values())
            elements = functools.partial(_pieces, example, group, rank)
            state[number] = _adam(saver, size, elements, example.sparse)
            master = saver.tensor(size, torch.float32, functools.partial(elements, "")).requires_grad_()
            master.ds_id = f"{ids[number][0]}_{ids[number][-1]}"  # type: ignore[attr-defined]
            masters.append(master)
        optimizer = {
            "zero_stage": ZeroStageEnum(3),
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": example.ranks,
            "optimizer_state_dict": {"state": state, "param_groups": _param_groups(members)},
            "fp32_flat_groups": masters,
        }
        saver.save(_optim_states(example, optimizer), _file(directory, "optim", rank))

        placeholders = {name: torch.empty(0, dtype=torch.bfloat16) for name in parameter_shapes(example.params)}
        fragments = {}
        for name, shape in _frozen(example).items():
            filling = _bfloat16(_pieces(example, {name: shape}, rank, ""))
            fragments[name] = saver.tensor(_piece(shape, example.ranks), torch.bfloat16, filling)
        states = _model_states(example, placeholders, sub_groups, fragments, first=rank == 0)
        saver.save(states, _file(directory, "model", rank))


def _pieces(example: Example, group: dict[str, Shape], rank: int, suffix: str) -> Iterator[torch.Tensor]:
    """A rank's piece of every parameter, one after the other; what lies beyond a parameter's end is padding."""
    for name, shape in group.items():
        piece = _piece(shape, example.ranks)
        yield from _state_values(example.seed, name, suffix, rank * piece, (rank + 1) * piece)


def _write_stage_1_or_2(example: Example, directory: Path) -> None:
    groups = _groups(example)
    # A flat group is rounded up to a multiple of twice the ranks, then cut into equal shares.
    sizes = [sum(map(math.prod, group.values())) for group in groups]
    shares = [-(-size // (2 * example.ranks)) * 2 for size in sizes]
    for rank in range(example.ranks):
        saver = Saver()
        state: dict[int, Any] = {}
        masters, paddings, mappings = [], [], []
        for number, (group, size, share) in enumerate(zip(groups, sizes, shares, strict=True)):
            start, stop = rank * share, (rank + 1) * share
            elements = functools.partial(_interval, example, group, start, stop)
            padding = min(max(stop - size, 0), share)
            master = saver.tensor(share, torch.float32, functools.partial(elements, ""))
            state[number] = _adam(saver, share, elements, example.sparse)
            masters.append(master[: share - padding].requires_grad_())
            paddings.append(padding)
            mappings.append(OrderedDict(_fragments(group, start, stop)))
        optimizer = {
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": state, "param_groups": _param_groups([[0], [1]])},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": ZeroStageEnum(example.stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(group) for group in groups],
            "partition_count": [example.ranks] * len(groups),
            "ds_version": VERSION,
            "param_slice_mappings": mappings,
        }
        saver.save(_optim_states(example, optimizer), _file(directory, "optim", rank))

    saver = Saver()
    weights: dict[str, torch.Tensor] = {}
    for group, share in zip(groups, shares, strict=True):
        size = share * example.ranks
        flat = saver.tensor(size, torch.bfloat16, _bfloat16(_interval(example, group, 0, size, "")))
        at = 0
        for name, shape in group.items():
            weights[name] = flat[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
    for name, shape in _frozen(example).items():
        filling = _whole(example.seed, name, shape, torch.bfloat16)
        weights[name] = saver.tensor(math.prod(shape), torch.bfloat16, filling).view(shape)
    fragments = {name: weights[name] for name in _frozen(example)} if example.stage == 2 else None
    saver.save(_model_states(example, weights, groups, fragments, first=True), _file(directory, "model"))


def _bfloat16(parts: Iterator[torch.Tensor]) -> Filling:
    return lambda: (part.to(torch.bfloat16) for part in parts)


def _interval(example: Example, group: dict[str, Shape], start: int, stop: int, suffix: str) -> Iterator[torch.Tensor]:
    """Elements `start` to `stop` of a flat group of whole parameters, and zeros beyond its end."""
    at = 0
    for name, shape in group.items():
        low, high = max(start - at, 0), min(stop - at, math.prod(shape))
        if low < high:
            yield from _state_values(example.seed, name, suffix, low, high)
        at += math.prod(shape)
    if stop > max(at, start):
        yield torch.zeros(stop - max(at, start))


def _fragments(group: dict[str, Shape], start: int, stop: int) -> Iterator[tuple[str, fragment_address]]:
    """Where in a rank's share, elements `start` to `stop`, its part of every parameter lies."""
    at = 0
    for name, shape in group.items():
        low, high = max(start, at), min(stop, at + math.prod(shape))
        if low < high:
            yield name, fragment_address(numel=high - low, start=low - start)
        at += math.prod(shape)


# ------------------------------------------------------------------------------------------------------ a plain model


def write_model(path: Path, size: int, seed: int = 0, no_buffers: bool = False) -> None:
    """A state dict of about `size` bytes: matrices in bfloat16, vectors in float32, the output layer tied, and with
    `no_buffers` neither bools nor integers."""
    saver = Saver()
    weights: dict[str, torch.Tensor] = {}
    params = max(size // 2, 1)
    for name, shape in parameter_shapes(params).items():
        dtype = torch.bfloat16 if len(shape) > 1 else torch.float32
        weights[name] = saver.tensor(math.prod(shape), dtype, _whole(seed, name, shape, dtype)).view(shape)
    state = state_dict(params, weights)
    for name in buffers(params) if no_buffers else ():
        del state[name]
    saver.save(state, path)


# -------------------------------------------------------------------------------------------------------------- check


def differences(example: Example, result: Path) -> list[str]:
    """What is wrong with `result`, a safetensors file or a directory of them, as a conversion of `example`.

    Parameters may be of any floating dtype: what is expected is then cast to it. A tied name may be left out.
    """
    from safetensors import safe_open

    files = [result] if result.is_file() else sorted(result.glob("*.safetensors"))
    wanted = expected(example)
    found: set[str] = set()
    wrong = [] if files else [f"{result}: no safetensors file"]
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name not in wanted or name in found:
                    wrong.append(f"{name}: {'twice' if name in found else 'unexpected'}")
                    continue
                found.add(name)
                shape, dtype, filling = wanted[name]
                actual = file.get_tensor(name)
                if tuple(actual.shape) != shape:
                    wrong.append(f"{name}: {tuple(actual.shape)} instead of {shape}")
                elif actual.dtype != dtype and not (actual.is_floating_point() and dtype.is_floating_point):
                    wrong.append(f"{name}: {actual.dtype} instead of {dtype}")
                elif not _equal(actual.reshape(-1), filling()):
                    wrong.append(f"{name}: other values")
    wrong += [f"{name}: missing" for name in wanted if name not in found and name not in TIED]
    return wrong


def _equal(actual: torch.Tensor, pieces: Iterator[torch.Tensor]) -> bool:
    at = 0
    for piece in pieces:
        part = actual[at : at + len(piece)]
        if not torch.equal(part.view(torch.uint8), piece.to(actual.dtype).view(torch.uint8)):
            return False
        at += len(piece)
    return at == len(actual)


# ------------------------------------------------------------------------------------------------------------ command


def count(text: str) -> int:
    """A number of things: 100000000, 100e6 or 100_000_000."""
    return int(float(text))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("directory", type=Path, nargs="?", help="the checkpoint to make, or to check against")
    parser.add_argument("--params", type=count, default=Example.params, metavar="N", help="default: 100e6")
    parser.add_argument("--ranks", type=count, default=Example.ranks, metavar="N", help="default: 4")
    parser.add_argument("--stage", type=int, default=Example.stage, choices=(1, 2, 3), help="default: 3")
    parser.add_argument("--seed", type=int, default=Example.seed, metavar="N")
    parser.add_argument("--frozen-blocks", type=int, default=0, metavar="N", help="do not train the first N blocks")
    parser.add_argument("--sub-group-size", type=count, default=Example.sub_group_size, metavar="N", help="of ZeRO-3")
    parser.add_argument("--sparse", action="store_true", help="the optimizer's moments are holes in the files")
    parser.add_argument("--pt", type=Path, metavar="FILE", help="make a plain model instead")
    parser.add_argument("--size", type=count, default=2_000_000_000, metavar="BYTES", help="of the model; default: 2e9")
    parser.add_argument("--no-buffers", action="store_true", help="of the model: parameters alone, all floating")
    parser.add_argument("--check", type=Path, metavar="RESULT", help="compare a conversion with the example")
    options = parser.parse_args(arguments)
    if (options.directory is None) == (options.pt is None) or (options.check and options.pt):
        parser.error("give the DIRECTORY of a checkpoint, or --pt FILE")
    if options.pt:
        write_model(options.pt, options.size, options.seed, options.no_buffers)
    elif options.check:
        example = Example(**json.loads((options.directory / "example.json").read_text()))
        wrong = differences(example, options.check)
        print("\n".join(wrong) or f"{options.check}: all {len(expected(example))} tensors are right")
        return 1 if wrong else 0
    else:
        names = [field.name for field in dataclasses.fields(Example)]
        write(Example(**{name: getattr(options, name) for name in names}), options.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())

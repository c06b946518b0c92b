"""Orbax saves new arrays in each way that it has; what we read of them is compared with what it restores itself.

What it saves is left there: the steps in tests/features/orbax/data were made so, by it and by earlier releases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from formats import differing, read, verified

NEEDED = ("orbax", "jax", "flax", "optax")
# Arrays are sharded over so many devices, which the processor plays.
_DEVICES = 4
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={_DEVICES}")


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    jax.config.update("jax_enable_x64", True)
    for name, save in _cases().items():
        path = save(place / name, np.random.default_rng(seed))
        restored = ocp.PyTreeCheckpointer().restore(path.absolute())
        yield name, _compared(path, restored)


def _cases() -> dict[str, Callable[[Path, Any], Path]]:
    """Return how each case is saved below a directory, and where."""
    import orbax.checkpoint as ocp

    def handled(tree: Callable[[Any], Any], chunk: int | None = None, **settings: Any) -> Callable[[Path, Any], Path]:
        def save(place: Path, chance: Any) -> Path:
            import jax

            made = tree(chance)
            each = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk), made)
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings)) as saver:
                saver.save((place / "step").absolute(), args=ocp.args.PyTreeSave(made, save_args=each))
            return place / "step"

        return save

    def managed(place: Path, chance: Any) -> Path:
        with ocp.CheckpointManager(place.absolute()) as manager:
            for number in (10, 20):
                manager.save(number, args=ocp.args.StandardSave({"params": _plain(chance), "step": number}))
        return place / "20" / "default"

    def composed(place: Path, chance: Any) -> Path:
        with ocp.CheckpointManager(place.absolute()) as manager:
            parts = {"params": ocp.args.StandardSave(_plain(chance)), "metadata": ocp.args.JsonSave({"a": 1})}
            manager.save(3, args=ocp.args.Composite(**parts))
        return place / "3" / "params"

    return {
        "ocdbt, zarr 2": handled(_sharded),
        "ocdbt, zarr 3": handled(_sharded, use_zarr3=True),
        "directories, zarr 2": handled(_sharded, use_ocdbt=False),
        "directories, zarr 3": handled(_sharded, use_ocdbt=False, use_zarr3=True),
        "small chunks": handled(_sharded, chunk=2048),
        "small chunks, zarr 3": handled(_sharded, chunk=2048, use_zarr3=True),
        "dtypes": handled(_dtypes),
        "odd keys": handled(_odd),
        "optax": handled(_trained),
        "manager": managed,
        "composite": composed,
    }


def _plain(chance: Any) -> dict[str, Any]:
    import numpy as np

    return {"dense": {"kernel": chance.random((48, 32), np.float32), "bias": chance.random(32, np.float32)}}


def _sharded(chance: Any) -> dict[str, Any]:
    """Arrays of which each device has rows, columns, or tiles; and one that is whole."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:_DEVICES]).reshape(2, -1), ("x", "y"))

    def put(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Any:
        array = jax.numpy.asarray(chance.random(shape, np.float32)).astype(dtype)
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    numpy = jax.numpy
    return {
        "rows": put((96, 40), numpy.float32, "x"),
        "columns": put((40, 64), numpy.bfloat16, None, "y"),
        "tiles": put((64, 96), numpy.float16, "x", "y"),
        "whole": put((33, 17), numpy.float32),
        "deep": {"stacked": put((24, 8, 32), numpy.bfloat16, "y", None, "x")},
    }


def _dtypes(chance: Any) -> dict[str, Any]:
    import jax.numpy as jnp
    import numpy as np

    names = [
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
    ]
    names += ["uint64", "bool", "float8_e4m3fn", "float8_e5m2"]
    arrays = {name: jnp.asarray(chance.random((7, 5)) * 100).astype(name) for name in names}
    return {**arrays, "none": np.float32(chance.random()), "zeros": np.zeros((40, 3), np.float32)}


def _odd(chance: Any) -> dict[str, Any]:
    import numpy as np

    def array() -> Any:
        return chance.random((3, 2), np.float32)

    return {
        "list": [array(), (array(), {"k": array()}), None], "with.dot": {"w": array()}, "a/b": array(), "ü n": array(),
        "7": array(), "empty": {}, "nothing": [],
    }  # fmt: skip


def _trained(chance: Any) -> dict[str, Any]:
    import jax
    import optax

    params = _plain(chance)
    made = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = made.init(params)
    _, state = made.update(jax.tree.map(lambda array: array * 0.5, params), state, params)
    return {"params": params, "opt_state": state}


def _compared(path: Path, restored: Any) -> str:
    """Return what differs between what we read of a step and what Orbax restores of it."""
    import numpy as np

    import ckptconv

    output = path.parent / "out.safetensors"
    ckptconv.convert(path, output, key=".", overwrite=True, **verified())
    wanted = dict(_arrays(restored))
    return differing(
        read(output), {name: ([*array.shape], np.asarray(array).tobytes()) for name, array in wanted.items()}
    )


def _arrays(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays in what Orbax restored, by their keys; numbers are none."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _arrays(value, f"{name}.{key}" if name else key)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _arrays(value, f"{name}.{index}" if name else str(index))
    elif hasattr(node, "shape") and hasattr(node, "dtype"):
        yield name, node

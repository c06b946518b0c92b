"""tensorstore stores new arrays in ways that Orbax does not use, drawn by chance: what we read of them is compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import differing, read, verified

NEEDED = ("tensorstore", "ml_dtypes", "numpy")
_STEPS = 40
_DTYPES = (
    *("bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
_KEYS = ({"name": "default"}, {"name": "default", "configuration": {"separator": "."}}, {"name": "v2"})
_NAMES = ("a", "b.c", "x/y", "ü n")


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each step, and what is wrong with it."""
    for number in range(_STEPS):
        yield f"step {number}", _compared(place / str(number), random.Random(f"{seed} {number}"))


def _compared(place: Path, chance: random.Random) -> str:
    import json

    import tensorstore

    import ckptconv

    wanted, entries = {}, {}
    sizes = {"max_inline_value_bytes": chance.choice((0, 10, 1024)), "max_decoded_node_bytes": 300}
    for name in _NAMES:
        array = _array(chance)
        store = {"driver": "ocdbt", "base": f"file://{place.absolute()}/", "path": f"{name}/", "config": sizes}
        driver, metadata = _third(array, chance) if chance.random() < 0.7 else _second(array, chance)
        spec = {"driver": driver, "kvstore": store, "metadata": metadata, "create": True}
        tensorstore.open(spec).result().write(array).result()
        wanted[name] = ([*array.shape], array.tobytes())
        key = {"key_metadata": [{"key": name, "key_type": 2}]}
        entries[name] = {**key, "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}
    (place / "_METADATA").write_text(json.dumps({"tree_metadata": entries}))
    ckptconv.convert(place, place / "out.safetensors", key=".", **verified())
    return differing(read(place / "out.safetensors"), wanted)


def _array(chance: random.Random) -> Any:
    import ml_dtypes
    import numpy as np

    name, shape = chance.choice(_DTYPES), [chance.randint(1, 9) for _ in range(chance.randint(0, 4))]
    numbers = np.random.default_rng(chance.randrange(1 << 30)).integers(0, 2 if name == "bool" else 100, shape)
    array = np.asarray(numbers).astype(getattr(ml_dtypes, name, name))
    if shape and chance.random() < 0.3:
        array[: chance.randint(0, shape[0])] = 0  # chunks of zeros are not stored
    return array


def _second(array: Any, chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the driver and a description of zarr 2."""
    is_plain = "float8" not in array.dtype.name and array.dtype.name != "bfloat16"
    order = chance.choice("<>") if is_plain and array.itemsize > 1 else "|"
    return "zarr", {
        "shape": [*array.shape],
        "chunks": [chance.randint(1, extent + 2) for extent in array.shape],
        "compressor": chance.choice((None, {"id": "zstd", "level": 1})),
        "order": chance.choice("CF") if array.ndim > 1 else "C",
        "dimension_separator": chance.choice("./"),
        "dtype": f"{order}{array.dtype.str[1:]}" if is_plain else array.dtype.name,
        "fill_value": None,
    }


def _third(array: Any, chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the driver and a description of zarr 3."""
    inner = [chance.randint(1, 4) for _ in array.shape]
    order = chance.sample(range(len(inner)), len(inner))
    codecs: list[dict[str, Any]] = [{"name": "transpose", "configuration": {"order": order}}] if order else []
    endian = {"configuration": {"endian": chance.choice(("little", "big"))}} if array.itemsize > 1 else {}
    codecs += [{"name": "bytes", **endian}]
    codecs += [{"name": name} if name == "crc32c" else {"name": name, "configuration": {"level": 1}} for name in (
        chance.choice(((), ("zstd",), ("crc32c",), ("zstd", "crc32c"), ("crc32c", "zstd")))
    )]  # fmt: skip
    if chance.random() < 0.5:
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        settings = {"chunk_shape": inner, "codecs": codecs, "index_location": chance.choice(("start", "end"))}
        index = [little, {"name": "crc32c"}][: chance.randint(1, 2)]
        codecs = [{"name": "sharding_indexed", "configuration": {**settings, "index_codecs": index}}]
    outer = [side * chance.randint(1, 3) for side in inner]
    return "zarr3", {
        "shape": [*array.shape],
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
        "chunk_key_encoding": chance.choice(_KEYS),
        "codecs": codecs,
    }

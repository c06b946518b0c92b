"""What a pickle says of tensors: every reader makes the same of it, or we refuse it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from attacks.assemble import (
    DATA,
    FALSE,
    HOOKS,
    NONE,
    TRUE,
    called,
    dotted,
    listed,
    mapped,
    members,
    name,
    number,
    numbers,
    pickled,
    raw,
    several,
    storage,
    tensor,
    text,
    zipped,
)
from compare import bits, evaluate
from effort import every

from ckptconv.errors import CkptconvError
from ckptconv.formats.torch.zip import read_zip
from ckptconv.storage.files import open_reader
from ckptconv.tensors.lazy import LazyTensor

UTILS = "torch._utils"
F32, I32, C64 = name("torch", "float32"), name("torch", "int32"), name("torch", "complex64")


def utils(function: str, *arguments: bytes) -> bytes:
    return called(name(UTILS, function), *arguments)


def third(held: bytes, dtype: bytes, size: tuple[int, ...] = (2, 3), stride: tuple[int, ...] = (3, 1)) -> bytes:
    return utils("_rebuild_tensor_v3", held, number(0), numbers(*size), numbers(*stride), FALSE, HOOKS, dtype)


def flagged(flags: bytes, dtype: bytes = F32, size: tuple[int, ...] = (3,)) -> bytes:
    arguments = (number(0), numbers(*size), numbers(1), FALSE, HOOKS, dtype, flags)
    return utils("_rebuild_tensor_v3", storage("0", 24, "UntypedStorage"), *arguments)


UNTYPED = storage("0", 24, "UntypedStorage")
INTS, BYTES = storage("0", 6, "IntStorage"), storage("0", 24, "ByteStorage")
HALVES, BRAINS = storage("0", 12, "HalfStorage"), storage("0", 12, "BFloat16Storage")
ARRAY = called(
    name("numpy.core.multiarray", "_reconstruct"), name("numpy", "ndarray"), numbers(0), raw(b"b")
)  # fmt: skip


def dtype_of_numpy(kind: str, *state: bytes) -> bytes:
    made = called(name("numpy", "dtype"), text(kind), FALSE, TRUE)
    return made + several(*state) + b"b" if state else made


def state_of_dtype(order: str = "<", size: int = -1) -> tuple[bytes, ...]:
    return number(3), text(order), NONE, NONE, NONE, number(size), number(size), number(0)


def array_of(dtype: bytes, shape: tuple[int, ...], data: bytes, version: int = 1) -> bytes:
    return ARRAY + several(number(version), numbers(*shape), dtype, FALSE, data) + b"b"


# By name, what makes the values "a", "b", …: files that torch reads, and where we have to see the same, or to refuse.
ODD: dict[str, tuple[bytes, ...]] = {
    "one dtype": (tensor(), tensor(offset=1, size=(2,), stride=(1,))),
    "float, then int": (tensor(), tensor(INTS)),
    "int, then float": (tensor(INTS), tensor()),
    "half, then bfloat16": (tensor(HALVES), tensor(BRAINS)),
    "bfloat16, then half": (tensor(BRAINS), tensor(HALVES)),
    "float, then untyped": (tensor(), tensor(UNTYPED, size=(24,), stride=(1,))),
    "untyped, then float": (tensor(UNTYPED, size=(24,), stride=(1,)), tensor()),
    "untyped by itself, then float": (UNTYPED, tensor()),
    "float by itself, then int": (storage(), tensor(INTS)),
    "bytes, then untyped": (tensor(BYTES, size=(24,), stride=(1,)), third(UNTYPED, F32)),
    "untyped, as several dtypes": (third(UNTYPED, F32), third(UNTYPED, I32), third(UNTYPED, C64, (3,), (1,))),
    "float, as int by its own dtype": (third(storage(), I32),),
    "many floats, then ints": (*(tensor() for _ in range(40)), *(tensor(INTS) for _ in range(40))),
    "without elements as two dtypes": (
        tensor(storage("1", 0), size=(0,), stride=(1,)),
        tensor(storage("1", 0, "IntStorage"), size=(0,), stride=(1,)),
    ),
    "other numbers of elements": (tensor(storage("0", 4), size=(2,), stride=(1,)), tensor()),
    "conj": (flagged(mapped(text("conj"), TRUE), C64),),
    "conj, false": (flagged(mapped(text("conj"), FALSE), C64),),
    "conj, zero": (flagged(mapped(text("conj"), number(0)), C64),),
    "conj of floats": (flagged(mapped(text("conj"), TRUE)),),
    "neg": (flagged(mapped(text("neg"), TRUE)),),
    "neg, false": (flagged(mapped(text("neg"), FALSE)),),
    "neg of ints": (flagged(mapped(text("neg"), TRUE), I32),),
    "conj and neg": (flagged(mapped(text("conj"), TRUE, text("neg"), TRUE), C64),),
    "metadata that is not known": (flagged(mapped(text("x"), TRUE)),),
    "metadata that is a list": (flagged(listed(text("neg"))),),
    "no metadata": (flagged(NONE), flagged(mapped()), flagged(several())),
    "a gradient of ints": (tensor(INTS, requires_grad=TRUE),),
    "a parameter of ints": (utils("_rebuild_parameter", tensor(INTS), TRUE, HOOKS),),
    "a parameter": (utils("_rebuild_parameter", tensor(), TRUE, HOOKS),),
    "a parameter of a storage": (utils("_rebuild_parameter", storage(), FALSE, HOOKS),),
    "a parameter of a number": (utils("_rebuild_parameter", number(1), FALSE, HOOKS),),
    "a parameter of too little": (utils("_rebuild_parameter", tensor(), FALSE),),
    "a tensor of too little": (utils("_rebuild_tensor_v2", storage(), number(0), numbers(2, 3), numbers(3, 1)),),
    "a tensor of too much": (tensor(None, 0, (2, 3), (3, 1), NONE, NONE),),
    "a tensor of a number": (tensor(number(7)),),
    "another dtype than its elements": (
        utils("_rebuild_device_tensor_from_cpu_tensor", tensor(), I32, text("cpu"), FALSE),
    ),
    "the dtype of its elements": (utils("_rebuild_device_tensor_from_cpu_tensor", tensor(), F32, text("cpu"), FALSE),),
    "sparse": (
        utils("_rebuild_sparse_tensor", called(name("torch.serialization", "_get_layout"), text("torch.sparse_coo")),
              several(tensor(storage("2", 2, "LongStorage"), size=(1, 2), stride=(2, 1)),
                      tensor(size=(2, 3)), numbers(9, 3))),
    ),
    "sparse, of other sizes": (
        utils("_rebuild_sparse_tensor", called(name("torch.serialization", "_get_layout"), text("torch.sparse_coo")),
              several(tensor(storage("2", 2, "LongStorage"), size=(1, 2), stride=(2, 1)),
                      tensor(size=(2, 3)), numbers(9, 4))),
    ),
    "sparse, of too few": (
        utils("_rebuild_sparse_tensor", called(name("torch.serialization", "_get_layout"), text("torch.sparse_coo")),
              several(tensor(storage("2", 2, "LongStorage"), size=(1, 1), stride=(2, 1)),
                      tensor(size=(2, 3)), numbers(9, 3))),
    ),
    "a layout that there is not": (called(name("torch.serialization", "_get_layout"), text("torch.load")),),
    "a size of text": (called(name("torch", "Size"), several(text("2"))),),
    "a size of a number": (called(name("torch", "Size"), number(2)),),
    "no size": (called(name("torch", "Size")),),
    "a device that is spelled in no way": (called(name("torch", "device"), text("cpu; evil")),),
    "a device of a tuple": (called(name("torch", "device"), several(text("cpu"))),),
    "a device with two indices": (called(name("torch", "device"), text("cuda:0"), number(1)),),
    "a state that is a list": (
        called(name("torch._tensor", "_rebuild_from_type_v2"), name(UTILS, "_rebuild_tensor_v2"),
               name("torch", "Tensor"), several(storage(), number(0), numbers(2, 3), numbers(3, 1), FALSE, HOOKS),
               listed(number(1))),
    ),
    "arguments that are a list": (
        called(name("torch._tensor", "_rebuild_from_type_v2"), name(UTILS, "_rebuild_tensor_v2"),
               name("torch", "Tensor"), listed(storage(), number(0), numbers(2, 3), numbers(3, 1), FALSE, HOOKS),
               mapped()),
    ),
    **{
        f"an attribute {attribute}": (
            called(name("torch._tensor", "_rebuild_from_type_v2"), name(UTILS, "_rebuild_tensor_v2"),
                   name("torch", "Tensor"), several(storage(), number(0), numbers(2, 3), numbers(3, 1), FALSE, HOOKS),
                   mapped(text(attribute), value)),
        )
        for attribute, value in {
            "data": tensor(storage("3")), "real": tensor(storage("3")), "grad": tensor(storage("3")),
            "requires_grad": TRUE, "__class__": name("torch.nn.parameter", "Parameter"), "_grad": tensor(storage("3")),
            "__dict__": mapped(text("a"), number(1)), "shape": numbers(3, 2), "grad_dtype": F32, "tag": number(1),
        }.items()
    },
    "an array": (array_of(dtype_of_numpy("f4", *state_of_dtype()), (2,), raw(DATA[:8])),),
    "an array without a version": (
        ARRAY + several(numbers(2), dtype_of_numpy("f4", *state_of_dtype()), FALSE, raw(DATA[:8])) + b"b",
    ),
    "an array of another version": (array_of(dtype_of_numpy("f4"), (2,), raw(DATA[:8]), 7),),
    "an array of too few bytes": (array_of(dtype_of_numpy("f4"), (2,), raw(DATA[:7])),),
    "an array of nothing": (array_of(dtype_of_numpy("f4"), (2,), NONE),),
    "an array of a dtype of text": (array_of(text("f4"), (2,), raw(DATA[:8])),),
    "an array of a dtype that there is not": (array_of(dtype_of_numpy("f3"), (2,), raw(DATA[:6])),),
    "an array whose elements have two sizes": (
        array_of(dtype_of_numpy("S3", *state_of_dtype("|", 5)), (3,), raw(b"abcdefghi")),
    ),
    "an array of numbers without a byte order": (
        array_of(dtype_of_numpy("f4", *state_of_dtype("|")), (2,), raw(DATA[:8])),
    ),
    "an array of bytes without a byte order": (
        array_of(dtype_of_numpy("u1", *state_of_dtype("|")), (8,), raw(DATA[:8])),
    ),
    "an array of strings": (array_of(dtype_of_numpy("S3", *state_of_dtype("|", 3)), (3,), raw(b"abcdefghi")),),
    "a scalar": (called(name("numpy.core.multiarray", "scalar"), dtype_of_numpy("f4"), raw(DATA[:4])),),
    "a scalar of too many bytes": (called(name("numpy.core.multiarray", "scalar"), dtype_of_numpy("f4"), raw(DATA)),),
    "a scalar of a number": (called(name("numpy.core.multiarray", "scalar"), dtype_of_numpy("f4"), number(1)),),
    "a dtype of a number": (called(name("numpy", "dtype"), number(1)),),
}  # fmt: skip
# Those that are as some release of torch or numpy wrote them.
HONEST = {
    "one dtype", "bytes, then untyped", "untyped, as several dtypes", "float, as int by its own dtype",
    "without elements as two dtypes", "conj", "neg", "conj and neg", "no metadata", "a parameter",
    "the dtype of its elements", "sparse", "no size", "an attribute tag", "an array", "an array without a version",
    "an array of bytes without a byte order", "an array of strings", "a scalar",
}  # fmt: skip
CONTENTS = {"0": DATA, "1": b"", "2": bytes(8) + b"\5" + bytes(7), "3": bytes(24)}


def written(values: tuple[bytes, ...], tmp_path: Path) -> Path:
    path = tmp_path / "odd.pt"
    tree = mapped(*(part for at, value in enumerate(values) for part in (text(f"v{at}"), value)))
    path.write_bytes(zipped(members(pickled(tree, 4), CONTENTS)))
    return path


def by_torch(path: Path, weights_only: bool) -> dict[str, Any] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, weights_only=weights_only)
        except Exception:
            return None


def elements(value: Any) -> Any:
    """A tensor as what all readers have to agree on."""
    if isinstance(value, LazyTensor):
        return value.dtype.name, tuple(value.shape), evaluate(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), bits(value)
    return None


@every("odd", ODD)
def test_what_torch_reads_otherwise_is_refused(odd: str, tmp_path: Path) -> None:
    path = written(ODD[odd], tmp_path)
    reader = open_reader(str(path))
    try:
        ours = read_zip(reader)
    except CkptconvError:
        ours = None
    finally:
        reader.close()
    assert (ours is not None) == (odd in HONEST)
    for weights_only in (True, False):
        theirs = by_torch(path, weights_only)
        if ours is None or theirs is None:
            continue
        for key, value in theirs.items():
            assert elements(value) == elements(ours.value[key]), key
    if ours is not None:
        assert by_torch(path, False) is not None, "an honest file is one that torch reads"


def test_what_is_made_of_an_object_of_the_users_is_kept_as_that(tmp_path: Path) -> None:
    """Of a storage that was pickled without torch.save, or a tensor by a function of the user's, nothing is known."""
    mine = called(dotted("mine", "Outer.storage"), number(1))
    path = written((tensor(mine), utils("_rebuild_parameter", mine, FALSE, HOOKS)), tmp_path)
    reader = open_reader(str(path))
    file = read_zip(reader)
    reader.close()
    assert {str(named) for named in file.opaque} >= {"mine.Outer.storage", f"{UTILS}._rebuild_tensor_v2"}

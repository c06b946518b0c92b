"""Torch's zip archives: every tensor comes back bit for bit as torch.load has it, and no archive does harm."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import shutil
import struct
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from checkpoints import ckptconv_here
from compare import SAVABLE, bits, evaluate, numbers, same
from containers import ContainerSuite
from effort import every, examples
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.formats.torch import objects as torch_objects
from ckptconv.formats.torch import storages as torch_storages
from ckptconv.formats.torch.zip import TorchFile, read_zip
from ckptconv.pickles.nodes import Composite, Global, NumpyArray, Opaque, Size, TorchConstant
from ckptconv.pickles.vocabulary import RefusedError
from ckptconv.storage import archive as zip_archives
from ckptconv.storage import files as storage
from ckptconv.tensors import lazy as tensors
from ckptconv.tensors import moves
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored, Tagged
from ckptconv.tensors.moves import File

F32 = DTYPES["float32"]
# Ten elements at byte 8 of a file that is not there.
STORAGE = torch_storages.Storage(File("a.pt", 100), 8, 40, F32, "0", 0)


def read(path: Path, *span: int) -> TorchFile:
    return read_zip(storage.open_reader(str(path)), *span)


def refusal(path: Path) -> str:
    """Why a file is refused; empty if it is not. Anything but an error for users fails the test."""
    try:
        read(path)
    except CkptconvError as error:
        return str(error)
    return ""


def saved_and_read(value: Any, tmp_path: Path, name: str = "model.pt", **kwargs: Any) -> TorchFile:
    path = tmp_path / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, path, **kwargs)
    return read(path)


def check(value: Any, tmp_path: Path, name: str = "model.pt", **kwargs: Any) -> TorchFile:
    """Save `value`, and compare what we read with what torch.load does."""
    file = saved_and_read(value, tmp_path, name, **kwargs)
    same(file.value, torch.load(tmp_path / name, weights_only=False))
    return file


class TestZip(ContainerSuite):
    container = "zip archive"
    known_from = 1000

    def save(self, value: Any, path: Path, **options: Any) -> Path:
        torch.save(value, path, **options)
        return path


# ----------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@every("dtype", SAVABLE)
def test_every_dtype(dtype, tmp_path):
    tensor = numbers(dtype, 3, 5)
    check(
        {"plain": tensor, "row": tensor[1], "column": tensor[:, 2], "scalar": tensor[2, 3], "none": tensor[:0]},
        tmp_path,
    )


def test_every_view_of_one_storage(tmp_path):
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    small = torch.arange(6, dtype=torch.int64)
    views = {
        "base": base,
        "transposed": base.transpose(0, 3),
        "permuted": base.permute(2, 0, 3, 1),
        "strided": base[:, ::2, 1::2, ::3],
        "narrow": base.narrow(1, 1, 2),
        "column": base[..., 0],
        "expanded": small[:1].expand(1000),
        "expanded rows": small.expand(4, 6),
        "overlapping": small.as_strided((4, 3), (1, 1)),
        "sizes of one": base[:1, :, :1].as_strided((1, 3, 1, 5), (999, 20, 77, 1)),
        "flipped bits": base.view(torch.int32),
        "empty in the middle": base[:, 1:1],
        "zero-dimensional": small[3],
    }
    del views["flipped bits"]  # torch refuses to save two dtypes of one storage
    file = check(views, tmp_path)
    ours = file.value
    assert len({leaf.facts.storage for name, leaf in ours.items() if "e" in name}) == 2
    assert ours["base"].facts.storage == ours["column"].facts.storage != ours["expanded"].facts.storage
    assert len(file.records) == 2


@given(data=st.data())
@examples(40)
def test_any_view(data, tmp_path_factory):
    """Any size, stride and offset that torch can have, over a storage just large enough or larger."""
    shape = data.draw(st.lists(st.integers(0, 5), max_size=5))
    strides = data.draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
    offset = data.draw(st.integers(0, 5))
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.complex64]))
    base = numbers(dtype, extent + data.draw(st.integers(0, 3)))
    check([base.as_strided(shape, strides, offset)], tmp_path_factory.mktemp("view"))


def test_negated_and_conjugated_tensors_are_resolved(tmp_path):
    values = torch.randn(3, 4, dtype=torch.complex64)
    views = {
        "conj": values.conj(),
        "conj transposed": values.mH,
        "neg": values.conj().imag,
        "both": torch._neg_view(values.conj()),
        "neg double": torch._neg_view(torch.randn(3, dtype=torch.float64)),
    }
    for name, view in views.items():
        assert view.is_conj() or view.is_neg(), name
        ours = saved_and_read({name: view}, tmp_path).value[name]
        assert evaluate(ours) == bits(view), name


def test_a_flag_that_makes_no_sense_is_an_error():
    for metadata, reason in (({"conj": True}, "conjugate"), ({"new": True}, "metadata 'new'"), ([1], "dictionary")):
        with pytest.raises(torch_objects.MalformedError, match=reason):
            make("_rebuild_tensor_v2", STORAGE, 0, (10,), (1,), False, None, metadata)


def test_parameters_buffers_attributes_and_subclasses(tmp_path):
    class Odd(torch.Tensor):
        pass

    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    tagged = nn.Parameter(torch.ones(2))
    tagged.tensor_model_parallel = True
    attributed = torch.ones(3)
    attributed.ds_id = 7
    file = check({"p": parameter, "q": tagged, "a": attributed, "g": torch.ones(1, requires_grad=True)}, tmp_path)
    assert file.value["q"].facts.attributes == {"tensor_model_parallel": True}
    assert file.value["a"].facts.kind == "tensor"

    module = nn.Module()
    module.b = nn.Buffer(torch.zeros(2))
    leaf = saved_and_read({"b": module.b}, tmp_path).value["b"]
    assert leaf.facts.kind == "buffer"

    leaf = saved_and_read({"odd": Counted(torch.arange(3.0))}, tmp_path).value["odd"]
    assert leaf.facts.kind.endswith("Counted")
    assert evaluate(leaf) == bits(torch.arange(3.0))


class Counted(torch.Tensor):
    pass


def test_constants(tmp_path):
    file = check(
        [
            torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint4, torch.int3, torch.complex32,
            torch.strided, torch.sparse_csr, torch.per_tensor_affine, torch.device("cpu"),
            torch.device("cuda", 3), torch.device("meta"), torch.Size([]), torch.Size([1, 2]),
        ],
        tmp_path,
    )  # fmt: skip
    assert not file.opaque


def test_numpy_arrays_and_scalars(tmp_path):
    values = {
        "float": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype="i2").reshape(2, 3)),
        "big": np.arange(3, dtype=">f4"),
        "bool": np.array([True, False]),
        "text": np.array(["a", "bcd"]),
        "bytes": np.array([b"a", b"bcd"]),
        "empty": np.zeros((0, 3)),
        "none": np.array(5, "u1"),
        "complex": np.array([1 + 2j]),
        "scalar": np.float64(1.5),
        "small": np.int8(-3),
        "truth": np.bool_(True),
        "again": [np.float32(1), np.float32(2)],
        "days": np.array(["2020-01-01", "NaT"], "M8[D]"),
        "hour": np.datetime64("2020-01-01T12", "h"),
        "times": np.array([[1, 2]], ">m8[25us]"),
        "seconds": np.timedelta64(3, "s"),
        "number": np.timedelta64(3),
    }
    for protocol in (2, 3, 4, 5):
        file = check(values, tmp_path, pickle_protocol=protocol)
        assert not file.opaque
    array = np.arange(3)
    one, two = saved_and_read([array, array], tmp_path).value
    assert one is two


def test_numpy_as_older_releases_named_it(tmp_path):
    new = pickle.dumps([np.arange(3), np.float32(2)], 2)
    old = new.replace(b"numpy._core.", b"numpy.core.")
    assert old != new or b"numpy.core." in new
    array, scalar = load_pickle(old)
    assert (array.dtype, array.shape, scalar.dtype) == ("<i8", (3,), "<f4")


def load_pickle(data: bytes) -> Any:
    from ckptconv.pickles import machine

    return machine.load(data, torch_objects.vocabulary(lambda pid: pid), where="a.pkl").value


def test_numpy_arrays_of_objects_and_records_are_kept_as_objects(tmp_path):
    values = [
        np.array([{"a": 1}, None], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
    ]
    file = saved_and_read(values, tmp_path)
    assert [type(value) for value in file.value] == [Opaque] * 3
    assert file.value[0].state[0][-1] == [{"a": 1}, None]
    assert {str(name).split(".")[-1] for name in file.opaque} == {"_reconstruct", "scalar"}


def test_a_wrong_number_of_bytes_for_a_numpy_array_is_an_error():
    data = pickle.dumps(np.arange(3, dtype="i1"), 3)
    with pytest.raises(CorruptError, match="numpy array of shape"):
        load_pickle(data.replace(b"C\x03", b"C\x02").replace(b"\x00\x01\x02", b"\x00\x01"))


def test_what_is_made_of_several_tensors(tmp_path):
    dense = torch.tensor([[0.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 3.0]])
    coo = dense.to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: dict[str, Any] = {
            "sparse_coo": coo,
            "sparse_csr": dense.to_sparse_csr(),
            "sparse_csc": dense.to_sparse_csc(),
            "sparse_bsr": dense.to_sparse_bsr((1, 2)),
            "sparse_bsc": dense.to_sparse_bsc((1, 2)),
            "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]),
            "quantized": torch.quantize_per_tensor(dense, 0.5, 3, torch.quint8),
            "channels": torch.quantize_per_channel(dense, torch.ones(2), torch.zeros(2), 0, torch.qint8),
            "meta": torch.empty(5, 7, device="meta", dtype=torch.bfloat16),
        }
    file = saved_and_read(made, tmp_path)
    assert not file.opaque
    ours = file.value
    for name, value in ours.items():
        assert type(value) is Composite
        assert value.kind == {"channels": "quantized"}.get(name, name)
    same(ours["sparse_coo"].parts["indices"], coo._indices())
    same(ours["sparse_coo"].parts["values"], coo._values())
    assert ours["sparse_coo"].parts["shape"] == (2, 4)
    same(ours["sparse_csr"].parts["crow_indices"], made["sparse_csr"].crow_indices())
    same(ours["sparse_csc"].parts["ccol_indices"], made["sparse_csc"].ccol_indices())
    same(ours["nested"].parts["sizes"], made["nested"]._nested_tensor_size())
    quantized = ours["quantized"].parts
    assert evaluate(quantized["values"]) == bits(made["quantized"].int_repr())
    assert quantized["values"].dtype.name == "quint8"
    assert quantized["qscheme"] == TorchConstant("qscheme", "per_tensor_affine")
    assert (quantized["scale"], quantized["zero_point"]) == (0.5, 3)
    assert ours["channels"].parts["axis"] == 0
    assert ours["meta"].parts["shape"] == (5, 7)
    assert ours["meta"].parts["dtype"] == TorchConstant("dtype", "bfloat16")


def make(name: str, *args: Any, module: str = "torch._utils") -> Any:
    return torch_objects.vocabulary(lambda pid: pid).constructors[module, name](args)


def test_tensors_of_devices_without_storages():
    """Those of XLA and others come as a numpy array, bfloat16 as float32, or as a tensor of the processor."""
    values = np.array([[1.5, -2.0]], dtype="<f4")
    array = NumpyArray("<f4", (1, 2), "C", values.tobytes())
    f32, bf16 = TorchConstant("dtype", "float32"), TorchConstant("dtype", "bfloat16")
    leaf = make("_rebuild_xla_tensor", array, f32, "xla:0", True)
    assert (leaf.shape, leaf.dtype.name, leaf.facts.requires_grad) == ((1, 2), "float32", True)
    assert evaluate(leaf) == values.tobytes()
    big = NumpyArray(">f4", (1, 2), "C", values.astype(">f4").tobytes())
    assert evaluate(make("_rebuild_device_tensor_from_numpy", big, f32, "xla:0", False)) == values.tobytes()
    narrowed = make("_rebuild_device_tensor_from_numpy", array, bf16, "xla:0", False)
    assert (narrowed.dtype.name, narrowed.tensor.kernel) == ("bfloat16", moves.Cast("float32", "bfloat16"))
    plain = make("_rebuild_tensor", STORAGE, 0, (2,), (1,))
    assert make("_rebuild_device_tensor_from_cpu_tensor", plain, f32, "mtia:0", False).tensor == plain.tensor
    assert make("_rebuild_device_tensor_from_cpu_tensor", plain, bf16, "mtia:0", False).shape == (2,)
    columns = NumpyArray("<f4", (2, 2), "F", bytes(16))
    assert make("_rebuild_xla_tensor", columns, f32, "xla:0", True).shape == (2, 2)
    columns = NumpyArray("<f4", (2, 3), "F", np.arange(6, dtype="<f4").reshape(2, 3).tobytes("F"))
    assert evaluate(make("_rebuild_xla_tensor", columns, f32, "xla:0", True)) == np.arange(6, dtype="<f4").tobytes()
    for unfit in (
        TorchConstant("dtype", "float64"),
        TorchConstant("dtype", "int32"),
        TorchConstant("layout", "strided"),
    ):
        with pytest.raises(torch_objects.MalformedError):
            make("_rebuild_xla_tensor", array, unfit, "xla:0", False)


def test_wrapper_subclasses_keep_what_they_wrap():
    """A DTensor says its type, size and placement, and holds the local tensor in its state."""
    local = make("_rebuild_tensor", STORAGE, 0, (2,), (1,))
    cls = Global("torch.distributed.tensor", "DTensor")
    f32, cpu = TorchConstant("dtype", "float32"), TorchConstant("device", "cpu")
    args = (cls, f32, (4,), (1,), 0, TorchConstant("layout", "strided"), cpu, False)
    state = (None, {"_local_tensor": local})
    wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
    value = make("_rebuild_from_type_v2", wrapper, cls, args, state, module="torch._tensor")
    assert type(value) is Composite
    assert value.kind == "torch.distributed.tensor.DTensor"
    assert value.parts["shape"] == (4,)
    assert value.parts["attributes"] is state
    parameter = make("_rebuild_parameter", value, True, OrderedDict())
    assert parameter.parts["requires_grad"] is True
    assert parameter.parts["class"] == "parameter"


def test_storages_without_data_and_dtypes_without_storages():
    meta = torch_storages.Storage(File("a.pt", 100), 0, 0, F32, "0", None, meta=True)
    value = make("_rebuild_tensor_v2", meta, 0, (1000,), (1,), True, OrderedDict())
    assert (value.kind, value.parts["shape"], value.parts["requires_grad"]) == ("meta", (1000,), True)
    with pytest.raises(RefusedError, match=r"torch\.int3"):
        make("_rebuild_tensor_v3", STORAGE, 0, (1,), (1,), False, None, TorchConstant("dtype", "int3"))
    with pytest.raises(RefusedError, match="FooStorage"):
        torch_storages.storage_id(("storage", Global("torch", "FooStorage"), "0", "cpu", 1))


def test_bare_storages_are_flat_tensors(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = [torch.arange(3.0).storage(), torch.arange(3.0).untyped_storage()]
    typed, untyped = saved_and_read(value, tmp_path).value
    assert isinstance(typed, LazyTensor)
    assert (typed.dtype.name, typed.shape) == ("float32", (3,))
    assert (untyped.dtype.name, untyped.shape) == ("uint8", (12,))
    assert evaluate(typed) == evaluate(untyped) == bits(torch.arange(3.0))


def test_objects_are_kept_as_data(tmp_path):
    model = nn.Linear(2, 3)
    file = saved_and_read({"args": argparse.Namespace(lr=0.1), "model": model, "path": Path("x")}, tmp_path)
    assert "torch.nn.modules.linear.Linear" in map(str, file.opaque)
    assert "argparse.Namespace" in map(str, file.opaque)
    inside = file.value["model"].state[0]["_parameters"]["weight"]
    assert evaluate(inside) == bits(model.weight)
    assert inside.facts.kind == "parameter"


# ---------------------------------------------------------------------------------------------------------- archives


@every("protocol", [2, 3, 4, 5])
def test_pickle_protocols(protocol, tmp_path):
    tree = OrderedDict(w=torch.randn(3, 4), b=[torch.ones(2), {"x": (1, 2)}])
    check(tree, tmp_path, pickle_protocol=protocol)


@every("name", ["model.pt", "my.model.v1.pt", "plain", "é.pt", "a b.ckpt", "data.pkl.pt"])
def test_the_name_in_the_archive_is_of_no_importance(name, tmp_path):
    tree = {"w": torch.randn(3)}
    check(tree, tmp_path, name)
    os.rename(tmp_path / name, tmp_path / "renamed.bin")
    same(read(tmp_path / "renamed.bin").value, tree)


def test_archives_made_in_memory(tmp_path):
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(3)}, buffer)
    (tmp_path / "m.pt").write_bytes(buffer.getvalue())
    same(read(tmp_path / "m.pt").value, {"w": torch.arange(3)})


def test_an_archive_inside_a_file(tmp_path):
    trees = [{"w": torch.randn(50)}, {"w": torch.arange(7), "b": torch.ones(2, 2)}]
    spans = []
    with (tmp_path / "both").open("wb") as file:
        for tree in trees:
            file.write(b"between")
            buffer = io.BytesIO()
            torch.save(tree, buffer)
            spans.append((file.tell(), len(buffer.getvalue())))
            file.write(buffer.getvalue())
    for span, tree in zip(spans, trees, strict=True):
        found = read(tmp_path / "both", *span)
        same(found.value, tree)
        assert all(spans[0][0] <= record.offset for record in found.records)
    assert "data was inserted or removed before it" in refusal(tmp_path / "both")
    with pytest.raises(CorruptError, match=r"both \(bytes 7 to 1000\)"):
        read(tmp_path / "both", 7, 993)


def test_checksums_are_told_and_those_of_descriptions_checked(tmp_path):
    import zlib

    path = tmp_path / "m.pt"
    file = saved_and_read({"a": torch.randn(100), "b": torch.ones(0)}, tmp_path, "m.pt")
    data = path.read_bytes()
    assert [record.crc for record in file.records] == [
        zlib.crc32(data[record.offset : record.offset + record.size]) for record in file.records
    ]
    first = file.records[0]
    assert file.records.containing(first.offset + 399) == 0
    assert file.records.containing(first.offset - 1) is None
    assert file.records.containing(first.offset + 400) is None
    assert file.records[:] == list(file.records)

    at = data.index(b"_rebuild_tensor_v2")
    path.write_bytes(data[:at] + b"_REBUILD" + data[at + 8 :])
    assert "'m/data.pkl' does not match its checksum" in refusal(path)

    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        file = check({"a": torch.randn(100), "b": torch.ones(0)}, tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert [record.crc for record in file.records] == [None, 0]


def patched_members(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Write an archive anew, with other contents, as zipfile does it: without data descriptors and padding."""
    with zipfile.ZipFile(path) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members:
            new.writestr(name, change(name, content))


def of_a_big_endian_machine(path: Path, dtype: torch.dtype) -> None:
    """The archive of tensors of `dtype`, as such a machine would have written it."""
    unit = dtype.itemsize // (2 if dtype.is_complex else 1)

    def swapped(name: str, content: bytes) -> bytes:
        if name.endswith("/byteorder"):
            return b"big"
        return np.frombuffer(content, f"V{unit}").view(f"u{unit}").byteswap().tobytes() if "/data/" in name else content

    patched_members(path, swapped)


# Of these torch has typed storages; it keeps others in storages of bytes, without a byte order.
TYPED = [dtype for dtype in SAVABLE if torch.storage._dtype_to_storage_type_map().get(dtype)]


@every("dtype", [d for d in TYPED if d.itemsize > 1])
def test_big_endian_archives(dtype, tmp_path):
    tree = {"w": numbers(dtype, 3, 4), "column": numbers(dtype, 3, 4)[:, 1]}
    check(tree, tmp_path)
    of_a_big_endian_machine(tmp_path / "model.pt", dtype)
    file = read(tmp_path / "model.pt")
    assert file.byteorder == "big"
    for name, value in tree.items():
        assert evaluate(file.value[name]) == bits(value)
    same(file.value, torch.load(tmp_path / "model.pt"))


@every("dtype", [d for d in SAVABLE if d not in TYPED and d.itemsize > 1])
def test_where_torch_does_not_put_the_bytes_of_a_big_endian_archive_in_order_it_is_refused(dtype, tmp_path):
    tree = {"w": numbers(dtype, 3, 4)}
    check(tree, tmp_path)
    of_a_big_endian_machine(tmp_path / "model.pt", dtype)
    assert bits(torch.load(tmp_path / "model.pt")["w"]) != bits(tree["w"])
    with pytest.raises(CorruptError, match="big-endian"):
        read(tmp_path / "model.pt")


def test_archives_without_the_members_of_newer_releases(tmp_path):
    tree = {"w": torch.randn(3)}
    saved_and_read(tree, tmp_path)
    with zipfile.ZipFile(tmp_path / "model.pt") as old, zipfile.ZipFile(tmp_path / "old.pt", "w") as new:
        for name in ("model/version", "model/data/0", "model/data.pkl"):
            new.writestr(name, old.read(name))
    file = read(tmp_path / "old.pt")
    same(file.value, tree)
    assert file.byteorder == "little"


def test_other_compression_is_refused_but_only_for_the_tensors(tmp_path):
    tree = {"w": torch.zeros(1000), "none": torch.zeros(0)}
    saved_and_read(tree, tmp_path)
    with zipfile.ZipFile(tmp_path / "model.pt") as old:
        for name, of_tensors in (("bzip2.pt", zipfile.ZIP_BZIP2), ("lzma.pt", zipfile.ZIP_LZMA), ("not.pt", 0)):
            with zipfile.ZipFile(tmp_path / name, "w") as new:
                for info in old.infolist():
                    method = of_tensors if "data/" in info.filename else zipfile.ZIP_DEFLATED
                    new.writestr(info.filename, old.read(info), method)
    for name in ("bzip2", "lzma"):
        with pytest.raises(UnsupportedError, match=rf"compressed \({name}\)"):
            read(tmp_path / f"{name}.pt")
    same(read(tmp_path / "not.pt").value, tree)


def test_of_many_tensors_that_are_alike_one_may_be_compressed(tmp_path):
    tree = {f"layer.{number}": torch.full((64,), float(number)) for number in range(400)}
    saved_and_read(tree, tmp_path)
    with zipfile.ZipFile(tmp_path / "model.pt") as old, zipfile.ZipFile(tmp_path / "one.pt", "w") as new:
        for info in old.infolist():
            is_packed = info.filename.endswith("data/300")
            new.writestr(info.filename, old.read(info), zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED)
    same(read(tmp_path / "one.pt").value, tree)


@every("state", [lambda stored: stored, lambda stored: {"a": 1, "s": [stored]}])
def test_a_storage_of_the_meta_device_has_no_data(state, tmp_path):
    """torch does not save one, but reads it as empty memory of its size."""

    class Persistent:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "meta", 4) if isinstance(value, Persistent) else None

    pickled = io.BytesIO()
    Pickler(pickled, 2).dump(state(Persistent()))
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickled.getvalue())
    refused = ckptconv_here("pt2safetensors", tmp_path / "m.pt")
    refused.refused(5, "lacks the data of storage '0'", "meta device")


def test_an_archive_larger_than_four_gigabytes(tmp_path):
    """A sparse file: a storage of 5 GB of zeros, another after it."""
    path = tmp_path / "large.pt"
    size = 5 << 30
    pickled = io.BytesIO()
    large, small = torch.empty(size, dtype=torch.uint8, device="meta"), torch.arange(3)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.pid if isinstance(value, Persistent) else None

    class Persistent:
        def __init__(self, *pid: Any):
            self.pid = ("storage", *pid)

    class Rebuilt:
        def __init__(self, *args: Any):
            self.args = args

        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (*self.args, False, OrderedDict())

    tree = {
        "large": Rebuilt(Persistent(torch.ByteStorage, "0", "cpu", size), 0, (size,), (1,)),
        "small": Rebuilt(Persistent(torch.LongStorage, "1", "cpu", 3), 0, (3,), (1,)),
    }
    Pickler(pickled, 2).dump(tree)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled.getvalue())
        # A member of which only the length is written.
        with archive.open(zipfile.ZipInfo("a/data/0"), "w", force_zip64=True) as member:
            archive.fp.seek(size, os.SEEK_CUR)
            member._file_size = member._compress_size = size
        archive.writestr("a/data/1", small.numpy().tobytes())
    file = read(path)
    assert file.value["large"].shape == large.shape
    assert file.value["large"].nbytes == size
    assert file.value["small"].tensor.offset > size
    assert evaluate(file.value["small"]) == bits(small)


def test_only_what_is_needed_is_read(tmp_path):
    base = torch.randn(3_000_000)
    file = saved_and_read({"view": base[1_000_000:1_000_100], "large": base.double()}, tmp_path)
    assert file.bytes_read < 100_000
    moves = list(file.value["view"].moves(0, 400))
    assert sum(move.source.nbytes for move in moves) == 400


def test_files_are_told_apart(tmp_path):
    one = saved_and_read({"w": torch.ones(2)}, tmp_path, "one.pt")
    two = saved_and_read({"w": torch.ones(2)}, tmp_path, "two.pt")
    assert one.value["w"].facts.storage != two.value["w"].facts.storage


# ------------------------------------------------------------------------------------------------- hostile and broken


HUGE = 1 << 62


@every(
    "offset, size, stride",
    [
        (0, (11,), (1,)),
        (1, (10,), (1,)),
        (0, (2,), (10,)),
        (0, (10, 2), (1, 1)),
        (9, (1, 2), (0, 1)),
        (10, (), ()),
        (-1, (1,), (1,)),
        (True, (1,), (1,)),
        (0.0, (1,), (1,)),
        (None, (1,), (1,)),
        (0, (-1,), (1,)),
        (0, (1,), (-1,)),
        (0, (1, 2), (1,)),
        (0, (1,), (1, 1)),
        (0, (True,), (1,)),
        (0, (1.0,), (1,)),
        (0, ("1",), (1,)),
        (0, [1], [1]),
        (0, 5, 1),
        (0, None, None),
        (0, (1,) * 65, (1,) * 65),
        (0, (HUGE, HUGE), (0, 0)),
        (0, (HUGE,), (0,)),
        (0, (2,), (HUGE,)),
        (0, (2,), (1 << 70,)),
        (0, (1 << 70,), (0,)),
        (HUGE, (1,), (1,)),
        (0, ((1,),), ((1,),)),
    ],
)
def test_a_view_must_lie_inside_its_storage(offset, size, stride):
    args = (STORAGE, offset, size, stride, False, OrderedDict())
    with pytest.raises(torch_objects.MalformedError):
        make("_rebuild_tensor_v2", *args)
    with pytest.raises(torch_objects.MalformedError):
        make("_rebuild_tensor_v3", *args, TorchConstant("dtype", "float32"))


def test_views_at_the_very_edge():
    for offset, size, stride in (
        (0, (10,), (1,)),
        (9, (), ()),
        (9, (5, 3), (0, 0)),
        (0, (2, 2), (8, 1)),
        (99, (0,), (1,)),
    ):
        leaf = make("_rebuild_tensor_v2", STORAGE, offset, size, stride, False, None)
        assert leaf.shape == size
        for move in leaf.moves(0, leaf.nbytes):
            for at in move.source.offsets():
                assert 8 <= at <= at + move.source.length <= 48


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.sampled_from([
        STORAGE, Size((2, 3)), TorchConstant("dtype", "float32"), TorchConstant("dtype", "int3"), OrderedDict(),
        TorchConstant("layout", "sparse_coo"), Global("torch", "FloatStorage"),
        Opaque(Global("numpy", "dtype"), ("f8",)),
        Global("torch._utils", "_rebuild_tensor_v2"), Global("numpy", "ndarray"), Composite("meta", {}),
        Tagged(Stored(File("a", 9), 0, F32, (2,), (1,)), tensors.TensorFacts()), NumpyArray("<f4", (1,), "C", b"1234"),
        (STORAGE, 0, (2,), (1,), False, None), {"conj": True}, "storage", "torch.strided",
    ]),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=8).map(tuple),
    max_leaves=12,
)  # fmt: skip
VOCABULARY = torch_objects.vocabulary(lambda pid: pid)


@given(st.lists(junk, max_size=8).map(tuple))
@examples(50)
def test_constructors_stand_any_arguments(args):
    for name, constructor in VOCABULARY.constructors.items():
        note(".".join(name))
        with contextlib.suppress(torch_objects.MalformedError):
            constructor(args)


@given(st.one_of(junk, st.tuples(st.just("storage"), junk, junk, junk, junk)))
@examples(50)
def test_persistent_ids_may_be_anything(pid):
    with contextlib.suppress(torch_objects.MalformedError):
        assert torch_storages.storage_id(pid).numel >= 0


def test_storage_classes():
    for module, name, dtype in (
        ("torch", "FloatStorage", "float32"),
        ("torch.cuda", "HalfStorage", "float16"),
        ("torch.storage", "UntypedStorage", "uint8"),
        ("torch.storage", "_UntypedStorage", "uint8"),
        ("torch", "BFloat16Storage", "bfloat16"),
        ("torch", "QInt8Storage", "qint8"),
    ):
        assert torch_storages.storage_dtype(Global(module, name)).name == dtype
    for module, name in (
        ("os", "FloatStorage"),
        ("torch", "Storage"),
        ("torch", "FooStorage"),
        ("torchx", "FloatStorage"),
    ):
        assert torch_storages.storage_dtype(Global(module, name)) is None
    assert torch_storages.storage_dtype("FloatStorage") is None


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "m.pt"
    torch.save({"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3, dtype=torch.int64)}, path)
    return path.read_bytes()


def put(data: bytes, at: int, form: str, value: int) -> bytes:
    packed = struct.pack(form, value)
    return data[:at] + packed + data[at + len(packed) :]


Change: TypeAlias = Callable[[bytes], bytes]


def in_entry(name: bytes, at: int, form: str, value: int) -> Change:
    """Change a number in the directory's entry of a member."""
    return lambda data: put(data, data.rindex(name) - 46 + at, form, value)


def in_header(name: bytes, at: int, form: str, value: int) -> Change:
    """Change a number in the local header of a member."""
    return lambda data: put(data, data.index(name) - 30 + at, form, value)


def in_end(signature: bytes, at: int, value: int) -> Change:
    """Change a number in a record at the end."""
    return lambda data: put(data, data.rindex(signature) + at, "<Q", value)


def both(one: Change, other: Change) -> Change:
    return lambda data: other(one(data))


def instead(old: bytes, new: bytes, count: int = -1) -> Change:
    return lambda data: data.replace(old, new, count)


def one_entry_less(data: bytes) -> bytes:
    """Both records at the end count one entry of the directory less."""
    end, last = data.rindex(END), data.rindex(b"PK\x05\x06")
    count = struct.unpack_from("<Q", data, end + 24)[0] - 1
    for place, form in ((end + 24, "<Q"), (end + 32, "<Q"), (last + 8, "<H"), (last + 10, "<H")):
        data = put(data, place, form, count)
    return data


ZERO, ONE = b"m/data/0", b"m/data/1"
END, LOCATOR = b"PK\x06\x06", b"PK\x06\x07"
DAMAGE: dict[str, tuple[Change, str]] = {
    "longer than its room": (both(in_entry(ZERO, 20, "<I", 5000), in_entry(ZERO, 24, "<I", 5000)), "overlaps"),
    "shorter than its tensor": (
        both(in_entry(ZERO, 20, "<I", 92), in_entry(ZERO, 24, "<I", 92)),
        "but its record has 92",
    ),
    "two sizes": (in_entry(ZERO, 24, "<I", 92), "stored uncompressed, but in 96 bytes instead of 92"),
    "two members in one place": (lambda d: in_entry(ONE, 42, "<I", d.index(ZERO) - 30)(d), "overlaps"),
    "beyond the end": (in_entry(ONE, 42, "<I", 1 << 30), "overlaps"),
    "elsewhere": (lambda d: in_entry(ONE, 42, "<I", d.index(ONE) - 29)(d), "is not the member|belong to no"),
    "another name in the local header": (instead(ZERO, b"m/data/9", 1), "is not the member b'm/data/0'"),
    "another name in both": (instead(ZERO, b"m/data/9"), "lacks"),
    "a member twice": (instead(ONE, ZERO), "two members named 'm/data/0'"),
    "no local header": (in_header(ZERO, 0, "<I", 0), "is not the member"),
    "long padding": (in_header(ZERO, 28, "<H", 60000), "overlaps"),
    "encrypted": (in_entry(ZERO, 8, "<H", 1), "encrypted"),
    "encrypted, as the local header says": (in_header(ZERO, 6, "<H", 1), "is not the member"),
    "an unknown method": (both(in_entry(ZERO, 10, "<H", 77), in_header(ZERO, 8, "<H", 77)), r"compressed \(77\)"),
    "another method in the local header": (in_header(ZERO, 8, "<H", 8), "is not the member"),
    "another size in the local header": (in_header(ZERO, 22, "<I", 95), "is not the member"),
    "sizes that stand nowhere": (in_entry(ZERO, 24, "<I", 2**32 - 1), "has a size or offset beyond 4 GiB"),
    "a name that is not text": (instead(ZERO, b"m/dat\xff/0"), "not UTF-8"),
    "another byte order": (instead(b"little", b"middle"), "checksum"),
    "more entries than the buffer holds": (both(in_end(END, 24, 1 << 40), in_end(END, 32, 1 << 40)), "contradict"),
    "more entries than there are": (both(in_end(END, 24, 12), in_end(END, 32, 12)), "contradict"),
    "fewer entries than there are": (one_entry_less, "has more than"),
    "several disks": (in_end(END, 16, 1), "several files"),
    "one of several disks": (in_end(END, 24, 3), "contradict"),
    "a directory elsewhere": (in_end(END, 48, 100), "contradict"),
    "a directory beyond the end": (in_end(END, 48, 1 << 63), "contradict"),
    "a zip64 record beyond the end": (in_end(LOCATOR, 8, 1 << 63), "zip64 end record"),
    "a longer zip64 record": (in_end(END, 4, 60), "contradict"),
    "a zip64 record elsewhere": (in_end(LOCATOR, 8, 5), "zip64 end record"),
}


@every("damage, reason", DAMAGE.values(), ids=DAMAGE)
def test_every_contradiction_is_found(damage, reason, sound, tmp_path):
    path = tmp_path / "bad.pt"
    damaged = damage(sound)
    assert damaged != sound
    path.write_bytes(damaged)
    with pytest.raises((CorruptError, UnsupportedError), match=reason) as caught:
        read(path)
    assert "bad.pt" in str(caught.value)


def test_other_contradictions(tmp_path):
    tree = {"w": torch.arange(3.0)}
    saved_and_read(tree, tmp_path)
    original = (tmp_path / "model.pt").read_bytes()

    def changed(change: Callable[[str, bytes], bytes]) -> str:
        path = tmp_path / "changed.pt"
        path.write_bytes(original)
        patched_members(path, change)
        return refusal(path)

    assert not changed(lambda name, content: content)
    assert "needs 12 bytes of storage '0', but its record has 11" in changed(
        lambda name, content: content[:11] if name.endswith("data/0") else content
    )
    assert "neither" in changed(
        lambda n, c: b"middle" if n.endswith("byteorder") else c
    ) or "not little or big" in changed(lambda name, content: b"middle" if name.endswith("byteorder") else content)


def test_a_storage_of_two_sizes_is_refused(tmp_path):
    saved_and_read([torch.arange(3.0)], tmp_path)
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        pickled = archive.read("model/data.pkl")
    # K\x03t: three elements; twelve bytes are there.
    patched_members(
        tmp_path / "model.pt", lambda n, c: pickled.replace(b"K\x03t", b"K\x02t") if n.endswith("data.pkl") else c
    )
    assert "needs 8 bytes of storage '0', but its record has 12" in refusal(tmp_path / "model.pt")


def test_a_pickle_may_not_inflate_without_end(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"0" * 50_000_000 + b".")
    tracemalloc.start()
    with pytest.raises(LimitError, match=r"'a/data\.pkl' has 50000003 bytes; at most"):
        read(tmp_path / "bomb.pt")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_archives_of_others_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    shutil.make_archive(str(tmp_path / "other"), "zip", tmp_path, "x")
    with pytest.raises(UnsupportedError, match=r"no member named data\.pkl"):
        read(tmp_path / "other.zip")


def test_limits_on_what_is_read_whole(tmp_path, monkeypatch):
    saved_and_read([1], tmp_path)
    monkeypatch.setattr(zip_archives, "MAX_CONTENT", 6)
    with pytest.raises(LimitError, match=r"data\.pkl' has \d+ bytes; at most 6"):
        read(tmp_path / "model.pt")
    monkeypatch.setattr(zip_archives, "MAX_DIRECTORY", 3)
    with pytest.raises(LimitError, match="directory"):
        read(tmp_path / "model.pt")

"""The common readers of each format, kept from doing harm: each answers for files, in a process of its own.

`main` runs in a process that `workers` forks. It imports torch once; then each reader is forked, and again when it
dies, be it of what it may take of time or memory. It gets the path of a file, a line each, and answers with a line of
JSON: "end" is "value", "error", or "died"; "tree" is the value, "calls" what it would have called that is not known to
be harmless.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from differential.trees import HARMLESS, Text, constants_of_torch, harmless_of_torch, inert, theirs, tree_of, usual_name

MEMORY = 2 << 30
SECONDS = 10

_calls: list[tuple[str, str]] = []
_reading = threading.Event()  # set while a reader reads
_known: dict[tuple[str, str], Any] = {}


# ------------------------------------------------------------------------------------------------------- no harm


def find_class(module: str, name: str) -> Any:
    """What a name stands for: itself where it is harmless, else what only takes note."""
    found = _known.get(usual_name(module, name), _known.get((module, name)))
    return inert(module, name, _calls) if found is None else found


def persistent(pid: Any) -> Any:
    made = inert("pickle", "persistent_load", [])
    made = made(*pid) if isinstance(pid, tuple) else made(pid)
    made.how, made.args = "persistent", pid
    return made


class BareUnpickler(pickle.Unpickler):
    """For torch, which sets `persistent_load`."""

    def find_class(self, module: str, name: str) -> Any:
        return find_class(module, name)


class CUnpickler(BareUnpickler):
    def persistent_load(self, pid: Any) -> Any:
        return persistent(pid)


class PythonUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    def find_class(self, module: str, name: str) -> Any:
        return find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return persistent(pid)


# In place of the module `pickle`, for torch.load.
PICKLE = types.SimpleNamespace(
    __name__="pickle",
    Unpickler=BareUnpickler,
    UnpicklingError=pickle.UnpicklingError,
    load=lambda file, **options: BareUnpickler(file, **options).load(),
)
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.putenv",
    "os.kill",
    "os.truncate",
    "subprocess.",
    "socket.",
    "ctypes.",
    "webbrowser.",
    "urllib.",
    "ftplib.",
    "smtplib.",
    "code.__new__",
    "winreg.",
    "pty.",
    "sqlite3.",
    "syslog.",
)
_ON_FILES = (
    "open",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "os.utime",
    "os.link",
    "os.symlink",
    "shutil.rmtree",
)


def watch(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook: nothing that a reader does reaches beyond its own temporary directory."""
    if not _reading.is_set():
        return
    bad = event.startswith(_FORBIDDEN)
    if event in _ON_FILES:
        writes = event != "open" or (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        paths = args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]
        inside = all(
            isinstance(path, int) or os.path.abspath(os.fsdecode(path)).startswith(os.getcwd()) for path in paths
        )
        bad = bad or bool(writes and not inside)
    if bad:
        _calls.append(("the operating system", event))
        raise PermissionError(f"{event} {args!r:.200}")


# ------------------------------------------------------------------------------------------------------ the readers


def unpickled(kind: type) -> Callable[[str], Any]:
    def read(path: str) -> Any:
        file = io.BytesIO(Path(path).read_bytes())
        value = kind(file, encoding="utf-8").load()
        return [value, Text(f"ends at {file.tell()}")]

    return read


def weights_only(path: str) -> Any:
    """torch's restricted unpickler, by itself."""
    from torch import _weights_only_unpickler

    file = io.BytesIO(Path(path).read_bytes())
    unpickler = _weights_only_unpickler.Unpickler(file, encoding="utf-8")
    unpickler.persistent_load = persistent  # type: ignore[method-assign]
    value = unpickler.load()
    return [value, Text(f"ends at {file.tell()}")]


def torch_load(**options: Any) -> Callable[[str], Any]:
    def read(path: str) -> Any:
        import torch

        if options.get("mmap") and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(member.compress_type for member in archive.infolist()):
                    raise ValueError("mmap takes compressed bytes for those of tensors")
        value = torch.load(path, map_location="cpu", **options)
        if isinstance(value, torch.jit.ScriptModule):
            raise TypeError("a TorchScript archive, of which we read the weights only")
        return value

    return read


def by_zipfile(path: str) -> Any:
    """What an archive of torch.save holds by `zipfile`: its own names, and the bytes that it gives for each."""
    import torch

    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
        prefix = min(pickles, key=len).removesuffix("data.pkl")
        names = set(archive.namelist())
        swapped = prefix + "byteorder" in names and archive.read(prefix + "byteorder") == b"big"
        storages: dict[str, Any] = {}

        class Unpickler(BareUnpickler):
            def find_class(self, module: str, name: str) -> Any:
                if "Storage" in name:
                    with contextlib.suppress(KeyError):
                        return torch.serialization.StorageType(name)
                return super().find_class(module.replace("torch.tensor", "torch._tensor"), name)

            def persistent_load(self, pid: Any) -> Any:
                _, cls, key, _, numel = pid
                dtype = torch.uint8 if cls is torch.UntypedStorage else cls.dtype
                if key not in storages:
                    data = archive.read(f"{prefix}data/{key}")
                    if len(data) != numel * torch._utils._element_size(dtype):
                        raise ValueError(f"storage {key} has {len(data)} bytes")
                    untyped = torch.UntypedStorage(len(data))
                    untyped.copy_(
                        torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
                    ) if data else None
                    if swapped:
                        untyped.byteswap(dtype)
                    storages[key] = torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
                return storages[key]

        return Unpickler(io.BytesIO(archive.read(prefix + "data.pkl")), encoding="utf-8").load()


def by_safetensors(path: str) -> Any:
    """Names, dtypes, shapes and bytes as `safetensors.deserialize` has them, and the metadata of `safe_open`."""
    from safetensors import deserialize, safe_open

    tensors = {
        name: f"{entry['dtype']} {list(entry['shape'])} {bytes(entry['data']).hex()}"
        for name, entry in sorted(deserialize(Path(path).read_bytes()))
    }
    with safe_open(path, "pt") as opened:
        metadata = dict(sorted((opened.metadata() or {}).items()))
        if sorted(opened.keys()) != list(tensors):
            raise ValueError("safe_open and deserialize differ")
    return {"tensors": tensors, "metadata": metadata}


READERS: dict[str, Callable[[str], Any]] = {
    "C pickle": unpickled(CUnpickler), "Python pickle": unpickled(PythonUnpickler),
    "weights_only pickle": weights_only, "torch.load": torch_load(weights_only=False, pickle_module=PICKLE),
    "torch.load, weights_only": torch_load(weights_only=True),
    "torch.load, mmap": torch_load(weights_only=True, mmap=True), "zipfile": by_zipfile,
    "safetensors": by_safetensors,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def reading() -> Iterator[None]:
    _calls.clear()
    # Since the start of the process: it may have so much more.
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS, hard))
    signal.alarm(60 * SECONDS)  # for one that waits: on a busy machine, all take long
    _reading.set()
    try:
        yield
    finally:
        _reading.clear()
        signal.alarm(0)


def answer(reader: str, path: str) -> dict[str, Any]:
    """What `reader` makes of a file."""
    try:
        with reading():
            value = READERS[reader](path)
        return {"end": "value", "tree": tree_of(value, theirs), "calls": _calls}
    except BaseException as error:
        return {"end": "error", "error": f"{type(error).__name__}: {error}"[:500], "calls": _calls}


def serve(reader: str, fd: int) -> None:
    """Answer until there is no more to answer."""
    _known.update({**HARMLESS, **constants_of_torch()} if "pickle" in reader else harmless_of_torch())
    vmsize = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (vmsize + MEMORY, vmsize + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(watch)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        tempfile.tempdir = place
        while line := _line(fd):
            _send(fd, answer(reader, json.loads(line)))


def keep(reader: str, fd: int) -> None:
    """Serve in a child, and in another when that dies, until the other side has gone."""
    while True:
        child = os.fork()
        if not child:
            serve(reader, fd)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return
        _send(fd, {"end": "died", "error": f"signal {os.WTERMSIG(status)}", "calls": []})


def _line(fd: int) -> bytes:
    """The next line, byte by byte: what is read ahead would be lost with a child that dies."""
    line = b""
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return line


def _send(fd: int, answered: dict[str, Any]) -> None:
    left = memoryview(json.dumps(answered).encode() + b"\n")
    while left:
        left = left[os.write(fd, left) :]


def main(ends: dict[int, str]) -> None:
    """Have each reader answer at its end, by number, until the other side has gone."""
    import numpy  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import torch.nested._internal.nested_tensor

    torch.set_num_threads(1)
    torch.load(_a_file(), weights_only=True)  # whatever torch imports at the first time
    for fd, name in ends.items():
        if not os.fork():
            for other in ends:
                if other != fd:
                    os.close(other)
            with contextlib.suppress(OSError):
                keep(name, fd)
            os._exit(0)
    for fd in ends:
        os.close(fd)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _a_file() -> io.BytesIO:
    import torch

    buffer = io.BytesIO()
    torch.save({"a": torch.ones(1)}, buffer)
    return io.BytesIO(buffer.getvalue())

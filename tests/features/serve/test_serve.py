"""`ckptconv serve`: huggingface_hub and plain HTTP get the files of a conversion; hostile clients get nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from cells import of_features
from checkpoints import COMMAND, ZERO, ckptconv_here, contents
from jsonschema import Draft202012Validator
from processes import PROGRAM, Process, prepared
from remote import a_model
from safetensors.torch import save_file

import ckptconv
from ckptconv.errors import StoppedError
from ckptconv.features.serve import server
from ckptconv.features.serve.server import Server
from ckptconv.features.virtual_files.files import VirtualFiles
from ckptconv.formats.registered import DESCRIBING

MIB = 1 << 20
SOURCES: dict[str, tuple[str, ...]] = {
    "zero": (),
    "zero in bfloat16": ("--dtype", "bf16"),
    "model.pt": (),
    "model.pt in shards": ("--max-shard-size", "5MB"),
    **{f"x{suffix}": () for suffix in DESCRIBING},
    **{name: () for more in of_features("SERVED") for name in more},
    **{f"{name} in bfloat16": ("--dtype", "bf16") for more in of_features("SERVED") for name in more},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    shutil.copytree(ZERO / "z3_fp32_w4" / "checkpoint", place / "zero")
    for name, path in itertools.chain(*(more.items() for more in of_features("SERVED"))):
        shutil.copytree(path, place / name)
    torch.save(a_model(), place / "model.pt")
    for suffix in DESCRIBING:
        ckptconv.convert(place / "model.pt", place / f"x{suffix}", fsync=False, dtype="bf16", max_shard_size="5MB")
    return place


FIRST = "for ckptconv and curl: "


@contextlib.contextmanager
def process_serving(source: Path, *options: object) -> Iterator[tuple[str, Process]]:
    """The address of `ckptconv serve`, without the name of a file, and its process."""
    with process_printing(source, *options) as (line, process):
        assert line.startswith(FIRST)
        yield line.removeprefix(FIRST).rpartition("/")[0], process


@contextlib.contextmanager
def process_printing(source: Path, *options: object) -> Iterator[tuple[str, Process]]:
    """The first line of `ckptconv serve`, and its process."""
    process = prepared().python(PROGRAM, "serve", source, *options)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def serving(files: VirtualFiles, host: str = "127.0.0.1") -> Iterator[Server]:
    """A server in a thread of this process."""
    with files, Server(files, host) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Server]:
    with serving(VirtualFiles(place / "model.pt")) as made:
        yield made


@pytest.fixture(scope="module")
def whole(place: Path) -> bytes:
    ckptconv.convert(place / "model.pt", place / "whole", fsync=False)
    return (place / "whole" / "model.safetensors").read_bytes()


class Answer:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()


def connect(address: Server | str) -> http.client.HTTPConnection:
    parts = urlsplit(address if isinstance(address, str) else address.url)
    return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=600)


def ask(address: Server | str, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = connect(address)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return Answer(connection.getresponse())
    finally:
        connection.close()


def raw(address: Server, data: bytes) -> bytes:
    """What comes back for `data` until the server closes the connection."""
    with socket.create_connection(address.server_address[:2], timeout=600) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


# ----------------------------------------------------------------------------------------------------- huggingface_hub


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub ask servers, whatever tests of other modules have said."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("case", SOURCES)
def test_huggingface_hub_downloads_what_a_conversion_writes(case: str, place: Path, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    name, options = case.split(" in ", maxsplit=1)[0], SOURCES[case]
    given = {"dtype": "bf16"} if "bf16" in options or name.startswith("x.") else {}
    size = {"max_shard_size": "5MB"} if "5MB" in options or name.startswith("x.") else {}
    source = place / ("model.pt" if name.startswith("x.") else name)
    ckptconv.convert(source, tmp_path / "plain", fsync=False, **given, **size)
    expected = {each: hashlib.sha256(data).digest() for each, data in contents(tmp_path / "plain").items()}
    del expected[".ckptconv-manifest.json"]
    with process_serving(place / name, *options) as (url, _):
        got = hub.snapshot_download("any/name", endpoint=url, cache_dir=tmp_path / "cache")
        assert {each: hashlib.sha256(data).digest() for each, data in contents(Path(got)).items()} == expected
        for each, digest in expected.items():
            path = hub.hf_hub_download("other", each, revision="v1", endpoint=url, cache_dir=tmp_path / "cache")
            assert hashlib.sha256(Path(path).read_bytes()).digest() == digest


@pytest.mark.usefixtures("online")
def test_huggingface_hub_is_told_of_the_files(served: Server, whole: bytes) -> None:
    hub = pytest.importorskip("huggingface_hub")
    api = hub.HfApi(endpoint=served.url)
    for paths in ("model.safetensors", ["none.bin", "model.safetensors", "model.safetensors"], ["/etc/passwd"]):
        found = api.get_paths_info("org/model", paths)
        assert [(each.path, each.size) for each in found] == [("model.safetensors", len(whole))] * (
            "/etc" not in paths[0]
        )
    (main,) = api.list_repo_refs("org/model", include_pull_requests=True).branches
    assert main.name == "main"
    assert main.target_commit == api.model_info("org/model").sha
    sizes = {each.rfilename: each.size for each in api.model_info("org/model", files_metadata=True).siblings}
    assert sizes["model.safetensors"] == len(whole)
    assert all(each.size is None for each in api.model_info("org/model").siblings)


def test_a_form_that_is_none_is_refused(served: Server) -> None:
    for told, body, status in (
        (b"Content-Length: 99999999", b"", 413),
        (b"Content-Length: x", b"", 413),
        (b"Transfer-Encoding: chunked", b"0\r\n\r\n", 413),
        (b"Content-Length: 9", b"paths=\xff\xfe\xfd", 400),
        (b"Content-Length: 0", b"", 200),
    ):
        line = b"POST /api/models/a/b/paths-info/main HTTP/1.1\r\nHost: localhost\r\n"
        with socket.create_connection(served.server_address[:2], 5) as connection:
            connection.sendall(line + told + b"\r\n\r\n" + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 %d " % status), told


def test_huggingface_hub_by_its_environment(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    program = (
        "import sys, huggingface_hub as hub\n"
        "print(hub.hf_hub_download('any/name', 'model.safetensors'))\n"
        "print(hub.HfApi().model_info('any/name').sha, hub.file_exists('any/name', 'none.json'))\n"
    )
    with process_serving(place / "zero") as (url, _):
        # Other tests forbid to ask the real hub.
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        done = prepared().run(program, env=environment)
    path, told = done.stdout.splitlines()
    sha, exists = told.split()
    assert Path(path).parent.name == sha
    assert exists == "False"
    ckptconv.convert(place / "zero", tmp_path / "plain.safetensors")
    assert Path(path).read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


# --------------------------------------------------------------------------------------------------------------- HTTP


def test_the_file_and_its_headers(served: Server, whole: bytes) -> None:
    for path in (
        "/model.safetensors",
        "/any/name/resolve/main/model.safetensors",
        "/gpt2/resolve/x%2Fy/model.safetensors",
    ):
        answer = ask(served, path)
        assert (answer.status, answer.body) == (200, whole)
        head = ask(served, path, "HEAD")
        assert (head.status, head.body) == (200, b"")
        for each in (answer, head):
            assert each.headers["Content-Length"] == str(len(whole))
            assert each.headers["X-Repo-Commit"] == served.files.version
            assert each.headers["ETag"] == f'"{served.files["model.safetensors"].tag}"'
    assert ask(served, "/model.safetensors", If_None_Match=answer.headers["ETag"]).status == 304


def test_ranges(served: Server, whole: bytes) -> None:
    for asked, start, stop in (
        ("bytes=0-0", 0, 1),
        ("bytes=5-", 5, None),
        ("bytes=-9", -9, None),
        ("bytes=-99999999999", 0, None),
        ("bytes=1000000-2222222", 1_000_000, 2_222_223),
        ("bytes=7-9999999999999999999", 7, None),
    ):
        answer = ask(served, "/model.safetensors", Range=asked)
        assert (answer.status, answer.body) == (206, whole[start:stop]), asked
        first = range(len(whole))[start:stop][0]
        expected = f"bytes {first}-{first + len(answer.body) - 1}/{len(whole)}"
        assert answer.headers["Content-Range"] == expected, asked
    for asked in ("bytes=99999999999-", "bytes=-0", "bytes=99999999999-999999999999"):
        answer = ask(served, "/model.safetensors", Range=asked)
        assert answer.status == 416, asked
        assert answer.headers["Content-Range"] == f"bytes */{len(whole)}", asked
    for asked in ("bytes=5-3", "lines=1-2", "bytes=0-1,4-5", "bytes=", "bytes=x-", f"bytes={'9' * 99}-"):
        answer = ask(served, "/model.safetensors", Range=asked)
        assert (answer.status, answer.body) == (200, whole), asked
    assert ask(served, "/model.safetensors", Range="bytes=0-4", If_Range='"other"').body == whole


def test_one_connection_serves_many_requests_also_before_they_are_asked(served: Server, whole: bytes) -> None:
    connection = connect(served)
    for start in (0, 1000, 99):
        connection.request("GET", "/model.safetensors", headers={"Range": f"bytes={start}-{start + 4}"})
        assert connection.getresponse().read() == whole[start : start + 5]
    connection.close()
    one = b"GET /model.safetensors HTTP/1.1\r\nHost: localhost\r\nRange: bytes=%d-%d\r\n%s\r\n"
    got = raw(served, b"".join(one % (at, at + 9, b"Connection: close\r\n" if at == 40 else b"") for at in (0, 20, 40)))
    assert got.count(b"HTTP/1.1 206") == 3
    assert all(whole[at : at + 10] in got for at in (0, 20, 40))


def test_many_clients_at_once(served: Server, whole: bytes) -> None:
    wrong: list[int] = []

    def fetch(start: int) -> None:
        if ask(served, "/model.safetensors", Range=f"bytes={start}-").body != whole[start:]:
            wrong.append(start)

    threads = [threading.Thread(target=fetch, args=(len(whole) * part // 16,)) for part in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ------------------------------------------------------------------------------------------------------------ hostile

LINE = b"GET / HTTP/1.1\r\n"
INNER = LINE + b"\r\n"
NO_REQUESTS = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET / HTTP/9.9\r\n\r\n", 505),
    (b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
    (LINE + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    (LINE + b"X: y\r\n" * 200 + b"\r\n", 431),
    (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nGET /", 405),
    (b"DELETE /model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    (LINE + b"Host: evil.example\r\n\r\n", 421),
    (LINE + b"Host: [x\r\n\r\n", 421),
    (LINE + b"Host: [::1]evil.example\r\n\r\n", 421),
    (LINE + b"Host: [::1].evil.example:80\r\n\r\n", 421),
    (LINE + b"Host: evil.example@localhost\r\n\r\n", 421),
    (LINE + b"Host:\r\n\r\n", 421),
    (LINE + b"Host: localhost\r\nHost: evil.example\r\n\r\n", 400),
    (LINE + b"Host: localhost\r\nContent-Length: 0\r\nContent-Length: 18\r\n\r\n" + INNER, 400),
]


NO_FILES = [
    "/../model.pt",
    "/%2e%2e/model.pt",
    "/..%2fmodel.pt",
    "//etc/passwd",
    "/model.pt",
    "/a/b/resolve/main/../../../model.pt",
    "/a/b/resolve/main/..%2f..%2fmodel.pt",
    "/a/b/resolve/main/%00",
    "/model.safetensors/",
    "/model.safetensors%00",
    "/a/b/resolve/main/",
    "/api/models/a/b/tree/main/below",
    "/api/models",
    "/api/datasets/a/b",
    "/%ff%fe",
    "/" + "x" * 60_000,
]


def test_there_is_no_way_out_of_the_map(served: Server) -> None:
    for path in NO_FILES:
        answer = ask(served, path)
        assert (answer.status, answer.headers["X-Error-Code"]) == (404, "EntryNotFound"), path[:99]


def test_what_is_no_request_for_a_file_ends_the_connection(served: Server) -> None:
    for data, status in NO_REQUESTS:
        got = raw(served, data)
        assert got.startswith(b"HTTP/1.1 %d " % status), (data[:99], got[:200])
        assert got.count(b"HTTP/1.1") == 1, data[:99]


def test_the_body_of_a_request_is_no_request(served: Server) -> None:
    inner = b"GET /model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n"
    got = raw(served, b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(inner), inner))
    assert got.count(b"HTTP/1.1 ") == 1


def test_slow_clients_do_not_hold_others(place: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    with serving(VirtualFiles(place / "model.pt")) as made, contextlib.ExitStack() as stack:
        for _ in range(9):  # they have sent half a request, and go no further
            connection = socket.create_connection(made.server_address[:2])
            stack.enter_context(connection)
            connection.sendall(b"GET /model.safetensors HTTP/1.1\r\nHost: loc")
        for _ in range(2):  # they take nothing of what they asked for
            connection = socket.create_connection(made.server_address[:2])
            stack.enter_context(connection)
            connection.sendall(b"GET /model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(4) == b"HTTP"
        assert ask(made, "/model.safetensors").body == whole
        assert len(made._connections) <= 4


def test_more_clients_than_there_is_room_for_are_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with serving(VirtualFiles(place / "model.pt")) as made, contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = socket.create_connection(made.server_address[:2])
            stack.enter_context(connection)
            connection.sendall(b"GET /model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(4) == b"HTTP"
        # This one asks for nothing: a request that comes late would be lost, and the answer with it.
        refused = stack.enter_context(socket.create_connection(made.server_address[:2], timeout=600))
        answer = http.client.HTTPResponse(refused)
        answer.begin()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


def test_a_source_that_changes_gives_an_error_and_no_wrong_byte(tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    torch.save({"a": torch.arange(2_000_000)}, model)
    ckptconv.convert(model, tmp_path / "whole", fsync=False)
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    told: list[str] = []
    with serving(VirtualFiles(model)) as made:
        made.warn = told.append
        connection = connect(made)
        connection.sock = socket.create_connection(made.server_address[:2])
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        connection.request("GET", "/model.safetensors")
        answer = connection.getresponse()
        got = answer.read(1000)
        torch.save({"a": torch.zeros(2_000_000, dtype=torch.int64)}, model)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            got += answer.read()
        assert whole.startswith(got)
        later = ask(made, "/model.safetensors", Range="bytes=5000-5999")
        assert later.status == 500
        assert f"{model} changed while it was read" in later.body.decode()
        assert str(later.headers["X-Error-Message"]).startswith(str(model))
        # Its bytes are those of the source as it was: a new server has the new ones.
        assert (
            later.body.decode().strip().endswith("Start the server again when no program is writing to the checkpoint.")
        )
        assert len(told) == 2
        assert all(f"{model} changed while it was read" in text for text in told)
    with serving(VirtualFiles(model)) as made:
        assert ask(made, "/model.safetensors", Range="bytes=5000-5999").body == bytes(1000)


# ---------------------------------------------------------------------------------------------------------- the command


def memory(process: Process, what: str) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) << 10


def test_memory_stays_small_whatever_is_downloaded(tmp_path: Path) -> None:
    torch.save(
        {f"layer{n}": torch.zeros(1000, 5000) for n in range(4)} | {"t": torch.ones(1000, 2000).t()},
        tmp_path / "model.pt",
    )
    with process_serving(tmp_path / "model.pt", "--dtype", "bf16") as (url, process):
        assert ask(url, "/model.safetensors", Range="bytes=0-9").status == 206
        before = memory(process, "VmRSS")

        def fetch() -> None:
            with contextlib.closing(connect(url)) as connection:
                connection.request("GET", "/model.safetensors")
                answer = connection.getresponse()
                while answer.read(MIB):
                    pass

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert memory(process, "VmHWM") - before < 64 * MIB


def test_it_says_where_it_is_and_ends_when_asked(place: Path) -> None:
    with process_serving(place / "zero", "--verbose", "--raw") as (url, process):
        assert ask(url, "/model.safetensors").status == 200
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=600)
        assert process.wait() == 0
    assert out.splitlines() == [f"for transformers: HF_ENDPOINT={url}"]
    assert '"GET /model.safetensors HTTP/1.1" 200' in err
    assert "config.json, which from_pretrained requires, is not next to SOURCE" in err
    assert "warning: --raw has no effect" in err


def test_the_address_of_a_model_in_shards_is_that_of_its_index(place: Path) -> None:
    with process_printing(place / "model.pt", "--max-shard-size", "5MB") as (line, _):
        address = line.removeprefix(FIRST)
        assert address.endswith("/model.safetensors.index.json")
        assert ask(address, urlsplit(address).path).status == 200


def test_a_signal_that_comes_while_a_connection_is_taken_ends_it_too(served: Server) -> None:
    try:
        raise StoppedError("Stopped.")
    except StoppedError:
        with pytest.raises(StoppedError):
            served.handle_error(None, ("127.0.0.1", 1))


def test_its_first_page_links_to_each_file(place: Path) -> None:
    with serving(VirtualFiles(place / "model.pt", max_shard_size="5MB")) as made:
        links = re.findall(r'<a href="(.*?)">', ask(made, "/").body.decode())
        assert len(links) > 2
        assert [link.removeprefix("/") for link in links] == [*made.files]
        assert all(ask(made, link).status == 200 for link in links)


def test_it_tells_programs_where_it_is(place: Path) -> None:
    with process_printing(place / "zero", "--json", "--host", "localhost") as (line, process):
        told: dict[str, Any] = json.loads(line)
        schema = Path(ckptconv.__file__).parent / "cli" / "schemas" / "serve.json"
        Draft202012Validator(json.loads(schema.read_text())).validate(told)
        assert told["files"].keys() == {"model.safetensors"}
        assert ask(told["url"], "/").status == 200
        process.send_signal(signal.SIGINT)
        warned = "".join(f"ckptconv: warning: {warning}\n" for warning in told["warnings"])
        assert process.communicate(timeout=600) == ("", warned)


def test_what_cannot_be_served(place: Path, served: Server) -> None:
    port = served.server_address[1]
    for options, code, message in (
        (("--port", port), 1, "cannot be used to listen"),
        (("--port", 70_000), 2, "--port"),
        (("--host", "256.1.1.1"), 1, "cannot be used to listen"),
    ):
        run = ckptconv_here("serve", place / "zero", *options)
        assert run.code == code, run
        assert message in run.err
    assert ckptconv_here("serve", place / "none").code == 2


def test_a_lone_shard_is_not_served_as_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"w": torch.ones(3)}, path)
    ckptconv_here("serve", path).refused(5, path, "--alone")


def test_it_reads_any_checkpoint_as_a_conversion_does() -> None:
    opening = {"--tag", "--exclude-frozen-parameters", "--master", "--unstack", "--raw"}.union(
        *of_features("OPENING_FLAGS")
    )
    assert opening <= {flag for each in COMMAND.commands["serve"].params for flag in each.opts}


def test_it_says_who_reaches_it(place: Path) -> None:
    for host, said in (("0.0.0.0", True), ("127.0.0.1", False)):
        with process_serving(place / "zero", "--host", host) as (url, process):
            assert ask(url, "/model.safetensors").status == 200
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=600)
        assert (f"Every machine that reaches {host} can read the files: there is no password." in err) == said
        assert (f"replace {host} with a name or address of this machine." in err) == said


def test_a_port_in_the_place_of_an_option_leads_to_it() -> None:
    ckptconv_here("serve", "model.pt", "8000").refused(2, "Too many arguments: 8000. Did you mean --port 8000?")
    ckptconv_here("serve", "model.pt", "-p", "8000").refused(2, "Use --port N.")
    assert "--port" not in ckptconv_here("inspect", "model.pt", "8000").refused(2, "Too many arguments: 8000.")


@pytest.mark.parametrize("option", ["--port", "--host"])
@pytest.mark.parametrize(
    ("address", "instead"),
    [
        ("0.0.0.0:8000", "--host 0.0.0.0 --port 8000."),
        ("[::1]:8000", "--host ::1 --port 8000."),
        (":8000", "Use --port 8000."),
    ],
)
def test_a_host_and_a_port_in_one_word_are_told_apart(option: str, address: str, instead: str) -> None:
    run = ckptconv_here("serve", "model.pt", option, address)
    run.refused(2, f"{option} '{address}' contains both a host and a port", instead)

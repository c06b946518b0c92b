"""Serves the files of a conversion over HTTP, under the paths from which huggingface_hub downloads.

Source of the paths: huggingface_hub's `file_download` and `hf_api`. Read-only. Every repository and every revision is
this checkpoint; the commit is a hash of all that decides its bytes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from ckptconv.errors import CkptconvError, FailedError, StoppedError
from ckptconv.features.virtual_files.files import VirtualFile, VirtualFiles
from ckptconv.storage.reading import WRITTEN
from ckptconv.text import format_size, reason
from ckptconv.version import __version__

# The most connections at a time: each has a thread and its buffers. One more replaces an idle one.
MAX_CONNECTIONS = 32
# The seconds that a connection may be idle, and that a client may take to accept a piece of data.
IDLE, ACCEPTING = 60.0, 120.0
# Names of a repository and of a revision: any one part of a path, or two for a repository.
_RESOLVE = re.compile(r"/(?:[^/]+/)?[^/]+/resolve/[^/]+/(?P<name>.+)")
_MODEL = re.compile(r"/api/models/(?:[^/]+/)?[^/]+(?:/revision/[^/]+)?")
_TREE = re.compile(r"/api/models/(?:[^/]+/)?[^/]+/tree/[^/]+(?P<below>/.*)?")
_PATHS = re.compile(r"/api/models/(?:[^/]+/)?[^/]+/paths-info/[^/]+")
_REFS = re.compile(r"/api/models/(?:[^/]+/)?[^/]+/refs")
# The most bytes of a form with names of files.
_MOST_OF_FORM = 1 << 20
_RANGE = re.compile(r"bytes=\s*(?:(\d{1,19})-(\d{0,19})|-(\d{1,19}))\s*")
_NAMES = ("localhost", "localhost.localdomain")
# A name or an address, and a port.
_HOST = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^\[\]:@/]*))(?::\d*)?")


class Server(ThreadingHTTPServer):
    """Serves `files` at `host` and `port` (0: any free one) until `stop`. `log` is called with a line for each request,
    and `warn` with each error in reading the files.

    Raise FailedError if the address cannot be used.
    """

    daemon_threads = True
    block_on_close = False
    # Many threads of a client connect at once.
    request_queue_size = 128

    def __init__(
        self, files: VirtualFiles, host: str = "127.0.0.1", port: int = 0, log: Callable[[str], None] | None = None
    ) -> None:
        self.files, self.host, self.log = files, host, log
        self.warn: Callable[[str], object] = log or (lambda text: None)
        self._connections: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            hint = "Use another --port or --host."
            raise FailedError(f"{host}:{port} cannot be used to listen: {why}.", hint) from error

    @property
    def url(self) -> str:
        """The address, as HF_ENDPOINT takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return _is_loopback(self.host)

    @property
    def is_everywhere(self) -> bool:
        """Whether the server listens on all addresses of this machine."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_unspecified
        return not self.host

    def server_bind(self) -> None:
        # Otherwise HTTPServer looks its own name up, which can take seconds.
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            has_room = len(self._connections) < MAX_CONNECTIONS or self._end_idle()
            if has_room:
                self._connections[request] = time.monotonic()
        if has_room:
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.settimeout(0.05)
            request.sendall(_BUSY)
            # If a connection is closed with a request unread, it is reset, and the answer may be lost.
            request.recv(1 << 16)
        self.shutdown_request(request)

    def _end_idle(self) -> bool:
        """End the connection that has been idle for longest. Return whether there was one."""
        idle = {connection: since for connection, since in self._connections.items() if since}
        if not idle:
            return False
        chosen = min(idle, key=lambda connection: idle[connection])
        del self._connections[chosen]
        with contextlib.suppress(OSError):
            chosen.shutdown(socket.SHUT_RDWR)
        return True

    def note(self, connection: socket.socket, idle: bool) -> None:
        """Note that a connection waits for a request, or has one."""
        with self._lock:
            if connection in self._connections:
                self._connections[connection] = time.monotonic() if idle else 0.0

    def close_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error that ended a connection, unless the client closed it.

        A signal that comes while a connection is accepted ends the server.
        """
        error = sys.exc_info()[1]
        if isinstance(error, StoppedError):
            raise error
        if self.log and not isinstance(error, OSError):
            self.log(f"{type(error).__name__}: {error}")

    def is_own_name(self, host: str | None) -> bool:
        """Return whether a request for `host` is meant for this server.

        A page on the Web can make a browser ask for names of the page's own that lead to 127.0.0.1.
        """
        if not self.is_local or host is None:
            return True
        match = _HOST.fullmatch(host.strip().lower())
        name = (match["address"] or match["name"] or "") if match else ""
        return name in (*_NAMES, self.host) or _is_loopback(name)


_MANY = b"There are too many clients. Ask again.\n"
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_MANY), _MANY)
)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _NAMES


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after another."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = f"ckptconv/{__version__}", ""
    disable_nagle_algorithm = True
    timeout = IDLE
    server: Server

    def handle_one_request(self) -> None:
        self.server.note(self.connection, idle=True)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the headers, and refuse requests that are not meant for this server."""
        # Until its headers are complete, a connection counts as idle, however slowly they come.
        sound = super().parse_request()
        self.server.note(self.connection, idle=False)
        self.connection.settimeout(ACCEPTING)
        if not sound:
            return False
        sizes = self.headers.get_all("Content-Length", [])
        if self.headers.get("Transfer-Encoding") or any(size != "0" for size in sizes):
            self.close_connection = True  # otherwise a body is taken for the next request
        if any(len(self.headers.get_all(name, [])) > 1 for name in ("Host", "Content-Length")):
            self.send_error(400, "A header that must be unique occurs several times")
            return False
        if not self.server.is_own_name(self.headers.get("Host")):
            self.close_connection = True
            self._refuse(421, "The request is for another host.")
            return False
        return True

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Answer which of the files in a form exist. No other request is posted here."""
        path, _ = self._asked()
        if not _PATHS.fullmatch(path):
            self.send_error(405)
            return
        length = self.headers.get("Content-Length", "")
        size = int(length) if re.fullmatch(r"[0-9]{1,7}", length) and not self.headers.get("Transfer-Encoding") else -1
        if not 0 <= size <= _MOST_OF_FORM:
            self._refuse(413, f"A form of at most {_MOST_OF_FORM} bytes was expected.")
            return
        try:
            form = parse_qs(self.rfile.read(size).decode())
        except ValueError:
            self._refuse(400, "The form cannot be read.")
            return
        files = self.server.files
        names = dict.fromkeys(name for name in form.get("paths", []) if name in files)
        self._send_json([self._entry(name, files[name]) for name in names])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an unreadable request, or an unknown method."""
        self.close_connection = True
        self.request_version = self.protocol_version  # for an unreadable request, it is one without headers
        code = 405 if code == 501 else code
        self._refuse(code, f"{message or self.responses[code][0]}.", {"Allow": "GET, HEAD"} if code == 405 else {})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        if self.server.log:
            self.server.log(f"{self.address_string()} {format % args}")

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        """Return the path and the parameters of the request."""
        try:
            # An absolute form, which a proxy gets, has its path too.
            url = urlsplit(self.path)
            return url.path, parse_qs(url.query)
        except ValueError:
            return "", {}

    def _answer(self) -> None:
        path, parameters = self._asked()
        files, name = self.server.files, unquote(path).removeprefix("/")
        resolved = _RESOLVE.fullmatch(path)
        tree = _TREE.fullmatch(path)
        if resolved:
            name = unquote(resolved["name"])
        try:
            if name in files:
                self._send_file(name, files[name])
            elif path == "/":
                self._send("text/html; charset=utf-8", _page(files).encode())
            elif not resolved and _MODEL.fullmatch(path):
                self._send_json(self._model(path, with_sizes="blobs" in parameters))
            elif _REFS.fullmatch(path):
                main = {"name": "main", "ref": "refs/heads/main", "targetCommit": files.version}
                self._send_json({"branches": [main], "converts": [], "tags": [], "pullRequests": []})
            elif tree and (tree["below"] or "/") == "/":
                self._send_json([self._entry(entry_name, file) for entry_name, file in files.items()])
            else:
                # huggingface_hub distinguishes an absent file from an absent repository by this header.
                self._refuse(404, f"This server has no file {name[:200]!r}.", {"X-Error-Code": "EntryNotFound"})
        except CkptconvError as error:
            self._refuse(500, self._told(error))
        self.connection.settimeout(IDLE)

    def _model(self, path: str, with_sizes: bool) -> dict[str, Any]:
        parts = path.removeprefix("/api/models/").split("/revision/")[0]
        files = self.server.files
        return {
            "id": parts,
            "modelId": parts,
            "sha": files.version,
            "private": False,
            "tags": [],
            "siblings": [
                {"rfilename": name, **({"size": file.size, "blobId": file.tag} if with_sizes else {})}
                for name, file in files.items()
            ],
        }

    @staticmethod
    def _entry(name: str, file: VirtualFile) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": file.size, "oid": file.tag}

    def _send_file(self, name: str, file: VirtualFile) -> None:
        size, tag = file.size, f'"{file.tag}"'
        headers = {
            "ETag": tag,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(name)}",
            "X-Repo-Commit": self.server.files.version,
            "X-Linked-Etag": tag,
            "X-Linked-Size": str(size),
            "X-Content-Type-Options": "nosniff",
        }
        if _lists(self.headers.get("If-None-Match"), tag):
            self._begin(304, headers)
            return
        start, stop, code = 0, size, 200
        wanted = self.headers.get("Range")
        if wanted is not None and self.command == "GET" and self.headers.get("If-Range", tag) == tag:
            span = _range(wanted, size)
            if span == ():
                self._refuse(416, f"{name} has {size} bytes.", {**headers, "Content-Range": f"bytes */{size}"})
                return
            if span:
                start, stop, code = *span, 206
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        headers["Content-Length"] = str(stop - start)
        if self.command == "HEAD":
            self._begin(code, headers)
            return
        with contextlib.closing(self.server.files.read(name, start, stop)) as pieces:
            self._stream(code, headers, pieces)

    def _stream(self, code: int, headers: dict[str, str], pieces: Iterator[memoryview]) -> None:
        """Send `pieces`. An error before the first of them becomes an answer; a later one ends the connection, so that
        the client knows that bytes are missing."""
        piece = next(pieces, None)
        self._begin(code, headers)
        try:
            while piece is not None:
                self.wfile.write(piece)
                piece = next(pieces, None)
        except CkptconvError as error:
            self._told(error)
            self._break()
        except OSError:
            self.close_connection = True  # the client closed it

    def _told(self, error: CkptconvError) -> str:
        """Print an error where the server runs, too. Return its text."""
        # The files that are served are those of the source as it was opened.
        text = str(error).replace(WRITTEN, "Start the server again when no program is writing to the checkpoint.")
        self.server.warn(text)
        return text

    def _break(self) -> None:
        self.close_connection = True
        _shut(self.connection)

    def _send_json(self, value: Any) -> None:
        self._send("application/json", json.dumps(value).encode())

    def _send(self, kind: str, data: bytes) -> None:
        self._begin(200, {"Content-Type": kind, "Content-Length": str(len(data))})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, code: int, message: str, headers: dict[str, str] | None = None) -> None:
        data = f"{message}\n".encode(errors="replace")
        all_headers = {
            **(headers or {}),
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(data)),
            # A header is one line of Latin-1.
            "X-Error-Message": "".join(character if " " <= character <= "~" else "?" for character in message)[:1000],
        }
        with contextlib.suppress(OSError):
            self._begin(code, all_headers)
            if self.command != "HEAD":
                self.wfile.write(data)

    def _begin(self, code: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def _page(files: VirtualFiles) -> str:
    """Return a page with a link to each file, from which people and programs list the files of a server."""
    links = (
        f'<li><a href="/{quote(name)}">{escape(name)}</a> {format_size(file.size)}' for name, file in files.items()
    )
    return f"<!DOCTYPE html>\n<title>Files of a checkpoint</title>\n<ul>\n{chr(10).join(links)}\n</ul>\n"


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _lists(header: str | None, tag: str) -> bool:
    """Return whether an If-None-Match header names `tag`."""
    named = [tag_in_list.strip().removeprefix("W/") for tag_in_list in (header or "").split(",")]
    return tag in named or named == ["*"]


def _range(header: str, size: int) -> tuple[int, int] | tuple[()] | None:
    """Return the start and stop of the range in `header`; () if the file has none of it, None for the whole file.

    The whole file is sent if `header` is not a range of bytes, or has several ranges, as RFC 9110 allows.
    """
    match = _RANGE.fullmatch(header)
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        return (max(size - int(suffix), 0), size) if int(suffix) and size else ()
    start, stop = int(first), min(int(last) + 1, size) if last else size
    if last and int(last) < start:
        return None
    return (start, stop) if start < size else ()

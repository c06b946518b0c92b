"""A small hub for the tests, in a process of its own: what huggingface_hub's file system asks the real one.

    python server.py DIRECTORY

`DIRECTORY/organization/model/COMMIT/` holds the files of a commit, `DIRECTORY/organization/model/refs.json` the commit
of each branch, and whether the repository is private or gated. Files of `LARGE` bytes and more are redirected to
another address, as the hub does with what is in large file storage. Requests are logged to `DIRECTORY/log` as lines of
JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 1 << 12
# Entries on a page of a listing: the hub has 1000.
PAGE = 3
TOKEN = "hf_ofthetests"


class _Refused(Exception):  # noqa: N818
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(status)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message or code}


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a short answer does not wait for the headers to be confirmed
    root: Path
    lock = threading.Lock()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        try:
            if path == "/":
                self._answer(200, b"a hub")
            elif found := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)?)(?:/revision/(.+))?", path):
                repo = self._repo(found[1])
                commit = self._commit(repo, found[2] or "main")
                told = {"id": found[1], "sha": commit, "private": repo["private"], "gated": repo["gated"]}
                self._answer(200, json.dumps({**told, "siblings": [], "tags": []}).encode())
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", path):
                self._tree(found[1], found[2], found[3] or "", parse_qs(url.query))
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._resolve(found[1], found[2], found[3])
            elif found := re.fullmatch(r"/lfs/(.+)", path):
                self._file(self.root / found[1], {})
            else:
                raise _Refused(404)
        except _Refused as refused:
            self._answer(refused.status, b"", refused.headers)

    do_HEAD = do_GET  # noqa: N815

    def _repo(self, name: str) -> dict[str, Any]:
        if self.headers.get("Authorization") and not self._is_known():
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        described = self.root / name / "refs.json"
        if not described.is_file():
            raise _Refused(401 if self.headers.get("Authorization") is None else 404, "RepoNotFound")
        repo: dict[str, Any] = json.loads(described.read_text())
        if repo["private"] and not self._is_known():
            raise _Refused(401, "RepoNotFound", "Repository not found")
        return repo

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _commit(self, repo: Mapping[str, Any], revision: str) -> str:
        commit = repo["refs"].get(revision, revision)
        if commit not in repo["refs"].values() and commit not in repo["commits"]:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return str(commit)

    def _tree(self, name: str, revision: str, inside: str, query: Mapping[str, list[str]]) -> None:
        directory = self.root / name / self._commit(self._repo(name), revision) / inside
        if not directory.is_dir():
            raise _Refused(404, "EntryNotFound", f"{inside} does not exist")
        rows = sorted(directory.iterdir())
        start = int(query.get("cursor", ["0"])[0])
        data = json.dumps([_row(path, f"{inside}/{path.name}".lstrip("/")) for path in rows[start : start + PAGE]])
        link = f'<http://{self.headers["Host"]}{self.path.partition("?")[0]}?cursor={start + PAGE}>; rel="next"'
        self._answer(200, data.encode(), {"Link": link} if start + PAGE < len(rows) else {})

    def _resolve(self, name: str, revision: str, inside: str) -> None:
        repo = self._repo(name)
        if repo["gated"] and not self._is_known():
            raise _Refused(403, "GatedRepo", f"Access to model {name} is restricted.")
        commit = self._commit(repo, revision)
        path = self.root / name / commit / inside
        if not path.is_file():
            raise _Refused(404, "EntryNotFound", "Entry not found")
        facts = {"X-Repo-Commit": commit, "ETag": f'"{_oid(path)}"'}
        if path.stat().st_size < LARGE:
            self._file(path, facts)
        else:
            place = f"http://{self.headers['Host']}/lfs/{path.relative_to(self.root)}"
            self._answer(302, b"", {**facts, "Location": place, "X-Linked-Size": str(path.stat().st_size)})

    def _file(self, path: Path, facts: Mapping[str, str]) -> None:
        data = path.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not found:
            self._answer(200, data, facts)
            return
        start, last = int(found[1]), min(int(found[2]), len(data) - 1)
        told = {**facts, "Content-Range": f"bytes {start}-{last}/{len(data)}"}
        self._answer(206, data[start : last + 1], told)

    def _answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        with self.lock, (self.root / "log").open("a") as log:
            asked = {"method": self.command, "path": self.path, "status": status, "bytes": len(data)}
            log.write(json.dumps({**asked, "range": self.headers.get("Range", "")}) + "\n")
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _row(path: Path, name: str) -> dict[str, Any]:
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    row = {"type": "file", "oid": _oid(path), "size": path.stat().st_size, "path": name}
    if row["size"] >= LARGE:
        row["lfs"] = {"oid": hashlib.sha256(path.read_bytes()).hexdigest(), "size": row["size"], "pointerSize": 130}
    return row


@dataclass
class Asked:
    """A request that the hub was sent, and how many bytes it answered."""

    method: str
    path: str
    status: int
    bytes: int
    range: str


@dataclass
class Hub:
    """The hub as a test sees it."""

    endpoint: str
    root: Path
    _commits: int = field(default=0)

    @property
    def options(self) -> dict[str, Any]:
        """The options of its file system. Each test's differ: file systems are kept by their options."""
        return {"endpoint": self.endpoint, "token": False}

    @property
    def known(self) -> dict[str, Any]:
        return {**self.options, "token": TOKEN}

    def commit(
        self, name: str, files: Mapping[str, bytes], branch: str = "main", *, private: bool = False, gated: Any = False
    ) -> str:
        """Put a commit with `files`, and no others, on a branch of the repository `name`; return the commit."""
        self._commits += 1
        commit = hashlib.sha1(f"{name} {self._commits}".encode()).hexdigest()
        for path, data in files.items():
            place = self.root / name / commit / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        described = self.root / name / "refs.json"
        known = json.loads(described.read_text()) if described.is_file() else {"refs": {}, "commits": []}
        told = {"refs": {**known["refs"], branch: commit}, "commits": [*known["commits"], commit]}
        described.write_text(json.dumps({**told, "private": private, "gated": gated}))
        return commit

    def asked(self) -> list[Asked]:
        """Return the requests since this was last called."""
        log = self.root / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("")
        return [Asked(**json.loads(line)) for line in lines if json.loads(line)["path"] != "/"]


@contextlib.contextmanager
def hub_server(root: Path) -> Iterator[Hub]:
    """A hub in a process of its own, for as long as the block runs."""
    from remote import process_serving

    root.mkdir()
    with process_serving([sys.executable, __file__, str(root)], {}) as endpoint:
        yield Hub(endpoint, root)


if __name__ == "__main__":
    _Hub.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()

"""A server of the files in a directory, over HTTP."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from remote import Answer, Proxy, proxied


def http_server(
    directory: Path, *, ranges: bool = True, lists: bool = False
) -> contextlib.AbstractContextManager[Proxy]:
    """A server of the files in `directory`, with ranges or without, which `lists` its directories or does not."""

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        file = directory / unquote(urlsplit(path).path.lstrip("/"))
        if method not in ("GET", "HEAD"):
            return Answer(501, {})
        if lists and file.is_dir() and not path.endswith("/"):
            return Answer(301, {"Location": f"{path}/"})
        if lists and file.is_dir():
            names = (f"{entry.name}{'/' * entry.is_dir()}" for entry in sorted(file.iterdir()))
            page = "".join(f'<a href="{quote(name)}">{name}</a>\n' for name in names).encode()
            return Answer(200, {"Content-Type": "text/html", "Content-Length": str(len(page))}, page)
        if not file.is_file():
            return Answer(404, {})
        size = file.stat().st_size
        told = {"ETag": f'"{file.stat().st_mtime_ns:x}"', "Content-Length": str(size)}
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", "")) if ranges else None
        start, last = (int(found[1]), min(int(found[2]), size - 1)) if found else (0, size - 1)
        if found:
            told |= {"Content-Range": f"bytes {start}-{last}/{size}", "Content-Length": str(last + 1 - start)}
        if method == "HEAD":
            return Answer(206 if found else 200, told)
        with file.open("rb") as opened:
            opened.seek(start)
            return Answer(206 if found else 200, told, opened.read(last + 1 - start))

    return proxied(answer)

"""A server of one file that answers wrongly, in a process of its own: python misbehaving.py FILE FAULT.

What is wrong with answers to requests for ranges: "" (nothing), "shifted" (bytes that begin elsewhere, truly labelled),
"swapped" (the same, labelled as those that were asked for; the whole file has a checksum), "unlabelled", "parts"
(multipart/byteranges), "packed" (gzip), "flipped" (a byte is changed; there is a checksum), "other" (another version by
its ETag), "grown" (another size), "silent" (no answer), "stalled" (none after some of it). All but one in `HONEST`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a short answer does not wait for the headers to be confirmed
    data: bytes
    fault: str

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        fault = self.fault if self.command == "GET" and self.path.endswith((".pt", ".safetensors")) else ""
        size = len(self.data)
        start, last = (int(found[1]), min(int(found[2]), size - 1)) if found else (0, size - 1)
        body = self.data[start : last + 1]
        label = f"bytes {start}-{last}/{size + 1 if fault == 'grown' else size}"
        headers = {"ETag": '"2"' if fault == "other" else '"1"'}
        if fault == "silent":
            threading.Event().wait()
        if fault == "shifted":
            label, body = f"bytes {start + 1}-{last + 1}/{size}", self.data[start + 1 : last + 2]
        if fault in ("flipped", "sound"):
            headers["Content-MD5"] = base64.b64encode(hashlib.md5(self.data, usedforsecurity=False).digest()).decode()
        if fault == "flipped":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "parts":
            label, headers["Content-Type"] = "", "multipart/byteranges; boundary=x"
        if fault == "unlabelled":
            label = ""
        if fault == "packed":
            headers["Content-Encoding"], body = "gzip", gzip.compress(body)
        self.send_response_only(206 if found else 200)
        if found and label:
            self.send_header("Content-Range", label)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            if fault == "stalled":
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                threading.Event().wait()
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Clients go away as they like."""


if __name__ == "__main__":
    Handler.data, Handler.fault = Path(sys.argv[1]).read_bytes(), sys.argv[2]
    server = Server(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()

"""A small store that speaks S3, in a thread of the tests: what s3fs asks the real one, in a tenth of moto's time.

`test_s3.py` compares its answers with moto's.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import threading
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import format_datetime
from itertools import islice
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from remote import Answer

MOST_KEYS = 1000


class _RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.answer = Answer(status, {}, _xml("Error", Code=code, Message=message or code))


@dataclass
class _Object:
    data: bytes
    tag: str
    changed: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def headers(self) -> dict[str, str]:
        last = format_datetime(self.changed, usegmt=True)
        return {"ETag": f'"{self.tag}"', "Last-Modified": last, "Accept-Ranges": "bytes"}


@dataclass
class _Upload:
    key: str
    parts: dict[int, _Object] = field(default_factory=dict)


class Store:
    """What is in the buckets `buckets`: objects and uploads by their keys."""

    def __init__(self, *buckets: str) -> None:
        self._objects: dict[str, dict[str, _Object]] = {bucket: {} for bucket in buckets}
        self._uploads: dict[str, _Upload] = {}
        # What was said of uploads that were completed, and is said again.
        self._completed: dict[str, Answer] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """What it answers to a request; `path` has the query, and the keys of `headers` are of any case."""
        url = urlsplit(path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        asked = {name.lower(): value for name, value in headers.items()}
        with self._lock:
            try:
                if bucket not in self._objects:
                    raise _RefusedError(404, "NoSuchBucket", "The specified bucket does not exist")
                answered = self._of_object if key else self._of_bucket
                return answered(method, self._objects[bucket], key, query, asked, body)
            except _RefusedError as refused:
                return refused.answer

    def _of_bucket(
        self,
        method: str,
        objects: dict[str, _Object],
        key: str,
        query: Mapping[str, str],
        asked: Mapping[str, str],
        body: bytes,
    ) -> Answer:
        prefix = query.get("prefix", "")
        if method == "HEAD":
            return Answer(200, {})
        if method == "POST" and "delete" in query:
            gone = [html.unescape(each) for each in re.findall(r"<Key>(.*?)</Key>", body.decode(), re.DOTALL)]
            for each in gone:
                objects.pop(each, None)
            return _told("DeleteResult", Deleted=[{"Key": each} for each in gone])
        if method == "GET" and "uploads" in query:
            found = [
                {"Key": each.key, "UploadId": name}
                for name, each in self._uploads.items()
                if each.key.startswith(prefix)
            ]
            return _told("ListMultipartUploadsResult", IsTruncated=False, Upload=found)
        if method == "GET" and query.get("list-type") == "2":
            return self._listed(objects, prefix, query)
        raise _RefusedError(501, "NotImplemented", f"{method} {query}")

    def _listed(self, objects: dict[str, _Object], prefix: str, query: Mapping[str, str]) -> Answer:
        delimiter, after = query.get("delimiter", ""), query.get("continuation-token", query.get("start-after", ""))
        rows: dict[str, _Object | None] = {}
        for key in sorted(key for key in objects if key.startswith(prefix)):
            folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = prefix + folder + delimiter if found else key
            if name > after:
                rows[name] = None if found else objects[key]
        most = int(query.get("max-keys", MOST_KEYS))
        shown = dict(islice(rows.items(), most))
        more = {"NextContinuationToken": [*shown][-1]} if len(rows) > most else {}
        contents = [
            {
                "Key": name,
                "LastModified": row.changed.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
                "ETag": f'"{row.tag}"',
                "Size": len(row.data),
                "StorageClass": "STANDARD",
            }
            for name, row in shown.items()
            if row is not None
        ]
        folders = [{"Prefix": name} for name, row in shown.items() if row is None]
        return _told(
            "ListBucketResult",
            Prefix=prefix,
            KeyCount=len(shown),
            MaxKeys=most,
            IsTruncated=bool(more),
            **more,
            Contents=contents,
            CommonPrefixes=folders,
        )

    def _of_object(
        self,
        method: str,
        objects: dict[str, _Object],
        key: str,
        query: Mapping[str, str],
        asked: Mapping[str, str],
        body: bytes,
    ) -> Answer:
        if "uploadId" in query or "uploads" in query:
            return self._of_upload(method, objects, key, query, asked, body)
        if method in ("GET", "HEAD"):
            return _read(_found(objects, key), asked, method)
        if method == "DELETE":
            objects.pop(key, None)
            return Answer(204, {})
        if method == "PUT":
            if asked.get("if-none-match") == "*" and key in objects:
                raise _RefusedError(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
            if "x-amz-copy-source" in asked:
                source = unquote(asked["x-amz-copy-source"]).lstrip("/").partition("/")
                body = _found(self._objects[source[0]], source[2]).data
                objects[key] = made = _Object(body, _digest(body))
                return _told("CopyObjectResult", ETag=f'"{made.tag}"')
            objects[key] = made = _Object(_checked(body, asked), _digest(body))
            return Answer(200, {"ETag": f'"{made.tag}"', **_sums(asked)})
        raise _RefusedError(501, "NotImplemented", f"{method} {query}")

    def _of_upload(
        self,
        method: str,
        objects: dict[str, _Object],
        key: str,
        query: Mapping[str, str],
        asked: Mapping[str, str],
        body: bytes,
    ) -> Answer:
        name = query.get("uploadId", "")
        if method == "POST" and not name:
            name = uuid.uuid4().hex
            self._uploads[name] = _Upload(key)
            return _told("InitiateMultipartUploadResult", Key=key, UploadId=name)
        if method == "POST" and name in self._completed:
            return self._completed[name]
        if name not in self._uploads:
            raise _RefusedError(404, "NoSuchUpload", "The specified upload does not exist.")
        upload = self._uploads[name]
        if method == "PUT":
            part = upload.parts[int(query["partNumber"])] = _Object(_checked(body, asked), _digest(body))
            return Answer(200, {"ETag": f'"{part.tag}"', **_sums(asked)})
        if method == "DELETE":
            del self._uploads[name]
            return Answer(204, {})
        told = body.decode()
        numbers = [int(each) for each in re.findall(r"<PartNumber>(\d+)</PartNumber>", told)]
        tags = [html.unescape(each).strip('"') for each in re.findall(r"<ETag>(.*?)</ETag>", told)]
        parts = [upload.parts.get(number) for number in numbers]
        if [part and part.tag for part in parts] != tags or numbers != sorted(numbers) or not parts:
            raise _RefusedError(400, "InvalidPart", "One or more of the specified parts could not be found.")
        if any(len(part.data) < 5 << 20 for part in parts[:-1] if part):
            raise _RefusedError(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size.")
        tag = hashlib.md5(b"".join(bytes.fromhex(tag) for tag in tags), usedforsecurity=False).hexdigest()
        made = _Object(b"".join(part.data for part in parts if part), f"{tag}-{len(parts)}")
        objects[upload.key] = made
        del self._uploads[name]
        answer = self._completed[name] = _told("CompleteMultipartUploadResult", Key=key, ETag=f'"{made.tag}"')
        return answer


def _found(objects: Mapping[str, _Object], key: str) -> _Object:
    if key not in objects:
        raise _RefusedError(404, "NoSuchKey", "The specified key does not exist.")
    return objects[key]


def _read(found: _Object, asked: Mapping[str, str], method: str) -> Answer:
    if asked.get("if-match", found.tag).strip('"') != found.tag:
        raise _RefusedError(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
    size, wanted = len(found.data), re.fullmatch(r"bytes=(\d+)-(\d*)", asked.get("range", ""))
    headers = {**found.headers, "Content-Type": "binary/octet-stream"}
    if not wanted:
        return Answer(200, {**headers, "Content-Length": str(size)}, found.data if method == "GET" else b"")
    start, last = int(wanted[1]), min(int(wanted[2] or size), size - 1)
    if start >= size:
        raise _RefusedError(416, "InvalidRange", "The requested range is not satisfiable")
    data = found.data[start : last + 1]
    headers |= {"Content-Range": f"bytes {start}-{last}/{size}", "Content-Length": str(len(data))}
    return Answer(206, headers, data if method == "GET" else b"")


def _checked(body: bytes, asked: Mapping[str, str]) -> bytes:
    """`body`, if it has the checksums that are told."""
    sums = {
        "content-md5": lambda: hashlib.md5(body, usedforsecurity=False).digest(),
        "x-amz-checksum-crc32": lambda: zlib.crc32(body).to_bytes(4, "big"),
        "x-amz-checksum-sha256": lambda: hashlib.sha256(body).digest(),
    }
    for name, made in sums.items():
        if name in asked and asked[name] != base64.b64encode(made()).decode():
            raise _RefusedError(400, "BadDigest", f"{name} is not that of the body")
    return body


def _sums(asked: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in asked.items() if name in ("x-amz-checksum-crc32", "x-amz-checksum-sha256")}


def _digest(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


Field = str | int | bool | Iterable[Mapping[str, object]]


def _told(kind: str, **fields: Field) -> Answer:
    return Answer(200, {"Content-Type": "application/xml"}, _xml(kind, **fields))


def _xml(kind: str, **fields: Field) -> bytes:
    return ('<?xml version="1.0" encoding="UTF-8"?>\n' + _element(kind, fields)).encode()


def _element(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        inside = "".join(_element(each, inner) for each, inner in value.items())
    elif isinstance(value, list):
        return "".join(_element(name, each) for each in value)
    else:
        inside = escape(str(value).lower() if isinstance(value, bool) else str(value))
    return f"<{name}>{inside}</{name}>"

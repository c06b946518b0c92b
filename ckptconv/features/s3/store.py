"""Reads and writes objects of S3, with the clients of s3fs."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ckptconv.features.http.answers import call_soon, check_range, check_version, pass_on, soon
from ckptconv.features.http.object_checksums import stated
from ckptconv.features.remote import access
from ckptconv.features.remote.access import ChangedError, run, status
from ckptconv.features.remote.stores import Put, Ranges, Store
from ckptconv.features.remote.uploads import Body, Upload, send_bodies_at_once

# Smaller files are sent with one request, on commit.
SMALL = 1 << 16
# Unfinished uploads under our names that are older than this (seconds) belong to no living process.
STALE = 24 * 3600
_PLAIN_ETAG = re.compile(r'"([0-9a-f]{32})"')


def _call(fs: Any, method: str, inner: str, **settings: Any) -> Any:
    """Do as `call_soon`, without botocore's retries, unless the file system's settings ask for some: it waits for
    several seconds before each, also after a refused connection."""
    if "retries" not in fs.config_kwargs:
        fs.config_kwargs = {**fs.config_kwargs, "retries": {"max_attempts": 0}}
    return call_soon(fs, method, inner, **settings)


def _ranges(fs: Any, inner: str, size: int, version: str) -> Ranges:
    return lambda start, stop, put: run(fs, _from_s3(fs, inner, size, version, start, stop, put))


async def _client(
    fs: Any, bucket: str, operation: str, further: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Any, dict[str, Any]]:
    """Return botocore's client of a file system on S3, without the retries of s3fs, and the settings for an operation
    such as "GetObject": those of the file system and `further` ones, if the operation takes them."""
    await fs.set_session()
    client = await fs.get_s3(bucket)
    taken = client.meta.service_model.operation_model(operation).input_shape.members
    settings = {**fs.s3_additional_kwargs, **fs.req_kw, **further}
    return client, {name: value for name, value in settings.items() if name in taken and value is not None}


async def _from_s3(fs: Any, inner: str, size: int, version: str, start: int, stop: int, put: Put) -> None:
    from s3fs.errors import translate_boto_error

    bucket, key, chosen = fs.split_path(inner)
    whole = stop - start == size
    settings = {
        **({"VersionId": chosen} if chosen else {}),
        **({"IfMatch": version} if version.startswith('"') else {}),
        **({"ChecksumMode": "ENABLED"} if whole else {"Range": f"bytes={start}-{stop - 1}"}),
    }
    client, known = await soon(_client(fs, bucket, "GetObject", settings), inner)
    try:
        answer = await soon(client.get_object(Bucket=bucket, Key=key, **known), inner)
    except Exception as error:
        if status(error) == 412:
            raise ChangedError("it has changed to another version") from error
        translated = translate_boto_error(error)
        raise translated from translated.__cause__
    try:
        check_version(answer.get("ETag"), version)
        if not whole:
            check_range(answer.get("ContentRange") or "", start, stop, size)
        checksums = of_s3(answer, bucket) if whole else ()
        await pass_on(answer["Body"].read, stop - start, put, inner, checksums)
    finally:
        # Otherwise the connection stays in use, and there are only ten.
        answer["Body"].close()


def of_s3(answer: Mapping[str, Any], bucket: str) -> Iterator[tuple[str, bytes]]:
    """Yield the checksums of a whole object in S3's answer to GetObject, as botocore returns it."""
    if answer.get("ChecksumType") != "COMPOSITE":
        for name, value in answer.items():
            if name.startswith("Checksum") and name != "ChecksumType":
                yield from stated(name.removeprefix("Checksum"), str(value))
    # The ETag of an object that was uploaded with one request is its MD5, unless encrypted or in a directory bucket.
    tag = _PLAIN_ETAG.fullmatch(answer.get("ETag", ""))
    plain = answer.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in answer
    if tag and plain and not bucket.endswith("--x-s3"):
        yield "md5", bytes.fromhex(tag[1])


class S3Upload(Upload):
    """A multipart upload, or for a small file one request at the end.

    Source: the S3 API, CreateMultipartUpload and related operations.
    """

    parallel = True

    def __init__(self, fs: Any, inner: str, size: int) -> None:
        super().__init__()
        send_bodies_at_once()
        self._fs, self._size = fs, size
        self._bucket, self._key, _ = fs.split_path(inner)
        self._where = {"Bucket": self._bucket, "Key": self._key}
        self._etags: dict[int, dict[str, Any]] = {}
        self._small = b""
        self._id = self._call("create_multipart_upload")["UploadId"] if size > SMALL else ""

    def _call(self, method: str, **arguments: Any) -> Any:
        settings = self._fs.s3_additional_kwargs  # such as encryption; s3fs drops those that a method does not accept
        return access.retrying(lambda: self._fs.call_s3(method, settings, **self._where, **arguments), self.given_up)

    def send(self, number: int, data: memoryview) -> None:
        if not self._id:
            self._small += bytes(data)
            return
        answer = access.retrying(lambda: run(self._fs, self._send(number + 1, Body(data))), self.given_up)
        sums = {key: value for key, value in answer.items() if key.startswith("Checksum") and key != "ChecksumType"}
        self._etags[number] = {"PartNumber": number + 1, "ETag": answer["ETag"], **sums}

    async def _send(self, number: int, body: Body) -> Any:
        # Not with call_s3, which retries with a body that is already read to the end.
        client, known = await _client(self._fs, self._bucket, "UploadPart")
        return await client.upload_part(**known, **self._where, UploadId=self._id, PartNumber=number, Body=body)

    def complete(self) -> None:
        if not self._id:
            self._call("put_object", Body=self._small)
            return
        parts = {"Parts": [self._etags[number] for number in sorted(self._etags)]}
        try:
            self._call("complete_multipart_upload", UploadId=self._id, MultipartUpload=parts)
        except FileNotFoundError:
            # The response to an earlier attempt may have been lost.
            if not self._is_complete():
                raise
        self._id = ""

    def _is_complete(self) -> bool:
        """Return whether the object may be this upload: its ETag ends with the number of parts."""
        try:
            answer = self._call("head_object")
        except FileNotFoundError:
            return False
        tag = str(answer.get("ETag", "")).strip('"')
        return answer["ContentLength"] == self._size and tag.endswith(f"-{len(self._etags)}")

    def abort(self) -> None:
        if self._id:
            upload, self._id = self._id, ""
            self._fs.call_s3("abort_multipart_upload", **self._where, UploadId=upload)


def swept(fs: Any, inner: str) -> None:
    """Abort S3 uploads for outputs whose paths begin with `inner`, if processes that were killed long ago left them.

    This works only as far as the store lists and permits it; a lifecycle rule of the bucket does the same better.
    """
    with contextlib.suppress(Exception):
        bucket, prefix, _ = fs.split_path(inner)
        uploads = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix).get("Uploads") or []
        now = datetime.datetime.now(datetime.timezone.utc)
        for upload in uploads:
            suffix = upload["Key"][len(prefix) :]
            if "/" not in suffix and (now - upload["Initiated"]).total_seconds() > STALE:
                fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


STORE = Store(
    extra="s3",
    bucket="bucket",
    call=_call,
    ranges=_ranges,
    upload=lambda fs, inner, size, part: S3Upload(fs, inner, size),
    swept=swept,
)

"""The store protocol of tasks/storage.py over any S3-compatible endpoint, by boto3 (tasks/s3_client.py)."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from models.checkpoint import atomic_file
from models.manifest import StoredFile
from tasks.s3_client import BLOCK, s3_client
from tasks.storage import (
    SWAP_LIMIT,
    ObjectInfo,
    ObjectMissing,
    StoreConflict,
    StoredObject,
    StoreError,
    check_key,
    digest,
    digest_as,
    same,
)

PART = 16 * 2**20
"""Bytes of a part of an upload or a download: with two at once, 32 MiB of memory whatever the file's size."""
AT_ONCE = 2
ONE_REQUEST = 64 * 2**20
"""Bytes up to which a file goes up in one request: to a server near by that is quicker than parts (benchmarks/README.md)."""
REFUSED_SWAP = {"412", "409", "404", "NoSuchKey", "PreconditionFailed", "ConditionalRequestConflict"}
PROBED = "probe/conditional-writes"
OTHER_BYTES = {"BadDigest", "XAmzContentChecksumMismatch"}
_conditional: dict[tuple[str, str], bool] = {}
"""Whether conditions hold, by endpoint and bucket: asked once per process."""
_compared: dict[tuple[str, str], bool] = {}
"""Whether the server refuses bytes that are not those of the checksum sent along: asked likewise, and only where it matters."""


class S3Store:
    """A bucket, or a prefix of one, at any endpoint with conditional writes."""

    def __init__(self, bucket: str, prefix: str = "", client: Any = None) -> None:
        self.bucket, self.prefix = bucket, prefix.strip("/")
        self.uri = f"s3://{bucket}" + (f"/{self.prefix}" if self.prefix else "")
        self.client = client if client is not None else s3_client()

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)

    def _explained(self, error: Exception, key: str, need: str) -> StoreError:
        """A StoreError that names the setting to change; `need` is the permission that the call takes. Neither addresses with
        signed queries nor keys are ever told."""
        code = _code(error) or type(error).__name__
        permission = f"the credentials may not do this: allow s3:{need} here (deployments/policies)"
        checksum = "the endpoint refuses checksum headers: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
        hints = {
            "NoCredentialsError": f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or {BLOCK}",
            "PartialCredentialsError": "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            "ExpiredToken": "the credentials have expired: renew AWS_SESSION_TOKEN or the profile's login",
            "NoRegionError": "set AWS_DEFAULT_REGION",
            "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
            "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
            "NoSuchBucket": f"make the bucket {self.bucket!r} or change the store's URI",
            "AccessDenied": permission,
            "403": permission,
            "BadDigest": "the bytes changed on their way: try again, then look at network and memory",
            "InvalidRequest": checksum,
            "InvalidArgument": checksum,
            "SSLError": "the server's certificate is not trusted here: set AWS_CA_BUNDLE to a file with its CA",
        }
        hint = hints.get(code, "check AWS_ENDPOINT_URL_S3 and that the server runs")
        if hint is checksum and not self._checksums:
            hint = "the endpoint refuses the request, though no checksum headers were sent"
        return StoreError(f"{self.uri}/{key}: {code}; {hint}")

    @property
    def _checksums(self) -> bool:
        config = getattr(getattr(self.client, "meta", None), "config", None)
        return getattr(config, "request_checksum_calculation", None) != "when_required"

    # --- conditional writes ---

    def _conditions_hold(self) -> bool:
        """Whether the endpoint keeps conditions on writes. Asked once per process: some answer 200 and ignore them.

        Raises StoreError where they do not hold, unless FORECASTLE_SINGLE_WRITER=1 says that nobody else writes here.
        """
        if (place := self._place) not in _conditional:
            # The first may create the object; the second must not, and neither must a swap of another tag
            created = self._probe(IfNoneMatch="*") and self._probe(IfNoneMatch="*")
            _conditional[place] = not created and not self._probe(IfMatch='"0123456789abcdef0123456789abcdef"')
        if _conditional[place]:
            return True
        if os.environ.get("FORECASTLE_SINGLE_WRITER") != "1":
            raise StoreError(
                f"{self.uri}: the endpoint ignores If-None-Match and If-Match, so that two publishers could overwrite each "
                "other; where only one ever writes, set FORECASTLE_SINGLE_WRITER=1"
            )
        return False

    def _probe(self, **condition: str) -> bool:
        """Whether a conditional write was let through. Raises StoreError on anything but a plain yes or no."""
        data = uuid.uuid4().hex.encode()
        try:
            self._put(PROBED, data, digest(data), condition)
            return True
        except Exception as error:
            if _code(error) in REFUSED_SWAP:
                return False
            if _code(error) == "NotImplemented":
                return True
            raise self._explained(error, PROBED, "PutObject") from error

    @property
    def _place(self) -> tuple[str, str]:
        return str(self.client.meta.endpoint_url), self.bucket

    def _compares(self, size: int) -> bool:
        """Whether the server itself refuses other bytes of that size than those announced, so that nobody need hash them here."""
        if size > ONE_REQUEST or not self._checksums:
            return False
        if self._place not in _compared:
            try:
                self._put(PROBED, b"one", digest(b"two"), {})
                _compared[self._place] = False
            except Exception as error:
                _compared[self._place] = _code(error) in OTHER_BYTES
        return _compared[self._place]

    def put_if_absent(self, key: str, data: bytes | Path, expected: StoredFile | None = None) -> bool:
        if expected is None or not self._compares(expected.size):
            expected = digest_as(expected, data)
        conditional = self._conditions_hold()
        if not conditional and (found := self.head(key)) is not None:
            self._own(found, key, expected)
            return False
        try:
            condition = {"IfNoneMatch": "*"} if conditional else {}
            if isinstance(data, Path) and expected.size > ONE_REQUEST:
                self._put_parts(key, data, expected, condition)
            else:
                self._put(key, data, expected, condition)
        except Exception as error:
            if _code(error) in OTHER_BYTES:
                digest_as(expected, data)
            # 412, 409, a timeout, a reset: the write may have happened all the same, also by the SDK's own retry.
            # Look and compare; nothing is ever deleted here.
            found = self._head_after(error, key)
            if found is None:
                raise self._explained(error, key, "PutObject") from error
            self._own(found, key, expected, error)
            return False
        if not conditional:
            self.check(key, expected)
        return True

    def _own(self, found: ObjectInfo, key: str, expected: StoredFile, error: Exception | None = None) -> None:
        if (found.sha256, found.size) != (expected.sha256, expected.size):
            raise StoreConflict(f"{self.uri}/{key} holds other bytes; an object is never overwritten") from error

    def _head_after(self, error: Exception, key: str) -> ObjectInfo | None:
        try:
            return self.head(key)
        except StoreError:
            raise self._explained(error, key, "PutObject") from error

    def swap(self, key: str, data: bytes, etag: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        conditional = self._conditions_hold()
        if not conditional:
            found = self.read_for_swap(key)
            if (found[1] if found else None) != etag:
                return False
            condition = {}
        writer = uuid.uuid4().hex
        try:
            self._put(key, data, digest(data), condition, {"writer": writer})
        except Exception as error:
            # The answer may be lost and the SDK's own retry refused: ours is the write that bears our mark. Bytes alone
            # would not tell, since two writers may well write the same ones.
            try:
                answer = self.client.head_object(Bucket=self.bucket, Key=self._key(key))
                if answer["Metadata"].get("writer") == writer:
                    return True
            except Exception as missing:
                if _code(missing) not in {"404", "NoSuchKey"}:
                    raise self._explained(error, key, "PutObject") from error
            if _code(error) in REFUSED_SWAP:
                return False
            raise self._explained(error, key, "PutObject") from error
        if not conditional:
            self.check(key, digest(data))
        return True

    # --- bytes up ---

    def _put(
        self, key: str, data: bytes | Path, expected: StoredFile, condition: dict[str, str], marks: dict[str, str] | None = None
    ) -> None:
        metadata = {"sha256": expected.sha256, **(marks or {})}
        # Told, not computed a second time by the SDK; the server compares what it was sent
        checksum = {"ChecksumSHA256": base64.b64encode(bytes.fromhex(expected.sha256)).decode()} if self._checksums else {}
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as body:
            self.client.put_object(Bucket=self.bucket, Key=self._key(key), Body=body, Metadata=metadata, **checksum, **condition)

    def _checksum(self) -> dict[str, str]:
        return {"ChecksumAlgorithm": "SHA256"} if self._checksums else {}

    def _put_parts(self, key: str, path: Path, expected: StoredFile, condition: dict[str, str]) -> None:
        """Upload in parts, several at once; the condition is that of the last request, which makes the object."""
        place = {"Bucket": self.bucket, "Key": self._key(key)}
        begun = self.client.create_multipart_upload(**place, Metadata={"sha256": expected.sha256}, **self._checksum())
        upload = {**place, "UploadId": begun["UploadId"]}
        size = max(PART, -(-expected.size // 10_000))

        def send(number: int) -> dict[str, Any]:
            with path.open("rb") as file:
                file.seek((number - 1) * size)
                answer = self.client.upload_part(**upload, PartNumber=number, Body=file.read(size), **self._checksum())
            sums = {"ChecksumSHA256": answer["ChecksumSHA256"]} if "ChecksumSHA256" in answer else {}
            return {"PartNumber": number, "ETag": answer["ETag"], **sums}

        try:
            parts = _in_parallel(send, range(1, -(-expected.size // size) + 1), f"up {path.name}")
            self.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
        except BaseException:
            # Completed all the same, there is nothing left to abort; where that is not allowed, gc does it
            with suppress(Exception):
                self.client.abort_multipart_upload(**upload)
            raise

    # --- bytes down ---

    def get(self, key: str, limit: int | None = None) -> bytes:
        return self._get(key, limit)[0]

    def _get(self, key: str, limit: int | None = None, **part: str) -> tuple[bytes, str]:
        def read(answer: dict[str, Any]) -> tuple[bytes, str]:
            if limit is not None and (size := answer["ContentLength"]) > limit:
                answer["Body"].close()
                raise StoreError(f"{self.uri}/{key} has {size} bytes, more than the allowed {limit}")
            return answer["Body"].read(), str(answer["ETag"])

        return self._answered(key, read, **part)

    def _answered(self, key: str, read: Callable[[dict[str, Any]], Any], **part: str) -> Any:
        """What `read` makes of the answer to a GET, tried three times: the SDK does not retry a cut body."""
        wanted = {"Bucket": self.bucket, **(part if "Key" in part else {"Key": self._key(key), **part})}
        for attempt in (1, 2, 3):
            try:
                return read(self.client.get_object(**wanted))
            except StoreError:
                raise
            except Exception as error:
                if _code(error) in {"NoSuchKey", "404", "AccessDenied"}:
                    # Who may not list is told 403 of a missing key: the two cannot be told apart
                    denied = " (or no permission to read it)" if _code(error) == "AccessDenied" else ""
                    raise ObjectMissing(f"no object {self.uri}/{key}{denied}") from error
                if attempt == 3 or _code(error):
                    raise self._explained(error, key, "GetObject") from error
        raise AssertionError("unreachable")

    def head(self, key: str) -> ObjectInfo | None:
        try:
            answer = self.client.head_object(Bucket=self.bucket, Key=self._key(key))
        except Exception as error:
            if _code(error) in {"NoSuchKey", "404"}:
                return None
            # A HEAD's 403 has no body: a GET tells a wrong key (StoreError) from a missing object or permission
            if _code(error) == "403" and self.read_for_swap(key) is None:
                return None
            raise self._explained(error, key, "GetObject") from error
        return ObjectInfo(int(answer["ContentLength"]), answer["Metadata"].get("sha256"), str(answer["ETag"]))

    def _sized(self, key: str, expected: StoredFile) -> ObjectInfo:
        info = self.head(key)
        if info is None:
            raise ObjectMissing(f"no object {self.uri}/{key}")
        same(StoredFile(sha256=expected.sha256, size=info.size), key, expected)
        return info

    def download(self, key: str, path: Path, expected: StoredFile) -> None:
        info = self._sized(key, expected)
        with atomic_file(path) as temporary, temporary.open("r+b") as file:

            def bring(start: int) -> None:
                end = min(start + PART, expected.size) - 1
                data = self._get(key, Range=f"bytes={start}-{end}", IfMatch=info.etag)[0] if expected.size else b""
                os.pwrite(file.fileno(), data, start)

            _in_parallel(bring, range(0, max(1, expected.size), PART), f"down {path.name}")
            same(digest(temporary), key, expected)

    def fetch(self, key: str, path: Path) -> None:
        """Bring an object whose content nobody promised, whatever its key: one answer holds one version of it, whole."""

        def read(answer: dict[str, Any]) -> None:
            with path.open("wb") as file:
                for block in answer["Body"].iter_chunks(1 << 20):
                    try:
                        file.write(block)
                    except OSError as error:
                        raise StoreError(f"{path.parent}: {error.strerror}; free space there, or name another folder") from error

        self._answered(key, read, Key=f"{self.prefix}/{key}".removeprefix("/"))

    def check(self, key: str, expected: StoredFile) -> None:
        self._sized(key, expected)

        def read(answer: dict[str, Any]) -> StoredFile:
            total, size = hashlib.sha256(), 0
            for block in answer["Body"].iter_chunks(1 << 20):
                total.update(block)
                size += len(block)
            return StoredFile(sha256=total.hexdigest(), size=size)

        same(self._answered(key, read), key, expected)

    def read_for_swap(self, key: str) -> tuple[bytes, str] | None:
        try:
            return self._get(key, SWAP_LIMIT)
        except ObjectMissing:
            return None

    # --- what is there ---

    def list(self, prefix: str) -> Iterator[str]:
        for entry in self.entries(prefix):
            yield entry.key

    def entries(self, prefix: str) -> Iterator[StoredObject]:
        for page in self._pages("list_objects_v2", prefix, "ListBucket"):
            for item in page.get("Contents", ()):
                yield StoredObject(self._relative(item["Key"]), item["Size"], _age(page, item["LastModified"]))

    def unfinished(self, age: float, abort: bool) -> Iterator[StoredObject]:
        for page in self._pages("list_multipart_uploads", "", "ListBucketMultipartUploads"):
            for item in page.get("Uploads", ()):
                entry = StoredObject(self._relative(item["Key"]), 0, _age(page, item["Initiated"]))
                if entry.age >= age:
                    if abort:
                        self._abort(item["Key"], item["UploadId"])
                    yield entry

    def _relative(self, full: str) -> str:
        return full[len(self.prefix) + 1 :] if self.prefix else full

    def _pages(self, operation: str, prefix: str, need: str) -> Iterator[dict[str, Any]]:
        full = f"{self.prefix}/{prefix}" if self.prefix else prefix
        try:
            yield from self.client.get_paginator(operation).paginate(Bucket=self.bucket, Prefix=full)
        except Exception as error:
            raise self._explained(error, prefix, need) from error

    def _abort(self, full: str, upload: str) -> None:
        try:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=full, UploadId=upload)
        except Exception as error:
            if _code(error) not in {"NoSuchUpload", "404"}:
                raise self._explained(error, self._relative(full), "AbortMultipartUpload") from error

    def delete(self, key: str) -> None:
        try:
            self.client.delete_object(Bucket=self.bucket, Key=self._key(key))
        except Exception as error:
            raise self._explained(error, key, "DeleteObject") from error


def _in_parallel(work: Callable[[int], Any], over: range, what: str) -> list[Any]:
    """`work` of every number, a few at once, in order; a bar on a terminal when there are many."""
    if len(over) == 1:
        return [work(over[0])]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: list[Future[Any]] = [pool.submit(work, number) for number in over]
        try:
            if len(over) > AT_ONCE and sys.stderr.isatty():
                from rich.console import Console
                from rich.progress import track

                for _ in track(as_completed(futures), what, total=len(futures), console=Console(stderr=True)):
                    pass
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _code(error: Exception) -> str:
    """The S3 error code, or '' when no answer came."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _age(answer: dict[str, Any], then: datetime) -> float:
    """Seconds since `then` by the server's clock: this machine's may be wrong."""
    said = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(said) if said else datetime.now(UTC)
    return (now - then).total_seconds()

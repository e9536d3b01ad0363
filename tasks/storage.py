"""Objects by key, in S3 or in a folder, through one protocol: put-if-absent, compare-and-swap, verified reads. What the
objects mean stands in tasks/artifacts.py. Uses boto3, loaded when an S3 store is opened."""

from __future__ import annotations

import fcntl
import hashlib
import io
import ipaddress
import os
import re
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

from models.manifest import StoredFile

KEY_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
"""Part of a key between slashes: never `..`, never hidden."""


class StoreError(RuntimeError):
    """The store did not do what was asked; the message names the setting to change."""


class ObjectMissing(StoreError):
    """No object of that key."""


class StoreConflict(StoreError):
    """Other bytes stand under a key whose object never changes."""


class ArtifactIntegrityError(ValueError):
    """A stored artifact is not what its manifest says."""


@dataclass(frozen=True)
class ObjectInfo:
    """Size in bytes, sha256 (hex; None when the writer left none) and the tag that `swap` compares."""

    size: int
    sha256: str | None
    etag: str


@dataclass(frozen=True)
class StoredObject:
    """One object in a listing: its key, its size in bytes and its age in seconds by the store's own clock."""

    key: str
    size: int
    age: float


def digest(data: bytes | Path) -> StoredFile:
    """sha256 and size of bytes or of a file."""
    if isinstance(data, bytes):
        return StoredFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    with data.open("rb") as file:
        return StoredFile(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=data.stat().st_size)


def check_key(key: str) -> str:
    """The key itself when every part of it is a legal name; raises StoreError otherwise."""
    if not all(KEY_PART.fullmatch(part) for part in key.split("/")):
        raise StoreError(f"{key!r} is no legal key: letters, digits, '.', '_' and '-' between slashes")
    return key


class ObjectStore(Protocol):
    """What publishing needs of a store. Keys are relative to the store's prefix."""

    uri: str

    def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        """Create the object: True; False when these very bytes are there already. Raises StoreConflict on others."""

    def get(self, key: str, limit: int | None = None) -> bytes:
        """The object's bytes. Raises ObjectMissing, and StoreError when it is larger than `limit` bytes."""

    def head(self, key: str) -> ObjectInfo | None:
        """What is known of the object, or None."""

    def download(self, key: str, path: Path, expected: StoredFile) -> None:
        """Bring the object to `path`, whole and verified. Raises ArtifactIntegrityError and leaves nothing otherwise."""

    def read_for_swap(self, key: str) -> tuple[bytes, str] | None:
        """Bytes and tag of a small object that changes, or None."""

    def swap(self, key: str, data: bytes, etag: str | None) -> bool:
        """Replace the object if its tag is still `etag` (None: if there is none). False: somebody else was first."""

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that start with `prefix`, sorted."""

    def entries(self, prefix: str) -> Iterator[StoredObject]:
        """What `list` finds, with size and age."""

    def unfinished(self, age: float, abort: bool) -> Iterator[StoredObject]:
        """Uploads begun more than `age` seconds ago and never finished; ended for good with `abort`."""

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens when there is none."""


def _verified(data: bytes, key: str, expected: StoredFile) -> bytes:
    found = digest(data)
    if found != expected:
        raise ArtifactIntegrityError(
            f"{key}: sha256 {found.sha256} and {found.size} bytes, expected {expected.sha256} and {expected.size}"
        )
    return data


def _write_verified(data: bytes, key: str, path: Path, expected: StoredFile) -> None:
    from models.checkpoint import write_atomically

    write_atomically(path, _verified(data, key, expected))


class LocalStore:
    """A folder with the same protocol: hard links for put-if-absent, rename under a lock for the swap."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.uri = self.folder.as_uri()

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    @contextmanager
    def _disk(self, key: str) -> Iterator[None]:
        """What the operating system refuses becomes a StoreError; a missing file becomes ObjectMissing."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(f"no object {self.uri}/{key}") from error
        except OSError as error:
            raise StoreError(f"{self.uri}/{key}: {error.strerror}; check the folder's permissions and free space") from error

    def _temporary(self, folder: Path, data: bytes | Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = str(folder / f".tmp-{uuid.uuid4().hex}")
        # Created with the mode the umask says: reading the umask means setting it, and other threads are writing too
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as out:
                if isinstance(data, bytes):
                    out.write(data)
                else:
                    with data.open("rb") as source:
                        while block := source.read(1 << 20):
                            out.write(block)
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return name

    def _sync(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        path, expected = self._path(key), digest(data)
        with self._disk(key):
            temporary = self._temporary(path.parent, data)
            try:
                os.link(temporary, path)  # fails when the name exists: never replaces
                self._sync(path.parent)
                return True
            except FileExistsError:
                if digest(path) != expected:
                    raise StoreConflict(f"{self.uri}/{key} holds other bytes; an object is never overwritten") from None
                return False
            finally:
                Path(temporary).unlink(missing_ok=True)

    def get(self, key: str, limit: int | None = None) -> bytes:
        path = self._path(key)
        with self._disk(key):
            if limit is not None and (size := path.stat().st_size) > limit:
                raise StoreError(f"{self.uri}/{key} has {size} bytes, more than the allowed {limit}")
            return path.read_bytes()

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._disk(key):
                found = digest(self._path(key))
        except ObjectMissing:
            return None
        return ObjectInfo(found.size, found.sha256, found.sha256)

    def download(self, key: str, path: Path, expected: StoredFile) -> None:
        _write_verified(self.get(key, limit=expected.size), key, path, expected)

    def read_for_swap(self, key: str) -> tuple[bytes, str] | None:
        try:
            data = self.get(key)
        except ObjectMissing:
            return None
        return data, digest(data).sha256

    def swap(self, key: str, data: bytes, etag: str | None) -> bool:
        path = self._path(key)
        with self._disk(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / f".lock-{path.name}").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = self.read_for_swap(key)
                if (found[1] if found else None) != etag:
                    return False
                os.replace(self._temporary(path.parent, data), path)
                self._sync(path.parent)
                return True

    def list(self, prefix: str) -> Iterator[str]:
        above = prefix.rpartition("/")[0]
        start = self.folder / (check_key(above) if above else "")
        found = (p for p in start.rglob("*") if p.is_file() and not p.name.startswith("."))
        yield from sorted(k for p in found if (k := p.relative_to(self.folder).as_posix()).startswith(prefix))

    def entries(self, prefix: str) -> Iterator[StoredObject]:
        for key in self.list(prefix):
            with suppress(FileNotFoundError):
                yield self._entry(key, self.folder / key)

    def _entry(self, key: str, path: Path) -> StoredObject:
        found = path.stat()
        return StoredObject(key, found.st_size, time.time() - found.st_mtime)

    def unfinished(self, age: float, abort: bool) -> Iterator[StoredObject]:
        for path in sorted(self.folder.rglob(".tmp-*")):
            with suppress(FileNotFoundError):
                entry = self._entry(path.relative_to(self.folder).as_posix(), path)
                if entry.age >= age:
                    if abort:
                        path.unlink()
                    yield entry

    def delete(self, key: str) -> None:
        with suppress(ObjectMissing), self._disk(key):
            self._path(key).unlink()


class S3Store:
    """Any S3-compatible endpoint with conditional writes. Credentials and endpoint come from the AWS chain alone."""

    def __init__(self, bucket: str, prefix: str = "", client: Any = None) -> None:
        self.bucket, self.prefix = bucket, prefix.strip("/")
        self.uri = f"s3://{bucket}" + (f"/{self.prefix}" if self.prefix else "")
        self.client = client if client is not None else _s3_client()

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)

    def _explained(self, error: Exception, key: str) -> StoreError:
        """A StoreError that names the setting to change. Endpoint addresses stay, signed queries never appear."""
        code = _code(error) or type(error).__name__
        hints = {
            "NoCredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            "PartialCredentialsError": "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            "ExpiredToken": "the credentials have expired: renew AWS_SESSION_TOKEN or the profile's login",
            "NoRegionError": "set AWS_DEFAULT_REGION",
            "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
            "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
            "NoSuchBucket": f"make the bucket {self.bucket!r} or change the store's URI",
            "AccessDenied": "the credentials lack a permission on this prefix (see docs/operations.md)",
            "403": "the credentials lack a permission on this prefix (see docs/operations.md)",
            "InvalidRequest": "the endpoint refuses checksum headers: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required",
        }
        hint = hints.get(code, "check AWS_ENDPOINT_URL_S3 and that the server runs")
        return StoreError(f"{self.uri}/{key}: {code}; {hint}")

    def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        expected = digest(data)
        try:
            self._put(key, data, expected, {"IfNoneMatch": "*"})
            return True
        except Exception as error:
            # 412, 409, a timeout, a reset: the write may have happened all the same, also by the SDK's own retry.
            # Look and compare; nothing is ever deleted here.
            found = self._head_after(error, key)
            if found is None:
                raise self._explained(error, key) from error
            if (found.sha256, found.size) != (expected.sha256, expected.size):
                raise StoreConflict(f"{self.uri}/{key} holds other bytes; an object is never overwritten") from error
            return False

    def _head_after(self, error: Exception, key: str) -> ObjectInfo | None:
        try:
            return self.head(key)
        except StoreError:
            raise self._explained(error, key) from error

    def _put(
        self, key: str, data: bytes | Path, expected: StoredFile, condition: dict[str, str], marks: dict[str, str] | None = None
    ) -> None:
        metadata = {"sha256": expected.sha256, **(marks or {})}
        # One PUT: multipart through s3transfer has no condition, and a single PUT is the fastest way measured here
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as body:
            self.client.put_object(
                Bucket=self.bucket, Key=self._key(key), Body=body, Metadata=metadata, ChecksumAlgorithm="SHA256", **condition
            )

    def get(self, key: str, limit: int | None = None) -> bytes:
        if limit is not None:
            info = self.head(key)
            if info and info.size > limit:
                raise StoreError(f"{self.uri}/{key} has {info.size} bytes, more than the allowed {limit}")
        return self._get(key)[0]

    def _get(self, key: str) -> tuple[bytes, str]:
        for attempt in (1, 2, 3):
            try:
                answer = self.client.get_object(Bucket=self.bucket, Key=self._key(key))
                return answer["Body"].read(), str(answer["ETag"])  # the SDK does not retry a cut body
            except Exception as error:
                if _code(error) in {"NoSuchKey", "404", "AccessDenied"}:
                    # Who may not list is told 403 of a missing key: the two cannot be told apart
                    denied = " (or no permission to read it)" if _code(error) == "AccessDenied" else ""
                    raise ObjectMissing(f"no object {self.uri}/{key}{denied}") from error
                if attempt == 3 or _code(error):
                    raise self._explained(error, key) from error
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
            raise self._explained(error, key) from error
        return ObjectInfo(int(answer["ContentLength"]), answer["Metadata"].get("sha256"), str(answer["ETag"]))

    def download(self, key: str, path: Path, expected: StoredFile) -> None:
        info = self.head(key)
        if info is None:
            raise ObjectMissing(f"no object {self.uri}/{key}")
        if info.size != expected.size:
            raise ArtifactIntegrityError(f"{key}: {info.size} bytes, expected {expected.size}")
        _write_verified(self._get(key)[0], key, path, expected)

    def read_for_swap(self, key: str) -> tuple[bytes, str] | None:
        try:
            return self._get(key)
        except ObjectMissing:
            return None

    def swap(self, key: str, data: bytes, etag: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        writer = uuid.uuid4().hex
        try:
            self._put(key, data, digest(data), condition, {"writer": writer})
            return True
        except Exception as error:
            # The answer may be lost and the SDK's own retry refused: ours is the write that bears our mark. Bytes alone
            # would not tell, since two writers may well write the same ones.
            try:
                answer = self.client.head_object(Bucket=self.bucket, Key=self._key(key))
                if answer["Metadata"].get("writer") == writer:
                    return True
            except Exception as missing:
                if _code(missing) not in {"404", "NoSuchKey"}:
                    raise self._explained(error, key) from error
            if _code(error) in {"412", "409", "404", "NoSuchKey", "PreconditionFailed", "ConditionalRequestConflict"}:
                return False
            raise self._explained(error, key) from error

    def list(self, prefix: str) -> Iterator[str]:
        for entry in self.entries(prefix):
            yield entry.key

    def entries(self, prefix: str) -> Iterator[StoredObject]:
        for page in self._pages("list_objects_v2", prefix):
            for item in page.get("Contents", ()):
                yield StoredObject(self._relative(item["Key"]), item["Size"], _age(page, item["LastModified"]))

    def unfinished(self, age: float, abort: bool) -> Iterator[StoredObject]:
        for page in self._pages("list_multipart_uploads", ""):
            for item in page.get("Uploads", ()):
                entry = StoredObject(self._relative(item["Key"]), 0, _age(page, item["Initiated"]))
                if entry.age >= age:
                    if abort:
                        self._abort(item["Key"], item["UploadId"])
                    yield entry

    def _relative(self, full: str) -> str:
        return full[len(self.prefix) + 1 :] if self.prefix else full

    def _pages(self, operation: str, prefix: str) -> Iterator[dict[str, Any]]:
        full = f"{self.prefix}/{prefix}" if self.prefix else prefix
        try:
            yield from self.client.get_paginator(operation).paginate(Bucket=self.bucket, Prefix=full)
        except Exception as error:
            raise self._explained(error, prefix) from error

    def _abort(self, full: str, upload: str) -> None:
        try:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=full, UploadId=upload)
        except Exception as error:
            if _code(error) not in {"NoSuchUpload", "404"}:
                raise self._explained(error, self._relative(full)) from error

    def delete(self, key: str) -> None:
        try:
            self.client.delete_object(Bucket=self.bucket, Key=self._key(key))
        except Exception as error:
            raise self._explained(error, key) from error


def _code(error: Exception) -> str:
    """The S3 error code, or '' when no answer came."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _age(answer: dict[str, Any], then: datetime) -> float:
    """Seconds since `then` by the server's clock: this machine's may be wrong."""
    said = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(said) if said else datetime.now(UTC)
    return (now - then).total_seconds()


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine by its spelling; a name that merely starts with 127. is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _s3_client() -> Any:
    import boto3
    from botocore.config import Config

    session = boto3.session.Session()

    def client(style: str) -> Any:
        return session.client("s3", config=Config(
            retries={"mode": "standard", "total_max_attempts": 4}, connect_timeout=10, read_timeout=60,
            s3={"addressing_style": style},
        ))  # fmt: skip

    try:
        found = client("auto")
    except ValueError:  # its text holds the endpoint as it was written, a password in it too
        raise StoreError("the S3 endpoint is no http(s) address: check AWS_ENDPOINT_URL_S3") from None
    except Exception as error:
        raise StoreError(f"no S3 client: {type(error).__name__}: {error}") from error
    # As the client resolved it: an endpoint may also stand in the AWS configuration file
    parts = urllib.parse.urlsplit(found.meta.endpoint_url)
    host = parts.hostname or ""
    if parts.username or parts.password:
        raise StoreError("the S3 endpoint holds a user or a password: keep credentials in the AWS chain")
    if parts.scheme != "https" and not _is_loopback(host) and os.environ.get("FORECASTLE_ALLOW_HTTP") != "1":
        raise StoreError(f"{host}: plain http only to this machine; use https, or FORECASTLE_ALLOW_HTTP=1")
    return found if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) else client("path")


def open_store(uri: str) -> ObjectStore:
    """The store behind `s3://bucket/prefix`, `file:///folder` or a plain path."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme == "s3":
        if not parts.netloc:
            raise StoreError(f"{uri}: no bucket; write s3://bucket/prefix")
        return S3Store(parts.netloc, parts.path)
    if parts.scheme == "file":
        return LocalStore(Path(urllib.parse.unquote(parts.path)))
    if parts.scheme and len(parts.scheme) > 1:
        raise StoreError(f"{uri}: unknown kind of store; use s3:// or file://")
    return LocalStore(Path(uri))


def split_uri(uri: str, marker: str) -> tuple[ObjectStore, str]:
    """Store and key of an object's URI; `marker` is the key's first part, such as 'datasets'."""
    head, found, tail = uri.rpartition(f"/{marker}/")
    if not found:
        raise StoreError(f"{uri}: expected .../{marker}/...")
    return open_store(head), f"{marker}/{tail}"

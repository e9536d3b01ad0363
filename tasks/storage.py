"""Objects by key through one protocol: put-if-absent, compare-and-swap, verified reads; and a folder that keeps it. S3 stands in
tasks/s3.py, what the objects mean in tasks/artifacts.py."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from models.manifest import StoredFile

KEY_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
"""Part of a key between slashes: never `..`, never hidden."""
SWAP_LIMIT = 64 * 2**10
"""Bytes of the largest object that is swapped: an alias, a claim, a counter."""


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


def digest_as(expected: StoredFile | None, data: bytes | Path) -> StoredFile:
    """`digest` of data; raises ArtifactIntegrityError when that is not what was expected."""
    found = digest(data)
    if expected is not None:
        same(found, str(data) if isinstance(data, Path) else "the data", expected)
    return found


def check_key(key: str) -> str:
    """The key itself when every part of it is a legal name; raises StoreError otherwise."""
    if not all(KEY_PART.fullmatch(part) for part in key.split("/")):
        raise StoreError(f"{key!r} is no legal key: letters, digits, '.', '_' and '-' between slashes")
    return key


class ObjectStore(Protocol):
    """What publishing needs of a store. Keys are relative to the store's prefix."""

    uri: str

    def put_if_absent(self, key: str, data: bytes | Path, expected: StoredFile | None = None) -> bool:
        """Create the object: True; False when these very bytes are there already. Raises StoreConflict on others.

        `expected`, where it is known, saves hashing the data before a server that does so itself. Raises
        ArtifactIntegrityError, and creates nothing, when the data are not that.
        """

    def get(self, key: str, limit: int | None = None) -> bytes:
        """The object's bytes. Raises ObjectMissing, and StoreError when it is larger than `limit` bytes."""

    def head(self, key: str) -> ObjectInfo | None:
        """What is known of the object, or None."""

    def download(self, key: str, path: Path, expected: StoredFile) -> None:
        """Bring the object to `path`, whole and verified. Raises ArtifactIntegrityError and leaves nothing otherwise."""

    def check(self, key: str, expected: StoredFile) -> None:
        """Read every byte of the object. Raises ArtifactIntegrityError, or ObjectMissing."""

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


def same(found: StoredFile, key: str, expected: StoredFile) -> None:
    """Raises ArtifactIntegrityError when what was found is not what was expected."""
    if found != expected:
        raise ArtifactIntegrityError(
            f"{key}: sha256 {found.sha256} and {found.size} bytes, expected {expected.sha256} and {expected.size}"
        )


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

    def put_if_absent(self, key: str, data: bytes | Path, expected: StoredFile | None = None) -> bool:
        path, expected = self._path(key), digest_as(expected, data)
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
        from models.checkpoint import atomic_file

        with self._disk(key):
            same(StoredFile(sha256=expected.sha256, size=self._path(key).stat().st_size), key, expected)
            with atomic_file(path) as temporary:
                shutil.copyfile(self._path(key), temporary)
                same(digest(temporary), key, expected)

    def check(self, key: str, expected: StoredFile) -> None:
        with self._disk(key):
            same(digest(self._path(key)), key, expected)

    def read_for_swap(self, key: str) -> tuple[bytes, str] | None:
        try:
            data = self.get(key, SWAP_LIMIT)
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


def open_store(uri: str) -> ObjectStore:
    """The store behind `s3://bucket/prefix`, `file:///folder` or a plain path."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme == "s3":
        if not parts.netloc:
            raise StoreError(f"{uri}: no bucket; write s3://bucket/prefix")
        from tasks.s3 import S3Store

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

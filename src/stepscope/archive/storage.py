"""The objects under an address, through fsspec.

The only module that knows fsspec.  Keys are relative to the address and consist of letters, digits, ``._-~%@`` and
slashes (``key_of`` makes one of any name).  Reads say how many bytes they want at most, so the size of an object that
someone else wrote decides nothing.  Credentials are found by the library of the storage, in its usual places
(environment, profile, instance); nothing of them passes through here.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from stepscope.archive.location import ArchiveUrl
from stepscope.errors import ArchiveError, ArchiveMissing

__all__ = ["CHUNK_BYTES", "ObjectReader", "Storage", "StoredObject", "key_of"]

CHUNK_BYTES = 16 << 20
"""Larger objects are written and read in pieces."""
LONGEST_PART = 200
"""Of a part of a key; file systems allow 255 bytes."""
_EXTRAS = {"s3": "archive", "s3a": "archive", "gs": "archive-gcs", "gcs": "archive-gcs"}
_LOCAL = ("file", "local")
_S3 = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 4, "mode": "standard"}}


def key_of(name: str) -> str:
    """A key for a name of any characters; different names have different keys."""
    return "/".join(map(_part, name.split("/")))


def _part(text: str) -> str:
    raw = os.fsencode(text)
    part = quote(raw, safe="")
    if len(part) > LONGEST_PART:
        return f"{part[: LONGEST_PART - 65]}~{hashlib.sha256(raw).hexdigest()}"
    return part.replace("~", "%7E")


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    size: int
    version: str
    """Changes when the object does, if the storage reports anything like it (ETag)."""


class ObjectReader(Protocol):
    """What a catalog is read with."""

    url: ArchiveUrl

    def find(self, prefix: str) -> dict[str, StoredObject]: ...
    def read_many(self, sizes: Mapping[str, int]) -> dict[str, bytes]: ...


class _Files(Protocol):
    """What we use of ``fsspec.AbstractFileSystem``."""

    def find(self, path: str, detail: bool = ...) -> dict[str, dict[str, Any]]: ...
    def info(self, path: str) -> dict[str, Any]: ...
    def isfile(self, path: str) -> bool: ...
    def cat_file(self, path: str, start: int | None = ..., end: int | None = ...) -> bytes: ...
    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], on_error: str = ...) -> list[Any]: ...
    def pipe_file(self, path: str, value: bytes, mode: str = ...) -> Any: ...
    def open(self, path: str, mode: str, block_size: int = ...) -> Any: ...
    def mv(self, path1: str, path2: str) -> Any: ...
    def rm_file(self, path: str) -> Any: ...


class Storage:
    """Thread-safe as far as fsspec's file systems are: several threads may read and write at once."""

    def __init__(self, url: ArchiveUrl) -> None:
        self.url = url
        self._local = url.scheme in _LOCAL
        with self._errors(""):
            self._files, self._base = _open(url)

    def find(self, prefix: str) -> dict[str, StoredObject]:
        """All objects whose keys begin with this folder; may be empty."""
        with self._errors(prefix):
            try:
                found = self._files.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                if not self._local and self.url.scheme != "memory":
                    raise  # no such bucket
                found = {}
        base = self._base.lstrip("/")
        objects = {}
        for path, about in found.items():
            key = path.lstrip("/")
            if about.get("type") == "file" and key.startswith(f"{base}/") and not _is_spare(key):
                objects[key[len(base) + 1 :]] = StoredObject(size=int(about.get("size") or 0), version=_version(about))
        return objects

    def size(self, key: str) -> int | None:
        """The size of an object in bytes; None if it does not exist."""
        with self._errors(key):
            try:
                about = self._files.info(self._path(key))
            except FileNotFoundError:
                return None
            return int(about.get("size") or 0) if about.get("type") == "file" else None

    def read(self, key: str, most: int) -> bytes:
        """The whole object; ArchiveError if it has more than ``most`` bytes, ArchiveMissing if it does not exist."""
        size = self.size(key)
        if size is None:
            raise ArchiveMissing(f"{self.url}/{key} does not exist")
        if size > most:
            raise ArchiveError(f"{self.url}/{key} has {size:,} bytes; at most {most:,} are read")
        return self._range(key, 0, size)

    def read_many(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """Several small objects at once, as far as they exist; ``sizes``: as ``find`` reported them."""
        wanted = [key for key, size in sizes.items() if size > 0]
        if not wanted:
            return {}
        with self._errors(wanted[0]):
            paths = [self._path(key) for key in wanted if not self._local or self._files.isfile(self._path(key))]
            if len(paths) < len(wanted):
                wanted = [key for key in wanted if self._path(key) in paths]
            ends = [sizes[key] for key in wanted]
            found = self._files.cat_ranges(paths, [0] * len(paths), ends, on_error="return")
            for result in found:
                if isinstance(result, BaseException) and not isinstance(result, FileNotFoundError):
                    raise result
        return {key: bytes(data) for key, data in zip(wanted, found, strict=True) if not isinstance(data, Exception)}

    def pieces(self, key: str, size: int) -> Iterator[bytes]:
        """The first ``size`` bytes of an object, in pieces; ArchiveError if it has fewer."""
        for start in range(0, size, CHUNK_BYTES):
            yield self._range(key, start, min(size, start + CHUNK_BYTES))

    def _range(self, key: str, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        with self._errors(key):
            path = self._path(key)
            if self._local and not self._files.isfile(path):  # a pipe would wait for a writer
                raise FileNotFoundError(path)
            data = self._files.cat_file(path, start=start, end=end)
        if len(data) != end - start:
            raise ArchiveError(f"{self.url}/{key} is incomplete: {len(data):,} of {end - start:,} bytes were returned")
        return data

    def write(self, key: str, data: bytes) -> None:
        """Replace an object as a whole."""
        with self._errors(key):
            path = self._path(key)
            if self._local:  # another process may read it meanwhile
                spare = f"{path.rpartition('/')[0]}/.{os.urandom(8).hex()}.tmp"
                self._files.pipe_file(spare, data)
                self._files.mv(spare, path)
            else:
                self._files.pipe_file(path, data)

    def create(self, key: str, data: bytes) -> None:
        """Write an object unless it exists, where the storage can refuse that; the caller reads back what is there."""
        if (self._local or not self._created(key, data)) and self.size(key) is None:
            self.write(key, data)

    def _created(self, key: str, data: bytes) -> bool:
        """False: it exists, the storage does not support the condition, or it cannot be written."""
        try:
            self._files.pipe_file(self._path(key), data, mode="create")
        except Exception:  # noqa: BLE001 - each storage has a library with its own errors
            return False
        return True

    def write_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]], size: int) -> None:
        """Write a new object that nobody reads yet."""
        with self._errors(key):
            path = self._path(key)
            if size <= CHUNK_BYTES:
                self._files.pipe_file(path, b"".join(pieces()))
                return
            with self._files.open(path, "wb", block_size=CHUNK_BYTES) as file:
                for piece in pieces():
                    file.write(piece)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as far as they exist and that is allowed."""
        for key in keys:
            try:
                with self._errors(key):
                    self._files.rm_file(self._path(key))
            except ArchiveError:
                continue

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turn what libraries of storages raise into one line about this place."""
        where = f"{self.url}/{key}" if key else str(self.url)
        try:
            yield
        except ArchiveError:
            raise
        except FileNotFoundError as error:
            raise ArchiveMissing(_not_found(where, self.url, error)) from error
        except PermissionError as error:
            raise ArchiveError(
                f"{where}: access denied{_detail(error)}; check the credentials and what they allow"
            ) from error
        except Exception as error:  # each storage has a library with its own errors
            raise ArchiveError(_library_error(where, self.url, error)) from error


def _open(url: ArchiveUrl) -> tuple[_Files, str]:
    extra = _EXTRAS.get(url.scheme, "archive")
    missing = (
        f"{url.scheme}:// needs a package that is not installed; install it with: pip install 'stepscope[{extra}]'"
    )
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        raise ArchiveError(missing) from None
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if url.scheme in _LOCAL:
        options = {"auto_mkdir": True}
    elif url.scheme == "memory":
        options = {}
    elif url.scheme in ("s3", "s3a"):
        options["config_kwargs"] = _S3
    try:
        files = fsspec.filesystem(url.scheme, **options)
    except ImportError:
        raise ArchiveError(missing) from None
    except ValueError:
        raise ArchiveError(f"{url.scheme}:// is not a storage that fsspec knows; use s3://, gs:// or file://") from None
    return files, str(files._strip_protocol(str(url))).rstrip("/")


def _is_spare(key: str) -> bool:
    """Whether it is what a killed ``write`` left behind."""
    name = key.rpartition("/")[2]
    return name.startswith(".") and name.endswith(".tmp")


def _version(about: Mapping[str, Any]) -> str:
    for name in ("ETag", "etag", "md5Hash", "mtime", "created"):
        if about.get(name):
            return str(about[name])
    return ""


def _not_found(where: str, url: ArchiveUrl, error: FileNotFoundError) -> str:
    if "bucket" in str(error).lower():
        return f"there is no bucket {url.path.partition('/')[0]} ({url})"
    return f"{where} does not exist"


def _library_error(where: str, url: ArchiveUrl, error: Exception) -> str:
    name = type(error).__name__
    if "Credential" in name or "Token" in name or "Profile" in name:
        return f"{url}: no usable credentials{_detail(error)}; docs/archive.md says where they are read from"
    if "Connect" in name or "Endpoint" in name or "Timeout" in name:
        return f"{url} cannot be reached{_detail(error)}"
    return f"{where}: {name}{_detail(error)}"


def _detail(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f" ({text[:200]})" if text else ""

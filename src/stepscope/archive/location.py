"""The address of an archive, or of a run in it, as a user writes it: ``s3://bucket/prefix``, ``s3://bucket/prefix/RUN``.

Standard library only: every command line is parsed with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepscope.errors import UsageError
from stepscope.records.text import checked_name

__all__ = ["ArchiveUrl", "is_url", "parse_url"]

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_PARAMETERS = re.compile(r"[?&][^/]*=")
_NOT_STORAGE = ("http", "https")
LONGEST = 900
"""Of an address in characters; keys of S3 have 1,024 bytes."""


@dataclass(frozen=True, kw_only=True)
class ArchiveUrl:
    scheme: str
    path: str
    """Without a slash at its end; of ``file`` it begins with one."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    @property
    def name(self) -> str:
        """The last part: the name of the run, if this is one."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> ArchiveUrl:
        """The archive that the run of this address is in."""
        path = self.path.rpartition("/")[0]
        if not path:
            raise UsageError(f"{self} is not a run in an archive: use {self}/RUN")
        return ArchiveUrl(scheme=self.scheme, path=path)

    def run(self, name: str) -> ArchiveUrl:
        return ArchiveUrl(scheme=self.scheme, path=f"{self.path}/{checked_name(name)}")


def is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


def parse_url(text: str) -> ArchiveUrl:
    """UsageError if it is no address of storage, or contains what does not belong there, such as a secret."""
    match = _URL.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not an address such as s3://bucket/prefix")
    scheme, path = match[1], match[2].rstrip("/")
    if "@" in path.partition("/")[0] or _PARAMETERS.search(path):
        # Not repeated: it may contain a secret.
        raise UsageError(
            f"an archive is {scheme}://BUCKET/PREFIX, without users, passwords and parameters: "
            "credentials come from the environment or a profile"
        )
    if not text.isprintable() or len(text) > LONGEST or "::" in text:
        raise UsageError(f"{text[:80]!r} is not an address such as s3://bucket/prefix")
    if scheme in _NOT_STORAGE:
        raise UsageError(f"{text} is a page, not storage: an archive is s3://, gs:// or file://")
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in (parts[1:] if scheme in ("file", "local") else parts)):
        raise UsageError(f"{text} is not complete: use {scheme}://BUCKET/PREFIX")
    if scheme in ("file", "local") and not path.startswith("/"):
        raise UsageError(f"{text} is not complete: use {scheme}:///FOLDER")
    return ArchiveUrl(scheme=scheme, path=path)

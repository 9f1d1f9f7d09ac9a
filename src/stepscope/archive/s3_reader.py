"""Reads a few objects of S3 without the libraries of a storage, whose loading takes a second: for lists of runs.

    reader = s3_reader(url, os.environ)       # None: use Storage
    reader.find(".stepscope")
    reader.read_many({".stepscope/packs/….json.gz": 5300})
    reader.close()

Reads only, with keys from the environment or the credentials file.  Whatever is unusual (other kinds of credentials, a
proxy, settings of fsspec, an answer other than the expected ones) is left to ``Storage``, which knows all of it and
words the error.  Requests are signed as "Signature Version 4" of AWS describes.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import http.client
import ipaddress
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from stepscope.archive.location import ArchiveUrl
from stepscope.archive.storage import StoredObject

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

__all__ = ["Account", "S3Reader", "S3ReaderError", "s3_reader", "signed_headers"]

READERS = 8
TIMEOUT_S = 10.0
MOST_LIST_BYTES = 8 << 20
MOST_PAGES = 100
"""Of 1,000 keys each."""
_SPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
_OTHERS = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""Variables that mean more than this module knows."""
_PLAIN = ("region", "endpoint_url", "output", "cli_pager")
"""The settings of a profile that this module knows, or that do not matter here."""


class S3ReaderError(Exception):
    """The object or list was not returned as expected."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """Keys, and where they are valid."""

    key: str
    secret: str
    token: str
    region: str
    endpoint: str
    """Empty: that of AWS."""
    certificates: str = ""
    """A file of certificates to trust; empty: those of the system."""


def s3_reader(url: ArchiveUrl, environ: Mapping[str, str]) -> S3Reader | None:
    """Return a reader for an address of S3, if what is needed to reach it is set in the ordinary way."""
    if url.scheme not in ("s3", "s3a"):
        return None
    account = _account(environ)
    bucket, _, prefix = url.path.partition("/")
    if account is None or not prefix:
        return None
    if not account.region or (not account.endpoint and "." in bucket):
        return None
    if account.endpoint:
        try:
            parts = urlsplit(account.endpoint)
            parts.port  # noqa: B018 - checks it
        except ValueError:
            return None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            return None
        if not _is_address(parts.hostname):
            return None  # whether the name of the bucket belongs into the host's depends on the server
        base = f"{parts.path.rstrip('/')}/{bucket}"
        return S3Reader(url, account, parts.scheme, parts.netloc, base, prefix)
    return S3Reader(url, account, "https", f"{bucket}.s3.{account.region}.amazonaws.com", "", prefix)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _account(environ: Mapping[str, str]) -> Account | None:
    home = Path(environ.get("HOME") or Path.home())
    proxies = (name for name in environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    if any(environ.get(name) for name in (*_OTHERS, *proxies)) or any(name.startswith("FSSPEC_") for name in environ):
        return None
    if (home / ".config" / "fsspec").exists():
        return None
    settings = _section(environ.get("AWS_CONFIG_FILE"), home / ".aws" / "config")
    keys = _section(environ.get("AWS_SHARED_CREDENTIALS_FILE"), home / ".aws" / "credentials")
    if settings is None or keys is None or not settings.keys() <= {*_PLAIN}:
        return None
    if environ.get("AWS_ACCESS_KEY_ID"):
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        key, secret, token = (environ.get(name, "") for name in names)
    else:
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        key, secret, token = (keys.get(name, "") for name in names)
    region = environ.get("AWS_DEFAULT_REGION") or settings.get("region", "")
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or settings.get("endpoint_url", "")
    if not key or not secret or not all(map(_is_plain, (key, secret, token, region))):
        return None
    return Account(
        key=key,
        secret=secret,
        token=token,
        region=region,
        endpoint=endpoint,
        certificates=environ.get("AWS_CA_BUNDLE", ""),
    )


def _is_plain(text: str) -> bool:
    """Whether it can be sent in a header.  A mounted secret that ends in a newline cannot; botocore keeps that, too."""
    return all("!" <= character <= "~" for character in text)


def _section(named: str | None, usual: Path) -> dict[str, str] | None:
    """Return the default profile of a file, {} without one; None if the file cannot be read."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(Path(named).expanduser() if named else usual, encoding="utf-8")
        return dict(parser["default"]) if parser.has_section("default") else {}
    except (configparser.Error, OSError, ValueError):
        return None


class S3Reader:
    """``read_many`` uses several connections; ``close`` ends those that are open."""

    def __init__(self, url: ArchiveUrl, account: Account, scheme: str, host: str, base: str, prefix: str) -> None:
        self.url = url
        self._account = account
        self._scheme, self._host = scheme, host
        self._base, self._prefix = base, prefix
        self._idle: list[http.client.HTTPConnection] = []

    def find(self, prefix: str) -> dict[str, StoredObject]:
        """All objects whose keys begin with this folder, as ``Storage.find`` returns them."""
        found: dict[str, StoredObject] = {}
        query = {"list-type": "2", "prefix": f"{self._prefix}/{prefix}/"}
        for _ in range(MOST_PAGES):
            page = self._page(query)
            for row in page.iter(f"{_SPACE}Contents"):
                key, size = _text(row, "Key"), _text(row, "Size")
                if not key.startswith(f"{self._prefix}/") or not size.isdecimal():
                    raise S3ReaderError("an entry of the list is not valid")
                if not key.endswith("/"):
                    found[key[len(self._prefix) + 1 :]] = StoredObject(size=int(size), version=_text(row, "ETag"))
            if _text(page, "IsTruncated") != "true":
                return found
            query["continuation-token"] = _text(page, "NextContinuationToken")
        raise S3ReaderError("the list is too long")

    def read_many(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """Several small objects at once, as far as they exist; ``sizes``: as ``find`` reported them."""
        wanted = [key for key, size in sizes.items() if size > 0]
        with ThreadPoolExecutor(max(1, min(READERS, len(wanted)))) as pool:
            found = list(pool.map(lambda key: self._get(f"/{self._prefix}/{key}", {}, sizes[key]), wanted))
        return {key: data for key, data in zip(wanted, found, strict=True) if data is not None}

    def _page(self, query: Mapping[str, str]) -> Element:
        from xml.etree import ElementTree

        data = self._get("", query, MOST_LIST_BYTES)
        if data is None:
            raise S3ReaderError("there is no such bucket")
        try:
            page = ElementTree.fromstring(data)
        except ElementTree.ParseError as error:
            raise S3ReaderError(f"the list is not valid: {error}") from None
        if page.tag != f"{_SPACE}ListBucketResult":
            raise S3ReaderError("the answer is not a list")
        return page

    def _get(self, key: str, query: Mapping[str, str], most: int) -> bytes | None:
        """Return the body, at most so many bytes; None: it does not exist."""
        path = quote(f"{self._base}{key}", safe="/~") or "/"
        text = "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in sorted(query.items()))
        connection = None
        try:
            connection = self._connection()
            headers = signed_headers(self._account, self._host, path, text, time.time())
            connection.request("GET", f"{path}?{text}" if text else path, headers=headers)
            answer = connection.getresponse()
            data = answer.read(most + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError | http.client.HTTPException):
                raise S3ReaderError(f"{type(error).__name__}: {error}") from None
            raise S3ReaderError("the request cannot be sent") from None  # http.client would quote a header
        if answer.status == 200 and len(data) <= most:
            self._idle.append(connection)
            return data
        connection.close()
        if answer.status == 404 and key:
            return None
        raise S3ReaderError(f"status {answer.status}, {len(data):,} bytes")

    def _connection(self) -> http.client.HTTPConnection:
        with suppress(IndexError):
            return self._idle.pop()
        if self._scheme == "http":
            return http.client.HTTPConnection(self._host, timeout=TIMEOUT_S)
        import ssl

        try:
            context = ssl.create_default_context(cafile=self._account.certificates or None)
        except OSError as error:
            raise S3ReaderError(f"certificates: {error}") from None
        return http.client.HTTPSConnection(self._host, timeout=TIMEOUT_S, context=context)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def signed_headers(account: Account, host: str, path: str, query: str, now_s: float) -> dict[str, str]:
    """Return the headers of a GET; ``path`` and ``query`` as they are sent, the query's parameters in order."""
    now = time.gmtime(now_s)
    stamp, day = time.strftime("%Y%m%dT%H%M%SZ", now), time.strftime("%Y%m%d", now)
    payload = hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": payload, "x-amz-date": stamp}
    if account.token:
        headers["x-amz-security-token"] = account.token
    names = ";".join(sorted(headers))
    signed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = f"GET\n{path}\n{query}\n{signed}\n{names}\n{payload}"
    scope = f"{day}/{account.region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{account.secret}".encode()
    for part in (day, account.region, "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    value = f"AWS4-HMAC-SHA256 Credential={account.key}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    return {**headers, "authorization": value}


def _text(row: Element, name: str) -> str:
    return row.findtext(f"{_SPACE}{name}") or ""

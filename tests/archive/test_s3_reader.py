"""Lists of S3 without the libraries of a storage: signatures, what is read, and what is left to those libraries."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from stepscope.archive.cache import Archive
from stepscope.archive.catalog import CATALOG, Catalog, read_catalog, write_entry
from stepscope.archive.location import parse_url
from stepscope.archive.manifest import ArchivedRun
from stepscope.archive.s3_reader import Account, S3ReaderError, s3_reader, signed_headers
from stepscope.archive.storage import Storage, StoredObject

URL = parse_url("s3://team/all runs")
PAGE = 2
"""Keys in a page of a list."""


@contextmanager
def s3_of(objects: dict[str, bytes], status: int = 200) -> Iterator[str]:
    """Serve objects of the bucket ``team`` as S3 does; yields the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            own = {"host": self.headers["host"], "date": self.headers["x-amz-date"]}
            assert own["host"] == f"127.0.0.1:{server.server_port}" and own["date"] and self.headers["authorization"]
            key = unquote(parts.path).removeprefix("/team").removeprefix("/")
            body = _list(query) if not key else objects.get(key)
            self.send_response(404 if body is None else status)
            self.send_header("content-length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None: ...

    def _list(query: dict[str, str]) -> bytes:
        keys = sorted(key for key in objects if key.startswith(query["prefix"]))
        after = query.get("continuation-token", "")
        rest = [key for key in keys if key > after]
        page = rest[:PAGE]
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(objects[key])}</Size><ETag>&quot;{len(key)}&quot;</ETag></Contents>"
            for key in page
        )
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{''.join(page[-1:])}</NextContinuationToken>"
        end = more if len(rest) > PAGE else "<IsTruncated>false</IsTruncated>"
        space = "http://s3.amazonaws.com/doc/2006-03-01/"
        return f'<?xml version="1.0"?><ListBucketResult xmlns="{space}">{rows}{end}</ListBucketResult>'.encode()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environ_of(home: Path, endpoint: str = "http://127.0.0.1:1", **more: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": endpoint}
    keys["AWS_DEFAULT_REGION"] = "us-east-1"
    return {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), **keys, **more}


def archived(name: str, number: int) -> ArchivedRun:
    return ArchivedRun(name=name, digest=f"{number:064x}", stored=1, archived_wall_ns=number, facts={"ranks": number})


def test_the_signature_is_that_of_the_published_example() -> None:
    account = Account(
        key="AKIAIOSFODNN7EXAMPLE",
        secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        token="",
        region="us-east-1",
        endpoint="",
    )
    headers = signed_headers(account, "examplebucket.s3.amazonaws.com", "/", "max-keys=2&prefix=J", 1369353600.0)
    assert headers["x-amz-date"] == "20130524T000000Z"
    assert headers["authorization"].endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )


def test_a_list_is_read_without_the_library(tmp_path: Path) -> None:
    stored = Storage(parse_url(f"file://{tmp_path}/all runs"))
    runs = [archived(f"run-{number}", number) for number in range(5)]
    for run in runs:
        write_entry(stored, run, Catalog())
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.json")}
    with s3_of({**files, "all runs/night/manifest.json": b"not in the list"}) as endpoint:
        environ = environ_of(tmp_path / "home", endpoint)
        reader = s3_reader(URL, environ)
        assert reader is not None
        found = reader.find(CATALOG)
        assert {f"all runs/{key}" for key in found} == files.keys()
        assert all(about.size == len(files[f"all runs/{key}"]) for key, about in found.items())
        sizes = {key: about.size for key, about in found.items()}
        assert reader.read_many({**sizes, f"{CATALOG}/entries/gone": 5}) == {
            key: files[f"all runs/{key}"] for key in found
        }
        assert read_catalog(reader).runs() == {run.name: run for run in runs}
        reader.close()
        entries, problems = Archive(URL, environ, storage=_no_library).entries()
    assert [entry.path.name for entry in entries] == [run.name for run in runs]
    assert problems == []


def _no_library(url: object) -> Storage:
    raise AssertionError("the library of the storage is not needed")


@pytest.mark.parametrize("status", [301, 403, 500])
def test_other_answers_are_left_to_the_library(tmp_path: Path, status: int) -> None:
    (tmp_path / "all runs").mkdir()
    run = archived("night", 1)
    write_entry(Storage(parse_url(f"file://{tmp_path}/all runs")), run, Catalog())
    with s3_of({}, status) as endpoint:
        environ = environ_of(tmp_path / "home", endpoint)
        reader = s3_reader(URL, environ)
        assert reader is not None
        with pytest.raises(S3ReaderError, match=f"status {status}"):
            reader.find(CATALOG)
        library = lambda _: Storage(parse_url(f"file://{tmp_path}/all runs"))  # noqa: E731
        entries, _ = Archive(URL, environ, storage=library).entries()
    assert [entry.path.name for entry in entries] == ["night"]


def test_an_object_that_grew_and_a_server_that_is_gone_are_errors(tmp_path: Path) -> None:
    with s3_of({"all runs/.stepscope/entries/a.json": b"1234"}) as endpoint:
        reader = s3_reader(URL, environ_of(tmp_path, endpoint))
        assert reader is not None
        with pytest.raises(S3ReaderError, match="status 200, 4 bytes"):
            reader.read_many({f"{CATALOG}/entries/a.json": 3})
        assert reader.find(CATALOG) == {f"{CATALOG}/entries/a.json": StoredObject(size=4, version='"34"')}
    reader.close()
    with pytest.raises(S3ReaderError, match="ConnectionRefusedError"):
        reader.read_many({f"{CATALOG}/entries/a.json": 4})


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ({"AWS_PROFILE": "other"}, ""),
        ({"https_proxy": "http://proxy"}, ""),
        ({"FSSPEC_S3_KEY": "x"}, ""),
        ({"AWS_ACCESS_KEY_ID": ""}, ""),
        ({"AWS_ENDPOINT_URL": "https://storage.example.com"}, ""),
        ({"AWS_ENDPOINT_URL": "http://user:word@127.0.0.1"}, ""),
        ({"AWS_ENDPOINT_URL": "http://localhost:abc"}, ""),
        ({"AWS_ENDPOINT_URL": "http://localhost:99999"}, ""),
        ({"AWS_ENDPOINT_URL": "http://[::1"}, ""),
        ({"AWS_ACCESS_KEY_ID": "key\n"}, ""),
        ({"AWS_SECRET_ACCESS_KEY": "secret\n"}, ""),
        ({"AWS_SESSION_TOKEN": "token\n"}, ""),
        ({"AWS_SESSION_TOKEN": "to ken"}, ""),
        ({"AWS_SESSION_TOKEN": "t\u2026n"}, ""),
        ({"AWS_DEFAULT_REGION": "us-east-1\r"}, ""),
        ({}, "[default]\nrole_arn = arn:x\n"),
        ({}, "[default]\nsso_session = x\n"),
        ({}, "no section"),
    ],
)
def test_unusual_settings_are_left_to_the_library(tmp_path: Path, more: dict[str, str], config: str) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(config)
    assert s3_reader(URL, environ_of(tmp_path, **more)) is None
    assert s3_reader(parse_url("gs://team/runs"), environ_of(tmp_path)) is None


def test_a_request_that_cannot_be_sent_is_left_to_the_library(tmp_path: Path) -> None:
    """``http.client`` and ``socket`` raise a ValueError then, which may quote the headers."""
    reader = s3_reader(URL, environ_of(tmp_path, "http://[fe80::1%\u2026]:1", AWS_SESSION_TOKEN="FwoGZX"))
    assert reader is not None
    with pytest.raises(S3ReaderError, match="the request cannot be sent") as caught:
        reader.find(CATALOG)
    assert "FwoGZX" not in "".join(traceback.format_exception(caught.value))


def test_keys_and_region_are_found_in_files(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = eu-west-1\n")
    (tmp_path / ".aws" / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    assert s3_reader(URL, {"HOME": str(tmp_path)}) is not None
    assert s3_reader(URL, {"HOME": str(tmp_path), "AWS_CONFIG_FILE": str(tmp_path / "none")}) is None  # no region

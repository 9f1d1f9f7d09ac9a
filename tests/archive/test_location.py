"""The addresses of archives."""

from __future__ import annotations

import pytest

from stepscope.archive.location import parse_url
from stepscope.archive.storage import key_of
from stepscope.errors import UsageError


@pytest.mark.parametrize(
    ("text", "parent", "name"),
    [
        ("s3://bucket/team/night", "s3://bucket/team", "night"),
        ("s3://bucket/team/night/", "s3://bucket/team", "night"),
        ("file:///data/archive/odd name #1%", "file:///data/archive", "odd name #1%"),
        ("memory://a/b", "memory://a", "b"),
    ],
)
def test_a_run_in_an_archive(text: str, parent: str, name: str) -> None:
    url = parse_url(text)
    assert (str(url.parent), url.name) == (parent, name)
    assert url.parent.run(name) == url


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("runs/night", "is not an address"),
        ("s3://", "is not complete"),
        ("s3://bucket/../other", "is not complete"),
        ("s3://bucket//x", "is not complete"),
        ("file://data", "is not complete"),
        ("https://host/x", "is a page, not storage"),
        ("simplecache::s3://bucket/x", "is not an address"),
        ("s3://bucket/a\nb", "is not an address"),
        ("s3://bucket/" + "x" * 2000, "is not an address"),
    ],
)
def test_what_is_no_address(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_url(text)


@pytest.mark.parametrize("text", ["s3://KEY:hunter2@bucket/x", "s3://bucket/x?secret=hunter2", "gs://hunter2@b/c"])
def test_secrets_in_an_address_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="credentials come from the environment") as caught:
        parse_url(text)
    assert "hunter2" not in str(caught.value)


def test_a_bucket_contains_runs_and_is_none() -> None:
    with pytest.raises(UsageError, match="use s3://bucket/RUN"):
        assert parse_url("s3://bucket").parent


def test_keys_have_plain_characters_and_differ() -> None:
    names = ["a", "a/b", "a%2Fb", "a b", "ä", "~", "%7E", "x" * 255, "ä" * 120, "ä" * 119 + "b", "a#?[*]@"]
    keys = [key_of(name) for name in names]
    assert len(set(keys)) == len(names)
    assert all(max(map(len, key.split("/"))) <= 200 and key.isascii() and not set(key) & set("#?[*] @") for key in keys)
    assert key_of("logs/rank-0.log") == "logs/rank-0.log"

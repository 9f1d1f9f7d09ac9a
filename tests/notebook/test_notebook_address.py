"""Where the browser finds ``live()``: on this machine, through Jupyter below any prefix, at a proxy of the user's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.notebook.cells import page_address


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTERHUB_SERVICE_PREFIX", "JPY_PARENT_PID", "STEPSCOPE_LIVE_URL"):
        monkeypatch.delenv(name, raising=False)


def base(url: str = "", proxy: bool | None = None) -> str:
    return page_address(4711, url=url, proxy=proxy).base


def jupyter(folder: Path, monkeypatch: pytest.MonkeyPatch, about: str) -> None:
    """A kernel whose server keeps that of itself."""
    (folder / "jpserver-12.json").write_text(about)
    connect = SimpleNamespace(get_connection_file=lambda: str(folder / "kernel-ab.json"))
    monkeypatch.setitem(sys.modules, "ipykernel.connect", connect)  # type: ignore[arg-type]
    monkeypatch.setenv("JPY_PARENT_PID", "12")


def test_on_this_machine() -> None:
    assert base() == "http://127.0.0.1:4711"
    assert "ssh -L 4711:127.0.0.1:4711" in page_address(4711, url="", proxy=None).hint


def test_under_jupyterhub_through_it_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    assert base() == "/user/ada/proxy/4711"
    assert base(proxy=False) == "http://127.0.0.1:4711"


def test_below_the_prefix_that_jupyter_itself_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jupyter(tmp_path, monkeypatch, json.dumps({"base_url": "/lab/of/ada/", "token": "secret"}))
    assert base(proxy=True) == "/lab/of/ada/proxy/4711"
    assert base() == "http://127.0.0.1:4711"


@pytest.mark.parametrize("about", ("", "[]", "{}", '{"base_url": "elsewhere"}'))
def test_a_server_that_says_nothing_of_itself_is_at_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: str
) -> None:
    jupyter(tmp_path, monkeypatch, about)
    assert base(proxy=True) == "/proxy/4711"
    monkeypatch.setenv("JPY_PARENT_PID", "none")
    assert base(proxy=True) == "/proxy/4711"


def test_a_proxy_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert base(url="https://gate/{port}/") == "https://gate/4711"
    monkeypatch.setenv("STEPSCOPE_LIVE_URL", "https://all/{port}/")
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    assert base() == "https://all/4711"
    assert base(url="https://gate/{port}/") == "https://gate/4711"
    assert base(proxy=True) == "/user/ada/proxy/4711"


def test_an_editor_without_frames_is_given_a_link_that_leads_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    place = page_address(4711, url="", proxy=None, framed=False)
    assert place.base == "http://127.0.0.1:4711"
    assert place.hint == (
        "VS Code cannot show a live page in a cell; open the link. If the kernel is not on the machine of your "
        "browser, forward port 4711 first (in the PORTS view)."
    )
    assert page_address(4711, url="", proxy=True, framed=False).base == "/user/ada/proxy/4711"
    assert page_address(4711, url="https://gate/{port}/", proxy=None, framed=False).base == "https://gate/4711"

"""Where a browser finds the server of ``stepscope.live()``, and what to try where it does not.

    place = place_of(41161, url="", proxy=None)
    place.base       "http://127.0.0.1:41161", or "/user/ada/proxy/41161" by way of Jupyter's own server

The server listens on this machine's loopback.  A browser on another machine gets there through what already leads it
to Jupyter: jupyter-server-proxy, below the prefix that Jupyter itself has, or a proxy of the user's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ENV_URL", "Place", "place_of"]

ENV_URL = "STEPSCOPE_LIVE_URL"
"""As ``live(url=…)``, for all notebooks of a platform."""
ENV_HUB_PREFIX = "JUPYTERHUB_SERVICE_PREFIX"
ENV_JUPYTER_PID = "JPY_PARENT_PID"
"""Of the server that started the kernel."""

UNFRAMED = (
    "VS Code shows no live page in a cell: open the link. If the kernel is not on the machine of your browser, forward "
    "port {port} first (the PORTS view does it)."
)


@dataclass(frozen=True, kw_only=True)
class Place:
    base: str
    hint: str
    """What to do where nothing of it is to be seen."""


def place_of(port: int, *, url: str, proxy: bool | None, framed: bool = True) -> Place:
    """``proxy`` None: as the environment says; under JupyterHub no browser sits at this machine's loopback.

    ``framed``: whether the cell can show the page.  An editor that cannot (VS Code) has no use for a path below the
    address of Jupyter either, which therefore is not taken unasked.
    """
    environment = os.environ
    given = url or ("" if proxy is not None else environment.get(ENV_URL, ""))
    if given:
        base = given.replace("{port}", str(port)).rstrip("/")
        hint = f"If the frame below is empty, nothing at {base} leads to port {port} here."
    elif proxy or (proxy is None and framed and environment.get(ENV_HUB_PREFIX)):
        base = f"{_prefix(environment).rstrip('/')}/proxy/{port}"
        hint = "If it is not below, Jupyter’s server lacks jupyter-server-proxy (`pip install` it there)."
    else:
        base = f"http://127.0.0.1:{port}"
        hint = (
            "If the frame below is empty, open the link; if Jupyter is not on the machine of your browser, that takes "
            f"live(proxy=True) or `ssh -L {port}:127.0.0.1:{port}`."
        )
    return Place(base=base, hint=hint if framed else UNFRAMED.format(port=port))


def _prefix(environment: Mapping[str, str]) -> str:
    """The path that Jupyter's server has at its own address."""
    told = environment.get(ENV_HUB_PREFIX) or _told_by_server(environment.get(ENV_JUPYTER_PID, ""))
    return told if told.startswith("/") else "/"


def _told_by_server(pid: str) -> str:
    """In a file that it keeps beside those of its kernels while it runs; empty when there is none."""
    found: Any = sys.modules.get("ipykernel.connect")
    try:
        kernel = Path(found.get_connection_file()) if found is not None else Path()
        about = json.loads((kernel.parent / f"jpserver-{int(pid)}.json").read_bytes())
        return str(about["base_url"])
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return ""  # started by another hand

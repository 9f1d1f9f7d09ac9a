"""Links to the page of a hub.  The launcher imports it: keep it light."""

from __future__ import annotations

from urllib.parse import quote

__all__ = ["page_link"]


def page_link(url: str, run: str = "", token: str = "", incident: int | None = None) -> str:
    """Link to the list, to one run or to one of its incidents, with or without the token."""
    place = f"/#/run/{quote(run, safe='')}" if run else "/#"
    if incident is not None:
        place += f"/incident/{incident}"
    if not token:
        return f"{url}{place if run else ''}"
    return f"{url}{place}{'?' if run else ''}token={quote(token, safe='')}"

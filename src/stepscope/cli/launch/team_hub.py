"""The team's hub: every run on one node that starts here is sent to it while it is recorded, without an option.

    [hub]
    address = "https://hub.example:7070"
    key_file = "~/.config/stepscope/team-key"     # only in the user's own file; this is the default

in ``~/.config/stepscope/config.toml`` or a project's ``stepscope.toml``; ``STEPSCOPE_HUB`` and
``STEPSCOPE_HUB_KEY_FILE`` (or ``STEPSCOPE_HUB_KEY``) come before both, and ``STEPSCOPE_HUB=off`` turns it off.  A
project cannot name the key: together with an address it would send runs to whoever wrote the project.

The run is recorded as without it; the agent sends a copy, as the agents of several nodes send to the hub of their run
(``agent/shipping``).  What the hub did not get stays in the run for ``stepscope send``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.alerts.settings_files import load_tables
from stepscope.errors import UsageError
from stepscope.records.files import key_path
from stepscope.records.paths import ENV_TEAM_HUB, ENV_TEAM_KEY, ENV_TEAM_KEY_FILE
from stepscope.records.text import say
from stepscope.store.documents import TEAM_HUB, read_meta, write_meta

__all__ = ["OFF", "TeamHub", "load_team_hub", "team_variables"]

OFF = "off"
_ID_CHARS = 8


@dataclass(frozen=True, kw_only=True)
class TeamHub:
    url: str
    variables: Mapping[str, str]
    """For the environment of the agent: where the key is."""

    def begin(self, run_dir: Path) -> str:
        """Note in a new run that it is sent there; return its name there, which no other run has.

        RunUnwritable if that cannot be noted.
        """
        meta = read_meta(run_dir)
        run = f"{run_dir.name}-{str(meta.get('spool', ''))[:_ID_CHARS]}"
        destination: dict[str, Any] = {"url": self.url, "run": run, "node": 1, "nnodes": 2}
        write_meta(run_dir, {**meta, TEAM_HUB: destination})
        return run


def load_team_hub(project_dir: Path, environ: Mapping[str, str]) -> TeamHub | None:
    """The hub that runs are sent to, or None.  UsageError of one line for a mistake.

    A key that cannot be read is only reported: the job starts, and is recorded without the hub.
    """
    from stepscope.agent.shipping.client import split_url
    from stepscope.wire.handshake import load_keys, team_environ

    address = environ.get(ENV_TEAM_HUB, "")
    key_file = environ.get(ENV_TEAM_KEY_FILE, "")
    for table in load_tables("hub", project_dir, environ)[0]:
        found, named = table.address("address"), table.text("key_file")
        table.close()
        if named and not table.file.private:
            table.fail("key_file", f"key_file can only be set in your own settings file, or with {ENV_TEAM_KEY_FILE}")
        if not environ.get(ENV_TEAM_HUB):
            address = found or address
        key_file = key_file or named
    if not address or address == OFF:
        return None
    split_url(address)
    variables = team_variables({**environ, **({ENV_TEAM_KEY_FILE: key_file} if key_file else {})})
    try:
        load_keys(team_environ({**environ, **variables}))
    except UsageError as error:
        say(f"{error}; this run is not sent to the team's hub")
        return None
    return TeamHub(url=address, variables=variables)


def team_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Where the key of the team's hub is: the environment, the named file, or the usual one if it exists."""
    if given := environ.get(ENV_TEAM_KEY):
        return {ENV_TEAM_KEY: given}
    if named := environ.get(ENV_TEAM_KEY_FILE):
        return {ENV_TEAM_KEY_FILE: os.path.expanduser(named)}  # noqa: PTH111 - a text
    usual = key_path(environ).with_name("team-key")
    return {ENV_TEAM_KEY_FILE: str(usual)} if usual.exists() else {}

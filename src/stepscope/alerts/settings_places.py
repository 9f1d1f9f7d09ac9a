"""Where settings of alerts, exports and archives are.  The launcher imports it: keep it light."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepscope.records.files import key_path
from stepscope.records.paths import ENV_ALERT

__all__ = ["HOME_S", "PROJECT_FILE", "are_there_settings", "find_project_file", "user_file"]

PROJECT_FILE = "stepscope.toml"
USER_FILE = "config.toml"
HOME_S = 1.0
"""How long a home directory may take to respond; the job does not wait longer for it."""


def are_there_settings(project_dir: Path, alert_words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether there is anything to read; most jobs need not load the code that checks it."""
    if alert_words or environ.get(ENV_ALERT) or find_project_file(project_dir) is not None:
        return True
    own = user_file(environ)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(os.path.lexists(own)), name="user-settings", daemon=True)
    thread.start()
    thread.join(HOME_S)
    return found != [False]


def user_file(environ: Mapping[str, str]) -> Path:
    """The user's own settings, next to the key and the tokens."""
    return key_path(environ).with_name(USER_FILE)


def find_project_file(folder: Path) -> Path | None:
    """The nearest ``stepscope.toml`` between a folder and the root of its git repository; without one, in the folder.

    Not above: a file that someone put into ``/tmp`` must not apply to everything below it.
    """
    folder = folder.absolute()
    places = [folder]
    for place in (folder, *folder.parents):
        if place != folder:
            places.append(place)
        if (place / ".git").exists():
            break
    else:
        places = [folder]
    return next((place / PROJECT_FILE for place in places if (place / PROJECT_FILE).exists()), None)

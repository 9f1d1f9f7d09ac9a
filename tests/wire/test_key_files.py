"""``STEPSCOPE_KEY_FILE``. A Secret as Kubernetes mounts it: tests/deploy/test_pods.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.wire.handshake import KeyRing, load_keys

KEY = "a key of these tests alone\n"


def test_a_named_file_is_read_and_never_created(tmp_path: Path) -> None:
    file = tmp_path / "key"
    environ = {"STEPSCOPE_KEY_FILE": str(file), "HOME": str(tmp_path)}
    with pytest.raises(UsageError, match=r"STEPSCOPE_KEY_FILE names .*key, which does not exist"):
        load_keys(environ)
    file.write_text(KEY)
    file.chmod(0o600)
    assert load_keys(environ) == KeyRing(environ)() == load_keys({"STEPSCOPE_KEY": KEY.strip()})
    assert not (tmp_path / ".config").exists()

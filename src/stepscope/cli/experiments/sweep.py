"""``stepscope sweep``: run variants of one command in turn, and show which are fast and which need little memory.

sweeps/NAME/sweep.json     which trials were run, written after each; a second call runs what is missing
sweeps/NAME/runs/          one ordinary run per trial
sweeps/NAME/logs/          what each trial printed
sweeps/NAME/result.json    the result so far, with result.md and front.svg
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any

from stepscope.cli.arguments import count, existing
from stepscope.cli.output import format_table, protect_inputs, require_page, write_page, write_text
from stepscope.errors import RunError, StepscopeError, UsageError
from stepscope.records.paths import helper_command
from stepscope.records.redaction import redact_command
from stepscope.records.text import bytes_text, count_text, ms_text, numbered, printable, say
from stepscope.store.documents import load_summary
from stepscope.store.file_io import read_document, write_json
from stepscope.store.locks import LockBusy, take_lock
from stepscope.store.paths import SWEEP_RESULT, SWEEP_STATE, SWEEPS

if TYPE_CHECKING:
    from stepscope.comparison.sweep import Trial, VariantTrials

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "run variants of a job in turn and show which are fast and which need little memory"
EPILOG = """\
examples:
  stepscope sweep plan.toml                        run it (or the runs still missing) and show the result
  stepscope sweep plan.toml --dry-run              only show the commands
  stepscope sweep plan.toml --nproc-per-node 1     with a different number of ranks than the plan
  stepscope sweep plan.toml --json > result.json
  stepscope sweep plan.toml --html front.html      also write a page with the front

A plan has a command and variants of it, in TOML or JSON:
  command = "train.py --steps 60"
  options = "--nproc-per-node 2"      # for `stepscope run`
  rounds = 3
  [[variant]]
  name = "small-batch"
  args = "--batch-size 4"
  samples = 8                         # per step, over all ranks: speed is then samples per second
  env = { OMP_NUM_THREADS = "1" }

A grid runs every combination of its values, named by them:
  command = "train.py --steps 60"
  [grid]
  args.--batch-size = [4, 8]          # option by option; true and false: with the option alone, and without it
  env.OMP_NUM_THREADS = [1, 2]
  samples.--batch-size = 2            # samples per step, over all ranks: twice the value of --batch-size

A variant that fails, for example because it runs out of memory, is part of the result.  Details: docs/sweep.md.
"""
SCHEMA = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
MOST_VARIANTS = 200
END_S = 60.0
"""Time that a run gets to end and write its summary after each signal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path, help="the plan, a TOML or JSON file")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="folder of the sweep (default: sweeps/NAME)")
    parser.add_argument(
        "--rounds", type=count("rounds"), metavar="N", help="number of rounds (default: the plan's, or 3)"
    )
    parser.add_argument(
        "--nproc-per-node", metavar="N", help="start N ranks with torchrun, whatever the plan's options say"
    )
    parser.add_argument("--retry-failed", action="store_true", help="run failed variants again")
    parser.add_argument("--dry-run", action="store_true", help="show what would be run")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the result as JSON (docs/sweep.md)")
    form.add_argument("--markdown", action="store_true", help="print it as Markdown")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a page to this file")


def run(args: argparse.Namespace) -> int:
    plan = read_plan(existing(args.plan))
    if args.rounds is not None:
        plan = replace(plan, rounds=args.rounds)
    if args.nproc_per_node is not None:
        plan = replace(plan, options=_with_ranks(plan.options, args.nproc_per_node))
    folder: Path = args.dir if args.dir is not None else Path(SWEEPS) / plan.name
    if args.dry_run:
        for variant in plan.variants:
            print(printable(f"{variant.name}: {_shown(plan, variant)}"))
        return 0
    protect_inputs([args.html], [args.plan])
    require_page(args.html)
    interrupted = False
    with _alone(folder) as sweep:
        try:
            with _ended_like_interrupted():
                sweep.run(plan, retry=args.retry_failed)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted; the same command runs what is missing")
        document = sweep.result(plan)
    _show(document, folder, args)
    if interrupted:
        return 130
    return 0 if any(row["speed"] is not None for row in document["variants"]) else 1


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """SIGTERM is a KeyboardInterrupt: the trial in progress must not be left behind."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    samples: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    name: str
    folder: Path
    """Where the plan is, and where its command runs."""
    command: tuple[str, ...]
    options: tuple[str, ...]
    """Of ``stepscope run``."""
    env: Mapping[str, str]
    rounds: int
    timeout_s: float | None
    variants: tuple[Variant, ...]

    def words(self, variant: Variant) -> list[str]:
        """What follows ``stepscope run``."""
        return [*self.options, *variant.options, *self.command, *variant.args]

    def key(self, variant: Variant) -> str:
        """Identifies what a variant runs: a trial of an earlier plan counts only if that is the same."""
        parts = [self.words(variant), sorted({**self.env, **variant.env}.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_plan(path: Path) -> Plan:
    """Read and check a plan; UsageError says what is wrong with it."""
    plan = _parsed(path)
    _known(plan, ("name", "command", "options", "env", "rounds", "timeout_s", "variant", "grid"), str(path))
    variants = plan.get("variant", [])
    if not isinstance(variants, list) or not all(isinstance(variant, dict) for variant in variants):
        raise UsageError(f"{path}: `variant` must be a list of tables: [[variant]]")
    read = (*(_variant(path, variant) for variant in variants[: MOST_VARIANTS + 1]), *_grid(path, plan.get("grid", {})))
    if not read:
        raise UsageError(f"{path}: a plan needs at least one [[variant]], or a [grid]")
    if len(read) > MOST_VARIANTS:
        raise UsageError(f"{path}: at most {MOST_VARIANTS} variants")
    names = [variant.name for variant in read]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{path}: two variants are named {twice}")
    if len({variant.samples is None for variant in read}) > 1:
        raise UsageError(
            f"{path}: either all variants have `samples` or none; otherwise their speeds cannot be compared"
        )
    command = _words(path, plan, "command")
    if not command:
        raise UsageError(f"{path}: a plan needs a `command`: what `stepscope run` starts")
    rounds, timeout = plan.get("rounds", 3), plan.get("timeout_s")
    if type(rounds) is not int or rounds < 1:
        raise UsageError(f"{path}: `rounds` must be a whole number from 1")
    if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout <= threading.TIMEOUT_MAX):
        raise UsageError(f"{path}: `timeout_s` must be a number of seconds")
    return Plan(
        name=_name(path, plan.get("name", path.stem if path.stem != "plan" else path.absolute().parent.name)),
        folder=path.absolute().parent,
        command=command,
        options=_words(path, plan, "options"),
        env=_env(path, plan),
        rounds=rounds,
        timeout_s=timeout,
        variants=read,
    )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = read_document(path, most=1 << 20, links=True).decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file") from None
    try:
        document = json.loads(text) if path.suffix == ".json" else _toml(path, text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {why}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a plan")
    return document


def _toml(path: Path, text: str) -> Any:
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name).loads(text)
        except ModuleNotFoundError:
            continue
    raise UsageError(f"{path}: TOML needs Python 3.11 or the package tomli; a plan can also be a .json file")


def _variant(path: Path, table: Mapping[str, Any]) -> Variant:
    name = _name(path, table.get("name"))
    _known(table, ("name", "args", "env", "options", "samples"), f"{path}: variant {name}")
    samples = table.get("samples")
    if samples is not None and (type(samples) not in (int, float) or not 0 < samples < math.inf):
        raise UsageError(f"{path}: `samples` of {name} must be a positive number: samples per step, over all ranks")
    return Variant(
        name=name,
        args=_words(path, table, "args"),
        env=_env(path, table),
        options=_words(path, table, "options"),
        samples=samples,
    )


GRID_PARTS = ("args", "options", "env")


def _grid(path: Path, grid: Any) -> list[Variant]:
    """A variant for every combination of the values in ``[grid]``, in the order of the plan."""
    if not isinstance(grid, dict) or not all(isinstance(part, dict) for part in grid.values()):
        raise UsageError(f"{path}: [grid] has the tables {', '.join(GRID_PARTS)}, with a list of values for each name")
    _known(grid, (*GRID_PARTS, "samples"), f"{path}: [grid]")
    axes: list[tuple[str, str, Any]] = [
        (part, name, values) for part in grid if part != "samples" for name, values in grid[part].items()
    ]
    samples = grid.get("samples", {})
    if any(type(times) not in (int, float) or times <= 0 for times in samples.values()):
        raise UsageError(
            f"{path}: samples in [grid] has, by the name of an option, the samples per step of its value 1"
        )
    for name in samples:
        numbers: Any = next((values for _, axis, values in axes if axis == name), [])
        if not numbers or not all(type(number) in (int, float) and number > 0 for number in numbers):
            raise UsageError(f"{path}: samples in [grid] names {name}, which has no positive numbers there")
    for part, name, values in axes:
        if (
            not isinstance(values, list)
            or not values
            or not all(type(value) in (str, int, float, bool) for value in values)
        ):
            raise UsageError(f"{path}: {part}.{name} in [grid] must be a list of values")
    if math.prod(len(values) for _, _, values in axes) > MOST_VARIANTS:
        raise UsageError(f"{path}: at most {MOST_VARIANTS} variants; this grid has more combinations")
    chosen = [list(zip(axes, values, strict=True)) for values in itertools.product(*(axis[2] for axis in axes))]
    return [_combination(path, each, samples) for each in chosen if each]


def _combination(
    path: Path, chosen: Sequence[tuple[tuple[str, str, Any], Any]], samples: Mapping[str, float]
) -> Variant:
    words: dict[str, list[str]] = {"args": [], "options": []}
    env: dict[str, str] = {}
    names = []
    for (part, name, _), value in chosen:
        names.append(f"{name.lstrip('-').lower()}-{str(value).lower()}")
        if part == "env":
            env[name] = str(int(value)) if isinstance(value, bool) else str(value)
        elif isinstance(value, bool):
            words[part] += [name] if value else []
        else:
            words[part] += [name, str(value)]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(names)).strip("-._")
    factors = [value * samples[option] for (_, option, _), value in chosen if option in samples]
    return Variant(
        name=_name(path, name),
        args=tuple(words["args"]),
        options=tuple(words["options"]),
        env=env,
        samples=math.prod(factors) if factors else None,
    )


def _known(table: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    if odd := next((name for name in table if name not in names), None):
        raise UsageError(f"{where}: unknown key {odd!r}; known keys: {', '.join(names)}")


def _name(path: Path, value: Any) -> str:
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise UsageError(f"{path}: {value!r} is not a name: use letters, digits, dots and dashes")
    return value


def _words(path: Path, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of words, or one text that is split as in a shell."""
    value = table.get(key, [])
    if isinstance(value, str):
        try:
            return tuple(_passable(path, key, word) for word in shlex.split(value))
        except ValueError as error:
            raise UsageError(f"{path}: `{key}` cannot be split into words: {error}") from None
    if isinstance(value, list) and all(type(word) in (str, int, float) for word in value):
        return tuple(_passable(path, key, str(word)) for word in value)
    raise UsageError(f"{path}: `{key}` must be a string or a list of strings")


def _passable(path: Path, key: str, word: str) -> str:
    """The word; UsageError if no process can be given it."""
    try:
        if b"\0" not in os.fsencode(word):
            return word
    except UnicodeEncodeError:
        pass
    raise UsageError(f"{path}: `{key}` has characters that cannot be passed to a process: {word!r}")


def _env(path: Path, table: Mapping[str, Any]) -> dict[str, str]:
    value = table.get("env", {})
    if not isinstance(value, dict) or not all(type(content) in (str, int, float, bool) for content in value.values()):
        raise UsageError(f"{path}: `env` must be a table of variables and their values")
    odd = next((name for name in value if not name or "=" in name), None)
    if odd is not None:
        raise UsageError(f"{path}: a variable in `env` cannot be named {odd!r}")
    for word in (*value, *value.values()):
        _passable(path, "env", str(word))
    return {name: str(int(content)) if isinstance(content, bool) else str(content) for name, content in value.items()}


def _with_ranks(options: Sequence[str], ranks: str) -> tuple[str, ...]:
    others: list[str] = []
    words = iter(options)
    for word in words:
        if word in ("--nproc-per-node", "--nproc_per_node"):
            next(words, None)
        elif not word.startswith(("--nproc-per-node=", "--nproc_per_node=")):
            others.append(word)
    return (*others, "--nproc-per-node", ranks)


def _shown(plan: Plan, variant: Variant) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in {**plan.env, **variant.env}.items()]
    return " ".join([*variables, "stepscope run", shlex.join(plan.words(variant))])


# -- trials -----------------------------------------------------------------------------------------------------------


@contextmanager
def _alone(folder: Path) -> Iterator[Sweep]:
    """The sweep in a folder; UsageError if another process works on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder)
    except LockBusy:
        raise UsageError(f"another sweep is running in {folder}") from None
    except OSError as error:
        raise UsageError(f"cannot use {folder}: {error.strerror}") from None
    try:
        yield Sweep(folder)
    finally:
        os.close(lock)


class Sweep:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials = list(_read_state(folder / SWEEP_STATE))
        self._read: dict[tuple[str, str, int], Trial] = {}
        """What the run of each trial says: a finished run does not change."""

    def run(self, plan: Plan, *, retry: bool) -> None:
        """Run what is missing, in rounds, so that all variants meet the same ups and downs of the machine."""
        if retry:
            self.trials = [trial for trial in self.trials if self._trial(trial).ok]
            self._read.clear()
        total, done = len(plan.variants) * plan.rounds, 0
        for number in range(plan.rounds):
            for variant in plan.variants:
                done += 1
                if not self._wanted(plan, variant, number):
                    continue
                say(f"round {number + 1} of {plan.rounds}, {variant.name} ({done} of {total})")
                row = self._run_one(plan, variant, number)
                self.trials.append(row)
                write_json(self.folder / SWEEP_STATE, {"schema": SCHEMA, "trials": self.trials}, durable=True)
                self._tell(variant, row)
                self.result(plan)

    def result(self, plan: Plan) -> dict[str, Any]:
        from stepscope.comparison.sweep import front_svg, sweep_document

        document = sweep_document(
            plan.name, [self._variant(plan, variant) for variant in plan.variants], rounds=plan.rounds
        )
        write_json(self.folder / SWEEP_RESULT, document)
        write_text(self.folder / "front.svg", front_svg(document))
        write_text(self.folder / "result.md", _markdown(document) + "\n")
        return document

    def _of(self, plan: Plan, variant: Variant) -> Iterator[Mapping[str, Any]]:
        key = plan.key(variant)
        for row in self.trials:
            if (row["variant"], row["key"]) == (variant.name, key) and row["round"] < plan.rounds:
                yield row

    def _wanted(self, plan: Plan, variant: Variant, number: int) -> bool:
        """A variant that failed is not repeated: it would most likely fail again, and take as long."""
        rows = list(self._of(plan, variant))
        return not any(row["round"] == number or not self._trial(row).ok for row in rows)

    def _variant(self, plan: Plan, variant: Variant) -> VariantTrials:
        from stepscope.comparison.sweep import VariantTrials

        env = [redact_command([f"{name}={value}"])[0].partition("=") for name, value in variant.env.items()]
        settings = {
            "args": redact_command(variant.args),
            "env": {name: value for name, _, value in env},
            "options": redact_command(variant.options),
        }
        trials = [self._trial(row) for row in self._of(plan, variant)]
        return VariantTrials(name=variant.name, samples=variant.samples, settings=settings, trials=trials)

    def _run_one(self, plan: Plan, variant: Variant, number: int) -> dict[str, Any]:
        runs = self.folder.absolute() / "runs"
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        name = next(free for free in numbered(f"{variant.name}-{number + 1}") if not (runs / free).exists())
        tags = ["--tag", f"sweep:{plan.name}"[:40], "--tag", variant.name[:40]]
        words = ["run", "--quiet", "--no-html", "--name", name, "--dir", str(runs), *tags, *plan.words(variant)]
        environment = {**os.environ, **plan.env, **variant.env}
        with (logs / f"{name}.log").open("wb") as log:
            job = Popen(
                helper_command("stepscope", *words), cwd=plan.folder, env=environment, stdout=log, stderr=log,
                stdin=DEVNULL,
            )  # fmt: skip
            status = _awaited(job, plan.timeout_s)
        return {
            "variant": variant.name,
            "key": plan.key(variant),
            "round": number,
            "run": name,
            "exit_code": job.returncode,
            "status": status,
        }

    def _trial(self, row: Mapping[str, Any]) -> Trial:
        key = row["variant"], row["key"], row["round"]
        if key not in self._read:
            self._read[key] = self._read_trial(row)
        return self._read[key]

    def _read_trial(self, row: Mapping[str, Any]) -> Trial:
        """What a run's own summary says about it."""
        from stepscope.comparison.inputs import read_input
        from stepscope.comparison.statistics import Series, level_of, ordinary, unusual_steps
        from stepscope.comparison.sweep import Trial

        run_dir = self.folder / "runs" / row["run"]
        summary = load_summary(run_dir)
        if summary is None:
            status = row["status"] or f"exit code {row['exit_code']}, not recorded"
            return Trial(round=row["round"], run="", status=status, ok=False)
        status = row["status"] or str(summary.get("status_text") or summary.get("status"))
        ok = not row["status"] and summary.get("status") == "finished" and summary.get("status_severity") != "critical"
        level = None
        memory: Mapping[str, int] = {}
        try:
            found = read_input(run_dir)
            memory = found.memory
            # Always by the host's clock: it is the time that the training takes, with and without a device.
            steps = found.on("host").run if ok else None
            if isinstance(steps, Series) and len(steps.values) >= FEWEST_STEPS:
                level = level_of(ordinary(steps.values, unusual_steps(steps.values)))
        except StepscopeError as error:
            ok, status = False, str(error)
        on_device = "device_peak" in memory
        return Trial(
            round=row["round"],
            run=row["run"],
            status=status,
            ok=ok,
            level=level,
            memory=memory.get("device_peak" if on_device else "rss_peak"),
            on_device=on_device,
        )

    def _tell(self, variant: Variant, row: Mapping[str, Any]) -> None:
        trial = self._trial(row)
        if trial.level is None:
            what = trial.status if not trial.ok else "too short to measure"
            say(f"{variant.name}: {what} (see {self.folder / 'logs' / row['run']}.log)")
            return
        memory = "" if trial.memory is None else f", {bytes_text(trial.memory)}"
        say(f"{variant.name}: {ms_text(trial.level.mean / 1e6)} per step{memory}")


FEWEST_STEPS = 5


def _awaited(job: Popen[bytes], timeout_s: float | None) -> str:
    """Wait for a trial; return how we ended it, or nothing.  A run that is ended still writes its summary."""
    try:
        job.wait(timeout_s)
        return ""
    except TimeoutExpired:
        ended = "timed out"
    except KeyboardInterrupt:
        _end(job)
        raise
    _end(job)
    return ended


def _end(job: Popen[bytes]) -> None:
    """`stepscope run` passes signals on, and kills a job that does not react to the third one."""
    for _ in range(3):
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(END_S)
            return
        except TimeoutExpired:
            continue
    job.kill()
    job.wait()


def _read_state(path: Path) -> Iterator[dict[str, Any]]:
    """The trials of an earlier call; RunError if the file is damaged: running everything again would take long."""
    try:
        document = json.loads(read_document(path))
        if document["schema"] != SCHEMA:
            raise RunError(f"{path} has schema {document['schema']}; this Stepscope reads schema {SCHEMA}")
        for row in document["trials"]:
            code = row["exit_code"]
            texts = {name: str(row[name]) for name in ("variant", "key", "run", "status")}
            if "/" in texts["run"] or texts["run"].startswith("."):
                raise ValueError("not the name of a run")
            yield {**texts, "round": int(row["round"]), "exit_code": None if code is None else int(code)}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged; remove it to run the sweep from the beginning") from error


# -- output -----------------------------------------------------------------------------------------------------------


def _show(document: Mapping[str, Any], folder: Path, args: argparse.Namespace) -> None:
    from stepscope.comparison.sweep import HEADS, sweep_page, sweep_sentences, sweep_table

    if args.html is not None:
        write_page(args.html, sweep_page(document))
    if args.json:
        print(json.dumps(document, indent=2))
    elif args.markdown:
        print(printable(_markdown(document), keep="\n"))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        sentences = "\n".join(sweep_sentences(document))
        table = format_table(HEADS, sweep_table(document), numeric=(3, 4), width=width, left_out=(3,), least=10)
        rounds = count_text(document["rounds"], "round")
        print(printable(f"{sentences}\n\n{document['name']}, {rounds}:\n{table}", keep="\n"))
    say(f"the result is in {folder}: {SWEEP_RESULT}, result.md, front.svg; its runs: stepscope serve {folder / 'runs'}")


def _markdown(document: Mapping[str, Any]) -> str:
    from stepscope.comparison.sweep import HEADS, sweep_sentences, sweep_table

    rows = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    rows += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in sweep_table(document)]
    sentences = "\n".join(f"- {line}" for line in sweep_sentences(document))
    return f"### Sweep {document['name']}\n\n{sentences}\n\n" + "\n".join(rows)

"""The cases of the matrix: which job, with which arguments, on how many ranks, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["CASES", "Case"]

LONG_S = 240.0
"""For jobs that compile, or whose framework takes long to import."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    script: str
    """In ``jobs/``."""
    args: tuple[str, ...] = ()
    ranks: int = 0
    """How many torchrun starts; 0: the script is started by itself."""
    subset: bool = True
    """Whether it belongs to the subset that takes 8 minutes."""
    slow: bool = False
    """Takes longer than the others, so it starts first."""
    cuda_only: str = ""
    """Why it cannot run on a CPU."""
    needs: tuple[str, ...] = ()
    """Modules beyond torch."""
    exit_codes: tuple[int, ...] = (0,)
    """What the bare run may exit with (128 + the signal's number for a job that a signal ended)."""
    stderr_has: str = ""
    """What both runs must print to standard error, so that the case is the one we mean."""
    cut: bool = False
    """The job does not reach its end.  Losses are compared as far as both runs have them, steps for ranks that reported
    a count, and standard error without the frames of tracebacks (of several ranks: by the names of exceptions)."""
    interrupt: bool = False
    """Press Ctrl-C when the job prints ``ready``."""
    extra_steps: int = 0
    """How many steps more than the job's own count are right; ``reason`` says why."""
    reason: str = ""
    timeout_s: float = 120.0
    variables: dict[str, str] = field(default_factory=dict)
    captures: int = 0
    """How many traces must be in the run directory."""


def _loaders() -> list[Case]:
    """A plain loop with every way to get processes beside it."""
    names = (
        *("workers0", "workers", "persistent", "eval", "pinned", "pinned_persistent", "spawn", "forkserver"),
        *("mp_fork", "mp_pool", "os_fork", "subprocess"),
    )
    full_only = {"workers0", "pinned", "forkserver", "mp_pool", "subprocess"}
    slow = {"spawn", "forkserver"}
    return [
        Case(
            name=f"plain/{name}",
            script="plain.py",
            args=("--loader", name),
            subset=name not in full_only,
            slow=name in slow,
        )
        for name in names
    ]


def _single() -> list[Case]:
    """One process, one unusual thing."""
    names = ("gradscaler", "bf16", "checkpointing", "accumulation", "fused", "closure")
    full_only = {"fused", "closure"}
    cases = [
        Case(name=f"single/{name}", script="single.py", args=("--variant", name), subset=name not in full_only)
        for name in names
    ]
    cases.append(
        Case(
            name="single/two_optimizers",
            script="single.py",
            args=("--variant", "two_optimizers"),
            extra_steps=1,
            reason="Until the second optimizer is used for the first time, the first one ends a step.",
        )
    )
    cases.append(
        Case(name="single/streams", script="single.py", args=("--variant", "streams"), cuda_only="needs CUDA streams")
    )
    cases.append(
        Case(name="compile/default", script="single.py", args=("--variant", "compile"), slow=True, timeout_s=LONG_S)
    )
    cases.append(
        Case(
            name="compile/reduce_overhead",
            script="single.py",
            args=("--variant", "compile_reduce_overhead"),
            slow=True,
            timeout_s=LONG_S,
            cuda_only="CUDA graphs",
        )
    )
    return cases


def _graphs() -> list[Case]:
    graph = Case(name="", script="graphs.py", cuda_only="CUDA graphs")
    return [
        replace(graph, name="graphs/whole", args=("--capture", "whole")),
        replace(graph, name="graphs/whole_adam", args=("--capture", "whole_adam")),
        replace(graph, name="graphs/partial", args=("--capture", "partial")),
    ]


def _ranks() -> list[Case]:
    """Several NCCL ranks on one GPU."""
    cases = [
        Case(name=f"ddp/{name}", script="ddp.py", args=("--variant", name), ranks=2)
        for name in ("plain", "static_graph", "find_unused", "no_sync", "workers")
    ]
    hook = Case(name="ddp/bf16_hook", script="ddp.py", args=("--variant", "bf16_hook"), ranks=2)
    cases.append(replace(hook, cuda_only="the hook needs NCCL"))
    cases.append(Case(name="ddp/four", script="ddp.py", args=("--variant", "plain"), ranks=4, subset=False))
    cases += [
        Case(name="fsdp/fsdp2", script="fsdp.py", args=("--variant", "fsdp2"), ranks=2),
        Case(name="fsdp/fsdp2_mixed", script="fsdp.py", args=("--variant", "fsdp2_mixed"), ranks=2),
        Case(
            name="fsdp/fsdp2_offload",
            script="fsdp.py",
            args=("--variant", "fsdp2_offload"),
            ranks=2,
            cuda_only="offload from a device",
        ),
        Case(name="fsdp/fsdp1", script="fsdp.py", args=("--variant", "fsdp1"), ranks=2),
    ]
    return cases


def _parallel() -> list[Case]:
    """One model over several ranks."""
    return [
        Case(name="parallel/tp", script="parallel.py", args=("--variant", "tp"), ranks=2),
        Case(name="parallel/gpipe", script="parallel.py", args=("--variant", "gpipe"), ranks=2),
        Case(name="parallel/1f1b", script="parallel.py", args=("--variant", "1f1b"), ranks=4, subset=False),
        Case(name="parallel/tp_fsdp", script="parallel.py", args=("--variant", "tp_fsdp"), ranks=4, subset=False),
    ]


def _frameworks() -> list[Case]:
    """Workers, accumulation, evaluation and checkpoints, in one process and in two ranks."""
    framework = Case(name="", script="", args=("--workers", "2"), slow=True, timeout_s=LONG_S)
    hf = replace(framework, script="hf.py", needs=("transformers", "accelerate"))
    accelerate = replace(framework, script="accelerate_job.py", needs=("accelerate",))
    lightning = replace(framework, script="lightning_job.py", needs=("pytorch_lightning",))
    persistent = ("--workers", "persistent")
    return [
        replace(hf, name="hf/trainer"),
        replace(hf, name="hf/trainer_persistent", args=persistent, subset=False),
        replace(hf, name="hf/trainer_workers0", args=("--workers", "0"), subset=False),
        replace(hf, name="hf/trainer_ranks", ranks=2),
        replace(accelerate, name="accelerate/loop"),
        replace(accelerate, name="accelerate/loop_ranks", ranks=2),
        replace(lightning, name="lightning/fit"),
        replace(lightning, name="lightning/fit_persistent", args=persistent, subset=False),
        replace(lightning, name="lightning/fit_ranks", ranks=2),
    ]


def _endings() -> list[Case]:
    """Jobs that fail or are ended."""
    ending = Case(name="", script="endings.py", cut=True)
    return [
        replace(
            ending,
            name="endings/out_of_memory",
            args=("--ending", "out_of_memory"),
            exit_codes=(1,),
            stderr_has="OutOfMemoryError",
            cuda_only="the memory limit is CUDA's",
        ),
        replace(
            ending,
            name="endings/device_assert",
            args=("--ending", "device_assert"),
            exit_codes=(1, 134),
            stderr_has="device-side assert triggered",
            cuda_only="a device-side assert",
        ),
        replace(
            ending, name="endings/exception", args=("--ending", "exception"), exit_codes=(1,), stderr_has="ValueError"
        ),
        replace(ending, name="endings/exit_code", args=("--ending", "exit_code"), exit_codes=(7,), subset=False),
        replace(ending, name="endings/segfault", args=("--ending", "segfault"), exit_codes=(139,), subset=False),
        replace(ending, name="endings/sigkill", args=("--ending", "sigkill"), exit_codes=(137,)),
        replace(
            ending,
            name="endings/sigkill_rank",
            args=("--ending", "sigkill"),
            ranks=2,
            exit_codes=(1,),
            stderr_has="Signal 9 (SIGKILL)",
        ),
        replace(
            ending,
            name="endings/exception_rank",
            args=("--ending", "exception"),
            ranks=2,
            exit_codes=(1,),
            stderr_has="ValueError",
            subset=False,
        ),
        replace(ending, name="endings/ctrl_c", args=("--ending", "wait"), interrupt=True, exit_codes=(1, 130)),
        replace(
            ending,
            name="endings/ctrl_c_ranks",
            args=("--ending", "wait"),
            ranks=2,
            interrupt=True,
            exit_codes=(1,),
        ),
    ]


def _captures() -> list[Case]:
    """A capture of all ranks in the middle of the job: of ``plain.py`` where an epoch ends."""
    captured = (
        *("plain/workers", "plain/persistent", "plain/os_fork", "single/gradscaler", "compile/default"),
        *("compile/reduce_overhead", "graphs/whole", "graphs/partial", "ddp/plain", "fsdp/fsdp2"),
    )
    cases = {case.name: case for case in (*_loaders(), *_single(), *_graphs(), *_ranks())}
    schedule = {"STEPSCOPE_PROFILE": "wait=13,warmup=2,active=4,ranks=all,shapes"}
    found = [cases[name] for name in captured]
    return [
        replace(case, name=f"capture/{case.name}", variables=schedule, captures=max(case.ranks, 1)) for case in found
    ]


def _labels() -> list[Case]:
    """Labels of steps, phases and layers, as NVTX ranges too, in every step (``run --nvtx --layers every``)."""
    labeled = ("plain/workers", "single/streams", "compile/default", "graphs/partial", "ddp/plain", "fsdp/fsdp2")
    cases = {case.name: case for case in (*_loaders(), *_single(), *_graphs(), *_ranks())}
    variables = {"STEPSCOPE_NVTX": "1", "STEPSCOPE_LAYERS": "every"}
    return [replace(cases[name], name=f"labels/{name}", variables=variables) for name in labeled]


CASES: tuple[Case, ...] = (
    *_loaders(),
    *_single(),
    *_graphs(),
    *_ranks(),
    *_parallel(),
    *_frameworks(),
    *_endings(),
    *_captures(),
    *_labels(),
)

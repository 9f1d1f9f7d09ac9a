"""Code location: the line of user or framework code that the stack samples of ranks agree on.

Only the user's own frames and those of a training framework are named: what torch or a plotting library does below them
explains less than the line that called it.  A frame explains the time if most of the stacks have it.  Of these the
innermost is named: the user's own line if there is one, even if a framework called it (a callback); else what the
framework does there, and the user's line that called the framework.

Within a phase that every step has, the line that calls the loader, the model or ``backward`` says nothing new: only
frames below the hook that times the phase count.  And every model has a line that takes most of its forward: in
forward, backward and optimizer a line is named only if the stacks of other ranks, or of other steps, hardly have it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stepscope.diagnosis.engine.view import View
from stepscope.judge import thresholds
from stepscope.records.steps import COMM_HOOK_PHASE

__all__ = ["CHECKPOINT", "EVALUATION", "seen_at", "seen_lately"]


# -- framework functions ----------------------------------------------------------------------------------------------
# What the functions of a training framework do: a table from (framework, function) to a word for the user.  A function
# is written as the interpreter names it, with its class where the bare name would say too little.

FRAMEWORKS = {
    "transformers": "transformers",
    "trl": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "lightning",
    "deepspeed": "deepspeed",
    "ray": "ray",
}
"""Top-level packages, and their framework in the table below."""
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")

CALLBACK = "a callback"
CHECKPOINT = "a checkpoint"
CLIPPING = "gradient clipping"
EVALUATION = "evaluation"
LOGGING = "logging"
METRICS = "metrics"
GENERATION = "generation"

FRAMEWORK_WORDS = {
    ("transformers", "call_event"): CALLBACK,
    ("transformers", "_clip_grad_norm"): CLIPPING,
    ("transformers", "_get_grad_norm"): CLIPPING,
    ("transformers", "_evaluate"): EVALUATION,
    ("transformers", "evaluate"): EVALUATION,
    ("transformers", "evaluation_loop"): EVALUATION,
    ("transformers", "prediction_loop"): EVALUATION,
    ("transformers", "predict"): EVALUATION,
    ("transformers", "compute_metrics"): METRICS,
    ("transformers", "nested_gather"): METRICS,
    ("transformers", "_save_checkpoint"): CHECKPOINT,
    ("transformers", "save_model"): CHECKPOINT,
    ("transformers", "save_pretrained"): CHECKPOINT,
    ("transformers", "_load_best_model"): CHECKPOINT,
    ("transformers", "Trainer.log"): LOGGING,
    ("transformers", "_maybe_log_save_evaluate"): "logging, saving and evaluation",
    ("transformers", "_generate_and_score_completions"): GENERATION,
    ("transformers", "generate"): GENERATION,
    ("accelerate", "clip_grad_norm_"): CLIPPING,
    ("accelerate", "clip_grad_value_"): CLIPPING,
    ("accelerate", "save_state"): CHECKPOINT,
    ("accelerate", "save_model"): CHECKPOINT,
    ("accelerate", "save_accelerator_state"): CHECKPOINT,
    ("accelerate", "Accelerator.save"): CHECKPOINT,
    ("accelerate", "Accelerator.log"): LOGGING,
    ("accelerate", "gather_for_metrics"): METRICS,
    ("lightning", "_call_callback_hooks"): CALLBACK,
    ("lightning", "_call_callbacks_on_save_checkpoint"): CHECKPOINT,
    ("lightning", "configure_gradient_clipping"): CLIPPING,
    ("lightning", "clip_gradients"): CLIPPING,
    ("lightning", "_clip_gradients"): CLIPPING,
    ("lightning", "_EvaluationLoop.run"): EVALUATION,
    ("lightning", "_PredictionLoop.run"): EVALUATION,
    ("lightning", "_evaluation_step"): EVALUATION,
    ("lightning", "_run_sanity_check"): EVALUATION,
    ("lightning", "save_checkpoint"): CHECKPOINT,
    ("lightning", "Fabric.save"): CHECKPOINT,
    ("lightning", "log_metrics"): LOGGING,
    ("lightning", "log_eval_end_metrics"): LOGGING,
    ("lightning", "update_train_step_metrics"): LOGGING,
    ("lightning", "update_train_epoch_metrics"): LOGGING,
    ("lightning", "LightningModule.log"): LOGGING,
    ("lightning", "log_dict"): LOGGING,
    ("deepspeed", "clip_fp32_gradients"): CLIPPING,
    ("deepspeed", "unscale_and_clip_grads"): CLIPPING,
    ("deepspeed", "scaled_global_norm"): CLIPPING,
    ("deepspeed", "get_grad_norm_direct"): CLIPPING,
    ("deepspeed", "get_global_norm"): CLIPPING,
    ("deepspeed", "eval_batch"): EVALUATION,
    ("deepspeed", "save_checkpoint"): CHECKPOINT,
    ("deepspeed", "save_16bit_model"): CHECKPOINT,
    ("deepspeed", "_save_zero_checkpoint"): CHECKPOINT,
    ("deepspeed", "_write_monitor"): LOGGING,
    ("deepspeed", "_report_progress"): LOGGING,
    ("ray", "report"): "ray.train.report",
}


def framework_of(path: str) -> str | None:
    """The framework that the file belongs to; None for user code, torch, the standard library and the rest."""
    for folder in _PACKAGE_FOLDERS:
        _, found, inside = path.rpartition(folder)
        if found:
            return FRAMEWORKS.get(inside.partition("/")[0])
    return None


def word_of(framework: str, function: str) -> str | None:
    """What the framework does in that function; None if it is not in the table."""
    return FRAMEWORK_WORDS.get((framework, function)) or FRAMEWORK_WORDS.get((framework, function.rpartition(".")[2]))


# -- agreement of stacks ----------------------------------------------------------------------------------------------

RECORDER = "stepscope/recorder"
GENERATED = ("<frozen", "<string>", "<eval_with_key>", "/torchinductor_")
LIBRARIES = ("site-packages", "dist-packages", "/lib/python", *GENERATED, RECORDER)
"""Parts of the path of a frame that is not the user's own."""
LOADER_CODE = "/torch/utils/data/_utils/"
"""torch's code in a DataLoader worker between its loop and the dataset."""
WITHIN = ("input", "forward", "backward", "optimizer", COMM_HOOK_PHASE)
"""Phases in which only frames below our hook count …"""
COMPUTE = ("forward", "backward", "optimizer")
"""… and those in which a line must stand out (``PLACE_USUAL_SHARE``)."""


@dataclass(frozen=True, kw_only=True)
class _Frame:
    path: str
    function: str
    line: int
    framework: str | None
    """None: the user's own."""
    worker: bool = False
    """Of a DataLoader worker of the rank."""

    @property
    def key(self) -> tuple[str, str]:
        return self.path, self.function

    @property
    def word(self) -> str | None:
        return word_of(self.framework, self.function) if self.framework is not None else None


def seen_at(
    view: View,
    ranks: Collection[int] = (),
    *,
    phase: str | None = "other",
    besides: Collection[int] = (),
    steps: Collection[int] | None = None,
    between: bool | None = None,
    loss: bool = False,
) -> str:
    """``write_report, train.py:66``: where the ranks (all if none are given) were most often; empty if nowhere.

    Below a framework: ``a callback: Plot.on_step_end, train.py:20``, or ``evaluation: transformers/trainer.py:2861 in
    Trainer.evaluation_loop, from train.py:13``.  In a worker: ``Data.__getitem__, train.py:40, in a DataLoader
    worker``.  ``besides``: ranks whose stacks are left out; ``steps``: only stacks from these; ``between``: only stacks
    from between two steps, or only from within one.  ``loss``: of forward, only what follows the model within a step,
    whose time counts as forward (``ring/decoder.py``) and whose stacks are outside all phases.
    """
    # What the others usually do may have been seen before the window; what these ranks did then may have been right.
    earlier = [stack for stack in view.window.earlier_stacks if ranks and stack.get("rank") not in ranks]
    mine, others = _sorted_stacks(
        (*view.window.stacks, *(earlier if phase in COMPUTE else ())),
        ranks,
        phase=phase,
        besides=besides,
        steps=steps,
        between=between,
        loss=loss,
    )
    if phase in COMPUTE:
        found = _distinct(mine, others, excess_share=_excess_share(view, phase, ranks, steps))
    else:
        found = _agreed(mine)
    return "" if found is None else _text(*found)


def seen_lately(
    stacks: Sequence[Mapping[str, Any]],
    ranks: Collection[int],
    *,
    phase: str,
    steps: Collection[int],
    excess_share: float,
) -> str:
    """The same for slow ranks, from stacks alone: between two evaluations of the rules, which may be half a minute.

    ``excess_share``: how much of the time that these ranks spend in the phase is more than what the others need.
    """
    for loss in (False, True) if phase == "forward" else (False,):
        between = False if loss or phase == "other" else None
        mine, others = _sorted_stacks(stacks, ranks, phase=phase, steps=steps, between=between, loss=loss)
        found = _distinct(mine, others, excess_share=excess_share) if phase in COMPUTE else _agreed(mine)
        if found is not None:
            return _text(*found)
    return ""


def _sorted_stacks(
    stacks: Iterable[Mapping[str, Any]],
    ranks: Collection[int],
    *,
    phase: str | None,
    besides: Collection[int] = (),
    steps: Collection[int] | None,
    between: bool | None,
    loss: bool,
) -> tuple[list[list[_Frame]], list[list[_Frame]]]:
    """The named frames of those that count, and of the others in the same phase."""
    mine: list[list[_Frame]] = []
    others: list[list[_Frame]] = []
    for stack in stacks:
        if stack.get("phase") != ("other" if loss else phase) or stack.get("rank") in besides:
            continue
        if between is not None and stack.get("between") not in (None, between):
            continue
        if stack.get("worker") is True:  # its frames contain none of our hooks
            frames = _worker_frames(stack.get("frames"))
        else:
            below = phase in WITHIN and not loss
            frames = _named_frames(_within(stack.get("frames")) if below else stack.get("frames"))
        wanted = (not ranks or stack.get("rank") in ranks) and (steps is None or stack.get("step") in steps)
        if frames or phase in WITHIN:
            (mine if wanted else others).append(frames)
    return mine, others


def _agreed(stacks: Sequence[list[_Frame]]) -> tuple[list[_Frame], int] | None:
    """A stack, and the index of the frame in it that most of the stacks agree on."""
    if len(stacks) < thresholds.PLACE_STACKS:
        return None
    counts = Counter(key for frames in stacks for key in {frame.key for frame in frames})
    agreed = {key for key, count in counts.items() if count >= thresholds.PLACE_AGREE_SHARE * len(stacks)}
    chosen = [(frames, at) for frames in stacks if (at := _deepest(frames, agreed)) is not None]
    if not chosen:
        return None
    key, count = Counter(frames[at].key for frames, at in chosen).most_common(1)[0]
    if count < thresholds.PLACE_AGREE_SHARE * len(stacks):
        return None
    having = [(frames, at) for frames, at in chosen if frames[at].key == key]
    line, times = Counter(frames[at].line for frames, at in having).most_common(1)[0]
    calls_on = sum(at > 0 for _, at in having)
    if 2 * calls_on > len(having) and times < thresholds.PLACE_AGREE_SHARE * len(stacks):
        return None  # it calls different things, and no line of it explains anything
    return next((frames, at) for frames, at in having if frames[at].line == line)


def _distinct(
    mine: Sequence[list[_Frame]], others: Sequence[list[_Frame]], *, excess_share: float
) -> tuple[list[_Frame], int] | None:
    """A stack, and the index of the exact line in it that explains the excess: the others are hardly ever there."""
    compared = len(others) >= thresholds.PLACE_STACKS
    if not compared and excess_share < thresholds.PLACE_EXCESS_SHARE:
        return None
    usual = {
        frame
        for frame, count in _counts(others).items()
        if compared and count > thresholds.PLACE_USUAL_SHARE * len(others)
    }
    agreed = {
        frame
        for frame, count in _counts(mine).items()
        if frame not in usual and _explains(count, len(mine), len(others), excess_share)
    }
    chosen = [(frames, at) for frames in mine if (at := _deepest(frames, agreed)) is not None]
    if not chosen:
        return None
    line = Counter(frames[at] for frames, at in chosen).most_common(1)[0][0]
    return next((frames, at) for frames, at in chosen if frames[at] == line)


def _counts(stacks: Sequence[list[_Frame]]) -> Counter[_Frame]:
    return Counter(frame for frames in stacks for frame in set(frames))


def _explains(count: int, mine: int, others: int, excess_share: float) -> bool:
    """Whether a line in ``count`` of the stacks explains an excess that is this share of their time.

    A majority does.  Fewer do if the excess is less than all of the time, and if chance would rarely put all stacks
    with that line on this side.
    """
    if count < thresholds.PLACE_STACKS:
        return False
    if count >= thresholds.PLACE_AGREE_SHARE * mine:
        return True
    by_chance = math.comb(mine, count) / math.comb(mine + others, count)
    return count >= thresholds.PLACE_AGREE_SHARE * excess_share * mine and by_chance <= thresholds.PLACE_CHANCE


def _excess_share(view: View, phase: str | None, ranks: Collection[int], steps: Collection[int] | None = None) -> float:
    """How much of the time that these ranks spend in the phase is more than what the other ranks need; 1: all."""
    rows = [row for row, rank in enumerate(view.ranks) if rank in ranks]
    others = [row for row, rank in enumerate(view.ranks) if rank not in ranks] if rows else []
    if phase is None or not others:
        return 0.0
    took_ns = view.phase(phase)
    if steps is not None and (within := np.isin(view.steps, list(steps))).any():
        took_ns = took_ns[:, within]
    mine_ns, others_ns = float(np.nanmedian(took_ns[rows])), float(np.nanmedian(took_ns[others]))
    return max(1.0 - others_ns / mine_ns, 0.0) if mine_ns > 0 else 0.0


def _within(frames: Any) -> Any:
    """The frames below our innermost hook; empty without a hook."""
    found: list[Any] = []
    for frame in frames if isinstance(frames, list) else ():
        if isinstance(frame, dict) and RECORDER in str(frame.get("file")):
            if found:
                return found
            continue  # the sample was taken inside a hook
        found.append(frame)
    return []


def _deepest(frames: list[_Frame], agreed: Collection[_Frame | tuple[str, str]]) -> int | None:
    """Index in the stack (innermost first) of the agreed frame, or function, that explains most."""
    at = [index for index, frame in enumerate(frames) if frame in agreed or frame.key in agreed]
    if not at or frames[at[0]].framework is None:
        return at[0] if at else None
    # In a framework: its first frame with a known meaning, up to the user's line that called it.
    own = next((index for index in at if frames[index].framework is None), len(frames))
    return next((index for index in at if index < own and frames[index].word is not None), at[0])


def _text(frames: list[_Frame], at: int) -> str:
    frame, above = frames[at], frames[at + 1 :]
    function = frame.function.rpartition("<locals>.")[2]
    caller = next((one for one in above if one.framework is None), None)
    if frame.framework is None:
        # What the calling framework was doing; frames beyond the user's line that called the framework do not count.
        called_by = above[: above.index(caller)] if caller is not None else above
        word = next((one.word for one in called_by if one.word is not None), None)
        where = f"{frame.path.rpartition('/')[2]}:{frame.line}"
        text = where if function in ("", "<module>") else f"{function}, {where}"
    else:
        word = frame.word
        text = f"{_inside_packages(frame.path)}:{frame.line} in {function}"
        text += f", from {caller.path.rpartition('/')[2]}:{caller.line}" if caller is not None else ""
    text += ", in a DataLoader worker" if frame.worker else ""
    return f"{word}: {text}" if word else text


def _inside_packages(path: str) -> str:
    """``transformers/trainer.py``."""
    for folder in ("/site-packages/", "/dist-packages/"):
        path = path.rpartition(folder)[2]
    return path


def _worker_frames(frames: Any) -> list[_Frame]:
    """What a DataLoader worker does: in the user's code or, with a dataset from a library, in that library."""
    named = _named_frames(frames) or _named_frames(frames, libraries=True)
    return [replace(frame, worker=True) for frame in named]


def _named_frames(frames: Any, *, libraries: bool = False) -> list[_Frame]:
    """The user's and the framework's frames, innermost first; empty if they are malformed.

    ``libraries``: also those of installed packages, except torch's own code that calls the dataset.
    """
    found = []
    for frame in frames if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            return []
        path, function, line = frame.get("file"), frame.get("function"), frame.get("line")
        if not isinstance(path, str):
            continue
        framework = framework_of(path)
        if libraries and framework is None and "-packages/" in path and LOADER_CODE not in path:
            framework = _inside_packages(path).partition("/")[0]
        if framework is None and any(part in path for part in LIBRARIES):
            continue
        name, number = function if isinstance(function, str) else "", line if isinstance(line, int) else 0
        found.append(_Frame(path=path, function=name, line=number, framework=framework))
    return found

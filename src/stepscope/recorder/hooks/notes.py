"""Values stored with a step: what the script gives to ``stepscope.note``, and what its framework logs.

Loss, learning rate, gradient norm and throughput are logged by Trainers, by Lightning, by ``accelerator.log``, by
``ray.train.report``, and by scripts to TensorBoard or W&B. The hooks here note the numbers among them; they read
nothing from a device, and cost nothing where nothing is logged.

*What may be called* of the script's objects: of what a framework logs nothing; only dicts are read, and in them plain
numbers and torch's own tensors with one element on the host.  ``stepscope.note`` is called by the script itself, so
``item`` or ``str`` of what it is given may be called.
*How long it may take*: the names of a dict are compared until ``MOST_LOGGED`` of interest are found; a text is cut
before it is encoded.
*What may be kept alive*: nothing; a note is bytes.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from stepscope.recorder.guard import ImportWatch, Patches, failsafe
from stepscope.recorder.recorder import Recorder
from stepscope.records.steps import NOTE_BYTES

__all__ = ["LOGGERS", "install", "note_texts"]

LOGGERS: dict[str, tuple[str, str, str]] = {
    "transformers.trainer": ("Trainer", "log", "logs"),
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": (
        *("_LoggerConnector", "log_metrics", "metrics"),
    ),
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector": (
        *("_LoggerConnector", "log_metrics", "metrics"),
    ),
    "accelerate.accelerator": ("Accelerator", "log", "values"),
    "ray.train.v2._internal.execution.train_fn_utils": ("DistributedTrainFnUtils", "report", "metrics"),
    "wandb.sdk.wandb_run": ("Run", "log", "data"),
    "torch.utils.tensorboard.writer": ("SummaryWriter", "add_scalar", "tag"),
}
"""By module: a class, the method that logs, and its first argument: a mapping, or a tag with the value after it."""
AFTER_STEP = ("transformers", "lightning", "pytorch_lightning")
"""These log a step after its end, even if they exchange its loss between ranks, or evaluate, before that."""
WORDS = ("loss", "lr", "learning_rate", "grad_norm", "per_second", "per_sec", "throughput", "mfu", "accuracy")
"""Names of interest contain one of these."""
MOST_LOGGED = 8
"""Values noted of one call."""


def note_texts(values: Mapping[str, Any]) -> Iterator[bytes]:
    """The form in which a note is stored: a JSON object for each value."""
    for key, value in values.items():
        text = json.dumps({key: _plain(value)}, separators=(",", ":"), default=str).encode()
        if len(text) > NOTE_BYTES:
            short = str(value)[: max(NOTE_BYTES // 8, 1)]
            text = json.dumps({key[:64]: short + "…"}, separators=(",", ":")).encode()
        yield text


def _plain(value: Any) -> Any:
    """Convert to a plain value: a number for a tensor on the host or a numpy scalar.

    A tensor on a device is not read: that would wait for the device.
    """
    if isinstance(value, str):
        return value[: NOTE_BYTES + 1]  # one that is too long is shortened by ``note_texts``
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no nan
    device = getattr(value, "device", None)
    if hasattr(value, "item") and getattr(device, "type", "cpu") == "cpu":
        plain = value.item()
        return _plain(plain) if isinstance(plain, float) else plain
    return str(value) if device is None else f"<tensor on {device}>"


# -- What frameworks log ----------------------------------------------------------------------------------------------


def install(recorder: Recorder, patches: Patches, watch: ImportWatch) -> None:
    logs = _Logs(recorder)
    for module_name, (class_name, method, argument) in LOGGERS.items():
        ended = module_name.partition(".")[0] in AFTER_STEP
        watch.when_imported(module_name, functools.partial(logs.patch, patches, class_name, method, argument, ended))


class _Logs:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._inside = False
        """A Trainer's log calls W&B's, with other names for the same values."""

    def patch(self, patches: Patches, class_name: str, method: str, argument: str, ended: bool, module: Any) -> None:
        owner = getattr(module, class_name, None)
        original = getattr(owner, method, None)
        if original is not None:
            patches.set(owner, method, self._noted(original, argument, ended))

    def _noted(self, original: Callable[..., Any], argument: str, ended: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._note(args, kwargs, argument, ended)
            self._inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False

        return noted

    @failsafe
    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any], argument: str, ended: bool) -> None:
        values: Any = args[1] if len(args) > 1 else kwargs.get(argument)  # args[0] is self
        if issubclass(type(values), str):
            values = {values: args[2] if len(args) > 2 else kwargs.get("scalar_value")}
        if not issubclass(type(values), dict):
            return
        named = ((name, value) for name, value in dict.items(values) if _of_interest(name))
        numbers = {name: value for name, value in islice(named, MOST_LOGGED) if _is_number(value)}
        for text in note_texts(numbers):
            self._recorder.note(text, ended=ended)


def _of_interest(name: Any) -> bool:
    if not issubclass(type(name), str):
        return False
    lower = str.lower(name)
    return any(word in lower for word in WORDS)


def _is_number(value: Any) -> bool:
    """Also a tensor on the host with one element."""
    if type(value) in (int, float):
        return True
    torch: Any = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor and value.is_cpu and value.numel() == 1

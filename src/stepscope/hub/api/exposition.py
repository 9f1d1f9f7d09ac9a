"""Figures in the text form that Prometheus reads: families in order, each with its help, its type and its samples.

    page = Exposition()
    page.family("stepscope_run_step", "gauge", "The last step that all ranks finished.")
    page.sample("stepscope_run_step", 120, run="demo")
    page.text()

A value that is missing, or no number, is left out: Prometheus then shows a gap instead of a zero.
"""

from __future__ import annotations

import math
import re
from typing import Literal

__all__ = ["CONTENT_TYPE", "Exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_HELP_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n"})
_UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
LONGEST_LABEL = 200


class Exposition:
    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def family(self, name: str, kind: Literal["gauge", "counter"], about: str) -> None:
        """Before its samples; asked for twice, it stays one."""
        if name not in self._families:
            self._families[name] = [f"# HELP {name} {about.translate(_HELP_ESCAPES)}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, value: float | None, /, **labels: object) -> None:
        if value is None or not math.isfinite(value):
            return
        said = ",".join(f'{label}="{_label(str(text))}"' for label, text in labels.items())
        self._families[name].append(f"{name}{{{said}}} {_number(value)}" if said else f"{name} {_number(value)}")

    def text(self) -> str:
        """Families without samples are left out."""
        return "".join("\n".join(lines) + "\n" for lines in self._families.values() if len(lines) > 2)


def _label(text: str) -> str:
    return _UNSEEN.sub("�", text[:LONGEST_LABEL]).translate(_ESCAPES)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))

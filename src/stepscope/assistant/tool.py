"""A tool that an assistant can call: its declaration, and the check of its arguments.

One declaration serves the list of tools that a client gets (a JSON schema), the check, and the table in
docs/assistants.md.  Arguments come from a language model and may be anything: an unknown name, a wrong type or a number
out of range is refused with one sentence that says what is accepted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stepscope.assistant.answers import Answer
from stepscope.assistant.hub_api import HubApi, RequestError
from stepscope.hub.api.auth import Role

__all__ = ["Argument", "Tool", "checked_arguments", "input_schema"]

LONGEST_TEXT = 256
LARGEST = (1 << 53) - 1
"""The largest integer that every JSON parser reads exactly."""
Kind = Literal["integer", "text", "choice", "texts", "flag"]
_TYPES = {"integer": "integer", "text": "string", "choice": "string", "texts": "array", "flag": "boolean"}


@dataclass(frozen=True, kw_only=True)
class Argument:
    name: str
    about: str
    kind: Kind = "text"
    default: Any = None
    required: bool = False
    least: int = 0
    most: int = LARGEST
    longest: int = LONGEST_TEXT
    """Characters of a text."""
    many: int = 64
    """The limit for elements of ``texts``."""
    choices: tuple[str, ...] = ()

    def check(self, value: object) -> Any:
        """Return the value; RequestError if it is invalid."""
        if self.kind == "integer":
            return self._integer(value)
        if self.kind == "flag":
            if not isinstance(value, bool):
                raise RequestError(f"{self.name} must be true or false")
            return value
        if self.kind == "texts":
            if not isinstance(value, list) or not 0 < len(value) <= self.many:
                raise RequestError(f"{self.name} must be a list of 1 to {self.many} texts")
            return [self._text(element) for element in value]
        text = self._text(value)
        if self.kind == "choice" and text not in self.choices:
            raise RequestError(f"{self.name} must be one of {', '.join(self.choices)}")
        return text

    def _integer(self, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            bounds = f"of at least {self.least}" if self.most == LARGEST else f"from {self.least} to {self.most}"
            raise RequestError(f"{self.name} must be an integer {bounds}")
        return value

    def _text(self, value: object) -> str:
        if not isinstance(value, str) or not value or len(value) > self.longest:
            raise RequestError(f"{self.name} must be a text of 1 to {self.longest} characters")
        if any("\ud800" <= char <= "\udfff" or char == "\0" for char in value):
            raise RequestError(f"{self.name} contains characters that are not allowed")
        return value

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": _TYPES[self.kind], "description": self.about}
        if self.kind == "integer":
            found["minimum"] = self.least
            if self.most != LARGEST:
                found["maximum"] = self.most
        elif self.kind == "choice":
            found["enum"] = list(self.choices)
        elif self.kind == "texts":
            found |= {"items": {"type": "string", "maxLength": self.longest}, "minItems": 1, "maxItems": self.many}
        elif self.kind == "text":
            found["maxLength"] = self.longest
        if self.default is not None:
            found["default"] = self.default
        return found


@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str
    title: str
    about: str
    """For the assistant: what it answers, and when to call it."""
    call: Callable[[HubApi, Mapping[str, Any]], Awaitable[Answer]]
    """Gets every declared argument by name, or its default; and ``by``, who calls it."""
    arguments: tuple[Argument, ...] = field(default=())
    role: Role | None = None
    """What the caller needs besides reading: it changes labels, silences or acknowledgments."""

    @property
    def changes(self) -> bool:
        return self.role is not None


def input_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    return {
        "type": "object",
        "properties": {argument.name: argument.schema() for argument in tool.arguments},
        "required": [argument.name for argument in tool.arguments if argument.required],
        "additionalProperties": False,
    }


def checked_arguments(tool: Tool, given: Mapping[str, Any], *, by: str) -> dict[str, Any]:
    """Return the values for ``Tool.call``; null counts as not given.  RequestError if one is invalid."""
    known = {argument.name: argument for argument in tool.arguments}
    for name in given:
        if name not in known:
            raise RequestError(f"unknown argument {name[:40]!r}; {tool.name} accepts {', '.join(known) or 'none'}")
    values = {name: argument.default for name, argument in known.items()}
    values |= {name: known[name].check(value) for name, value in given.items() if value is not None}
    for argument in tool.arguments:
        if argument.required and values[argument.name] is None:
            raise RequestError(f"{argument.name} is required: {argument.about}")
    return {**values, "by": by}

"""A resource of the API: its path, what may be asked of it, and the function that answers.

One declaration serves the router, the check of every parameter, and ``openapi.json``: what is not declared cannot be
asked.  An answer is a document (a mapping), a ``Body``, or a whole Response.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stepscope.hub.api.answers import ApiError, Body, answer, failure
from stepscope.hub.api.readers import ONLY_RUN
from stepscope.hub.open_run import OpenRun
from stepscope.hub.runs import Runs

__all__ = ["Asked", "Parameter", "Resource", "route_of"]

LONGEST_TEXT = 256
LARGEST = (1 << 63) - 1
Kind = Literal["integer", "choice", "text", "texts", "span"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One word of a query."""

    name: str
    about: str
    kind: Kind = "integer"
    default: Any = None
    least: int = 0
    most: int = LARGEST
    choices: tuple[str, ...] = ()
    many: int = 64
    """Of texts, at most."""

    def read(self, text: str) -> Any:
        """ApiError(400) for anything but what it may be."""
        if len(text) > LONGEST_TEXT * (self.many if self.kind == "texts" else 1):
            raise ApiError(400, f"{self.name} is too long")
        if self.kind == "integer":
            return self._integer(text)
        if self.kind == "choice":
            if text not in self.choices:
                raise ApiError(400, f"{self.name} is one of {', '.join(self.choices)}")
            return text
        if self.kind == "texts":
            words = tuple(word for word in text.split(",") if word)
            if len(words) > self.many or any(len(word) > LONGEST_TEXT for word in words):
                raise ApiError(400, f"{self.name} has at most {self.many} words, divided by commas")
            return words
        if self.kind == "span":
            first, dash, last = text.partition("-")
            low = self._integer(first)
            high = self._integer(last) if dash else low
            if high < low:
                raise ApiError(400, f"{self.name} is FIRST-LAST")
            return low, high
        return text

    def _integer(self, text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdecimal() or len(text) > 20:
            raise ApiError(400, f"{self.name} is a whole number")
        number = int(text)
        if not self.least <= number <= self.most:
            raise ApiError(400, f"{self.name} is from {self.least} to {self.most}")
        return number


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a reader wants to know, checked."""

    request: Request
    runs: Runs
    values: Mapping[str, Any]
    """By name of every declared parameter, its default where it was not given."""
    opened: OpenRun | None

    @property
    def run(self) -> OpenRun:
        if self.opened is None:
            raise ApiError(404, "there is no such run")
        return self.opened

    def accepts(self, media_type: str) -> bool:
        """Whether the reader asked for that form by name."""
        wanted = self.request.headers.get("accept", "")
        return media_type in {kind.partition(";")[0].strip().lower() for kind in wanted.split(",")}


Answer = Mapping[str, Any] | Body | Response


@dataclass(frozen=True, kw_only=True)
class Resource:
    path: str
    about: str
    answer: Callable[[Asked], Answer | Awaitable[Answer]]
    parameters: tuple[Parameter, ...] = ()
    method: Literal["GET", "POST", "DELETE"] = "GET"
    media_types: tuple[str, ...] = ("application/json",)
    open: bool = False
    """Whether it needs no token; ``readers.OPEN_PATHS`` decides, a test holds the two together."""
    path_parameters: Mapping[str, str] = field(default_factory=dict)
    """What ``{name}`` in the path is, where it is not the run."""


def route_of(resource: Resource, runs: Runs) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            values = _values(resource, request)
            name = request.path_params.get("run")
            opened = await runs.open(name) if name is not None else None
            if name is not None and (opened is None or not _may_read(request, opened)):
                raise ApiError(404, "there is no such run")
            given = resource.answer(Asked(request=request, runs=runs, values=values, opened=opened))
            content = await given if inspect.isawaitable(given) else given
        except ApiError as error:
            return failure(error.status, str(error))
        return content if isinstance(content, Response) else await answer(request.headers, content)

    methods = [resource.method]
    return Route(resource.path, endpoint, methods=methods)


def _may_read(request: Request, opened: OpenRun) -> bool:
    """A hub also answers to the name that its run was to have, which may be the name of another run."""
    only = request.scope.get("state", {}).get(ONLY_RUN)
    return only is None or only == opened.name


def _values(resource: Resource, request: Request) -> dict[str, Any]:
    declared = {parameter.name: parameter for parameter in resource.parameters}
    values = {parameter.name: parameter.default for parameter in resource.parameters}
    for name, text in request.query_params.multi_items():
        if name not in declared:
            known = ", ".join(declared) or "nothing"
            raise ApiError(400, f"an unknown parameter; this resource takes {known}")
        if text:
            values[name] = declared[name].read(text)
    return values

"""Resources of the API: declaration, check of the parameters, route, and entry in openapi.json.

One declaration serves the router, the check of every parameter, and ``openapi.json``: an undeclared parameter is
refused.  An answer is a document (a mapping), a ``Body``, or a complete Response.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stepscope import __version__
from stepscope.alerts.requests import user_name
from stepscope.errors import RunError, UsageError
from stepscope.hub.api.auth import ONLY_RUN, Role, reader_name, roles_in, why_forged
from stepscope.hub.api.responses import ApiError, Body, answer, failure
from stepscope.hub.open_run import OpenRun
from stepscope.hub.runs import Runs

__all__ = ["Parameter", "Query", "Resource", "change_run", "openapi", "read_body", "route_of"]


# -- resources --------------------------------------------------------------------------------------------------------

LONGEST_TEXT = 256
LARGEST = (1 << 63) - 1
Kind = Literal["integer", "choice", "text", "texts", "span"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One query parameter."""

    name: str
    about: str
    kind: Kind = "integer"
    default: Any = None
    least: int = 0
    most: int = LARGEST
    choices: tuple[str, ...] = ()
    many: int = 64
    """The limit for words in ``texts``."""

    def read(self, text: str) -> Any:
        """Parse a value; ApiError(400) if it is invalid."""
        if len(text) > LONGEST_TEXT * (self.many if self.kind == "texts" else 1):
            raise ApiError(400, f"{self.name} is too long")
        if self.kind == "integer":
            return self._integer(text)
        if self.kind == "choice":
            if text not in self.choices:
                raise ApiError(400, f"{self.name} must be one of {', '.join(self.choices)}")
            return text
        if self.kind == "texts":
            words = tuple(word for word in text.split(",") if word)
            if len(words) > self.many or any(len(word) > LONGEST_TEXT for word in words):
                raise ApiError(400, f"{self.name} takes at most {self.many} values, separated by commas")
            return words
        if self.kind == "span":
            first, dash, last = text.partition("-")
            low = self._integer(first)
            high = self._integer(last) if dash else low
            if high < low:
                raise ApiError(400, f"{self.name} must be FIRST-LAST")
            return low, high
        return text

    def _integer(self, text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdecimal() or len(text) > 20:
            raise ApiError(400, f"{self.name} must be an integer")
        number = int(text)
        if not self.least <= number <= self.most:
            raise ApiError(400, f"{self.name} must be from {self.least} to {self.most}")
        return number


@dataclass(frozen=True, kw_only=True)
class Query:
    """A checked request."""

    request: Request
    runs: Runs
    values: Mapping[str, Any]
    """The value of every declared parameter by name, or its default."""
    opened: OpenRun | None

    @property
    def run(self) -> OpenRun:
        if self.opened is None:
            raise ApiError(404, "there is no such run")
        return self.opened

    @property
    def roles(self) -> frozenset[Role]:
        """What this reader may do besides viewing."""
        return roles_in(self.request.scope)

    @property
    def who(self) -> str:
        """The reader's name; with the hub's own token the user that runs the hub."""
        return reader_name(self.request.scope) or user_name(os.environ)

    def signed(self, claimed: str) -> str:
        """The name under which a change is recorded: readers with a name cannot choose another."""
        return reader_name(self.request.scope) or claimed or user_name(os.environ)

    def accepts(self, media_type: str) -> bool:
        """Whether the client explicitly accepts this media type."""
        wanted = self.request.headers.get("accept", "")
        return media_type in {kind.partition(";")[0].strip().lower() for kind in wanted.split(",")}


Answer = Mapping[str, Any] | Body | Response


@dataclass(frozen=True, kw_only=True)
class Resource:
    path: str
    about: str
    answer: Callable[[Query], Answer | Awaitable[Answer]]
    parameters: tuple[Parameter, ...] = ()
    method: Literal["GET", "POST", "DELETE"] = "GET"
    media_types: tuple[str, ...] = ("application/json",)
    open: bool = False
    """Whether it needs no token; ``api.auth.OPEN_PATHS`` decides, and a test keeps the two consistent."""
    path_parameters: Mapping[str, str] = field(default_factory=dict)
    """Descriptions of ``{name}`` in the path, except the run."""
    role: Role | None = None
    """What a reader needs for it besides viewing: it changes a run, which is not opened for it."""


def route_of(resource: Resource, runs: Runs) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            values = _values(resource, request)
            name = request.path_params.get("run")
            opened = None
            if resource.role is not None:
                await _check_change(request, resource.role, runs)
            elif name is not None:
                opened = await runs.open(name)
            if name is not None and resource.role is None and (opened is None or not _may_read(request, opened.id)):
                raise ApiError(404, "there is no such run")
            given = resource.answer(Query(request=request, runs=runs, values=values, opened=opened))
            content = await given if inspect.isawaitable(given) else given
        except ApiError as error:
            return failure(error.status, str(error))
        return content if isinstance(content, Response) else await answer(request.headers, content)

    methods = [resource.method]
    return Route(resource.path, endpoint, methods=methods)


async def _check_change(request: Request, role: Role, runs: Runs) -> None:
    """ApiError if this reader, or the page that sent the request, may not change this."""
    if role not in roles_in(request.scope):
        raise ApiError(403, f"you need the role {role} for this, or the hub's own token")
    if why := why_forged(request):
        raise ApiError(403, why)
    name = request.path_params.get("run")
    if name is not None and request.scope.get("state", {}).get(ONLY_RUN) is not None:
        path = await runs.existing(name)
        if path is None or not _may_read(request, runs.id_of(path)):
            raise ApiError(404, "there is no such run")


def _may_read(request: Request, run_id: str) -> bool:
    """Whether the token covers the run: a hub also accepts its run's requested name, which may be another run's."""
    only = request.scope.get("state", {}).get(ONLY_RUN)
    return only is None or only == run_id


def _values(resource: Resource, request: Request) -> dict[str, Any]:
    declared = {parameter.name: parameter for parameter in resource.parameters}
    values = {parameter.name: parameter.default for parameter in resource.parameters}
    for name, text in request.query_params.multi_items():
        if name not in declared:
            known = ", ".join(declared) or "no parameters"
            raise ApiError(400, f"unknown parameter; this resource accepts {known}")
        if text:
            values[name] = declared[name].read(text)
    return values


# -- OpenAPI ----------------------------------------------------------------------------------------------------------
# ``/api/v1/openapi.json``: generated from the declarations that the router uses, so it cannot differ.

_INGEST = {
    "/api/v1/hello": "An agent and the hub prove to each other that they have the user's key (wire/handshake.py).",
    "/api/v1/runs/{run}/join": "An agent joins (wire/handshake.py); signed with the user's key.",
    "/api/v1/runs/{run}/frames": "An agent sends a frame (wire/frames.py), with the token from its join.",
}
_ERRORS = {
    "400": "Invalid parameter.",
    "401": "Missing or invalid token.",
    "404": "No such run, rank or file.",
    "429": "Too many wrong tokens.",
}


def openapi(resources: Sequence[Resource], *, ingest: bool) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for resource in resources:
        path = re.sub(r":\w+}", "}", resource.path)
        paths.setdefault(path, {})[resource.method.lower()] = _operation(resource)
    if ingest:
        for path, about in _INGEST.items():
            paths[path] = {"post": {"summary": about, "responses": {"200": {"description": "Accepted."}}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stepscope hub",
            "version": __version__,
            "description": "docs/api.md explains every response. Changes need a role, or the hub's own token.",
        },
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "stepscope-*"},
            }
        },
        "security": [{"token": []}, {"session": []}],
        "paths": paths,
    }


def _operation(resource: Resource) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": resource.about,
        "parameters": [*_path_parameters(resource), *map(_parameter, resource.parameters)],
        "responses": {
            "200": {"description": "OK", "content": {kind: {} for kind in resource.media_types}},
            **({} if resource.open else {status: {"description": about} for status, about in _ERRORS.items()}),
        },
    }
    if resource.open:
        operation["security"] = []
    return operation


def _path_parameters(resource: Resource) -> list[Mapping[str, Any]]:
    about = {"run": "name of the run", **resource.path_parameters}
    names = re.findall(r"{(\w+)(?::\w+)?}", resource.path)
    return [
        {"name": name, "in": "path", "required": True, "description": about[name], "schema": {"type": "string"}}
        for name in names
    ]


def _parameter(parameter: Parameter) -> Mapping[str, Any]:
    schema: dict[str, Any]
    if parameter.kind == "integer":
        schema = {"type": "integer", "minimum": parameter.least, "maximum": parameter.most}
    elif parameter.kind == "choice":
        schema = {"type": "string", "enum": list(parameter.choices)}
    elif parameter.kind == "span":
        schema = {"type": "string", "pattern": r"^\d+(-\d+)?$"}
    else:
        schema = {"type": "string", "maxLength": LONGEST_TEXT * (parameter.many if parameter.kind == "texts" else 1)}
    if isinstance(parameter.default, int | str):
        schema["default"] = parameter.default
    return {"name": parameter.name, "in": "query", "description": parameter.about, "schema": schema}


# -- requests that change a run: their bodies, and how an error in the run becomes an answer --------------------------


BODY_BYTES = 16 << 10

T = TypeVar("T", bound=msgspec.Struct)
Result = TypeVar("Result")


async def change_run(query: Query, change: Callable[[Path], Result]) -> Result:
    """Call ``change`` with the run's directory, in a thread; ApiError if the run does not exist, or it refuses."""
    path = await query.runs.existing(query.request.path_params["run"])
    if path is None:
        raise ApiError(404, "there is no such run")
    try:
        return await asyncio.to_thread(change, path)
    except UsageError as error:
        raise ApiError(400, str(error)) from None
    except (RunError, OSError) as error:
        raise ApiError(409, str(error) if isinstance(error, RunError) else "the run cannot be read") from None


async def read_body(query: Query, kind: type[T], form: str) -> T:
    """The body of a request; ApiError if it is not of this kind, described by ``form``."""
    body = b""
    async for chunk in query.request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise ApiError(400, "the body is too long")
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.MsgspecError:
        raise ApiError(400, f"the body must be {form}") from None

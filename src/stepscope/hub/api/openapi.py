"""``/api/v1/openapi.json``: made from the declarations that the router itself is made from, so it cannot differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope import __version__
from stepscope.hub.api.resource import LONGEST_TEXT, Parameter, Resource

__all__ = ["openapi"]

_INGEST = {
    "/api/v1/hello": "An agent and the hub prove to each other that they have the user's key (wire/joining.py).",
    "/api/v1/runs/{run}/join": "An agent joins (wire/joining.py); signed with the user's key.",
    "/api/v1/runs/{run}/frames": "An agent sends a frame (wire/frames.py), with the token it got when it joined.",
}
_ERRORS = {
    "400": "A parameter is wrong.",
    "401": "No token, or a wrong one.",
    "404": "There is no such run, rank or file.",
    "429": "Too many wrong tokens.",
}


def openapi(resources: Sequence[Resource], *, ingest: bool) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for resource in resources:
        path = re.sub(r":\w+}", "}", resource.path)
        paths.setdefault(path, {})[resource.method.lower()] = _operation(resource)
    if ingest:
        for path, about in _INGEST.items():
            paths[path] = {"post": {"summary": about, "responses": {"200": {"description": "Taken."}}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stepscope hub",
            "version": __version__,
            "description": "Read-only, but for what agents send. docs/api.md explains every answer.",
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
    said: dict[str, Any] = {
        "summary": resource.about,
        "parameters": [*_path_parameters(resource), *map(_parameter, resource.parameters)],
        "responses": {
            "200": {"description": "OK", "content": {kind: {} for kind in resource.media_types}},
            **({} if resource.open else {status: {"description": about} for status, about in _ERRORS.items()}),
        },
    }
    if resource.open:
        said["security"] = []
    return said


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

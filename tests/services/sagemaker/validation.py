"""Pure: check a request against botocore's own service model, and complain in AWS's words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import botocore.session

_CLASSES = {r"\p{L}": "a-zA-Z\u00c0-\uffff", r"\p{Z}": " \u00a0\u3000", r"\p{N}": "0-9", r"\p{Alnum}": "a-zA-Z0-9"}


@cache
def service_model() -> Any:
    return botocore.session.get_session().get_service_model("sagemaker")


def problems(operation: str, request: Mapping[str, Any]) -> list[str]:
    """Each constraint that the request breaks, as the service would word it."""
    shape = service_model().operation_model(operation).input_shape
    return [*_walk(request, shape, ""), *(_cross(request) if operation == "CreateTrainingJob" else ())]


def message(found: list[str]) -> str:
    noun = "error" if len(found) == 1 else "errors"
    return f"{len(found)} validation {noun} detected: {'; '.join(found)}"


def _walk(value: Any, shape: Any, where: str) -> Iterator[str]:
    kind = shape.type_name
    if kind == "structure":
        for name in shape.required_members:
            if name not in value:
                yield _failed(None, f"{where}.{name}", "Member must not be null")
        for name, item in value.items():
            if name not in shape.members:
                yield f"unknown member {name}"
            else:
                yield from _walk(item, shape.members[name], f"{where}.{name[0].lower()}{name[1:]}")
    elif kind == "list":
        yield from _sized(value, len(value), shape, where)
        for index, item in enumerate(value):
            yield from _walk(item, shape.member, f"{where}.{index + 1}.member")
    elif kind == "map":
        yield from _sized(value, len(value), shape, where)
        for key, item in value.items():
            yield from _walk(key, shape.key, f"{where}.key")
            yield from _walk(item, shape.value, f"{where}.{key}.value")
    elif kind == "string":
        yield from _text(value, shape, where)
    elif kind in ("integer", "long"):
        yield from _sized(value, value, shape, where, noun="value")


def _text(value: str, shape: Any, where: str) -> Iterator[str]:
    yield from _sized(value, len(value), shape, where)
    if shape.enum and value not in shape.enum:
        yield _failed(value, where, f"Member must satisfy enum value set: [{', '.join(sorted(shape.enum))}]")
    pattern = shape.metadata.get("pattern")
    if pattern and not re.fullmatch(_as_python(pattern), value):
        yield _failed(value, where, f"Member must satisfy regular expression pattern: {pattern}")


def _sized(value: Any, size: int, shape: Any, where: str, *, noun: str = "length") -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and size < least:
        yield _failed(value, where, f"Member must have {noun} greater than or equal to {least}")
    if most is not None and size > most:
        yield _failed(value, where, f"Member must have {noun} less than or equal to {most}")


def _cross(request: Mapping[str, Any]) -> Iterator[str]:
    stopping = request.get("StoppingCondition", {})
    runtime, wait = stopping.get("MaxRuntimeInSeconds", 86_400), stopping.get("MaxWaitTimeInSeconds")
    if wait is not None and wait < runtime:
        yield "MaxWaitTimeInSeconds must be greater than or equal to MaxRuntimeInSeconds"
    if runtime > 28 * 86_400:
        yield "MaxRuntimeInSeconds is more than the limit of 2419200"
    is_spot = request.get("EnableManagedSpotTraining", False)
    if is_spot and wait is None:
        yield "MaxWaitTimeInSeconds is required for managed spot training"
    if wait is not None and not is_spot:
        yield "MaxWaitTimeInSeconds is only for managed spot training"
    if request.get("ResourceConfig", {}).get("VolumeSizeInGB", 1) < 1:
        yield "VolumeSizeInGB must be at least 1"


def _failed(value: Any, where: str, rule: str) -> str:
    return f"Value '{value}' at '{where.removeprefix('.')}' failed to satisfy constraint: {rule}"


def _as_python(pattern: str) -> str:
    for name, characters in _CLASSES.items():
        pattern = pattern.replace(name, characters)
    return pattern

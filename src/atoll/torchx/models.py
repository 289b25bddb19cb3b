"""Models of the official client from plain dicts: pydantic models since version 37, generated classes before."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ITEM = re.compile(r"(?:list|dict)[\[(](?:str, )?(\w+)[\])]\Z")


def model_of(kind: str, data: Mapping[str, Any]) -> Any:
    """The model `kind`, such as `V1Pod`, of a manifest. Raises `ModuleNotFoundError` without the client."""
    from kubernetes.client import models

    made = getattr(models, kind)
    if hasattr(made, "model_validate"):
        return made.model_validate(data)
    return _generated(models, kind, data)


def _generated(models: Any, kind: str, data: Any) -> Any:
    made = getattr(models, kind, None)
    if made is None or not hasattr(made, "openapi_types") or not isinstance(data, Mapping):
        return data
    fields = {}
    for field, key in made.attribute_map.items():
        if key in data:
            wanted = made.openapi_types[field]
            item = _ITEM.match(wanted)
            value = data[key]
            if item is None:
                fields[field] = _generated(models, wanted, value)
            elif isinstance(value, Mapping):
                fields[field] = {name: _generated(models, item[1], each) for name, each in value.items()}
            else:
                fields[field] = [_generated(models, item[1], each) for each in value]
    return made(**fields)


def service_of(data: Mapping[str, Any]) -> Any:
    """The `V1Service` of a manifest; its empty status is the one of the original."""
    made = model_of("V1Service", data)
    if not hasattr(made, "model_validate") and made.status is not None:
        made.status.load_balancer = {}
    return made


def plain(resource: Any) -> Any:
    """The resource as JSON values, also where it has models of the client."""
    if not _has_models(resource):
        return resource
    from kubernetes import client

    return client.ApiClient(client.Configuration()).sanitize_for_serialization(resource)


def _has_models(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_models, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_models, value))
    return hasattr(value, "attribute_map")

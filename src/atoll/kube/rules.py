"""The rules for single settings of Kubernetes backends; `validation.check_settings` reads them from annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from atoll.kube.names import is_dns_label, is_dns_name, is_label_key, is_label_value
from atoll.kube.quantities import RULE, is_quantity
from atoll.spec import json_problems
from atoll.validation import COUNT, INDEX, Kind, a_list_of, a_table_of, between, is_number, is_text, one_of

_LONGEST_S = 366 * 86_400


def _is_json(value: Any) -> bool:
    return isinstance(value, Mapping) and not any(json_problems(value, ""))


def _is_word(value: Any) -> bool:
    return is_text(value) and not any(map(str.isspace, value))


_JSON_TABLE = Kind("a table of JSON values, as in a manifest", _is_json)
_NAME = Kind("the name of an object: small letters, digits, `-` and `.`", is_dns_name)
_LABEL_KEY = Kind("a key such as `name` or `example.com/name`", is_label_key)
_LABEL_VALUE = Kind(
    "at most 63 letters, digits, `-`, `_` and `.`", lambda v: isinstance(v, str) and (v == "" or is_label_value(v))
)
_AMOUNT = Kind("a number above 0", lambda value: is_number(value) and value > 0)

Name = Annotated[str, _NAME]
Names = Annotated[Sequence[str], a_list_of(_NAME)]
Namespace = Annotated[str, Kind("the name of a namespace: at most 63 small letters, digits and `-`", is_dns_label)]
Word = Annotated[str, Kind("a text without spaces that is not empty", _is_word)]
Words = Annotated[Sequence[str], a_list_of(Kind("a text", lambda value: isinstance(value, str) and "\0" not in value))]
Labels = Annotated[Mapping[str, str], a_table_of(_LABEL_VALUE, key=_LABEL_KEY)]
Annotations = Annotated[Mapping[str, str], a_table_of(Kind("a text", lambda v: isinstance(v, str)), key=_LABEL_KEY)]
LabelKey = Annotated[str, _LABEL_KEY]
Amount = Annotated[float, _AMOUNT]
Quantity = Annotated[str, Kind(RULE, is_quantity)]
Manifest = Annotated[Mapping[str, Any], _JSON_TABLE]
Manifests = Annotated[Sequence[Mapping[str, Any]], a_list_of(_JSON_TABLE)]
Count = Annotated[int, COUNT]
Index = Annotated[int, INDEX]
Seconds = Annotated[float, Kind(f"seconds above 0, at most {_LONGEST_S}", between(1e-3, _LONGEST_S))]
SecondsFrom0 = Annotated[float, Kind(f"seconds from 0 to {_LONGEST_S}", between(0, _LONGEST_S))]
Prices = Annotated[
    Mapping[str, float],
    a_table_of(
        Kind("dollars an hour", lambda v: is_number(v) and v >= 0),
        key=Kind("an instance type such as `g5.xlarge`", _is_word),
    ),
]


def choice(*words: str) -> Kind:
    """One of these words."""
    return Kind(f"one of {', '.join(words)}", one_of(*words), known=lambda: words)

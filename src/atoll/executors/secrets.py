"""Secrets that the machine itself has, in its variables and files: for replicas that this machine starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from atoll.errors import InvalidSpec


def secret_values(references: Mapping[str, str]) -> dict[str, str]:
    """The values of secrets. They go into the environment of the replicas and nowhere else."""
    values, problems = {}, []
    for name, reference in references.items():
        scheme, _, where = reference.partition(":")
        try:
            values[name] = os.environ[where] if scheme == "env" else Path(where).read_text(encoding="utf-8").strip()
        except KeyError:
            problems.append(f"secrets.{name}=`{reference}`: variable `{where}` is not set")
        except OSError as exc:
            problems.append(f"secrets.{name}=`{reference}`: {exc.strerror}")
        except UnicodeDecodeError:
            problems.append(f"secrets.{name}=`{reference}`: the file is not UTF-8 text")
        if "\0" in values.get(name, ""):
            problems.append(f"secrets.{name}=`{reference}`: a variable cannot contain NUL")
    if problems:
        raise InvalidSpec("secrets", problems)
    return values

"""Atoll's log lines on stderr. The command line and the replicas call this; `-v` and `ATOLL_LOG` set the levels.

Programs that use Atoll as a library configure `logging` as usual: the logger is `atoll`, with one child for each
package (`atoll.rounds`, `atoll.stores`, …), and Atoll gives it no handler but a `NullHandler` (in `atoll.errors`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import IO

from atoll.errors import ConfigError, did_you_mean

VARIABLE = "ATOLL_LOG"
LOGGERS = tuple(
    f"atoll.{name}" for name in ("cli", "executors", "kernels", "replica", "rounds", "runs", "stores", "training")
)
"""One for each package that logs."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_VERBOSE = (logging.WARNING, logging.INFO, logging.DEBUG)
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_HINT = "give one level (`debug`, `info` or `warning`), or levels for packages: `atoll.rounds=debug,atoll.stores=info`"


def log_to_stderr(environ: Mapping[str, str], *, verbosity: int = 0) -> None:
    """Write warnings and what `ATOLL_LOG` selects; `verbosity` 1 adds INFO, 2 adds DEBUG. Raises `ConfigError`."""
    levels = parse_levels(environ.get(VARIABLE, ""))
    if verbosity:
        levels["atoll"] = _VERBOSE[min(verbosity, 2)]
    _set_up(levels, _StderrHandler())
    _warn_about_unknown(levels, "atoll.cli")


def log_to_stderr_of_replica(environ: Mapping[str, str]) -> None:
    """The same in a replica, where a bad `ATOLL_LOG` is only a warning and user code may configure `logging` itself."""
    handler = _StderrHandler()
    handler.addFilter(lambda _: not logging.getLogger().handlers)  # the user's handlers receive the lines too
    try:
        levels, problem = parse_levels(environ.get(VARIABLE, "")), None
    except ConfigError as exc:
        levels, problem = {}, exc.message
    _set_up(levels, handler)
    if problem is not None:
        logging.getLogger("atoll.replica").warning("%s; ignored", problem)
    _warn_about_unknown(levels, "atoll.replica")


def parse_levels(text: str) -> dict[str, int]:
    """The levels in a value of `ATOLL_LOG`, by logger. Raises `ConfigError`."""
    levels = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        logger, _, word = item.rpartition("=")
        logger, level = logger.strip() or "atoll", LEVELS.get(word.strip().lower())
        if level is None:
            raise ConfigError(f"{VARIABLE}: `{word}` is not a level", hint=_HINT)
        if f"{logger}.".partition(".")[0] != "atoll":
            raise ConfigError(f"{VARIABLE}: `{logger}` is not a logger of Atoll", hint=_HINT)
        levels[logger] = level
    return levels


def _warn_about_unknown(levels: Mapping[str, int], logger: str) -> None:
    """Warn about names below `atoll` that no module logs to: probably a typing error."""
    for name in levels:
        package = ".".join(name.split(".")[:2])
        if package not in ("atoll", *LOGGERS):
            known = ", ".join(LOGGERS)
            text = "%s: Atoll does not log to `%s`%s; its loggers are atoll, %s"
            logging.getLogger(logger).warning(text, VARIABLE, name, did_you_mean(name, LOGGERS), known)


def _set_up(levels: Mapping[str, int], handler: logging.Handler) -> None:
    """Replace the handler and the levels of an earlier call."""
    top = logging.getLogger("atoll")
    for earlier in [each for each in top.handlers if isinstance(each, _StderrHandler)]:
        top.removeHandler(earlier)
    handler.setFormatter(logging.Formatter(_FORMAT))
    top.addHandler(handler)
    for name, level in {"atoll": logging.WARNING, **levels}.items():
        logging.getLogger(name).setLevel(level)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the present `sys.stderr`: the live table replaces it while it draws, and so may user code."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> IO[str]:
        return sys.stderr

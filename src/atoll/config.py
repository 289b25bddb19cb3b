"""Settings of a run: `atoll.toml` or `[tool.atoll]`, then `ATOLL_*`, then flags; each knows where it came from.

`load` reads at most one file and starts nothing. Every problem is reported at once, with its place. A later layer
replaces an earlier one key by key; the keys of `[args]`, `[env]`, `[secrets]` and `[executors.NAME]` add up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.config_fields import FIELDS, OTHER_VARIABLES, PREFIX, SECTIONS, TABLES, is_table, table_problem
from atoll.config_file import ConfigFile, find, read
from atoll.errors import ConfigError, InvalidSpec, UnknownName, closest, did_you_mean
from atoll.home import home


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: `default`, `atoll.toml:3`, `ATOLL_ON` or `--on`."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Config:
    """Every effective setting by its dotted key, such as `replicas`, `env.DEBUG` or `executors.local.root`."""

    settings: Mapping[str, Setting]
    file: str | None = None
    profile: str | None = None
    profiles: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def get(self, key: str) -> Any:
        """The value of a key, or None."""
        found = self.settings.get(key)
        return found.value if found else None

    def table(self, name: str) -> dict[str, Any]:
        """The keys below `name`, such as `table("env")`."""
        start = f"{name}."
        return {key[len(start) :]: found.value for key, found in self.settings.items() if key.startswith(start)}

    def executor_settings(self, executor: str) -> dict[str, Any]:
        """What `[executors.NAME]` says about this backend."""
        return self.table(f"executors.{executor.replace('-', '_')}")

    def launch_options(self) -> dict[str, Any]:
        """Keyword arguments for `atoll.prepare` and `atoll.launch`; what nobody set is left to them."""
        chosen = {name: self.settings[name] for name in FIELDS if name in self.settings}
        options = {
            FIELDS[name].option: found.value
            for name, found in chosen.items()
            if found.value is not None and found.origin != "default"
        }
        options.update({name: table for name in TABLES if (table := self.table(name))})
        if settings := self.executor_settings(self.get("on")):
            options["settings"] = settings
        return options


def load(
    directory: str | os.PathLike[str] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The settings that hold in `directory`. `flags` has dotted keys: `{"replicas": 4, "env.DEBUG": "1"}`.

    A flag that is None was not given; an argument that is None is an argument.
    """
    environ = os.environ if environ is None else environ
    path = file or environ.get("ATOLL_CONFIG")
    found = read(Path(path)) if path else find(Path(directory or _here()).absolute())
    reader = _Reader()
    layers = {setting.key: setting for setting in _defaults()}
    profiles: dict[str, list[Setting]] = {}
    if found:
        layers.update((s.key, s) for s in reader.file(found, found.table))
        profiles = reader.profiles(found)
    if profile := profile or environ.get("ATOLL_PROFILE") or None:
        layers.update((s.key, s) for s in _chosen(profiles, profile, found))
    layers.update((s.key, s) for s in reader.environment(environ))
    _forget_arguments_of_another_entry(layers, (flags or {}).get("entry"))
    given = {key: value for key, value in (flags or {}).items() if value is not None or key.startswith("args.")}
    layers.update((key, Setting(key, value, _flag(key))) for key, value in given.items())
    if reader.problems:
        raise InvalidSpec("configuration", reader.problems)
    place = found.place() if found else None
    return Config(layers, place, profile, tuple(profiles), tuple(_warnings(environ, found)))


def _here() -> str:
    """The working folder; the root if it was deleted, because `ps` and `cancel` need none."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep


def _defaults() -> Iterator[Setting]:
    for name, known in FIELDS.items():
        value = str(home() / "store") if name == "store" else known.default
        yield Setting(name, value, "default")


def _chosen(profiles: Mapping[str, list[Setting]], name: str, found: ConfigFile | None) -> list[Setting]:
    if not profiles:
        where = found.place() if found else "there is no atoll.toml, so it"
        raise ConfigError(f"no profile `{name}`: {where} has no `[profiles.{name}]`")
    if name not in profiles:
        raise UnknownName("profile", name, list(profiles))
    return profiles[name]


def _forget_arguments_of_another_entry(layers: dict[str, Setting], entry: str | None) -> None:
    """`[args]` belong to the `entry` of the file; a run of something else does not get them."""
    if entry is None or entry == layers["entry"].value:
        return
    for key in [key for key in layers if key.startswith("args.")]:
        del layers[key]


def _flag(key: str) -> str:
    table, _, name = key.partition(".")
    words = {"args": f"--arg {name}", "env": f"--env {name}", "secrets": f"--secret {name}", "entry": "ENTRY"}
    if table == "executors":
        return f"--setting {key.rpartition('.')[2]}"
    return words.get(table, f"--{key.replace('_', '-')}")


class _Reader:
    """Reads layers into settings and collects what is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def file(self, source: ConfigFile, body: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[Setting]:
        for key, value in body.items():
            place = source.place(*above, key)
            if key in FIELDS:
                yield from self._field(key, value, place, source.path.parent)
            elif key in TABLES and is_table(value):
                yield from self._table(source, (*above, key), key, value)
            elif key == "executors" and is_table(value):
                yield from self._executors(source, (*above, key), value)
            elif key == "profiles" and is_table(value) and not above:
                continue
            elif key in TABLES or key in SECTIONS:
                self.problems.append(f"{place}: `{key}` is a table: `[{key}]`")
            else:
                meant = did_you_mean(key, [*FIELDS, *TABLES, *SECTIONS])
                self.problems.append(f"{place}: unknown key `{key}`{meant}")

    def profiles(self, source: ConfigFile) -> dict[str, list[Setting]]:
        """All of them, so that a slip in one is found before it is chosen."""
        found = {}
        for name, body in source.table.get("profiles", {}).items() if is_table(source.table.get("profiles")) else ():
            if is_table(body):
                found[name] = list(self.file(source, body, ("profiles", name)))
            else:
                self.problems.append(f"{source.place('profiles', name)}: a profile is a table: `[profiles.{name}]`")
        return found

    def environment(self, environ: Mapping[str, str]) -> Iterator[Setting]:
        for name, known in FIELDS.items():
            if environ.get(known.variable):
                yield from self._field(name, environ[known.variable], known.variable, None)

    def _field(self, key: str, value: Any, place: str, folder: Path | None) -> Iterator[Setting]:
        known = FIELDS[key]
        try:
            read_value = known.read(value)
        except ValueError as exc:
            self.problems.append(f"{place}: {key}=`{value}`: {exc}")
            return
        if known.is_path and folder is not None and "://" not in read_value:
            read_value = os.path.join(folder, os.path.expanduser(read_value))
        yield Setting(key, read_value, place)

    def _table(self, source: ConfigFile, where: tuple[str, ...], table: str, body: Any) -> Iterator[Setting]:
        for key, value in body.items():
            place = source.place(*where, key)
            if problem := table_problem(table, value):
                self.problems.append(f"{place}: {table}.{key}=`{value}`: {problem}")
            else:
                yield Setting(f"{table}.{key}", value, place)

    def _executors(self, source: ConfigFile, where: tuple[str, ...], body: Any) -> Iterator[Setting]:
        from atoll.registry import known

        for name, settings in body.items():
            place, plain = source.place(*where, name), name.replace("-", "_")
            if plain not in known("executor"):
                self.problems.append(
                    f"{place}: unknown executor `{name}`{did_you_mean(plain, list(known('executor')))}"
                )
            elif not is_table(settings):
                self.problems.append(f"{place}: settings of an executor are a table: `[executors.{name}]`")
            else:
                for key, value in settings.items():
                    yield Setting(f"executors.{plain}.{key}", value, source.place(*where, name, key))


def _warnings(environ: Mapping[str, str], found: ConfigFile | None) -> Iterator[str]:
    """What is probably a slip, and no reason to stop."""
    variables = {known.variable for known in FIELDS.values()} | OTHER_VARIABLES
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in variables:
            close = closest(name.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in sorted(variables)])
            meant = f", did you mean `{PREFIX}{close}`?" if close else ""
            yield f"the variable {name} is no setting{meant}"
    if found and found.path.name == "atoll.toml":
        beside = found.path.parent / "pyproject.toml"
        if beside.is_file() and "[tool.atoll" in beside.read_text(encoding="utf-8", errors="replace"):
            yield f"{found.place()} is used, and [tool.atoll] in the pyproject.toml beside it is not"

"""The `atoll` command group, which finds its commands in `atoll.cli.commands` and loads them when they are used.

`invoke` runs a command; it is the one place that prints errors.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, cast

import click

from atoll.cli.main import COMPLETE
from atoll.cli.output import Output, error_record, write
from atoll.errors import AtollError, InternalError, UnknownName, UsageError, did_you_mean
from atoll.log_lines import log_to_stderr
from atoll.terminal_text import shown_text

_MOST_FRAMES = 4
SECTIONS = ("Start", "Look", "End", "Set up")
_COMMANDS = "atoll.cli.commands"
_VERBOSITY = "atoll.verbosity"


class Command(click.Command):
    """A command with `--json` and a section of the help; it may keep the arguments after `--` for a script."""

    def __init__(self, *args: Any, section: str, takes_script_args: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section, self.takes_script_args = section, takes_script_args
        help_text = "Write JSON lines to stdout; the last one is the envelope with the result."
        self.params.append(click.Option(["--json"], is_flag=True, expose_value=False, help=help_text))
        self.params.append(_verbose_option())

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), *(["[-- ARG...]"] if self.takes_script_args else [])]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.takes_script_args and "--" in args:
            at = args.index("--")
            ctx.meta["script_args"] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        log_to_stderr(os.environ, verbosity=ctx.meta.get(_VERBOSITY, 0))
        return super().invoke(ctx)


def _verbose_option() -> click.Option:
    """`-v`, which is accepted before and after the verb; the counts are added."""

    def count(ctx: click.Context, _: click.Parameter, value: int) -> None:
        ctx.meta[_VERBOSITY] = ctx.meta.get(_VERBOSITY, 0) + value

    help_text = "Log to stderr; -vv logs more. See also ATOLL_LOG."
    return click.Option(["-v", "--verbose"], count=True, expose_value=False, callback=count, help=help_text)


def command(section: str, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command: its first argument is the `Output`, and it may return an exit code."""

    def wrap(function: Callable[..., Any]) -> Command:
        attributes.setdefault("name", function.__name__.removesuffix("_command"))
        return click.command(cls=Command, section=section, **attributes)(click.pass_obj(function))

    return wrap


class Commands(click.Group):
    """A group in which every module of `atoll.cli.commands` is a command of the same name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        from importlib import import_module
        from pkgutil import iter_modules

        return sorted(found.name for found in iter_modules(import_module(_COMMANDS).__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from importlib import import_module

        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"{_COMMANDS}.{cmd_name}")
        return cast("click.Command", getattr(module, f"{cmd_name}_command"))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        known = self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            raise UnknownName("command", name, known, hint="`atoll --help` lists the commands")
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        formatter = click.HelpFormatter(width=88)  # a fixed width, because this text is also shipped as a file
        self.format_help(ctx, formatter)
        return formatter.getvalue().rstrip("\n")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [cast("Command", self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        width = max(len(c.name or "") for c in found)
        for section in SECTIONS:
            with formatter.section(section):
                rows = [((c.name or "").ljust(width), c.get_short_help_str(70)) for c in found if c.section == section]
                formatter.write_dl(rows)


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[_verbose_option()],
    epilog="Every command has --help, --json and -v. Exit codes: 0 success, 1 the run failed, 2 wrong input, "
    "3 backend error, 4 store error, 5 round error, 70 bug in Atoll, 124 deadline passed, 130 Ctrl-C.",
)
@click.version_option(package_name="atoll", message="%(prog)s %(version)s")
def root() -> None:
    """Train one model on many machines that cannot reach each other."""


def invoke(argv: list[str]) -> int:
    """Run a command, print its error if it fails, and return the exit code."""
    if COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "atoll", COMPLETE, os.environ[COMPLETE])
    out = Output.for_arguments(argv)
    try:
        with root.make_context("atoll", list(argv), obj=out) as context:
            code = int(root.invoke(context) or 0)
        out.close(code)
        return code
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.UsageError as exc:
        return _fail(out, _usage(exc))
    except AtollError as exc:
        return _fail(out, exc)
    except (KeyboardInterrupt, click.Abort):
        return _fail(out, Interrupted())
    except BrokenPipeError:
        raise  # `main` discards the rest of the output
    except Exception as exc:  # noqa: BLE001  any other exception is a bug, and is reported as one
        return _fail(out, _bug(exc))


class Interrupted(AtollError):
    """Ctrl-C: the command ends, runs continue."""

    exit_code = 130

    def __init__(
        self, hint: str | None = None, *, message: str = "runs continue without this command", quiet: bool = False
    ) -> None:
        super().__init__(f"interrupted; {message}", hint=hint)
        self.is_quiet = quiet
        """Whether the command has printed its message already."""


def _usage(exc: click.UsageError) -> UsageError:
    path = exc.ctx.command_path if exc.ctx else "atoll"
    message = exc.format_message()
    hint = f"`{path} --help` lists the options"
    if isinstance(exc, click.NoSuchOption) and exc.ctx is not None:
        known = [option for p in exc.ctx.command.params for option in p.opts if option.startswith("--")]
        message = f"no such option `{exc.option_name}`{did_you_mean(exc.option_name, known)}"
        if getattr(exc.ctx.command, "takes_script_args", False):
            hint += "; arguments of your script go after `--`"
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _bug(exc: BaseException) -> InternalError:
    """The error to report for an unexpected exception, with its last frames; `ATOLL_DEBUG=1` prints all of them."""
    frames = traceback.extract_tb(exc.__traceback__)[-_MOST_FRAMES:]
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    error = InternalError("\n".join([f"{type(exc).__name__}: {exc}", *lines]))
    error.hint = f"{error.hint}; ATOLL_DEBUG=1 shows the whole traceback"
    error.__cause__ = exc
    return error


def _fail(out: Output, error: AtollError) -> int:
    """Print the error and its hint, and return its exit code."""
    from atoll.cli.watch import error_hint

    error.hint = error_hint(error)
    if os.environ.get("ATOLL_DEBUG"):
        sys.stderr.write("".join(traceback.format_exception(error)))
    if isinstance(error, Interrupted):
        if not error.is_quiet:
            _stderr(error.message)
    else:
        _stderr(f"{out.paint('error:', 'bad', on_stderr=True)} {shown_text(error.message)}")
    if error.hint:
        _stderr(f"{out.paint('hint:', 'busy', on_stderr=True)} {error.hint}")
    out.close(error.exit_code, error_record(error))
    return error.exit_code


def _stderr(text: str) -> None:
    write(sys.stderr, text + "\n")

"""`atoll completion`: print the script with which a shell completes commands, options and run ids."""

from __future__ import annotations

import os

import click

from atoll.cli.app import command, root
from atoll.cli.main import COMPLETE
from atoll.cli.output import Output
from atoll.errors import ConfigError

_SHELLS = ("bash", "zsh", "fish")
_INSTALL = {
    "bash": 'eval "$(atoll completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(atoll completion zsh)"   # in ~/.zshrc',
    "fish": "atoll completion fish > ~/.config/fish/completions/atoll.fish",
}


@command("Set up", short_help="Print the completion script for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
def completion_command(out: Output, shell: str | None) -> None:
    """Print a shell completion script; without SHELL, for the shell in $SHELL.

    \b
    bash  eval "$(atoll completion bash)"   # in ~/.bashrc
    zsh   eval "$(atoll completion zsh)"    # in ~/.zshrc
    fish  atoll completion fish > ~/.config/fish/completions/atoll.fish
    """
    from click.shell_completion import get_completion_class

    chosen = shell or os.path.basename(os.environ.get("SHELL", ""))
    found = get_completion_class(chosen) if chosen in _SHELLS else None
    if found is None:
        raise ConfigError("cannot tell the shell from $SHELL", hint=f"name it: `atoll completion {'|'.join(_SHELLS)}`")
    script = found(root, {}, "atoll", COMPLETE).source()
    out.data({"shell": chosen, "script": script})
    out.text(script)
    if out.is_screen:
        out.say(f"to install it: {_INSTALL[chosen]}")

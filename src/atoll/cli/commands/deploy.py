"""`atoll deploy`: deploy what the launches of a backend need there."""

from __future__ import annotations

from dataclasses import asdict

import click

from atoll import registry
from atoll.cli.app import command
from atoll.cli.launch_options import complete_backend, pairs
from atoll.cli.output import Output
from atoll.errors import ConfigError
from atoll.executors.base import Deployer
from atoll.runs import config


@command("Set up", short_help="Deploy what the launches of a backend need there.")
@click.argument("backend", shell_complete=complete_backend)
@click.option("--setting", multiple=True, metavar="NAME=VALUE", help="A setting of the backend, such as `image`.")
def deploy_command(out: Output, backend: str, setting: tuple[str, ...]) -> None:
    """Deploy what the launches of BACKEND need there, in place of an earlier deployment.

    Only backends whose service runs deployed functions have one: `atoll backends` lists the backends.
    """
    own = config.load().executor_settings(backend) | pairs(setting, "--setting", as_json=True)
    executor = registry.executor(backend, **own)
    if not isinstance(executor, Deployer):
        raise ConfigError(f"`{backend}` needs no deployment: launch on it at once", reason="no_deployment")
    done = executor.deploy()
    out.data({"deployment": asdict(done)})
    out.text(f"deployed {done.message}" + (f"\n{done.url}" if done.url else ""))

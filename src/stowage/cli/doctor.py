"""``stowage doctor``: what may go wrong on this machine, with the fix for each. The checks are in ``checks.py``."""

import importlib.metadata
import os
from typing import Annotated

import typer

from stowage.cli.options import Json, with_settings
from stowage.cli.output import print_json
from stowage.config.settings import Settings
from stowage.errors import ConfigError

_Vllm = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Also check for StowageConnector in vLLM, and print the command for MODEL."),
]
_Args = Annotated[
    str,
    typer.Option(
        metavar="FLAGS",
        help="With --vllm: the flags of `vllm serve`, in quotes, with their --kv-transfer-config if there is one.",
    ),
]
_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


@with_settings(
    "kv_cache_memory",
    "host_memory",
    "disk",
    "disk_protection",
    "disk_key_file",
    "valkey",
    "valkey_password_file",
    "object",
)
def doctor(*, settings: Settings, vllm: _Vllm = None, vllm_args: _Args = "", json: Json = False) -> None:
    """Check this machine, and name the fix for each problem.

    Versions, processor, memory, the cache directory that --disk names, and whether the shared stores that --valkey and
    --object name answer. Exit status 1 when there is a problem.
    """
    from stowage.cli.checks import all_checks, machine_checks

    command = ""
    if vllm is not None:
        from stowage.cli.vllm_checks import Server, installed, vllm_checks

        server = Server(vllm, settings, vllm_args)
        checks = machine_checks(server.settings(settings)) + vllm_checks(server, os.environ)
        command = server.command(installed(importlib.metadata.version))
    elif vllm_args:
        raise ConfigError("--vllm-args are flags of a server: name its model, too, with --vllm MODEL.")
    else:
        checks = all_checks(settings)
    problems = sum(check.level == "problem" for check in checks)
    if json:
        found = [{"name": c.name, "level": c.level, "found": c.found, "fix": c.fix} for c in checks]
        print_json({"problems": problems, "checks": found} | ({"command": command} if command else {}))
    else:
        for check in checks:
            print(f"{_MARKS[check.level]}  {check.name}: {check.found}")
            if check.fix:
                print(f"         fix: {check.fix}")
        print("No problems." if not problems else f"{problems} problem{'s' * (problems > 1)}.")
        if command:
            print(f"Start vLLM so:\n  {command}")
    if problems:
        raise typer.Exit(1)

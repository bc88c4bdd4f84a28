"""``stowage doctor``: what may go wrong on this machine, with the fix for each. The checks are in ``checks.py``."""

import typer

from stowage.cli.options import Json, with_settings
from stowage.cli.output import print_json
from stowage.settings import Settings

_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


@with_settings(
    "device_kv", "host", "disk", "disk_protection", "disk_key_file", "valkey", "valkey_password_file", "object"
)
def doctor(*, settings: Settings, json: Json = False) -> None:
    """Check this machine, and name the fix for each problem.

    Versions, processor, memory, the cache directory that --disk names, and whether the shared stores that --valkey and
    --object name answer. Exit status 1 when there is a problem.
    """
    from stowage.cli.checks import all_checks

    checks = all_checks(settings)
    problems = sum(check.level == "problem" for check in checks)
    if json:
        found = [{"name": c.name, "level": c.level, "found": c.found, "fix": c.fix} for c in checks]
        print_json({"problems": problems, "checks": found})
    else:
        for check in checks:
            print(f"{_MARKS[check.level]}  {check.name}: {check.found}")
            if check.fix:
                print(f"         fix: {check.fix}")
        print("No problems." if not problems else f"{problems} problem{'s' * (problems > 1)}.")
    if problems:
        raise typer.Exit(1)

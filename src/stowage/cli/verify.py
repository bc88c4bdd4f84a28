"""``stowage verify MODEL``: show that offloading changes no answer of this model on this machine."""

import sys

import typer

from stowage.cli.options import LOG, MEMORY, Json, Model, with_settings
from stowage.cli.output import note, print_json, print_table, quiet_libraries
from stowage.settings import Settings


@with_settings("seed", *MEMORY, *LOG)
def verify(model: Model, *, settings: Settings, json: Json = False) -> None:
    """Check that offloading changes no answer of a model.

    Asks prompts of several lengths with every tier off and on, and compares tokens and log-probabilities. A prompt
    that should have come from a tier and did not fails as well. Exit status 1 without parity.

    Without --host and --disk it uses 1 GiB of memory and a temporary directory.
    """
    memory = settings.memory()  # before the import below, which takes seconds
    from stowage.engine.verify import verify as compare

    quiet_libraries()
    progress = (lambda name: note(f"  {name}")) if sys.stderr.isatty() else (lambda name: None)
    report = compare(model, memory, dtype=settings["dtype"], seed=settings["seed"], progress=progress)
    if json:
        print_json(report.as_json())
    else:
        print_table(
            f"{model} in {report.dtype}, seed {report.seed}",
            (
                "prompt",
                "tokens",
                "served by",
                "device",
                "host",
                "disk",
                "same tokens",
                "logprob diff",
                "exact",
                "verdict",
            ),
            [
                (
                    case.name,
                    str(case.prompt_tokens),
                    case.tier,
                    *(str(case.reused_tokens.get(tier, 0)) for tier in ("device", "host", "disk")),
                    "yes" if case.identical else "no",
                    f"{case.max_logprob_difference:.1e}",
                    "-" if case.exact is None else "yes" if case.exact else "no",
                    case.verdict,
                )
                for case in report.cases
                if not case.name.endswith("every tier off")
            ],
        )
        print("Parity: offloading changed no answer." if report.parity else "NO PARITY: see the verdicts above.")
    if not report.parity:
        raise typer.Exit(1)

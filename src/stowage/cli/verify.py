"""``stowage verify MODEL``: show that offloading changes no answer of this model on this machine."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.options import COMPUTE, LOG, MEMORY, Json, with_settings
from stowage.cli.output import note, print_json, print_table, progress_bars, quiet_libraries
from stowage.config.settings import Settings
from stowage.config.wording import unknown_name
from stowage.errors import ConfigError
from stowage.models.files import check_given

if TYPE_CHECKING:
    from stowage.evaluation.parity import Report
    from stowage.evaluation.same_model import SameModel
    from stowage.evaluation.tasks import Evaluation

_EVAL = "Ask the questions of a file too, with every tier off and on: accuracy and perplexity."
_FAMILIES = "Instead of MODEL: tiny random models of these families, separated by commas, or `all`."
_MEASURES = {"median": "median", "rms": "root mean square"}
_MARKS = {"ok": "ok", "too short to reuse": "-"}
_PARITY = "Parity: offloading changed no answer."
_EXACT = "Parity: offloading changed no bit of an answer."


@with_settings("seed", *MEMORY, *LOG)
def verify(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A directory, or a model's id on the hub.")] = "",
    *,
    settings: Settings,
    families: Annotated[str, typer.Option("--families", metavar="NAMES", help=_FAMILIES)] = "",
    evaluate: Annotated[Path | None, typer.Option("--eval", metavar="FILE", help=_EVAL)] = None,
    shots: Annotated[int, typer.Option(metavar="N", min=0, help="With --eval: examples before each question.")] = 5,
    questions: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --eval: ask at most so many.")] = None,
    answer_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="With --eval: longest answer.")] = 256,
    json: Json = False,
) -> None:
    """Check that offloading changes no answer of a model.

    Asks prompts of several lengths with every tier off and on, and compares tokens and log-probabilities. A prompt
    that should have come from a tier and did not fails as well. Exit status 1 without parity.

    The checkpoint is also run by Transformers: the engine must compute the same model, up to the errors of rounding
    that Transformers has. Damaged weights, which both read alike, are found in a hub cache by the hub's digests, and
    elsewhere only if they give NaN or infinity.

    With a budget for weights, all of them are in memory while every tier is off.

    Without --host-memory and --disk it uses 1 GiB of memory and a temporary directory.
    """
    memory = settings.memory()  # before the imports below, which take seconds
    if bool(model) == bool(families):
        raise ConfigError("verify checks a MODEL, or the tiny models of --families NAMES: give one of the two.")
    if families and evaluate is not None:
        raise ConfigError("--eval asks a trained model: give a MODEL instead of --families.")
    if model:
        check_given(model)
    from stowage.evaluation import tasks
    from stowage.evaluation.parity import verify as compare

    asked = tasks.questions(evaluate, shots, questions) if evaluate is not None else None
    quiet_libraries()
    watched = sys.stderr.isatty()
    computed = {name: settings[name] for name in COMPUTE}

    def progress(name: str) -> None:
        if watched:
            note(f"  {name}")

    if families:
        reports = {}
        for name, path in _written(families):
            progress(name)
            reports[name] = compare(path, memory, **computed, seed=settings["seed"])
        parity = all(report.parity for report in reports.values())
        exact = all(report.exact for report in reports.values())
        if json:
            listed = {name: report.as_json() for name, report in reports.items()}
            print_json({"parity": parity, "families": listed})
        else:
            _print_families(reports)
    else:
        report = compare(model, memory, **computed, seed=settings["seed"], progress=progress)
        found, exact = None, report.exact
        if asked is not None:
            with progress_bars(not json) as counted:
                found = tasks.evaluate(model, memory, asked, **computed, max_new_tokens=answer_tokens, progress=counted)
        parity = report.parity and (found is None or found.parity)
        if json:
            print_json(report.as_json() | {"parity": parity, "eval": found.as_json() if found else None})
        else:
            _print_report(model, report)
            if report.untried:
                tiers = ", ".join(report.untried)
                note(f"No prompt was long enough to come from {tiers}: give a smaller --block-size or --chunk-blocks.")
            if found is not None:
                _print_evaluation(str(evaluate), found)
    if not json:
        same = _EXACT if exact else _PARITY
        print(same if parity else "NO PARITY: see the verdicts above.")
    if not parity:
        raise typer.Exit(1)


def _written(families: str) -> Iterator[tuple[str, Path]]:
    """Name and directory of a tiny model of each family; the directory is there until the next is asked for."""
    from stowage.testing import tiny_models

    names = list(tiny_models.FAMILIES) if families == "all" else [name.strip() for name in families.split(",")]
    for name in names:
        if name not in tiny_models.FAMILIES:
            raise ConfigError(unknown_name(f"The family {name!r}", name, tiny_models.FAMILIES))
    for name in names:
        with tempfile.TemporaryDirectory(prefix="stowage-tiny-") as directory:
            yield name, tiny_models.write(name, Path(directory) / name)


def _print_report(model: str, report: "Report") -> None:
    tiers = list(dict.fromkeys(tier for case in report.cases for tier in case.reused_tokens))
    print_table(
        f"{model} in {report.dtype}, {report.executor} executor, seed {report.seed}",
        ("prompt", "tokens", "served by", *tiers, "same tokens", "logprob diff", "exact", "verdict"),
        [
            (
                case.name,
                str(case.prompt_tokens),
                case.tier,
                *(str(case.reused_tokens.get(tier, 0)) for tier in tiers),
                "yes" if case.identical else "no",
                f"{case.max_logprob_difference:.1e}",
                "-" if case.exact is None else "yes" if case.exact else "no",
                case.verdict,
            )
            for case in report.cases
            if not case.name.endswith("every tier off")
        ],
    )
    if report.hub_files:
        print(f"{report.hub_files} files of the checkpoint have the digests that the hub stated.")
    if report.model is None:
        print("Not compared with Transformers, which has no activations in 8 bits: verify without them, too.")
    else:
        _print_beside(report.model, report.dtype)


def _print_beside(beside: "SameModel", dtype: str) -> None:
    wide = beside.reference != dtype
    own = f"in {dtype}" if wide else "from itself, in other pieces or rounded otherwise,"
    for error in beside.errors:
        print(
            f"Log-probabilities of {error.part}s, {_MEASURES[error.measure]}: the engine is off by {error.engine:.1e} "
            f"from Transformers in {beside.reference}, and Transformers {own} by {error.own:.1e}: "
            + ("as rounding is." if error.small else f"TOO FAR (the bound is {error.bound:.1e}).")
        )
    if not beside.fits:
        print("Wrong models may pass: float32, which shows smaller errors, does not fit into memory beside the model.")
    if not beside.finite:
        print(
            f"TRANSFORMERS COMPUTES NO NUMBERS, but NaN or infinity: the checkpoint is damaged, or {dtype} is too "
            "narrow for it. Download it again, or give --dtype float32."
        )
    elif beside.same:
        print("It is the same model as Transformers'.")
    else:
        print("IT IS ANOTHER MODEL THAN TRANSFORMERS'.")


def _print_families(reports: "dict[str, Report]") -> None:
    features = list(dict.fromkeys(name for report in reports.values() for name in report.features()))

    def row(name: str, report: "Report") -> Sequence[str]:
        found = report.features()
        worst = max(case.max_logprob_difference for case in report.cases)
        verdicts = (_MARKS.get(v := found.get(f, "-"), v) for f in features)
        same = "-" if report.model is None else "ok" if report.model.same else "another model"
        return (name, report.executor, *verdicts, f"{worst:.1e}", same)

    print_table(
        "Tiny random models",
        ("family", "executor", *features, "logprob diff", "as Transformers"),
        [row(name, report) for name, report in reports.items()],
    )


def _print_evaluation(path: str, found: "Evaluation") -> None:
    print_table(
        f"{path}: {found.questions} questions",
        ("run", "right", "accuracy", "perplexity", "answers changed", "unexplained", "reused", "seconds"),
        [
            (
                run.name,
                str(run.right),
                f"{100 * run.accuracy:.1f} %",
                f"{run.perplexity:.4f}",
                str(run.changed),
                str(run.unexplained),
                f"{100 * sum(run.reused_tokens.values()) / run.prompt_tokens:.0f} %",
                f"{run.seconds:.1f}",
            )
            for run in found.runs
        ],
    )

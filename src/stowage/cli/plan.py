"""``stowage plan``: where a model's weights and KV would lie, and how fast it would be, before it is downloaded."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.options import Debug, Json, read_as
from stowage.cli.output import format_seconds, note, print_json, print_table, quiet_libraries
from stowage.config.memory import disk_total_bytes, format_size, parse_size, parse_tokens, ram_total_bytes
from stowage.errors import ConfigError, StowageError

if TYPE_CHECKING:
    from stowage.planner.machine import Machine
    from stowage.planner.shapes import Model
    from stowage.planner.solve import Budgets, Solution

_MODEL = "A directory with config.json, such a file, a Hugging Face id (weights are not needed), or a GGUF file."
_MACHINE = "A file that `stowage probe --json` printed, typical-cpu, or typical-gpu. [default: this machine]"
_BAR = 48
_FILL = {"weights": "█", "KV": "▓", "ring": "▒", "cache": "▤", "working": "▚", "free": "░"}
_PLAIN_FILL = {"weights": "#", "KV": "K", "ring": "r", "cache": "c", "working": "w", "free": "."}
_COLORS = {
    "weights": "green",
    "KV": "red",
    "ring": "yellow",
    "cache": "cyan",
    "working": "magenta",
    "free": "bright_black",
}


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    *,
    device_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory that the model computes from.")] = "75%",
    host_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Host memory besides, for weights and prefixes.")
    ] = "0",
    disk: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk, for weights and prefixes. [default: as large as the weights]"),
    ] = None,
    max_model_len: Annotated[str, typer.Option(metavar="TOKENS", help="Longest sequence, such as 32k.")] = "4k",
    max_num_seqs: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences at once.")] = 1,
    prompt_tokens: Annotated[str, typer.Option(metavar="TOKENS", help="Prompt that is predicted.")] = "1k",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Answer that is predicted.")] = 128,
    max_num_batched_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Prompt tokens in one forward.")
    ] = 1024,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="auto, bfloat16, float16 or float32.")] = "auto",
    int8_activations: Annotated[
        bool, typer.Option("--int8-activations", help="Of integer formats: activations are rounded to 8 bits.")
    ] = False,
    machine: Annotated[str | None, typer.Option(metavar="FILE", help=_MACHINE)] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an SVG there.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show where a model's weights and KV would lie, and predict its speed.

    From the config alone, without weights. Sizes as 24GiB or 30% of this machine's memory.
    """
    from stowage.models.hub import find_config, find_gguf, is_gguf
    from stowage.models.quick_import import import_transformers

    path = find_gguf(model) or Path(model).expanduser()
    if not is_gguf(path) and not (path.is_dir() and any(path.glob("*.gguf"))):
        config = find_config(model)  # what is not there is told before anything slow is imported
        path = path if path.is_dir() else config
    import_transformers()
    from stowage.planner.model import read_model
    from stowage.planner.picture import draw
    from stowage.planner.predict import Workload
    from stowage.planner.report import to_json
    from stowage.planner.solve import Placements, solve

    quiet_libraries()
    found = read_model(path, dtype)
    work = Workload(
        read_as("--max-model-len", parse_tokens, max_model_len),
        max_num_seqs,
        read_as("--prompt-tokens", parse_tokens, prompt_tokens),
        max_new_tokens,
        max_num_batched_tokens,
    )
    budgets = _budgets(found, model, device_memory, host_memory, disk)
    on = _machine(machine)
    if on.has_device and dtype == "auto":
        found = read_model(path, dtype, on_cpu=False)
    if found.formats or int8_activations:
        found = _with_formats(found, on, int8=int8_activations)
    solution = solve(found, on, budgets, work)
    if disk is None and not solution.used_bytes("disk"):  # it was there for weights, which do not need it
        solution = replace(solution, budgets=replace(budgets, disk_bytes=0))
    others = Placements(found, on, work).alternatives(budgets)
    if picture is not None:
        _write(picture, draw(solution))
    if json:
        print_json(to_json(solution, others))
    else:
        _show(solution, to_json(solution, others)["hints"])


def _budgets(model: "Model", path: str, device: str, host: str, disk: str | None) -> "Budgets":
    from stowage.planner.solve import Budgets

    memory_bytes, whole = ram_total_bytes(), Path(path).expanduser().absolute()
    return Budgets(
        read_as("--device-memory", parse_size, device, memory_bytes),
        read_as("--host-memory", parse_size, host, memory_bytes),
        model.total_bytes if disk is None else read_as("--disk", parse_size, disk, disk_total_bytes(whole)),
    )


def _with_formats(model: "Model", machine: "Machine", *, int8: bool) -> "Model":
    """With what is told of its formats; ``int8``: with their products with activations in 8 bits."""
    from stowage.executor.int8_activations import note_of
    from stowage.planner import format_speed

    told: tuple[str, ...] = ()
    if int8:
        ours = [name for name in model.format_names if format_speed.is_ours(name)]
        half = model.dtype == "bfloat16"
        told = (note_of(set(model.format_names) - set(ours), packed=bool(ours), half=half),)
        model = format_speed.with_int8(model, machine)
    slower = format_speed.notes(model.format_names, model.dtype, machine)
    return replace(model, notes=(*model.notes, *slower, *told))


def _machine(name: str | None) -> "Machine":
    """As asked for; else as measured before; else measured now."""
    from stowage.planner.machine import TYPICAL, TYPICAL_CPU, from_json
    from stowage.planner.probe import measure, remembered

    if name is not None:
        if name in TYPICAL:
            return TYPICAL[name]
        try:
            return from_json(Path(name).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The machine's file {name} cannot be read: {error}. Make one: stowage probe --json > FILE"
            ) from error
    known = remembered()
    if known is not None:
        return known
    note("Measuring this machine once; `stowage probe` shows the result.")
    try:
        return measure(say=lambda text: note(f"measuring {text}"))
    except StowageError as error:
        note(f"It could not be measured, so typical figures are used: {error}")
        return TYPICAL_CPU


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The picture cannot be written to {path}: {error}.") from error


def _show(solution: "Solution", hints: list[str]) -> None:
    from rich.console import Console

    from stowage.planner.report import rows

    model, work, predicted = solution.model, solution.workload, solution.prediction
    sparse = any(layer.experts for layer in model.layers)
    active = f", {_billions(model.active_parameters)} active" if sparse else ""
    title = f"{model.family}: {_billions(model.total_parameters)} parameters{active}, "
    title += f"{format_size(model.total_bytes)} of weights, run in {model.dtype}"
    table = [
        (row.tier, row.what, row.delivery, format_size(row.nbytes), _per_step(row.step_bytes)) for row in rows(solution)
    ]
    print_table(title, ("tier", "what", "delivery", "bytes", "per step"), table)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for line in bars(solution, plain=not _can_draw()):
        console.print(line)
    batch = "" if work.batch == 1 else f", {format_seconds(predicted.ttft_batch_s)} for {work.batch} at once"
    console.print(
        f"\npredicted  {predicted.tokens_per_s:.3g} tokens/s at a batch of {work.batch}; first token of a prompt of "
        f"{work.prompt:,} tokens after {format_seconds(predicted.ttft_s)}{batch}"
    )
    console.print(f"machine    {solution.machine.name}", markup=False)
    for hint in hints:
        console.print(f"- {hint}", markup=False)


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count:,}"


def _per_step(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else ""


def _can_draw() -> bool:
    """Whether the terminal's encoding has the characters of the bars."""
    try:
        "█▓▒▤▚░".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bars(solution: "Solution", *, plain: bool) -> list[str]:
    """One line for each memory that was given, and what its characters mean; rich markup."""
    from stowage.planner.report import segments
    from stowage.planner.solve import TIERS

    fill = _PLAIN_FILL if plain else _FILL
    lines, used = [], []
    for tier in TIERS:
        parts = segments(solution, tier)
        whole = sum(nbytes for _, nbytes in parts)
        if not whole:
            continue
        drawn, begun, done = "", 0, 0
        for kind, nbytes in parts:
            done += nbytes
            end = round(_BAR * done / whole)
            drawn += f"[{_COLORS[kind]}]{fill[kind] * (end - begun)}[/]" if end > begun else ""
            begun = end
            used += [kind] if kind not in used else []
        lines.append(f"{tier:<6} {drawn} {format_size(solution.used_bytes(tier))} of {format_size(whole)}")
    meaning = "  ".join(f"[{_COLORS[kind]}]{fill[kind]}[/] {kind}" for kind in used)
    return [*lines, f"{'':<6} {meaning}"]

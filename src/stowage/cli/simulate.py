"""``stowage simulate TRACE``: what a trace of prompts would find in given tiers. ``planner.simulate`` does the work."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stowage.cli.options import Debug, Json, read_as
from stowage.cli.output import format_seconds, note, print_json, print_table, progress_bars
from stowage.config.memory import format_size, parse_size
from stowage.config.spelling import flag_of, spelled
from stowage.errors import ConfigError

if TYPE_CHECKING:
    from stowage.simulator.pricing import Prices
    from stowage.simulator.results import Figures
    from stowage.simulator.scenario import Scenario

_SWEPT = ("host_memory", "disk", "nodes", "eviction_policy", "routing")

_SPEED_UP_MAX = 1e9
_RENAMED = {
    "block_tokens": "block_size",
    "step_tokens": "max_num_batched_tokens",
    "policy": "eviction_policy",
    "prefill_s_fixed": "prefill_fixed_ms (in seconds)",
    "load_s_fixed": "load_fixed_ms (in seconds)",
    "copy_bytes_per_s": "copy_rate",
}
_SAME = (
    *("price_node_hour", "price_disk_gib_month", "price_object_gib_month", "price_transfer_gb"),
    *("kv_bytes_per_token", "prefill_tokens_per_s", "packed_share", "nodes", "routing", "seed", "sticky_blocks"),
)
_FLAGS = {name: flag_of(_RENAMED.get(name, name)) for name in (*_RENAMED, *_SAME)}
"""How the numbers of a scenario are called here."""


def _size(metavar: str, about: str) -> Any:
    return typer.Option(metavar=metavar, help=about, rich_help_panel="Tiers of each node")


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A file of JSON lines; see docs/planning.md.")],
    *,
    host_memory: Annotated[str, _size("SIZE", "Host memory for keys and values.")] = "64GiB",
    disk: Annotated[str, _size("SIZE", "Disk; 0 for none.")] = "0",
    disk_read: Annotated[str, _size("SIZE", "Read per second.")] = "6GB",
    disk_write: Annotated[str, _size("SIZE", "Written per second.")] = "4GB",
    disk_latency_ms: Annotated[float, _size("MS", "Before a transfer begins.")] = 0.1,
    objects: Annotated[bool, typer.Option("--object", help="An object store, seen by all nodes.")] = False,
    own_objects: Annotated[bool, typer.Option("--own-objects", help="Each node has one of its own.")] = False,
    object_read: Annotated[str, _size("SIZE", "Read per second and node.")] = "2GB",
    object_write: Annotated[str, _size("SIZE", "Written per second and node.")] = "2GB",
    object_latency_ms: Annotated[float, _size("MS", "Of an answer.")] = 20.0,
    eviction_policy: Annotated[str, _size("NAME", "Which blocks leave host memory.")] = "",
    copy_rate: Annotated[str, _size("SIZE", "Copied per second between host and device.")] = "20GB",
    packed_share: Annotated[
        float, typer.Option(metavar="X", help="Bytes of a block at rest over raw ones, as compression leaves them.")
    ] = 1.0,
    nodes: Annotated[int, typer.Option(metavar="N", help="Equal engines, each with tiers of its own.")] = 1,
    routing: Annotated[str, typer.Option(metavar="NAME", help="round-robin, sticky or random.")] = "sticky",
    sticky_blocks: Annotated[
        int, typer.Option(metavar="N", help="sticky: prompts with the same first N blocks go to one node.")
    ] = 2,
    seed: Annotated[int, typer.Option(metavar="N", help="Of random routing.")] = 0,
    kv_bytes_per_token: Annotated[str, typer.Option(metavar="SIZE", help="Keys and values of a token.")] = "128KiB",
    model: Annotated[str, typer.Option(metavar="MODEL", help="A config.json, or its directory, to take that of.")] = "",
    prefill_tokens_per_s: Annotated[float, typer.Option(metavar="RATE", help="Computed by a node.")] = 20_000.0,
    prefill_fixed_ms: Annotated[float, typer.Option(metavar="MS", help="What a forward takes besides.")] = 0.0,
    load_fixed_ms: Annotated[float, typer.Option(metavar="MS", help="What a hit takes besides its bytes.")] = 0.0,
    max_num_batched_tokens: Annotated[
        int, typer.Option(metavar="N", help="Longest forward; it is stored after each. 0: a prompt at once.")
    ] = 0,
    block_size: Annotated[int, typer.Option(metavar="N", help="Tokens of a block of the trace.")] = 512,
    limit: Annotated[int, typer.Option(metavar="N", help="Replay only the first N prompts; 0: all.")] = 0,
    speed_up: Annotated[float, typer.Option(metavar="X", help="Prompts arrive so many times as fast.")] = 1.0,
    sweep: Annotated[
        str, typer.Option(metavar="NAME=A,B,...", help=f"Compare values of one of: {', '.join(_SWEPT)}.")
    ] = "",
    disk_endurance: Annotated[str, typer.Option(metavar="WRITES", help="Such as 600TB, 1.2PB or 3DWPD.")] = "",
    price_node_hour: Annotated[float, typer.Option(metavar="X", help="Of a node.")] = 0.0,
    price_disk_gib_month: Annotated[float, typer.Option(metavar="X", help="Of disk.")] = 0.0,
    price_object_gib_month: Annotated[float, typer.Option(metavar="X", help="Of objects.")] = 0.0,
    price_transfer_gb: Annotated[float, typer.Option(metavar="X", help="To and from the object store.")] = 0.0,
    jobs: Annotated[int, typer.Option(metavar="N", help="Processes; 0: one for each core.")] = 0,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the result.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Replay a trace of prompts against tiers, policies and node counts.

    Says what would be found where, how long prompts would wait, what disks would be written, and what it would cost.
    """
    from stowage.cache.policy import POLICY_DEFAULT
    from stowage.simulator.pricing import Prices, parse_endurance
    from stowage.simulator.results import simulate as simulate_all
    from stowage.simulator.scenario import Link, Scenario
    from stowage.simulator.trace import read_trace

    given = {
        "host_memory": host_memory,
        "disk": disk,
        "disk_read": disk_read,
        "disk_write": disk_write,
        "object_read": object_read,
        "object_write": object_write,
        "copy_rate": copy_rate,
        "kv_bytes_per_token": kv_bytes_per_token,
    }
    size = {name: read_as(flag_of(name), parse_size, text) for name, text in given.items()}
    with _flags_named():
        scenario = Scenario(
            host_bytes=size["host_memory"],
            kv_bytes_per_token=_token_bytes(model) if model else size["kv_bytes_per_token"],
            block_tokens=block_size,
            disk_bytes=size["disk"],
            objects=objects or own_objects,
            shared_objects=not own_objects,
            nodes=nodes,
            routing=routing,
            sticky_blocks=sticky_blocks,
            seed=seed,
            policy=eviction_policy or POLICY_DEFAULT,
            prefill_tokens_per_s=prefill_tokens_per_s,
            prefill_s_fixed=prefill_fixed_ms / 1000,
            load_s_fixed=load_fixed_ms / 1000,
            step_tokens=max_num_batched_tokens,
            copy_bytes_per_s=size["copy_rate"],
            packed_share=packed_share,
            disk=read_as("--disk-...", Link, size["disk_read"], size["disk_write"], disk_latency_ms / 1000),
            object=read_as(
                "--object-...", Link, size["object_read"], size["object_write"], object_latency_ms / 1000, 16
            ),
        )
        swept, values = _sweep(sweep)
        points = _swept(scenario, swept, values, sweep) if sweep else [("", scenario)]
        prices = Prices(price_node_hour, price_disk_gib_month, price_object_gib_month, price_transfer_gb)
        endurance = parse_endurance(disk_endurance) if disk_endurance else None
    if limit < 0 or jobs < 0 or not 1 / _SPEED_UP_MAX <= speed_up <= _SPEED_UP_MAX:
        raise ConfigError(
            f"--limit and --jobs must be 0 or more, --speed-up from {1 / _SPEED_UP_MAX:g} to {_SPEED_UP_MAX:g}."
        )
    if picture is not None and not picture.absolute().parent.is_dir():
        raise ConfigError(f"There is no directory {picture.absolute().parent} to draw a picture in.")
    with progress_bars() as progress:
        prompts = read_trace(trace, block_size, limit, partial(progress, "read"))
    if speed_up != 1:
        prompts = prompts.faster(speed_up)
    with progress_bars() as progress:
        found = simulate_all(
            prompts,
            [scenario for _, scenario in points],
            prices=prices,
            endurance=endurance,
            jobs=jobs or os.cpu_count() or 1,
            progress=partial(progress, "simulate"),
        )
    labels = [label for label, _ in points]
    if picture is not None:
        _draw(picture, trace, labels, found)
    if json:
        print_json(_as_json(trace, points, swept, found))
    else:
        _print(trace, points, found, prices)


@contextmanager
def _flags_named() -> Iterator[None]:
    """What a scenario refuses is told under the names of flags."""
    try:
        yield
    except ConfigError as error:
        error.args = (spelled(str(error), _FLAGS),)
        raise


def _token_bytes(model: str) -> int:
    """Bytes of keys and values of one token, of a model of which all layers keep all tokens."""
    from stowage.planner.model import read_model

    found = read_model(model, "auto")
    if any(one.window or one.recurrent for one in found.kept):
        raise ConfigError(
            f"The model {model} keeps windows or states, and the simulation knows only full attention. Give what a "
            "token takes on the whole with --kv-bytes-per-token."
        )
    return found.token_bytes()


def _swept(scenario: "Scenario", name: str, values: str, text: str) -> list[tuple[str, "Scenario"]]:
    """The scenario with each of the values, and what to call it."""
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if name not in _SWEPT or not listed:
        raise ConfigError(
            f"The sweep {text!r} is not understood. Write one of {', '.join(_SWEPT)}, and values: "
            "host_memory=16GiB,64GiB."
        )
    if name == "nodes" and not all(value.isdecimal() for value in listed):
        raise ConfigError(f"The sweep {text!r} is not understood: nodes are whole numbers.")
    return [(value, _with(scenario, name, value)) for value in listed]


def _sweep(text: str) -> tuple[str, str]:
    """Which setting is swept, and the values."""
    name, _, values = text.partition("=")
    return name.replace("-", "_"), values


def _with(scenario: "Scenario", name: str, value: str) -> "Scenario":
    if name == "host_memory":
        return replace(scenario, host_bytes=read_as(f"--sweep {name}", parse_size, value))
    if name == "disk":
        return replace(scenario, disk_bytes=read_as(f"--sweep {name}", parse_size, value))
    if name == "nodes":
        return replace(scenario, nodes=int(value))
    return replace(scenario, policy=value) if name == "eviction_policy" else replace(scenario, routing=value)


def _draw(path: Path, trace: Path, labels: list[str], found: list["Figures"]) -> None:
    from stowage.simulator.chart import draw

    title = f"{trace.name}: {found[0].requests:,} prompts"
    try:
        path.write_text(draw(title, list(zip(labels, found, strict=True))), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The picture {path} cannot be written: {error.strerror}.") from error
    note(f"picture: {path}")


def _as_json(trace: Path, points: list[tuple[str, "Scenario"]], swept: str, found: list["Figures"]) -> dict[str, Any]:
    results = [
        {"value": label or None, "scenario": asdict(scenario), **asdict(figures)}
        for (label, scenario), figures in zip(points, found, strict=True)
    ]
    return {"trace": str(trace), "sweep": swept or None, "results": results}


def _print(trace: Path, points: list[tuple[str, "Scenario"]], found: list["Figures"], prices: "Prices") -> None:
    first, scenario = found[0], points[0][1]
    tiers = list(dict.fromkeys(name for _, one in points for name in one.tier_names))
    nodes = "1 node" if scenario.nodes == 1 else f"{scenario.nodes} nodes"
    print(
        f"{trace.name}: {first.requests:,} prompts, {first.input_tokens:,} input tokens in "
        f"{first.duration_s / 3600:.2f} h; {nodes} x {scenario.prefill_tokens_per_s:,.0f} tokens/s, "
        f"{format_size(scenario.kv_bytes_per_token)} per token"
    )
    columns = ["", *(f"{name} hits" for name in tiers), "all hits", "TTFT p50", "p95", "p99", "busy"]
    columns += ["read below", "written below"] if len(tiers) > 1 else []
    columns += ["disk written/day"] if "disk" in tiers else []
    columns += ["disk lasts"] if any(figures.disk_years is not None for figures in found) else []
    columns += ["cost/M tokens", "if busy"] if prices.any else []
    rows = [_row(label, figures, tiers, columns) for (label, _), figures in zip(points, found, strict=True)]
    print_table("Share of input tokens that need not be computed, by tier", columns, rows)
    for (label, _), figures in zip(points, found, strict=True):
        if figures.busy_max > 0.95:
            what = f"With {label} a" if label else "A"
            share = f"{100 * figures.busy_max:.0f} %"
            note(f"{what} node computes {share} of the time: prompts pile up, and TTFT is their queue.")


def _row(label: str, figures: "Figures", tiers: list[str], columns: list[str]) -> list[str]:
    waits = figures.ttft_s
    values = {name + " hits": f"{100 * figures.hit_rate.get(name, 0.0):.2f} %" for name in [*tiers, "all"]} | {
        "": label or "-",
        "TTFT p50": format_seconds(waits.p50),
        "p95": format_seconds(waits.p95),
        "p99": format_seconds(waits.p99),
        "busy": f"{100 * figures.busy:.0f} %",
        "read below": format_size(sum(figures.read_bytes.values())),
        "written below": format_size(sum(figures.written_bytes.values())),
        "disk written/day": _or_dash(figures.disk_written_bytes_per_day, lambda value: format_size(int(value))),
        "disk lasts": _or_dash(figures.disk_years, lambda value: f"{value:.1f} years"),
        "cost/M tokens": _or_dash(figures.cost_per_million_tokens, lambda value: f"{value:.4f}"),
        "if busy": _or_dash(figures.cost_busy_per_million_tokens, lambda value: f"{value:.4f}"),
    }
    return [values[column] for column in columns]


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)

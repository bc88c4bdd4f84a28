"""``stowage config show``: every setting, its value, and where it came from."""

from dataclasses import fields

from stowage.cli.options import GRAPHS, LOG, MEMORY, SAMPLING, SERVER, Json, with_settings
from stowage.cli.output import print_json
from stowage.cli.run import sampling_of
from stowage.config.memory import AUTO, format_size
from stowage.config.settings import SETTINGS, Settings


@with_settings(*MEMORY, *GRAPHS, *SAMPLING, *SERVER, *LOG)
def show(*, settings: Settings, json: Json = False) -> None:
    """Print every setting and where it came from.

    Takes the flags of `run` and `serve`, so that it shows what those would use with the same flags.
    """
    from stowage.server.limits import Limits

    memory = settings.memory()  # refuse here what `run` and `serve` would refuse
    sampling_of(settings)
    Limits(**{item.name: settings[item.name] for item in fields(Limits)})
    if json:
        shown = {name: SETTINGS[name].shown(item.value) for name, item in settings.values.items()}
        print_json({name: {"value": shown[name], "source": item.source} for name, item in settings.values.items()})
        return
    bytes_of = {
        name: getattr(memory, f"{name}_bytes") for name in ("device_memory", "kv_cache_memory", "host_memory", "disk")
    }
    rows = []
    for name, item in settings.values.items():
        size = f" = {format_size(bytes_of[name])}" if str(item.value).endswith(("%", AUTO)) and name in bytes_of else ""
        rows.append((name, _written(SETTINGS[name].shown(item.value)) + size, item.source))
    for name, value, source in rows:
        print(f"{name:<23}{value:<28} {source}")


def _written(value: object) -> str:
    if value in (None, "", (), {}):
        return "-"
    if isinstance(value, dict):
        return ",".join(f"{name}={number}" for name, number in value.items())
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)

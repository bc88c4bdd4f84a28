"""``stowage serve MODEL``: an OpenAI-compatible server over one engine, until it is told to stop."""

import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.options import GRAPHS, LOG, MEMORY, SERVER, ChatTemplate, Json, Model, with_settings
from stowage.cli.output import complain, note, print_json, quiet_libraries
from stowage.cli.run import import_quickly, open_engine
from stowage.config.settings import SERVER_GROUP, Settings
from stowage.errors import ConfigError
from stowage.extras import require
from stowage.models.files import check_given
from stowage.models.pooling import is_embedding_model

if TYPE_CHECKING:
    from stowage.server.auth import ApiKeys
    from stowage.server.limits import Limits
    from stowage.server.listen import ListenAddress
    from stowage.server.served_model import ServedEmbedder
    from stowage.server.supervisor import EngineSupervisor

FAILED = 70
"""The status after a failure of the engine: not 2, which is wrong use, so that supervisors start the server anew."""


@with_settings(*SERVER, *MEMORY, *GRAPHS, *LOG)
def serve(
    model: Model,
    *,
    settings: Settings,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let other machines ask without an API key.", rich_help_panel=SERVER_GROUP),
    ] = False,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=DIR", help="A LoRA adapter, served as model NAME; repeatable."),
    ] = None,
    chat_template: ChatTemplate = None,
    embedding_model: Annotated[
        str, typer.Option("--embedding-model", metavar="DIR", help="A model for /v1/embeddings, beside MODEL.")
    ] = "",
    json: Json = False,
) -> None:
    """Answer OpenAI clients over HTTP. SIGTERM, SIGHUP or Ctrl-C ends it in order, a second one at once.

    A checkpoint of sentence-transformers is served at /v1/embeddings.
    """
    require("server", "The server")
    settings.memory()  # what is wrong is told before the model is loaded
    from stowage.server import auth, listen
    from stowage.server.limits import Limits
    from stowage.server.served_model import ServedModel

    limits = Limits(**{item.name: settings[item.name] for item in fields(Limits)})
    path = settings["api_key_file"]
    keys = auth.load(Path(path).expanduser().absolute() if path else None, os.environ)
    address = listen.bind(settings["host"], settings["port"])
    if not address.loopback and not len(keys) and not insecure:
        raise ConfigError(
            f"--host {settings['host']} can be reached from other machines, and there is no API key: anybody could use "
            "it. Give --api-key-file FILE (or STOWAGE_API_KEYS), or --host 127.0.0.1. --insecure serves everybody."
        )
    name = settings["served_model_name"] or _name_of(model)
    pages = settings["allowed_origins"]
    if is_embedding_model(Path(model).expanduser()):
        _serve_embeddings(_embedder(model, name, settings), pages, address, limits, keys, json=json)
        return
    parsers = settings["tool_call_parser"], settings["reasoning_parser"]
    adapters = _named(adapter or [], name)
    check_given(model, adapters)
    beside = _embedder(embedding_model, _name_of(embedding_model), settings) if embedding_model else None
    served = ServedModel(name, *parsers, pages, beside)
    from stowage.server.serve import serve as run
    from stowage.server.supervisor import EngineSupervisor

    with EngineSupervisor(
        partial(open_engine, model, settings, adapters, chat_template), limits.max_reopens
    ) as supervisor:
        ready = partial(_tell, supervisor, name, address, keys, json=json)
        if not run(supervisor, served, address, limits, keys, ready):
            complain("The engine has failed; the log has the reason. The server ends, so that it can be started anew.")
            raise typer.Exit(FAILED)
        note("Stopping: writing what is held to the tiers below ..." if settings["disk"] else "Stopping.")


def _embedder(model: str, name: str, settings: Settings) -> "ServedEmbedder":
    if settings.memory().places_weights:
        raise ConfigError(
            f"{model} makes vectors of texts and is in memory as a whole: leave --device-memory and --weights out."
        )
    import_quickly(settings["device"])
    from stowage.engine.embedder import Embedder
    from stowage.server.served_model import ServedEmbedder

    quiet_libraries()
    return ServedEmbedder(name, Embedder(model, settings["dtype"]))


def _serve_embeddings(
    served: "ServedEmbedder",
    pages: tuple[str, ...],
    address: "ListenAddress",
    limits: "Limits",
    keys: "ApiKeys",
    *,
    json: bool,
) -> None:
    from stowage.server.serve import serve_embeddings

    made = {"embedding_dimension": served.embedder.dimension, "max_model_len": served.embedder.tokens_max}

    def ready() -> None:
        if json:
            print_json({"model": served.name, "url": address.url, **made})
            return
        numbers, tokens = made.values()
        note(f"Serving {served.name} at {address.url}/v1 (vectors of {numbers} numbers, of up to {tokens:,} tokens).")

    serve_embeddings(served, pages, address, limits, keys, ready)


def _named(given: list[str], base: str) -> dict[str, str]:
    """Adapters by the name that they are served under. Raises ConfigError."""
    found: dict[str, str] = {}
    for one in given:
        name, _, directory = one.partition("=")
        if not name.strip() or not directory:
            raise ConfigError(f"--adapter {one} does not say under which name it is served: write --adapter NAME=DIR.")
        if name in found or name == base:
            raise ConfigError(f"--adapter {one}: the name {name!r} is taken already; give each model one of its own.")
        found[name] = directory
    return found


def _name_of(model: str) -> str:
    """The hub's id, or the last part of a directory's or a file's name: where it lies is nobody's business."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.name  # of a link in the hub's cache: what it leads to is called after its content
    return path.resolve().name if path.is_dir() else model


def _tell(supervisor: "EngineSupervisor", name: str, address: "ListenAddress", keys: "ApiKeys", *, json: bool) -> None:
    """Says what is served, where, and what lies in which memory."""
    from stowage.engine.placement_report import placement

    engine = supervisor.engine
    assert engine is not None, "the first one"
    lines = placement(engine)
    if json:
        held = [{"tier": p.tier, "what": p.what, "capacity_bytes": p.capacity_bytes, "tokens": p.tokens} for p in lines]
        print_json({"model": name, "url": address.url, "max_model_len": engine.sequence_tokens_max, "placement": held})
        return
    for line in lines:
        note(str(line))
    who = f"{len(keys)} API keys" if len(keys) else "no API key is needed"
    note(f"Serving {name} at {address.url}/v1 ({who}; up to {engine.sequence_tokens_max:,} tokens per sequence).")
    if not len(keys) and not address.loopback:
        note("Warning: --insecure: every machine that reaches this address can use the model.")

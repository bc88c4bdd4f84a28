"""``stowage tiny FAMILY DIR``: write a random checkpoint with a tokenizer, of any size."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from stowage.cli.options import Debug, Json
from stowage.cli.output import note, print_json, quiet_libraries
from stowage.config.disk_room import why_not_written
from stowage.errors import ConfigError

_FAMILIES = "llama, qwen3, gemma3, llama4, deepseek_v3, qwen3_next, nemotron_h, or another of docs/reference/models.md."


def tiny(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help=_FAMILIES)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it: new or empty.")],
    *,
    hidden: Annotated[int, typer.Option(metavar="N", help="Hidden size.")] = 64,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.")] = 4,
    vocab: Annotated[int, typer.Option(metavar="N", help="Vocabulary size.")] = 512,
    heads: Annotated[int, typer.Option(metavar="N", help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(metavar="N", help="Key-value heads.")] = 2,
    context_tokens: Annotated[int, typer.Option(metavar="N", help="Longest context.")] = 4096,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random weights.")] = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a random checkpoint of a model family.

    With a tokenizer and a chat template; small by default, of any size on request.
    """
    from safetensors import SafetensorError

    from stowage.testing import tiny_models

    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"{dtype!r} is not float32, bfloat16 or float16", param_hint="--dtype")
    size = tiny_models.TinySize(
        hidden=hidden, layers=layers, vocab=vocab, heads=heads, kv_heads=kv_heads, context_tokens=context_tokens
    )
    quiet_libraries()
    found = directory.exists()
    try:
        path = tiny_models.write(family, directory, size, seed=seed, dtype=dtype)
    except (OSError, SafetensorError) as error:
        if not found:
            shutil.rmtree(directory, ignore_errors=True)
        why = why_not_written(directory, error) if isinstance(error, OSError) else error
        raise ConfigError(
            f"{directory} cannot be written: {why}. Give a directory that can be, on a disk with room."
        ) from error
    if json:
        print_json({"family": family, "directory": str(path)})
    else:
        note(f"Wrote a random {family} model to {path}. Try: stowage run {path} --prompt hello")

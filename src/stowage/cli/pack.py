"""``stowage pack MODEL DIR``: write a checkpoint again with its weights in fewer bits, and say what that costs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.options import Json, Model, with_settings
from stowage.cli.output import note, print_json, print_table, progress_bars, quiet_libraries
from stowage.config.memory import format_size
from stowage.config.settings import Settings
from stowage.errors import ConfigError
from stowage.models.files import check_given

if TYPE_CHECKING:
    from stowage.evaluation.calibration import Fitted
    from stowage.evaluation.pack import Packed
    from stowage.evaluation.perplexity import Perplexity

_FORM_USUAL = "int8"
_FORM = (
    "int8; int4 in groups with a scale each; q4_k and mxfp4: as in GGUF files; mixed: for each matrix what it needs of "
    f"8, 5 and 4 bits. [default: {_FORM_USUAL}]"
)
_BITS_USUAL = 5.0
_BITS = f"mixed: bits of a layer's weight on average, with its share of scales. [default: {_BITS_USUAL}]"
_GROUP_USUAL = 32
_GROUP = f"int4: weights that share a scale; 32, 64 or 128. [default: {_GROUP_USUAL}]"
_LOSSLESS = "The same weights, to the bit, in fewer bytes. Nothing is scored."
_KEEP = "Keep the packed checkpoint though its perplexity is more than 5 % higher."
_EVAL = "Plain text that perplexity is measured on. [default: 39 kB of prose that comes with Stowage]"


@with_settings("device_memory", "host_memory")
def pack(
    model: Model,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it: a new directory.")],
    *,
    settings: Settings,
    weights: Annotated[str | None, typer.Option("--weights", metavar="FORM", help=_FORM)] = None,
    group: Annotated[int | None, typer.Option(metavar="N", help=_GROUP)] = None,
    bits: Annotated[float | None, typer.Option(metavar="X", help=_BITS)] = None,
    text: Annotated[Path | None, typer.Option("--eval", metavar="FILE", help=_EVAL)] = None,
    eval_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens that are scored; 0: none.")] = 4096,
    force: Annotated[bool, typer.Option("--force", help=_KEEP)] = False,
    lossless: Annotated[bool, typer.Option("--lossless", help=_LOSSLESS)] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint with its weights in 8, 5 or 4 bits, or without loss.

    The directory loads like any other checkpoint, with fewer bytes to read and to keep. It is another model, whose
    answers differ: perplexity is measured with both, under --device-memory and --host-memory if they are
    given, and a checkpoint that is more than 5 % worse is not kept unless --force says so. In fewer than 8
    bits matrices are fitted to what they read in a text that comes with Stowage and, before it, in the second half of
    --eval, which is not scored then. With --lossless it is the same model, to the bit, in about 0.67 of its bytes.
    """
    memory = settings.memory()
    check_given(model)
    if lossless and weights is not None:
        raise ConfigError(
            f"--lossless keeps all bits of the weights, and --weights {weights} does not: give one of them."
        )
    weights = _FORM_USUAL if weights is None else weights
    if bits is not None and weights != "mixed":
        raise ConfigError(
            f"--bits {bits:g} is for --weights mixed, and not for {weights}: give that, or leave --bits out."
        )
    if group is not None and weights != "int4":
        raise ConfigError(f"--group {group} is for --weights int4, and not for {weights}: leave --group out.")
    if eval_tokens == 1:
        raise ConfigError("--eval-tokens 1 scores nothing, as no token comes before it: give 2 or more, or 0.")
    given = None if text is None else _read(text)
    from stowage.demo import corpus
    from stowage.evaluation import pack, perplexity

    scored, name = (corpus.heldout_text(), "held-out text") if given is None else (given, str(text))
    quiet_libraries()
    if lossless:
        with progress_bars(not json) as progress:
            same = pack.pack_lossless(model, directory, progress)
        if json:
            print_json(same.as_json() | {"perplexity": None})
        else:
            _print(same, None)
        return
    reads, limits = pack.reads_text(model), pack.without_tiers(memory)
    if weights == pack.MIXED and not reads:
        raise ConfigError(
            f"{model} has no tokenizer, so its matrices cannot be measured on text: pack it as int8 or int4."
        )
    if eval_tokens and not reads:
        if text is not None:
            raise ConfigError(f"{model} has no tokenizer, so {text} cannot be scored: leave --eval out.")
        note(f"{model} has no tokenizer, so its perplexity is not measured.")
        eval_tokens = 0
    found: Perplexity | None = None
    before = 0.0
    fit: Callable[[Path], Fitted] | None = None
    size = (_BITS_USUAL if bits is None else bits) if weights == pack.MIXED else None
    with progress_bars(not json) as progress:
        if reads and weights != "int8":
            from stowage.evaluation import calibration

            read = corpus.calibration_text()
            if given is not None:  # one half is scored, and what is fitted to the other comes first
                scored, read = given[: len(given) // 2], f"{given[len(given) // 2 :]}\n\n{read}"
            form = pack.form_name(weights, group or _GROUP_USUAL) if size is None else size
            fit = lambda part: calibration.fit(model, limits, read, form, part, progress)  # noqa: E731

        if eval_tokens:
            perplexity.refuse_short(model, scored, name, eval_tokens)

        def measured(what: str, one: str) -> tuple[float, int]:
            return perplexity.measure(one, limits, scored, name, eval_tokens, partial(progress, what))

        def begin() -> None:  # a budget that cannot work is told before anything is packed
            nonlocal before
            if eval_tokens:
                before, _ = measured("as it was", model)

        def judge(part: Path) -> None:
            nonlocal found
            if eval_tokens:
                after, tokens = measured("packed", str(part))
                found = perplexity.Perplexity(name, tokens, before, after)
                if not force:
                    perplexity.refuse_lossy(directory, found)

        written = pack.pack(model, directory, weights, group or _GROUP_USUAL, progress, fit, judge, begin, size)
    if json:
        print_json(written.as_json() | {"perplexity": found.as_json() if found else None})
    else:
        _print(written, found)


def _read(text: Path) -> str:
    """The text to score, read before the slow imports. Raises ConfigError."""
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--eval {text} cannot be read ({error}): give a file of plain text.") from error


def _print(written: "Packed", found: "Perplexity | None") -> None:
    forms = ", ".join(f"{count} tensors in {form}" for form, count in sorted(written.tensors.items()))
    share = written.bytes_after / written.bytes_before
    if written.bits:
        forms += f", {written.bits:.2f} bits a weight of layers"
    rows = [("weights", format_size(written.bytes_before), format_size(written.bytes_after), f"{share:.1%}")]
    if found is not None:
        rows.append(
            ("perplexity", f"{found.before:.4f}", f"{found.after:.4f}", f"{found.after / found.before - 1:+.2%}")
        )
    print_table(f"{written.directory}: {forms}; {written.kept} kept", ("", "as it was", "packed", ""), rows)
    if found is not None:
        note(f"Perplexity per token, of {found.tokens} tokens of {found.text}.")
    note(f"Try: stowage run {written.directory} --prompt hello")

"""``stowage run MODEL``: answer prompts, under the stated budgets, reusing what the tiers hold."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.metrics_file import kept_up
from stowage.cli.options import (
    CHAT_GROUP,
    GRAPHS,
    LOG,
    MEMORY,
    SAMPLING,
    Adapter,
    ChatTemplate,
    Json,
    Model,
    with_settings,
)
from stowage.cli.output import completion_json, note, print_json, print_text, quiet_libraries, summary_line
from stowage.cli.talk import converse, stream_answer
from stowage.config.settings import LOG_GROUP, Settings
from stowage.errors import ConfigError, RequestError
from stowage.models.files import check_given

if TYPE_CHECKING:
    from stowage.engine.engine import Engine, Prompt
    from stowage.engine.sampling_params import SamplingParams

_TEXT_FILE = "Give a file of plain text, or - for standard input."


@with_settings(*SAMPLING, *MEMORY, *GRAPHS, *LOG)
def run(
    model: Model,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="A prompt, as with --prompt.")] = None,
    *,
    settings: Settings,
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", metavar="TEXT", help="What to answer; repeatable.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option("--prompt-file", metavar="FILE", help="A prompt in a file (-: stdin); repeatable."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw/--chat", help="Give the text as it is, or (default) in a chat template.", rich_help_panel=CHAT_GROUP
        ),
    ] = False,
    chat_template: ChatTemplate = None,
    adapter: Adapter = "",
    metrics_file: Annotated[
        Path | None,
        typer.Option("--metrics-file", metavar="FILE", help="Keep Prometheus metrics here.", rich_help_panel=LOG_GROUP),
    ] = None,
    json: Json = False,
) -> None:
    """Answer prompts, on stdout; without one, talk in the terminal.

    A model with a chat template gets each prompt as a message; --raw gives it the text alone.
    """
    settings.memory()  # wrong budgets are told before prompts are read and the model is loaded
    given = [*([] if text is None else [text]), *(prompt or [])]
    texts = [*given, *map(read_prompt, prompt_file or [])]
    if not texts and (raw or not _in_a_terminal()):
        raise RequestError(
            "There is no prompt. Give --prompt TEXT or --prompt-file FILE (- for stdin); `stowage chat MODEL` talks."
        )
    if raw and chat_template is not None:
        raise ConfigError("--raw leaves the chat template out, and --chat-template gives one: leave out one of them.")
    params = sampling_of(settings)
    with opened(model, settings, adapter, chat_template) as engine, kept_up(metrics_file, engine.metrics):
        if not texts:
            converse(engine, params, json=json)
            return
        prompts: list[Prompt] = [*texts] if raw else as_messages(engine, texts)
        if json:
            for completion in engine.generate(prompts, params):
                print_json(completion_json(completion))
        elif len(prompts) == 1:
            stream_answer(engine, prompts[0], params)
        else:
            _print_answers(engine, prompts, params)


def sampling_of(settings: Settings) -> "SamplingParams":
    """What is wrong with it is told before anything slow is imported."""
    from stowage.engine.sampling_params import SamplingParams

    return SamplingParams(**settings.sampling())


def _in_a_terminal() -> bool:
    return sys.stdin.isatty()


@contextmanager
def opened(
    model: str, settings: Settings, adapter: str | dict[str, str], chat_template: Path | None
) -> Iterator["Engine"]:
    """The engine for ``model`` and its adapters, closed at the end."""
    engine = open_engine(model, settings, adapter, chat_template)
    # What is here now stays: looking at it for cycles again and again would stop every thread for 0.16 s each time.
    gc.freeze()
    try:
        yield engine
    finally:
        gc.unfreeze()
        engine.close()


def as_messages(engine: "Engine", texts: "list[str]") -> "list[Prompt]":
    """Each text as what a user says, where the model has a chat template; else as it is."""
    if not getattr(engine.tokenizer, "chat_template", None):
        note("This model has no chat template, so each text is given as it is; --chat-template FILE gives it one.")
        return [*texts]
    note("Each prompt is given as a message, in the model's chat template; --raw gives the text as it is.")
    return [[{"role": "user", "content": text}] for text in texts]


def open_engine(model: str, settings: Settings, adapter: str | dict[str, str], chat_template: Path | None) -> "Engine":
    """The engine for ``model`` and its adapters; tells stderr. Raises ConfigError for an unreadable template."""
    memory = settings.memory()
    template = _template(chat_template) if chat_template is not None else ""
    check_given(model, adapter)
    if sys.stderr.isatty():
        note(f"Loading {model} ...")
    import_quickly(settings["device"])
    from stowage.engine.engine import Engine

    quiet_libraries()
    engine = Engine(
        model,
        memory,
        dtype=settings["dtype"],
        device=settings["device"],
        deterministic=settings["deterministic"],
        batch_dependent=settings["batch_dependent"],
        int8_activations=settings["int8_activations"],
        cuda_graphs=settings["cuda_graphs"],
        adapter=adapter,
    )
    if template:
        _use_template(engine, template)
    if engine.int8_note:
        note(engine.int8_note)
    if engine.executor == "fallback":
        note(f"{engine.model.config.model_type} models run one sequence at a time, with Transformers' own attention.")
    if not engine.exact and not settings["batch_dependent"]:
        note(f"The last bits of answers may depend on what is computed beside them: {engine.exactness_note}")
    elif engine.exactness_note and engine.exact:
        note(f"Exact answers are computed in small pieces here, which is slower: {engine.exactness_note}")
    return engine


def import_quickly(device: str) -> None:
    """What an engine on ``device`` needs of torch and Transformers."""
    from stowage.models.quick_import import begin_import, import_transformers

    gc.disable()  # nothing that is imported is ever garbage
    try:
        begin_import()
        if device in ("", "cpu"):
            import_transformers()
        import stowage.engine.engine  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def _use_template(engine: "Engine", template: str) -> None:
    """Instead of the model's own; tried with one message. Raises ConfigError, and then ``engine`` is closed."""
    from jinja2 import TemplateError

    try:
        if engine.tokenizer is None:
            raise ConfigError("--chat-template needs a tokenizer, and this model has none.")
        engine.tokenizer.chat_template = template
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except (TemplateError, ArithmeticError, TypeError, ValueError, KeyError) as error:
        engine.close()
        raise ConfigError(
            f"The chat template cannot be used: {error}. Leave --chat-template out, or mend it."
        ) from error
    except ConfigError:
        engine.close()
        raise


def _template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {path} cannot be read: {error}. Give a text file.") from error
    if not text.strip():
        raise ConfigError(f"The chat template {path} is empty. Leave --chat-template out to use the model's own.")
    return text


def read_prompt(path: Path) -> str:
    """The text in ``path``, unchanged. Raises RequestError."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise RequestError(f"The prompt file {path} cannot be read: {error.strerror}. {_TEXT_FILE}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"The prompt file {path} is not UTF-8 text (byte {error.start}). {_TEXT_FILE}") from error


def _print_answers(engine: "Engine", prompts: "list[Prompt]", params: "SamplingParams") -> None:
    for number, completion in enumerate(engine.generate(prompts, params), start=1):
        note(f"--- prompt {number} of {len(prompts)}")
        print_text(completion.text + "\n")
        note(summary_line(completion))

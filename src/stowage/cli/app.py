"""Puts the commands together, and turns every StowageError, and what the system refuses, into one paragraph on stderr
and exit status 2."""

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import stowage.cli.chat
import stowage.cli.config_show
import stowage.cli.doctor
import stowage.cli.key
import stowage.cli.pack
import stowage.cli.plan
import stowage.cli.probe
import stowage.cli.run
import stowage.cli.scrub
import stowage.cli.serve
import stowage.cli.simulate
import stowage.cli.stats
import stowage.cli.tiny
import stowage.cli.top
import stowage.cli.verify
from stowage.cli.command import Command
from stowage.cli.options import wants_traceback
from stowage.cli.output import complain
from stowage.errors import StowageError
from stowage.extras import absent

_NO_THREAD = (
    "The system starts no more threads: this user or container has reached its limit of them, or memory is out. End "
    "other processes, or raise the limit: ulimit -u, TasksMax in a unit, pids_limit of a container."
)


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StowageError as error:
            if wants_traceback(ctx):
                raise
            complain(str(error))
            raise typer.Exit(2) from error
        except ModuleNotFoundError as error:
            told = absent(error)
            if told is None or wants_traceback(ctx):
                raise
            complain(str(told))
            raise typer.Exit(2) from error
        except (OSError, RuntimeError) as error:
            text = _told(error)
            if not text or wants_traceback(ctx):
                raise
            complain(text)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(130) from interrupt


def _told(error: OSError | RuntimeError) -> str:
    """What to tell of a file that no code of ours looked after, or of threads; empty: nothing, it is a bug."""
    if not isinstance(error, OSError):
        return _NO_THREAD if str(error) == "can't start new thread" else ""
    if error.errno == errno.ENAMETOOLONG:
        return f"{error.filename}: no file system takes names of this length. Give a shorter one."
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename:
        return f"{error.filename}: {error.strerror}. Give this user the right to read it, or run as its owner."
    if error.errno == errno.ENOENT and error.filename is None:  # of getcwd
        return "The current directory does not exist any more: change to another one."
    return ""


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help costs 0.1 s, and `--help` is to answer within 0.3 s
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models under hard memory budgets; prefixes survive in host memory and on disk.",
)
config = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at settings.")
app.add_typer(config, name="config")

keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make and change a key file for disk_protection.")
app.add_typer(keys, name="key")

app.command("run", cls=Command)(stowage.cli.run.run)
app.command("chat", cls=Command)(stowage.cli.chat.chat)
app.command("serve", cls=Command)(stowage.cli.serve.serve)
app.command("top", cls=Command)(stowage.cli.top.top)
app.command("verify", cls=Command)(stowage.cli.verify.verify)
app.command("stats", cls=Command)(stowage.cli.stats.stats)
app.command("scrub", cls=Command)(stowage.cli.scrub.scrub)
app.command("doctor", cls=Command)(stowage.cli.doctor.doctor)
app.command("simulate", cls=Command)(stowage.cli.simulate.simulate)
app.command("plan", cls=Command)(stowage.cli.plan.plan)
app.command("probe", cls=Command)(stowage.cli.probe.probe)
app.command("pack", cls=Command)(stowage.cli.pack.pack)
app.command("tiny", cls=Command)(stowage.cli.tiny.tiny)
keys.command("new")(stowage.cli.key.new)
keys.command("rotate")(stowage.cli.key.rotate)
keys.command("drop")(stowage.cli.key.drop)
keys.command("show")(stowage.cli.key.show)
config.command("show", cls=Command)(stowage.cli.config_show.show)


def _print_version(wanted: bool) -> None:
    if wanted:
        from stowage import __version__

        typer.echo(f"stowage {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The flags before any command."""

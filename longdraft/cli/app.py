"""The ``longdraft`` command. One small file per verb; nothing heavy is imported before a verb runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from longdraft import __version__
from longdraft.cli import acceptance, bench, calibrate, chat, demo, doctor, generate, plan, train, verify, vllm_args
from longdraft.errors import LongDraftError

EPILOG = "Try: longdraft demo · longdraft generate 'Once upon a time' · longdraft chat · longdraft doctor"

app = typer.Typer(
    name="longdraft",
    help="Faster long-context batch decoding of large language models, without changing what they output.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: boxes cut long option names off
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="demo")(demo.demo)
app.command(name="generate")(generate.generate)
app.command(name="chat")(chat.chat)
app.command(name="verify")(verify.verify)
app.command(name="plan")(plan.plan)
app.command(name="calibrate")(calibrate.calibrate)
app.command(name="train")(train.train)
app.command(name="doctor")(doctor.doctor)
app.command(name="vllm-args")(vllm_args.vllm_args)
bench.app.command(name="acceptance")(acceptance.acceptance)
app.add_typer(bench.app, name="bench")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"longdraft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options before the verb."""


def main() -> None:
    """Entry point: errors become a line or two on stderr and exit status 1."""
    debug = "--debug" in sys.argv
    if debug:  # accepted anywhere on the line
        sys.argv = [sys.argv[0], "--debug", *(a for a in sys.argv[1:] if a != "--debug")]
    try:
        app()
    except LongDraftError as error:
        if debug:
            raise
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        typer.secho(f"unexpected error: {type(error).__name__}: {error}\nRun again with --debug.", fg="red", err=True)
        sys.exit(1)

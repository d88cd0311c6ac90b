"""The command line: parsing and printing, nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from blendserve import __version__
from blendserve.cli.plan import plan_command
from blendserve.cli.profile import profile_command
from blendserve.cli.run import run_command
from blendserve.cli.run_batch import CONTEXT_SETTINGS, run_batch_command
from blendserve.cli.simulate import simulate_command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="run")(run_command)
app.command(name="run-batch", context_settings=CONTEXT_SETTINGS)(run_batch_command)
app.command(name="plan")(plan_command)
app.command(name="simulate")(simulate_command)
app.command(name="profile")(profile_command)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Offline LLM inference: a batch file in, a blended run on a model, results out."""
    if version:
        print(f"blendserve {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `blendserve` command."""
    app()

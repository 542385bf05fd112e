"""The command line: all commands, and the options of `penstock` itself."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.commands.compare import compare
from penstock.cli.commands.convert import convert
from penstock.cli.commands.export import export
from penstock.cli.commands.list import list_
from penstock.cli.commands.lower import lower
from penstock.cli.commands.plan import plan
from penstock.cli.commands.profile import profile
from penstock.cli.commands.read import read
from penstock.cli.commands.show import show
from penstock.cli.commands.simulate import simulate
from penstock.cli.commands.studio import studio
from penstock.cli.commands.train import train
from penstock.cli.commands.verify import verify
from penstock.cli.options import expand_groups


def list_help_records(command: Any, context: Any, kind: str) -> list[tuple[str, str]]:
    """The arguments or options of a command with their help: choices without brackets, and no Python types."""
    records: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if parameter.param_type_name == kind else None
        if record is not None and kind == "argument":
            records.append((re.sub(r" <.*>$", "", record[0]), record[1]))
        elif record is not None:
            records.append((re.sub(r"<(.*)>$", r"\1", record[0]), record[1]))
    return records


def write_usage_line(command: Any, context: Any) -> str:
    """The arguments of a command as they are written: those that are required without braces."""
    return " ".join(command.collect_usage_pieces(context)).replace("{", "").replace("}", "")


class _Command(TyperCommand):
    """Writes help without the names of Python types."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path, write_usage_line(self, ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for kind in ("argument", "option"):
            records = list_help_records(self, ctx, kind)
            if records:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(records)


class _CommandList(TyperGroup):
    """Lists the commands with their whole first lines, however narrow the terminal is."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


# Plain help loads much faster than Rich's, and reads the same in a pipe.
app = typer.Typer(
    cls=_CommandList,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(value: bool) -> None:
    if value:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _penstock(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Plan, prove and run pipeline-parallel training.

    \b
    Exit codes: 0 success, 1 a finding (a refused program, a bad file), 2 wrong usage.

    \b
    Examples:
      penstock list
      penstock show zbv -p 4 -m 8
      penstock verify zbv -p 4 -m 8
      penstock simulate zbv -p 4 -m 8 -o zbv.svg
      penstock compare zbv 1f1b dualpipe-v -p 8 -m 32
      penstock plan --profile p.json -p 8 --batch 512 --memory-limit 40GiB -o plan.json
      penstock studio
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (list_, show, lower, verify, simulate, compare, plan, train, profile, read, convert, studio, export):
    app.command(command.__name__.rstrip("_"), cls=_Command)(expand_groups(command))

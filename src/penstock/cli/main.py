"""The entry point: runs a command and turns an error into one message and an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cli.output import INTERRUPTED
from penstock.errors import CheckpointError, FileFormatError, PassError, PenstockError, PipelineError, PlanError, VerifyError

GOOD, FINDING, USAGE = 0, 1, 2


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 good, 1 a finding, 2 wrong usage, 130 interrupted."""
    try:
        return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: Sequence[str] | None) -> int:
    import typer

    from penstock.cli.app import app

    usage_error: type[Exception] = typer.BadParameter.__bases__[0]  # Typer's own class or click's, by version
    command = typer.main.get_command(app)
    try:
        return command.main(args, prog_name="penstock", standalone_mode=False) or GOOD
    except usage_error as error:
        return _fail(_describe_usage_error(error), USAGE)
    except typer.Abort:
        return INTERRUPTED
    except (CheckpointError, FileFormatError, PassError, PipelineError, PlanError, VerifyError) as error:
        return _fail(str(error), FINDING)
    except PenstockError as error:
        return _fail(str(error), USAGE)
    except OSError as error:
        return _fail(_describe_file_error(error), USAGE)


def _describe_usage_error(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "penstock"
    message: str = error.format_message()  # type: ignore[attr-defined]
    return f"{message.strip().replace('Value error, ', '')}\nSee '{path} --help'."


def _describe_file_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _fail(message: str, code: int) -> int:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)
    return code

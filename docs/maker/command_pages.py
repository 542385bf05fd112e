"""The reference of the commands, from the command line itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from maker.table import rows
from penstock.cli.app import app, list_help_records, write_usage_line


def command_page() -> str:
    """Every command with its options and examples."""
    whole: Any = typer.main.get_command(app)
    parts = ["# Commands", *_described(whole, "penstock")]
    for name, command in whole.commands.items():
        parts += [f"## penstock {name}", *_described(command, f"penstock {name}")]
    return "\n\n".join(parts) + "\n"


def examples() -> list[str]:
    """Every example line of every command's help."""
    whole: Any = typer.main.get_command(app)
    found = [_texts(command)[1] for command in (whole, *whole.commands.values())]
    return [line for lines in found for line in lines]


def _described(command: Any, path: str) -> Iterator[str]:
    texts, lines = _texts(command)
    yield from texts
    context = command.context_class(command, info_name=path)
    yield f"```text\n{path} {write_usage_line(command, context)}\n```"
    records = [
        record for kind in ("argument", "option") for record in list_help_records(command, context, kind) if "--help" not in record[0]
    ]
    yield rows([("option", "meaning"), *((f"`{names}`", _escaped(text)) for names, text in records)])
    if lines:
        yield "```sh\n" + "\n".join(lines) + "\n```"


def _texts(command: Any) -> tuple[list[str], list[str]]:
    """The paragraphs of a command's help, and its examples."""
    texts: list[str] = []
    examples: list[str] = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        text = paragraph.replace("\b", "").strip()
        if text.startswith("Examples:"):
            examples += [line.strip() for line in text.splitlines()[1:]]
        elif text:
            texts.append(_escaped(" ".join(text.split())))
    return texts, examples


def _escaped(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")

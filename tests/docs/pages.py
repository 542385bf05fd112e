"""Runs the blocks of a page, one after the other, in one namespace and one folder."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from docs import commands
from docs.blocks import LANGUAGES, Block, blocks
from docs.samples import missing_lines

FLAGS = doctest.ELLIPSIS
CUT = re.compile(r"^ *\[[^\]\n]* left out\]$", flags=re.MULTILINE)
"""A line of a sample that stands for others, and says so to the reader: `[50 lines left out]`."""
READERS = {".toml": tomllib.loads, ".json": json.loads, ".py": ast.parse}


class _AnyNumber(doctest.OutputChecker):
    """Compares a sample of what an example prints: numbers with a decimal point may differ."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(*(re.sub(r"\d+\.\d+", "#", text) for text in (want, got)), optionflags)


@dataclass
class Page:
    """A page whose blocks are being run."""

    name: str
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def run(self, text: str) -> int:
        """Run the blocks of code; returns how many there are."""
        found = [block for block in blocks(text) if block.language != "text"]
        for block in found:
            assert block.language in LANGUAGES, f"{self.name}:{block.line}: {block.language!r} is none of {sorted(LANGUAGES)}"
            assert (block.title or "x.") != "x." or block.language not in ("toml", "json"), (
                f"{self.name}:{block.line}: a file without a name"
            )
            try:
                (self._check if block.reason else self._run)(block)
            except BaseException as error:
                error.add_note(f"in the block at {self.name}:{block.line}")
                raise
        return len(found)

    def _run(self, block: Block) -> None:
        if block.title is not None:
            READERS[Path(block.title).suffix](block.text)
            Path(block.title).write_text(block.text, encoding="utf-8")
        if block.language == "python" and ">>>" in block.text:
            self._doctest(block)
        elif block.language == "python":
            self._exec(block)
        elif block.language in ("console", "sh"):
            self._commands(block)

    def _check(self, block: Block) -> None:
        if block.language == "python":
            ast.parse(block.text)
        else:
            for words in commands.split(re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)):
                commands.check(words)

    def _doctest(self, block: Block) -> None:
        example = doctest.DocTestParser().get_doctest(CUT.sub("...", block.text), self.namespace, self.name, self.name, block.line)
        example.globs = self.namespace
        said: list[str] = []
        runner = doctest.DocTestRunner(_AnyNumber() if block.sample else None, optionflags=FLAGS)
        assert runner.run(example, out=said.append, clear_globs=False).failed == 0, "".join(said)

    def _exec(self, block: Block) -> None:
        """Run a block. A file is imported, so that code under its `__main__` runs only by a command."""
        code = compile("\n" * (block.line - 1) + block.text, self.name, "exec")
        with redirect_stdout(StringIO()):
            if block.title is None:
                exec(code, self.namespace)
            else:
                importlib.import_module(Path(block.title).stem)

    def _commands(self, block: Block) -> None:
        parts = (
            re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
            if block.language == "console"
            else block.text.replace("\\\n", " ").splitlines(keepends=True)
        )
        for part in parts:
            line, _, wanted = part.replace("\\\n", " ").partition("\n")
            for words in commands.split(line):
                self._command(words, wanted if block.language == "console" else None, sample=block.sample is not None)

    def _command(self, words: list[str], wanted: str | None, sample: bool) -> None:
        code, printed = commands.run(words)
        refused = re.match(r"error:|\d+ findings? in ", wanted or "") is not None
        assert (code != 0) == refused, f"{words} ended with {code}:\n{printed}"
        if wanted is not None and sample:
            assert missing_lines(CUT.sub("", wanted), printed) == [], f"{words} printed\n{printed}"
        elif wanted is not None:
            plain = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
            assert doctest.OutputChecker().check_output(CUT.sub("...", wanted), plain, FLAGS), f"{words} printed\n{printed}"

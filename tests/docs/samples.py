"""Compares what a command printed with a sample of it from another machine.

Numbers, units, names of schedules and the number of rows in a table differ between machines. What must be the same is what each line
is about: its label, which is everything before the first number, colon, schedule or gap of two spaces, and every column of a heading.
Sentences, which say why things are as they are on that machine, are not compared, nor rows that are named by the number of a rank or
stage, because tables are sorted by measured times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.schedules.registry import algorithms

LONGEST_LABEL = 4
"""In words; what is longer is a sentence."""
CONTINUED = 12
"""Spaces from which on a line goes on with the one before."""
NUMBERED = {"rank", "stage"}
"""The last words of labels that go on with a number."""
OPTIONAL = {"note", "robustness"}
"""Labels of lines that depend on how far a search came."""
_LABEL_ENDS = re.compile(rf"\d|:|\s{{2,}}|(?<![\w-])(?:{'|'.join(map(re.escape, (*algorithms(), 'searched')))})(?![\w-])")


def label(line: str) -> str:
    """What a line is about; all of its columns if it is the heading of a table, and nothing for a row or a sentence."""
    text = line.strip()
    columns = re.split(r"\s{2,}", text)
    if len(columns) > 2 and not re.search(r"\d", text):
        return " ".join(columns)
    if len(line) - len(line.lstrip()) >= CONTINUED:
        return ""
    start = _LABEL_ENDS.split(text, maxsplit=1)[0].strip()
    words = start.split()
    is_label = 0 < len(words) <= LONGEST_LABEL and words[-1] not in NUMBERED and any(map(str.isalpha, start))
    return start if is_label else ""


def labels(text: str) -> Iterator[str]:
    """The labels of a text, without rows and sentences."""
    return filter(None, map(label, text.splitlines()))


def missing_lines(sample: str, printed: str) -> list[str]:
    """Labels of the sample that were not printed, or not in this order."""
    rest = labels(printed)
    return [wanted for wanted in labels(sample) if wanted not in OPTIONAL and wanted not in rest]

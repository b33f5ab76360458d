"""Says what an output can show: how wide it is, whether in colour, and with which letters. Makes
lines and tables that fit into it.

It imports nothing heavy: the commands that are asked for most begin with it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple, TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_CODES["blue"] = "1;34"
_LEAST = 20
"""Columns. What is narrower is used as if it had so many."""
_TOGETHER = re.compile(r"(?<=\d) (?=[^\W\d])")
"""The blank between a number and its unit: no line ends there."""


def cells(text: str) -> int:
    """Returns how many columns the text takes in a terminal."""
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) != 0 for letter in text)


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        fold: it may take several lines where there is little room: at blanks.
        path: so may this: at slashes, else anywhere.
    """

    title: str
    right: bool = False
    fold: bool = False
    path: bool = False


def wrapped(text: str, columns: int) -> list[str]:
    """Returns the text in lines of at most so many columns. A number stays with its unit, and no
    word is broken."""
    import textwrap

    kept = _TOGETHER.sub("\0", text)
    lines = textwrap.wrap(
        kept, max(_LEAST, columns), break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines] or [""]


class Terminal:
    """What an output can show at present.

    Attributes:
        width: columns; None: lines may be as long as they are, for what reads them is no person.
        colour: whether `paint` colours.
        blocks: whether it can show bars and shades, or only ASCII.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        person = stream.isatty()
        self.width: int | None = _width(stream, person)
        self.colour: bool = _colour(person)
        self.blocks: bool = _encodes(stream, "█░")
        self._stream = stream

    def encodes(self, text: str) -> bool:
        """Says whether the output can show these letters."""
        return _encodes(self._stream, text)

    def room(self, least: int, most: int, taken: int = 0) -> int:
        """Returns how many columns a picture may have beside those that are taken. It is `most`
        where lines may have any length."""
        return most if self.width is None else max(least, min(most, self.width - taken))

    def paint(self, text: str, style: str) -> str:
        """Returns the text in one of the styles: bold, dim, red, green, yellow, blue, cyan; "": as
        it is."""
        if not self.colour or not style or not text:
            return text
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m"

    def wrap(self, text: str, indent: int) -> list[str]:
        """Returns the lines of a text that stands beside a column of titles: see `wrapped`."""
        return [text] if self.width is None else wrapped(text, self.width - indent)

    def titled(self, title: str, text: str, indent: int) -> list[str]:
        """Returns the lines of a title with a text beside it."""
        first, *rest = self.wrap(text, indent)
        blank = " " * max(1, indent - cells(title))
        return [self.paint(title, "cyan") + blank + first, *(" " * indent + line for line in rest)]

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        styles: Sequence[Sequence[str]] = (),
    ) -> list[str]:
        """Returns the lines of a table without rules. styles: of each cell, as `paint` takes
        them."""
        lines = [[column.title for column in columns], *rows]
        widths = [max(cells(row[i]) for row in lines) for i in range(len(columns))]
        if self.width is not None:
            _narrow(widths, columns, lines, self.width - 2 * (len(columns) - 1))
        told = []
        for number, row in enumerate(lines):
            style = ["bold"] * len(row) if number == 0 else [""] * len(row)
            if number and styles:
                style = list(styles[number - 1])
            told += self._row(row, columns, widths, style)
        return told

    def _row(
        self,
        row: Sequence[str],
        columns: Sequence[Column],
        widths: Sequence[int],
        styles: Sequence[str],
    ) -> list[str]:
        folded = [
            _fold(cell, width) if column.fold or column.path else [cell]
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        lines = []
        for number in range(max(map(len, folded))):
            parts = []
            for pieces, width, column, style in zip(folded, widths, columns, styles, strict=True):
                text = pieces[number] if number < len(pieces) else ""
                blank = " " * (width - cells(text))
                painted = self.paint(text, style)
                parts.append(blank + painted if column.right else painted + blank)
            lines.append("  ".join(parts).rstrip())
        return lines


def _width(stream: TextIO, person: bool) -> int | None:
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return max(_LEAST, int(given))
    if not person:
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 80
    return max(_LEAST, columns or 80)


def _colour(person: bool) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return person and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _encodes(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _narrow(
    widths: list[int], columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int
) -> None:
    """Takes from the columns that fold, the widest first, until the row has room, or none can give
    more."""
    least = {
        i: _LEAST // 2 if column.path else max(len(w) for row in rows for w in row[i].split(" "))
        for i, column in enumerate(columns)
        if column.fold or column.path
    }
    while sum(widths) > room:
        able = [i for i in least if widths[i] > least[i]]
        if not able:
            return
        widest = max(able, key=widths.__getitem__)
        widths[widest] -= 1


def _fold(text: str, width: int) -> list[str]:
    """Cuts a text into pieces of at most that width: at a blank or behind a slash where there is
    one."""
    pieces = []
    while len(text) > width:
        at = max(text.rfind(" ", 0, width + 1), text.rfind("/", 0, width) + 1)
        if at <= 0:
            at = width
        pieces.append(text[:at].rstrip(" "))
        text = text[at:].lstrip(" ")
    return [*pieces, text]

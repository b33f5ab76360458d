"""Docstrings as reStructuredText. Ours are plain text: a list of `name: what it is`, whose lines go
on indented, needs no markup in Python's help."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

SECTION = re.compile(r"(Args|Arguments|Attributes|Returns|Yields|Example|Examples):$")
ITEM = re.compile(r"[\w\"'`.(), /|*=\[\]-]+: ")
NAMES = re.compile(r"([\w, ]+): ")
ENDS = ("Raises: ", "Returns: ")


def plain(line: str) -> str:
    """Stars and underscores outside of backticks are themselves, and a word may go on after one."""
    bullet, text = re.fullmatch(r"(\s*(?:\* )?)(.*)", line).groups()
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"(\w)_(?!\w)", r"\1\\_", p.replace("*", "\\*")) for p in parts[::2]]
    parts[2::2] = [re.sub(r"^(?=\w)", r"\\ ", p) for p in parts[2::2]]
    return bullet + "".join(parts)


def named(line: str) -> str:
    """With what it begins with in bold: names of arguments, `Raises`."""
    about = NAMES.match(line)
    return f"**{about[1]}:** {plain(line[about.end() :])}" if about else plain(line)


def listed(lines: list[str]) -> list[str]:
    """Items, whose lines go on indented; `Raises: ` and its like after them are no items."""
    made: list[str] = []
    for line in lines:
        if line.startswith(" "):
            item = made[-1].startswith(("* ", "  "))
            made.append(f"  {plain(line.strip())}" if item else plain(line.strip()))
        elif line.startswith(ENDS):
            made += ["", named(line)]
        else:
            made.append(f"* {named(line)}")
    return [*made, ""]


def marked_up(lines: list[str]) -> list[str]:
    made: list[str] = []
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    section = False
    for paragraph in paragraphs:
        if not paragraph:
            continue
        indented = paragraph[0].startswith(" ")
        if paragraph[0] == "Raises:" and len(paragraph) > 1:
            indent = len(paragraph[1]) - len(paragraph[1].lstrip())
            made += ["**Raises:**", "", *listed([line[indent:] for line in paragraph[1:]])]
            continue
        if paragraph[0].startswith(">>>") or paragraph[0].lstrip().startswith(">>>"):
            made += [*paragraph, ""]
            continue
        if SECTION.match(paragraph[0]) or (section and indented):
            section = True
            made += [*map(plain, paragraph), ""]
            continue
        section = False
        if indented:
            made += ["::", "", *paragraph, ""]
            continue
        heads = [line for line in paragraph if not line.startswith(" ")]
        hanging = len(heads) < len(paragraph)
        items = all(ITEM.match(line) for line in heads)
        if items and not hanging and paragraph[0].startswith(ENDS):
            made += listed(paragraph)
        elif not hanging or paragraph[0].startswith(("- ", "* ", "1. ")):
            made += [*map(plain, paragraph), ""]
        elif items:
            made += listed(paragraph)
        else:
            section_at = next(
                (i for i, line in enumerate(paragraph) if SECTION.match(line) or line == "Raises:"),
                None,
            )
            if section_at is not None:
                made += marked_up(paragraph[:section_at]) + marked_up(paragraph[section_at:])
                section = True
            else:
                made += [*(plain(line.strip()) for line in paragraph), ""]
    return made


def process(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = marked_up(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process, priority=100)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Draws docs/pictures/life-of-a-page.svg and life-of-a-commit.svg: python docs/site/diagrams.py

Their colours are their own, on a light card, so that they are the same on every page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

PICTURES = Path(__file__).resolve().parent.parent / "pictures"

INK, PALE, LINE = "#1f2933", "#5f6c7b", "#52606d"
OLD, EITHER, NEW = "#ffe2b8", "#efe3ff", "#c8ecd0"
PLAIN, WRITTEN, LOGGED = "#ffffff", "#ffd9d2", "#d6e8fb"


class Drawing:
    """Shapes in the order in which they are put down."""

    def __init__(self, width: int, height: int, title: str, words: str) -> None:
        self.width, self.height = width, height
        self.parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif">'
            ),
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(words)}</desc>",
            (
                '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
                'markerHeight="7" orient="auto-start-reverse">'
                f'<path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>'
            ),
            f'<rect width="{width}" height="{height}" rx="12" fill="#f8fafc"/>',
        ]

    def text(
        self, x: float, y: float, words: str, *,
        size: int = 14, color: str = INK, bold: bool = False, anchor: str = "middle",
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, lines: Sequence[str], *,
        dashed: bool = False, size: int = 14,
    ) -> None:  # fmt: skip
        """The first line is bold."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8" fill="{fill}" '
            f'stroke="{LINE}"{dash}/>'
        )
        top = y + h / 2 - (len(lines) - 1) * (size + 4) / 2 + size * 0.35
        for number, line in enumerate(lines):
            self.text(
                x + w / 2, top + number * (size + 4), line,
                size=size if number == 0 else size - 1,
                color=INK if number == 0 else PALE, bold=number == 0,
            )  # fmt: skip

    def arrow(self, points: str, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{points}" fill="none" stroke="{LINE}" stroke-width="1.6"{dash} '
            'marker-end="url(#tip)"/>'
        )

    def text_of_file(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def life_of_a_page() -> Drawing:
    d = Drawing(
        900, 420, "The life of a page",
        "A committed page is read-only. The first write into it faults; its content goes to the "
        "undo log, and it becomes writable. A commit protects it again. A crash or a roll back "
        "puts the logged content back.",
    )  # fmt: skip
    d.text(450, 34, "The life of a page", size=18, bold=True)
    d.box(40, 90, 190, 92, NEW, ["committed", "read-only", "content: A"])
    d.box(355, 90, 190, 92, LOGGED, ["captured", "A is in the undo log", "writable"])
    d.box(670, 90, 190, 92, WRITTEN, ["changed", "content: B", "A is in the undo log"])
    d.arrow("M230 136H353")
    d.text(292, 106, "first write", size=13)
    d.text(292, 124, "faults", size=13)
    d.text(292, 158, "A is copied,", size=12, color=PALE)
    d.text(292, 174, "fence F1", size=12, color=PALE)
    d.arrow("M545 136H668")
    d.text(607, 124, "the write", size=13)
    d.text(607, 158, "at memory", size=12, color=PALE)
    d.text(607, 174, "speed", size=12, color=PALE)
    d.arrow("M800 90C800 50 850 50 850 88")
    d.text(745, 66, "further writes", size=13)
    d.box(670, 290, 190, 92, NEW, ["committed", "read-only", "content: B"])
    d.arrow("M765 182V288")
    d.text(757, 224, "commit: protected, written back,", size=13, anchor="end")
    d.text(757, 242, "then the anchor moves", size=13, anchor="end")
    d.box(40, 290, 190, 92, OLD, ["as it was", "read-only", "content: A"])
    d.arrow("M450 182C450 270 400 336 232 336", dashed=True)
    d.text(424, 222, "crash, or roll back, here or later:", size=13, anchor="end")
    d.text(424, 240, "the log's A is put back", size=13, anchor="end")
    d.arrow("M135 290V184")
    d.text(127, 242, "training goes on", size=13, color=PALE, anchor="end")
    d.arrow("M670 350H600")
    d.text(592, 346, "at its next first write", size=13, color=PALE, anchor="end")
    d.text(592, 364, "B is captured", size=13, color=PALE, anchor="end")
    return d


def life_of_a_commit() -> Drawing:
    d = Drawing(
        900, 500, "The life of a commit",
        "In memory: the step writes, pages are protected, changed lines are written back, fence "
        "F2, the anchor moves, fence F3. A crash before the anchor finds the last commit, after it "
        "this one. On a disk: the step writes, one journal record, one fdatasync, which is the "
        "commit; then a thread writes the images home.",
    )  # fmt: skip
    d.text(450, 34, "The life of a commit", size=18, bold=True)

    d.text(30, 74, "in memory: domains process, emulated, dax", bold=True, anchor="start")
    steps = [
        (30, 190, WRITTEN, ["the step", "pages captured as it", "writes into them"]),
        (236, 130, PLAIN, ["protect", "read-only again"]),
        (382, 130, PLAIN, ["write back", "changed lines"]),
        (540, 110, LOGGED, ["anchor + 1", "one word"]),
        (690, 180, NEW, ["returns", "log free for the next"]),
    ]
    for x, w, fill, lines in steps:
        d.box(x, 92, w, 76, fill, lines)
    for x1, x2 in ((220, 234), (366, 380), (512, 538), (650, 688)):
        d.arrow(f"M{x1} 130H{x2}")
    d.text(525, 84, "F2", size=12, bold=True)
    d.text(669, 84, "F3", size=12, bold=True)
    d.box(30, 186, 510, 34, OLD, ["a crash here: the last commit, by the undo log"], size=13)
    d.box(540, 186, 130, 34, EITHER, ["this or the last"], size=13)
    d.box(670, 186, 200, 34, NEW, ["a crash here: this commit"], size=13)

    d.text(30, 282, "on a disk: domain file", bold=True, anchor="start")
    steps = [
        (30, 190, WRITTEN, ["the step", "in memory of its own,", "not in the file"]),
        (236, 200, PLAIN, ["journal record", "page images, checksums"]),
        (466, 110, LOGGED, ["fdatasync", "one a commit"]),
        (606, 110, NEW, ["returns"]),
    ]
    for x, w, fill, lines in steps:
        d.box(x, 300, w, 76, fill, lines)
    for x1, x2 in ((220, 234), (436, 464), (576, 604)):
        d.arrow(f"M{x1} 338H{x2}")
    d.box(736, 300, 134, 76, PLAIN, ["home", "a thread writes", "pages to their place"],
          dashed=True, size=13)  # fmt: skip
    d.arrow("M716 338H734", dashed=True)
    d.box(30, 394, 436, 34, OLD, ["a crash here: the last commit"], size=13)
    d.box(466, 394, 120, 34, EITHER, ["this or the last"], size=13)
    d.box(586, 394, 284, 34, NEW, ["a crash here: this commit"], size=13)
    d.text(450, 466, "“This or the last” is one whole commit or the other. There is nothing in "
           "between.", size=13, color=PALE)  # fmt: skip
    return d


DRAWINGS = {"life-of-a-page.svg": life_of_a_page, "life-of-a-commit.svg": life_of_a_commit}

if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        (PICTURES / name).write_text(drawing().text_of_file(), encoding="utf-8")

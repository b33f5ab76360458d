"""What stores, groups and lists look like in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

SHOWN = 50


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]], total: int) -> str:
    """HTML of at most `SHOWN` rows out of total. Everything is escaped: names come from the file.

    >>> table("<x>", ["n"], [["a&b"]], 2)
    '<p>&lt;x&gt;</p><table><tr><th>n</th></tr><tr><td>a&amp;b</td></tr></table><p>and 1 more</p>'
    """
    shown = [
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    ]
    more = f"<p>and {total - len(shown):,} more</p>" if total > len(shown) else ""
    first = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    return f"<p>{html.escape(title)}</p><table><tr>{first}</tr>{''.join(shown)}</table>{more}"

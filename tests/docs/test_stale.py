"""Each row of figures names the commit that it was measured at, and says so when it is stale."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import stale  # noqa: E402

sys.path.pop(0)
NO_ROWS = {"Aims that were missed", "Bugs that the harness found"}
PAGES = ("benchmarks/RESULTS.md", "crashtests/RUNS.md", "docs/gallery/index.md")


def rows() -> dict[str, str]:
    """By page and heading: the first line of the section."""
    found = {}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for heading, line in re.findall(r"^## (.*)\n+(.*)$", text, re.MULTILINE):
            if heading not in NO_ROWS:
                found[f"{page}: {heading}"] = line
    return found


@pytest.mark.filterwarnings("default:stale:UserWarning")
def test_rows_name_their_commits() -> None:
    """A stale one is told in the summary: figures are not made anew with each change."""
    old = []
    for name, line in rows().items():
        row = stale.ROW.fullmatch(line)
        assert row is not None, f"{name}: {line}"
        for file in re.findall(r"`(.*?)`", row[2]):
            assert (ROOT / file).exists(), f"{name}: {file}"
        if stale.whole_history():
            assert stale.git("cat-file", "-t", row[1]) == "commit\n", name
        if stale.stale(row):
            old.append(" ".join(name.split(": ")[:2]))
    if old:
        warnings.warn(f"stale: {', '.join(old)}", stacklevel=1)


def test_what_has_changed_is_stale() -> None:
    first = stale.git("rev-list", "--max-parents=0", "HEAD").split()
    if not (stale.whole_history() and first):
        pytest.skip("no whole history here")
    for commit, expected in ((first[-1], True), (stale.git("rev-parse", "HEAD").strip(), False)):
        page = [f"# Page\n\nMeasured at {commit}: `pmstore` `native`.\nIt takes 3 us.\n"]
        stale.add(None, "page", page)
        assert ("`native`. **Stale**: they have changed since.\nIt" in page[0]) is expected

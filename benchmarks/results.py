"""The last results: benchmarks/results.json.gz holds a run's figures, RESULTS.md is made from them.

    python -m benchmarks --report          writes RESULTS.md anew from results.json.gz
    python -m benchmarks --report slots    also prints all rows of a question
    python -m benchmarks.results           first gathers results.json.gz from build/bench/*.json

`make bench` does the last after its run. The document has no figure that the raw file has not.
"""

from __future__ import annotations

import gzip
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import summaries
from benchmarks.harness import OUT, table
from benchmarks.rows import Row
from benchmarks.runner import QUESTIONS

RESULTS = Path(__file__).with_name("RESULTS.md")
RAW = Path(__file__).with_name("results.json.gz")
COLUMNS = 100
TIMES = ("median_us", "min_us", "max_us")
UNITS = {"instructions": "instructions"}
"""Of the rows of questions that do not measure times."""

HEAD = (
    "The last run of the benchmarks: first what was aimed at and missed, then one table a "
    "question. [README.md](README.md) says what each question is and what the words mean. All "
    "rows, with their least, greatest and rounds, are in [results.json.gz](results.json.gz), "
    "from which this file is made (`python -m benchmarks --report`); a reason may speak of a "
    "row that is only there. Times are medians. Compare within a table: its methods were "
    "measured in turn, in one run. pmstore's domains: `process` keeps what is committed when "
    "the process dies; `emulated` does so by the instructions that persistent memory needs; "
    "`file` waits for a disk."
)
BUSY = (
    " The machine was busy with other work when this run began: times are longer than on an idle"
    " one, those that wait for a disk most. Ratios suffer less."
)

Run = Mapping[str, Any]
"""What the raw file holds: when, where and of which commit, and the answers to the questions."""


# ---- the raw file ----


def gather() -> dict[str, Any]:
    """A run, from build/bench/*.json.

    Raises: FileNotFoundError if no question was answered yet.
    """
    paths = [OUT / f"{question}.json" for question in QUESTIONS]
    found = [json.loads(p.read_text(), parse_float=_shortened) for p in paths if p.exists()]
    if not found:
        raise FileNotFoundError(f"{OUT}: no results: run `python -m benchmarks` first")
    dates = [answer["date"] for answer in found]
    return {
        "dates": [min(dates), max(dates)],
        "machine": found[0]["machine"],
        "commits": list(dict.fromkeys(answer["commit"] for answer in found)),
        "load_before": min(found, key=lambda answer: answer["date"])["load_before"][0],
        "note": "",
        "answers": found,
    }


def _shortened(text: str) -> float:
    """Six digits: noise does not compress."""
    return float(f"{float(text):.6g}")


def store(run: Run) -> None:
    """Writes the raw file: the same bytes for the same figures."""
    RAW.write_bytes(gzip.compress(json.dumps(run, separators=(",", ":")).encode(), mtime=0))


def stored() -> dict[str, Any]:
    """Reads the raw file."""
    run: dict[str, Any] = json.loads(gzip.decompress(RAW.read_bytes()))
    return run


# ---- the document ----


def text_of(run: Run) -> str:
    """RESULTS.md."""
    answers = run["answers"]
    named = {answer["question"]: answer for answer in answers}
    lines = ["# Results", "", *_wrapped(HEAD), "", *_wrapped(_origin(run)), "", *_misses(answers)]
    for answer in answers:
        if answer["rows"]:
            lines += ["", *_section(answer, named)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def _origin(run: Run) -> str:
    """When, where, of which commit; what is not as it should be."""
    machine, answers = run["machine"], run["answers"]
    loads = [answer["load"][0] for answer in answers]
    dates = " to ".join(date[:16].replace("T", " ") for date in run["dates"])
    text = (
        f"Measured from {dates} (UTC) on {machine['cpu']}, {machine['cores']} cores,"
        f" {machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']};"
        f" commit {', '.join(commit[:12] for commit in run['commits'])}."
        f" Load (1 minute) {run['load_before']:.1f} before, {min(loads):.1f} to {max(loads):.1f}"
        " at the ends of questions."
    )
    if run["load_before"] > machine["cores"] / 2:
        text += BUSY
    if run["note"]:
        text += f" {run['note']}"
    if quick := [answer["question"] for answer in answers if answer["quick"]]:
        text += f" Smallest cases only (`--quick`): {', '.join(quick)}."
    for answer in answers:
        if answer["failure"]:
            text += f" **{answer['question']} was not answered**: {answer['failure']}."
    return text


def _misses(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row for all that was missed for the same reason."""
    targets = [(answer["question"], target) for answer in answers for target in answer["targets"]]
    missed: dict[tuple[str, str], dict[str, list[str]]] = {}
    for question, target in targets:
        if not target["met"]:
            case, figure = summaries.parted(target["text"])
            aim = f"{figure}: {summaries.bound_of(target)}"
            value = _missed_value(target) + (f" ({case})" if case else "")
            missed.setdefault((question, target["reason"]), {}).setdefault(aim, []).append(value)
    body = [
        [question, "<br>".join(f"{aim}; was {', '.join(v)}" for aim, v in values.items()), reason]
        for (question, reason), values in missed.items()
    ]
    met = sum(target["met"] for _, target in targets)
    lines = ["## Aims that were missed", f"{met} of {len(targets)} aims were met in this run."]
    if body:
        lines += ["", *summaries.lines_of(["question", "aim, and what was measured", "why"], body)]
    return lines


def _missed_value(target: Mapping[str, Any]) -> str:
    """Where three digits do not tell it from the aim, a sign does."""
    value = f"{target['value']:.3g}"
    if value != f"{target['bound']:.3g}":
        return value
    return f"{'under' if target['at_least'] else 'over'} {value}"


def _section(answer: Mapping[str, Any], answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    summary = summaries.of(answer["question"])
    words = summary.words
    if targets := answer["targets"]:
        words += f" Aims met: {sum(t['met'] for t in targets)} of {len(targets)}."
    words += "".join(f" Note: {note}." for note in summary.shown(answer["notes"]))
    absent: dict[str, dict[str, None]] = {}
    for row in answer["rows"]:
        if row["median_us"] is None:
            absent.setdefault(row["note"], {})[row["method"]] = None
    for why, methods in absent.items():
        words += f" Not measured everywhere: {'; '.join(methods)} ({why})."
    head = f"## {answer['question']}: {answer['title']}"
    about = " ".join(f"`{name}`" for name in QUESTIONS[answer["question"]].about)
    measured = f"Measured at {answer['commit'][:7]}: {about}."
    return [head, measured, *_wrapped(words), "", *summary.table(answer, answers)]


def report() -> Path:
    """Writes RESULTS.md from the raw file."""
    RESULTS.write_text(text_of(stored()))
    return RESULTS


def all_rows(question: str) -> str:
    """Every row of a question, and its notes. Empty: the raw file has none."""
    found = [a for a in stored()["answers"] if a["question"] == question and a["rows"]]
    if not found:
        return ""
    answer = found[0]
    shown = table(rows_of(answer), answer["ratio"], UNITS.get(question, "us"))
    return "\n".join([answer["title"], shown, *(f"  note: {note}" for note in answer["notes"])])


def rows_of(answer: Mapping[str, Any]) -> list[Row]:
    """The rows of a stored answer."""
    return [Row(**_with_nan(row)) for row in answer["rows"]]


def _with_nan(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has null where a row has no time."""
    return {**row, **{k: math.nan for k in TIMES if row[k] is None}}


def write() -> Path:
    """Writes the raw file from build/bench/*.json, and RESULTS.md from it.

    Raises: FileNotFoundError if no question was answered yet.
    """
    store(gather())
    return report()


if __name__ == "__main__":
    print(f"wrote {write()}")

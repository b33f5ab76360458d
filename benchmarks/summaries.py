"""The one table of each question in RESULTS.md: which of its figures matter, and their layout.

A table is made from a question's raw figures (the JSON that `harness.write_json` writes) and no
others. What is named here and was not measured is left out. If nothing that is named was measured,
the table shows everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.iterations import PLOTTED
from benchmarks.rows import time_text

Figures = Mapping[str, Any]
"""A row, as JSON has it."""
Answer = Mapping[str, Any]
"""What a question has left: its rows, targets, notes."""
Table = Callable[[Answer, Mapping[str, Answer]], list[str]]
"""The lines of a question's table; the second argument: the answers to all questions."""
Columns = Mapping[str, Sequence[str]]
"""A heading, and the methods of which one stands under it: the first of them that a case has."""


@dataclass(frozen=True, slots=True)
class Summary:
    """words: what a cell of the table says. leaves_out: a pattern of notes that are not shown."""

    words: str
    table: Table
    leaves_out: str = "$^"

    def shown(self, notes: Sequence[str]) -> list[str]:
        """Those of the notes that say how to read the table."""
        return [note for note in notes if not re.match(self.leaves_out, note)]


def of(question: str) -> Summary:
    """The summary of a question."""
    return SUMMARIES[question]


def lines_of(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown. A column with nothing below its head is left out.

    >>> lines_of(["method", "min", "median"], [["ours", "", "2 us"]])
    ['| method | median |', '|---|---|', '| ours | 2 us |']
    """
    kept = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in body)]
    shown = [[row[i] for i in kept] for row in [heads, *body]]
    shown.insert(1, ["---"] * len(kept))
    return [
        "|" + "|".join(row) + "|" if row[0] == "---" else "| " + " | ".join(row) + " |"
        for row in shown
    ]


def cell(row: Figures | None) -> str:
    """The median and its ratio."""
    if row is None:
        return ""
    return time_text(row["median_us"]) + _ratio(row)


def _count(row: Figures | None) -> str:
    return "" if row is None else f"{row['median_us']:,.0f}{_ratio(row)}"


def _ratio(row: Figures) -> str:
    return "" if row["ratio"] is None else f" ({row['ratio']:.3g} x)"


def _measured(answer: Answer) -> list[Figures]:
    return [row for row in answer["rows"] if row["median_us"] is not None]


def _same(*methods: str) -> dict[str, tuple[str, ...]]:
    """Each under its own name."""
    return {method: (method,) for method in methods}


# ---- the kinds of tables ----


def pivot(
    cases: str = ".*",
    methods: Columns | None = None,
    *,
    cases_down: bool = False,
    text: Callable[[Figures | None], str] = cell,
) -> Table:
    """Methods down and cases across, or the other way round.

    cases: a pattern for the whole name; its group, if it has one, is what the table calls the case.
    methods: None means all.
    """

    def table(answer: Answer, answers: Mapping[str, Answer]) -> list[str]:
        del answers
        rows = _measured(answer)
        labels = _labels(cases, rows)
        found = {(row["case"], row["method"]): row for row in rows if row["case"] in labels}
        named = methods or {}
        if not any(method in alike for _, method in found for alike in named.values()):
            named = _same(*dict.fromkeys(method for _, method in found))

        def at(case: str, alike: Sequence[str]) -> str:
            return text(next((found[case, m] for m in alike if (case, m) in found), None))

        if cases_down:
            body = [
                [label, *(at(case, alike) for alike in named.values())]
                for case, label in labels.items()
            ]
            return lines_of(["case", *named], body)
        body = [[label, *(at(case, alike) for case in labels)] for label, alike in named.items()]
        return lines_of(["method", *labels.values()], [row for row in body if any(row[1:])])

    return table


def _labels(pattern: str, rows: Sequence[Figures]) -> dict[str, str]:
    """The cases that a pattern means, by what a table calls them; all, if it means none."""
    every = dict.fromkeys(row["case"] for row in rows)
    matches = {case: re.fullmatch(pattern, case) for case in every}
    meant = {case: m[1] if m.re.groups else case for case, m in matches.items() if m}
    return meant or {case: case for case in every}


def listed(cases: str, methods: Sequence[str], extras: Mapping[str, str]) -> Table:
    """Case and method down; time, ratio and further figures across. extras: name, and heading."""

    def table(answer: Answer, answers: Mapping[str, Answer]) -> list[str]:
        del answers
        every = _measured(answer)
        labels = _labels(cases, every)
        rows = [row for row in every if row["case"] in labels]
        rows = [row for row in rows if row["method"] in methods] or rows
        body = [
            [row["case"], row["method"], cell(row), *(_extra(row, name) for name in extras)]
            for row in rows
        ]
        return lines_of(["case", "method", "time", *extras.values()], body)

    return table


def by_method(extras: Mapping[str, str]) -> Table:
    """Of a question with one case: time, ratio and further figures down, methods across."""

    def table(answer: Answer, answers: Mapping[str, Answer]) -> list[str]:
        del answers
        rows = _measured(answer)
        body = [["time", *(cell(row) for row in rows)]]
        body += [[head, *(_extra(row, name) for row in rows)] for name, head in extras.items()]
        return lines_of(["", *(row["method"] for row in rows)], body)

    return table


def _extra(row: Figures, name: str) -> str:
    return f"{row['extra'][name]:.3g}" if name in row["extra"] else ""


def ends(*leaves_out: str) -> Table:
    """Of cases "what grows: so much": the times at the least and the most of it, and the slope.

    leaves_out: methods that are not shown.
    """

    def table(answer: Answer, answers: Mapping[str, Answer]) -> list[str]:
        del answers
        slopes = dict(note.rpartition(": ")[::2] for note in answer["notes"])
        found: dict[tuple[str, str], list[Figures]] = {}
        for row in _measured(answer):
            if row["method"] not in leaves_out:
                group = row["case"].partition(": ")[0]
                found.setdefault((group, row["method"]), []).append(row)
        body = [
            [
                group,
                method,
                *(
                    f"{time_text(row['median_us'])} ({row['case'].partition(': ')[2]})"
                    for row in (rows[0], rows[-1])
                ),
                slopes.get(f"slope of {method} over {group}", ""),
            ]
            for (group, method), rows in found.items()
        ]
        return lines_of(["what grows", "method", "at the least", "at the most", "slope"], body)

    return table


def aims(answer: Answer, answers: Mapping[str, Answer]) -> list[str]:
    """What was aimed at, and measured, by experiments."""
    del answers
    found: dict[str, list[str]] = {}
    for target in answer["targets"]:
        what, figure = parted(target["text"])
        value = f"{target['value']:.3g} ({bound_of(target)})"
        found.setdefault(what, []).append(f"{figure} {value}")
    return lines_of(["what", "measured (aim)"], [[k, "; ".join(v)] for k, v in found.items()])


def parted(text: str) -> tuple[str, str]:
    """The case and the figure of a target.

    >>> parted("KMeans, 4.9 MB: flip and commit, us"), parted("open, ms")
    (('KMeans, 4.9 MB', 'flip and commit, us'), ('', 'open, ms'))
    """
    case, sign, figure = text.partition(": ")
    return (case, figure) if sign else ("", text)


def bound_of(target: Mapping[str, Any]) -> str:
    """The aim in words."""
    return f"at {'least' if target['at_least'] else 'most'} {target['bound']:.3g}"


def paper(answer: Answer, answers: Mapping[str, Answer]) -> list[str]:
    """The table of the seed paper: methods down, states across, and what kills left."""
    rows = _measured(answer)
    plotted = tuple(f"{part}, state A" for part in PLOTTED)
    cases = [c for c in dict.fromkeys(r["case"] for r in rows) if c.startswith(plotted)]
    if not cases:
        return pivot()(answer, answers)
    found = {(r["case"], r["method"]): r for r in rows if r["case"] in cases}
    kills = {r["method"]: r for r in _measured(answers.get("kills", {"rows": ()}))}
    body = []
    for method in dict.fromkeys(m for _, m in found if m not in PAPER_LEAVES_OUT):
        here = [found.get((case, method)) for case in cases]
        survives = next(row["durability"] for row in here if row)
        killed = kills.get(method)
        share = f"{100 * killed['ratio']:.3g} % of {killed['extra']['kills']:.0f}" if killed else ""
        body.append([method, survives, share, *(_span(row) for row in here)])
    return lines_of(["method", "survives", "crash", *cases], body)


def _span(row: Figures | None) -> str:
    if row is None:
        return ""
    least, most = (time_text(row[k]) for k in ("min_us", "max_us"))
    ratio = f" {row['ratio']:.3g} x" if row["ratio"] else ""
    return f"{time_text(row['median_us'])} [{least} - {most}]{ratio}"


def killed(answer: Answer, answers: Mapping[str, Answer]) -> list[str]:
    """What was found after kills, by what the methods promise."""
    del answers
    groups: dict[str, list[Figures]] = {}
    for row in _measured(answer):
        whose = "pmstore" if row["method"].startswith("pmstore") else "others"
        groups.setdefault(f"{whose}, {row['durability']}", []).append(row)

    def found(rows: Sequence[Figures]) -> str:
        survived, kills = (sum(r["extra"].get(k, 0) for r in rows) for k in ("survived", "kills"))
        return f"{survived:,.0f} of {kills:,.0f} ({len(rows)})"

    body = [
        "the old or the new state found, of kills (methods)",
        *(found(rows) for rows in groups.values()),
    ]
    return lines_of(["", *groups], [body])


# ---- the questions ----

PAPER_LEAVES_OUT = (
    "np.savez, tmpfs",
    "np.savez + fsync + rename",
    "np.savez_compressed, disk",
    "np.savez_compressed, tmpfs",
    "torch.save, disk",
    "pickle + fsync + rename",
    "np.memmap + flush",
    "h5py + flush + fsync",
    "zarr, disk",
    "pmstore process, slots",
    "pmstore process, living",
    "pmstore process, living in slots",
    "pmstore emulated, copy in",
    "pmstore emulated, slots",
    "pmstore emulated, living",
    "pmstore file, living",
    "the update alone, in ordinary memory",
)

SUMMARIES = {
    "iterations": Summary(
        "A save of the state after an iteration, warm: median [least - greatest], and how many"
        " times cheaper than `np.savez` on disk. *Crash*: share of SIGKILLs in the middle of a save"
        " of 63 KB after which the old or the new state was there, exactly.",
        paper,
        ".*",
    ),
    "kills": Summary("All methods that promise the same, together.", killed),
    "engine": Summary(
        "One operation (and over libpmemobj's). Memory that is declared is captured in whole pages."
        " Two threads take turns: a store has one writer at a time.",
        pivot(
            r"empty transaction|8 B, 2 threads.*|256 MiB overwrite"
            r"|(?:8 B|4 KiB) snapshot.*|allocate and free (?:64 B|256 KiB|64 MiB),.*",
            {
                "libpmemobj": ("libpmemobj",),
                "pmstore emulated": ("pmstore emulated", "pmstore emulated, declared"),
                "pmstore process": ("pmstore process", "pmstore process, declared"),
            },
            cases_down=True,
        ),
        "fences and lines|.*a page is captured whole|2 threads",
    ),
    "training": Summary(
        "A training step with a checkpoint (and over one without).",
        pivot(
            methods=_same(
                "no checkpoint",
                "torch.save + fsync + rename",
                "safetensors + fsync + rename",
                "DCP async_save (process)",
                "pmstore process, declared",
                "pmstore process, faulted",
                "pmstore emulated, declared",
                "pmstore file, declared",
            ),
            cases_down=True,
        ),
        "hot:|blocks:|bytes:",
    ),
    "small_steps": Summary("A step, and what of it its end takes.", pivot(r".*", cases_down=True)),
    "slots": Summary(
        "KMeans: the commit alone; AdamW: the step with its commit (over a memcpy"
        " of the state by all cores).",
        pivot(
            "(?!GMM).*",
            methods={
                **_same("memcpy of the state", "torch fused"),
                "slots": ("pmstore process, flip and commit", "pmstore, slots + commit"),
                "slots, right after torch": (
                    "pmstore process, flip and commit right after torch",
                    "pmstore, slots + commit right after torch",
                ),
                "undo log": (
                    "pmstore process, undo log: write and commit",
                    "torch fused + undo log",
                ),
            },
            cases_down=True,
        ),
        "torch's worker thread",
    ),
    "restart": Summary(
        "From the call that opens or loads to the end of the first step (and over `torch.load`)."
        " *Cold*: the file is not in the page cache.",
        pivot(r"(.*), to the end of the first step"),
    ),
    "growth": Summary(
        "Slope in log-log axes: 1 is linear, 0 is constant.",
        ends("insert (mean)", "get"),
        "slope of",
    ),
    "scale": Summary(
        "One operation. *Put and commit*: of one small value. With more time, up to 40 GiB.",
        pivot(cases_down=True),
        "slope of",
    ),
    "key_value": Summary(
        "One operation (and over pmstore process).", pivot(r"put.*|get.*|reopen.*", cases_down=True)
    ),
    "containers": Summary("One operation (and over that of memory).", pivot()),
    "instructions": Summary(
        "Counts of one operation (and over the stored ones).", pivot(cases_down=True, text=_count)
    ),
    "scheduler": Summary(
        "Simulated jobs; *Young*, *CheckFreq*: rules for the interval of checkpoints.", aims, ".*"
    ),
    "scheduler_kills": Summary(
        "Lost and added time together, in a second of work (and over the least).",
        by_method(
            {
                "reality": "reality, of work",
                "its error": "+-",
                "simulation": "simulation, of work",
                "its spread": "+-",
                "kills": "kills",
                "commits": "commits",
            }
        ),
    ),
    "tiers": Summary(
        "How long a save blocks the program, how much slower steps are beside it; then writing and"
        " reading alone (and over a memcpy of the state, plain writing, one rank).",
        listed(
            r"(?!50 MB of state).*",
            (
                "pmstore flush",
                "plain O_DIRECT writing (thread)",
                "DCP async_save (thread)",
                "DCP async_save (process)",
                "torch.save + fsync (thread)",
                "plain O_DIRECT writing",
                "full flush",
                "flush of 1 % of the chunks",
                "restore into memory",
                "2 ranks",
            ),
            {"step slowdown": "a step beside it, over one alone"},
        ),
    ),
    "beside": Summary(
        "A step of a writer that commits each step, and what a reader waits for.",
        pivot(r".*", cases_down=True),
    ),
    "job_commits": Summary(
        "What is waited for beside the commit (and over a blocking all-reduce).",
        pivot(r"added to a step, (domain .*)", cases_down=True),
    ),
    "job_restart": Summary(
        "Both ranks are killed at once (and over pmstore's).",
        pivot(r"(?!Python).*", cases_down=True),
    ),
    "frameworks": Summary(
        "A step, and what is done again after SIGKILL: a commit each step, none, and the"
        " framework's own checkpoint every 100 steps.",
        pivot(r".*", cases_down=True),
    ),
    "checkpoints": Summary(
        "Times (and over torch's own writer or reader, or memcpy).", pivot(cases_down=True)
    ),
}

"""Writes benchmarks/RESULTS.md from build/bench/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import OUT, time_text
from benchmarks.iterations import PLOTTED
from benchmarks.runner import QUESTIONS

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = """# Results

Written by `make bench` (or `python -m benchmarks.results`, alone) from `build/bench/*.json`. [README.md](README.md) says what
each question is and how to read it. A figure counts beside the others of its table only: all were measured in turn, in one
run.

Times are medians of the rounds, with the least and the greatest. *survives* is what a method promises: `none`; `torn`: a crash
in a save may leave neither the old nor the new state; `kill-safe`: the old or the new state after the death of the process;
`power-safe`: also after that of the machine. What a table's *ratio* is to is said above it. pmstore's domains: `process` keeps
what is committed when the process dies; `emulated` does so by the instructions that persistent memory needs; `file` waits for
a disk.
"""  # noqa: E501
PAPER = """A save of the state after an iteration, warm: median [least - greatest], and how many times cheaper than `np.savez`
on disk. *Crash*: share of SIGKILLs in the middle of a save of 63 KB after which the old or the new state was there, exactly.
Other states and sizes, saves among other work and cold ones: under iterations.
"""  # noqa: E501
BUSY = """
**The machine was busy with other work when this run began** (load {load:.1f} on {cores} cores): absolute times, and every time
that waits for a disk, are longer than on an idle one. Ratios of methods measured in turn suffer less; maxima say little.
"""  # noqa: E501


def _header(found: list[dict[str, Any]]) -> str:
    machine = found[0]["machine"]
    loads = [d["load"][0] for d in found]
    before = min(found, key=lambda d: d["date"])["load_before"][0]
    lines = [
        HEAD,
        "| | |",
        "|---|---|",
        f"| date | {min(d['date'] for d in found)} to {max(d['date'] for d in found)} |",
        f"| machine | {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB |",
        f"| system | Linux {machine['kernel']}, Python {machine['python']} |",
        f"| commit | {', '.join(dict.fromkeys(d['commit'][:12] for d in found))} |",
        (
            f"| load (1 minute) | {before:.1f} before; {min(loads):.1f} to {max(loads):.1f} at the "
            "ends of questions |"
        ),
    ]
    if before > machine["cores"] / 2:
        lines.append(BUSY.format(load=before, cores=machine["cores"]))
    if any(d["quick"] for d in found):
        lines.append(
            "\nSmallest cases only (`--quick`): "
            f"{', '.join(d['question'] for d in found if d['quick'])}.\n"
        )
    lines += [
        f"\n**{d['question']} was not answered**: {d['failure']}" for d in found if d["failure"]
    ]
    return "\n".join(lines)


def _extra(extra: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {value:,.4g}" for name, value in extra.items() if name not in ("x", "bytes")
    )


def _targets(found: list[dict[str, Any]]) -> str:
    rows = [(d["question"], t) for d in found for t in d["targets"]]
    reasons = list(dict.fromkeys(t["reason"] for _, t in rows if not t["met"] and t["reason"]))
    lines = [
        "\n## Figures aimed at\n",
        (
            f"{sum(t['met'] for _, t in rows)} of {len(rows)} met in this run. Those missed come "
            "first.\n"
        ),
    ]
    lines += ["| question | figure | measured | aim | | why |", "|---|---|---|---|---|---|"]
    for question, t in sorted(rows, key=lambda row: row[1]["met"]):
        sign = "at least" if t["at_least"] else "at most"
        why = "" if t["met"] or not t["reason"] else f"({reasons.index(t['reason']) + 1})"
        verdict = "met" if t["met"] else "**missed**"
        lines.append(
            f"| {question} | {t['text']} | {t['value']:.3g} | {sign} {t['bound']:.3g} | {verdict} "
            f"| {why} |"
        )
    lines += ["", *(f"{i}. {reason}" for i, reason in enumerate(reasons, start=1))]
    return "\n".join(lines)


def _paper(found: list[dict[str, Any]]) -> str:
    """The seed paper's table: methods down, states across, and the crash column. Empty if it was
    not measured."""
    rows = {d["question"]: d["rows"] for d in found}
    cases = [
        c
        for c in dict.fromkeys(r["case"] for r in rows.get("iterations", ()))
        if c.startswith(tuple(f"{p}, state A" for p in PLOTTED))
    ]
    cells = {
        (r["case"], r["method"]): r
        for r in rows.get("iterations", ())
        if r["case"] in cases and r["median_us"] is not None
    }
    kills = {r["method"]: r for r in rows.get("kills", ()) if r["median_us"] is not None}
    if not cells:
        return ""
    lines = [
        "\n## The paper's table\n",
        PAPER,
        "| method | survives | crash | " + " | ".join(cases) + " |",
        "|---" * (3 + len(cases)) + "|",
    ]
    for method in dict.fromkeys(m for _, m in cells):
        here = [cells.get((case, method)) for case in cases]
        killed = kills.get(method)
        crash = f"{100 * killed['ratio']:.3g} % of {killed['extra']['kills']:.0f}" if killed else ""
        survives = next(r["durability"] for r in here if r)
        times = [
            f"{time_text(r['median_us'])} [{time_text(r['min_us'])} - {time_text(r['max_us'])}]"
            + (f" {r['ratio']:.3g} x" if r["ratio"] else "")
            if r
            else ""
            for r in here
        ]
        lines.append(f"| {method} | {survives} | {crash} | " + " | ".join(times) + " |")
    return "\n".join(lines)


def _section(data: dict[str, Any]) -> str:
    lines = [
        f"\n## {data['question']}: {data['title']}\n",
        f"Ratio: {data['ratio']}. Load {data['load'][0]:.1f}.\n",
    ]
    lines += [f"* {note}" for note in data["notes"]]
    case = None
    for r in data["rows"]:
        if r["case"] != case:
            case = r["case"]
            lines += [
                f"\n**{case}**\n",
                "| method | median | min | max | rounds | ratio | survives | |",
                "|---|---|---|---|---|---|---|---|",
            ]
        if r["median_us"] is None:
            lines.append(f"| {r['method']} | | | | | | {r['durability']} | {r['note']} |")
            continue
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.3g}"
        times = " | ".join(time_text(r[k]) for k in ("median_us", "min_us", "max_us"))
        if data["question"] == "instructions":
            times = " | ".join(f"{r[k]:,.0f}" for k in ("median_us", "min_us", "max_us"))
        rounds = r.get("rounds") or ""
        lines.append(
            f"| {r['method']} | {times} | {rounds} | {ratio} | {r['durability']} | "
            f"{_extra(r['extra'])} |"
        )
    return "\n".join(lines)


def write() -> Path:
    """Raises: FileNotFoundError if no question was answered yet."""
    found = [
        json.loads((OUT / f"{q}.json").read_text())
        for q in QUESTIONS
        if (OUT / f"{q}.json").exists()
    ]
    if not found:
        raise FileNotFoundError(f"{OUT}: no results: run `python -m benchmarks` first")
    RESULTS.write_text(
        "\n".join(
            [
                _header(found),
                _targets(found),
                _paper(found),
                *(_section(d) for d in found if d["rows"]),
            ]
        )
        + "\n"
    )
    return RESULTS


if __name__ == "__main__":
    print(f"wrote {write()}")

"""Writes benchmarks/RESULTS.md from build/bench/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import OUT, time_text
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
"""
BUSY = """
**The machine was busy with other work when this run began** (load {load:.1f} on {cores} cores): absolute times, and every time
that waits for a disk, are longer than on an idle one. Ratios of methods measured in turn suffer less; maxima say little.
"""


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
        f"| load (1 minute) | {before:.1f} before; {min(loads):.1f} to {max(loads):.1f} at the ends of questions |",
    ]
    if before > machine["cores"] / 2:
        lines.append(BUSY.format(load=before, cores=machine["cores"]))
    if any(d["quick"] for d in found):
        lines.append(f"\nSmallest cases only (`--quick`): {', '.join(d['question'] for d in found if d['quick'])}.\n")
    lines += [f"\n**{d['question']} was not answered**: {d['failure']}" for d in found if d["failure"]]
    return "\n".join(lines)


def _extra(extra: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.4g}" for name, value in extra.items() if name not in ("x", "bytes"))


def _targets(found: list[dict[str, Any]]) -> str:
    rows = [(d["question"], t) for d in found for t in d["targets"]]
    lines = ["\n## Figures aimed at\n", f"{sum(t['met'] for _, t in rows)} of {len(rows)} met in this run.\n"]
    lines += ["| question | figure | measured | aim | |", "|---|---|---|---|---|"]
    for question, t in rows:
        sign = "at least" if t["at_least"] else "at most"
        verdict = "met" if t["met"] else "**missed**" + (f": {t['reason']}" if t["reason"] else "")
        lines.append(f"| {question} | {t['text']} | {t['value']:.3g} | {sign} {t['bound']:.3g} | {verdict} |")
    return "\n".join(lines)


def _section(data: dict[str, Any]) -> str:
    lines = [f"\n## {data['question']}: {data['title']}\n", f"Ratio: {data['ratio']}. Load {data['load'][0]:.1f}.\n"]
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
        lines.append(f"| {r['method']} | {times} | {rounds} | {ratio} | {r['durability']} | {_extra(r['extra'])} |")
    return "\n".join(lines)


def write() -> Path:
    """Raises: FileNotFoundError if no question was answered yet."""
    found = [json.loads((OUT / f"{q}.json").read_text()) for q in QUESTIONS if (OUT / f"{q}.json").exists()]
    if not found:
        raise FileNotFoundError(f"{OUT}: no results: run `python -m benchmarks` first")
    RESULTS.write_text("\n".join([_header(found), _targets(found), *(_section(d) for d in found if d["rows"])]) + "\n")
    return RESULTS


if __name__ == "__main__":
    print(f"wrote {write()}")

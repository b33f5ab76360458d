"""The report of a run: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crashtests.jobs import BUILD, ROOT, Outcome

MODEL_NAMES = {
    "i": "death of the process: byte-exact prefixes of the stores",
    "ii": (
        "power failure on persistent memory: any prefix of each line's stores, non-temporal words "
        "in any order"
    ),
    "iii": "power failure on a disk: any version of each sector, torn or garbage",
    "iv": "damage: flipped bits, truncation, foreign sectors",
}


def commit_id() -> str:
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if dirty else "")


@dataclass
class Report:
    seed: int
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    detector: dict[str, int] | None = None
    interrupted: bool = False
    """It ended early: this is what was done until then."""
    rounds: int = 1
    """Each with a seed of its own, from `seed` on."""

    @property
    def failures(self) -> int:
        detector = self.detector["failures"] if self.detector else 0
        return (
            sum(max(len(o.failures), o.result.get("failures", 0)) for o in self.outcomes) + detector
        )

    def _sum(self, outcomes: list[Outcome], *keys: str) -> dict[str, int]:
        return {key: sum(o.result.get(key, 0) for o in outcomes) for key in keys}

    def as_dict(self) -> dict[str, Any]:
        by_mode: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in self.outcomes:
            by_mode[outcome.job.model or outcome.job.mode].append(outcome)
        keys = ("images", "distinct", "skipped", "windows", "exhaustive", "nested", "nested_images")
        models = {}
        for model in MODEL_NAMES:
            part = by_mode[model]
            models[model] = self._sum(part, *keys) | {
                "failures": sum(len(o.failures) for o in part)
            }
        answer: dict[str, Any] = {
            "seed": self.seed,
            "commit": commit_id(),
            "seconds": round(self.seconds, 1),
            "rounds": self.rounds,
            "interrupted": self.interrupted,
            "models": models,
            "kills": self._sum(by_mode["kill"], "trials", "nested")
            | {"failures": sum(len(o.failures) for o in by_mode["kill"])},
            "faults": self._sum(by_mode["fault"], "trials")
            | {"failures": sum(len(o.failures) for o in by_mode["fault"])},
            "mutants": saved_mutants(),
            "workloads": self._by_workload(),
            "failures": [failure for o in self.outcomes for failure in o.failures],
        }
        if self.detector is not None:
            answer["unlogged_stores"] = self.detector
        answer |= {part: found for part in BESIDE if (found := _saved(f"{part}.json")) is not None}
        if (coverage := _saved("coverage.json")) is not None:
            answer["branch_coverage"] = {key: coverage[key] for key in ("commit", "parts", "files")}
        return answer

    def _by_workload(self) -> dict[str, dict[str, int]]:
        table: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for o in self.outcomes:
            column = o.job.model or o.job.mode
            table[o.job.workload][column] += o.result.get("distinct", o.result.get("trials", 0))
        return {name: dict(row) for name, row in sorted(table.items())}

    def write(self, folder: Path = BUILD) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        data = self.as_dict()
        (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n")
        path = folder / "report.md"
        path.write_text(self._markdown(data))
        return path

    def _markdown(self, data: dict[str, Any]) -> str:
        lines = [
            "# Crash tests",
            "",
            (
                f"seed {data['seed']}, commit {data['commit']}, {data['seconds']:.0f} s, "
                f"{self.failures} failures"
            ),
            *(
                [f"{self.rounds} rounds, with seeds from {data['seed']} on"]
                if self.rounds > 1
                else []
            ),
            *(["**interrupted**: this is what was done until then"] if self.interrupted else []),
            "",
            (
                "| model | what may survive | distinct images | windows (all combinations made) | "
                "crashes in recovery | failures |"
            ),
            "|---|---|---|---|---|---|",
        ]
        for model, m in data["models"].items():
            windows = f"{m['windows']} ({m['exhaustive']})" if m["windows"] else ""
            cells = (
                f"({model})",
                MODEL_NAMES[model],
                f"{m['distinct']:,}" if m["images"] else "not asked for",
                windows,
                f"{m['nested_images']:,}",
                str(m["failures"]),
            )
            lines.append(f"| {' | '.join(cells)} |")
        kills, faults = data["kills"], data["faults"]
        killed = (
            f"{kills['trials']:,} trials, {kills['nested']:,} of them in recovery, "
            f"{kills['failures']} failures"
        )
        lines += [
            "",
            f"SIGKILL at a persistence primitive: {killed}.",
            f"Failing system calls: {faults['trials']:,} trials, {faults['failures']} failures.",
        ]
        if (m := data["mutants"])["total"]:
            lines.append(
                f"Mutants of the engine: {m['total']}, killed {m['killed']}, equivalent "
                f"{m['equivalent']}."
            )
        for part, text in BESIDE.items():
            if found := data.get(part):
                where = f"seed {found['seed']}, commit {found['commit']}"
                lines.append(f"{text.format(**found)}, {found['failures']} failures ({where}).")
        if self.detector is not None:
            lines.append(
                f"Stores of the engine into the pool: {self.detector['stores']:,}, past the seam "
                f"{self.detector['failures']}."
            )
        if coverage := data.get("branch_coverage"):
            lines += [
                "",
                f"At commit {coverage['commit']}:",
                "",
                "| part of the engine | branches taken | of |",
                "|---|---|---|",
            ]
            rows = coverage["parts"] | coverage["files"]
            lines += [
                f"| {name} | {b['taken']:,} ({100 * b['taken'] / b['total']:.1f} %) | "
                f"{b['total']:,} |"
                for name, b in rows.items()
            ]
        lines += [
            "",
            "| workload | (i) | (ii) | (iii) | (iv) | kills | faults |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in data["workloads"].items():
            cells = " | ".join(
                f"{row.get(key, 0):,}" for key in ("i", "ii", "iii", "iv", "kill", "fault")
            )
            lines.append(f"| {name} | {cells} |")
        if data["failures"]:
            lines += [
                "",
                "## Failures",
                "",
                f"At commit {data['commit']}; `again` says how to have one again.",
                "",
            ]
            lines += [f"* `{json.dumps(failure)}`" for failure in data["failures"][:50]]
        return "\n".join(lines) + "\n"


BESIDE = {
    "mixtures": "Mixtures of Hypothesis: {programs:,} programs, {images:,} distinct images",
    "protocol": "Global commits: {states:,} states of all interleavings, {mutants} mutants",
    "tiers": "Tiers: {images:,} distinct images, {faults:,} failing operations",
}
"""Runs of their own, which leave what they did for the report, and what is said of it."""


def leave(part: str, seed: int, folder: Path = BUILD, **counts: int) -> None:
    """For the next report. part: of BESIDE."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part}.json").write_text(
        json.dumps({"commit": commit_id(), "seed": seed, **counts}, indent=1) + "\n"
    )


def _saved(name: str) -> Any:
    """What a run of its own has left, or None."""
    path = BUILD / name
    return json.loads(path.read_text()) if path.exists() else None


def saved_mutants() -> dict[str, Any]:
    """Of the last `make nightly WHAT=mutants`, which takes its own time, and of which commit that
    was; zeros: it was not run."""
    found = _saved("mutants.json") or {}
    return {key: found.get(key, 0) for key in ("total", "killed", "equivalent")} | {
        "commit": found.get("commit", "")
    }

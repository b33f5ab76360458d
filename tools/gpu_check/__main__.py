"""`python -m tools.gpu_check [--device cuda|cpu] [--out FILE] [--quick]`"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import pmstore
from tools.gpu_check import losses, memory, rates, resume, streams
from tools.gpu_check.apart import Check, apart
from tools.gpu_check.device import Settings, chosen
from tools.gpu_check.outcome import Outcome

CHECKS: dict[str, Check] = {
    "resume": resume.check,
    "streams": streams.check,
    "losses": losses.check,
    "memory": memory.check,
    "copies": rates.copies,
    "steps": rates.steps,
    "first": rates.first,
}


def machine(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "pmstore": pmstore.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "device": str(settings.device),
    }
    if settings.cuda:
        about = torch.cuda.get_device_properties(settings.device)
        found |= {
            "device": about.name,
            "device_bytes": about.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def show(outcome: Outcome) -> None:
    print(f"{outcome.status:12} {outcome.name}  ({outcome.seconds:.1f} s)")
    if outcome.why:
        print(f"             {outcome.why}")
    for name, value in outcome.figures.items():
        print(f"             {name}: {value if isinstance(value, str) else f'{value:.4g}'}")
    for left in outcome.left_out:
        print(f"             not checked: {left}")
    sys.stdout.flush()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check.json"))
    parser.add_argument("--only", choices=CHECKS, action="append", help="these checks alone")
    parser.add_argument("--quick", action="store_true", help="64 MB, few kills: seconds, on a GPU")
    parser.add_argument("--bytes", type=int, help="of the state whose copies are timed (1e9)")
    parser.add_argument("--kills", type=int, help="of the training (1000)")
    parser.add_argument("--rounds", type=int, help="of everything else (15)")
    parser.add_argument(
        "--jobs", type=int, help="trainings that are killed side by side (half the cores)"
    )
    parser.add_argument(
        "--limit", type=float, default=3 * 3600, help="seconds that a check may take"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="for the stores (/dev/shm)")
    args = parser.parse_args(given)
    if args.folder and not args.folder.is_dir():
        parser.error(f"{args.folder} is no folder")
    return args


def main(given: Sequence[str] | None = None) -> int:
    """Returns: the exit status: 1: something is wrong."""
    args = arguments(given)
    device = chosen(args.device)
    place = args.folder or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    with tempfile.TemporaryDirectory(prefix=f"pmstore-gpu-{os.getpid()}-", dir=place) as folder:
        settings = Settings(
            device,
            Path(folder),
            args.bytes or (64 << 20 if args.quick else 10**9),
            args.rounds or (6 if args.quick else 15),
            args.kills or (3 if args.quick else 1000),
            args.seed,
            args.jobs or max(1, (os.cpu_count() or 1) // 2),
        )
        outcomes = []
        for name, check in CHECKS.items():
            if args.only and name not in args.only:
                continue
            outcomes.append(apart(name, check, settings, args.limit))
            show(outcomes[-1])
        page = {
            "machine": machine(settings),
            "settings": {
                "bytes": settings.nbytes,
                "rounds": settings.rounds,
                "kills": settings.kills,
                "seed": settings.seed,
            },
            "checks": [
                asdict(one) | {"aims": [asdict(aim) | {"met": aim.met} for aim in one.aims]}
                for one in outcomes
            ],
            "not_checked": [
                f"{one.name}: {text}"
                for one in outcomes
                for text in (*one.left_out, *([one.why] if one.status == "not checked" else []))
            ],
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(page, indent=1) + "\n")
    for aim in (aim for one in outcomes for aim in one.aims):
        print(aim)
    failed = [one.name for one in outcomes if one.status == "failed"]
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'nothing is wrong'}; see {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

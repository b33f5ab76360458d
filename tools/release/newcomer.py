"""What somebody does who has just installed a wheel: looks at the command, runs first programs.

    python -I newcomer.py README.md [--torch]

The loop over an array is that of docs/howto/arrays.md, beside README. --torch: README's training
loop too, killed and run again, and `pmstore demo --quick`. Run by
tools/release/dist.py in an environment that has the wheel and what it asks for, and nothing else.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\n{' '.join(command)}: {done.returncode}")
    return done.stdout


def programs(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def store_of(program: str) -> str:
    """The file that it opens."""
    name: str = re.findall(r'open\("([^"]+)"', program)[0]
    return name


def arrays(blocks: list[str]) -> str:
    """The loop over an array, with what it leaves."""
    (loop,) = [block for block in blocks if block.startswith("import pmstore\n")]
    Path("loop.py").write_text(loop, encoding="utf-8")
    run([sys.executable, "-I", "loop.py"])
    told = run(
        [str(Path(sys.executable).parent / "pmstore"), "show", store_of(loop), "step"]
    ).strip()
    if told != "100":
        raise SystemExit(f"the loop left step {told!r}")
    Path(store_of(loop)).unlink()
    return "the loop over an array"


def training(blocks: list[str]) -> str:
    """README's training loop, killed once; it ends as one that was not."""
    (loop,) = [block for block in blocks if block.startswith("# train.py\n")]
    Path("train.py").write_text(loop, encoding="utf-8")
    command = [sys.executable, "-I", "train.py"]
    whole = run(command).splitlines()[-1]
    Path(store_of(loop)).unlink()
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    if not killed.stdout.readline().startswith("step 0"):
        raise SystemExit("the training loop does not begin at step 0")
    time.sleep(0.3)
    killed.kill()
    killed.communicate()
    resumed = run(command).splitlines()
    if resumed[-1] != whole:
        raise SystemExit(f"{whole!r} became {resumed!r} after a kill")
    return f"the training loop, killed: {whole}"


def main(readme: str, *options: str) -> None:
    import pmstore
    from pmstore._engine import _native

    here = Path(sys.prefix)
    for module in (pmstore, _native):
        assert here in Path(str(module.__file__)).parents
    beside = Path(readme).parent / "docs" / "howto" / "arrays.md"
    done = [f"pmstore {pmstore.__version__}", arrays(programs(beside))]
    if "--torch" in options:
        done.append(training(programs(Path(readme))))
        run([str(Path(sys.executable).parent / "pmstore"), "demo", "--quick"])
        done.append("the demo")
    print("; ".join(done))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`make nightly WHAT=dist-test`: tests from the source package of `make dist`, unpacked and built
by this machine's compiler. Those that need files outside the package, so that none is missing.

What else they need are the packages of the environment of `make venv`, but for pmstore."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from tools.release.dist import BUILD, DIST, unpack
from tools.release.python import environment, install, run

TESTS = (
    *("house/test_style", "house/test_typed", "house/test_benchmarks"),
    *("docs/test_readme", "docs/test_examples", "docs/test_documents"),
    *("cli/test_crashtest_command", "formats/test_fuzz_formats", "dcp/test_dcp_example"),
)


def main() -> None:
    (archive,) = DIST.glob("*.tar.gz")
    source = unpack(archive, BUILD / "tests")
    fresh = environment(BUILD / "tests" / "venv", Path(sys.executable))
    folder = run([fresh, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    needed = sysconfig.get_path("purelib")
    (Path(folder) / "needed.pth").write_text(f"{needed}\n", encoding="utf-8")
    install(fresh, "--no-deps", "--no-build-isolation", "--editable", source)
    tests = [f"tests/{name}.py" for name in TESTS]
    print(run([fresh, "-m", "pytest", "-q", *tests], cwd=source))


if __name__ == "__main__":
    main()

"""Builds `pmstore._engine._native`: the engine (native/) and its cffi binding (API mode), in one
extension module.

Run by setuptools (`cffi_modules` in setup.py), never imported by the package.
"""

from pathlib import Path

from cffi import FFI

# setuptools wants source paths relative to the folder of setup.py, from which it runs.
NATIVE = Path("native")

SOURCES = [
    path for path in sorted(NATIVE.glob("*/*.[ch]")) if path.parent.name not in ("tests", "build")
]
INTERFACE = (
    *(
        "objects/pms.h",
        "heap/super.h",
        "flush/bring.h",
        "flush/chunks.h",
        "flush/filling.h",
        "base/fingerprint.h",
        "optim/optim.h",
    ),
    *("commit/landing.h", "crash/debug.h"),
)

# Without the first two the compiler leaves square roots, and with them the optimizers' loops,
# scalar; the third keeps it from rounding less often than torch does: native/optim/optim.c.
VECTORS = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]

ffibuilder = FFI()
ffibuilder.cdef((NATIVE / "pms.cdef").read_text(encoding="utf-8"))
ffibuilder.set_source(
    "pmstore._engine._native",
    "\n".join(f'#include "{header}"' for header in INTERFACE),
    sources=[str(path) for path in SOURCES if path.suffix == ".c"],
    depends=[str(path) for path in (*SOURCES, NATIVE / "pms.cdef") if path.suffix != ".c"],
    include_dirs=[str(NATIVE)],
    # Only the module's init function is seen from outside: two extensions of one process never
    # share the engine by accident.
    extra_compile_args=[
        *("-std=gnu11", "-D_GNU_SOURCE=", "-O2", "-g", "-Wall", "-Wextra"),
        *("-fvisibility=hidden", "-pthread", *VECTORS),
    ],
    extra_link_args=["-pthread", "-lm"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)

"""The two extension modules; everything else is in pyproject.toml."""

from glob import glob

import numpy
from setuptools import Extension, setup

ENGINE = "pmstore/engine"

setup(
    cffi_modules=[f"{ENGINE}/_build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(
            "pmstore.engine._binding",
            sources=[
                f"{ENGINE}/{name}.c" for name in ("_binding", "_memory", "_objects", "_transaction")
            ],
            include_dirs=["native", numpy.get_include()],
            depends=[f"{ENGINE}/_binding.h", *glob("native/*/*.h")],
            extra_compile_args=[
                "-std=gnu11",
                "-O2",
                "-g",
                "-Wall",
                "-Wextra",
                "-fvisibility=hidden",
            ],
        )
    ],
)

"""The two extension modules; everything else is in pyproject.toml."""

from glob import glob

import numpy
from setuptools import Extension, setup

ENGINE = "pmstore/engine"
PARTS = ("binding", "calls", "handle", "look", "memory", "objects", "ranges", "transaction")

setup(
    cffi_modules=[f"{ENGINE}/_build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(
            "pmstore.engine._binding",
            sources=[f"{ENGINE}/_{part}.c" for part in PARTS],
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

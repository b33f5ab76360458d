"""The two extension modules; everything else is in pyproject.toml."""

import numpy
from setuptools import Extension, setup

setup(
    cffi_modules=["pmstore/_build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(
            "pmstore._block",
            sources=["pmstore/_block.c", "pmstore/_memory.c", "pmstore/_objects.c", "pmstore/_transaction.c"],
            include_dirs=["native", numpy.get_include()],
            depends=["pmstore/_block.h", "native/commit/pool.h", "native/names/directory.h", "native/base/status.h", "native/base/layout.h"],
            extra_compile_args=["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
    ],
)

"""The two extension modules, and README as it stands outside of the repository; everything else is
in pyproject.toml."""

import re
import time
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ENGINE = "pmstore/_engine"
PARTS = (
    *("binding", "calls", "declared", "encode", "exports", "handle", "look", "memory", "objects"),
    *("plain", "spent", "transaction", "watch"),
)
# what README says in a clone, and what it says on the page of a package index
INSTALL = {
    "No wheel is published yet: pip compiles the engine, and needs a C compiler and": (
        "Where there is no wheel, pip compiles the engine: that needs a C compiler and"
    ),
    "pip install '.[torch,cli]'  # in a clone of this repository": (
        "pip install 'pmstore[torch,cli]'"
    ),
    "`pip install .` brings": "`pip install pmstore` brings",
    "`.[all]` brings": "`pmstore[all]` brings",
}


def value(file, name):
    """Of a line that assigns a string: setuptools has not read pyproject.toml yet."""
    text = Path(file).read_text(encoding="utf-8")
    return re.search(rf'^{name} = "(.*)"$', text, re.MULTILINE)[1]


def readme():
    """As a package index shows it. Its links and pictures lead to the files of this version, as
    none are beside it; and who reads it there has no clone to install from."""
    at = value("pyproject.toml", "Repository")
    version = "v" + value("pmstore/_base/version.py", "VERSION")

    def absolute(found):
        kind = "raw" if found["picture"] else "blob"
        return f"{found['before']}({at}/{kind}/{version}/{found['path']})"

    text = Path("README.md").read_text(encoding="utf-8")
    for here, there in INSTALL.items():
        if here not in text:
            raise SystemExit(f"README.md has no {here!r}: see setup.py")
        text = text.replace(here, there)
    link = r"(?P<before>(?P<picture>!?)\[[^\]]*\])\((?!https?:|#|mailto:)(?P<path>[^)\s]+)\)"
    return re.sub(link, absolute, text)


class Build(build_ext):
    """Says what it does, to those who look: `pip install -v`."""

    def build_extension(self, extension):
        began = time.monotonic()
        print(f"{extension.name}: compiling {len(extension.sources)} files of C", flush=True)
        super().build_extension(extension)
        print(f"{extension.name}: took {time.monotonic() - began:.0f} s", flush=True)


setup(
    cmdclass={"build_ext": Build},
    long_description=readme(),
    long_description_content_type="text/markdown",
    cffi_modules=[f"{ENGINE}/_build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(
            "pmstore._engine._binding",
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

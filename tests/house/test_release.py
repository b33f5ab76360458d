"""What a release names is there: nobody makes one with each change."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def constant(file: str, name: str) -> object:
    """Of the module's own lines; it is not imported."""
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return eval(ast.unparse(node.value))
    raise KeyError(name)


def test_the_tests_that_a_source_package_runs() -> None:
    names = constant("tools/release/source_tests.py", "TESTS")
    assert isinstance(names, tuple)
    missing = [name for name in names if not (ROOT / "tests" / f"{name}.py").exists()]
    assert missing == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_workflows_make(path: Path) -> None:
    """Targets, and files that they run."""
    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"run: make ([a-z-]+)", text))
    assert targets or ".ci/run" in text
    assert {one for one in targets if not re.search(rf"^{one}:", makefile, re.MULTILINE)} == set()
    for file in re.findall(r"(?:bash|bin/python -I) (?:\.\./)?(\S+)", text):
        assert (ROOT / file).exists()


def test_what_readme_says_on_an_index() -> None:
    """setup.py puts other words where README speaks of a clone."""
    words = constant("setup.py", "INSTALL")
    assert isinstance(words, dict)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [one for one in words if one not in readme] == []
    for here, there in words.items():
        readme = readme.replace(here, there)
    assert "pip install '." not in readme
    assert "`pip install .`" not in readme


def test_the_conda_recipe_is_of_this_package() -> None:
    recipe = (ROOT / "tools" / "release" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = constant("pmstore/_base/version.py", "VERSION")
    assert re.findall(r'^  version: "(.*)"$', recipe, re.MULTILINE) == [version]
    wanted = set()
    for key in ("requires", "dependencies"):
        (told,) = re.findall(rf"^{key} = (\[.*\])$", pyproject, re.MULTILINE)
        wanted |= {re.sub(r"(?=[<>=])", " ", one, count=1) for one in ast.literal_eval(told)}
    found = set(re.findall(r"^    - ([a-z-]+ >=.*)$", recipe, re.MULTILINE))
    assert {one.replace("msgpack-python", "msgpack") for one in found} == wanted


def test_the_changelog_begins_with_the_version() -> None:
    version = constant("pmstore/_base/version.py", "VERSION")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)[0]
    assert first in (version, "Unreleased")

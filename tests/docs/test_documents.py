"""The documents' programs and commands run as they stand there (documents.py says how), links lead
somewhere, and drawings are as they are drawn."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import pmstore  # noqa: E402
import pmstore.torch  # noqa: E402
from tests.documents import ROOT, blocks, pages, run  # noqa: E402


def make_run() -> None:
    """A short run, stored in run.pm."""
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pmstore.open("run.pm", size="8MiB") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        for _ in run.steps(3):
            loss = model(torch.ones(2, 20)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


def add_tiers() -> None:
    """The store that is given has some."""
    with pmstore.open("given.pm", size="16MiB") as store:
        for name in ("disk", "remote"):
            store.add_tier(name, name)


def save_model() -> None:
    torch.save(torch.nn.Linear(20, 1).state_dict(), "pretrained.pt")


def write_wandb() -> None:
    """What the page uses of W&B, which needs a server: a folder instead of it."""
    Path("wandb.py").write_text(WANDB, encoding="utf-8")


WANDB = """
from pathlib import Path
from types import SimpleNamespace

def init(project, id, resume):
    global run, told
    run, told = SimpleNamespace(resumed=False), []

def log(values, step=None):
    assert values and (step is None or step == len(told) + 1), step
    told.append(values)

class Artifact:
    def __init__(self, name, type):
        self.files = []

    def add_file(self, path):
        self.files.append(Path(path).read_bytes())

def log_artifact(artifact, aliases=()):
    assert all(artifact.files)

def finish():
    assert len(told) == 30
"""


PREPARED = {
    "docs/howto/from_torch_save.md": save_model,
    "docs/howto/from_wandb.md": write_wandb,
    "docs/SCHEDULER.md": add_tiers,
    "docs/howto/readers.md": make_run,
    "docs/howto/deploying.md": make_run,
}


NEEDS = {
    "docs/howto/from_lightning.md": "lightning",
    "docs/howto/from_orbax.md": "optax",
    "docs/howto/from_transformers.md": "transformers",
}


@pytest.mark.parametrize("page", pages())
def test_what_stands_in(page: str, shm: Path) -> None:
    if needed := NEEDS.get(page):
        pytest.importorskip(needed)
    ran = run(page, shm, PREPARED.get(page))
    assert ran + sum(block.why_not is not None for block in blocks(page)) == len(blocks(page))


def test_drawings_are_as_they_are_drawn() -> None:
    """docs/site/diagrams.py draws them, and they are stored."""
    drawn = runpy.run_path(str(ROOT / "docs" / "site" / "diagrams.py"))
    for name, drawing in drawn["DRAWINGS"].items():
        assert (ROOT / "docs" / "pictures" / name).read_text(
            encoding="utf-8"
        ) == drawing().text_of_file()


def test_links_lead_somewhere() -> None:
    """From a document to a file, and to a heading in it, named as the forges name them."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*.md")]
    dead = []
    for path in sorted(set(documents)):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            name, _, place = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (place and place not in headings(target)):
                dead.append(f"{path.relative_to(ROOT)}: {link}")
    assert not dead


def test_words_of_the_glossary_have_one_entry_and_one_place() -> None:
    text = (ROOT / "docs" / "GLOSSARY.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\d+\. \*\*([^*]+)\*\*: (.*?)(?=^\d+\. |^#|\Z)", text, re.M | re.S)
    words = [word for word, _ in entries]
    words += re.findall(r"\*([A-Za-z ]+)\*", "".join(said for _, said in entries))
    assert 20 < len(entries) <= 40  # what is an ordinary word of the field has no entry
    assert sorted({word.lower() for word in words}) == sorted(word.lower() for word in words)
    for word, said in entries:
        places = [place for place in re.findall(r"`([\w/.]+)`", said) if "/" in place]
        assert places, word
        assert all((ROOT / place).exists() for place in places), word


def test_the_architecture_is_one_page() -> None:
    """What a page or a source file says already is linked there."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    (rooms,) = re.findall(r"^native: (.*)$", (ROOT / "LAYERS").read_text(), re.MULTILINE)
    assert [room for room in rooms.split() if f"| `{room}/` |" not in text] == []


def headings(document: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in found]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_documented_golden_counts() -> None:
    """docs/EXPERIMENTS.md shows some of the counts that native/tests/test_golden.c holds."""
    source = (ROOT / "native" / "tests" / "test_golden.c").read_text()
    golden = {
        name: counts
        for name, *counts in re.findall(r'\{"([^"]+)", \w+, \d+, (\d+), (\d+), \w+\}', source)
    }
    table = (
        (ROOT / "docs" / "EXPERIMENTS.md")
        .read_text()
        .partition("| transaction | fences | lines |")[2]
        .split("\n\n")[0]
    )
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|", table, re.MULTILINE)
    assert len(rows) >= 6
    assert [[name, *golden[name]] for name, *_ in rows] == [list(row) for row in rows]

"""The command line as a user meets it: closed outputs, other locales, narrow terminals, wrong
questions. No traceback, and the exit codes that docs/CLI.md names."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.completion import get_completion_script
from typer.testing import CliRunner

import pmstore
from pmstore.commands import cli
from pmstore.commands.application import app
from pmstore.commands.cli import plain
from pmstore.commands.json_arrays import exact_array
from pmstore.commands.table import TABLE
from pmstore.show.curve import curve, thinned

LOSSES = (3 * np.exp(-np.arange(400) / 80) + 0.25).tolist()

Answer = tuple[int, str, str]


def run(*words: object) -> Answer:
    """Exit code, output, errors. Nothing but an exit comes through."""
    told = CliRunner().invoke(app, [str(word) for word in words])
    assert told.exception is None or isinstance(told.exception, SystemExit), words
    return told.exit_code, told.stdout, told.stderr


@pytest.fixture
def path(shm: Path) -> Path:
    path = shm / "run.pm"
    with pmstore.open(path, size="4MiB") as store:
        store["config"] = {"lr": 0.001, "name": "naïve"}
        store["losses"] = np.array(LOSSES)
        store.list("history").extend(LOSSES)
        store.list("mixed").extend([1, "text"])
        store["model/layer/with/a/long/way/down/to/the/weights"] = np.zeros((30, 40), np.float32)
        store["model/b"] = np.arange(5)
        store["größe"] = 1
        store.add_tier("disk", str(shm / "tier"))
        store.commit()
        store.flush("disk", wait=True)
    return path


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """The entry point itself."""

    def call(*words: object) -> Answer:
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        monkeypatch.setattr(sys, "argv", ["pmstore", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return call


# ---- wrong questions ----


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (2, "300 is no uint8: it is not from 0 to 255", "set {} x --dtype uint8 [300]"),
        (2, "1.7 is no uint8: it is not whole", "set {} x --dtype uint8 [1.7]"),
        (2, "is no float32: it is beyond 3.403e+38", "set {} x --dtype float32 [1e99]"),
        (2, "give one of them", "set {} x --dtype uint8 --text [1]"),
        (2, "give one of them", "set {} x --dtype uint8 --file x.npy"),
        (2, "numpy knows no such dtype", "set {} x --dtype nosuch [1]"),
        (2, "different lengths", "set {} x --dtype f4 [[1],[2,3]]"),
        (2, "1e999 is beyond all floats", "set {} x 1e999"),
        (2, "has the key 'a' twice", 'set {} x {{"a":1,"a":2}}'),
        (2, "nested too deeply", "set {} x " + "[" * 100_000),
        (2, "no such directory, and so no tier", "epochs {}.nothing"),
        (2, "no such directory, and so no tier", "restore {}.b {}.nothing"),
        (2, "a file; a tier is a directory", "epochs {}"),
        (2, "no such epoch. It has epoch", "restore {}.b {.parent}/tier --epoch 99"),
        (2, "/nodir: there is no such directory", "dump {} {.parent}/nodir/x"),
        (2, "/nodir: there is no such directory", "export {} {.parent}/nodir/x.npz"),
        (2, "/nodir: there is no such directory", "create {.parent}/nodir/x.pm"),
        (2, "no room for 60.0 TiB: ", "create {.parent}/big.pm --size 60TiB"),
        (2, "at most 64 TiB", "create {.parent}/big.pm --size 100PiB"),
        (2, "a directory: give a store's file", "ls {.parent}"),
        (1, "It was left as it is: give a store's path\n", "ls /etc/passwd"),
    ],
)
def test_wrong_questions(code: int, said: str, words: str, path: Path) -> None:
    before = {file.name for file in path.parent.iterdir()}
    exit_code, out, err = run(*(word.format(path, path) for word in words.split(" ")))
    assert (exit_code, out) == (code, ""), err
    assert said in err
    assert len(err.splitlines()) == 1
    assert ".part" not in err
    assert "remove it" not in err
    assert {file.name for file in path.parent.iterdir()} == before


def test_what_a_temporary_file_is_called_is_not_told(path: Path) -> None:
    assert run("dump", path, path.parent / "d")[0] == 0
    code, _, err = run("load", path.parent / "d", path.parent / "b.pm", "--max-size", "1MiB")
    assert (code, err) == (2, f"pmstore: {path.parent / 'b.pm'}: max_size is smaller than size\n")


@pytest.mark.parametrize(
    ("parsed", "dtype"),
    [
        ([300], "uint8"),
        ([-1], "uint8"),
        ([1.5], "int64"),
        ([1e30], "int64"),
        ([10**30], "int64"),
        ([10**400], "float64"),
        ([1e99], "float32"),
        ([1e-99], "float32"),
        ([70000.0], "float16"),
        ([2], "bool"),
        ([None], "float64"),
        (["1"], "float64"),
        ([float("nan")], "int32"),
        (["abcd"], "S3"),
        (["abcd"], "U3"),
        ([1], "S3"),
        ({"a": 1}, "float32"),
        ([[1], [2, 3]], "int8"),
    ],
)
def test_what_a_dtype_cannot_hold_is_refused(parsed: object, dtype: str) -> None:
    with pytest.raises(ValueError):
        exact_array(parsed, dtype)


@pytest.mark.parametrize(
    ("parsed", "dtype"),
    [
        ([255, 0, 3.0], "uint8"),
        ([1e-3, float("inf"), float("nan")], "float32"),
        ([True, 0], "bool"),
        (["abc", "d"], "S3"),
        ([["äöü"]], "U"),
        ([1, 2.5], "complex64"),
        (7, "int64"),
        ([], "float32"),
    ],
)
def test_what_a_dtype_can_hold_is_numpys(parsed: object, dtype: str) -> None:
    made, meant = exact_array(parsed, dtype), np.array(parsed, dtype)
    assert (made.dtype, made.tobytes()) == (meant.dtype, meant.tobytes())


def test_a_negative_number_is_a_value(path: Path) -> None:
    assert run("set", path, "x", "-1.5")[0] == 0
    assert run("show", path, "x")[1] == "-1.5\n"


def test_words_that_are_wrong_are_one_line(main: Callable[..., Answer], path: Path) -> None:
    for words in (["lss"], ["ls"], ["ls", "--nope", path], ["show", path, "b", "-n", "0"]):
        code, out, err = main(*words)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"pmstore: .* \(pmstore.* --help tells more\)\n", err)
    assert "Did you mean 'ls'?" in main("lss")[2]


def test_a_fault_of_pmstore_is_one_line(
    main: Callable[..., Answer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise RuntimeError("by mistake")

    monkeypatch.delenv("PMSTORE_TRACEBACK", raising=False)
    monkeypatch.setattr("pmstore.commands.info.ls", broken)
    code, out, err = main("ls", path)
    assert (code, out) == (3, "")
    assert err.startswith("pmstore: a fault of pmstore: RuntimeError: by mistake")
    assert len(err.splitlines()) == 1


# ---- closed outputs, other locales ----


def shell(line: str, **environment: str) -> Answer:
    """A line of a shell, in which "pmstore" is the command."""
    told = subprocess.run(
        ["bash", "-c", f'pmstore() {{ "{sys.executable}" -m pmstore "$@"; }}\n{line}'],
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert b"Traceback" not in told.stderr
    return told.returncode, told.stdout.decode("latin-1"), told.stderr.decode()


def test_closed_outputs(path: Path) -> None:
    lost = "pmstore: standard output: Bad file descriptor\n"
    assert shell(f"pmstore ls {path} >&-") == (2, "", lost)
    assert shell(f"pmstore top {path} >&-") == (2, "", lost)
    full = "pmstore: standard output: No space left on device\n"
    for words in (f"show {path} losses --limit 9999", f"report {path} -o -", f"dump {path} -"):
        assert shell(f"pmstore {words} >/dev/full") == (2, "", full)
    assert shell(f"pmstore ls {path} >&- 2>&-")[0] == 2
    assert shell(f"pmstore set {path} x 1 >&- 2>&- <&-")[0] == 0
    assert shell(f"pmstore check {path} 2>&-")[0] == 0
    assert shell(f"pmstore set {path} y - <&-")[0] == 2
    assert shell(f"pmstore ls {path} | head -1")[2] == ""


def test_a_locale_without_the_letters(path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, out, err = shell(
        f"pmstore ls {path} && pmstore show {path} größe && pmstore show {path} losses &&"
        f" pmstore info {path} && pmstore set {path} ä/ö '\"ü\"'",
        **ascii_only,
    )
    assert (code, err) == (0, "")
    assert out.isascii()
    assert "gr\\xf6\\xdfe" in out
    assert re.search(r"^values .* \|\*+$", out, re.MULTILINE)
    assert run("show", path, "ä/ö")[1] == "'ü'\n"


# ---- widths, colour ----


@pytest.mark.parametrize("width", [60, 80, 120])
def test_answers_fit_in_the_terminal(
    width: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [
        ["info", "--all", path],
        ["ls", "-r", path],
        ["show", path, "losses"],
        ["show", path, "history"],
        ["show", path, "model"],
        ["epochs", path.parent / "tier"],
        ["job", path],
    ]
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = [run(*words)[1] for words in questions]
    monkeypatch.setenv("COLUMNS", str(width))
    for words, free in zip(questions, wide, strict=True):
        told = run(*words)[1]
        too_long = [
            line for line in told.splitlines() if len(line) > width and str(path.parent) not in line
        ]
        assert not too_long
        if words[0] in ("info", "ls"):  # no number is broken, nor leaves its unit
            for number in re.findall(r"\d[\d.,]* (?:[KMG]iB|bytes|names?|items)", free):
                assert number in told
    drawn = [line for line in run("show", path, "losses")[1].splitlines() if "│" in line]
    assert len(drawn) == 8
    assert max(map(len, drawn)) > width * 0.7
    heap = next(line for line in run("info", "-a", path)[1].splitlines() if line[:4] == "heap")
    assert heap.count("|") == 2
    assert len(heap.split("|")[1]) == (32 if width == 60 else 64)


@pytest.mark.parametrize("width", [60, 80])
def test_the_help_fits_and_loses_nothing(
    width: int, main: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, told, _ = main("--help")
    assert code == 0
    assert max(map(len, told.splitlines())) <= width
    for place in TABLE.values():
        assert place.summary in " ".join(told.split())


def on_a_terminal(*words: object, **environment: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    kept = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")
    }
    with subprocess.Popen(
        [sys.executable, "-m", "pmstore", *map(str, words)],
        stdout=theirs,
        stderr=subprocess.STDOUT,
        env={**kept, "TERM": "xterm", **environment},
    ) as running:
        os.close(theirs)
        shown = b""
        try:
            while some := os.read(ours, 1 << 16):
                shown += some
        except OSError:  # EIO: nobody has it open any more
            pass
        os.close(ours)
    assert running.returncode == 0, shown
    return shown.decode()


def test_colour_is_for_terminals(path: Path) -> None:
    coloured = on_a_terminal("ls", path)
    assert "\x1b[1;34mmodel\x1b[0m" in coloured
    assert "\x1b[36mdomain\x1b[0m" in on_a_terminal("info", path)
    assert "\x1b" not in on_a_terminal("ls", path, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal("ls", path, TERM="dumb")
    assert "\x1b" not in run("ls", path)[1]


# ---- pictures, counts ----


@pytest.mark.parametrize("name", ["losses", "history"])
def test_losses_are_a_curve_with_its_ends(name: str, path: Path) -> None:
    told = run("show", path, name)[1]
    assert len([line for line in told.splitlines() if "│" in line]) == 8
    assert re.search(rf"^first +{LOSSES[0]:.6g}, ", told, re.MULTILINE)
    assert re.search(rf"^last +\.\.\. .*, {LOSSES[-1]:.6g}$", told, re.MULTILINE)
    facts = json.loads(run("show", path, name, "--json")[1])
    assert (facts["first"], facts["last"]) == (LOSSES[:12], LOSSES[-12:])


def test_a_curve_by_the_logarithm_is_straight_where_values_shrink_by_a_share() -> None:
    values = 100 * 0.9 ** np.arange(64)
    rows = curve(values, 80, 7, blocks=False, logarithmic=True)
    assert [row.split("|")[0].strip() for row in rows] == ["100", "", "", "log", "", "", "0.131"]
    heights = [
        next(at for at, row in enumerate(rows) if row.partition("|")[2].ljust(64)[column] == "*")
        for column in range(64)
    ]
    assert heights == [round(column * 6 / 63) for column in range(64)]
    for linear in (values - 1, values + 99, np.zeros(9)):  # not positive, or not far apart
        assert curve(linear, 80, 7, logarithmic=True) == curve(linear, 80, 7)


def test_a_curve_goes_where_the_values_go() -> None:
    rows = curve(np.linspace(5.0, 1.0, 64), 80, 4, blocks=False)
    columns = [[row.find("*", 3) for row in rows], [row.rfind("*") for row in rows]]
    assert columns[0] == sorted(columns[0])
    assert columns[1] == sorted(columns[1])
    assert rows[0].startswith("5 |*")
    assert rows[-1].startswith("1 |")
    assert rows[-1].endswith("*")


@pytest.mark.parametrize(
    "values",
    [
        [],
        [float("nan")] * 9,
        [1e308, -1e308] * 40,
        [5e-324, 0.0] * 40,
        [7.0] * 99,
        [float("inf"), 1],
    ],
)
def test_any_values_are_drawn_or_not(values: list[float]) -> None:
    drawn = curve(values, 30, 5)
    assert len(drawn) == (5 if np.isfinite(values).any() else 0)


def test_thinned_values_are_means() -> None:
    assert thinned([1.0, 3.0, np.nan, 5.0, np.nan, np.nan], 3).tolist()[:2] == [2.0, 5.0]
    assert np.isnan(thinned([1.0, 3.0, np.nan, 5.0, np.nan, np.nan], 3)[2])


def test_ls_counts(path: Path) -> None:
    rows = {line.split()[0]: line for line in run("ls", path)[1].splitlines()}
    assert rows["model"].endswith("2 names")
    assert rows["history"].endswith("400 items")
    assert rows["größe"].endswith(" 1 byte")
    told = {row["name"]: row for row in json.loads(run("ls", path, "--json")[1])}
    assert (told["model"]["items"], told["mixed"]["items"]) == (2, 2)
    assert "items" not in told["losses"]


# ---- permissions ----


def test_what_is_written_of_a_private_store_is_private(path: Path) -> None:
    pytest.importorskip("safetensors")
    before = os.umask(0)
    try:
        folder = path.parent
        assert run("dump", path, folder / "d.dump")[0] == 0
        assert run("export", path, folder / "e.npz")[0] == 0
        assert run("export", path, folder / "f.safetensors")[0] == 0
        assert run("load", folder / "d.dump", folder / "g.pm")[0] == 0
    finally:
        os.umask(before)
    for name in ("run.pm", "d.dump", "e.npz", "f.safetensors", "g.pm"):
        assert (path.parent / name).stat().st_mode & 0o777 == 0o600, name


# ---- completion ----


def completed(*words: object) -> list[str]:
    line = " ".join(["pmstore", *map(str, words)])
    environment = {
        "_PMSTORE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
    }
    told = CliRunner().invoke(app, [], env=environment, prog_name="pmstore")
    return told.stdout.split()


def test_completion(path: Path) -> None:
    tier = path.parent / "tier"
    epoch = pmstore.epochs(tier)[0]
    domains = ["auto", "dax", "file", "process", "emulated"]
    for command in ("create", "load", "restore", "demo"):
        assert completed(command, "--domain", "") == domains
    assert completed("crashtest", "--model", "") == ["kill", "power", "term"]
    assert completed("schedule", "simulate", "--cost", "") == ["disk", "big", "pmem"]
    assert "float32" in completed("set", path, "x", "--dtype", "")
    assert completed("flush", path, "") == ["disk"]
    assert completed("restore", "b.pm", tier, "--epoch", "") == [str(epoch.epoch)]
    assert completed("restore", "b.pm", tier, "--run", "") == [epoch.run]
    assert completed("ls", path, "mo") == ["model", "model/"]
    assert completed("ls", path, "model/") == ["model/layer", "model/layer/"]
    assert completed("show", path, "mo") == ["model/", "model/layer/", "model/b"]
    assert completed("show", path, "model/l") == ["model/layer/", "model/layer/with/"]
    assert ".pmstore/" not in completed("show", path, "")
    assert completed("show", path, ".")[0] == ".pmstore/"
    for words in (["export", path, "x.npz"], ["import", "x.npz", path]):
        assert completed(*words, "--group", "mo") == ["model", "model/"]
    assert completed("restore", "b.pm", "s3://bucket/run", "--epoch", "") == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_the_first_tab_of_a_zsh(tmp_path: Path) -> None:
    """The file is a function that zsh loads, and calls, by the first completion."""
    script = get_completion_script(
        prog_name="pmstore", complete_var="_PMSTORE_COMPLETE", shell="zsh"
    )
    (tmp_path / "_pmstore").write_text(script)
    (tmp_path / "pmstore").write_text("#!/bin/sh\necho print answered\n")
    (tmp_path / "pmstore").chmod(0o755)
    session = (
        f"path+={tmp_path}; fpath+={tmp_path}; compdef() {{}}; words=(pmstore in); CURRENT=2; "
        "autoload -U _pmstore; _pmstore; _pmstore_completion"
    )
    told = subprocess.run(["zsh", "-fc", session], capture_output=True, text=True, check=True)
    assert told.stdout == "answered\n" * 2, told


# ---- notebooks ----


def test_reports_in_a_notebook(path: Path) -> None:
    with pmstore.open(path) as store:
        store["<i>"] = 1
        group, losses = store["model"]._repr_html_(), store["history"]._repr_html_()
        info, stats = store.info()._repr_html_(), store.stats()._repr_html_()
        check, recovery = store.check()._repr_html_(), store.recovery._repr_html_()
        names = store._repr_html_()
    assert "<td>1 name</td>" in group
    assert "<rect" in group
    assert f"curve from {LOSSES[0]:.6g} to " in losses
    assert "polyline" not in store_html_of_mixed(path)
    assert "<td>400 items</td>" in names
    assert "&lt;i&gt;" in names
    assert f"<td>{path}</td>" in info
    assert "<rect" in info
    assert "<td>used bytes</td>" in stats
    assert "sound" in check
    assert "closed cleanly" in recovery
    for told in (group, losses, info, stats, check, recovery):
        assert told.count("<table>") == told.count("</table>") == 1


def store_html_of_mixed(path: Path) -> str:
    with pmstore.open(path, "r") as store:
        return str(store["mixed"]._repr_html_())


# ---- start-up ----


def imported(*words: object) -> set[str]:
    """What a command has imported when it ends."""
    code = (
        "import sys, atexit; sys.argv = ['pmstore', *sys.argv[1:]];"
        "atexit.register(lambda: print(' '.join(sys.modules), file=sys.stderr));"
        "from pmstore.commands.cli import main; main()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True
    )
    return set(told.stderr.split())


def test_nothing_is_imported_for_the_version() -> None:
    ours = {name for name in imported("--version") if name.startswith(("pmstore.", "numpy"))}
    assert ours == {"pmstore._base", "pmstore._base.lazy_imports", "pmstore._base.version"} | {
        "pmstore.commands",
        "pmstore.commands.cli",
    }


@pytest.mark.parametrize("words", [["ls"], ["ls", "-r"], ["info"], ["check"]])
def test_what_is_asked_most_imports_neither_typer_nor_rich(words: list[str], path: Path) -> None:
    there = imported(*words, path)
    assert "numpy" in there
    heavy = {"typer", "click", "rich", "torch", "pmstore.commands.app", "fsspec"}
    if words[0] == "ls":
        heavy |= {"pmstore._engine.store_info", "pmstore.tiers.tiers", "html", "json"}
    assert heavy & there == set()


@pytest.mark.parametrize("name", [name for name, place in TABLE.items() if place.plain])
def test_quick_forms_say_what_typer_says(
    name: str, path: Path, main: Callable[..., Answer]
) -> None:
    """Both parsers know the same flags, and give the same answers."""
    words = [path, "losses"] if name == "show" else [path]
    for flag in (None, "--json", *(("-r", "--recursive") if name == "ls" else ())):
        given = [name, *words, *([flag] if flag else [])]
        assert plain([str(word) for word in given]) is not None
        assert main(*given) == run(*given)


def test_what_is_not_plain_is_left_to_typer(path: Path) -> None:
    for words in (["ls"], ["ls", "--help"], ["ls", "a", "b", "c"], ["show", "a"], ["set", "a"], []):
        assert plain(words) is None


def test_damage_is_bad_news(path: Path) -> None:
    """The question was right: exit code 1."""
    for chunk in (path.parent / "tier").iterdir():
        if chunk.suffix != ".manifest":
            data = bytearray(chunk.read_bytes())
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
            chunk.write_bytes(data)
    code, _, err = run("restore", path.parent / "b.pm", path.parent / "tier")
    assert (code, "no epoch could be restored" in err) == (1, True), err
    store = bytearray(path.read_bytes())
    store[: 1 << 16] = bytes(1 << 16)
    path.write_bytes(store)
    assert run("check", path)[0] == 1


WRITER = """
import sys
import pmstore

with pmstore.open(sys.argv[1], size="100MiB") as store:
    w = store.require("w", (2 << 20,), "float64")
    while True:
        with store.transaction():
            w += 1
        print("commit", flush=True)
"""


def test_large_arrays_beside_a_program_that_rewrites_them(shm: Path) -> None:
    path = shm / "run.pm"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"commit\n"
        reading = threading.Thread(target=writer.stdout.read, daemon=True)
        reading.start()
        try:
            shown = run("show", path, "w", "--json")
            exported = run("export", path, shm / "w.npz")
        finally:
            writer.kill()
        reading.join()
    assert (shown[0], exported[0]) == (0, 0), (shown[2], exported[2])
    told = json.loads(shown[1])
    assert told["minimum"] == told["maximum"] >= 1
    array = np.load(shm / "w.npz")["w"]
    assert (array == array[0]).all()

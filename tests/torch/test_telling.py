"""A run's metrics in TensorBoard's writers and at an endpoint."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import pmstore
from pmstore.torch import AttachError, Run
from pmstore.torch.openmetrics import CONTENT_TYPE, openmetrics
from tests.torch.test_metrics import begin

torch.set_num_threads(1)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with pmstore.open(tmp_path / "run.pm", size="8MiB") as store:
        yield store


class Writer:
    def __init__(self) -> None:
        self.told: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.told.append((tag, scalar_value, global_step))


def ask(url: str, host: str | None = None) -> tuple[str, str]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=60) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def values(text: str) -> dict[str, float]:
    """Of one text: samples by name, without labels."""
    lines = text.splitlines()
    assert lines[-1] == "# EOF"
    assert text.endswith("\n")
    return {
        line.split("{", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if not line.startswith("#")
    }


def go(run: Run, step: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(float(step().detach()))
        run.commit(losses[-1])
    return losses


def test_a_tensorboard_writer_gets_the_metrics(store: pmstore.Store) -> None:
    run, step = begin(store)
    writer = Writer()
    run.log_to(writer, every=0.0)
    losses = go(run, step, 5)
    at = {number for _, _, number in writer.told}
    assert at <= {1, 2, 3, 4, 5}
    assert at >= {1, 2, 3}
    for tag, value, number in writer.told:
        if tag == "pmstore/loss":
            assert value == losses[number - 1]
        if tag == "pmstore/step":
            assert value == number
    run.detach()
    with pytest.raises(AttachError):
        run.log_to(writer)


def test_a_writer_that_fails_stops_no_training(store: pmstore.Store) -> None:
    run, step = begin(store)

    class Full(Writer):
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            raise OSError("the disk is full")

    good = Writer()
    run.log_to(Full(), every=0.0)
    run.log_to(good, every=0.0)
    with pytest.warns(RuntimeWarning, match=r"Full failed.*the disk is full"):
        go(run, step, 3)
    assert run.committed == 3
    assert good.told
    with pytest.raises(TypeError, match="add_scalar"):
        run.log_to(print)  # type: ignore[arg-type]


def test_the_endpoint_tells_the_runs_numbers(store: pmstore.Store) -> None:
    run, step = begin(store)
    endpoint = run.serve_metrics()
    assert endpoint.url.startswith("http://127.0.0.1:")
    text, kind = ask(endpoint.url)
    assert kind == CONTENT_TYPE
    assert values(text)["pmstore_step"] == 0
    losses = go(run, step, 1)
    found = values(ask(endpoint.url)[0])
    assert found["pmstore_step"] == 1
    assert found["pmstore_loss"] == pytest.approx(losses[0])
    assert found["pmstore_epoch"] == store.epoch - 1  # as of the moment before the commit
    assert 'run="run"' in ask(endpoint.url)[0]
    for url, host, code in (
        (endpoint.url, "evil.example", 403),
        (endpoint.url.replace("/metrics", "/"), None, 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(url, host)
        assert caught.value.code == code
        caught.value.close()
    port = int(endpoint.url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match="in use"):
        run.serve_metrics(port)
    run.detach()
    with pytest.raises(urllib.error.URLError):
        ask(endpoint.url)
    assert not [one for one in threading.enumerate() if one.name == "pmstore metrics"]


def test_it_is_closed_with_the_store_and_by_itself(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm", size="8MiB") as store:
        run, step = begin(store)
        with run.serve_metrics() as first:
            ask(first.url)
        first.close()
        second = run.serve_metrics()
        go(run, step, 2)
        with socket.create_connection(("127.0.0.1", int(second.url.split(":")[2].split("/")[0]))):
            pass  # who says nothing keeps nobody from ending
    assert not [one for one in threading.enumerate() if one.name == "pmstore metrics"]


def test_names_with_all_letters() -> None:
    text = openmetrics(
        {"loss": float("nan"), 'tier/a"b\\c/d/epoch': 3, "rollbacks": 0}, {"run": "x\ny"}
    )
    assert 'pmstore_tier_epoch{run="x\\ny",tier="a\\"b\\\\c/d"} 3' in text
    assert "pmstore_loss{" in text
    assert " NaN\n" in text
    assert "pmstore_rollbacks_total{" in text


def test_nobody_is_told_unless_asked(store: pmstore.Store) -> None:
    run, step = begin(store)
    go(run, step, 3)
    assert run._steps.course.listener is None
    assert not [one for one in threading.enumerate() if one.name == "pmstore metrics"]

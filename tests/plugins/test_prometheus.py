"""A run's metrics for Prometheus, at an endpoint of this machine."""

from __future__ import annotations

import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import pmstore
from pmstore.integrations.prometheus import Endpoint, Exporter, serve


def ask(url: str, host: str | None = None) -> str:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=60) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, tuple[dict[str, str], float]]:
    return {
        sample.name: (dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve(labels={"run": "a"}) as made:
        yield made


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.url.split(":")[2].split("/")[0])


def test_it_tells_the_runs_numbers(tmp_path: Path, endpoint: Endpoint) -> None:
    assert endpoint.url.startswith("http://127.0.0.1:")
    assert not samples(ask(endpoint.url))
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pmstore.open(tmp_path / "run.pm", size="8MiB") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        store.add_tier("disk", tmp_path / "tier")
        for steps in (1, 2):
            with run.next_step():
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            run.commit()
            store.flush("disk", wait=True)
            endpoint(run.metrics())
            told = samples(ask(endpoint.url))
            assert told["pmstore_step"] == ({"run": "a"}, steps)
            assert told["pmstore_commits_total"] == ({"run": "a"}, run.metrics()["commits"])
            assert told["pmstore_tier_epoch"][0] == {"run": "a", "tier": "disk"}


def test_who_may_ask(endpoint: Endpoint) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(endpoint.url, "evil.example")
    assert caught.value.code == 403
    caught.value.close()
    with pytest.raises(OSError, match="in use"):
        serve(port_of(endpoint))


def test_however_many_ask_they_take_one_thread(endpoint: Endpoint) -> None:
    """And one descriptor, in a process whose own opens go on."""
    endpoint({"step": 1.0})
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        for _ in range(30):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port_of(endpoint)))
        for _ in range(5):
            assert threading.active_count() == threads
            assert len(os.listdir("/proc/self/fd")) <= files + 30 + 2
            threading.Event().wait(0.2)
    assert samples(ask(endpoint.url))["pmstore_step"][1] == 1


def test_it_is_closed_although_somebody_says_nothing() -> None:
    with serve() as endpoint, socket.create_connection(("127.0.0.1", port_of(endpoint))):
        pass
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        ask(endpoint.url)
    assert not [one for one in threading.enumerate() if one.name == "pmstore metrics"]


@pytest.mark.parametrize(
    ("name", "family", "labels"),
    [
        ("loss", "pmstore_loss", {}),
        ('tier/a"b\\c/d\ne/epoch', "pmstore_tier_epoch", {"tier": 'a"b\\c/d\ne'}),
        ("rollbacks", "pmstore_rollbacks", {}),
    ],
)
def test_names_with_all_letters(name: str, family: str, labels: dict[str, Any]) -> None:
    exporter = Exporter({"run": "x\ny"})
    exporter({name: float("inf")})
    (found,) = exporter.collect()
    (sample,) = found.samples
    assert found.name == family
    assert sample.labels == {"run": "x\ny", **labels}
    assert sample.value == float("inf")

"""Prometheus and its kin: metrics of a run, which they ask for on this machine.

exporter = serve(9464, {"run": run.name})
...
exporter(run.metrics())  # after a step, as often as you like
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from pmstore.extras import optional
from pmstore.integrations.versions import tested

with optional:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

tested("prometheus_client", "0.20", "0.26")

HOST = "127.0.0.1"
_COUNTERS = ("commits", "rollbacks", "written_bytes")
_TURN_SECONDS = 0.2
"""How soon a close is noticed."""
_PATIENCE_SECONDS = 1.0
"""How long somebody who asks may say nothing."""

_Start = Callable[[str, list[tuple[str, str]]], Any]


class Exporter(Collector):
    """Collects metrics for prometheus_client: those that it was last called with, `run.metrics()`.
    Call it in the thread that trains; any thread may ask it.

    labels: of every sample.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._labels: dict[str, str] = dict(labels or {})
        self._metrics: dict[str, float] = {}

    def __call__(self, metrics: Mapping[str, float]) -> None:
        self._metrics = dict(metrics)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, value in self._metrics.items():
            family, more = name, {}
            if "/" in name:  # tier/<name>/epoch: names may have a "/" themselves
                kind, rest = name.split("/", 1)
                whose, what = rest.rsplit("/", 1)
                family, more = f"{kind}_{what}", {kind: whose}
            family = "pmstore_" + re.sub(r"\W", "_", family, flags=re.ASCII)
            labels = {**self._labels, **more}
            if family not in families:
                kind_of = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                families[family] = kind_of(family, f"{family} of pmstore", labels=list(labels))
            families[family].add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
        yield from families.values()


class Endpoint(Exporter):
    """An exporter that answers at `url`, on 127.0.0.1 alone, where every user of this machine can
    ask. It answers one request after another. However many ask, they take one thread and one
    descriptor of this process. Whoever says nothing holds up the others for a second.

    `close`, or `with endpoint:`, ends it; so does the program's end.
    """

    def __init__(self, port: int = 0, labels: Mapping[str, str] | None = None) -> None:
        """Opens the port, and answers from now on. port: 0: a free one. Raises: OSError: it is
        taken."""
        super().__init__(labels)
        registry = CollectorRegistry()
        registry.register(self)
        app = _of_this_machine(make_wsgi_app(registry))
        self._server = make_server(HOST, port, app, _Server, _Handler)
        self._server.timeout = _TURN_SECONDS
        self.url: str = f"http://{HOST}:{self._server.server_port}/metrics"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="pmstore metrics", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        with self._server:
            while not self._closed.is_set():
                self._server.handle_request()

    def close(self) -> None:
        """Closes the endpoint: nobody is answered any more. Idempotent."""
        self._closed.set()
        # who asks very slowly is no reason to wait
        self._thread.join(_TURN_SECONDS + _PATIENCE_SECONDS)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(port: int = 0, labels: Mapping[str, str] | None = None) -> Endpoint:
    """Opens an endpoint for Prometheus, see `Endpoint`. Call what it returns with `run.metrics()`.

    Raises: OSError: the port is taken.
    """
    return Endpoint(port, labels)


class _Server(WSGIServer):
    def handle_error(self, request: object, client_address: object) -> None: ...  # it has gone


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE_SECONDS

    def log_message(self, format: str, *args: object) -> None: ...


def _of_this_machine(
    app: Callable[[dict[str, Any], _Start], Iterable[bytes]],
) -> Callable[[dict[str, Any], _Start], Iterable[bytes]]:
    """Wraps the application so that it answers only requests to this machine's own names. Otherwise
    a name that somebody lets point to this machine would make any web page a reader."""

    def asked(environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        if environ.get("HTTP_HOST", "").rsplit(":", 1)[0] in (HOST, "localhost"):
            return app(environ, start)
        start("403 Forbidden", [("Content-Length", "0")])
        return [b""]

    return asked

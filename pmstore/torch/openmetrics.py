"""An endpoint for Prometheus and its kin: a run's metrics as OpenMetrics text, on this machine
alone."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_COUNTERS = ("commits", "rollbacks", "written_bytes")
_PATIENCE_SECONDS = 5.0


def openmetrics(metrics: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """What `Run.metrics` tells, in the text format of OpenMetrics 1.0.

    >>> print(openmetrics({"step": 3, "tier/disk/epoch": 2, "commits": 3}, {"run": "a"}), end="")
    # TYPE pmstore_step gauge
    pmstore_step{run="a"} 3
    # TYPE pmstore_tier_epoch gauge
    pmstore_tier_epoch{run="a",tier="disk"} 2
    # TYPE pmstore_commits counter
    pmstore_commits_total{run="a"} 3
    # EOF
    """
    families: dict[str, list[str]] = {}
    for name, value in metrics.items():
        family, more = name, {}
        if "/" in name:  # tier/<name>/epoch: names may have a "/" themselves
            kind, rest = name.split("/", 1)
            whose, what = rest.rsplit("/", 1)
            family, more = f"{kind}_{what}", {kind: whose}
        family = "pmstore_" + re.sub(r"\W", "_", family, flags=re.ASCII)
        told = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**labels, **more}.items())
        counter = name in _COUNTERS
        lines = families.setdefault(
            family, [f"# TYPE {family} {'counter' if counter else 'gauge'}"]
        )
        number = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(value), str(value))
        lines.append(f"{family}{'_total' * counter}{{{told}}} {number}")
    return "\n".join([*(line for lines in families.values() for line in lines), "# EOF\n"])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Endpoint:
    """Serves the text that it was given last; `Run.serve_metrics` makes it. It is closed with the
    run; `with endpoint:` closes it before.

    Attributes:
        url: that answers.
    """

    def __init__(self, port: int) -> None:
        """Raises: OSError: the port is taken."""
        self.text = "# EOF\n"
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_SECONDS
            server_version = "pmstore"
            sys_version = ""

            def do_GET(self) -> None:
                host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
                # A name that somebody lets point to this machine makes any web page a reader.
                if host not in ("127.0.0.1", "localhost"):
                    self.send_error(403)
                elif self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                else:
                    body = endpoint.text.encode(errors="replace")
                    self.send_response(200)
                    self.send_header("Content-Type", CONTENT_TYPE)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # who asked has gone

        try:
            self._server = Server((HOST, port), Handler)
        except OSError as error:
            why = f"{error.strerror}: {HOST}:{port}; port=0 takes a free one"
            raise OSError(error.errno, why) from None
        self.url: str = f"http://{HOST}:{self._server.server_address[1]}/metrics"
        self._process = os.getpid()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="pmstore metrics", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<pmstore metrics at {self.url}{'' if self._thread else ', closed'}>"

    def close(self) -> None:
        """Nobody is answered any more. Idempotent. In a fork child the parent's goes on."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if os.getpid() == self._process:
            self._server.shutdown()
            thread.join()
        self._server.server_close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

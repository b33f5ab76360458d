"""Asks the metadata service of a cloud about the end of this machine."""

from __future__ import annotations

import http.client
import json
import os
import time
from datetime import datetime, timezone
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 2.0
_TOKEN_SECONDS = 21600
_AWS_SECONDS = 120.0
_GCP_SECONDS = 30.0


class Unreachable(OSError):
    """The service does not answer, or something else does in its place."""


class Aws:
    """Asks for the end of spot instances of EC2, by version 2 of the metadata service.

    `spot/instance-action` is not found until AWS has decided to take the instance, two minutes
    ahead. A recommendation to rebalance is only advice, and is not asked for: many an instance that
    gets one lives on for hours.
    """

    def __init__(self) -> None:
        url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
        self._host = urlsplit(url if "//" in url else f"//{url}").netloc
        self._token = ""

    def __call__(self) -> float | None:
        """Returns the seconds left; None: no notice. Raises: Unreachable."""
        if not self._token:
            self._renew()
        status, body, _ = self._get()
        if status == 401:  # the token is an old one
            self._renew()
            status, body, _ = self._get()
        if status == 404:
            return None
        if status != 200:
            raise Unreachable(f"{self._host} answered {status}")
        return _until(body)

    def _get(self) -> tuple[int, str, str]:
        return _ask(
            self._host,
            "GET",
            "/latest/meta-data/spot/instance-action",
            {"X-aws-ec2-metadata-token": self._token},
        )

    def _renew(self) -> None:
        status, body, _ = _ask(
            self._host,
            "PUT",
            "/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)},
        )
        if status != 200:
            raise Unreachable(f"{self._host} gives no token: it answered {status}")
        self._token = body.strip()


class Gcp:
    """Asks for the end of spot and preemptible machines of Compute Engine: 30 seconds pass from the
    notice to the end. A maintenance of the host counts if it ends the machine, not if that moves to
    another host."""

    def __init__(self) -> None:
        self._host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")

    def __call__(self) -> float | None:
        """Returns the seconds left; None: no notice. Raises: Unreachable."""
        told = self._get("preempted") == "TRUE"
        told = told or self._get("maintenance-event").startswith("TERMINATE")
        return _GCP_SECONDS if told else None

    def _get(self, what: str) -> str:
        path = f"/computeMetadata/v1/instance/{what}"
        status, body, flavor = _ask(self._host, "GET", path, {"Metadata-Flavor": "Google"})
        if status != 200 or flavor != "Google":
            raise Unreachable(f"{self._host} answered {status}, Metadata-Flavor {flavor!r}")
        return body.strip()


def _until(body: str) -> float:
    """Returns the seconds to the time that a notice tells. If it tells none that can be read, it is
    two minutes, as AWS gives."""
    try:
        told = datetime.strptime(json.loads(body)["time"], "%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, KeyError, TypeError):
        return _AWS_SECONDS
    left = told.replace(tzinfo=timezone.utc).timestamp() - time.time()
    return min(max(left, 0.0), _AWS_SECONDS)


def _ask(host: str, method: str, path: str, headers: dict[str, str]) -> tuple[int, str, str]:
    """Asks the service. Returns status, body, and the header Metadata-Flavor. It never asks by a
    proxy.

    Raises: Unreachable.
    """
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(1 << 16).decode("utf-8", "replace")
        return answer.status, body, answer.getheader("Metadata-Flavor") or ""
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{host} does not answer: {error!r}") from error
    finally:
        connection.close()

"""Sources of notices by name: Slurm, files, and the metadata services of AWS and GCP, of which a
local server answers as they do."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pmstore.scheduler import CommitScheduler, EveryN, PreemptionGuard

LIMIT = 60.0  # seconds, on a machine that is busy


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Service:
    """What a metadata service answers; by path: status and body."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.flavor = "Google"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def answer(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if outer.flavor:
                    self.send_header("Metadata-Flavor", outer.flavor)
                self.end_headers()
                self.wfile.write(body.encode())

            def do_PUT(self) -> None:
                outer.asked.append(self.path)
                seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
                if self.path != "/latest/api/token" or not 1 <= int(seconds or 0) <= 21600:
                    self.answer(400, "")
                    return
                token = f"token {len(outer.asked)}"
                outer.tokens.add(token)
                self.answer(200, token)

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                if self.path.startswith("/latest/"):
                    if self.headers.get("X-aws-ec2-metadata-token") not in outer.tokens:
                        self.answer(401, "")
                        return
                elif self.headers.get("Metadata-Flavor") != "Google":
                    self.answer(403, "")
                    return
                self.answer(*outer.answers.get(self.path, (404, "not found")))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    service = Service()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{service.host}")
    monkeypatch.setenv("GCE_METADATA_HOST", service.host)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # never asked
    yield service
    service.close()


ACTION = "/latest/meta-data/spot/instance-action"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


def action(seconds: float) -> tuple[int, str]:
    at = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    return 200, json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})


# ---- AWS


def test_aws_tells_of_the_time(service: Service) -> None:
    guard = PreemptionGuard("aws", signals=())
    assert guard.notice_seconds == 120.0
    assert not guard.look()
    service.answers[ACTION] = action(100.0)
    assert guard.look()
    assert guard.noticed()
    assert 98.0 <= guard.time_left(time.monotonic()) <= 101.0
    assert not guard.planned
    assert service.asked == ["/latest/api/token", ACTION, ACTION]  # one token for all


def test_an_old_token_is_renewed(service: Service) -> None:
    guard = PreemptionGuard("aws", signals=())
    assert not guard.look()
    service.tokens.clear()
    service.answers[ACTION] = action(100.0)
    assert guard.look()
    assert service.asked.count("/latest/api/token") == 2


def test_advice_to_rebalance_is_no_notice(service: Service) -> None:
    service.answers["/latest/meta-data/events/recommendations/rebalance"] = (
        200,
        '{"noticeTime": "2020-10-27T08:22:00Z"}',
    )
    assert not PreemptionGuard("aws", signals=()).look()


@pytest.mark.parametrize("body", ["", "{}", "null", '{"time": "soon"}', '{"time": 7}'])
def test_a_notice_of_aws_without_a_time_is_one(service: Service, body: str) -> None:
    service.answers[ACTION] = (200, body)
    guard = PreemptionGuard("aws", signals=())
    assert guard.look()
    assert 110.0 <= guard.time_left(time.monotonic()) <= 120.0


def test_a_time_that_is_over(service: Service) -> None:
    service.answers[ACTION] = action(-1000.0)
    guard = PreemptionGuard("aws", signals=())
    assert guard.look()
    assert guard.time_left(time.monotonic()) <= 0.0


# ---- GCP


def test_gcp(service: Service) -> None:
    service.answers[PREEMPTED], service.answers[MAINTENANCE] = (200, "FALSE"), (200, "NONE")
    guard = PreemptionGuard("gcp", signals=())
    assert not guard.look()
    service.answers[MAINTENANCE] = (200, "MIGRATE_ON_HOST_MAINTENANCE")
    assert not guard.look()
    service.answers[PREEMPTED] = (200, "TRUE\n")
    assert guard.look()
    assert 25.0 <= guard.time_left(time.monotonic()) <= 30.0


def test_a_maintenance_that_ends_the_machine(service: Service) -> None:
    service.answers[PREEMPTED] = (200, "FALSE")
    service.answers[MAINTENANCE] = (200, "TERMINATE_ON_HOST_MAINTENANCE")
    assert PreemptionGuard("gcp", signals=()).look()


@pytest.mark.parametrize("source", ["aws", "gcp"])
def test_a_service_that_is_not_there_is_heard_of_once_at_the_start(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    guard = PreemptionGuard(source, signals=())
    object.__setattr__(guard.source, "every_seconds", 0.001)
    looks: list[None] = []

    def look() -> float | None:
        looks.append(None)
        return asked()

    asked = guard.source.look
    assert asked is not None
    object.__setattr__(guard.source, "look", look)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with guard:
            wait_until(lambda: len(looks) > 8)  # most of them by the thread
            assert not guard.noticed()
    assert len(heard) == 1, [str(one.message) for one in heard]
    assert "no notice will come from it, unless" in str(heard[0].message)
    assert not capsys.readouterr().err


def test_something_else_in_the_place_of_a_service(service: Service) -> None:
    service.flavor = ""
    service.answers[PREEMPTED] = (200, "TRUE")
    with pytest.warns(RuntimeWarning, match="Metadata-Flavor ''"):
        with PreemptionGuard("gcp", signals=()) as guard:
            assert not guard.noticed()


@pytest.mark.parametrize("source", ["aws", "gcp"])
def test_a_thread_asks_and_no_step_waits(service: Service, source: str) -> None:
    """A notice is seen although no step asks."""
    service.answers[PREEMPTED], service.answers[MAINTENANCE] = (200, "FALSE"), (200, "NONE")
    guard = PreemptionGuard(source, signals=())
    object.__setattr__(guard.source, "every_seconds", 0.01)
    with guard:
        asked = len(service.asked)
        assert not guard.noticed()
        wait_until(lambda: len(service.asked) > asked)  # by the thread
        service.answers[ACTION], service.answers[PREEMPTED] = action(100.0), (200, "TRUE")
        wait_until(guard.noticed)
    assert "pmstore-notices" not in [thread.name for thread in threading.enumerate()]


# ---- Slurm


def slurm(monkeypatch: pytest.MonkeyPatch, left: float) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left)))


def test_the_end_of_a_job_of_slurm_is_a_notice_when_it_is_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm(monkeypatch, 3600.0)
    guard = PreemptionGuard("slurm", signals=())
    assert not guard.look()
    slurm(monkeypatch, 50.0)
    guard = PreemptionGuard("slurm", signals=())
    assert guard.look()
    assert guard.planned
    assert 45.0 <= guard.time_left(time.monotonic()) <= 51.0


def test_a_commit_that_takes_long_stops_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, 600.0)
    guard = PreemptionGuard("slurm", signals=(), notice_seconds=3000.0)
    assert guard.look()
    slow = PreemptionGuard("slurm", signals=(), notice_seconds=30.0)
    assert not slow.look()
    with pytest.warns(RuntimeWarning, match="more than the 30 s from a notice"):
        slow.measured(20.0, 400.0)
    assert slow.look()


def test_the_signal_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, 120.0)
    before = signal.getsignal(signal.SIGUSR1)
    with PreemptionGuard("slurm") as guard:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(guard.noticed)
        assert guard.planned
        assert 100.0 <= guard.time_left(time.monotonic()) <= 121.0
    assert signal.getsignal(signal.SIGUSR1) is before
    with PreemptionGuard("slurm") as guard:  # a preemption, or scancel
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(guard.noticed)
        assert not guard.planned
        assert guard.time_left(time.monotonic()) <= 30.0
    slurm(monkeypatch, 86400.0)
    with PreemptionGuard("slurm") as guard:  # long before the end: a preemption that is signalled
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(guard.noticed)
        assert not guard.planned
        assert guard.time_left(time.monotonic()) <= 30.0


def test_what_slurm_does_not_tell_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.warns(RuntimeWarning, match="this is no job of Slurm"), PreemptionGuard("slurm"):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.warns(RuntimeWarning, match="--signal=USR1@120"), PreemptionGuard("slurm"):
        pass


# ---- what does not fit


def test_a_grace_that_torchrun_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    with pytest.warns(RuntimeWarning, match="torchrun ends its processes 30 s after SIGTERM"):
        with PreemptionGuard(notice_seconds=120.0, signals=()):
            pass
    with PreemptionGuard(notice_seconds=30.0, signals=()):  # no warning, which would be an error
        pass


def test_a_commit_that_does_not_fit_is_told_once_as_soon_as_it_is_measured() -> None:
    now = [0.0]

    def commit() -> None:
        now[0] += 40.0

    guard = PreemptionGuard(signals=())
    scheduler = CommitScheduler(
        EveryN(10), targets={"disk": commit}, clock=lambda: now[0], guard=guard
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(60):
            now[0] += 1.0
            scheduler.step()
    told = [str(one.message) for one in seen if "from a notice to the end" in str(one.message)]
    assert len(told) == 1
    assert "30 s from a notice" in told[0]
    assert "terminationGracePeriodSeconds" in told[0]


def test_outside_the_main_thread_signals_are_no_notices() -> None:
    said: list[str] = []

    def enter() -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with PreemptionGuard():
                said.extend(str(one.message) for one in seen)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "outside the main thread" in said[0]


# ---- files and callables, while no step asks


def test_files_and_callables_are_looked_at_by_a_thread(tmp_path: Path) -> None:
    told: list[float] = []
    for guard, give in (
        (PreemptionGuard(lambda: told[0] if told else None), lambda: told.append(9.0)),
        (PreemptionGuard(f"file:{tmp_path}/end"), (tmp_path / "end").touch),
    ):
        object.__setattr__(guard.source, "every_seconds", 0.01)
        with guard:
            assert not guard.noticed()
            give()
            wait_until(guard.noticed)


def test_a_source_that_fails_is_heard_of(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> float | None:
        raise OSError("no such service")

    guard = PreemptionGuard(fails, signals=())
    object.__setattr__(guard.source, "every_seconds", 0.001)
    said = ""

    def heard() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "a source of notices fails (a callable): OSError('no such service')" in said

    with guard:
        wait_until(heard)

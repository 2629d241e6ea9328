"""Requests to an S3 service: many at once, within a deadline, and what their failures say of it.

The requests are those of obstore, which runs them on threads of its own. A call collects them in an
event loop of the calling thread. When its deadline is over, it cancels those that are left.
Payloads are copied, so nothing touches its caller's buffers afterwards.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import BaseError
from obstore.store import S3Store as Bucket

from vllm_tiered_kv.core.breaker import Attempt, Breaker
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.stores.s3.settings import S3Settings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

TRANSFERS = 32  # of one call at once
LOOKUPS = 128  # likewise, of requests without payload

_RETRIES = 2  # of an error of the service, such as SlowDown, if the call has time left
_RETRY_PAUSE = timedelta(milliseconds=50)
_MIN_FAIR_S = 0.05  # a service that had less time than this is not to blame for a timeout
_NOT_ASKED = "not asked"
_LATE = "no answer in time"

_Job = TypeVar("_Job")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no result."""

    status: int  # of HTTP; 0: no answer
    reason: str

    @property
    def is_refusal(self) -> bool:
        """Whether an operator has to act."""
        return self.status in (301, 401, 403) or self.reason.startswith("TLS")

    @property
    def is_unanswered(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, 429) or (self.status >= 500 and self.status != 501)


class S3Client:
    """One bucket. Any thread that runs no event loop may call it."""

    def __init__(self, settings: S3Settings, on_unanswered: Callable[[], None]) -> None:
        """`on_unanswered` is called when some requests are not made or not answered."""
        where = f" at {settings.endpoint}" if settings.endpoint else ""
        self.breaker = Breaker(f"the bucket {settings.bucket}{where}")
        self._on_unanswered = on_unanswered
        self.bucket = _open_bucket(settings)

    def each(
        self,
        work: Callable[[_Job], Awaitable[_Value]],
        jobs: Sequence[_Job],
        deadline: float,
        at_once: int = TRANSFERS,
    ) -> list[_Value | Failure]:
        """What `work` returns for each job, or why its request has failed."""
        left_s = deadline - time.monotonic()
        attempt = self.breaker.begin() if jobs and left_s > _MIN_FAIR_S else None
        if attempt is None:
            if jobs:
                self._on_unanswered()
            return [Failure(0, _NOT_ASKED) for _ in jobs]
        try:
            results = asyncio.run(_each(work, jobs, left_s, at_once))
            self._judge(attempt, [one for one in results if isinstance(one, Failure)])
        finally:
            self.breaker.forget(attempt)  # no effect after a result
        return results

    def _judge(self, attempt: Attempt, failures: Sequence[Failure]) -> None:
        refusal = next((one for one in failures if one.is_refusal), None)
        unanswered = next((one for one in failures if one.is_unanswered), None)
        if refusal is not None:
            self.breaker.refuse(attempt, refusal.reason)
        elif unanswered is not None:
            is_absent = unanswered.reason == "Connection refused"
            self.breaker.fail(attempt, unanswered.reason, is_absent)
        else:
            self.breaker.succeed(attempt)
        if refusal is not None or unanswered is not None:
            self._on_unanswered()


async def _each(
    work: Callable[[_Job], Awaitable[_Value]], jobs: Sequence[_Job], left_s: float, at_once: int
) -> list[_Value | Failure]:
    """Whoever runs this cancels what is late, and waits until that has ended."""
    gate = asyncio.Semaphore(at_once)
    unanswered: list[Failure] = []

    async def run(job: _Job) -> _Value | Failure:
        async with gate:
            if unanswered:  # nor would this one be
                return unanswered[0]
            try:
                return await work(job)
            except (BaseError, OSError) as error:
                failure = _failure(error)
                if not failure.status:
                    unanswered.append(failure)
                return failure

    tasks = [asyncio.create_task(run(job)) for job in jobs]
    _, late = await asyncio.wait(tasks, timeout=left_s)
    return [Failure(0, _LATE) if task in late else task.result() for task in tasks]


def _open_bucket(settings: S3Settings) -> Bucket:
    """Raises ConfigError if the library does not take the settings or those in the environment."""
    # Calls have deadlines of their own; the library's end what a cancelled call might leave.
    limit = timedelta(seconds=10 * settings.timeout_s)
    http: ClientConfig = {
        "timeout": limit,
        "connect_timeout": timedelta(seconds=settings.timeout_s),
        "allow_http": settings.endpoint.startswith("http://"),
    }
    config: S3Config = {
        "conditional_put": "etag",  # whatever the environment says: blocks are published by it
        "disable_bulk_delete": True,  # not all services have it
    }
    if settings.endpoint:
        # Under this name, or the library would prefer the variable AWS_ENDPOINT_URL_S3.
        config["aws_endpoint_url_s3"] = settings.endpoint
    if settings.region:
        config["region"] = settings.region
    try:
        if settings.cacert:
            http["root_certificate"] = Path(settings.cacert).read_bytes()
        return Bucket(
            settings.bucket,
            config=config,
            client_options=http,
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": limit,
                "backoff": {"init_backoff": _RETRY_PAUSE, "max_backoff": limit, "base": 2},
            },
        )
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError("backing", f"s3://{settings.bucket}: {_line(str(error))}") from None


# What of the text of an error tells its cause. A service's answer is never shown as a whole: some
# quote what was signed, and with which key.
_CAUSES = (
    ("", re.compile(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)")),
    ("TLS: ", re.compile(r"(InvalidCertificate|InvalidMessage|AlertReceived)\(\s*(\w+)")),
    ("", re.compile(r'message: "([^"]*)"')),  # of the system
    ("", re.compile(r'error: "([^"]*)"')),  # of the resolver
    ("HTTP status ", re.compile(r"status code: (\d+ [\w -]*)")),
)


def _failure(error: Exception) -> Failure:
    text = str(error)
    if "redirect without LOCATION" in text:  # the library keeps neither status nor answer
        return Failure(301, "the bucket is in another region, set the option region")
    status = re.search(r"status code: (\d+)", text)
    reason = _line(text)
    for start, cause in _CAUSES:
        if found := cause.search(text):
            reason = _line(start + ": ".join(found.groups()))
            break
    return Failure(int(status[1]) if status else 0, reason)


def _line(text: str) -> str:
    return text.partition("\n")[0][:200]

"""A pytest plugin that makes each worker process save its coverage as soon as its tests are done.

By default a worker saves when it exits. A worker that takes long to exit, for example because of
the threads of engines, is killed while it writes.
"""

from __future__ import annotations

import shutil

import coverage
import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    measuring = coverage.Coverage.current()
    if measuring is None or not hasattr(session.config, "workerinput"):
        return
    measuring.stop()
    measuring.save()
    recorded = measuring.get_data().data_filename()
    shutil.copy(
        recorded, f"{recorded}.whole"
    )  # the original may be rewritten at exit, and truncated

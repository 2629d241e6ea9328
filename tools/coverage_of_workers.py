"""A pytest plugin: a process that runs tests records what they reached as soon as they are over.

Otherwise it would do so when it ends, and one that takes long to end, as after engines with threads
of their own, is killed while it writes.
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
    shutil.copy(recorded, f"{recorded}.whole")  # the other may be written once more, and cut short

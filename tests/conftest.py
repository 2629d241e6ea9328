"""For all tests: patience on a busy machine, and a daemon in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.daemon.daemon_process import DaemonProcess

try:
    from hypothesis import settings
except ImportError:  # tests of the GPU do without it
    pass
else:
    # How long an example takes says nothing about the code.
    settings.register_profile("all", deadline=None)
    settings.register_profile("landing", deadline=None, max_examples=20)
    settings.load_profile("all")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, unlike tmp_path: the path of a socket has little room."""
    with tempfile.TemporaryDirectory(prefix="kv-") as path:
        yield Path(path)


@pytest.fixture
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    from tests.daemon.daemon_process import DaemonProcess

    with DaemonProcess(folder, "--memory", "16MiB") as process:
        yield process

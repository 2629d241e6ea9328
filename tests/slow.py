"""Tests that take long and have a quicker neighbour in every run."""

from __future__ import annotations

import os

import pytest

SLOW = pytest.mark.skipif(not os.environ.get("SLOW_TESTS"), reason="slow; SLOW_TESTS=1 runs it")

"""For all tests: how long an example takes says nothing about the code on a busy machine."""

from __future__ import annotations

try:
    from hypothesis import settings
except ImportError:  # tests of the GPU do without it
    pass
else:
    settings.register_profile("unhurried", deadline=None)
    settings.load_profile("unhurried")

"""What malloc has handed out, where glibc's malloc is in use and where another one is."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from vllm_tiered_kv.native import memory

MIB = 1 << 20
GLIBC = tuple(map(int, platform.libc_ver()[1].split("."))) if platform.libc_ver()[1] else (0,)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    memory._mallinfo.cache_clear()
    yield
    memory._mallinfo.cache_clear()


@pytest.mark.skipif(GLIBC < (2, 33), reason="needs glibc 2.33")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="has its own malloc")
def test_allocated_bytes_counts_what_malloc_has_handed_out() -> None:
    before = memory.allocated_bytes()
    assert before is not None
    block = bytearray(300 * MIB)
    after = memory.allocated_bytes()
    assert after is not None
    assert after - before == pytest.approx(len(block), abs=16 * MIB)


def test_allocated_bytes_with_another_malloc_preloaded_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """glibc's own figures stay there, and never change."""

    freed: list[int] = []

    def mallinfo2() -> memory._MallInfo:
        return memory._MallInfo(uordblks=MIB)

    def malloc(nbytes: int) -> int:
        return 1

    def free(address: int) -> None:
        freed.append(address)

    library = SimpleNamespace(mallinfo2=mallinfo2, malloc=malloc, free=free)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert memory.allocated_bytes() is None
    assert freed == [1]

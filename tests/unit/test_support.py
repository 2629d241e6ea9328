"""Which vLLM is served, and that refusals are one sentence."""

from __future__ import annotations

import pytest

from vllm_tiered_kv.connector.support import require_supported_vllm
from vllm_tiered_kv.core.vllm_releases import parse_version
from vllm_tiered_kv.errors import UnsupportedError


class Complete:
    def get_transfer_results(self) -> None: ...
    def on_new_request(self) -> None: ...
    def bind_kv_cache_manager(self) -> None: ...
    def finish_forward(self) -> None: ...


class Older:
    def on_new_request(self) -> None: ...


def test_versions() -> None:
    assert parse_version("0.32.0") == (0, 32)
    assert parse_version("0.32.1rc2+cpu") == (0, 32)
    assert parse_version("dev") is None


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1+cu130", "dev", "0.1.dev1+gabc"])
def test_supported_vllm_is_accepted(version: str) -> None:
    assert require_supported_vllm(version, Complete) is None


def test_newer_one_is_tried_with_a_warning() -> None:
    assert "0.40.0" in (require_supported_vllm("0.40.0", Complete) or "")


@pytest.mark.parametrize(
    ("version", "base"), [("0.26.0", Complete), ("0.30.2", Complete), ("dev", Older)]
)
def test_unsupported_vllm_is_refused_in_one_sentence(version: str, base: type) -> None:
    with pytest.raises(
        UnsupportedError, match=f"needs vLLM 0.31 or newer, this is {version}"
    ) as caught:
        require_supported_vllm(version, base)
    assert "\n" not in str(caught.value)

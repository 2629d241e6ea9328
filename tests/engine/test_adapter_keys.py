"""Keys of requests with LoRA adapters: known by their files, and by what vLLM has loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.engine.keyed_requests import (
    BLOCK,
    NAMESPACE,
    differ_from,
    flat,
    make_request,
    named_image,
    write_adapter,
)
from vllm_tiered_kv.connector.identity.request_keys import KeyMaker
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.errors import UnsupportedError


def with_adapter(name: str, path: Path | str, number: int = 1) -> list[BlockKey]:
    return flat(make_request(lora_request=LoRARequest(name, number, str(path))))


def test_keys_differ_by_adapter_files(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", b"1" * 50)
    copy = write_adapter(tmp_path / "copy", b"1" * 50)
    other = write_adapter(tmp_path / "other", b"2" * 50)
    base = flat(make_request())
    assert differ_from(with_adapter("a", one), base) == 0
    assert differ_from(with_adapter("a", one), with_adapter("a", other)) == 0
    assert with_adapter("a", one) == with_adapter("b", copy, number=2)


def test_where_its_files_lie_does_not_count_beside_images_either(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / name, b"1" * 50) for name in ("one", "two")]
    media = [named_image("lora", 4, 20), named_image("cache_salt", 30, 4)]
    maker = KeyMaker(NAMESPACE, (BLOCK,))  # one engine: such names mean nothing to another one

    def keys_with(**facts: Any) -> list[BlockKey]:
        return flat(make_request(**{"mm_features": media, **facts}), maker=maker)

    keys = [
        keys_with(lora_request=LoRARequest(folder.name, 1, str(folder)), cache_salt="a")
        for folder in folders
    ]
    assert keys[0] == keys[1]
    salted = keys_with(cache_salt="a")
    assert differ_from(keys[0], salted) == 0
    assert differ_from(salted, keys_with()) == 0
    others = [named_image("lora", 4, 20), named_image("salt", 30, 4)]
    assert differ_from(salted, keys_with(cache_salt="a", mm_features=others)) == 1


def test_adapter_replaced_in_place_is_another(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", b"1" * 50)
    before = with_adapter("a", folder)
    (folder / "adapter_model.safetensors").write_bytes(b"2" * 50)
    os.utime(folder / "adapter_model.safetensors", (2, 2))
    assert differ_from(with_adapter("a", folder), before) == 0


def test_adapter_number_stands_for_the_adapter_loaded_under_it(tmp_path: Path) -> None:
    """vLLM keeps computing with the adapter it has under that number, whatever the files say."""
    one = write_adapter(tmp_path / "one", b"1" * 50)
    other = write_adapter(tmp_path / "other", b"2" * 50)
    maker = KeyMaker(NAMESPACE, (BLOCK,))

    def keys(path: Path, number: int, load_inplace: bool = False) -> list[BlockKey]:
        lora = LoRARequest("a", number, str(path), load_inplace=load_inplace)
        return flat(make_request(lora_request=lora), maker=maker)

    first = keys(one, 1)
    assert keys(one, 1) == first
    assert differ_from(keys(other, 2), first) == 0
    with pytest.raises(UnsupportedError, match="not those vLLM loaded as number 1"):
        keys(other, 1)
    with pytest.raises(UnsupportedError):  # what vLLM has there is not known any more
        keys(one, 1)
    # Both have computed under that name and path, which is all that vLLM's prefix cache knows.
    for number, load_inplace in ((2, False), (1, True)):
        with pytest.raises(UnsupportedError, match="load them from another path"):
            keys(other, number, load_inplace)
    other = other.rename(tmp_path / "elsewhere")
    assert keys(other, 1, load_inplace=True) == keys(other, 2)
    assert keys(other, 1) == keys(other, 2)
    (other / "adapter_model.safetensors").write_bytes(b"3" * 50)
    os.utime(other / "adapter_model.safetensors", (3, 3))
    # Under whatever number: vLLM's prefix cache goes by name and path, and has blocks of before.
    for number, load_inplace in ((1, False), (1, True), (3, False)):
        with pytest.raises(UnsupportedError, match="load them from another path"):
            keys(other, number, load_inplace)
    moved = other.rename(tmp_path / "moved")
    assert differ_from(keys(moved, 3), first) == 0
    assert keys(moved, 1, load_inplace=True) == keys(moved, 3)


def test_files_that_are_changed_and_changed_back(tmp_path: Path) -> None:
    """vLLM has loaded what was there in between, and goes on with it."""
    folder = write_adapter(tmp_path / "one", b"1" * 50)
    copy = write_adapter(tmp_path / "copy", b"1" * 50)
    maker = KeyMaker(NAMESPACE, (BLOCK,))

    def keys(path: Path, load_inplace: bool = False) -> list[BlockKey]:
        lora = LoRARequest("a", 1, str(path), load_inplace=load_inplace)
        return flat(make_request(lora_request=lora), maker=maker)

    before = keys(folder)
    for content, time in ((b"2" * 50, 2), (b"1" * 50, 3)):
        (folder / "adapter_model.safetensors").write_bytes(content)
        os.utime(folder / "adapter_model.safetensors", (time, time))
        with pytest.raises(UnsupportedError, match="load them from another path"):
            keys(folder, load_inplace=time == 2)
    with pytest.raises(UnsupportedError, match="not those vLLM loaded as number 1"):
        keys(copy)
    moved = copy.rename(tmp_path / "moved")
    assert keys(moved, load_inplace=True) == before


def test_unreadable_adapter_in_place_of_another_is_unsupported(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", b"1" * 50)
    maker = KeyMaker(NAMESPACE, (BLOCK,))
    lora = LoRARequest("a", 1, str(folder))
    flat(make_request(lora_request=lora), maker=maker)
    unread = LoRARequest("b", 1, str(tmp_path / "nowhere"), load_inplace=True)
    with pytest.raises(UnsupportedError, match="not found"):
        flat(make_request(lora_request=unread), maker=maker)
    with pytest.raises(UnsupportedError, match="not those vLLM loaded as number 1"):
        flat(make_request(lora_request=lora), maker=maker)


def test_settings_of_adapters_count_for_them_alone(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", b"1" * 50)
    makers = [KeyMaker(NAMESPACE, (BLOCK,), adapter_settings=text) for text in ("", "", "q_proj")]
    lora = LoRARequest("a", 1, str(folder))
    one, same, other = (flat(make_request(lora_request=lora), maker=maker) for maker in makers)
    assert one == same
    assert differ_from(one, other) == 0
    plain = [flat(make_request(), maker=maker) for maker in makers]
    assert plain[0] == plain[2]
    whole = LoRARequest("b", 2, str(folder), is_3d_lora_weight=True)
    assert differ_from(flat(make_request(lora_request=whole), maker=makers[0]), one) == 0


def test_after_a_reset_the_same_path_may_hold_another_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", b"1" * 50)
    lora = LoRARequest("a", 1, str(folder), load_inplace=True)
    maker = KeyMaker(NAMESPACE, (BLOCK,))
    before = flat(make_request(lora_request=lora), maker=maker)
    (folder / "adapter_model.safetensors").write_bytes(b"2" * 50)
    os.utime(folder / "adapter_model.safetensors", (2, 2))
    maker.new_epoch(b"1" * 16)
    assert differ_from(flat(make_request(lora_request=lora), maker=maker), before) == 0


def test_adapter_that_vllm_asks_a_hub_for_gets_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fetches a newer one in the step that loads it; here are the files of before."""
    fetched = write_adapter(tmp_path / "snapshot", b"1" * 50)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(fetched))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UnsupportedError, match="asks a hub for adapter 'a'"):
        with_adapter("a", "hub/a")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert with_adapter("a", "hub/a") == with_adapter("b", fetched)


def test_files_that_can_be_read_only_after_vllm_has_loaded_some(tmp_path: Path) -> None:
    """Nobody knows what a worker on another host, or one that asked a hub, has found there."""
    maker = KeyMaker(NAMESPACE, (BLOCK,))
    folder = tmp_path / "late"

    def keys(name: str, number: int) -> list[BlockKey]:
        lora = LoRARequest(name, number, str(folder))
        return flat(make_request(lora_request=lora), maker=maker)

    with pytest.raises(UnsupportedError, match="not found"):
        keys("a", 1)
    write_adapter(folder, b"1" * 50)
    with pytest.raises(UnsupportedError, match="load them from another path"):
        keys("a", 1)
    with pytest.raises(UnsupportedError, match="not those vLLM loaded as number 1"):
        keys("b", 1)
    with pytest.raises(UnsupportedError, match="load them from another path"):
        keys("a", 2)  # vLLM's prefix cache has blocks of number 1 under this name and path
    assert keys("c", 2)


def test_adapter_that_is_not_here_gets_no_keys() -> None:
    with pytest.raises(UnsupportedError, match="not found at hub/a"):
        with_adapter("a", "hub/a")

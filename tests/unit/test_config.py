"""Options: sizes, environment, and errors that name the closest valid key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_tiered_kv.config import Eviction, Mode, StorePolicy, TieredKVConfig
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import format_size, parse_size

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 << 30),
        ("1.5GiB", 3 << 29),
        ("512 MiB", 512 << 20),
        ("2gb", 2 * 10**9),
        ("10k", 10_000),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_size("cpu_memory", text) == nbytes


@pytest.mark.parametrize(
    "text", ["20 parsecs", "", "-1GiB", "GiB", "1,5GiB", 0, -4, True, None, 1.5]
)
def test_bad_size_names_the_key(text: object) -> None:
    with pytest.raises(ConfigError, match="cpu_memory") as caught:
        parse_size("cpu_memory", text)
    assert caught.value.key == "cpu_memory"


def test_sizes_print_as_they_are_written() -> None:
    for text in ("20GiB", "1.5GiB", "512MiB", "4KiB", "17B"):
        assert format_size(parse_size("x", text)) == text


def test_defaults_need_nothing() -> None:
    config = TieredKVConfig.load({}, {})
    assert config == TieredKVConfig()
    assert config.mode is Mode.TIERED


def test_values_of_every_kind() -> None:
    config = TieredKVConfig.load(
        {
            "cpu_memory": "1GiB",
            "mode": "hash_only",
            "store": "lazy",
            "eviction": "s3fifo",
            "store_decode": False,
            "copy_threads": 3,
        },
        {},
    )
    assert config.cpu_memory == 1 << 30
    assert config.mode is Mode.HASH_ONLY
    assert config.store is StorePolicy.LAZY
    assert config.eviction is Eviction.S3FIFO
    assert config.store_decode is False
    assert config.copy_threads == 3


def test_environment_wins_over_the_json() -> None:
    environ = {"TIERED_KV_CPU_MEMORY": "3GiB", "TIERED_KV_STORE_DECODE": "off", "HOME": "/root"}
    config = TieredKVConfig.load({"cpu_memory": "1GiB"}, environ)
    assert config.cpu_memory == 3 << 30
    assert config.store_decode is False


@pytest.mark.parametrize(
    ("key", "closest"),
    [
        ("cpu_mem", "cpu_memory"),
        ("evicton", "eviction"),
        ("stor", "store"),
        ("CPU_MEMORY", "cpu_memory"),
    ],
)
def test_unknown_key_is_an_error_that_names_the_closest(key: str, closest: str) -> None:
    with pytest.raises(ConfigError, match=f'did you mean "{closest}"'):
        TieredKVConfig.load({key: 1}, {})


def test_unknown_variable_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match=r'TIERED_KV_CPU_MEMROY.*"cpu_memory"'):
        TieredKVConfig.load({}, {"TIERED_KV_CPU_MEMROY": "1GiB"})


@pytest.mark.parametrize("service", ["TIERED_KV", "TIERED_KV_SERVER", "TIERED_KV_CACHE_1"])
def test_variables_that_kubernetes_sets_for_a_service_are_no_options(service: str) -> None:
    """In every pod, by the name of the service: one named tiered-kv is not far to seek."""
    given = {
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": "9527",
        f"{service}_SERVICE_PORT_HTTP": "9528",
        f"{service}_PORT": "tcp://10.0.0.7:9527",
        f"{service}_PORT_9527_TCP": "tcp://10.0.0.7:9527",
        f"{service}_PORT_9527_TCP_PROTO": "tcp",
        f"{service}_PORT_9527_TCP_PORT": "9527",
        f"{service}_PORT_9527_TCP_ADDR": "10.0.0.7",
    }
    assert TieredKVConfig.load({}, given) == TieredKVConfig()
    with pytest.raises(ConfigError, match="unknown option"):
        TieredKVConfig.load({}, {f"{service}_PORTS": "1"})


def test_build_variables_in_the_environment_are_accepted() -> None:
    setup = (Path(__file__).parents[2] / "setup.py").read_text()
    variables = set(re.findall(r"TIERED_KV_[A-Z_]+", setup))
    assert len(variables) >= 5
    assert TieredKVConfig.load({}, dict.fromkeys(variables, "1")) == TieredKVConfig()


def test_key_unlike_any_option_lists_all_options() -> None:
    with pytest.raises(ConfigError, match="known options: mode, cpu_memory"):
        TieredKVConfig.load({"zzzzqqq": 1}, {})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mode", "fast", '"tiered", "hash_only", "naive"'),
        ("eviction", 3, '"lru", "s3fifo"'),
        ("store_decode", "maybe", "true or false"),
        ("store_decode", 1, "true or false"),
        ("copy_threads", -1, "from 0 to 256"),
        ("copy_threads", "many", "whole number"),
        ("copy_threads", True, "whole number"),
        pytest.param("remote_load_timeout", 10**400, "number of seconds", id="more than a float"),
    ],
)
def test_bad_value_says_what_is_valid(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TieredKVConfig.load({key: value}, {})


def test_describe_names_what_was_changed() -> None:
    text = TieredKVConfig.load({"cpu_memory": "1GiB", "store": "lazy"}, {}).describe()
    assert text == "cpu_memory=1GiB, store=lazy"


def test_addresses_may_be_one_a_list_or_separated_by_commas() -> None:
    both = ("tcp://a:1", "ipc:///run/kv")
    assert TieredKVConfig.load({"remote": "tcp://a:1"}, {}).remote == both[:1]
    assert TieredKVConfig.load({"remote": list(both)}, {}).remote == both
    assert TieredKVConfig.load({}, {"TIERED_KV_REMOTE": "tcp://a:1, ipc:///run/kv"}).remote == both
    for sloppy in ("tcp://a:1,,ipc:///run/kv,", ",tcp://a:1, , ipc:///run/kv"):
        assert TieredKVConfig.load({"remote": sloppy}, {}).remote == both
    assert TieredKVConfig.load({"remote": ""}, {}).remote == ()
    for wrong in (7, [7], {"host": 1}, None):
        with pytest.raises(ConfigError, match="remote"):
            TieredKVConfig.load({"remote": wrong}, {})


def test_seconds_have_limits() -> None:
    assert TieredKVConfig.load({"remote_lookup_timeout": 2}, {}).remote_lookup_timeout == 2.0
    assert (
        TieredKVConfig.load({}, {"TIERED_KV_REMOTE_LOAD_TIMEOUT": "0.5"}).remote_load_timeout == 0.5
    )
    for wrong in ("soon", True, 0, 1e9, float("nan"), None):
        with pytest.raises(ConfigError, match="remote_lookup_timeout"):
            TieredKVConfig.load({"remote_lookup_timeout": wrong}, {})


def test_keys_come_in_pairs() -> None:
    with pytest.raises(ConfigError, match="remote_server_key"):
        TieredKVConfig.load({"remote_key": "/keys/engine"}, {})


def test_shares_are_from_zero_to_one() -> None:
    assert TieredKVConfig.load({"verify_fraction": "0.25"}, {}).verify_fraction == 0.25
    assert TieredKVConfig.load({"verify_fraction": 1, "verify_tolerance": 0}, {}).verify_fraction
    for bad in (-0.1, 1.01, "many", True, None, "nan"):
        with pytest.raises(ConfigError, match="verify_fraction"):
            TieredKVConfig.load({"verify_fraction": bad}, {})
    with pytest.raises(ConfigError, match="expected 0 to 1, got 2"):
        TieredKVConfig.load({"verify_tolerance": 2}, {})
    with pytest.raises(ConfigError, match="a number of seconds"):
        TieredKVConfig.load({"remote_load_timeout": "soon"}, {})


def test_shards_for_other_sizes_need_a_daemon() -> None:
    with pytest.raises(ConfigError, match=r"portable_shards: .* set remote too"):
        TieredKVConfig.load({"portable_shards": 4}, {})
    at_daemon = TieredKVConfig.load({"portable_shards": 4, "remote": "tcp://host:1"}, {})
    assert at_daemon.portable_shards == 4

"""The URL of a bucket: `s3://BUCKET[/PREFIX][?OPTIONS]`.

Credentials are not in it: the client library takes them from the environment. `docs/stores.md`
describes both.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import redacted
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.store_url import DEFAULT_PREFIX, parse_query, split_url

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # of the environment

_OPTIONS = ("endpoint", "region", "cacert")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)
_ENDPOINT = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*", re.ASCII)  # ends an IP address, not a name
# Services that give out credentials. The client library panics at an address that is not a URL, and
# takes the process with it.
_CREDENTIAL_VARIABLES = ("AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT")


@dataclass(frozen=True)
class S3Settings:
    """Which bucket of which service holds the blocks, and how they are named."""

    bucket: str
    prefix: str = DEFAULT_PREFIX
    endpoint: str = ""  # empty: that of AWS
    region: str = ""  # empty: as the environment says, or us-east-1
    cacert: str = ""  # file with more authorities to trust than those of the system
    timeout_s: float = 2.0  # of a call, except that a put as a whole may take ten times as long


def parse_settings(options: BackingOptions) -> S3Settings:
    if options.capacity_bytes or options.ttl_s:
        raise ConfigError(
            "backing_space" if options.capacity_bytes else "backing_ttl",
            "is for file:// only; a lifecycle rule of the bucket deletes old blocks",
        )
    if "@" in options.url:  # the URL would show the secret
        raise ConfigError(
            "backing",
            "s3:// takes credentials from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, not from "
            "its URL",
        )
    url = split_url(options.url)
    prefix = url.path.strip("/") or DEFAULT_PREFIX
    if not _BUCKET.fullmatch(url.netloc) or not _PREFIX.fullmatch(prefix) or url.fragment:
        raise ConfigError(
            "backing",
            f"{options.url!r} is not like s3://bucket/prefix?endpoint=https://host:port",
        )
    given = parse_query(url.query, _OPTIONS)
    others = filter(None, map(os.environ.get, _ENDPOINT_VARIABLES))
    endpoint = (given.get("endpoint") or next(others, "")).rstrip("/")
    if endpoint and not _is_service(endpoint):
        raise ConfigError("backing", f"endpoint={redacted(endpoint)} is not like https://host:port")
    for name in _CREDENTIAL_VARIABLES:
        if not _is_service(os.environ.get(name, "https://default").rstrip("/")):
            raise ConfigError(
                "backing",
                f"the environment variable {name} is not like https://host:port; correct or "
                "unset it",
            )
    if "cacert" in given and endpoint.startswith("http://"):
        raise ConfigError("backing", "cacert is for an endpoint with https://")
    return S3Settings(
        url.netloc,
        prefix,
        endpoint,
        given.get("region", ""),
        given.get("cacert", ""),
        # A little less than the daemon waits, so that calls end before it gives them up.
        0.9 * options.timeout_s,
    )


def _is_service(url: str) -> bool:
    found = _ENDPOINT.fullmatch(url)
    if found is None or int((found[2] or ":0")[1:]) >= 1 << 16:
        return False
    host = found[1]
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
        elif _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]):
            ipaddress.IPv4Address(host.removesuffix("."))
        else:
            return not any(map(_is_encoded, host.encode().decode("idna").split(".")))
    except ValueError:
        return False
    return True


def _is_encoded(label: str) -> bool:
    return label.lower().startswith("xn--")

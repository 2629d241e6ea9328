"""A client of a running OpenAI-compatible server, with the HTTP client of the standard library."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tiered_kv.api.answers import Answer, read_answer
from vllm_tiered_kv.api.prompt_file import Prompt
from vllm_tiered_kv.errors import ReplayError
from vllm_tiered_kv.metrics.names import Metric

_ALTERNATIVES = 5  # number of likeliest tokens requested per position
_CONTROL_TIMEOUT_S = 15.0
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|Inf|NaN)"
_SAMPLE = re.compile(rf"^([a-zA-Z_:][\w:]*)(?:\{{(.*)\}})? ({_NUMBER})(?:\s|$)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class OpenAIServer:
    """Sends the requests of `replay`, `warm` and `explain` to one server. Thread-safe."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.netloc and parts.port != 0
        except ValueError:  # unbalanced brackets, or an invalid port
            is_address = False
        if not is_address:
            raise ReplayError(f'{url!r} is not a URL like "http://127.0.0.1:8000"')
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Proxies of the environment are for the internet, not for the user's own server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def choose_model(self, wanted: str | None) -> str:
        """Returns the model to use; ReplayError if it is not served or the choice is ambiguous."""
        reply = self._json("/v1/models", None, _CONTROL_TIMEOUT_S)
        models = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
            raise ReplayError(
                f"{self.url} does not list its models; is it an OpenAI-compatible server?"
            )
        served = [str(model["id"]) for model in models if "id" in model]
        if wanted is not None and wanted not in served:
            known = ", ".join(served) or "nothing"
            raise ReplayError(f"{self.url} does not serve model {wanted!r}; it serves {known}")
        if wanted is None and len(served) != 1:
            raise ReplayError(
                f"{self.url} serves {len(served)} models; choose one with --model"
                + (f" ({', '.join(served)})" if served else "")
            )
        return wanted or served[0]

    def ask(self, prompt: Prompt, model: str, max_tokens: int, salt: str | None) -> Answer:
        body: dict[str, Any] = {"max_tokens": max_tokens, **prompt.fields}
        body |= {"model": model, "temperature": 0, "n": 1, "stream": False}
        body["return_tokens_as_token_ids"] = True  # two tokens may have the same text
        if prompt.is_chat:
            body |= {"logprobs": True, "top_logprobs": _ALTERNATIVES}
        else:
            body |= {"logprobs": _ALTERNATIVES}
        if salt is not None:
            body["cache_salt"] = salt
        path = "/v1/chat/completions" if prompt.is_chat else "/v1/completions"
        return read_answer(self._json(path, body, self._timeout_s))

    def prefill(
        self, prompt: Prompt, model: str, controls: Mapping[str, Any], salt: str | None
    ) -> int:
        """Lets the server process a prompt; returns the prompt's tokens."""
        reply = self.one_token(prompt, model, controls, salt)
        usage = reply.get("usage") if isinstance(reply, dict) else None
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return tokens if isinstance(tokens, int) else 0

    def one_token(
        self, prompt: Prompt, model: str, controls: Mapping[str, Any], salt: str | None
    ) -> Any:
        """Lets the server process a prompt and generate one token; returns its reply. `controls`:
        what the request asks of the cache (docs/requests.md)."""
        body: dict[str, Any] = {**prompt.fields, "model": model, "n": 1, "stream": False}
        for name in ("max_completion_tokens", "min_tokens", "stream_options"):
            body.pop(name, None)
        body["max_tokens"] = 1
        if controls:
            body["kv_transfer_params"] = {"tiered_kv": dict(controls)}
        if salt is not None:
            body["cache_salt"] = salt
        path = "/v1/chat/completions" if prompt.is_chat else "/v1/completions"
        return self._json(path, body, self._timeout_s)

    def count_tokens(self, text: str, model: str) -> tuple[int, int]:
        """How many tokens a text has as a prompt, and how many the model takes."""
        reply = self._json("/tokenize", {"model": model, "prompt": text}, self._timeout_s)
        facts = reply if isinstance(reply, dict) else {}
        count, max_tokens = facts.get("count"), facts.get("max_model_len")
        if not isinstance(count, int) or not isinstance(max_tokens, int):
            raise ReplayError(f"{self.url}/tokenize does not count tokens; is it a vLLM server?")
        return count, max_tokens

    def is_healthy(self) -> bool:
        return self._content("/health", None) is not None

    def forget_gpu_cache(self) -> bool:
        """Empties vLLM's GPU prefix cache; False if the server does not support it or does not
        answer, or if other requests keep using the cache."""
        end = time.monotonic() + _CONTROL_TIMEOUT_S
        while True:
            content = self._content("/reset_prefix_cache", {})
            if content is None:
                return False
            if b"false" not in content:  # {"success": true}; older releases reply with nothing
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.25)

    def counters(self, metrics: tuple[Metric, ...]) -> dict[str, float] | None:
        """Returns the counters, summed over their labels; None if the server has no metrics."""
        samples = self.samples()
        return None if samples is None else sum_counters(samples, metrics)

    def counter_by(self, metric: Metric, label: str) -> dict[str, float]:
        """Returns a counter by the values of one label, summed over the others; empty if the server
        has no metrics."""
        sums: dict[str, float] = {}
        for sample in self.samples() or ():
            if sample.name == metric.exposed_name + "_total":
                found = sample.labels.get(label, "")
                sums[found] = sums.get(found, 0.0) + sample.value
        return sums

    def samples(self) -> list[Sample] | None:
        """All numbers on the page of metrics; None if there is no such page."""
        content = self._content("/metrics", None)
        return None if content is None else read_samples(content.decode(errors="replace"))

    def _content(self, path: str, body: Mapping[str, Any] | None) -> bytes | None:
        """Returns the content of a control request, None on failure.

        A failure does not end the replay: the answers to the prompts are still worth a report,
        especially if the server has died meanwhile.
        """
        try:
            status, content = self._call(path, body, _CONTROL_TIMEOUT_S)
        except ReplayError:
            return None
        return content if status == 200 else None

    def _json(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        status, content = self._call(path, body, timeout_s)
        if status != 200:
            raise ReplayError(f"{self.url}{path} answered {status}: {_reason(content)}")
        try:
            return json.loads(content)
        except ValueError:
            raise ReplayError(f"{self.url}{path} did not answer in JSON") from None

    def _call(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            try:
                with self._opener.open(request, timeout=timeout_s) as response:
                    return int(response.status), response.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            line = " ".join(str(reason).split())
            raise ReplayError(f"{self.url} cannot be reached: {line}") from None


@dataclass(frozen=True)
class Sample:
    """One number on a page of metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_samples(text: str) -> list[Sample]:
    """The samples of a page in Prometheus text format."""
    return [
        Sample(name, dict(_LABEL.findall(labels)), float(value))
        for name, labels, value in _SAMPLE.findall(text)
    ]


def sum_counters(samples: list[Sample], metrics: tuple[Metric, ...]) -> dict[str, float]:
    """Sums counters over their labels; a missing counter is 0."""
    return {
        metric.name: sum(
            (one.value for one in samples if one.name == metric.exposed_name + "_total"), 0.0
        )
        for metric in metrics
    }


def _reason(content: bytes) -> str:
    """Returns the error message of a reply, JSON or plain text, in one line."""
    text = content.decode(errors="replace").strip()
    try:
        reply = json.loads(text)
        error = reply.get("error", reply)
        text = str(error.get("message", text) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:400] or "nothing"

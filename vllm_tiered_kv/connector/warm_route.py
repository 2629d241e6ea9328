"""An HTTP route of vLLM's server that warms prompts: `POST /v1/tiered_kv/warm`.

Entry point of the group `vllm.endpoint_plugins`, of vLLM 0.32 and later. vLLM loads it if
`VLLM_PLUGINS` names it. The prompts go through the server's own handlers of the OpenAI API, so they
get the template, tokens and keys of later requests. The path begins with /v1 because vLLM's API key
guards such paths alone.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMError

from vllm_tiered_kv.connector.scheduler.request_control import SECTION, parse_control

_PATH = "/v1/tiered_kv/warm"
_AT_ONCE = 4  # prompts in the engine; users' requests come between them
_CONTROLS = ("pin_seconds", "session", "tool_pending")
_REFUSALS = (VLLMError, ValueError, TypeError, OverflowError, NotImplementedError)
"""What vLLM's handlers raise where its API answers with an error."""
_OTHERS = ("prompts", "model", "cache_salt")

router = APIRouter()


class WarmRoute:
    """vLLM's `EndpointPlugin`."""

    name = "tiered_kv"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: object, state: object, args: Namespace) -> None:
        """The route needs only the handlers that vLLM keeps in the state."""


@router.post(_PATH)
@with_cancellation
async def warm(body: dict[str, Any], raw_request: Request) -> JSONResponse:
    """Lets the engine process each prompt for one token: what a tier holds is loaded, the rest is
    computed and stored."""
    problem = _problem_of(body)
    if problem is not None:
        error = {"message": problem, "type": "BadRequestError", "code": 400}
        return JSONResponse({"error": error}, 400)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def send(prompt: str | dict[str, Any]) -> int | str:
        async with limit:
            return await _prefill(raw_request.app.state, prompt, body)

    results = await asyncio.gather(*map(send, body["prompts"]))
    return JSONResponse(
        {
            "prompts": len(results),
            "tokens": sum(tokens for tokens in results if isinstance(tokens, int)),
            "failures": [
                {"prompt": number, "message": message}
                for number, message in enumerate(results)
                if isinstance(message, str)
            ],
        }
    )


def _problem_of(body: Mapping[str, Any]) -> str | None:
    """What is wrong with the body of a request, if anything is."""
    unknown = [key for key in body if key not in (*_OTHERS, *_CONTROLS)]
    if unknown:
        return f"{unknown[0]!r}: unknown key; known keys: {', '.join((*_OTHERS, *_CONTROLS))}"
    prompts = body.get("prompts")
    if not isinstance(prompts, list) or not prompts:
        return "prompts: expected a list with at least one prompt"
    for number, prompt in enumerate(prompts):
        is_one = isinstance(prompt, dict) and ("prompt" in prompt) != ("messages" in prompt)
        if not is_one and not (isinstance(prompt, str) and prompt):
            return f'prompts[{number}]: expected a text, or an object with "prompt" or "messages"'
    problems = parse_control({SECTION: _controls(body)})[1]
    return problems[0] if problems else None


def _controls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: body[key] for key in _CONTROLS if key in body}


async def _prefill(state: Any, prompt: str | dict[str, Any], body: Mapping[str, Any]) -> int | str:
    """Processes one prompt; returns its tokens, or why that failed."""
    fields: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    for name in ("max_completion_tokens", "min_tokens", "stream_options"):
        fields.pop(name, None)
    fields |= {key: body[key] for key in ("model", "cache_salt") if key in body}
    fields |= {"max_tokens": 1, "n": 1, "stream": False}
    fields["kv_transfer_params"] = {SECTION: _controls(body)}
    try:
        if "messages" in fields:
            chat = ChatCompletionRequest(**fields)
            reply = await state.openai_serving_chat.create_chat_completion(chat)
        else:
            completion = CompletionRequest(**fields)
            reply = await state.openai_serving_completion.create_completion(completion)
    except _REFUSALS as error:  # such as a prompt that is too long
        return " ".join(str(error).split())
    if isinstance(reply, ErrorResponse):
        return str(reply.error.message)
    return int(reply.usage.prompt_tokens)

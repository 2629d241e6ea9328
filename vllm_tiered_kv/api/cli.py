"""The `tiered-kv` command: checks a model before it is served, or a running server."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_tiered_kv import __version__
from vllm_tiered_kv.api import arguments
from vllm_tiered_kv.api.arguments import HelpFormatter
from vllm_tiered_kv.api.bench_command import add_bench
from vllm_tiered_kv.api.daemon_commands import add_daemon_commands
from vllm_tiered_kv.api.doctor_command import add_doctor
from vllm_tiered_kv.api.explain import explain
from vllm_tiered_kv.api.model_check import ModelCheck
from vllm_tiered_kv.api.model_shape import (
    DTYPE_BYTES,
    FP8_DS_MLA,
    KV_DTYPE_BYTES,
    read_config,
    read_shape,
)
from vllm_tiered_kv.api.prompt_file import read_prompt, read_prompts
from vllm_tiered_kv.api.replay import Exit, Replay, ReplaySettings
from vllm_tiered_kv.api.up_command import add_up
from vllm_tiered_kv.api.verify_command import add_verify
from vllm_tiered_kv.api.warm import warm
from vllm_tiered_kv.errors import (
    ConfigError,
    DeploymentError,
    ModelConfigError,
    ReplayError,
    StoreFormatError,
    StoreLockedError,
)
from vllm_tiered_kv.remote.inquiry import NoAnswerError

_DESCRIPTION = """\
Looks after a tiered KV cache for vLLM: the machine it runs on, the model it caches, the answers it
gives, the daemons it uses.
"""

_EXAMPLES = """\
examples:
  tiered-kv doctor --model ~/models/Qwen3-8B --memory 20GiB
      before the first start: is all there that an engine with this cache needs?
  tiered-kv model ~/models/Qwen3-8B
  tiered-kv up deploy.yml
      start a daemon and the servers that use it, from one file
  tiered-kv status tcp://127.0.0.1:9527
  tiered-kv top tcp://127.0.0.1:9527
      what does a daemon hold, by model, and what has it done, or is it doing?
  tiered-kv replay prompts.jsonl --url http://127.0.0.1:8000
      are the answers of a running server the same with and without the cache?
  tiered-kv explain "Once upon a time" --url http://127.0.0.1:8000
      where do the tokens of this prompt come from, and why is the rest computed?
"""

_REPLAY = """\
Sends every prompt of a file to a running OpenAI-compatible vLLM server, without the cache and with
it, and compares tokens and logprobs. Every prompt is processed three times.

  computed   with a new cache_salt, so that everything is computed
  first      with the cache: blocks held by the tiers are used, the others are stored
  second     with the cache again, after the GPU prefix cache was emptied if the server allows it
             (VLLM_SERVER_DEV_MODE=1), so that blocks come from the tiers
"""

_DETAILS = """\
prompts, one on each line:
  {"prompt": "Once upon a time"}                      to /v1/completions
  {"messages": [{"role": "user", "content": "Hi"}]}   to /v1/chat/completions
  Once upon a time                                    plain text, to /v1/completions
  Further fields ("max_tokens", "tools", …) are added to the request unchanged, except
  model, temperature (0), n, stream and logprobs, which the command sets.

outcomes, each round compared with the computed answer:
  equal      the same tokens, with logprobs within --drift
  tie        the first different token is one of two that the computed answer rated about equally
             likely, with a logprob gap of at most --tie. Another batch or kernel rounds differently
             and may choose the other token. This is not a failure. The default is just above one
             step of bfloat16 for logits of 16 to 32.
  drift      the same tokens, but a logprob changed by more than --drift
  different  the tokens differ, and there was no tie

exit status:
  0  all answers are equal or ties     1  an answer is different or drifts
  2  the replay could not run, or requests failed
  3  no block was loaded from a tier, or the server has no metrics: the comparison proves nothing

examples:
  tiered-kv replay prompts.jsonl --url http://127.0.0.1:8000
  tiered-kv replay prompts.jsonl --baseline-url http://127.0.0.1:8001
      a second server, without the cache, computes the answers to compare with
  tiered-kv replay prompts.jsonl --json report.json --max-tokens 256
"""

_WARM = """\
Sends every prompt of a file to a running vLLM server for one token, so that its tiers hold the
prompts before users ask: what a tier holds is loaded, the rest is computed and stored.
"""

_WARM_DETAILS = """\
prompts, one on each line:
  {"prompt": "Once upon a time"}                      to /v1/completions
  {"messages": [{"role": "user", "content": "Hi"}]}   to /v1/chat/completions
  Once upon a time                                    plain text, to /v1/completions
  Further fields ("tools", …) are added to the request unchanged.

exit status:
  0  all prompts were processed     2  requests failed, or the file cannot be read

examples:
  tiered-kv warm prompts.jsonl --url http://127.0.0.1:8000
  tiered-kv warm prompts.jsonl --pin 600 --concurrency 8
"""

_EXPLAIN = """\
Sends a prompt to a running vLLM server for one token, and prints where its tokens came from and why
the others were computed. The tiers do not store the prompt; vLLM's own cache on the GPU does.
"""

_EXPLAIN_DETAILS = """\
prompt:
  Once upon a time                                    to /v1/completions
  {"prompt": "Once upon a time"}                      to /v1/completions
  {"messages": [{"role": "user", "content": "Hi"}]}   to /v1/chat/completions
  Further fields ("tools", …) are added to the request unchanged. Tokens count: a chat has others
  than its text alone, so send what users send.

output:
  one line for each source and cause; docs/misses.md explains them. The last line is about all
  requests: what a larger CPU tier would have held of the tokens that were computed.

exit status:
  0  the account is printed     2  the server cannot be asked, or gives no account

examples:
  tiered-kv explain "Once upon a time" --url http://127.0.0.1:8000
  tiered-kv explain - < prompt.txt
  tiered-kv explain '{"messages": [{"role": "user", "content": "Hi"}]}' --json | jq .missed
"""

_MODEL = """\
Reads a model's config.json and says whether the model would be cached, how many KiB of KV cache a
token takes and how many tokens fit into an amount of memory. Starts no engine, loads no weights,
downloads nothing, and needs neither torch nor vLLM.
"""

_MODEL_DETAILS = """\
output:
  KiB/rank     what each tensor-parallel rank holds on its GPU
  KiB in all   what the CPU tier and daemons store: the sum of the ranks, but latent KV (MLA) once
  per token    for full attention, and for sliding windows too: a window's blocks are all stored
  per snapshot for recurrent layers (Mamba, linear attention): one state, however long the prompt
  note         something that changes the answer, such as an environment variable
  guess        a part that the file does not say or this command does not know: check it with the
               engine, whose log says at start what is cached

exit status:
  0  the model is cached     1  it is not     2  the file cannot be read or lacks something

examples:
  tiered-kv model ~/models/Qwen3-8B
  tiered-kv model config.json --kv-cache-dtype fp8 --tensor-parallel 8 --memory 1TiB
  tiered-kv model ~/models/Qwen3-8B --json | jq .stored_bytes_per_token
"""


def main(given_words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tiered-kv",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tiered-kv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_doctor(commands)
    _add_model(commands)
    add_up(commands)
    add_daemon_commands(commands)
    add_verify(commands)
    _add_replay(commands)
    _add_warm(commands)
    _add_explain(commands)
    add_bench(commands)
    words = sys.argv[1:] if given_words is None else list(given_words)
    if words and not words[0].startswith("-") and words[0] not in commands.choices:
        close = difflib.get_close_matches(words[0], commands.choices, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists the commands"
        parser.error(f"{words[0]}: unknown command; {hint}")
    given = parser.parse_args(words)
    try:
        return int(given.run(given))
    except (
        *(ConfigError, ReplayError, ModelConfigError),
        *(StoreFormatError, StoreLockedError),
    ) as error:
        print(f"tiered-kv: {error}", file=sys.stderr)
        return Exit.FAILED
    except (NoAnswerError, DeploymentError) as error:
        print(f"tiered-kv: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _add_model(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = arguments.add_command(
        commands,
        "model",
        _check_model,
        "say whether a model is cached, and how many KiB a token takes",
        _MODEL,
        _MODEL_DETAILS,
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="config.json, or its folder")
    parser.add_argument(
        "--dtype",
        choices=["auto", *DTYPE_BYTES],
        default="auto",
        help="as vLLM's option; auto is that of the file",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["auto", *KV_DTYPE_BYTES, FP8_DS_MLA],
        default="auto",
        help="as vLLM's option; auto is that of the checkpoint, or else --dtype",
    )
    parser.add_argument(
        "--block-size",
        metavar="N",
        type=arguments.positive,
        default=16,
        help="tokens of a block (%(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        metavar="N",
        type=arguments.positive,
        default=1,
        help="tensor-parallel ranks (%(default)s)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=arguments.size,
        default="100GiB",
        help="how much of a tier to fill (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _check_model(given: argparse.Namespace) -> int:
    shape = read_shape(
        read_config(given.path), given.dtype, given.kv_cache_dtype, given.tensor_parallel
    )
    check = ModelCheck(shape, given.block_size, given.tensor_parallel, given.memory)
    print(json.dumps(check.as_json(), indent=1) if given.json else "\n".join(check.lines()))
    return 0 if check.is_cached else 1


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = arguments.add_command(
        commands, "replay", _replay, "compare answers with and without the cache", _REPLAY, _DETAILS
    )
    default = ReplaySettings()
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="file of prompts, see below")
    arguments.add_server(parser)
    parser.add_argument("--baseline-url", metavar="URL", help="a server without the cache")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=arguments.positive,
        default=default.max_tokens,
        help="tokens to generate, unless a line sets max_tokens (%(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=arguments.positive,
        default=default.concurrency,
        help="concurrent requests; 1 is the most reproducible (%(default)s)",
    )
    parser.add_argument(
        "--salt", metavar="TEXT", help="cache_salt of the rounds with the cache, if clients use one"
    )
    parser.add_argument(
        "--tie",
        metavar="GAP",
        type=arguments.not_negative,
        default=default.tie,
        help="logprob gap up to which two tokens are a tie (%(default)s)",
    )
    parser.add_argument(
        "--drift",
        metavar="GAP",
        type=arguments.not_negative,
        default=default.drift,
        help="change of a logprob that counts as a difference (%(default)s)",
    )
    parser.add_argument(
        "--keep-gpu-cache",
        action="store_true",
        help="do not empty the GPU prefix cache, which other clients use too",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the whole report there")
    parser.add_argument(
        "--allow-no-loads", action="store_true", help="exit 0 even if nothing was loaded"
    )


def _replay(given: argparse.Namespace) -> int:
    prompts = read_prompts(given.prompts)
    if given.json is not None:  # fail now, not after hours of requests
        _require_writable(given.json)
    server = arguments.open_server(given)
    settings = ReplaySettings(
        given.model,
        given.max_tokens,
        given.concurrency,
        given.salt,
        given.tie,
        given.drift,
        not given.allow_no_loads,
        not given.keep_gpu_cache,
    )
    baseline = None
    if given.baseline_url is not None:
        baseline = arguments.open_server(given, given.baseline_url)
    report = Replay(server, baseline, settings, arguments.print_progress).run(prompts)
    print("\n".join(report.lines()))
    if given.json is not None:
        _write(given.json, json.dumps(report.as_json(), indent=1) + "\n")
    return report.exit_status


def _add_warm(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = arguments.add_command(
        commands,
        "warm",
        _warm,
        "bring prompts into the cache of a running server",
        _WARM,
        _WARM_DETAILS,
    )
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="file of prompts, see below")
    arguments.add_server(parser)
    parser.add_argument(
        "--pin",
        metavar="SECONDS",
        type=arguments.not_negative,
        default=0.0,
        help="how long the tiers keep the prompts, up to 3600 (no pin)",
    )
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=arguments.positive,
        default=1,
        help="concurrent requests (%(default)s)",
    )
    parser.add_argument("--salt", metavar="TEXT", help="cache_salt, if clients use one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _warm(given: argparse.Namespace) -> int:
    prompts = read_prompts(given.prompts)
    server = arguments.open_server(given)
    report = warm(
        server,
        prompts,
        given.model,
        given.concurrency,
        given.pin,
        given.salt,
        arguments.print_progress,
    )
    if given.json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        print("\n".join(report.lines()))
    return Exit.FAILED if report.failures else Exit.EQUAL


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = arguments.add_command(
        commands,
        "explain",
        _explain,
        "say where the tokens of a prompt come from, and why the rest is computed",
        _EXPLAIN,
        _EXPLAIN_DETAILS,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="see below; - reads it from stdin")
    arguments.add_server(parser, "of the request")
    parser.add_argument("--salt", metavar="TEXT", help="cache_salt, if clients use one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _explain(given: argparse.Namespace) -> int:
    prompt = read_prompt(
        sys.stdin.read().removesuffix("\n") if given.prompt == "-" else given.prompt
    )
    server = arguments.open_server(given)
    found = explain(server, prompt, given.model, given.salt)
    print(json.dumps(found.as_json(), indent=1) if given.json else "\n".join(found.lines()))
    return Exit.EQUAL


def _require_writable(path: Path) -> None:
    """Raises ReplayError if the file cannot be written. Keeps an old report, creates no new one."""
    is_new = not path.exists()
    _write(path, "", "a")
    if is_new:
        path.unlink(missing_ok=True)


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ReplayError(f"the report cannot be written: {error}") from None


if __name__ == "__main__":
    sys.exit(main())

"""The commands `tiered-kv bench inputs`, `bench speed` and `bench stress`."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vllm_tiered_kv.api import arguments
from vllm_tiered_kv.api.bench import Answer, Asker, made_words, make_text, speed, stress
from vllm_tiered_kv.api.prompt_file import read_prompts
from vllm_tiered_kv.errors import ReplayError
from vllm_tiered_kv.remote.inquiry import Inquiry

_BENCH = """\
Measures a running vLLM server with the cache: how long the first token takes (TTFT) when the prompt
is computed, and when the GPU's cache, the CPU tier or a daemon serves it. Nobody else should use
the server meanwhile.
"""

_EXAMPLES = """\
examples:
  tiered-kv bench inputs --length 100000 --count 6 prompts.jsonl
  tiered-kv bench speed prompts.jsonl --restarts 1
      computed, GPU, CPU tier, daemon; then, after you restarted the server, from the daemon again
  tiered-kv bench stress prompts.jsonl --n 6 --daemon tcp://127.0.0.1:9527
      six long prompts, replayed so that each tier in turn must serve
"""

_INPUTS = """\
Writes prompts of a given length: words in random order, counted with the server's own tokenizer.
"""

_SPEED = """\
Asks for the first prompt of a file again and again, and tells how long one token took and where the
prompt came from. To measure the CPU tier and the daemon it empties the GPU's cache, for which the
server needs VLLM_SERVER_DEV_MODE=1 in its environment.
"""

_STRESS = """\
Asks for the first prompt, then for the first two, and so on. Each cell of the triangle shows the
seconds to the first token and what served most of the prompt. Prompts that are long enough fill one
tier after the other.
"""

_INPUTS_EXAMPLES = """\
exit status:
  0  the file is written     2  the server cannot be asked, or the file cannot be written

examples:
  tiered-kv bench inputs --length 100000 --count 6 prompts.jsonl
  tiered-kv bench inputs --words book.txt --seed 1 prompts.jsonl
"""

_SERVED = """\
served by:
  computed, gpu, cpu, remote   where at least a tenth of the prompt came from, the most first
  remote(memory), remote(ssd)  with --daemon: the daemon's tiers

exit status:
  0  measured     1  a daemon does not answer
  2  the server cannot be asked, or the file of prompts cannot be used
"""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure what each tier of a running server gives",
        description=_BENCH,
        epilog=_EXAMPLES,
        formatter_class=arguments.HelpFormatter,
    )
    tools = bench.add_subparsers(metavar="TOOL", required=True)

    inputs = _add(
        tools, "inputs", _inputs, "write prompts of a given length", _INPUTS, _INPUTS_EXAMPLES
    )
    inputs.add_argument("out", metavar="FILE", type=Path, help="prompts, one JSON object a line")
    inputs.add_argument(
        "--length",
        metavar="TOKENS",
        type=arguments.positive,
        default=8000,
        help="tokens of each prompt, within 1 %% (%(default)s)",
    )
    inputs.add_argument(
        "--count",
        metavar="N",
        type=arguments.positive,
        default=1,
        help="number of prompts (%(default)s)",
    )
    inputs.add_argument(
        "--words", metavar="FILE", type=Path, help="a text whose words to use (made-up ones)"
    )
    inputs.add_argument(
        "--seed", metavar="N", type=int, default=0, help="another seed, other prompts (%(default)s)"
    )

    one = _add(tools, "speed", _speed, "one prompt, from each tier", _SPEED, _SERVED)
    one.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        default=0,
        help="wait so often for you to restart the server (%(default)s)",
    )
    many = _add(tools, "stress", _stress, "many prompts, round after round", _STRESS, _SERVED)
    many.add_argument(
        "--n",
        metavar="N",
        type=arguments.positive,
        help="use the first N prompts (all of the file)",
    )
    for parser in (one, many):
        parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="file of prompts")
        parser.add_argument(
            "--daemon",
            metavar="ADDRESS",
            type=arguments.daemon_address,
            action="append",
            default=[],
            help="a daemon of the server, to tell its tiers apart; may be repeated",
        )
        arguments.add_keys(parser)
        parser.add_argument("--salt", metavar="TEXT", help="cache_salt (a new one in each run)")
        parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add(
    tools: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser = arguments.add_command(tools, name, run, help, description, epilog)
    arguments.add_server(parser, "per request, and for a restart")
    return parser


def _inputs(given: argparse.Namespace) -> int:
    server = arguments.open_server(given)
    model = server.choose_model(given.model)
    source = random.Random(given.seed)
    try:
        words = given.words.read_text().split() if given.words else made_words(source)
        if not words:
            raise ReplayError(f"{given.words} has no words")
        with given.out.open("w") as out:
            lengths = []
            for number in range(1, given.count + 1):
                text, tokens = make_text(server, model, words, given.length, source)
                out.write(json.dumps({"prompt": text}) + "\n")
                lengths.append(tokens)
                arguments.print_progress(f"{number} of {given.count}")
    except OSError as error:
        raise ReplayError(f"{error.filename}: {error.strerror}") from None
    print(f"{given.count} prompts of {min(lengths)} to {max(lengths)} tokens in {given.out}")
    return 0


def _speed(given: argparse.Namespace) -> int:
    prompt = read_prompts(given.prompts)[0]
    with _asker(given) as asker:
        table = speed(asker, prompt, given.restarts, given.timeout, arguments.print_progress)
    if given.json:
        rows = [{"row": name, **answer.as_json()} for name, answer in table.rows]
        print(json.dumps({"model": asker.model, "rows": rows}, indent=1))
    else:
        print("\n".join(table.lines()))
    return 0


def _stress(given: argparse.Namespace) -> int:
    prompts = read_prompts(given.prompts)
    wanted = given.n or len(prompts)
    if wanted > len(prompts):
        raise ReplayError(
            f"{given.prompts} has {len(prompts)} prompts, and --n asks for {wanted}; write more "
            f"with `tiered-kv bench inputs --count {wanted}`"
        )

    def show(row: Sequence[Answer]) -> None:
        if not given.json:
            print(triangle_line(len(row), row), flush=True)

    if not given.json:
        print("   n  " + "  ".join(f"{number:>{_CELL}}" for number in range(1, wanted + 1)))
    with _asker(given) as asker:
        rows = stress(asker, prompts[:wanted], show)
    if given.json:
        cells = [[answer.as_json() for answer in row] for row in rows]
        print(json.dumps({"model": asker.model, "rows": cells}, indent=1))
    return 0


_CELL = 16


def triangle_line(number: int, row: Sequence[Answer]) -> str:
    cells = (f"{answer.seconds:.2f} {answer.served_by}" for answer in row)
    return f"{number:4}  " + "  ".join(f"{cell:>{_CELL}}" for cell in cells)


@contextlib.contextmanager
def _asker(given: argparse.Namespace) -> Iterator[Asker]:
    server = arguments.open_server(given)
    model = server.choose_model(given.model)
    curve = arguments.curve_keys(given)
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(Inquiry(one, 5.0, curve)) for one in given.daemon]
        yield Asker(server, model, given.salt or secrets.token_hex(8), daemons)

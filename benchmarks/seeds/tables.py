"""The tables of the report: the rows and columns of the originals, filled with our numbers.

Pure functions of the results: nothing is measured and nothing is typed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.markdown import image, measured_on, number, table
from benchmarks.plots import Plot
from benchmarks.seeds.cells import Cells
from benchmarks.seeds.shapes import HEAD_SIZE, SHAPES
from benchmarks.stored_results import Result, Results

SCHEDULING = {"sync": "sync", "async": "async-2"}
_SHAPES = {shape.name: shape for shape in SHAPES}


def section(results: Results, plots_of: Callable[[Result], list[Plot]]) -> str:
    """All tables for which there are results, with their plots; empty when there are none."""
    parts = []
    for name, (title, make) in TABLES.items():
        for result in results.of(f"seeds_{name}"):
            made = make(result.data)
            if made:
                images = [image(plot.name, plot.title) for plot in plots_of(result)]
                parts += [f"### {title}\n", measured_on(result), *_remarks(result), made, *images]
    return "\n".join(["## The original tables\n", _INTRO, *parts]) if parts else ""


_WEIGHTS = (
    ("Qwen2.5-32B-Instruct", "GPTQ-Int4"),
    ("Qwen2.5-32B-Instruct", "bf16"),  # not in the original
    ("Qwen2.5-7B-Instruct", "bf16"),
    ("Qwen2.5-7B-Instruct", "fp8"),
    ("Qwen2.5-3B-Instruct", "bf16"),
    ("glm-4-9b-chat-1m", "bf16"),
    ("glm-4-9b-chat-1m", "fp8"),
    ("Llama-3.1-8B", "bf16"),
    ("Llama-3.1-8B", "fp8"),
)


def prefill_and_swap(data: dict[str, Any]) -> str:
    cells = Cells(data)
    header = ["model", "num_attention_layers", "num_kv_heads", "head_size", "kv_cache_dtype"]
    rows = []
    tiny = [(name, "bf16") for name in cells.values("shape") if name not in _SHAPES]
    for name, weights in (*_WEIGHTS, *tiny):
        shape = _SHAPES.get(name)
        sizes = [shape.layers, shape.kv_heads, HEAD_SIZE] if shape else [None] * 3
        times = (
            cells.seconds(shape=name, weights=weights, what="prefill"),
            cells.seconds(shape=name, what="swap_in"),
            cells.seconds(shape=name, what="swap_out"),
        )
        rows.append(
            [
                f"{name}-{weights}",
                *(number(size, 0) for size in sizes),
                "float16" if weights == "GPTQ-Int4" else "bfloat16",
                *(number(seconds, 4) for seconds in times),
            ]
        )
    columns = [*header, "prefill (s)", "swap in (s)", "swap out (s)"]
    return _intro(data, "{prompt_tokens} tokens, 1024 in a step; {batches} x {blocks} blocks.") + (
        table(columns, rows)
    )


def store_overhead(data: dict[str, Any]) -> str:
    text = _intro(data, "Up to {prompts} prompts of {prompt_tokens} tokens, requests per second.")
    for base, other, names in (
        ("vllm", "tiered", ("", "offloading-")),
        ("tiered", "daemon", ("swap_out-", "transfer_out-")),
    ):
        for gpu_cache in (True, False):
            made = _overhead(Cells(data), base, other, names, gpu_cache)
            if made:
                title = names[1].rstrip("-").replace("offloading", "swap_out")
                text += f"{title}, GPU cache {'on' if gpu_cache else 'off'}:\n\n{made}\n"
    return text


def _overhead(cells: Cells, base: str, other: str, names: tuple[str, str], gpu_cache: bool) -> str:
    def labels(system: str, scheduling: str, chunk: int) -> dict[str, Any]:
        return {
            "system": system,
            "scheduling": scheduling,
            "gpu_cache": gpu_cache,
            "chunk": chunk,
        }

    header = ["num_batched_tokens"]
    header += [name + shown for name in names for shown in SCHEDULING.values()]
    header += [f"Delta-{shown}" for shown in SCHEDULING.values()]
    rows = []
    measured = False
    for chunk in cells.values("chunk"):
        rates = [
            cells.rate(**labels(system, scheduling, chunk))
            for system in (base, other)
            for scheduling in SCHEDULING
        ]
        # Of speeds, so that 1 is no cost and less is slower.
        deltas = [
            cells.times(labels(base, scheduling, chunk), labels(other, scheduling, chunk))
            for scheduling in SCHEDULING
        ]
        measured = measured or any(rate is not None for rate in rates)
        rows.append([str(chunk), *(number(value, 2) for value in (*rates, *deltas))])
    return table(header, rows) if measured else ""


_YOCO = (
    " `yoco` is `reuse_partial_tail`, which finds prompts that repeat as a whole: at 100 %. Below "
    "that it does what `prefix_caching` does, and differences between the two are noise."
)


def hit_rates(data: dict[str, Any]) -> str:
    cells = Cells(data)
    columns = cells.values("column")
    header = ["hit rate"]
    header += [f"{column}-{shown}" for column in columns for shown in SCHEDULING.values()]
    rows = [
        [
            str(percent),
            *(
                number(cells.rate(column=column, scheduling=scheduling, percent=percent), 2)
                for column in columns
                for scheduling in SCHEDULING
            ),
        ]
        for percent in cells.values("percent")
    ]
    return (
        _intro(
            data,
            "{requests} requests of {prompt_tokens} tokens that ask for {output_tokens}, requests "
            "per second.",
        )
        + "`transfer_in-1` writes to the daemon, `transfer_in-2` reads what another engine wrote."
        + (_YOCO if "yoco" in columns else "")
        + "\n\n"
        + _noise(cells)
        + table(header, rows)
    )


def _noise(cells: Cells) -> str:
    """How far apart equal work was measured."""
    rates = [
        cells.rate(column="naive", scheduling=scheduling, percent=percent)
        for scheduling in SCHEDULING
        for percent in cells.values("percent")
    ]
    measured = [rate for rate in rates if rate is not None]
    if len(measured) < 2:
        return ""
    return (
        "The hit rate changes nothing for `naive`, which computes everything: that its rows lie "
        f"between {min(measured):.1f} and {max(measured):.1f} is the noise of this run, in which "
        "all engines share one machine.\n\n"
    )


LOCAL_ROWS: dict[str, tuple[int, ...]] = {
    "naive": (1,),
    "disable_prefix_caching": (1,),
    "prefix_caching": (1, 2, 3),
    "yoco": (1, 2, 3),
    "offloading+prefix_caching": (1, 2, 3),
    "offloading+no_gpu_caching": (1, 2, 3),
}
REMOTE_ROWS: dict[str, tuple[int, ...]] = {
    "remote+prefix_caching": (1, 2, 3, 4, 5, 6),
    "remote+no_prefix_caching": (1, 2, 3, 4, 5, 6),
}


def long_prefill(data: dict[str, Any]) -> str:
    cells = Cells(data)
    return (
        _intro(
            data,
            "{prompts} prompts of {prompt_tokens} tokens, two at a time, in requests per second.",
        )
        + _rounds(cells, LOCAL_ROWS, "output_len:")
        + _remote_rounds(cells)
    )


def _remote_rounds(cells: Cells) -> str:
    if not set(cells.values("row")) & set(REMOTE_ROWS):
        return ""
    return (
        "\nWith a daemon; the engine is killed and started again after round 3. The daemon's "
        "memory is mapped, so its blocks are not copied into the CPU tier: without GPU cache "
        "rounds 5 and 6 are served by the daemon too.\n\n" + _rounds(cells, REMOTE_ROWS, "")
    )


def _rounds(cells: Cells, wanted: dict[str, tuple[int, ...]], corner: str) -> str:
    outputs = cells.values("output")
    rows: list[list[str]] = []
    ran = set(cells.values("row"))  # a run may leave systems out
    for name, labels in rounds({row: at for row, at in wanted.items() if row in ran}):
        rates = (cells.rate(**labels, output=output) for output in outputs)
        rows.append([f"{len(rows) + 1}. {name}", *(number(rate, 2) for rate in rates)])
    return table([corner, *(str(output) for output in outputs)], rows)


def rounds(wanted: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each round of each row: its name, and the labels of its cells."""
    for row, numbers in wanted.items():
        for at in numbers:
            yield row if len(numbers) == 1 else f"{row}-{at}", {"row": row, "round": at}


def documents(data: dict[str, Any]) -> str:
    cells = Cells(data)
    wheres = [[what, *_served(cells, what=what)] for what in cells.values("what")]
    count = max(cells.values("row"), default=0)
    rows = [
        [
            str(row),
            *(number(cells.seconds(row=row, document=n), 2) for n in range(1, row + 1)),
            *[""] * (count - row),
        ]
        for row in range(1, count + 1)
    ]
    sources = [
        [
            str(row),
            *(_served(cells, row=row, document=n)[1] for n in range(1, row + 1)),
            *[""] * (count - row),
        ]
        for row in range(1, count + 1)
    ]
    header = ["n", *(str(n) for n in range(1, count + 1))]
    return (
        _intro(data, "One document of {long_tokens} tokens, seconds to the first token.")
        + table(["served by", "seconds", "blocks loaded"], wheres)
        + _intro(
            data, "\nDocuments of {document_tokens} tokens, all of them asked again in each row."
        )
        + table(header, rows)
        + "\nBlocks loaded for each of them, by tier (`remote` is the daemon's memory or SSD):\n\n"
        + table(header, sources)
    )


def _served(cells: Cells, **labels: Any) -> tuple[str, str]:
    cell = cells.find(**labels)
    if cell is None:
        return number(None), number(None)
    loaded = cell.get("loaded_blocks", [{}])[-1]
    tiers = ", ".join(f"{tier} {count:.0f}" for tier, count in loaded.items() if count)
    return number(cells.seconds(**labels), 3), tiers or "none"


_NAIVE = "b2b naive"
_COPIES = (
    "l2l naive",
    _NAIVE,
    "b2b fancy index",
    "b2b index_copy_",
    "b2b native",
    "b2b native, all cores",
)
_SERVER = {
    "set deferred=False": "set",
    "set deferred=True": "set deferred",
    "get": "get",
    "stream_get": "stream_get",
}


def memory_and_wire(data: dict[str, Any]) -> str:
    cells = Cells(data)
    swaps = {"swap in": "swap_in", "swap out": "swap_out"}
    copies = {**{name: name for name in _COPIES}, **swaps}
    shapes = cells.values("shape")
    rows = [
        [shape, *(number(cells.seconds(shape=shape, what=what), 4) for what in copies.values())]
        for shape in shapes
    ]
    return (
        _intro(data, "{batches} x {blocks} blocks of 16 tokens. Copies in memory:")
        + table(["model", *(f"{what} (s)" for what in copies)], rows)
        + "\nPlain zmq; delta is the multiple of the plain copy:\n\n"
        + _multiples(cells, shapes, {kind: kind for kind in ("tcp", "ipc", "inproc")})
        + "\nThe daemon over tcp:\n\n"
        + _multiples(cells, shapes, _SERVER)
    )


def _multiples(cells: Cells, shapes: Iterable[str], columns: dict[str, str]) -> str:
    header = ["", f"{_NAIVE} (s)", *columns, *(f"delta-{column}" for column in columns)]
    rows = []
    for shape in shapes:
        base = {"shape": shape, "what": _NAIVE}
        times = [cells.seconds(shape=shape, what=what) for what in (_NAIVE, *columns.values())]
        deltas = [cells.times({"shape": shape, "what": w}, base) for w in columns.values()]
        rows.append(
            [
                shape,
                *(number(value, 3) for value in times),
                *(number(value, 2) for value in deltas),
            ]
        )
    return table(header, rows)


def _intro(data: dict[str, Any], text: str) -> str:
    return text.format(**data["sizes"]) + "\n\n"


def _remarks(result: Result) -> Sequence[str]:
    """What the run itself has to say: what it left out, and what failed."""
    data = result.data
    failed = {name: facts["failed"] for name, facts in data["engines"].items() if "failed" in facts}
    remarks = [f"{value}\n" for value in data["notes"].values() if isinstance(value, str)]
    remarks += [f"`{name}` failed: {why}\n" for name, why in failed.items()]
    if data.get("stopped_by_budget"):
        remarks.append("The run ended with its time, not with its work.\n")
    return remarks


_INTRO = """\
The benchmark tables of the documents this project grew from, as far as they were measured again.
sync and async-2 are vLLM's `async_scheduling` off and on. Engines that are compared live at the
same time and take turns. Weights are dummies of the named shape.

The tables of swap_out and transfer_out, which tell what storing costs, are left out: repetitions
differed by 1.3 to 1.6, more than storing does. What it costs an engine without pause is among the
chats above (`prefill`).
"""

TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "prefill_and_swap": ("Prefill and swap", prefill_and_swap),
    "store_overhead": ("Cost of storing: swap_out and transfer_out", store_overhead),
    "hit_rates": ("Hit rates: prefix caching, swap_in and transfer_in", hit_rates),
    "long_prefill": ("Long prefill", long_prefill),
    "documents": ("Long documents", documents),
    "memory_and_wire": ("Memory copies, zmq and the daemon", memory_and_wire),
}

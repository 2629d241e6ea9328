"""The tables and curves of `benchmarks/throughput`: pure functions of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.plots import Plot, Series
from benchmarks.result_files import Result, Results, spread
from benchmarks.sections import published
from benchmarks.sections.markdown import image, measured_on, number, table
from benchmarks.throughput.documents import IN_CPU_TIER, IN_DAEMON, ON_GPU
from benchmarks.throughput.engine_pool import SMALL_CPU_GIB, SMALL_DAEMON_GIB
from benchmarks.throughput.engines import CHUNK, GLM_9B, HEAD_SIZE, QWEN_3B, QWEN_7B, SHAPES
from benchmarks.throughput.record import Cells
from benchmarks.throughput.store_overhead import COMPARED

SCHEDULING = {"sync": "sync", "async": "async-2"}
_SHAPES = {shape.name: shape for shape in SHAPES}
_SMALL_TIERS = f"CPU tiers have {SMALL_CPU_GIB} GiB, the daemon's memory {SMALL_DAEMON_GIB}."


def section(results: Results) -> str:
    """All tables for which there are results, with their plots; empty when there are none."""
    parts = []
    for name, (title, make) in TABLES.items():
        shown = False
        for result in results.of(f"throughput_{name}"):
            made = make(result.data)
            if made:
                shown = True
                images = [image(plot.name, plot.title) for plot in plots_of(result)]
                parts += [f"### {title}\n", measured_on(result), *_remarks(result), made, *images]
        parts += published.beside(f"throughput_{name}") if shown else []
    return (
        "\n".join(["## Throughput by hit rate and prompt length\n", _INTRO, *parts])
        if parts
        else ""
    )


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
            _time(cells, 4, shape=name, weights=weights, what="prefill"),
            _time(cells, 4, shape=name, what="swap_in"),
            _time(cells, 4, shape=name, what="swap_out"),
        )
        rows.append(
            [
                f"{name}-{weights}",
                *(number(size, 0) for size in sizes),
                "float16" if weights == "GPTQ-Int4" else "bfloat16",
                *times,
            ]
        )
    columns = [*header, "prefill (s)", "swap in (s)", "swap out (s)"]
    text = (
        "{prompt_tokens} tokens, 1024 in a step; {batches} x {blocks} blocks. Medians of "
        "{repetitions} repetitions, and their range where it is more than a tenth."
    )
    return _intro(data, text) + table(columns, rows)


def store_overhead(data: dict[str, Any]) -> str:
    text = _intro(
        data,
        f"{QWEN_3B.name}, up to {{prompts}} prompts of {{prompt_tokens}} tokens at once, fewer "
        "with small steps, one token of output; requests per second, medians with the range of all "
        "rounds. Deltas are of equal rounds, medians with quartiles: 1 is no cost, less is slower. "
        "The last row has the median and the quartiles of the medians above it. " + _SMALL_TIERS,
    )
    named = {  # title, and what columns begin with
        "tiered": ("swap_out", "", "offloading-"),
        "daemon": ("transfer_out", "swap_out-", "transfer_out-"),
        "offloading": ("vLLM's OffloadingConnector", "", "OffloadingConnector-"),
    }
    for base, other in COMPARED:
        title, *names = named[other]
        for gpu_cache in (True, False):
            made = _overhead(Cells(data), base, other, names, gpu_cache)
            if made:
                text += f"{title}, GPU cache {'on' if gpu_cache else 'off'}:\n\n{made}\n"
    return text


def _overhead(cells: Cells, base: str, other: str, names: Sequence[str], gpu_cache: bool) -> str:
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
    medians: list[list[float]] = [[] for _ in SCHEDULING]
    measured = False
    for chunk in cells.values("chunk"):
        rates = [
            _rate(cells, **labels(system, scheduling, chunk))
            for system in (base, other)
            for scheduling in SCHEDULING
        ]
        ratios = [
            (cells.find(**labels(other, scheduling, chunk)) or {}).get("ratios")
            for scheduling in SCHEDULING
        ]
        for known, found in zip(medians, ratios, strict=True):
            known += [found["median"]] if found else []
        measured = measured or any(
            cells.find(**labels(other, scheduling, chunk)) for scheduling in SCHEDULING
        )
        rows.append([str(chunk), *rates, *map(_with_quartiles, ratios)])
    all_steps = [_with_quartiles(spread(known) if len(known) > 1 else None) for known in medians]
    rows.append(["all", *([""] * (len(header) - 1 - len(all_steps))), *all_steps])
    return table(header, rows) if measured else ""


def _with_quartiles(found: dict[str, Any] | None) -> str:
    if found is None:
        return number(None)
    if found["n"] == 1:
        return f"{found['median']:.2f} (one round)"
    return "{median:.2f} ({q1:.2f} … {q3:.2f})".format(**found)


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
                _rate(cells, column=column, scheduling=scheduling, percent=percent)
                for column in columns
                for scheduling in SCHEDULING
            ),
        ]
        for percent in cells.values("percent")
    ]
    return (
        _intro(
            data,
            f"{QWEN_3B.name}, {{requests}} requests of {{prompt_tokens}} tokens that ask for "
            f"{{output_tokens}}, {QWEN_3B.sequences} sequences at a time, {CHUNK} tokens in a "
            f"step; requests per second, medians with the range of all rounds. {_SMALL_TIERS}",
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
    "OffloadingConnector+prefix_caching": (1, 2, 3),
    "OffloadingConnector+no_gpu_caching": (1, 2, 3),
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
            f"{QWEN_7B.name}, {{prompts}} prompts of {{prompt_tokens}} tokens, two at a time, "
            f"{CHUNK} tokens in a step; requests per second, medians with the range of all "
            "repetitions, each with new prompts. The GPU has room for {prompts} prompts and a "
            "quarter, the CPU tier for twice as many.",
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
        rates = (_rate(cells, **labels, output=output) for output in outputs)
        rows.append([f"{len(rows) + 1}. {name}", *rates])
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
            *(_time(cells, 2, row=row, document=n) for n in range(1, row + 1)),
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
        _intro(
            data,
            f"{GLM_9B.name}, {CHUNK} tokens in a step, GPU cache on. One document of "
            "{long_tokens} tokens, seconds to the first token: medians, and the range where it is "
            "more than a tenth.",
        )
        + table(["served by", "seconds", "blocks loaded"], wheres)
        + _intro(
            data,
            "\nDocuments of {document_tokens} tokens, all of them asked again in each row. The "
            f"GPU has room for {ON_GPU} of them, the CPU tier for {IN_CPU_TIER}, the daemon's "
            f"memory for {IN_DAEMON}, its SSD for all.",
        )
        + table(header, rows)
        + "\nBlocks loaded for each of them, by tier (`remote` is the daemon's memory or SSD):\n\n"
        + table(header, sources)
    )


def _served(cells: Cells, **labels: Any) -> tuple[str, str]:
    cell = cells.find(**labels)
    if cell is None:
        return number(None), number(None)
    loaded = cell.get("loaded_blocks", {})
    tiers = ", ".join(f"{tier} {count:.0f}" for tier, count in loaded.items() if count)
    return _time(cells, 3, **labels), tiers or "none"


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
        [shape, *(_time(cells, 4, shape=shape, what=what) for what in copies.values())]
        for shape in shapes
    ]
    return (
        _intro(
            data,
            "{batches} x {blocks} blocks of 16 tokens; medians of {repetitions} repetitions, and "
            "their range where it is more than a tenth. Copies in memory:",
        )
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
        times = [_time(cells, 3, shape=shape, what=what) for what in (_NAIVE, *columns.values())]
        deltas = [cells.ratio({"shape": shape, "what": w}, base) for w in columns.values()]
        rows.append(
            [
                shape,
                *times,
                *(number(value, 2) for value in deltas),
            ]
        )
    return table(header, rows)


def _time(cells: Cells, digits: int, **labels: Any) -> str:
    """The median, and the range where it is more than a tenth of it."""
    seconds, ends = cells.seconds(**labels), cells.range(**labels)
    shown = number(seconds, digits)
    if seconds is None or ends is None or ends[1] - ends[0] <= 0.1 * seconds:
        return shown
    return f"{shown} ({' … '.join(number(end, digits) for end in ends)})"


def _rate(cells: Cells, **labels: Any) -> str:
    """Requests per second, with the range where there are several rounds."""
    cell = cells.find(**labels)
    if cell is None or "range" not in cell:
        return number(cells.rate(**labels), 2)
    low, high = (cell["requests"] / seconds for seconds in reversed(cell["range"]))
    return f"{cell['requests'] / cell['seconds']:.2f} ({low:.2f} … {high:.2f})"


def _intro(data: dict[str, Any], text: str) -> str:
    return text.format(**data["sizes"]) + "\n\n"


def _remarks(result: Result) -> Sequence[str]:
    """What the run itself has to say: what it left out, and what failed."""
    data = result.data
    remarks = [f"{value}\n" for value in data["notes"].values() if isinstance(value, str)]
    remarks += [f"`{name}` failed: {why}\n" for name, why in data["failed"].items()]
    if data.get("stopped_by_budget"):
        remarks.append("The run ended with its time, not with its work.\n")
    return remarks


_INTRO = """\
Swaps of blocks beside prefills of the same tokens, requests per second by hit rate, and long
prompts that are asked again. sync and async-2 are vLLM's `async_scheduling` off and on. Engines
that are compared live at the same time and take turns. Weights are dummies of the named shape.
"""

TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "prefill_and_swap": ("Prefill and swap", prefill_and_swap),
    "store_overhead": ("Cost of storing: swap_out and transfer_out", store_overhead),
    "hit_rates": ("Hit rates: prefix caching, swap_in and transfer_in", hit_rates),
    "long_prefill": ("Long prefill", long_prefill),
    "documents": ("Long documents", documents),
    "memory_and_wire": ("Memory copies, zmq and the daemon", memory_and_wire),
}


_SCHEDULING = {"sync": "synchronous", "async": "asynchronous"}


_SYSTEMS = {"vllm": "vllm", "tiered": "swap_out", "daemon": "transfer_out"}  # as in the table


def plots(results: Results) -> list[Plot]:
    return [plot for result in results.of("throughput_") for plot in plots_of(result)]


def plots_of(result: Result) -> list[Plot]:
    """Empty for a table without plots, and without what a run did not measure."""
    for name, make in _PLOTS.items():
        if result.benchmark.startswith(f"throughput_{name}"):
            return [plot for plot in make(result) if plot.series]
    return []


def _store_overhead(result: Result) -> Iterator[Plot]:
    cells = Cells(result.data)
    # Places of equal width: on a scale of numbers the small steps would lie upon each other.
    chunks = {str(chunk): chunk for chunk in cells.values("chunk")}
    for gpu_cache, shown in ((True, "on"), (False, "off")):
        lines = {
            f"{name}-{SCHEDULING[scheduling]}": [
                (
                    at,
                    cells.rate(
                        system=system, scheduling=scheduling, gpu_cache=gpu_cache, chunk=chunk
                    ),
                )
                for at, chunk in chunks.items()
            ]
            for system, name in _SYSTEMS.items()
            for scheduling in SCHEDULING
        }
        yield Plot(
            name=f"{result.name}-gpu-cache-{shown}",
            title=f"Requests per second while storing, GPU cache {shown}",
            x_label="num_batched_tokens",
            y_label="requests per second",
            series=_known(lines),
        )


def _hit_rates(result: Result) -> Iterator[Plot]:
    cells = Cells(result.data)
    for scheduling, shown in _SCHEDULING.items():
        lines = {
            column: [
                (percent, cells.rate(column=column, scheduling=scheduling, percent=percent))
                for percent in cells.values("percent")
            ]
            for column in cells.values("column")
        }
        yield Plot(
            name=f"{result.name}-{scheduling}",
            title=f"Requests per second by shared prefix, {shown} scheduling",
            x_label="shared prefix, % of the prompt",
            y_label="requests per second",
            series=_known(lines),
        )


def _long_prefill(result: Result) -> Iterator[Plot]:
    cells = Cells(result.data)
    outputs = {str(output): output for output in cells.values("output")}
    for place, rows, title in (
        ("local", LOCAL_ROWS, "Long prefill, without a daemon"),
        ("remote", REMOTE_ROWS, "Long prefill, with a daemon; engines restarted after round 3"),
    ):
        lines = {
            name: [(at, cells.rate(**labels, output=output)) for at, output in outputs.items()]
            for name, labels in rounds(rows)
        }
        yield Plot(
            name=f"{result.name}-{place}",
            title=title,
            x_label="output_len",
            y_label="requests per second",
            series=_known(lines),
            log_y=True,  # what is computed takes many times as long as what is loaded
        )


def _known(lines: dict[str, list[tuple[Any, float | None]]]) -> tuple[Series, ...]:
    """Lines through what was measured; none where nothing was."""
    found = []
    for label, points in lines.items():
        known = [(x, round(rate, 3)) for x, rate in points if rate is not None]
        if known:
            x, y = zip(*known, strict=True)
            found.append(Series(label, x, y))
    return tuple(found)


_PLOTS: dict[str, Callable[[Result], Iterator[Plot]]] = {
    "store_overhead": _store_overhead,
    "hit_rates": _hit_rates,
    "long_prefill": _long_prefill,
}

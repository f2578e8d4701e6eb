"""A benchmark as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from minillm.bench.benchmark import Benchmark, RowResult
from minillm.bench.peers import OURS
from minillm.bench.rows import ANSWER_LENGTHS, NUM_REQUESTS, PROMPT_LENGTHS, Row
from minillm.bench.turns import Spread
from minillm.trace.roofline import Roofline

NOTHING = "-"
SERVING = (
    f"serving {NUM_REQUESTS} requests with prompts of {PROMPT_LENGTHS[0]} to {PROMPT_LENGTHS[1]} tokens and answers of "
    f"{ANSWER_LENGTHS[0]} to {ANSWER_LENGTHS[1]}; a client sends its next request when it has its answer; TPOT is the "
    "time per output token, TTFT the time to the first token; each row shows the run of the median duration"
)


def show(benchmark: Benchmark, console: Console) -> None:
    """Print the conditions, the table and the notes. The table is Markdown if the output is not a terminal."""
    if not console.is_terminal:
        console = Console(file=console.file, width=240, color_system=None)
    for line in conditions(benchmark):
        console.print(line, markup=False, highlight=False)
    console.print()
    served = [result for result in benchmark.results if result.row.group == "serve"]
    if len(served) < len(benchmark.results):
        console.print(build_table(benchmark, plain=not console.is_terminal))
    if served:
        console.print(SERVING, markup=False, highlight=False)
        console.print()
        console.print(build_serving_table(benchmark, plain=not console.is_terminal))
    notes = footnotes(benchmark)
    if notes:
        console.print()
    for line in notes:
        console.print(line, markup=False, highlight=False)


def conditions(benchmark: Benchmark) -> list[str]:
    """Return the lines that describe the machine, the model and the method."""
    m, megabyte = benchmark.machine, 1e6
    versions = ", ".join(f"{name} {version}" for name, version in m.versions.items())
    load = "unknown" if m.load_average is None else f"{m.load_average:.2f}"
    lines = [
        f"{m.cpu}, {m.cores} cores, {m.threads} threads used; {m.system}; {versions}; load average {load} at the start",
        f"memory read: {_best(m.bandwidth, 'GB/s')}; float32 matrix product: {_best(m.peak, 'GFLOP/s')}",
        f"{benchmark.model.name}: {benchmark.model_bytes / megabyte:.1f} MB of tensors; minillm reads "
        f"{benchmark.weight_bytes / megabyte:.1f} MB of weights per decode step, and "
        f"{benchmark.kv_bytes_per_token / 1e3:.1f} KB of keys and values per token of context",
        f"rounds: {benchmark.rounds}; figures are medians, with the lowest and highest in brackets; a ratio above 1 "
        "means that minillm is faster (or smaller, for memory) by that factor",
    ]
    if m.is_busy:
        lines.append("WARNING: the machine was busy at the start; do not quote these figures")
    return lines


def _best(spread: Spread, unit: str) -> str:
    return f"{spread.high / 1e9:.1f} {unit} at best, {spread.median / 1e9:.1f} median"


def build_table(benchmark: Benchmark, *, plain: bool) -> Table:
    """Return the table with one line per row and one column per engine, without the rows about serving."""
    peers = [name for name in benchmark.versions if name != OURS.name]
    table = Table(box=box.MARKDOWN if plain else box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column(OURS.name, justify="right")
    table.add_column("of the limit", justify="right")
    for peer in peers:
        table.add_column(peer, justify="right")
        table.add_column("ratio", justify="right")
    for result in benchmark.results:
        if result.row.group == "serve":
            continue
        cells = [result.row.title, _amount_cell(result, OURS.name), _limit_cell(result, benchmark)]
        for peer in peers:
            cells += [_amount_cell(result, peer), _ratio_cell(result, peer)]
        table.add_row(*cells)
    return table


def build_serving_table(benchmark: Benchmark, *, plain: bool) -> Table:
    """Return the table of the rows about serving: throughput, and the latencies that a client sees."""
    table = Table(box=box.MARKDOWN if plain else box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("all together", "TPOT: median", "95th percentile", "TTFT: median", "95th percentile"):
        table.add_column(heading, justify="right")
    for result in benchmark.results:
        if result.row.group == "serve":
            run = result.typical_run
            times = (run.median_tpot, run.p95_tpot, run.median_ttft, run.p95_ttft) if run else ()
            cells = [NOTHING if time is None else f"{1e3 * time:.0f} ms" for time in times]
            table.add_row(result.row.title, _amount_cell(result, OURS.name), *cells)
    return table


def _amount_cell(result: RowResult, engine: str) -> str:
    if result.skipped:
        return "skipped"
    if engine in result.turns.failures:
        return "failed"
    amounts = result.turns.amounts.get(engine)
    return format_amount(result.row, Spread.of(amounts).median) if amounts else NOTHING


def _ratio_cell(result: RowResult, peer: str) -> str:
    ratios = result.turns.ratios.get(peer)
    if not ratios:
        return NOTHING
    spread = Spread.of(ratios)
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})" if len(ratios) > 1 else f"{spread.median:.2f}"


def _limit_cell(result: RowResult, benchmark: Benchmark) -> str:
    amounts = result.turns.amounts.get(OURS.name)
    if not amounts:
        return NOTHING
    amount = Spread.of(amounts).median
    if result.row.group == "memory":
        return f"{amount / benchmark.model_bytes:.1f} x the model"
    if result.work is None:
        return NOTHING
    shares = limit_shares(result, benchmark.machine.roofline, amount)
    return f"{shares['share']:.0%} of {shares['bound']}"


def limit_shares(result: RowResult, roofline: Roofline, seconds: float) -> dict[str, Any]:
    """Compare `seconds` with the shortest time that the machine allows for the work. At the limit, shares are 1."""
    work = result.work
    assert work is not None, "rows without work have no limit"
    return {
        "bound": roofline.bound(work),
        "seconds": roofline.seconds(work),
        "share": roofline.seconds(work) / seconds,
        "memory_share": roofline.memory_seconds(work) / seconds,
        "arithmetic_share": roofline.arithmetic_seconds(work) / seconds,
        "bytes": work.num_bytes,
        "flops": work.flops,
    }


def format_amount(row: Row, amount: float) -> str:
    """Format an amount: tokens per second if tokens are computed, otherwise a time, a size or a number."""
    if row.tokens:
        rate = row.tokens / amount
        return f"{rate:,.0f} tokens/s" if rate >= 100 else f"{rate:.1f} tokens/s"
    if row.group == "memory":
        return f"{amount / 1e6:,.0f} MB"
    if row.group == "exactness":
        return f"{amount:.1e}"
    return f"{amount:.2f} s" if amount >= 1 else f"{amount * 1e3:.0f} ms"


def footnotes(benchmark: Benchmark) -> list[str]:
    """Return the reasons for what is missing from the table."""
    notes = [f"{name} not measured: {reason}" for name, reason in benchmark.not_measured.items()]
    if len(benchmark.versions) > 1 and any(result.row.group == "serve" for result in benchmark.results):
        notes.append("serve: compares only minillm's own policies")
    for result in benchmark.results:
        if result.skipped:
            notes.append(f"{result.row.name} skipped: {result.skipped}")
        notes += [f"{result.row.name}, {name}: {reason}" for name, reason in result.turns.failures.items()]
    return notes


def to_json(benchmark: Benchmark) -> dict[str, Any]:
    """Return all measurements in seconds, bytes and operations per second, including the single turns."""
    m = benchmark.machine
    return {
        "machine": {
            "cpu": m.cpu,
            "cores": m.cores,
            "threads": m.threads,
            "system": m.system,
            "versions": m.versions,
            "load_average": m.load_average,
            "busy": m.is_busy,
            "bandwidth": vars(m.bandwidth),
            "peak": vars(m.peak),
        },
        "model": {
            "name": benchmark.model.name,
            "bytes": benchmark.model_bytes,
            "weight_bytes": benchmark.weight_bytes,
            "kv_bytes_per_token": benchmark.kv_bytes_per_token,
        },
        "rounds": benchmark.rounds,
        "engines": benchmark.versions,
        "not_measured": benchmark.not_measured,
        "rows": [_row_to_json(result, m.roofline) for result in benchmark.results],
    }


def _row_to_json(result: RowResult, roofline: Roofline) -> dict[str, Any]:
    def spreads(
        lists: dict[str, list[float]], detail: Callable[[float], dict[str, Any]] = lambda median: {}
    ) -> dict[str, dict[str, Any]]:
        return {
            name: vars(Spread.of(values)) | {"turns": values} | detail(Spread.of(values).median)
            for name, values in lists.items()
        }

    def rate(median: float) -> dict[str, Any]:
        return {"tokens_per_second": result.row.tokens / median} if result.row.tokens else {}

    row: dict[str, Any] = {"name": result.row.name, "amounts": spreads(result.turns.amounts, rate)}
    row |= {"ratios": spreads(result.turns.ratios), "failures": result.turns.failures}
    if result.runs:
        row["runs"] = [vars(run) for run in result.runs]
    if result.skipped:
        row["skipped"] = result.skipped
    if result.work is not None and OURS.name in result.turns.amounts:
        row["limit"] = limit_shares(result, roofline, Spread.of(result.turns.amounts[OURS.name]).median)
    return row

"""Serve six requests with one model and a small KV cache, and watch the scheduler step by step.

    python examples/batching.py
    python examples/batching.py --policy static --step
    python examples/batching.py --policy continuous --fast --save trace.jsonl       # then: minillm trace trace.jsonl

A terminal shows one row per request and one cell per step; other outputs get one line per step. Afterwards all three
policies serve the same requests without a view, and a table compares them. Good breakpoints are `Scheduler.schedule`
and `Engine.step`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from minillm import LLM, Engine, EngineConfig, SamplingParams, cli
from minillm.engine.scheduler import POLICIES
from minillm.model.kv_cache import KVCache
from minillm.trace import StepRecord, Trace, request_metrics, run_metrics
from minillm.view import ConsoleView, Keyboard

PAUSE = 0.15  # seconds between two steps
RESIZE_INTERVAL = 0.25  # seconds between checks of the terminal's size while waiting for a key
NEXT, QUIT = (" ", "\r", "\n"), ("q", "Q", "\x04", "")  # keys; "" means that the terminal has been closed
COLUMNS = (
    "steps", "TTFT,\nmean", "TTFT,\nmax", "TPOT,\nmean", "TPOT,\nmax", "tokens\n/ s",
    "recom-\nputed", "peak\nblocks",
)  # fmt: skip
HINT = "space or enter: next step, q: quit"


@dataclass(frozen=True)
class Request:
    """A prompt, the maximum length of its answer in tokens, and the step before which it arrives."""

    name: str
    prompt: str
    max_tokens: int
    arrival_step: int = 0


LIBRARY = (
    "The library opens at nine in the morning and closes at six. Books can be kept for four weeks. Dogs may come in, "
    "ice cream may not.\n\n"
)
REQUESTS = [
    Request("fox", "Once upon a time there was a fox who", 40),
    Request("count", "One, two, three, four, five,", 12),
    Request("opens", LIBRARY + "Question: When does the library open?\nAnswer:", 16, arrival_step=2),
    Request("dogs", LIBRARY + "Question: May I bring my dog?\nAnswer:", 16, arrival_step=6),
    Request(
        "trains",
        "Early railways were built to carry coal from the mines to the nearest river. Horses drew the first wagons on "
        "rails of wood, then of iron. The steam engine changed everything: a single locomotive pulled what fifty "
        "horses could not, and soon people wanted to travel along. Within a generation, towns that a journey of days "
        "had kept apart were only hours from each other. The most important consequence was that",
        24,
        arrival_step=9,
    ),
    Request("colours", "The three primary colours are", 20, arrival_step=14),
]
CONFIG = EngineConfig(block_size=8, max_batch_tokens=32, max_sequences=4)


def small_pool(llm: LLM, requests: list[Request]) -> int:
    """Return the blocks that the longest request needs, plus two."""
    positions = [len(llm.encode(request.prompt)) + request.max_tokens - 1 for request in requests]
    return -(-max(positions) // CONFIG.block_size) + 2


def make_engine(llm: LLM, policy: str) -> Engine:
    """Return an engine with an empty KV cache, so that no policy can reuse what another one has computed."""
    num_blocks = small_pool(llm, REQUESTS)
    config = replace(CONFIG, policy=policy, num_blocks=num_blocks)
    kv_cache = KVCache(llm.config, num_blocks, config.block_size)
    return Engine(
        llm.transformer,
        kv_cache,
        config.scheduler(kv_cache),
        tokenizer=llm.tokenizer,
        context_length=llm.context_length,
        threads=llm.threads,
        model=llm.path.name,
    )


def serve(llm: LLM, engine: Engine, requests: list[Request]) -> Iterator[StepRecord]:
    """Run the engine until all requests have finished, adding each one before its step."""
    pending, step = sorted(requests, key=lambda request: request.arrival_step), 0
    while pending or engine.has_unfinished:
        while pending and pending[0].arrival_step <= step:
            request = pending.pop(0)
            params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
            engine.add_request(llm.encode(request.prompt), params, request_id=request.name, text=request.prompt)
        yield engine.step()
        step += 1


def watch(llm: LLM, engine: Engine, trace: Trace, step_by_step: bool, fast: bool) -> bool:
    """Serve the requests in a ConsoleView. Return False if the user quits before the end."""
    engine.listeners.append(trace.append)
    with ExitStack() as stack:
        keyboard = stack.enter_context(Keyboard()) if step_by_step else None
        view = stack.enter_context(ConsoleView(engine.facts, hint=HINT if step_by_step else ""))
        for record in serve(llm, engine, REQUESTS):
            view.push(record)
            if keyboard and not wait_for_key(keyboard, view):
                return False
            if view.is_live and not (keyboard or fast):
                time.sleep(PAUSE)
    return True


def wait_for_key(keyboard: Keyboard, view: ConsoleView) -> bool:
    """Wait for a key. Return True for the next step, False to quit."""
    while True:
        key = keyboard.read(RESIZE_INTERVAL)
        if key is None:
            view.resize()
        elif key in NEXT or key in QUIT:
            return key in NEXT


def answers(trace: Trace) -> dict[str, list[int]]:
    """Return the token ids of each request's answer."""
    tokens: dict[str, list[int]] = {}
    for record in trace:
        for chunk in record.chunks:
            tokens.setdefault(chunk.request_id, []).extend(token.token_id for token in chunk.sampled)
    return tokens


def comparison(traces: list[Trace]) -> Table:
    """Return a table of latencies and costs with one line per policy."""
    table = Table(
        title=f"{len(REQUESTS)} requests, three policies; times in milliseconds", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("policy", vertical="bottom", no_wrap=True, min_width=max(map(len, POLICIES)))
    for name in COLUMNS:
        table.add_column(name, justify="right", vertical="bottom")
    for trace in traces:
        run, requests = run_metrics(trace), request_metrics(trace).values()
        ttfts = [request.ttft for request in requests if request.ttft is not None]
        gaps = [gap for request in requests for gap in request.inter_token_latencies]
        table.add_row(
            trace.facts.policy,
            str(run.num_steps),
            *(f"{seconds * 1000:.1f}" for seconds in (fmean(ttfts), max(ttfts), fmean(gaps), max(gaps))),
            f"{run.throughput:.1f}",
            str(run.num_recomputed_tokens),
            f"{run.peak_blocks}/{trace.facts.num_blocks}",
        )
    return table


def compare(llm: LLM, watched: Trace, console: Console) -> None:
    """Serve the requests under all three policies without a view; compare their times and their answers.

    The watched policy runs again as well, because drawing between its steps has slowed it down.
    """
    traces = []
    for policy in POLICIES:
        engine = make_engine(llm, policy)
        traces.append(Trace(engine.facts, list(serve(llm, engine, REQUESTS))))
    console.print(comparison(traces))
    different = [name for name, tokens in answers(watched).items() if any(answers(t)[name] != tokens for t in traces)]
    if different:
        console.print(f"The answers to {', '.join(different)} differ.")
    else:
        console.print("Every answer is the same under every policy, token for token.")


def main() -> None:
    """Serve the requests under one policy in a view, then under all policies, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, default="chunked", help="the policy to watch (default: chunked)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--step", action="store_true", help="wait for a key after every step: space or enter; q quits")
    pace.add_argument("--fast", action="store_true", help="do not pause between steps")
    parser.add_argument("--save", metavar="FILE", help="write the watched run to this file, as JSON Lines")
    cli.add_model_options(parser)
    options = parser.parse_args()

    if options.step:
        Keyboard()  # raises its error now, not after the model has been loaded
    llm = cli.load_model(options)
    engine = make_engine(llm, options.policy)
    trace = Trace(engine.facts)
    if options.save:
        trace.write(options.save)  # raises its error now, not at the end of the run
    try:
        finished = watch(llm, engine, trace, options.step, options.fast)
    finally:
        if options.save:
            trace.write(options.save)
    if finished:
        compare(llm, trace, Console(highlight=False))


def exit_on_signal(signal_number: int, _: object) -> None:
    """Exit through every `finally`, as Ctrl-C does, so that the terminal is restored."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), exit_on_signal)
    sys.exit(cli.run_safely(main))

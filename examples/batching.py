"""Six requests, one model, a pool too small for them all: watch a scheduler serve them, a step at a time.

    python examples/batching.py
    python examples/batching.py --policy static --step
    python examples/batching.py --policy continuous --fast --save trace.jsonl       # then: minillm trace trace.jsonl

In a terminal: a row a request, a cell a step. Elsewhere: a line a step. Then all three policies serve the same
requests unseen, and a table compares them. Good places for a breakpoint are `Scheduler.schedule` and `Engine.step`.
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

PAUSE = 0.15  # seconds between steps, for eyes
LOOK_AGAIN = 0.25  # seconds after which, while a key is awaited, the terminal may have got another size
NEXT, QUIT = (" ", "\r", "\n"), ("q", "Q", "\x04", "")  # keys; the last is what a terminal that is gone gives
COLUMNS = (
    "steps", "TTFT,\nmean", "TTFT,\nworst", "TPOT,\nmean", "TPOT,\nworst", "tokens\n/ s",
    "recom-\nputed", "peak\nblocks",
)  # fmt: skip
HINT = "space or enter: next step, q: quit"


@dataclass(frozen=True)
class Request:
    """A prompt, how long its answer may get, and before which step it comes."""

    name: str
    prompt: str
    max_tokens: int
    arrives: int = 0


LIBRARY = (
    "The library opens at nine in the morning and closes at six. Books can be kept for four weeks. Dogs may come in, "
    "ice cream may not.\n\n"
)
REQUESTS = [
    Request("fox", "Once upon a time there was a fox who", 40),
    Request("count", "One, two, three, four, five,", 12),
    Request("opens", LIBRARY + "Question: When does the library open?\nAnswer:", 16, arrives=2),
    Request("dogs", LIBRARY + "Question: May I bring my dog?\nAnswer:", 16, arrives=6),
    Request(
        "trains",
        "Early railways were built to carry coal from the mines to the nearest river. Horses drew the first wagons on "
        "rails of wood, then of iron. The steam engine changed everything: a single locomotive pulled what fifty "
        "horses could not, and soon people wanted to travel along. Within a generation, towns that a journey of days "
        "had kept apart were only hours from each other. The most important consequence was that",
        24,
        arrives=9,
    ),
    Request("colours", "The three primary colours are", 20, arrives=14),
]
CONFIG = EngineConfig(block_size=8, max_batch_tokens=32, max_sequences=4)


def small_pool(llm: LLM, requests: list[Request]) -> int:
    """Blocks for the longest request, and two more."""
    positions = [len(llm.encode(request.prompt)) + request.max_tokens - 1 for request in requests]
    return -(-max(positions) // CONFIG.block_size) + 2


def make_engine(llm: LLM, policy: str) -> Engine:
    """An engine of the same model, with a memory of its own: nobody finds what another policy has computed."""
    config = replace(CONFIG, policy=policy, num_blocks=small_pool(llm, REQUESTS))
    cache = KVCache(llm.config, config.num_blocks, config.block_size)
    return Engine(
        llm.transformer,
        cache,
        config.scheduler(cache),
        tokenizer=llm.tokenizer,
        context_length=llm.context_length,
        threads=llm.threads,
        model=llm.path.name,
    )


def serve(llm: LLM, engine: Engine, requests: list[Request]) -> Iterator[StepRecord]:
    """Step after step, each request added when its time has come, until all are through."""
    coming, step = sorted(requests, key=lambda request: request.arrives), 0
    while coming or engine.has_unfinished:
        while coming and coming[0].arrives <= step:
            request = coming.pop(0)
            params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
            engine.add_request(llm.encode(request.prompt), params, request_id=request.name, text=request.prompt)
        yield engine.step()
        step += 1


def watch(llm: LLM, engine: Engine, trace: Trace, step_by_step: bool, fast: bool) -> bool:
    """Serve the requests before people's eyes; False if they have seen enough before the end."""
    engine.listeners.append(trace.append)
    with ExitStack() as stack:
        keyboard = stack.enter_context(Keyboard()) if step_by_step else None
        view = stack.enter_context(ConsoleView(engine.facts, hint=HINT if step_by_step else ""))
        for record in serve(llm, engine, REQUESTS):
            view.push(record)
            if keyboard and not goes_on(keyboard, view):
                return False
            if view.is_live and not (keyboard or fast):
                time.sleep(PAUSE)
    return True


def goes_on(keyboard: Keyboard, view: ConsoleView) -> bool:
    """Wait for a key: space or enter for the next step, q (or the terminal's end) for no more."""
    while True:
        key = keyboard.read(LOOK_AGAIN)
        if key is None:
            view.resize()
        elif key in NEXT or key in QUIT:
            return key in NEXT


def answers(trace: Trace) -> dict[str, list[int]]:
    """The token ids that each request got."""
    tokens: dict[str, list[int]] = {}
    for record in trace:
        for chunk in record.chunks:
            tokens.setdefault(chunk.request_id, []).extend(token.token_id for token in chunk.sampled)
    return tokens


def comparison(traces: list[Trace]) -> Table:
    """A line a policy: times as people feel them, and what they cost."""
    table = Table(
        title=f"{len(REQUESTS)} requests, three policies; times in milliseconds", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("policy", vertical="bottom", no_wrap=True, min_width=max(map(len, POLICIES)))
    for name in COLUMNS:
        table.add_column(name, justify="right", vertical="bottom")
    for trace in traces:
        run, requests = run_metrics(trace), request_metrics(trace).values()
        ttfts = [request.ttft for request in requests]
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
    """Serve the requests under all three policies, unseen; say how the runs differ and where they agree.

    The watched one, too, runs again: while somebody looks at a step, the processor's caches go cold.
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
        console.print("Whatever the policy, every answer is the same, token for token.")


def main() -> None:
    """Serve the requests under one policy before people's eyes, then under the others, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, default="chunked", help="what to watch (default: chunked)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--step", action="store_true", help="wait for a key after every step: space or enter; q quits")
    pace.add_argument("--fast", action="store_true", help="do not pause between steps")
    parser.add_argument("--save", metavar="FILE", help="write the watched run there, as JSON Lines")
    cli.add_model_options(parser)
    options = parser.parse_args()

    if options.step:
        Keyboard()  # refuses at once, not after loading a model
    llm = cli.load_model(options)
    engine = make_engine(llm, options.policy)
    trace = Trace(engine.facts)
    if options.save:
        trace.write(options.save)  # fails at once, not at the end
    try:
        finished = watch(llm, engine, trace, options.step, options.fast)
    finally:
        if options.save:
            trace.write(options.save)
    if finished:
        compare(llm, trace, Console(highlight=False))


def leave(signal_number: int, _: object) -> None:
    """Told to end by whoever may, end as from Ctrl-C: through every `finally`, so that the terminal is itself again."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # the second is unknown to some systems
            signal.signal(getattr(signal, name), leave)
    sys.exit(cli.run_safely(main))

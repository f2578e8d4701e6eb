"""A benchmark: measure the machine, every row with every engine, and the machine again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

from minillm import catalog
from minillm.bench.exactness import encode_prompts, max_difference
from minillm.bench.machine import Machine, describe_machine, measure_machine, usable_cores
from minillm.bench.peers import FLOAT32, OURS, PEERS, EngineHandle, EngineSpec, find_engine, pythons_to_try, stored_as
from minillm.bench.rows import FRESH, QUICK, SIZES, START_TOKENS, Computing, Row, Serving, choose_rows
from minillm.bench.turns import Turns, take_turns
from minillm.checkpoints import Checkpoint, open_checkpoint
from minillm.checks import check_integer
from minillm.errors import BenchmarkError
from minillm.model.config import ModelConfig
from minillm.trace import RunMetrics
from minillm.trace.roofline import Work

MAX_START_ROUNDS = 3  # for the rows about starting, which take long and vary little
MAX_SERVE_ROUNDS = 3  # for the rows about serving


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    model : as for `LLM`
    threads : cores for every engine; None for all
    rounds : turns per row
    rows : names of rows and groups of rows (see `choose_rows`); None for all
    peers : whether to measure other engines too
    peer_pythons : Python interpreters in which to look for them, before this one
    storage : type in which llama.cpp first stores the model's matrices, such as "Q8_0"; None for no change
    quick : few rows, one round, and short measurements of the machine: a check that everything works, not to be quoted
    """

    model: str | None = None
    threads: int | None = None
    rounds: int = 5
    rows: Sequence[str] | None = None
    peers: bool = False
    peer_pythons: Sequence[str] = ()
    storage: str | None = None
    quick: bool = False


@dataclass
class RowResult:
    """The results of one row.

    Attributes
    ----------
    row : the row
    turns : amounts by engine (seconds, bytes or a difference; less is better), and ratios by peer
    work : bytes and operations of what was timed, if known
    skipped : the reason why nothing was measured, or empty
    runs : for a row about serving, the metrics of each turn
    """

    row: Row
    turns: Turns = field(default_factory=Turns)
    work: Work | None = None
    skipped: str = ""
    runs: list[RunMetrics] = field(default_factory=list)

    @property
    def typical_run(self) -> RunMetrics | None:
        """The run with the median duration; all its figures are from one run. None if nothing was measured."""
        runs = sorted(self.runs, key=lambda run: run.seconds)
        return runs[len(runs) // 2] if runs else None


@dataclass
class Benchmark:
    """All measurements, and the conditions under which they were made."""

    machine: Machine
    model: Path
    model_bytes: int
    weight_bytes: int  # read by one decode step, as minillm stores them
    kv_bytes_per_token: int
    rounds: int
    versions: dict[str, str]  # of the engines that were measured
    not_measured: dict[str, str]  # the other engines, and the reasons
    results: list[RowResult]
    config: ModelConfig


def run_benchmark(
    settings: Settings, *, announce: Callable[[str], None] = print, peers: Sequence[EngineSpec] = PEERS
) -> Benchmark:
    """Run a whole benchmark. This takes a few minutes, or longer with peers.

    Raises
    ------
    RequestError
        A setting is out of range.
    BenchmarkError
        The machine or minillm itself could not be measured. A peer that fails is left out.
    """
    rounds = 1 if settings.quick else check_integer("rounds", settings.rounds, 1)
    cores = usable_cores()
    threads = check_integer("threads", cores if settings.threads is None else settings.threads, 1, cores)
    rows = choose_rows(settings.rows or (QUICK if settings.quick else tuple(SIZES)))
    pythons = pythons_to_try(settings.peer_pythons)
    model = catalog.resolve(settings.model)
    if settings.storage:
        model = stored_as(model, settings.storage, pythons, threads)
    checkpoint = open_checkpoint(model)
    machine = describe_machine(threads)

    announce("measuring the machine ...")
    measure_machine(machine, quick=settings.quick)
    announce(f"starting {OURS.name} ...")
    with ExitStack() as stack:
        ours = stack.enter_context(_closing(find_engine(OURS, [sys.executable], model, threads)))
        engines, not_measured = [ours], {}
        for spec in peers if settings.peers else ():
            announce(f"starting {spec.name} ...")
            try:
                engines.append(stack.enter_context(_closing(find_engine(spec, pythons, model, threads))))
            except BenchmarkError as error:
                not_measured[spec.name] = str(error)
        benchmark = Benchmark(
            machine=machine,
            model=model,
            model_bytes=sum(tensor.data.nbytes for tensor in checkpoint.tensors.values()),
            weight_bytes=ours.facts["weight_bytes"],
            kv_bytes_per_token=ours.facts["kv_bytes_per_token"],
            rounds=rounds,
            versions={engine.name: engine.facts["version"] for engine in engines},
            not_measured=not_measured,
            results=_measure_rows(rows, engines, checkpoint, rounds, announce),
            config=checkpoint.config,
        )
    if not settings.quick:  # a second time, because the machine's speed may have changed
        measure_machine(machine)
    for result in benchmark.results:
        result.work = result.row.work(checkpoint.config, benchmark.weight_bytes, benchmark.kv_bytes_per_token)
    return benchmark


def _measure_rows(
    rows: Sequence[Row],
    engines: Sequence[EngineHandle],
    checkpoint: Checkpoint,
    rounds: int,
    announce: Callable[[str], None],
) -> list[RowResult]:
    starts: dict[str, Turns] | None = None  # one fresh process gives the figures of three rows
    served: dict[Row, RowResult] | None = None  # the policies take turns
    results = []
    for row in rows:
        announce(f"measuring {row.name} ...")
        context_length = checkpoint.config.context_length
        if row.positions > context_length:
            result = RowResult(row, skipped=f"needs {row.positions} positions, but the model has {context_length}")
        elif row.group in FRESH:
            starts = starts or measure_starts(engines, min(rounds, MAX_START_ROUNDS))
            result = RowResult(row, starts[row.group])
        elif row.group == "serve":
            served = served or measure_serving(
                [each for each in rows if each.group == "serve"], engines[0], checkpoint.config.vocab_size, rounds
            )
            result = served[row]
        elif row.group == "exactness":
            result = measure_exactness(row, engines, checkpoint)
        else:
            result = RowResult(row, measure_computing(row, engines, checkpoint.config.vocab_size, rounds))
        results.append(result)
    return results


def measure_computing(row: Row, engines: Sequence[EngineHandle], vocab_size: int, rounds: int) -> Turns:
    """Measure a "prefill", "decode" or "batch" row in turns. Engines that cannot prepare it are left out."""
    task = Computing(row, vocab_size)
    failures, measures = {}, {}
    for engine in engines:
        try:
            task.prepare(engine.loaded())
        except BenchmarkError as error:
            failures[engine.name] = str(error)
        else:
            measures[engine.name] = partial(task.seconds, engine.loaded())
    turns = take_turns(engines[0].name, measures, rounds)
    turns.failures |= failures
    return turns


def measure_serving(rows: Sequence[Row], ours: EngineHandle, vocab_size: int, rounds: int) -> dict[Row, RowResult]:
    """Measure the "serve" rows in turns, after one untimed run."""
    tasks = {row: Serving(row, vocab_size) for row in rows}
    results = {row: RowResult(row) for row in rows}
    try:
        tasks[rows[0]].run(ours.loaded())
        for _ in range(min(rounds, MAX_SERVE_ROUNDS)):
            for row, task in tasks.items():
                results[row].runs.append(task.run(ours.loaded()))
    except BenchmarkError as error:
        return {row: RowResult(row, Turns(failures={ours.name: str(error)})) for row in rows}
    for result in results.values():
        result.turns.amounts[ours.name] = [run.seconds for run in result.runs]
    return results


def measure_starts(engines: Sequence[EngineHandle], rounds: int) -> dict[str, Turns]:
    """Measure the rows "load", "start" and "memory", all with the same fresh processes."""
    figures: dict[str, list[dict[str, float]]] = {engine.name: [] for engine in engines}

    def start(engine: EngineHandle) -> float:
        figures[engine.name].append(start_once(engine))
        return figures[engine.name][-1]["start"]

    turns = {"start": take_turns(engines[0].name, {e.name: partial(start, e) for e in engines}, rounds)}
    for group in "load", "memory":  # measured in the same turns as "start"
        measures = {name: partial(_replay, iter(own), group) for name, own in figures.items()}
        turns[group] = take_turns(engines[0].name, measures, rounds)
        turns[group].failures |= turns["start"].failures
    return turns


def start_once(engine: EngineHandle) -> dict[str, float]:
    """Run one process; return the seconds to load, the seconds to the first token, and its peak memory in bytes."""
    started = perf_counter()
    with engine.start() as worker:
        before_load = perf_counter()
        engine.load(worker)
        loaded = perf_counter()
        worker.call("prefill", tokens=list(range(START_TOKENS)), repeats=1)
        first_token = perf_counter()
        worker.call("fill", prompts=[list(range(START_TOKENS))])
        worker.call("decode", tokens=[0], repeats=4)
        figures = {"load": loaded - before_load, "start": first_token - started}
        peak = worker.call("peak_bytes")
        return figures if peak is None else figures | {"memory": peak}


def _replay(figures: Iterator[dict[str, float]], group: str) -> float:
    for own in figures:
        if group in own:
            return own[group]
    raise BenchmarkError("this system does not report peak memory")


def measure_exactness(row: Row, engines: Sequence[EngineHandle], checkpoint: Checkpoint) -> RowResult:
    """Measure each engine's difference from transformers in float32, if transformers is among the engines."""
    oracle = next((engine for engine in engines if engine.name == FLOAT32.name), None)
    if oracle is None:
        return RowResult(row, skipped=f"needs {FLOAT32.name} (--peers)")
    if checkpoint.tokenizer is None:
        return RowResult(row, skipped="the model has no tokenizer")
    prompts = encode_prompts(checkpoint.tokenizer)
    turns = Turns()
    for engine in engines:
        if engine is oracle:
            continue
        try:
            turns.amounts[engine.name] = [max_difference(engine.loaded(), oracle.loaded(), prompts)]
        except BenchmarkError as error:
            turns.failures[engine.name] = str(error)
    return RowResult(row, turns)


@contextmanager
def _closing(engine: EngineHandle) -> Iterator[EngineHandle]:
    try:
        yield engine
    finally:
        engine.close()

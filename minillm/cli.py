"""The command line: `minillm generate` answers once, `minillm chat` holds a conversation, `minillm bench` measures,
`minillm info` says what a model is, `minillm trace` draws what was recorded."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from minillm import LLM, Delta, Metrics, MinillmError, SamplingParams, __version__
from minillm.catalog import CATALOG
from minillm.ops import BACKENDS
from minillm.trace import Trace
from minillm.trace.roofline import Roofline

DEFAULT_PROMPT = "What is the capital of France, and what is it known for?"
MODEL_HELP = (
    f"a .gguf file, a Hugging Face folder, a name ({', '.join(CATALOG)}) or a hub id (default: SmolLM2-135M-Instruct)"
)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """The prompt, and whether it is a message to answer or a text to continue."""
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help=f"default: {DEFAULT_PROMPT!r}")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="a message to answer (default if the model has a chat template)",
    )
    form.add_argument("--raw", action="store_false", dest="chat", help="a text to continue as it stands")


def add_model_options(parser: argparse.ArgumentParser, backends: bool = True) -> None:
    """The options that say which model runs, and how."""
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    if backends:
        parser.add_argument("--backend", choices=BACKENDS, default="numba", help="what computes (default: numba)")
    parser.add_argument("--threads", type=int, metavar="N", help="cores to use (default: all)")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    """The options that say how tokens are chosen."""

    def option(name: str, kind: type, default: float | None, metavar: str, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)

    option("--max-tokens", int, max_tokens, "N", f"stop after so many (default: {max_tokens})")
    option("--temperature", float, 0.0, "T", "0 takes the best token always, over 0 draws (default: 0)")
    option("--top-k", int, 0, "K", "draw among the K best (default: 0, all)")
    option("--top-p", float, 1.0, "P", "draw among the likeliest that reach probability P (default: 1, all)")
    option("--min-p", float, 0.0, "P", "drop what is less likely than P times the best (default: 0, nothing)")
    option("--repetition-penalty", float, 1.0, "R", "over 1 discourages repeats (default: 1)")
    option("--seed", int, None, "N", "draw the same tokens again (default: a new seed)")


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Whether the run is to be kept."""
    parser.add_argument("--trace", metavar="FILE", help="record the run there, for `minillm trace FILE`")


@contextmanager
def recorded(llm: LLM, path: str | None) -> Iterator[None]:
    """Write what the engine does meanwhile to `path`, whatever ends it; None records nothing."""
    if path is None:
        yield
        return
    trace = Trace(llm.engine.facts)
    trace.write(path)  # fails at once, not at the end
    llm.engine.listeners.append(trace.append)
    try:
        yield
    finally:
        llm.engine.listeners.remove(trace.append)
        trace.write(path)


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """What `add_sampling_options` read."""
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )


def load_model(options: argparse.Namespace) -> LLM:
    """The model that `add_model_options` read."""
    return LLM(options.model, backend=options.backend, threads=options.threads)


def show_stream(deltas: Iterator[Delta]) -> tuple[str, Metrics | None]:
    """Print an answer as it comes, until its end or Ctrl-C; return its text and what it took."""
    pieces, metrics = [], None
    try:
        for delta in deltas:
            print(delta.text, end="", flush=True)
            pieces.append(delta.text)
            metrics = delta.metrics
    except KeyboardInterrupt:
        deltas.close()
    print()
    return "".join(pieces), metrics


def summary(metrics: Metrics) -> str:
    """One line each for prefill, decode, the first token and the cache."""
    m = metrics
    computed = m.num_prompt_tokens - m.num_cached_tokens
    cached = f" ({m.num_cached_tokens} more were cached)" if m.num_cached_tokens else ""
    decoded = m.num_generated_tokens - 1  # the first comes out of the prefill
    return "\n".join(
        [
            f"prefill      {computed:5} tokens  {m.prefill_seconds * 1e3:8.1f} ms  "
            f"{m.prefill_tokens_per_second:7.1f} tokens/s{cached}",
            f"decode       {decoded:5} tokens  {m.decode_seconds * 1e3:8.1f} ms  "
            f"{m.decode_tokens_per_second:7.1f} tokens/s",
            f"first token after     {m.time_to_first_token * 1e3:8.1f} ms",
            f"KV cache              {m.kv_bytes / 1e6:8.2f} MB held",
        ]
    )


def show_summary(metrics: Metrics) -> None:
    """Print `summary`, dimmed where a terminal can."""
    Console(highlight=False).print(summary(metrics), style="dim", markup=False, soft_wrap=True)


def generate(options: argparse.Namespace) -> None:
    """`minillm generate`: one prompt, one answer, then what it took."""
    llm = load_model(options)
    if options.chat or (options.chat is None and llm.can_chat):
        prompt = llm.encode_chat([{"role": "user", "content": options.prompt}])
    else:
        prompt = options.prompt
        print(prompt, end="", flush=True)
    with recorded(llm, options.trace):
        _, metrics = show_stream(llm.stream(prompt, sampling_params(options)))
    if metrics:
        show_summary(metrics)


def chat(options: argparse.Namespace) -> None:
    """`minillm chat`: turn by turn. Each turn computes only what is new: the KV cache holds the conversation so far."""
    llm, params = load_model(options), sampling_params(options)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    opening = len(messages)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if interactive:
        print("Type a message; /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
    while (text := _read_message(interactive)) is not None:
        if text == "/clear":
            del messages[opening:]
            continue
        messages.append({"role": "user", "content": text})
        try:
            room = llm.context_length - len(llm.encode_chat(messages))
            answer, metrics = show_stream(
                llm.stream_chat(messages, replace(params, max_tokens=max(1, min(params.max_tokens, room))))
            )
        except MinillmError as error:
            messages.pop()
            print(f"{error} (/clear forgets the conversation)", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})
        if options.stats and metrics:
            show_summary(metrics)


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """What to measure, beside whom, and where the figures go."""

    def option(name: str, metavar: str, text: str, **more: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=text, **more)

    option("--rounds", "N", "turns of every row (default: 5)", type=int, default=5)
    option(
        "--rows", "ROW", "load, start, memory, prefill, decode-64, batch-16, serve-4, exactness, ... (all)", nargs="+"
    )
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp and transformers, too, turn by turn")
    option("--peer-python", "PATH", "a Python that has them (may be repeated; default: this one)", action="append")
    option("--as", "TYPE", "have llama.cpp store the model in this type first: Q8_0, F16, F32, ...", dest="storage")
    parser.add_argument("--quick", action="store_true", help="a few rows, once: to see that all works, not to quote")
    option("--json", "FILE", "write all figures there")
    option(
        "--plot",
        "FILE",
        "draw there (.png, .svg, .pdf), side by side: the roofline; the KV cache's size; and, where their rows were "
        "measured, decode rate against batch size (batch) and latency against throughput (serve)",
    )


def bench(options: argparse.Namespace) -> None:
    """`minillm bench`: how fast, beside what the machine can do and what other engines need."""
    from minillm.bench import Settings, run  # only now: an answer need not wait for it

    settings = Settings(
        model=options.model,
        threads=options.threads,
        rounds=options.rounds,
        rows=options.rows,
        peers=options.peers,
        peer_pythons=options.peer_python or (),
        storage=options.storage,
        quick=options.quick,
    )
    run(settings, json_file=options.json, plot_file=options.plot)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Which runs to draw, and where."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a recorded run, or two to see side by side")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: beside the run, with .html)")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--perfetto", metavar="FILE", help="write the run there, too, for ui.perfetto.dev (of one run)")
    parser.add_argument(
        "--roofline",
        type=roofline,
        metavar="GB/S,GFLOP/S",
        help="what the machine can do, as `minillm bench` says it (default: the best that the run itself reached)",
    )


def roofline(text: str) -> Roofline:
    """What `--roofline` means: gigabytes and billions of operations a second.

    Raises
    ------
    argparse.ArgumentTypeError
        It is not two numbers over 0.
    """
    try:
        bandwidth, peak = (float(part) for part in text.split(","))
    except ValueError:
        bandwidth = peak = math.nan
    if not (0 < bandwidth < math.inf and 0 < peak < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers over 0 with a comma between, such as 46.5,247")
    return Roofline(bandwidth * 1e9, peak * 1e9)


def trace(options: argparse.Namespace) -> None:
    """`minillm trace`: a recorded run as a page for the browser, or two side by side."""
    from minillm.view.command import run  # only now: an answer need not wait for it

    pages = {"output": options.output, "perfetto": options.perfetto}
    run(options.runs, **pages, roofline=options.roofline, open_page=options.open)


def info(options: argparse.Namespace) -> None:
    """`minillm info`: what a model is, what its tensors are stored as, and what fits into memory beside it."""
    from minillm.info import run  # only now: an answer need not wait for it

    run(options.model, memory_gigabytes=options.memory)


def _read_message(interactive: bool) -> str | None:
    """The next line that says something; None at the end."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, RuntimeError):  # the second: there is no standard input at all
            return None
        if line in ("/exit", "/quit"):
            return None
        if line:
            return line


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="minillm", description="LLM inference you can read and run.")
    parser.add_argument("--version", action="version", version=f"minillm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="answer one prompt", description=generate.__doc__)
    add_prompt_options(command)
    add_model_options(command)
    add_sampling_options(command)
    add_record_option(command)
    command.set_defaults(run=generate)

    command = commands.add_parser("chat", help="hold a conversation", description=chat.__doc__)
    command.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    command.add_argument("--stats", action="store_true", help="after each answer, say what it took")
    add_model_options(command)
    add_sampling_options(command, max_tokens=512)
    command.set_defaults(run=chat)

    command = commands.add_parser("bench", help="measure speed", description=bench.__doc__)
    add_model_options(command, backends=False)
    add_bench_options(command)
    command.set_defaults(run=bench)

    command = commands.add_parser("info", help="say what a model is", description=info.__doc__)
    command.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--memory", type=float, metavar="GB", help="reckon with so much (default: what is available)")
    command.set_defaults(run=info)

    command = commands.add_parser("trace", help="look at a recorded run", description=trace.__doc__)
    add_trace_options(command)
    command.set_defaults(run=trace)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for bad input, 130 when interrupted."""
    options = build_parser().parse_args(arguments)
    return run_safely(lambda: options.run(options))


def run_safely(action: Callable[[], None]) -> int:
    """Run `action`, turning what a user can cause into one line and an exit status."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is, where the shell closed it
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a stand-in
    try:
        action()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has had enough
        _let_go_of_stdout()
        return 0
    except (MinillmError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, OSError):
            _let_go_of_stdout()
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _let_go_of_stdout() -> None:
    """What could not be written shall not be tried again when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

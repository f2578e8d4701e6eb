"""The command line: `minillm generate`, `chat`, `bench`, `info`, `verify` and `trace`."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from minillm import LLM, CatalogError, Delta, Metrics, MinillmError, SamplingParams, __version__
from minillm.catalog import CATALOG
from minillm.catalog import verify as find_files
from minillm.ops import BACKENDS
from minillm.trace import Trace
from minillm.trace.roofline import Roofline

DEFAULT_PROMPT = "What is the capital of France, and what is it known for?"
MODEL_HELP = (
    f"a .gguf file, a Hugging Face folder, a name ({', '.join(CATALOG)}) or a hub id (default: SmolLM2-135M-Instruct)"
)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the prompt, and whether it is a message to answer or a text to continue."""
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help=f"default: {DEFAULT_PROMPT!r}")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="a message to answer (default if the model has a chat template)",
    )
    form.add_argument("--raw", action="store_false", dest="chat", help="a text to continue unchanged")


def add_model_options(parser: argparse.ArgumentParser, backends: bool = True) -> None:
    """Add the options that select the model and how it runs."""
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    if backends:
        parser.add_argument("--backend", choices=BACKENDS, default="numba", help="default: numba")
    parser.add_argument("--threads", type=int, metavar="N", help="cores to use (default: all)")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    """Add the options that determine how tokens are chosen."""

    def option(name: str, kind: type, default: float | None, metavar: str, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)

    option("--max-tokens", int, max_tokens, "N", f"maximum number of new tokens (default: {max_tokens})")
    option("--temperature", float, 0.0, "T", "0 chooses the most likely token, above 0 draws (default: 0)")
    option("--top-k", int, 0, "K", "draw among the K best tokens (default: 0, all)")
    option("--top-p", float, 1.0, "P", "draw among the most likely tokens that reach probability P (default: 1, all)")
    option("--min-p", float, 0.0, "P", "drop tokens less likely than P times the best (default: 0, none)")
    option("--repetition-penalty", float, 1.0, "R", "above 1 discourages repetition (default: 1)")
    option("--seed", int, None, "N", "seed of the random numbers (default: a new one)")


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to record the run."""
    parser.add_argument("--trace", metavar="FILE", help="record the run to FILE, for `minillm trace FILE`")


@contextmanager
def recorded(llm: LLM, path: str | None) -> Iterator[None]:
    """Record the engine's steps within the `with` block to `path`, even if the block fails; None records nothing."""
    if path is None:
        yield
        return
    trace = Trace(llm.engine.facts)
    trace.write(path)  # fails here rather than at the end
    llm.engine.listeners.append(trace.append)
    try:
        yield
    finally:
        llm.engine.listeners.remove(trace.append)
        trace.write(path)


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of the parsed options."""
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
    """Load the model of the parsed options."""
    return LLM(options.model, backend=options.backend, threads=options.threads)


def show_stream(deltas: Generator[Delta, None, None]) -> tuple[str, Metrics | None]:
    """Print an answer as it arrives, until its end or Ctrl-C; return its text and metrics."""
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
    """Return one line each for prefill, decode, the first token and the cache."""
    m = metrics
    computed = m.num_prompt_tokens - m.num_cached_tokens
    cached = f" ({m.num_cached_tokens} more were cached)" if m.num_cached_tokens else ""
    decoded = m.num_generated_tokens - 1  # the first belongs to the prefill
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
    """Print `summary`, dimmed if the terminal supports it."""
    Console(highlight=False).print(summary(metrics), style="dim", markup=False, soft_wrap=True)


def generate(options: argparse.Namespace) -> None:
    """Answer one prompt, then print how long it took."""
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
    """Hold a conversation. Each turn computes only its new tokens, because the KV cache holds the earlier ones."""
    llm, params = load_model(options), sampling_params(options)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    num_system = len(messages)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if interactive:
        print("Type a message. /clear starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer.")
    while (text := _read_message(interactive)) is not None:
        if text == "/clear":
            del messages[num_system:]
            continue
        messages.append({"role": "user", "content": text})
        try:
            num_left = llm.context_length - len(llm.encode_chat(messages))
            answer, metrics = show_stream(
                llm.stream_chat(messages, replace(params, max_tokens=max(1, min(params.max_tokens, num_left))))
            )
        except MinillmError as error:
            messages.pop()
            print(f"{error} (/clear starts a new conversation)", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})
        if options.stats and metrics:
            show_summary(metrics)


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark."""

    def option(name: str, metavar: str, text: str, **more: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=text, **more)

    option("--rounds", "N", "turns per row (default: 5)", type=int, default=5)
    option(
        "--rows", "ROW", "load, start, memory, prefill, decode-64, batch-16, serve-4, exactness, ... (all)", nargs="+"
    )
    parser.add_argument(
        "--peers", action="store_true", help="also measure llama.cpp and transformers, in alternating turns"
    )
    option(
        "--peer-python",
        "PATH",
        "a Python in which they are installed (can be repeated; default: this one)",
        action="append",
    )
    option("--as", "TYPE", "type in which llama.cpp first stores the model: Q8_0, F16, F32, ...", dest="storage")
    parser.add_argument("--quick", action="store_true", help="a few rows, once: checks that everything works")
    option("--json", "FILE", "write all figures to FILE")
    option(
        "--plot",
        "FILE",
        "draw plots to FILE (.png, .svg, .pdf): the roofline; the size of the KV cache; and, if their rows were "
        "measured, decode rate against batch size (batch) and latency against throughput (serve)",
    )


def bench(options: argparse.Namespace) -> None:
    """Measure speed, compared with the limits of the machine and with other engines."""
    from minillm.bench import Settings, run  # imported here, so that the other commands start faster

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
    """Add the options of a page of recorded runs."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a recorded run, or two to compare")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: the run's path with .html)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument("--perfetto", metavar="FILE", help="also write a single run to FILE, for ui.perfetto.dev")
    parser.add_argument(
        "--roofline",
        type=roofline,
        metavar="GB/S,GFLOP/S",
        help="limits of the machine, from `minillm bench` (default: the best rates of the run itself)",
    )


def roofline(text: str) -> Roofline:
    """Parse `--roofline`: gigabytes and billions of operations, both per second.

    Raises
    ------
    argparse.ArgumentTypeError
        The text is not two numbers above 0.
    """
    try:
        bandwidth, peak = (float(part) for part in text.split(","))
    except ValueError:
        bandwidth = peak = math.nan
    if not (0 < bandwidth < math.inf and 0 < peak < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers above 0, separated by a comma, such as 46.5,247")
    return Roofline(bandwidth * 1e9, peak * 1e9)


def trace(options: argparse.Namespace) -> None:
    """Draw a recorded run, or two side by side, as a page for the browser."""
    from minillm.view.command import run  # imported here, so that the other commands start faster

    pages = {"output": options.output, "perfetto": options.perfetto}
    run(options.runs, **pages, roofline=options.roofline, open_page=options.open)


def info(options: argparse.Namespace) -> None:
    """Describe a model: its sizes, its tensors' types, and how many sequences fit into the remaining memory."""
    from minillm.info import run  # imported here, so that the other commands start faster

    run(options.model, memory_gigabytes=options.memory)


def verify(options: argparse.Namespace) -> None:
    """Check that the files of catalog models have the published bytes."""
    damaged = []
    for path, is_intact in find_files(options.model):
        print(f"{path}: {'intact' if is_intact else 'DAMAGED'}")
        damaged += [] if is_intact else [path]
    if damaged:
        raise CatalogError(f"{damaged[0]} is damaged: delete it, and the next command that needs it downloads it again")


def _read_message(interactive: bool) -> str | None:
    """Read the next line that is not empty; return None at the end of input."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, RuntimeError):  # RuntimeError: there is no standard input
            return None
        if line in ("/exit", "/quit"):
            return None
        if line:
            return line


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    parser = argparse.ArgumentParser(
        prog="minillm", description="LLM inference serving that you can read, run and step through."
    )
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
    command.add_argument("--stats", action="store_true", help="print how long each answer took")
    add_model_options(command)
    add_sampling_options(command, max_tokens=512)
    command.set_defaults(run=chat)

    command = commands.add_parser("bench", help="measure speed", description=bench.__doc__)
    add_model_options(command, backends=False)
    add_bench_options(command)
    command.set_defaults(run=bench)

    command = commands.add_parser("info", help="describe a model", description=info.__doc__)
    command.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--memory", type=float, metavar="GB", help="assume this much memory (default: all available)")
    command.set_defaults(run=info)

    command = commands.add_parser("verify", help="check downloaded models", description=verify.__doc__)
    command.add_argument("model", nargs="?", metavar="NAME", help=f"one of {', '.join(CATALOG)} (default: all)")
    command.set_defaults(run=verify)

    command = commands.add_parser("trace", help="draw a recorded run", description=trace.__doc__)
    add_trace_options(command)
    command.set_defaults(run=trace)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 for success, 2 for bad input, 130 for an interrupt."""
    options = build_parser().parse_args(arguments)
    return run_safely(lambda: options.run(options))


def run_safely(action: Callable[[], None]) -> int:
    """Run `action`. Errors that a user can cause become one line and an exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if the shell closed it
            stream.reconfigure(errors="replace")  # a replacement for characters that the terminal cannot show
    try:
        action()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed the pipe
        _discard_stdout()
        return 0
    except (MinillmError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, OSError):
            _discard_stdout()
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _discard_stdout() -> None:
    """Discard unwritten output, so that Python does not try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

"""The other end of `client`: one engine in a process of its own, doing what it is told, a line at a time.

    python -P worker.py ENGINE.py

ENGINE.py defines `Engine`, whose methods are what can be asked for. Requests and replies are lines of JSON:

    (started)                                            {"result": null}
    {"call": "prefill", "arguments": {"tokens": [1]}}    {"result": [0.0042]}
    {"call": "logits", "arguments": {"tokens": [-1]}}    {"error": "ValueError: token -1 ..."}

Between requests it sleeps, waiting for the next line. It may run under the Python of another virtual environment,
where this project is not installed: so nothing but the standard library is imported here.
"""

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def main(engine_file: str) -> None:
    """Make the engine and serve it until standard input ends."""
    replies = take_over_stdout()
    try:
        engine = load_engine(engine_file)
    except ImportError as error:  # the engine's package is not installed here
        reply(replies, error=str(error), missing=error.name or "")
        return
    reply(replies, result=None)
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        gc.collect()  # now, and not while something is timed
        try:
            ask = peak_bytes if request["call"] == "peak_bytes" else getattr(engine, request["call"])
            result = ask(**request["arguments"])
        except Exception as error:
            reply(replies, error=f"{type(error).__name__}: {error}")
        else:
            reply(replies, result=result)


def take_over_stdout() -> TextIO:
    """Standard output, for replies alone: what libraries print goes to standard error from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def reply(replies: TextIO, **message: Any) -> None:
    """Write one line of JSON."""
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def load_engine(path: str) -> Any:
    """An `Engine` as the file at `path` defines it."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_engine", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Engine()


def peak_bytes() -> int | None:
    """The most memory this process has held so far, in bytes; None where the system does not say."""
    try:  # Linux: unlike getrusage's figure, this one forgets what the parent held when it forked
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(sys.argv[1])

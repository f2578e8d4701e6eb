"""The worker process: one engine, which executes the requests of `client`, one line each.

    python -P worker.py ENGINE.py

ENGINE.py defines `ENGINE`, a class whose methods can be called. Requests and replies are lines of JSON:

    (started)                                            {"result": null}
    {"call": "prefill", "arguments": {"tokens": [1]}}    {"result": [0.0042]}
    {"call": "logits", "arguments": {"tokens": [-1]}}    {"error": "ValueError: token -1 ..."}

Between requests it waits for the next line. It can run in the Python of another virtual environment, where this project
is not installed, so it imports nothing but the standard library.
"""

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def main(engine_file: str) -> None:
    """Create the engine and execute requests until standard input ends."""
    replies = take_over_stdout()
    try:
        engine = load_engine(engine_file)
    except ImportError as error:  # the engine's package is not installed
        reply(replies, error=str(error), missing=error.name or "")
        return
    reply(replies, result=None)
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        gc.collect()  # here, and not while something is timed
        try:
            method = peak_bytes if request["call"] == "peak_bytes" else getattr(engine, request["call"])
            result = method(**request["arguments"])
        except Exception as error:
            reply(replies, error=f"{type(error).__name__}: {error}")
        else:
            reply(replies, result=result)


def take_over_stdout() -> TextIO:
    """Reserve standard output for replies; whatever libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def reply(replies: TextIO, **message: Any) -> None:
    """Write one line of JSON."""
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def load_engine(path: str) -> Any:
    """Return an instance of the `ENGINE` that the file at `path` defines."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_engine", path)
    assert spec is not None  # both hold for every path that ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.ENGINE()


def peak_bytes() -> int | None:
    """Return the peak memory of this process in bytes, or None if the system does not report it."""
    try:  # Linux: unlike getrusage's figure, this one does not include the parent's memory
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

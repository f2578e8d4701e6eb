"""Every exception that minillm raises on purpose, so that a caller can tell bad input from a bug; and its warning.

Each message states what was wrong, where, and what to do.
"""

from pathlib import Path


class MinillmError(Exception):
    """Base class of the errors below."""


class CatalogError(MinillmError):
    """A model cannot be found or fetched."""


class CheckpointError(MinillmError):
    """A file is damaged, incomplete, or contradicts itself."""


class UnsupportedError(MinillmError):
    """A file is valid but needs something that minillm does not support: an architecture, a type, a pre-tokenizer."""


class TokenizerError(MinillmError):
    """A tokenizer's data is unusable, or token ids do not belong to it."""


class ChatTemplateError(MinillmError):
    """A chat template is missing, broken, or was stopped by the sandbox."""


class RequestError(MinillmError, ValueError):
    """A request cannot be served: an empty prompt, parameters out of range, more tokens than the context."""


class BackendError(MinillmError):
    """A backend cannot run on this machine: its library is not installed, or finds no device."""


class BusyError(RequestError):
    """The engine was called from inside one of its own steps."""


class CapacityError(MinillmError, MemoryError):
    """The machine has too little memory."""


class BenchmarkError(MinillmError):
    """A measurement failed: an engine is not installed, crashed, or did not answer."""


class TraceError(MinillmError):
    """A file is not a trace, is damaged, or contains impossible values."""


class NumericError(MinillmError):
    """A computation produced NaN or infinity where a number was needed."""


class SlowThreadsWarning(RuntimeWarning):
    """Results are correct but slow, because the machine lacks fast parallel loops."""


class UnusedFieldsWarning(UserWarning):
    """A model's files contain settings that minillm does not know, and that may change what the model computes."""


class LostTextWarning(UserWarning):
    """A text contains characters that the model's vocabulary cannot represent."""


class FallbackWarning(UserWarning):
    """A file lacks a setting, and a usual value is assumed."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the source folder, if minillm runs from one."""
    source = Path(__file__).parent.parent
    if (source / "pyproject.toml").is_file():
        return f'pip install -e "{source}[{extra}]"'
    return f'pip install "minillm-engine[{extra}]"'

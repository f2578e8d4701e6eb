"""Every exception minillm raises on purpose, so that a caller can tell bad input from a bug; and what it warns of.

Each message says what was wrong, where, and what to do about it.
"""


class MinillmError(Exception):
    """Base of all errors below."""


class CatalogError(MinillmError):
    """A model could not be found or fetched."""


class CheckpointError(MinillmError):
    """A file is damaged, incomplete, or contradicts itself."""


class UnsupportedError(MinillmError):
    """A file is fine, but asks for something minillm does not do (an architecture, a type, a pre-tokenizer)."""


class TokenizerError(MinillmError):
    """A tokenizer's data is unusable, or token ids do not belong to it."""


class ChatTemplateError(MinillmError):
    """A chat template is missing, broken, or was stopped by the sandbox."""


class RequestError(MinillmError, ValueError):
    """A request cannot be served: an empty prompt, parameters out of range, more tokens than the context."""


class BackendError(MinillmError):
    """A backend cannot compute on this machine: its library is not installed, or finds no device."""


class BusyError(RequestError):
    """Another thread is using the engine, or has requests under way."""


class CapacityError(MinillmError, MemoryError):
    """The machine's memory does not hold what was asked for."""


class BenchmarkError(MinillmError):
    """A measurement could not be made: an engine is not installed, crashed, or did not answer."""


class TraceError(MinillmError):
    """A file of records is none, is damaged, or says what cannot be."""


class NumericError(MinillmError):
    """A computation gave NaN or infinity where a number was needed."""


class SlowThreadsWarning(RuntimeWarning):
    """Results will be right but late: the machine lacks what fast parallel loops need."""

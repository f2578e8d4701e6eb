"""Finding a GPU, what is brought to it, and the compiling of kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minillm.errors import BackendError

Array = Any  # CuPy's
Kernel = Callable[[tuple[int, ...], tuple[int, ...], tuple[Any, ...]], None]

# A multiplication and an addition become one fused step only where the source says so: else the compiler would choose,
# and might choose otherwise in the kernel for one row than in the kernel for many.
OPTIONS = ("--fmad=false",)


def array_library() -> ModuleType:
    """CuPy, once it is sure that it has a GPU to compute on.

    Raises
    ------
    BackendError
        CuPy is not installed or finds no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendError(
            f"backend 'cupy' needs CuPy, which cannot be imported ({error}): pip install 'minillm[gpu]', or use "
            "backend 'numba'"
        ) from error
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendError(
            f"backend 'cupy' finds no GPU it can use ({error}): it needs an NVIDIA GPU with a driver for CUDA 13, or, "
            "with an older driver, pip install 'cupy-cuda12x[ctk]' in place of what 'minillm[gpu]' brings; or use "
            "backend 'numba'"
        ) from error
    if devices == 0:
        raise BackendError("backend 'cupy' finds no GPU: CUDA_VISIBLE_DEVICES may hide it; use backend 'numba'")
    return cupy


def as_vector(values: np.ndarray, xp: ModuleType | None = None) -> Array:
    """A norm's weights or a layer's bias as a float32 array on the GPU."""
    return (xp or array_library()).asarray(np.asarray(values, np.float32))


def as_indices(numbers: np.ndarray) -> Array:
    """Whole numbers that say where things are, such as positions, on the GPU."""
    return array_library().asarray(numbers)


def to_numpy(array: Array) -> np.ndarray:
    """The same numbers in the machine's own memory. Waits until they have been computed."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def set_num_threads(threads: int | None) -> None:
    """Only None, "as many as there are", can be had here: a GPU's threads are not shared out by number.

    Raises
    ------
    ValueError
        A number was given.
    """
    if threads is not None:
        raise ValueError(f"threads is {threads}, but backend 'cupy' computes on the GPU; leave threads out")


@cache
def kernel(file: str, name: str, **settings: int) -> Kernel:
    """A kernel of one of this folder's `.cu` files, compiled with `settings` as its constants.

    Returns
    -------
    To be called with how many blocks, how many threads in each, and the arguments: arrays, np.int32 and np.float32, in
    the order and of the types that the source says. Nothing checks that.
    """
    source = (Path(__file__).parent / file).read_text(encoding="utf-8")
    constants = tuple(f"-D{constant}={value}" for constant, value in settings.items())
    return array_library().RawModule(code=source, options=OPTIONS + constants).get_function(name)

"""The GPU: finding one, moving arrays to and from it, and compiling kernels for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minillm.errors import BackendError, install_command

Array = Any  # a CuPy array
Kernel = Callable[[tuple[int, ...], tuple[int, ...], tuple[Any, ...]], None]

# Only the source decides where a multiplication and an addition are fused. Otherwise the compiler would, and it might
# decide differently for the kernel for one row and the kernel for many.
OPTIONS = ("--fmad=false",)


def array_library() -> ModuleType:
    """Return CuPy, after checking that it finds a GPU.

    Raises
    ------
    BackendError
        CuPy is not installed or finds no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendError(
            f"backend 'cupy' needs CuPy, which cannot be imported ({error}): {install_command('gpu')}, or use "
            "backend 'numba'"
        ) from error
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendError(
            f"backend 'cupy' finds no usable GPU ({error}): it needs an NVIDIA GPU with a driver for CUDA 13; with an "
            "older driver, pip install 'cupy-cuda12x[ctk]' instead of the extra 'gpu'; or use backend 'numba'"
        ) from error
    if devices == 0:
        raise BackendError("backend 'cupy' finds no GPU: check CUDA_VISIBLE_DEVICES, or use backend 'numba'")
    return cupy


def as_vector(values: np.ndarray, xp: ModuleType | None = None) -> Array:
    """Return the weight of a norm, or a bias, as a float32 array on the GPU."""
    return (xp or array_library()).asarray(np.asarray(values, np.float32))


def as_indices(numbers: np.ndarray) -> Array:
    """Copy integers such as positions to the GPU."""
    return array_library().asarray(numbers)


def to_numpy(array: Array) -> np.ndarray:
    """Copy an array to main memory, once it has been computed."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def set_num_threads(threads: int | None) -> None:
    """Accept only None: the number of a GPU's threads cannot be chosen.

    Raises
    ------
    ValueError
        `threads` is a number.
    """
    if threads is not None:
        raise ValueError(f"threads is {threads}, but backend 'cupy' computes on the GPU: leave threads at None")


@cache
def kernel(file: str, name: str, **settings: int) -> Kernel:
    """Compile a kernel from one of the `.cu` files in this folder, with `settings` as its constants.

    Returns
    -------
    A function of the number of thread blocks, the number of threads in each, and the kernel's arguments: arrays,
    np.int32 and np.float32, in the order and of the types that the source declares. They are not checked.
    """
    source = (Path(__file__).parent / file).read_text(encoding="utf-8")
    constants = tuple(f"-D{constant}={value}" for constant, value in settings.items())
    return array_library().RawModule(code=source, options=OPTIONS + constants).get_function(name)

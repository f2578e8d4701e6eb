"""Run the GPU kernels on the CPU: their source, compiled as C++ and run thread by thread on NumPy arrays.

This does not emulate a GPU. It implements what CUDA guarantees: the threads of a block meet at barriers, and run in any
order between them. Every launch is made twice, with the threads in ascending and in descending order, and both results
must agree. Every array has margins of NaN around it: reading out of bounds shows in the results, and writing out of
bounds is detected.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from minillm.ops import gpu
from minillm.ops.gpu import device

HERE = Path(__file__).parent
SOURCES = Path(device.__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
MARGIN = 256  # bytes


class Kernel:
    """A kernel compiled for the CPU, called in the same way as a CuPy kernel."""

    def __init__(self, library: ctypes.CDLL, name: str):
        self.launch = getattr(library, f"launch_{name}")
        self.launch.restype = ctypes.c_bool
        signature = getattr(library, f"signature_of_{name}")
        signature.restype = ctypes.c_char_p
        self.parameters = signature().decode().split(",")[:-1]

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple) -> None:
        for argument, parameter in zip(arguments, self.parameters, strict=True):
            assert kind_of(argument) == parameter.split("*")[0].split()[0], (argument, parameter)
            assert isinstance(argument, np.ndarray) == parameter.endswith("*"), (argument, parameter)
            assert not isinstance(argument, np.ndarray) or argument.flags.c_contiguous
        results = [self._launch(grid, block, arguments, reversed_) for reversed_ in (False, True)]
        for argument, parameter, forward, backward in zip(arguments, self.parameters, *results, strict=True):
            if parameter.endswith("*"):
                assert forward.tobytes() == backward.tobytes(), (
                    "the result depends on the order of the threads: a race condition"
                )
                if "const" not in parameter:
                    argument[...] = forward

    def _launch(self, grid, block, arguments, reversed_) -> list[np.ndarray]:
        copies, buffers = [], []
        for argument in map(np.asarray, arguments):
            buffers.append(np.full(argument.nbytes + 2 * MARGIN, 0xFF, np.uint8))
            copies.append(buffers[-1][MARGIN : MARGIN + argument.nbytes].view(argument.dtype).reshape(argument.shape))
            copies[-1][...] = argument
        # Like every argument, a pointer is passed by its address.
        addresses = [np.array([copy.ctypes.data], np.uintp) for copy in copies]
        pointers = (ctypes.c_void_p * len(arguments))(
            *(
                (address if parameter.endswith("*") else copy).ctypes.data
                for address, copy, parameter in zip(addresses, copies, self.parameters, strict=True)
            )
        )
        sizes = (ctypes.c_uint * 2)(*(*grid, 1)[:2])
        assert self.launch(sizes, block[0], pointers, reversed_), "some threads did not reach the barrier"
        for buffer in buffers:
            assert (buffer[:MARGIN] == 0xFF).all(), "a kernel wrote before the start of an array"
            assert (buffer[-MARGIN:] == 0xFF).all(), "a kernel wrote past the end of an array"
        return copies


def kind_of(argument: np.ndarray | np.generic) -> str:
    """Return the type of an argument as in `Kernel.parameters`; float16 arrays are passed as their bits."""
    return "u2" if argument.dtype == np.float16 else argument.dtype.str[1:]


@cache
def compiled(file: str, *constants: str) -> ctypes.CDLL:
    """Compile all kernels of a file, with these constants, into a shared library."""
    names = re.findall(r"__global__ void (\w+)", (SOURCES / file).read_text(encoding="utf-8"))
    text = [f'#include "{path}"' for path in (HERE / "cuda_on_cpu.h", SOURCES / file)]
    text += [f"EXPORT({name})" for name in names]
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", *constants]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        source.write_text("\n".join([*text, ""]), encoding="utf-8")
        subprocess.run([COMPILER, *options, source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


@cache
def kernel(file: str, name: str, **settings: int) -> Kernel:
    """Return a kernel for the CPU; replaces `device.kernel`."""
    return Kernel(compiled(file, *(f"-D{constant}={value}" for constant, value in sorted(settings.items()))), name)


def backend(monkeypatch) -> SimpleNamespace:
    """Return the GPU backend with NumPy in place of CuPy, and with kernels that run on the CPU."""
    monkeypatch.setattr(device, "kernel", kernel)
    monkeypatch.setattr(device, "array_library", lambda: np)
    return SimpleNamespace(**vars(gpu) | {"array_library": lambda: np})

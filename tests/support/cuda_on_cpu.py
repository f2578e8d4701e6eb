"""The GPU's kernels on the CPU: their own source, compiled as C++ and run thread by thread on NumPy arrays.

What a GPU does is not imitated, only what the language promises: threads of a block meet at barriers, and nothing is
said about their order in between. Every launch is made twice, with the threads in either order; both must agree.
Every array lies between margins of NaN: what is read from there shows in the results, what is written there is found.
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
    """A kernel compiled for the CPU; called as CuPy's are."""

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
                assert forward.tobytes() == backward.tobytes(), "the order of the threads matters: a race"
                if "const" not in parameter:
                    argument[...] = forward

    def _launch(self, grid, block, arguments, reversed_) -> list[np.ndarray]:
        copies, buffers = [], []
        for argument in map(np.asarray, arguments):
            buffers.append(np.full(argument.nbytes + 2 * MARGIN, 0xFF, np.uint8))
            copies.append(buffers[-1][MARGIN : MARGIN + argument.nbytes].view(argument.dtype).reshape(argument.shape))
            copies[-1][...] = argument
        addresses = [
            np.array([copy.ctypes.data], np.uintp) for copy in copies
        ]  # a pointer is passed by its address, too
        pointers = (ctypes.c_void_p * len(arguments))(
            *(
                (address if parameter.endswith("*") else copy).ctypes.data
                for address, copy, parameter in zip(addresses, copies, self.parameters, strict=True)
            )
        )
        sizes = (ctypes.c_uint * 2)(*(*grid, 1)[:2])
        assert self.launch(sizes, block[0], pointers, reversed_), "not all threads came to the barrier"
        for buffer in buffers:
            assert (buffer[:MARGIN] == 0xFF).all(), "written before an array"
            assert (buffer[-MARGIN:] == 0xFF).all(), "written past an array"
        return copies


def kind_of(argument: np.ndarray | np.generic) -> str:
    """What C++ calls the type: float16 goes by its bits."""
    return "u2" if argument.dtype == np.float16 else argument.dtype.str[1:]


@cache
def compiled(file: str, *constants: str) -> ctypes.CDLL:
    """All kernels of a file, as a library of this machine's."""
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
    """Stands in for `device.kernel`."""
    return Kernel(compiled(file, *(f"-D{constant}={value}" for constant, value in sorted(settings.items()))), name)


def backend(monkeypatch) -> SimpleNamespace:
    """The GPU's backend, all of it but the GPU: with NumPy in CuPy's place, and kernels that run on the CPU."""
    monkeypatch.setattr(device, "kernel", kernel)
    monkeypatch.setattr(device, "array_library", lambda: np)
    return SimpleNamespace(**vars(gpu) | {"array_library": lambda: np})

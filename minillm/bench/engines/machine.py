"""The machine's limits: reading memory, and multiplying float32 matrices. Run by `minillm.bench.machine`."""

from time import perf_counter

import numba
import numpy as np


class MachineLimits:
    """Each measuring method returns one figure per repeat."""

    def bandwidth(self, num_bytes: int, threads: int, repeats: int) -> list[float]:
        """Measure the bytes per second that `threads` cores read together, from an array of `num_bytes`."""
        numba.set_num_threads(threads)
        # Integers, because the compiler may sum them in any order and so uses SIMD lanes. One row per core.
        numbers = np.ones((threads, num_bytes // 8 // threads), np.int64)
        sums = np.empty(threads, np.int64)
        rates = []
        for _ in range(repeats + 1):
            started = perf_counter()
            read_all(numbers, sums)
            rates.append(numbers.nbytes / (perf_counter() - started))
        if sums.sum() != numbers.size:
            raise RuntimeError("the sum is wrong, so not all memory was read")
        return rates[1:]  # the first repeat compiled the kernel

    def matrix_product(self, size: int, repeats: int) -> list[float]:
        """Measure the operations per second of NumPy's float32 product of two matrices [size, size].

        The environment of this process sets the number of threads.
        """
        left, right = np.random.default_rng(0).random((2, size, size), np.float32)
        product = np.empty((size, size), np.float32)
        rates = []
        for _ in range(repeats + 1):
            started = perf_counter()
            np.matmul(left, right, out=product)
            rates.append(2 * size**3 / (perf_counter() - started))
        return rates[1:]

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that the figures depend on."""
        return {"numba": numba.__version__, "numpy": np.__version__}


@numba.njit(parallel=True)
def read_all(numbers: np.ndarray, sums: np.ndarray) -> None:
    """Sum each row of `numbers` on its own core."""
    for part in numba.prange(len(numbers)):
        row = numbers[part]
        total = 0
        for index in range(len(row)):
            total += row[index]
        sums[part] = total


ENGINE = MachineLimits

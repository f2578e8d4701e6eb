"""What the machine itself can do: read memory, and multiply float32 matrices. Run by `minillm.bench.machine`."""

from time import perf_counter

import numba
import numpy as np


class Engine:
    """Each method returns one figure a repeat."""

    def bandwidth(self, num_bytes: int, threads: int, repeats: int) -> list[float]:
        """Bytes a second that `threads` cores read together, from an array of `num_bytes`."""
        numba.set_num_threads(threads)
        # Integers: their sum may be taken in any order, so that the compiler uses SIMD lanes. A stretch for each core.
        numbers = np.ones((threads, num_bytes // 8 // threads), np.int64)
        sums = np.empty(threads, np.int64)
        rates = []
        for _ in range(repeats + 1):
            started = perf_counter()
            read_all(numbers, sums)
            rates.append(numbers.nbytes / (perf_counter() - started))
        if sums.sum() != numbers.size:
            raise RuntimeError("the sum is wrong, so not all was read")
        return rates[1:]  # the first one has compiled the kernel

    def matrix_product(self, size: int, repeats: int) -> list[float]:
        """Operations a second of NumPy's float32 product of two matrices [size, size].

        Its threads were set by the environment this process was started in.
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
        """Of the libraries that the figures depend on."""
        return {"numba": numba.__version__, "numpy": np.__version__}


@numba.njit(parallel=True)
def read_all(numbers, sums):
    """Every core reads one stretch of memory from end to end."""
    for part in numba.prange(len(numbers)):
        stretch = numbers[part]
        total = 0
        for index in range(len(stretch)):
            total += stretch[index]
        sums[part] = total

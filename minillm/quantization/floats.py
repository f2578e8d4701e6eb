"""F32, F16 and BF16: a number a weight. The narrow ones are widened; all that they can hold, float32 can."""

from __future__ import annotations

import numpy as np

from minillm.quantization.storage import StorageType


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) -> float32: bfloat16 is a float32 cut off after 16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


TYPES = (
    StorageType("F32", 1, np.dtype("<f4"), lambda values: values),
    StorageType("F16", 1, np.dtype("<f2"), lambda values: values.astype(np.float32)),
    StorageType("BF16", 1, np.dtype("<u2"), widen_bfloat16),
)

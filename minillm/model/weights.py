"""A model's weights: what each layer holds, and the order in which they are loaded.

The forward pass is in `transformer.py`. This file defines what it finds under `layer.q` or `layer.mlp`.
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
    """A weight matrix (outputs x inputs, in the backend's own layout) and its bias [outputs], if it has one."""

    weight: Any
    bias: Array | None

    def __repr__(self) -> str:
        outputs, inputs = self.weight.shape
        return f"Linear({inputs} -> {outputs}{'' if self.bias is None else ', with bias'})"


@dataclass(frozen=True)
class Norm:
    """The weight of a norm, [D], or [K] for a norm of heads; a layer norm also has a bias of the same shape."""

    weight: Array
    bias: Array | None

    def __repr__(self) -> str:
        return f"Norm({len(self.weight)}{'' if self.bias is None else ', with bias'})"


@dataclass(frozen=True, kw_only=True)
class MLP:
    """A feed-forward layer. GPT-2's has no gate."""

    gate: Linear | None = None  # D -> F
    up: Linear  # D -> F
    down: Linear  # F -> D

    def __repr__(self) -> str:
        return f"MLP({_sizes(self)})"


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """A feed-forward layer of E MLPs. The router chooses a few of them for each token."""

    router: Linear  # D -> E
    experts: tuple[MLP, ...]

    def __repr__(self) -> str:
        return f"MixtureOfExperts({_sizes(self)}, {len(self.experts)} experts, each {self.experts[0]!r})"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The weights of one layer. The last four are None in Llama and in most other models."""

    attention_norm: Norm
    q: Linear  # D -> H * K
    k: Linear  # D -> G * K
    v: Linear  # D -> G * K
    output: Linear  # H * K -> D
    mlp_norm: Norm
    mlp: MLP | MixtureOfExperts

    q_norm: Norm | None = None
    k_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None

    def __repr__(self) -> str:
        return f"Layer({_sizes(self)}, {self.mlp!r})"


def parts_per_token(layer: Layer, experts_per_token: int) -> Iterator[Linear | Norm]:
    """Yield the weights that one token uses, with `experts_per_token` arbitrary experts of a mixture."""
    mlp = layer.mlp
    mlps = mlp.experts[:experts_per_token] if isinstance(mlp, MixtureOfExperts) else ()
    for owner in (layer, mlp, *mlps):
        yield from (part for part in vars(owner).values() if isinstance(part, Linear | Norm))


def part_bytes(part: Linear | Norm, ops: ModuleType) -> int:
    """Return the bytes read when a weight is used, its bias included."""
    matrix = ops.num_bytes(part.weight) if isinstance(part, Linear) else part.weight.nbytes
    return matrix + (0 if part.bias is None else part.bias.nbytes)


def _sizes(owner: MLP | MixtureOfExperts | Layer) -> str:
    """Inputs and outputs of each projection, as text."""
    shapes = {name: part.weight.shape for name, part in vars(owner).items() if isinstance(part, Linear)}
    return ", ".join(f"{name} {inputs} -> {outputs}" for name, (outputs, inputs) in shapes.items())


@dataclass(frozen=True)
class WeightLoader:
    """Load weights one after another and hand each to the backend, so that none is in memory twice.

    Attributes
    ----------
    config : ModelConfig
    load : returns the tensor of a name in `config.tensor_shapes()`
    ops : the backend
    """

    config: ModelConfig
    load: Callable[[str], Any]
    ops: ModuleType

    def matrix(self, name: str) -> Any:
        """Load a matrix into the backend's own layout."""
        return self.ops.as_matrix(self.load(f"{name}.weight"))

    def norm(self, name: str) -> Norm:
        """Load a norm, with its bias if the model uses layer norm."""
        bias = self.ops.as_vector(self.load(f"{name}.bias")) if self.config.norm == "layer" else None
        return Norm(self.ops.as_vector(self.load(f"{name}.weight")), bias)

    def layers(self) -> list[Layer]:
        """Load all layers.

        Each projection is loaded for every layer before the next projection. A backend can then store end to end the
        matrices that are multiplied with the same vectors, and the matrices of consecutive layers.
        """
        config = self.config
        attention_norms, mlp_norms = self._norms("attention_norm"), self._norms("mlp_norm")
        q_norms = self._optional_norms("attention.q_norm", config.qk_norm)
        k_norms = self._optional_norms("attention.k_norm", config.qk_norm)
        post_attention_norms = self._optional_norms("post_attention_norm", config.post_norms)
        post_mlp_norms = self._optional_norms("post_mlp_norm", config.post_norms)
        q, k, v = self._linears("attention.q", "attention.k", "attention.v", has_bias=config.attention_bias)
        (output,) = self._linears("attention.output", has_bias=config.output_bias)
        mlps = self._mixtures() if config.num_experts else self._mlps("mlp")
        return [
            Layer(
                attention_norm=attention_norms[index],
                q=q[index],
                k=k[index],
                v=v[index],
                output=output[index],
                mlp_norm=mlp_norms[index],
                mlp=mlps[index],
                q_norm=q_norms[index],
                k_norm=k_norms[index],
                post_attention_norm=post_attention_norms[index],
                post_mlp_norm=post_mlp_norms[index],
            )
            for index in range(config.num_layers)
        ]

    def _norms(self, name: str) -> list[Norm]:
        """Load the same norm of every layer."""
        return [self.norm(f"layers.{index}.{name}") for index in range(self.config.num_layers)]

    def _optional_norms(self, name: str, exists: bool) -> list[Norm] | list[None]:
        return self._norms(name) if exists else [None] * self.config.num_layers

    def _linears(self, *names: str, has_bias: bool = False) -> list[list[Linear]]:
        """Load the projections `names`, which are multiplied with the same vectors: for each, a list over layers."""
        stems = [f"layers.{index}.{name}" for index in range(self.config.num_layers) for name in names]
        matrices = self.ops.as_matrices(self.load(f"{stem}.weight") for stem in stems)
        biases = [self.ops.as_vector(self.load(f"{stem}.bias")) if has_bias else None for stem in stems]
        linears = [Linear(matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
        return [linears[first :: len(names)] for first in range(len(names))]

    def _mlps(self, name: str) -> list[MLP]:
        """Load the MLP called `name` of every layer."""
        bias = self.config.mlp_bias
        if self.config.gated:
            gates, ups = self._linears(f"{name}.gate", f"{name}.up", has_bias=bias)
        else:
            gates, ups = None, *self._linears(f"{name}.up", has_bias=bias)
        (downs,) = self._linears(f"{name}.down", has_bias=bias)
        return [
            MLP(gate=gates[index] if gates else None, up=up, down=down)
            for index, (up, down) in enumerate(zip(ups, downs, strict=True))
        ]

    def _mixtures(self) -> list[MixtureOfExperts]:
        """Load the experts and the router of every layer."""
        experts = [self._mlps(f"mlp.experts.{expert}") for expert in range(self.config.num_experts)]
        (routers,) = self._linears("mlp.router")
        return [
            MixtureOfExperts(router=router, experts=own)
            for router, own in zip(routers, zip(*experts, strict=True), strict=True)
        ]

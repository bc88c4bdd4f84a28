"""What a model is made of, in numbers: parameters of each layer by kind, what it caches, what it multiplies.

Owns the words, and the arithmetic that follows from them alone. Knows no family and reads no file. Bytes are those in
memory, in the type that the model is run in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import comb, exp, log1p

EXPERTS = "experts"
NORMS = "norms"


class Keeps(Enum):
    """What a layer's keys and values are kept for."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Cache:
    """What one layer keeps of a sequence.

    ``token_elements``: of each token; ``window``: tokens that are kept, 0 for all. ``conv_elements`` are kept in the
    model's type, ``state_elements`` in float32, both once per sequence. ``read_elements``: what attention reads of each
    visible token, which is another layer's where this one keeps nothing.
    """

    keeps: Keeps = Keeps.NONE
    token_elements: int = 0
    window: int = 0
    conv_elements: int = 0
    state_elements: int = 0
    read_elements: int = 0

    def tokens(self, context: int) -> int:
        """How many tokens of a sequence of ``context`` tokens are kept."""
        return min(context, self.window) if self.window else context

    def token_bytes(self, item_bytes: int) -> int:
        return self.token_elements * item_bytes

    def state_bytes(self, item_bytes: int) -> int:
        return self.conv_elements * item_bytes + 4 * self.state_elements

    def sequence_bytes(self, context: int, item_bytes: int) -> int:
        """Of a sequence of ``context`` tokens."""
        return self.tokens(context) * self.token_bytes(item_bytes) + self.state_bytes(item_bytes)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. ``parameters``: by kind, of all but the routed experts. ``expert_parameters``: of one expert.

    ``pair_operations``: operations of attention for each pair of a query and a key that it sees.
    """

    index: int
    parameters: Mapping[str, int]
    cache: Cache = field(default_factory=Cache)
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0
    pair_operations: int = 0
    dense_bytes: int = 0
    expert_bytes: int = 0

    @property
    def dense_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_parameters(self) -> int:
        return self.dense_parameters + self.experts * self.expert_parameters

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.experts * self.expert_bytes

    @property
    def multiplied(self) -> int:
        """Parameters that every token is multiplied with."""
        return self.dense_parameters - self.parameters.get(NORMS, 0)

    def distinct_experts(self, tokens: int) -> float:
        """How many experts ``tokens`` tokens meet together, if the router chose evenly."""
        if not self.experts:
            return 0.0
        share = min(1.0, self.experts_per_token / self.experts)
        return self.experts * (1.0 - (exp(tokens * log1p(-share)) if share < 1 else 0.0))


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model. ``embedding``: parameters of the tables that tokens are looked up in; ``rest``: final norm and
    what else belongs to no layer; ``head``: parameters of the output layer, without the embedding where it is that
    (``tied``).
    """

    family: str
    layers: tuple[Layer, ...]
    embedding: int
    rest: int
    head: int
    tied: bool
    vocab: int
    hidden: int
    dtype: str
    item_bytes: int
    context_tokens: int
    head_reads: int = 0
    """Parameters that logits are made of: the head's, or the tied embedding's."""
    embedding_bytes: int = 0
    rest_bytes: int = 0
    head_bytes: int = 0
    source: str = "config"
    notes: tuple[str, ...] = ()

    @property
    def total_parameters(self) -> int:
        return self.embedding + self.rest + self.head + sum(layer.total_parameters for layer in self.layers)

    @property
    def total_bytes(self) -> int:
        ends = self.embedding_bytes + self.rest_bytes + self.head_bytes
        return ends + sum(layer.total_bytes for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with."""
        layers = sum(one.multiplied + one.experts_per_token * one.expert_parameters for one in self.layers)
        return layers + self.head_reads

    def parameters_by_kind(self) -> dict[str, int]:
        """Of the whole model, largest first."""
        found: dict[str, int] = {"embedding": self.embedding, "lm_head": self.head, "other": self.rest}
        for layer in self.layers:
            for kind, count in layer.parameters.items():
                found[kind] = found.get(kind, 0) + count
            found[EXPERTS] = found.get(EXPERTS, 0) + layer.experts * layer.expert_parameters
        return dict(sorted(((k, n) for k, n in found.items() if n), key=lambda pair: -pair[1]))

    def token_bytes(self) -> int:
        """Keys and values that one more token adds, in layers that keep all of them."""
        return sum(one.cache.token_bytes(self.item_bytes) for one in self.layers if not one.cache.window)

    def stored_bytes_per_token(self, snapshot_tokens: int) -> float:
        """Of a prefix in a tier: windowed layers count as all others do, because prompts may share its middle only;
        recurrent states are kept every ``snapshot_tokens``.
        """
        tokens = sum(one.cache.token_bytes(self.item_bytes) for one in self.layers)
        return tokens + sum(one.cache.state_bytes(self.item_bytes) for one in self.layers) / snapshot_tokens

    def sequence_bytes(self, context: int, block_tokens: int = 1) -> int:
        """Of a sequence of ``context`` tokens, in whole blocks. A window that begins within a block needs one more."""

        def held(cache: Cache) -> int:
            if not cache.token_elements:
                return cache.state_bytes(self.item_bytes)
            extra = block_tokens if cache.window and cache.window < context and block_tokens > 1 else 0
            tokens = min(cache.tokens(context) + extra, context)
            whole = -(-tokens // block_tokens) * block_tokens
            return whole * cache.token_bytes(self.item_bytes) + cache.state_bytes(self.item_bytes)

        return sum(held(layer.cache) for layer in self.layers)

    def decode_operations(self, length: int) -> int:
        """Multiplications and additions for one token after ``length`` others."""
        pairs = sum(layer.pair_operations * layer.cache.tokens(length) for layer in self.layers)
        return 2 * self.active_parameters + pairs

    def prefill_operations(self, tokens: int) -> int:
        """For a prompt of ``tokens`` tokens: logits are made of its last one only."""
        per_token = 2 * (self.active_parameters - self.head_reads)
        pairs = sum(layer.pair_operations * seen_pairs(tokens, layer.cache.window) for layer in self.layers)
        return tokens * per_token + pairs + 2 * self.head_reads


def seen_pairs(tokens: int, window: int, before: int = 0) -> int:
    """Pairs of query and key in causal attention of ``tokens`` tokens after ``before`` others, of at most ``window``
    keys for each query (0: all).
    """
    if not window:
        return comb(tokens + 1, 2) + tokens * before
    growing = max(0, min(tokens, window - before))
    return comb(growing + 1, 2) + growing * min(before, window) + (tokens - growing) * window

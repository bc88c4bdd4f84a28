"""Types for the shape of a model: parameters of each layer by kind, what it caches, what it multiplies.

Owns the kinds, and arithmetic on them. Knows no model family and reads no file. Bytes are those in memory, in the dtype
that the model is run in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import comb, exp, lcm, log1p

from stowage.core.geometry import Kind

ATTENTION, MLP, RECURRENT, ROUTER, SHARED = "attention", "mlp", "recurrent", "router", "shared experts"
EXPERTS = "experts"
DENSE, HEAD = "dense", "head"
NORMS = "norms"
USUAL_WIDTH = 2048
"""Inputs of the matrices that a machine is measured with, and assumed of matrices of unknown width."""


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one cache layer keeps of a sequence, as ``models.layout.Layer`` has it: ``nbytes`` per ``every`` tokens of
    the last ``window`` ones (0: of all), or once for a recurrent state.
    """

    index: int
    kind: Kind
    nbytes: int
    window: int = 0
    every: int = 1

    @property
    def recurrent(self) -> bool:
        return self.kind is Kind.RECURRENT

    @property
    def token_bytes(self) -> Fraction:
        return Fraction(0 if self.recurrent else self.nbytes, self.every)

    @property
    def state_bytes(self) -> int:
        return self.nbytes if self.recurrent else 0

    def sequence_bytes(self, context: int, block_tokens: int) -> int:
        """Bytes of a sequence of ``context`` tokens, in whole blocks: one more of a window, which may begin in one."""
        if self.recurrent:
            return self.nbytes
        cut = 0 < self.window < context
        tokens = min(self.window + (block_tokens if block_tokens > 1 else 0), context) if cut else context
        block = lcm(block_tokens, self.every)
        return -(-tokens // block) * block // self.every * self.nbytes


@dataclass(frozen=True, slots=True)
class Attention:
    """One call of attention in a forward. ``pair_operations``: for each pair of a query and a row that it sees;
    ``read_bytes``: of each row that it sees, whichever layer keeps it.
    """

    pair_operations: int
    read_bytes: int
    window: int = 0
    every: int = 1

    def rows(self, context: int) -> int:
        """Rows that the last of ``context`` tokens sees."""
        return (min(context, self.window) if self.window else context) // self.every

    def prompt_operations(self, tokens: int) -> int:
        """For a prompt of so many tokens."""
        return self.pair_operations * seen_pairs(tokens, self.window) // self.every


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. ``parameters``: by kind, of all but the routed experts; ``expert_parameters``: of one."""

    index: int
    parameters: Mapping[str, int]
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0
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
        """The expected number of distinct experts that ``tokens`` tokens use together, if the router chooses evenly."""
        if not self.experts:
            return 0.0
        share = min(1.0, self.experts_per_token / self.experts)
        return self.experts * (1.0 - (exp(tokens * log1p(-share)) if share < 1 else 0.0))


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model. ``kept``, ``attention``: of one sequence. ``embedding``: parameters of the tables that tokens are
    looked up in; ``rest``: final norm and what else belongs to no layer; ``head``: parameters of the output layer,
    without the embedding where it is that (``tied``).
    """

    family: str
    layers: tuple[Layer, ...]
    kept: tuple[CacheLayer, ...]
    attention: tuple[Attention, ...]
    tied: bool
    vocab: int
    hidden: int
    dtype: str
    item_bytes: int
    context_tokens: int
    embedding: int = 0
    rest: int = 0
    head: int = 0
    head_reads: int = 0
    """Parameters of the output layer: the head's, or the tied embedding's."""
    embedding_bytes: int = 0
    rest_bytes: int = 0
    head_bytes: int = 0
    source: str = "config"
    notes: tuple[str, ...] = ()
    formats: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Of ``DENSE`` parts of layers, ``EXPERTS`` and the ``HEAD``: how many parameters lie in which format, by the names
    of ``Machine.formats``. What is in none is plain numbers.
    """
    outputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The same parts: of how many outputs their matrices are, by format; of plain numbers under an empty name."""
    attended: str = ""
    """The key of its attention in ``Machine.attention``, where that is not its dtype."""

    def narrow_outputs(self, part: str) -> dict[str, float]:
        """By format, a part's outputs per parameter beyond those of matrices that are all ``USUAL_WIDTH`` wide."""
        formats, outputs = self.formats.get(part, {}), self.outputs.get(part, {})
        whole = self.whole(part)
        plain = whole - sum(formats.values())
        return {
            name: (count - formats.get(name, 0 if name else plain) / USUAL_WIDTH) / whole
            for name, count in outputs.items()
            if whole
        }

    def whole(self, part: str) -> int:
        """Parameters of ``DENSE`` parts of layers, of all ``EXPERTS``, or that the ``HEAD`` multiplies with."""
        if part == HEAD:
            return self.head_reads
        if part == EXPERTS:
            return sum(layer.experts * layer.expert_parameters for layer in self.layers)
        return sum(layer.multiplied for layer in self.layers)

    def format_shares(self, part: str) -> dict[str, float]:
        """The share of a part's parameters in each format."""
        whole = self.whole(part)
        return {name: count / whole for name, count in self.formats.get(part, {}).items()} if whole else {}

    @property
    def format_names(self) -> tuple[str, ...]:
        """The formats of all parts."""
        return tuple(sorted({name for counts in self.formats.values() for name in counts}))

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
        """Bytes of keys and values per further token, in layers that keep all of them."""
        return int(sum(one.token_bytes for one in self.kept if not one.window))

    def stored_bytes_per_token(self, snapshot_tokens: int) -> float:
        """Bytes per token of a prefix in a tier. Windowed layers count in full, because a prompt may resume in the
        middle; recurrent states are kept every ``snapshot_tokens``.
        """
        return float(sum(one.token_bytes + Fraction(one.state_bytes, snapshot_tokens) for one in self.kept))

    def sequence_bytes(self, context: int, block_tokens: int = 1) -> int:
        """Of a sequence of ``context`` tokens, in whole blocks."""
        return sum(one.sequence_bytes(context, block_tokens) for one in self.kept)

    def step_bytes(self, context: int) -> int:
        """Bytes of the cache that one token after ``context`` others reads; states are written too."""
        read = sum(one.rows(context) * one.read_bytes for one in self.attention)
        return read + 2 * sum(one.state_bytes for one in self.kept)

    def step_operations(self, context: int) -> int:
        """Of attention, of one token after ``context`` others."""
        return sum(one.rows(context) * one.pair_operations for one in self.attention)

    def prompt_pair_operations(self, tokens: int) -> int:
        """Of attention, for a prompt of so many tokens."""
        return sum(one.prompt_operations(tokens) for one in self.attention)


def seen_pairs(tokens: int, window: int) -> int:
    """Pairs of query and key in causal attention of ``tokens``, at most ``window`` keys for a query (0: all)."""
    growing = min(tokens, window or tokens)
    return comb(growing + 1, 2) + (tokens - growing) * window

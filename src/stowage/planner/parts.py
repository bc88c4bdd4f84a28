"""Parameters of the building blocks that families are made of: attention, latents, state spaces, delta rules, experts.

Each function returns counts by kind, or a cache, from a config's fields; none knows a family's name. Checked against
the models that Transformers builds.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.planner.model_config import Fields
from stowage.planner.shapes import Cache, Keeps

ATTENTION, MLP, RECURRENT, ROUTER, SHARED = "attention", "mlp", "recurrent", "router", "shared experts"


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one attention layer. ``values``: whether values have a projection of their own; ``reads``: whether keys and
    values are another layer's; ``gated``: queries come with a gate as wide as they are.
    """

    query: int
    key: int
    size: int
    values: bool = True
    reads: bool = False
    gated: bool = False


def linear(inputs: int, outputs: int, bias: bool = False) -> int:
    return inputs * outputs + (outputs if bias else 0)


def attention(hidden: int, heads: Heads, *, bias: bool, out_bias: bool, norm: str = "", sinks: bool = False) -> int:
    """Grouped queries. ``norm``: of queries and keys: over each ``head``, over the whole ``row``, or a weight for
    ``each`` head; empty for none.
    """
    rows, keys = heads.query * heads.size, heads.key * heads.size
    total = linear(hidden, rows * (2 if heads.gated else 1), bias) + linear(rows, hidden, out_bias)
    if not heads.reads:
        total += linear(hidden, keys, bias) * (2 if heads.values else 1)
    normed = {"": (0, 0), "head": (heads.size, heads.size), "row": (rows, keys), "each": (rows, keys)}[norm]
    total += normed[0] + (0 if heads.reads else normed[1])
    return total + (heads.query if sinks else 0)


def attention_cache(heads: Heads, keeps: Keeps, window: int) -> Cache:
    read = 2 * heads.key * heads.size
    return Cache(keeps, 0 if heads.reads else read, window, read_elements=read)


def pair_operations(heads: Heads) -> int:
    """Scores and weighted values of one pair of query and key."""
    return 4 * heads.query * heads.size


def latent_attention(fields: Fields) -> int:
    """Multi-head latent attention: queries through a bottleneck or not, keys and values through one always."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    keys = fields.number("qk_nope_head_dim") + fields.number("qk_rope_head_dim")
    latent, values = fields.number("kv_lora_rank"), fields.number("v_head_dim")
    bottleneck, bias = fields.number("q_lora_rank", 0), fields.flag("attention_bias")
    if bottleneck:
        total = linear(hidden, bottleneck, bias) + bottleneck + linear(bottleneck, heads * keys)
    else:
        total = linear(hidden, heads * keys)
    total += linear(hidden, latent + fields.number("qk_rope_head_dim"), bias) + latent
    total += linear(latent, heads * (fields.number("qk_nope_head_dim") + values))
    return total + linear(heads * values, hidden, bias)


def latent_cache(fields: Fields) -> Cache:
    """The latent and the key that carries the position, side by side."""
    row = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
    return Cache(Keeps.FULL, row, read_elements=row)


def latent_pair_operations(fields: Fields) -> int:
    """With the projections absorbed into queries and outputs, so that scores are made with the latents themselves."""
    latent = fields.number("kv_lora_rank")
    return 2 * fields.number("num_attention_heads") * (2 * latent + fields.number("qk_rope_head_dim"))


def mlp(hidden: int, inner: int, *, gated: bool = True, bias: bool = False) -> int:
    return linear(hidden, inner, bias) * (2 if gated else 1) + linear(inner, hidden, bias)


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A state space of the second kind: ``width`` channels in ``heads`` heads."""

    width: int
    heads: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool
    bias: bool
    norm: bool

    @property
    def convolved(self) -> int:
        return self.width + 2 * self.groups * self.state

    def parameters(self, hidden: int) -> int:
        total = linear(hidden, self.width + self.convolved + self.heads, self.bias)
        total += self.convolved * (self.kernel + (1 if self.conv_bias else 0)) + 3 * self.heads
        return total + (self.width if self.norm else 0) + linear(self.width, hidden, self.bias)

    def cache(self) -> Cache:
        return Cache(conv_elements=self.convolved * self.kernel, state_elements=self.width * self.state)


def state_space(fields: Fields) -> StateSpace:
    """As Bamba, Granite and Falcon-H1 write it."""
    width = fields.number("mamba_expand", 2) * fields.number("hidden_size")
    heads = fields.number("mamba_n_heads")
    size = fields.get("mamba_d_head", "auto")
    if fields.family == "falcon_h1":
        width = fields.number("mamba_d_ssm", width)
    elif isinstance(size, int):
        width = heads * size
    return StateSpace(
        width,
        heads,
        fields.number("mamba_n_groups", 1),
        fields.number("mamba_d_state"),
        fields.number("mamba_d_conv", 4),
        fields.flag("mamba_conv_bias"),
        fields.flag("mamba_proj_bias"),
        fields.family != "falcon_h1" or fields.flag("mamba_rms_norm"),
    )


def nemotron_state_space(fields: Fields) -> StateSpace:
    heads = fields.number("mamba_num_heads")
    return StateSpace(
        heads * fields.number("mamba_head_dim"),
        heads,
        fields.number("n_groups"),
        fields.number("ssm_state_size"),
        fields.number("conv_kernel"),
        fields.flag("use_conv_bias"),
        fields.flag("use_bias"),
        True,
    )


def delta_rule(fields: Fields) -> tuple[int, Cache]:
    """The gated delta rule of Qwen3-Next and Qwen3.5."""
    hidden, kernel = fields.number("hidden_size"), fields.number("linear_conv_kernel_dim")
    keys = fields.number("linear_num_key_heads") * fields.number("linear_key_head_dim")
    heads, size = fields.number("linear_num_value_heads"), fields.number("linear_value_head_dim")
    values = heads * size
    convolved = 2 * keys + values
    total = linear(hidden, convolved + values) + linear(hidden, 2 * heads) + convolved * kernel
    total += 2 * heads + size + linear(values, hidden)
    states = heads * fields.number("linear_key_head_dim") * size
    return total, Cache(conv_elements=convolved * kernel, state_elements=states)


def short_convolution(fields: Fields) -> tuple[int, Cache]:
    """Of LFM2."""
    hidden, kernel, bias = fields.number("hidden_size"), fields.number("conv_L_cache"), fields.flag("conv_bias")
    total = linear(hidden, 3 * hidden, bias) + hidden * kernel + (hidden if bias else 0) + linear(hidden, hidden, bias)
    return total, Cache(conv_elements=hidden * kernel)


def both(one: Cache, other: Cache) -> Cache:
    """Of a layer that has attention and a recurrent state side by side. ``one`` is the attention's."""
    return Cache(
        one.keeps, one.token_elements, one.window, other.conv_elements, other.state_elements, one.read_elements
    )

"""Writes ``docs/reference/models.md``: every family that has a tiny model, as the engine sees that model.

    python scripts/models_doc.py

The tests of a family (``tests/engine/families``) hold its row to the model that they have just run.
"""

from __future__ import annotations

from pathlib import Path

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.executor.probe import probe
from stowage.models import families
from stowage.models.layout import BlockLayout, ModelLayout
from stowage.models.namespace import block_tokens_of
from stowage.testing import tiny_models
from stowage.testing.tiny_models import Family, TinySize
from stowage.testing.tiny_models.outer import Outer

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
SAME = {"gpt-sw3": "gpt2"}
"""Types whose configs are read as those of another."""
_KINDS = {Kind.FULL: "full", Kind.SLIDING: "window", Kind.CHUNKED: "chunked", Kind.RECURRENT: "state"}

HEAD = """# Models

*Written by `make reference`; do not edit.*

```sh
stowage tiny gemma3 ./tiny-gemma3      # a tiny random model of any family in the first column
```

The engine runs Transformers' own code, so a model's family counts, not its name. The family is the `model_type` in
`config.json`. When it opens a model, the engine computes a few tokens to see what each layer keeps and what its queries
read. A model that does something else than its family should is refused, with the reason.

Each family is tested on a tiny random model in float32 against plain Transformers with `eager` attention. Greedy tokens
are the same, and log-probabilities differ by less than 4e-4. No checkpoint of the real models was run. The tests
(`tests/engine/families`) cover:

- prompts of unequal lengths in one batch, computed in pieces;
- prompts that share the first 70 % or 40 % of an earlier one, from the device, host memory and disk, also after a
  restart;
- sequences that take turns on a device that is too small for them;
- blocks of 16 and 32 tokens, and of 528 for families with a state.

| Column | Word | Meaning |
|---|---|---|
| Keeps | *full* | keys and values of all tokens |
| | *latent* | one compressed row per token |
| | *window*, *chunked* | keys and values of the last tokens only, or of a token's own part |
| | *state* | a recurrent state of fixed size |
| | *entries* | one compressed row for several tokens |
| | *shared* | later layers read the keys of earlier ones and keep none |
| Reused | *blocks* | the part that a later prompt shares, in whole blocks on the device and whole chunks below |
| | *snapshots* | up to the last snapshot in it, every `snapshot_tokens` and at the end of a prompt |
| Prompts | *together* | several in one forward |
| | *in turn* | one after the other; single tokens are a batch |
| | *alone* | on the [fallback executor](../internals.md#the-fallback-executor), one sequence at a time |
"""
OUTER_HEAD = """
## Models that take pictures or sound

Checkpoints of these types run as text models, as they are published. Only the tensors of the text part are loaded and
counted. Each has a tiny model too; its text is answered as the whole model's own `generate()` answers it, whichever
version of Transformers named the tensors.

*Text* is the family above that computes it. The first is that of the tiny model; of others, logits were compared. With
any other text model a type is refused, because its text may not be what that model answers alone. Pictures and sound
are refused. Of Gemma 3n and Gemma 4, so is a token that stands for one, which also ends an answer.

| Name | Type | Models | Text |
|---|---|---|---|
"""
REFUSED_HEAD = """
## Refused

Each of these has a tiny model too, on which the reason is tested.

| Type | Models | Why |
|---|---|---|
"""
REST = """
Transformers names these among its causal models as well; they are refused by name:

| Types | Why |
|---|---|
{}

`gpt-sw3` is a `gpt2`. Encoder-decoder models are not run, nor are models that take pictures or sound and are not named
above.
"""
NOT_TRIED = """
Not tried yet, and refused: {}.
"""


def layout_of(family: Family) -> ModelLayout:
    """What the engine finds in the family's tiny model."""
    model = tiny_models.build(family.name, TinySize(layers=family.layers, context_tokens=512))
    return probe(model, block_tokens_of(Memory()), 1)


def row(family: Family, layout: ModelLayout) -> str:
    """The family's line of the table."""
    kept = [_kept(block) for block in layout.blocks]
    if any(layer.readers for block in layout.blocks for layer in block.layers):
        kept.append("shared")
    cells = (
        f"`{family.name}`",
        f"`{family.model_type}`",
        family.models,
        ", ".join(kept),
        "snapshots" if layout.recurrent else "blocks",
        "alone" if layout.alone else "together" if layout.ragged else "in turn",
        family.note,
    )
    return f"| {' | '.join(cells)} |".replace("  |", " |")


def _kept(block: BlockLayout) -> str:
    if any(tensor.every > 1 for layer in block.layers for tensor in layer.tensors):
        return "entries"
    return "latent" if any(layer.latent for layer in block.layers) else _KINDS[block.group.kind]


def outer_row(row: Outer) -> str:
    texts = ", ".join(f"`{tiny_models.TABLE[name].model_type}`" for name in (row.text, *row.others))
    return f"| `{row.name}` | `{row.model_type}` | {row.models} | {texts} |"


def outer_table() -> str:
    return OUTER_HEAD + "\n".join(outer_row(row) for row in tiny_models.OUTER.values()) + "\n"


def refused_rows() -> list[str]:
    return [
        f"| `{f.model_type}` | {f.models} | {families.REFUSED[f.model_type]} |" for f in tiny_models.REFUSED.values()
    ]


def by_name_rows() -> list[str]:
    reasons = dict.fromkeys(families.NO_TEXT_MODELS.values())
    types = {why: ", ".join(f"`{t}`" for t, w in families.NO_TEXT_MODELS.items() if w == why) for why in reasons}
    return [f"| {listed} | {why} |" for why, listed in types.items()]


def not_tried() -> list[str]:
    """Types that Transformers has a causal model for, and that are in no table."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    known = families.PROVED | families.OUTER.keys() | families.REFUSED.keys() | families.NO_TEXT_MODELS.keys()
    return sorted(set(CAUSAL) - known - SAME.keys())


def tail() -> str:
    """The page after the first table."""
    rest = REST.format("\n".join(by_name_rows()))
    left = ", ".join(f"`{name}`" for name in not_tried())
    return (
        outer_table()
        + REFUSED_HEAD
        + "\n".join(refused_rows())
        + "\n"
        + rest
        + (NOT_TRIED.format(left) if left else "")
    )


def main() -> None:
    rows = [row(family, layout_of(family)) for family in tiny_models.TABLE.values()]
    titles = "| Name | Type | Models | Keeps | Reused | Prompts | Notes |\n|---|---|---|---|---|---|---|\n"
    PAGE.write_text(f"{HEAD}\n{titles}{chr(10).join(rows)}\n{tail()}", encoding="utf-8")


if __name__ == "__main__":
    main()

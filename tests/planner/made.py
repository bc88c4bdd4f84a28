"""Models, machines and work that tests of the planner make."""

from dataclasses import replace

from stowage.core.geometry import Kind
from stowage.planner.machine import TYPICAL_CPU, TYPICAL_GPU, Machine
from stowage.planner.predict import Workload
from stowage.planner.shapes import Attention, CacheLayer, Layer, Model

MIB = 1 << 20
WORK = Workload(context_tokens=64, batch=2, prompt_tokens=32, answer_tokens=8, step_tokens=32)


def model(layers: list[int], *, head: int = 3, embedding: int = 2, experts: int = 0, expert: int = 1) -> Model:
    """Sizes are in MiB; an element is a byte wide, so parameters are bytes."""
    made = tuple(
        Layer(
            index=at,
            parameters={"attention": size * MIB},
            experts=experts,
            experts_per_token=min(2, experts),
            expert_parameters=expert * MIB if experts else 0,
            dense_bytes=size * MIB,
            expert_bytes=expert * MIB if experts else 0,
        )
        for at, size in enumerate(layers)
    )
    return Model(
        family="made",
        layers=made,
        kept=tuple(CacheLayer(at, Kind.FULL, 64) for at in range(len(layers))),
        attention=(Attention(256, 64),) * len(layers),
        embedding=embedding * MIB,
        rest=100,
        head=head * MIB,
        tied=False,
        vocab=256,
        hidden=64,
        dtype="float8_e4m3fn",
        item_bytes=1,
        context_tokens=4096,
        head_reads=head * MIB,
        embedding_bytes=embedding * MIB,
        rest_bytes=100,
        head_bytes=head * MIB,
    )


def machine(kind: str, disk: float = 1e9, link: float = 4e9) -> Machine:
    made = TYPICAL_CPU if kind == "cpu" else replace(TYPICAL_GPU, link_in=link)
    return replace(made, disk_read={4: disk}, layer_s=1e-5)

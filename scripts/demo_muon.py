"""Muon for the demo's weight matrices: momentum, then the nearest orthogonal update.

Owns one optimizer. Source: K. Jordan et al., "Muon: An optimizer for hidden layers in
neural networks" (2024); quintic Newton-Schulz coefficients from there. It runs in
float32 because bfloat16 matrix products are slow on most CPUs, which is where this
model is trained; ``torch.optim.Muon`` computes them in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(gradient: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """``gradient`` (a batch of matrices) with its singular values pushed to about 1."""
    a, b, c = COEFFICIENTS
    tall = gradient.shape[-2] > gradient.shape[-1]
    x = gradient.mT if tall else gradient
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon over two-dimensional parameters, with decoupled weight decay.

    ``lr`` is the root-mean-square step an orthogonal update of any shape is scaled to
    (divided by 0.2, the usual AdamW root-mean-square), so AdamW learning rates carry over.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update; matrices of one shape are orthogonalized together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                scale = 0.2 * max(shape) ** 0.5
                updates = orthogonalized(torch.stack([self._nesterov(p, group["momentum"]) for p in parameters]))
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _nesterov(self, parameter: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)

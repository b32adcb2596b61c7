"""Muon for the matrices of a model's layers, AdamW for everything else.

Muon [1]_ takes a matrix's momentum to the nearest matrix whose singular values are about 1. The
step is scaled [2]_ so that its elements are as large as AdamW's, and both share a learning rate.

.. [1] K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks", 2024.
.. [2] J. Liu and others, "Muon is scalable for LLM training", arXiv:2502.16982, 2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: coefficients of the quintic iteration of [1]_
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
#: root mean square of an AdamW step in units of its learning rate, by [2]_
_STEP_SIZE = 0.2


def orthogonalize(matrices: Tensor) -> Tensor:
    """Singular values to about 1: ``[N, rows, columns]`` to the same shape, in 16 bits on a GPU."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.clone()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        square = torch.bmm(x, x.mT)
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x.mT if tall else x


class TrainingOptimizer:
    """Both optimizers as one.

    Args:
        model: all its parameters are trained.
        weight_decay: of matrices, times the learning rate a step.
        muon: whether Muon takes the layers' matrices; else AdamW does.
        momentum: of Muon.
        betas: of AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.1,
        muon: bool = True,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        self._momentum, self._decay = momentum, weight_decay
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        plain: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name
            if matrix and muon:
                shapes.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                (decayed if matrix else plain).append(parameter)
        #: matrices of a shape, and their momentum ``[N, rows, columns]``
        self._stacks = [
            (group, torch.zeros_like(torch.stack(_data(group)))) for group in shapes.values()
        ]
        groups: list[dict[str, Any]] = [{"params": plain, "weight_decay": 0.0}]
        if decayed:
            groups.append({"params": decayed, "weight_decay": weight_decay})
        device = next(model.parameters()).device
        cuda = device.type == "cuda"
        # a tensor, so that a step that is captured in a graph reads it anew
        self._rate = torch.zeros((), device=device)
        self._adam = torch.optim.AdamW(
            groups, lr=self._rate, betas=betas, eps=1e-8, fused=cuda, capturable=cuda
        )

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next steps."""
        self._rate.fill_(rate)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step down the parameters' gradients, and forget these."""
        for group in self._adam.param_groups:
            group["lr"] = self._rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for parameters, momentum in self._stacks:
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            momentum.lerp_(gradient, 1.0 - self._momentum)
            update = orthogonalize(gradient.lerp(momentum, self._momentum)).float()
            scale = _STEP_SIZE * max(update.shape[-2:]) ** 0.5
            data = _data(parameters)
            torch._foreach_mul_(data, 1.0 - self._rate * self._decay)
            torch._foreach_sub_(data, list((update * (self._rate * scale)).unbind(0)))
            for parameter in parameters:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` takes."""
        return {"adam": self._adam.state_dict(), "momentum": [m for _, m in self._stacks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run ended."""
        self._adam.load_state_dict(state["adam"])
        for (_, momentum), kept in zip(self._stacks, state["momentum"], strict=True):
            momentum.copy_(kept)


def _data(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.data for parameter in parameters]

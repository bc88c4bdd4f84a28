"""Host pools as SGLang's storage interface sees them: pages of tokens in host memory, handed over flat."""

from __future__ import annotations

import torch
from torch import Tensor

PAGE = 4
"""Tokens of a page."""


class Pool:
    """``[layers, tokens, width]``, its pages as SGLang's pools with the layout layer_first give them."""

    layout = "layer_first"

    def __init__(
        self, tokens: int = 256, width: int = 96, dtype: torch.dtype = torch.bfloat16, page: int = PAGE
    ) -> None:
        self.page_size, self.dtype = page, dtype
        self.buffer = torch.zeros(3, tokens, width, dtype=dtype)

    def fill(self, seed: int = 0) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.buffer.copy_(torch.randn(self.buffer.shape, generator=chance).to(self.dtype))

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        page = self.buffer[:, index : index + self.page_size]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.zeros(self.buffer[:, : self.page_size].numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        page = self.buffer[:, index : index + self.page_size]
        page.copy_(data_page.reshape(page.shape))

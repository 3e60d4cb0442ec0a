"""A captured decode step's inputs, from what the host staged and from the tokens that the last step drew."""

from __future__ import annotations

import torch
from torch import Tensor


def feed(staged: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """token[b] = drawn[feedback[b]] where feedback[b] >= 0, else host[b].

    staged: [4, B] int32, rows host, feedback, position, slot. drawn: int64, tokens of the step before on the device.
    Returns token ids, positions and slots, [B] int64 each.
    """
    if staged.is_cuda:
        from diptych.kernels.triton.feed import feed as launch

        return launch(staged, drawn)
    return feed_reference(staged, drawn)


def feed_reference(staged: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    host, feedback, position, slot = staged.long().unbind()
    return torch.where(feedback >= 0, drawn[feedback.clamp(min=0)], host), position, slot

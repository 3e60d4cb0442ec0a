"""Checks of the small operators, for the interpreter's and the GPU's tests."""

from __future__ import annotations

import torch

from tests.kernels.triton_cases import close


def check_rms_norm(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    from diptych.kernels.rms_norm import rms_norm_reference
    from diptych.kernels.triton.rms_norm import rms_norm

    draw = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, width, generator=draw).half(), torch.randn(width, generator=draw).half()
    out = rms_norm(x.to(device, dtype), weight.to(device, dtype), 1e-5)
    exact = rms_norm_reference(x.double(), weight.double(), 1e-5)
    close(out, exact, rms_norm_reference(x.to(dtype), weight.to(dtype), 1e-5))


def check_silu_mul(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    from diptych.kernels.triton.silu_mul import silu_mul

    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1)).half()

    def reference(t: torch.Tensor) -> torch.Tensor:
        gate, up = t.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    close(silu_mul(x.to(device, dtype)), reference(x.double()), reference(x.to(dtype)))


def check_pack(first: int, count: int, first_head: int, heads: int, dtype: torch.dtype, device: str) -> None:
    from diptych.kernels.pack import pack_tokens
    from diptych.kernels.triton.pack import copy_tokens

    layers, blocks, page, all_heads, dim = 2, 7, 8, 3, 20
    data = torch.randn(layers, 2, blocks, all_heads, page, dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    table = [5, 0, 3, 1, 6]
    want = torch.empty(layers, 2, count, all_heads, dim, dtype=dtype)
    pack_tokens(data.transpose(3, 4).contiguous(), table, first, count, want)
    want = want[:, :, :, first_head : first_head + heads]
    pages = data.to(device).transpose(3, 4)
    slab = torch.full((layers, 2, count, heads, dim), float("nan"), dtype=dtype, device=device)
    copy_tokens(pages, table, first, count, slab, into_pages=False, first_head=first_head)
    assert torch.equal(slab.cpu(), want)
    other = torch.zeros_like(data).to(device).transpose(3, 4)
    copy_tokens(other, table, first, count, slab, into_pages=True, first_head=first_head)
    again = torch.empty_like(slab)
    copy_tokens(other, table, first, count, again, into_pages=False, first_head=first_head)
    assert torch.equal(again, slab)
    assert torch.count_nonzero(other).item() == torch.count_nonzero(slab).item()


def check_greedy(device: str) -> None:
    from diptych.kernels.triton.sampling import greedy

    x = torch.randn(3, 9001, generator=torch.Generator().manual_seed(3)).to(device)
    x[0, 17], x[0, 8999] = 50.0, 50.0
    x[1, 9000] = 60.0
    x[2] = float("-inf")
    x[2, 4096] = -3.0
    assert greedy(x).tolist() == [17, 9000, 4096]
    assert greedy(x).tolist() == [17, 9000, 4096]  # counters are back at zero


def check_feed(device: str) -> None:
    from diptych.kernels.feed import feed_reference
    from diptych.kernels.triton.feed import feed

    staged = torch.tensor([[7, 8, 9], [-1, 2, 0], [5, 6, 4], [50, 60, 40]], dtype=torch.int32)
    drawn = torch.tensor([100, 101, 102, 103])
    for ours, want in zip(feed(staged.to(device), drawn.to(device)), feed_reference(staged, drawn), strict=True):
        assert torch.equal(ours.cpu(), want)


def check_advance(device: str) -> None:
    from diptych.kernels.triton.sampling import advance

    ids = torch.tensor([11, 12, 13], device=device)
    tokens, positions, slots = (torch.full((3,), -1, dtype=torch.int64, device=device) for _ in range(3))
    contexts = torch.tensor([7, 8, 0], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 9], [2, 6], [0, 0]], dtype=torch.int32, device=device)
    advance(ids, tokens, positions, slots, contexts, table, page=8)
    assert tokens.tolist() == [11, 12, -1]
    assert positions.tolist() == [7, 8, -1]
    assert slots.tolist() == [4 * 8 + 7, 6 * 8, -1]
    assert contexts.tolist() == [8, 9, 0]


def check_sample(device: str, vocab: int = 700, rows: int = 24, block: int = 256) -> None:
    """Every filter, alone and together: the CPU's token, unless the draw falls within rounding of a border."""
    from diptych.kernels.sampling import SampleParams, sample
    from diptych.kernels.triton.sampling import sample as launch

    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, vocab, generator=draw) * 3
    logits[:, 5] = float("-inf")
    logits[0, 100:110] = 9.0  # equals at the border
    knobs = {
        "temperature": torch.rand(rows, generator=draw) + 0.3,
        "uniform": torch.rand(rows, generator=draw, dtype=torch.float64),
        "top_k": torch.randint(0, 30, (rows,), generator=draw),
        "top_p": torch.rand(rows, generator=draw).mul_(0.6).add_(0.4).where(torch.arange(rows) % 3 > 0, 1.0),
        "min_p": torch.rand(rows, generator=draw).mul_(0.1).where(torch.arange(rows) % 2 > 0, 0.0),
    }
    always, filters = ("temperature", "uniform"), ("top_k", "top_p", "min_p")
    for used in ((), *((f,) for f in filters), filters):
        chosen = {name: knobs[name] for name in (*always, *used)}
        want = sample(logits, SampleParams(**chosen))
        moved = SampleParams(**{name: value.to(device) for name, value in chosen.items()})
        got = launch(logits.to(device), moved, block).cpu()
        assert (got == want).float().mean() >= 1 - 1 / rows, used
        alone = SampleParams(**{name: value[3:4].to(device) for name, value in chosen.items()})
        assert launch(logits[3:4].to(device), alone, block).item() == got[3].item()


def check_moe(tokens: int, experts: int, top_k: int, dtype: torch.dtype, device: str) -> None:
    from diptych.kernels.moe import moe_reference
    from diptych.kernels.triton.moe import moe

    draw = torch.Generator().manual_seed(tokens)
    hidden, width = 48, 40
    shapes = ((tokens, hidden), (experts, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    tensors = [
        torch.randn(shape, generator=draw).mul_(s).half() for shape, s in zip(shapes, (1, 1, 0.2, 0.2), strict=True)
    ]
    out = moe(*(t.to(device, dtype) for t in tensors), top_k, True)
    if tokens:
        exact = moe_reference(*(t.double() for t in tensors), top_k, True)
        close(out, exact, moe_reference(*(t.to(dtype) for t in tensors), top_k, True), terms=width)

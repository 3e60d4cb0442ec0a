"""Who holds what, who sends what to whom, and which layouts are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.contract.errors import ConfigInvalid, TransferCorrupt
from diptych.contract.request import Key
from diptych.workers.cache import KVCache, KVLayout
from diptych.workers.parallel.layout import ExpertTable, Grid, ModelSizes, kv_share, padded_share, refuse_bad_layout
from diptych.workers.transfer.landing import Landing
from diptych.workers.transfer.plan import links, links_between, plan, routes, token_bytes

SIZES = [
    (8, 1, 1),
    (8, 1, 4),
    (8, 4, 1),
    (8, 2, 4),
    (8, 4, 8),
    (2, 1, 4),
    (2, 4, 1),
    (2, 4, 4),
    (2, 8, 2),
    (2, 2, 8),
    (6, 2, 3),
    (6, 3, 2),
    (1, 4, 4),
]


@pytest.mark.parametrize(("kv_heads", "sources", "targets"), SIZES)
def test_every_rank_gets_each_of_its_heads_once_from_a_rank_that_holds_it(
    kv_heads: int, sources: int, targets: int
) -> None:
    found = routes(kv_heads, sources, targets)
    assert len({(route.source, route.target) for route in found}) == len(found)
    for target in range(targets):
        own = [route for route in found if route.target == target]
        wanted = kv_share(kv_heads, target, targets)
        assert sorted(head for route in own for head in range(route.head, route.head_end)) == list(wanted)
        for route in own:
            held = kv_share(kv_heads, route.source, sources)
            assert held.start + route.from_head == route.head
            assert route.head_end <= held.stop
            assert wanted.start + route.to_head == route.head


def test_any_two_layouts_that_a_model_admits_can_be_joined() -> None:
    """So no pair of sizes needs refusing: what does not fit is refused for each group alone."""
    for kv_heads in range(1, 13):
        heads = 4 * kv_heads
        admitted = [ranks for ranks in range(1, 17) if _admits(ModelSizes(heads, kv_heads, 16 * heads), ranks)]
        assert len(admitted) > 1
        for sources in admitted:
            for targets in admitted:
                for target in range(targets):
                    found = [route for route in routes(kv_heads, sources, targets) if route.target == target]
                    came = sorted(head for route in found for head in range(route.head, route.head_end))
                    assert came == list(kv_share(kv_heads, target, targets)), (kv_heads, sources, targets)


def _admits(sizes: ModelSizes, ranks: int) -> bool:
    sizes = replace(sizes, width=sizes.width * ranks)
    try:
        refuse_bad_layout(sizes, Grid(1, ranks), False)
    except ConfigInvalid:
        return False
    return True


def test_ranks_that_hold_the_same_head_share_the_sending() -> None:
    assert [(route.source, route.target) for route in routes(2, 4, 4)] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_every_data_rank_is_linked_with_every_one_of_the_other_side() -> None:
    """Whichever two a sequence is at, each rank of decode's gets all of its heads from ranks of prefill's alone."""
    for sources, targets in [(Grid(2, 1), Grid(1, 1)), (Grid(1, 2), Grid(3, 1)), (Grid(2, 2), Grid(2, 4))]:
        found = list(links(8, sources, targets))
        assert len(set(found)) == len(found)
        parts = [
            list(links_between(8, sources, targets, source, target))
            for source in range(sources.data)
            for target in range(targets.data)
        ]
        assert [pair for part in parts for pair in part] == found
        right = [(route.source, route.target) for route in routes(8, sources.tensor, targets.tensor)]
        for part in parts:
            (source, _), (target, _) = sources.place(part[0][0]), targets.place(part[0][1])
            assert [(sources.place(a), targets.place(b)) for a, b in part] == [
                ((source, a), (target, b)) for a, b in right
            ]


def test_a_landing_takes_from_one_data_rank_only() -> None:
    cache = KVCache(1, 4, 4, 2, 8)
    own = [route for route in routes(2, 2, 1) if route.target == 0]
    landing = Landing(cache, Key("r"), "prefill", own, [1, 2], 0, 6)
    slab = torch.ones(1, 2, 3, 1, 8)
    assert landing.write(slab, (1, 0), 0, 3, (0, 1))
    assert landing.write(slab, (1, 1), 0, 3, (0, 1))
    with pytest.raises(TransferCorrupt, match="data rank 0 where the first came from 1"):
        landing.write(slab, (0, 0), 3, 3, (0, 1))
    assert cache.k[0][1, :3].eq(1).all()
    assert cache.k[0][1, 3].eq(0).all()


def test_pieces_of_some_heads_fill_messages() -> None:
    layout = KVLayout(layers=3, kv_heads=4, head_dim=8, block_size=16, dtype="float32")
    assert token_bytes(layout, 2) * 2 == layout.token_bytes
    pieces = plan(layout, 2, 5, 105, 10 * token_bytes(layout, 2))
    assert [piece.count for piece in pieces] == [10] * 10
    assert pieces[0].first == 5
    assert pieces[0].shape(layout, 2) == (3, 2, 10, 2, 8)


def test_a_vocabulary_that_nothing_divides_is_covered() -> None:
    shares = [padded_share(95, rank, 4) for rank in range(4)]
    assert {len(share) for share in shares} == {24}
    assert [word for share in shares for word in share][:95] == list(range(95))


def test_an_expert_table_holds_each_expert_once() -> None:
    for experts, ranks in [(8, 2), (8, 3), (60, 8), (4, 4)]:
        table = ExpertTable.even(experts, ranks)
        held = [table.held(rank) for rank in range(ranks)]
        assert sorted(expert for own in held for expert in own) == list(range(experts))
        assert max(map(len, held)) - min(map(len, held)) <= 1


@pytest.mark.parametrize(
    ("sizes", "grid", "spread", "numbers"),
    [
        (ModelSizes(9, 3, 1536), Grid(1, 2), False, ("2", "9")),
        (ModelSizes(12, 3, 96), Grid(1, 2), False, ("2", "3 KV heads")),
        (ModelSizes(8, 2, 81), Grid(1, 2), False, ("2", "81")),
        (ModelSizes(8, 8, 96, 4, 97), Grid(1, 2), False, ("2", "97")),
        (ModelSizes(8, 8, 96, 4, 97), Grid(1, 8), True, ("8", "4 experts")),
        (ModelSizes(8, 8, 96, 4, 97), Grid(4, 2), True, ("4 experts", "4 × 2 = 8 ranks")),
        (ModelSizes(9, 3, 1536), Grid(2, 2), False, ("Each data rank of", "2 ranks", "9")),
        (ModelSizes(8, 8, 96), Grid(1, 2), True, ("none",)),
    ],
)
def test_layouts_that_do_not_divide_are_refused(
    sizes: ModelSizes, grid: Grid, spread: bool, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        refuse_bad_layout(sizes, grid, spread, "decode-0")
    for number in ("decode-0", *numbers):
        assert number in str(refused.value)


def test_layouts_that_divide() -> None:
    for ranks in (1, 3, 9):
        refuse_bad_layout(ModelSizes(9, 3, 1539), Grid(1, ranks), False)
    refuse_bad_layout(ModelSizes(8, 2, 96, 6, 97), Grid(1, 4), True)

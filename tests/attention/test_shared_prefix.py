"""Shared beginnings: found from tables, read once when that pays, and equal to the plain path within a bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.attention import AttentionBatch
from pagedkv.attention.shared_prefix import Costs, Group, SharedPrefixes, find_groups, pays, seconds, share_prefixes
from tests.attention.cases import Shape, assert_within_limit, make_batch, make_case
from tests.attention.test_matrix import spec_for
from tests.attention.test_triton import FP16, FP32, HALVES, NATIVE, spec_on_device, to_device

PAGE = 64


def groups_of(rows: list[tuple[int, list[int]]], q_lens: list[int] | None = None) -> tuple[Group, ...]:
    """Return the groups of rows given as (kv_len, table)."""
    width = max(len(table) for _, table in rows)
    tables = np.array([table + [-1] * (width - len(table)) for _, table in rows], dtype=np.int32)
    kv_lens = np.array([kv_len for kv_len, _ in rows])
    return find_groups(tables, kv_lens, np.array(q_lens or [1] * len(rows)), PAGE)


def test_groups_by_example() -> None:
    """Whole units of 128 tokens, the newest token never, several groups, rows of one query only, no null page."""
    a, b = [5, 6, 7, 8, 9], [20, 21, 22, 23]
    assert groups_of([(300, a), (300, [5, 6, 7, 8, 10])]) == (Group((0, 1), 256),)
    assert groups_of([(257, a), (256, a)]) == (Group((0, 1), 128),)
    assert groups_of([(300, a), (300, [5, 6, 7, 11, 12])]) == (Group((0, 1), 128),)
    assert groups_of([(300, a), (300, [5, 11, 7, 8, 9])]) == ()
    assert groups_of([(300, a), (200, b), (300, a), (200, b)]) == (Group((0, 2), 256), Group((1, 3), 128))
    assert groups_of([(300, a), (300, a)], q_lens=[1, 2]) == ()
    assert groups_of([(300, [0, 0, 7, 8, 9]), (300, [0, 0, 7, 8, 9])]) == ()
    assert groups_of([(300, a)]) == ()


def test_a_deeper_group_is_taken_where_it_saves_more() -> None:
    """Two rows that share much beat three that share little; three that share much beat two."""
    long = list(range(1, 41))
    pair = [(40 * PAGE, long), (40 * PAGE, long)]
    assert groups_of([*pair, (40 * PAGE, [1, 2, *range(50, 88)])]) == (Group((0, 1), 38 * PAGE),)
    assert groups_of([*pair, (40 * PAGE, [*range(1, 31), *range(50, 60)])]) == (Group((0, 1, 2), 30 * PAGE),)


@given(
    st.lists(
        st.tuples(st.integers(0, 700), st.lists(st.sampled_from([1, 2]), min_size=11, max_size=11)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=150)
def test_groups_are_what_they_say(rows: list[tuple[int, list[int]]]) -> None:
    """Groups are disjoint, their rows really share their length, and no single group of all such rows saves more."""
    found = groups_of(rows)
    taken = [row for group in found for row in group.rows]

    assert len(taken) == len(set(taken))
    for group in found:
        pages = group.length // PAGE
        assert len(group.rows) > 1
        assert group.length > 0 == group.length % 128
        assert len({tuple(rows[row][1][:pages]) for row in group.rows}) == 1
        assert all(group.length < rows[row][0] for row in group.rows)
    saved = sum((len(group.rows) - 1) * group.length for group in found)
    for units in range(1, 6):
        sharers: dict[tuple[int, ...], int] = {}
        for kv_len, table in rows:
            if kv_len > units * 128:
                start = tuple(table[: units * 2])
                sharers[start] = sharers.get(start, 0) + 1
        assert saved >= sum((count - 1) * units * 128 for count in sharers.values())


ROWS = [(1, 700), (1, 690), (1, 300), (2, 500), (1, 0)]


@pytest.mark.parametrize(
    ("dtype", "feature", "kv_dtype"),
    [(FP32, "plain", None), (HALVES[-1], "sink logits", None), (FP16, "softcap", torch.int8), (FP32, "alibi", None)],
)
def test_cascade_equals_the_reference_within_the_plain_paths_limit(
    dtype: torch.dtype, feature: str, kv_dtype: torch.dtype | None
) -> None:
    """Rows that share 640 and 256 tokens, one that shares but brings two queries, an empty one: as exact as without."""
    shape = Shape([(1, 704)], heads=(6, 2), dims=(32, 48), dtype=dtype, kv_dtype=kv_dtype)
    case = make_case(shape)
    table = case.batch.block_tables[0, :44].tolist()
    tables = [table, [*table[:40], *table[41:44], table[40]], table[:19], table[:32], []]
    q = torch.randn(6, 6, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    shared = to_device(case.with_batch(make_batch(ROWS, tables), q=q))
    found = share_prefixes(
        shared.batch, 16, mode="always", tables=np.array([t + [0] * (44 - len(t)) for t in tables], dtype=np.int32),
        kv_lens=np.array([kv for _, kv in ROWS]), q_lens=np.array([q for q, _ in ROWS]),
    )  # fmt: skip
    plain = to_device(case.with_batch(make_batch(ROWS, tables), q=q)).run(spec_on_device(feature, 6), "triton").cpu()
    out = shared.run(spec_on_device(feature, 6), "triton").cpu()

    assert found is not None
    assert found.groups == (Group((0, 1), 640),)
    assert not torch.equal(out, plain)
    operands = None if dtype == FP32 else dtype
    assert_within_limit(case.with_batch(make_batch(ROWS, tables), q=q), spec_for(feature, 6), out, operands=operands)


def test_many_members_and_two_groups() -> None:
    """Members of more than one tile of queries, and a second group, each read through its own table."""
    case = make_case(Shape([(1, 200), (1, 330)], heads=(8, 1), dims=(16, 16), page_size=64))
    tables = [case.batch.block_tables[0, :4].tolist(), case.batch.block_tables[1, :6].tolist()]
    rows = [(1, 200 - i) for i in range(11)] + [(1, 330 - i) for i in range(2)]
    many = [tables[0]] * 11 + [tables[1]] * 2
    q = torch.randn(13, 8, 16, generator=torch.Generator().manual_seed(3))
    plain = case.with_batch(make_batch(rows, many), q=q)
    batch = make_batch(rows, many)
    found = share_prefixes(batch, 64, mode="always")
    shared = to_device(case.with_batch(batch, q=q)) if not NATIVE else case.with_batch(batch, q=q)
    if NATIVE:
        shared = to_device(shared)
        share_prefixes(
            shared.batch, 64, mode="always", tables=batch.block_tables.numpy(), kv_lens=batch.kv_lens.numpy(),
            q_lens=np.diff(batch.cu_q_lens.numpy()),
        )  # fmt: skip
    else:
        share_prefixes(shared.batch, 64, mode="always")

    assert found is not None
    assert [group.length for group in found.groups] == [128, 256]
    assert_within_limit(plain, spec_for("plain", 8), shared.run(spec_for("plain", 8), "triton").cpu())


def test_switches_and_bad_input() -> None:
    """Never forgets what was found; an unknown mode, and tables that are on a device only, are refused."""
    table = list(range(1, 6))
    batch = make_batch([(1, 300), (1, 300)], [table, table])
    assert share_prefixes(batch, PAGE) is not None
    assert share_prefixes(batch, PAGE, mode="never") is None
    assert batch.prepared == {}
    with pytest.raises(ValueError, match=r"mode must be one of .*'auto', 'always', 'never'.*got 'on'"):
        share_prefixes(batch, PAGE, mode="on")  # type: ignore[arg-type]
    lens = [torch.zeros(n, dtype=torch.int32, device="meta") for n in (2, 3)]
    distant = AttentionBatch(torch.zeros(2, 5, dtype=torch.int32, device="meta"), lens[0], lens[1], 1, 300)
    with pytest.raises(ValueError, match="tables, kv_lens and q_lens must be given for a batch on a device"):
        share_prefixes(distant, PAGE)


LLAMA_8B: dict[str, Any] = {"token_bytes": 2 * 8 * 256, "partial_bytes": 4 * 32 * 129, "num_kv_heads": 8}


@pytest.mark.parametrize(
    ("rows", "length", "wanted"),
    [(2, 512, False), (4, 2048, False), (32, 128, False), (64, 8192, True), (256, 4096, True), (8, 65536, True)],
)
def test_the_estimate_asks_for_enough(rows: int, length: int, wanted: bool) -> None:
    """Few rows or few tokens are not worth a launch; many long ones are (32/8 heads of 128, bf16)."""
    shared = SharedPrefixes((Group(tuple(range(rows)), length),), torch.zeros(0), "auto")

    assert pays(shared, **LLAMA_8B) is wanted


def test_the_estimate_is_monotone() -> None:
    """More rows on the same length never make cascading look worse."""
    for length in (512, 4096, 65536):
        gains = []
        for rows in range(2, 257, 2):
            by_row, once = seconds([Group(tuple(range(rows)), length)], costs=Costs(), **LLAMA_8B)
            gains.append(by_row - once)
        steps = np.diff(gains)
        assert (steps >= -1e-12).all() or (steps <= 1e-12).all()

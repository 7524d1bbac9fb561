import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.planning.head_groups import head_groups

STRIDED = sl.Causal() & (sl.Window(32) | sl.Strided(16))
SIZES = {"fwd_params": sl.FwdParams(q_blocksize=32, kv_blocksize=32), "implementation": "xla"}


def chains(*masks):
    return sl.make_plan(list(masks), 256, **SIZES).chains


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    ("masks", "merged"),
    [
        ([STRIDED], 1),
        ([sl.Causal(), sl.Causal() & sl.Window(40), sl.Full()], 1),
        ([sl.Causal(), sl.Strided(16)], 2),
        ([sl.Causal(), sl.Empty()], 2),
        ([sl.Empty(), sl.Causal() & ~sl.Causal()], 1),
    ],
    ids=["chain", "masks", "orders", "empty", "all_empty"],
)
def test_every_head_takes_its_own_chain_once(masks, merged, merge):
    """Heads are grouped by the formula of the op: head h has mask h % C, whichever group and turn that is."""
    plan, heads = chains(*masks), 4 * len(masks)
    groups = head_groups(plan, merge=merge)
    assert len(groups) == (merged if merge else len(masks))
    numbers, found = np.arange(heads)[None, None], {}
    for group in groups:
        for i, head in enumerate(group.select(numbers).ravel()):
            assert head not in found
            found[head] = tuple(turns[i % len(turns)] for turns in group.passes)
    assert found == {head: plan[head % len(masks)] for head in range(heads)}


def test_groups_follow_each_other_by_their_first_heads():
    groups = head_groups(chains(sl.Causal(), sl.Strided(16), sl.Full()), merge=True)
    assert [(group.first, group.step) for group in groups] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("merge", [False, True])
def test_blocks_known_at_run_time_have_no_planned_passes(merge):
    groups = head_groups([(None,)] * 2, merge=merge)
    assert [(group.first, group.step) for group in groups] == ([(0, 1)] if merge else [(0, 2), (1, 2)])
    assert all(group.passes == ((),) for group in groups)


def test_a_group_selects_its_heads_along_any_axis():
    x = np.arange(24).reshape(2, 3, 4)
    _, second = head_groups(chains(sl.Causal(), sl.Strided(16)), merge=False)
    np.testing.assert_array_equal(second.select(x), x[:, :, 1::2])
    np.testing.assert_array_equal(second.select(x, 0), x[1::2])

import xml.etree.ElementTree

import numpy as np

import sparse_layers as sl


def test_kept_blocks_are_those_of_the_mask():
    for mask in (sl.preset("sparse_transformer_strided", stride=16), sl.Array(np.eye(300, dtype=bool)), sl.Empty()):
        params = sl.FwdParams(q_blocksize=16, kv_blocksize=32)
        for block_pass in sl.make_plan(mask, 300, fwd_params=params, implementation="pallas_tpu").chains[0]:
            rows, columns = block_pass.padded((16, 32))
            tiles = block_pass.mask.dense(rows, columns).reshape(rows // 16, 16, columns // 32, 32)
            expected = np.add(tiles.any((1, 3)), tiles.all((1, 3)), dtype=int)
            actual = np.zeros_like(expected)
            row, column, state = block_pass.active_blocks()
            actual[row, column] = state
            np.testing.assert_array_equal(actual, expected)


def test_a_plan_in_a_notebook():
    mask = sl.preset("sparse_transformer_strided")
    plan = sl.make_plan(mask, 4096)
    html = plan._repr_html_()
    table = xml.etree.ElementTree.fromstring(html.replace("<br>", "<br/>"))
    assert "".join(table.find("caption").itertext()) == "Plan of 4096 queries and 4096 keys"
    title, *passes = table.findall("tr")
    assert repr(mask) in "".join(title.itertext()) and f"{plan.saving(0, True)}" in "".join(title.itertext())
    assert [[cell.text for cell in line][:3] for line in passes] == [
        [f"pass {number}", str(block_pass.q_order), f"{block_pass.fwd_blocks} of 1024 blocks of 128 x 128"]
        for number, block_pass in enumerate(plan.chains[0], 1)
    ]
    assert all(line.find("td/svg") is not None for line in passes)


def test_what_a_notebook_shows_is_escaped_and_bounded():
    class Hostile(sl.Window):
        def __repr__(self):
            return "<script>" + "x" * 1000

    # Blocks that differ all over the grid, and more masks than are worth a look.
    masks = [Hostile(left) & sl.Random(1, left) for left in range(1, 21)]
    html = sl.make_plan(masks, 2048, fwd_params=sl.FwdParams(q_blocksize=8, kv_blocksize=8))._repr_html_()
    assert "&lt;script&gt;xxx" in html and "<script" not in html
    assert "and 12 masks more" in html and html.count("<svg") == 8 and len(html) < 200_000

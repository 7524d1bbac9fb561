import dataclasses
import pathlib
import subprocess
import sys

import pytest

import sparse_layers as sl

KINDS = [sl.FwdParams, sl.BwdParams]
# Field: lowest and highest value, some in between, and some that break the rule.
RANGES = {
    "q_blocksize": (8, 8192, [24, 128], [12, 100]),
    "kv_blocksize": (8, 8192, [40, 512], [9, 129]),
    "blocksize_m": (16, 256, [64], [24, 96]),
    "blocksize_n": (32, 128, [64], [48]),
    "blocksize_k": (16, 512, [32], [33]),
    "blocksize_heads": (1, 256, [2, 8], [3]),
    "blocksize_keys": (16, 1 << 20, [4096], [5000]),
    "num_key_splits": (1, 256, [3, 7], []),
    "num_warps": (1, 16, [4], [3, 12]),
    "num_stages": (1, 8, [3, 5], []),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fields(kind):
    more = {"deterministic"} if kind is sl.BwdParams else set()
    assert {field.name for field in dataclasses.fields(kind)} == RANGES.keys() | more
    assert all(value is None for value in dataclasses.astuple(kind())[: len(RANGES)])
    assert not any(getattr(kind(), name) for name in more)


@pytest.mark.parametrize("field", RANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_ranges(kind, field):
    low, high, good, bad = RANGES[field]
    for value in (None, low, high, *good):
        assert getattr(kind(**{field: value}), field) == value
    outside = [0, -low, low - 1, high + 1, 2 * high, *bad]
    for value in (*outside, float(low), True, str(low), (low,)):
        with pytest.raises(ValueError) as error:
            kind(**{field: value})
        for word in (kind.__name__, field, f"from {low} to {high}", repr(value)):
            assert word in str(error.value)


def test_frozen_hashable_values():
    params = sl.FwdParams(q_blocksize=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.q_blocksize = 128  # pyright: ignore
    assert params == sl.FwdParams(q_blocksize=64) and hash(params) == hash(sl.FwdParams(q_blocksize=64))
    assert params != sl.FwdParams(kv_blocksize=64) and params != sl.BwdParams(q_blocksize=64)
    with pytest.raises(ValueError, match="q_blocksize"):
        dataclasses.replace(params, q_blocksize=65)


def test_no_two_settings_share_a_hash():
    settings = [*(kind() for kind in KINDS), sl.BwdParams(deterministic=True)]
    settings += [
        kind(**{f: v}) for kind in KINDS for f, (low, high, good, _) in RANGES.items() for v in (low, high, *good)
    ]
    settings += [sl.FwdParams(q_blocksize=a, kv_blocksize=b) for a in (8, 16, 64) for b in (8, 16, 64)]
    assert len(set(settings)) == len(settings) == len({x.content_hash() for x in settings})


def test_hashes_are_stable():
    # Tuned tables are stored under these: a change here orphans them.
    bwd = "eb595c278625843c9f0ba5dc8d81d7708ca2e4a4f65230825b8c0094aac84ebd"
    expected = "0a16868650984a53035a1721be6ffdbb6f2d211b3be54519be9add54ed4a4015"
    params = sl.FwdParams(q_blocksize=64, num_warps=4)
    assert params.content_hash() == expected
    assert sl.FwdParams(num_warps=4, q_blocksize=64).content_hash() == expected
    code = "import sparse_layers as sl; print(sl.FwdParams(q_blocksize=64, num_warps=4).content_hash())"
    root = pathlib.Path(__file__).parents[3]
    assert sl.BwdParams(num_warps=4).content_hash() == bwd
    other = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == expected


def test_hashes_name_class_and_fields():
    assert sl.FwdParams().content_hash() != sl.BwdParams().content_hash()
    assert sl.FwdParams(q_blocksize=64).content_hash() != sl.FwdParams(kv_blocksize=64).content_hash()

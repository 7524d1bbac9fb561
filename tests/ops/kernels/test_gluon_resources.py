"""The scan of machine code of Gluon kernels: sound code passes, and each planted fault is found. No GPU is needed."""

# Types of Triton are those of the host, not those inside of kernels.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

import functools
import itertools
import re

import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from benchmarks.gluon_resources import hazards, overlap, resources
from sparse_layers.ops.kernels.gpu import bridge


@gluon.jit
def _products(x, out, n, HOW: gl.constexpr):
    """Two products a step, as in attention: one of two tiles in shared memory, and one whose left side it gave before.

    HOW: "together" has both in flight at once, "apart" waits between them, "branch" waits for a barrier before it waits
    for them, and "early" adds to the second before the wait for it.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LEFT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LEFT))
    left = gl.load(x + row[:, None] * 64 + column[None, :])
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, 2), left)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    zeros = gl.zeros([64, 64], gl.float32, ACC)
    acc = zeros
    for i in range(n):
        scores = warpgroup_mma(tile, tile, zeros, use_acc=False, is_async=True)
        if HOW == "apart":
            scores = warpgroup_mma_wait(0, deps=[scores])
        acc = warpgroup_mma(left, tile, acc, is_async=True)
        if HOW == "branch":
            mbarrier.wait(ready, i & 1)
        if HOW != "apart":
            scores = warpgroup_mma_wait(1, deps=[scores])
        if HOW == "early":
            acc = warpgroup_mma_wait(1, deps=[acc])
            acc = acc + 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        left = gl.convert_layout((scores + i).to(gl.bfloat16), LEFT)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, ACC))
    gl.store(out + row[:, None] * 64 + column[None, :], acc)


@functools.cache
def _compiled_products(how, maxnreg=None):
    options = ("num_warps", 4), ("maxnreg", maxnreg)
    kernel = bridge.compiled(_products, ("*bf16", "*fp32", "i32"), (("HOW", how),), 90, options)
    return kernel, resources(kernel.ptx)


def test_sound_kernel_has_no_hazards():
    kernel, found = _compiled_products("together")
    assert (kernel.num_warps, found.products) == (4, 8)
    assert kernel.shared >= 2 * 64 * 64 + 8
    assert 64 <= found.registers <= 255
    assert (found.stack, found.spill_stores, found.spill_loads, found.local_stores, found.local_loads) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert not found.warnings
    assert hazards(found.sass) == []


def test_overlap_tells_products_in_flight_at_once():
    assert overlap(_compiled_products("together")[1].sass) == [("4 ss", "4 rs", "wait 1", "wait 0")]
    assert overlap(_compiled_products("apart")[1].sass) == [("4 ss", "wait 0", "4 rs", "wait 0")]


def test_branch_before_the_wait_is_found():
    found = hazards(_compiled_products("branch")[1].sass)
    assert found
    assert all("ends a basic block before the wait" in one.reason and "BRA" in one.instruction for one in found)


def test_serialised_products_are_found():
    found = _compiled_products("early")[1]
    assert len(found.warnings) == 1
    assert "serialized" in found.warnings[0]
    assert all("wait 1" not in loop for loop in overlap(found.sass))


def test_spills_are_found():
    found = _compiled_products("together", 64)[1]
    assert found.registers <= 64
    assert min(found.stack, found.spill_stores, found.spill_loads, found.local_stores, found.local_loads) > 0


def test_overwritten_left_side_is_found_in_the_code_of_a_kernel():
    """ptxas is not known to do this to so small a kernel, so the code is changed: the left side is written at once."""
    lines = _compiled_products("together")[1].sass.splitlines()
    products = [
        (i, match) for i, line in enumerate(lines) if (match := re.search(r"HGMMA\S* R\d+, (R\d+), gdesc", line))
    ]
    (_, first), (last, _) = products[0], products[-1]
    lines.insert(last + 1, f"        /*ffff*/                   MOV {first[1]}, RZ ;")
    found = hazards("\n".join(lines))
    assert [(one.line, one.instruction) for one in found] == [(last + 2, f"MOV {first[1]}, RZ")]
    assert "writes the left side" in found[0].reason


@pytest.mark.parametrize(
    ("sass", "complaint"),
    [
        ("", "no instruction in 0"),
        (".version 9.4\nbar.sync 0;", "no instruction in"),
        ("/*0000*/ 0x7918", "line 1: /.0000"),
    ],
)
def test_other_text_is_no_sound_code(sass, complaint):
    for function in hazards, overlap:
        with pytest.raises(ValueError, match=f"sass must be what nvdisasm -c writes, got {complaint}"):
            function(sass)


def _sass(*lines):
    """Lines as nvdisasm writes them; those with a colon are labels."""
    number = itertools.count()
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * next(number):04x}*/                   {line} ;"
        for line in lines
    )


# S = Q K^T in R24 to R55, and O += P V in R56 to R87 with P in R4 to R11.
SCORES = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0"
FIRST = "HGMMA.64x64x16.F32.BF16 R56, R4, gdesc[UR12].tnspB, R56"
SECOND = "HGMMA.64x64x16.F32.BF16 R56, R8, gdesc[UR16].tnspB, R56, gsb0"
WAITS = [f"WARPGROUP.DEPBAR.LE gsb0, 0x{n}" for n in range(2)]
STEP = [".L_x_0:", "WARPGROUP.ARRIVE", SCORES, FIRST, SECOND, WAITS[1], "FADD R0, R24, R25", WAITS[0], "MOV R4, R56"]
AT = {"scores": 3, "first": 4, "second": 5, "one": 6, "none": 8}
LEFT, READ, WRITTEN = "writes the left side", "reads accumulators", "writes accumulators"


def test_sound_code_passes():
    assert hazards(_sass(*STEP, "@P0 BRA `(.L_x_0)", "EXIT")) == []
    assert overlap(_sass(*STEP, "@P0 BRA `(.L_x_0)", "EXIT")) == [("1 ss", "2 rs", "wait 1", "wait 0")]


@pytest.mark.parametrize(
    ("after", "instruction", "reasons"),
    [
        # P of the first part may be written until it is issued, and again after the wait.
        ("scores", "F2FP.BF16.F32.PACK_AB R4, R1, R2", []),
        ("first", "F2FP.BF16.F32.PACK_AB R4, R1, R2", [f"{LEFT} R4"]),
        ("first", "F2FP.BF16.F32.PACK_AB R8, R1, R2", []),
        ("second", "F2FP.BF16.F32.PACK_AB R11, R1, R2", [f"{LEFT} R11"]),
        ("one", "F2FP.BF16.F32.PACK_AB R12, R1, R2", []),
        ("one", "@P1 MOV R7, 0x1", [f"{LEFT} R7"]),
        ("none", "F2FP.BF16.F32.PACK_AB R11, R1, R2", []),
        # Results of several registers.
        ("one", "LDS.128 R0, [R20+0x10]", []),
        ("one", "LDS.128 R1, [R20+0x10]", [f"{LEFT} R4"]),
        ("one", "LDL.64 R2, [R1]", []),
        ("one", "LDSM.16.M88.4 R1, [R20]", [f"{LEFT} R4"]),
        ("one", "CS2R R3, SRZ", [f"{LEFT} R4"]),
        ("one", "CS2R.32 R3, SR_CLOCKLO", []),
        ("one", "IMAD.WIDE R2, R0, 0x4, R12", []),
        ("one", "IMAD.WIDE.U32 R3, R0, 0x4, R12", [f"{LEFT} R4"]),
        # A predicate is the first result of some.
        ("one", "SHFL.BFLY PT, R9, R0, 0x1, 0x1f", [f"{LEFT} R9"]),
        ("one", "ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], R0", [f"{LEFT} R5"]),
        # Reading the left side does no harm.
        ("one", "ISETP.GE.AND P0, PT, R4, R5, PT", []),
        ("one", "STS.128 [R8], R4", []),
        ("one", "BAR.SYNC.DEFER_BLOCKING R4, 0x80", []),
        ("one", "@P0 BAR.ARV 0xc, 0x40", []),
        # Accumulators.
        ("second", "FADD R0, R1, -R24.reuse", [f"{READ} R24"]),
        ("one", "FADD R0, R1, -R24.reuse", []),
        ("one", "FMUL R0, |R87|, R1", [f"{READ} R87"]),
        ("one", "FMUL R0, R88, R1", []),
        ("none", "FMUL R0, R87, R1", []),
        ("one", "FMUL R56, R0, R1", [f"{WRITTEN} R56"]),
        ("one", "FMUL R56, R56, R1", [f"{WRITTEN} R56", f"{READ} R56"]),
        ("second", "STS.128 [R0], R20", []),
        ("second", "STS.128 [R0], R21", [f"{READ} R24"]),
        ("second", "STSM.16.MT88.4 [R0], R21", [f"{READ} R24"]),
        ("second", "STG.E desc[UR4][R22.64], R0", []),
        ("second", "STG.E desc[UR4][R23.64], R0", [f"{READ} R24"]),
        ("second", "IMAD.WIDE R2, R0, R1, R22", []),
        ("second", "IMAD.WIDE R2, R0, R1, R23", [f"{READ} R24"]),
        # Products: those that add to the same accumulators take turns.
        ("one", FIRST.replace("R4", "R12"), []),
        ("one", "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88", []),
        ("one", "HGMMA.64x64x16.F32.BF16 R88, R84, gdesc[UR8].tnspB, R88", [f"{READ} R84"]),
        ("one", "HGMMA.64x16x16.F32.BF16 R8, gdesc[UR8], RZ, !UPT", [f"{LEFT} R8"]),
        ("one", "HGMMA.64x16x16.F16 R12, gdesc[UR8], RZ, !UPT", []),
        ("one", "HGMMA.64x8x16.F16 R54, gdesc[UR8], RZ, !UPT", []),
        ("one", "HGMMA.64x8x16.F32 R54, gdesc[UR8], RZ, !UPT", [f"{WRITTEN} R56"]),
        # Control flow.
        ("scores", "@!P0 BRA `(.L_x_0)", []),
        ("one", "@!P0 BRA `(.L_x_9)", ["ends a basic block"]),
        ("one", "BSSY B0, `(.L_x_9)", ["ends a basic block"]),
        ("one", "CALL.REL.NOINC `(.L_x_9)", ["ends a basic block"]),
        ("none", "@!P0 BRA `(.L_x_9)", []),
    ],
)
def test_planted_instruction(after, instruction, reasons):
    lines = [*STEP[: AT[after]], instruction, *STEP[AT[after] :], "EXIT", ".L_x_9:", "EXIT"]
    found = [one for one in hazards(_sass(*lines)) if one.line == AT[after] + 1]
    assert [one.instruction for one in found] == [instruction] * len(found)
    products = {one.reason for one in found}
    for reason in reasons:
        assert any(one.startswith(reason) for one in products), (reason, products)
    assert len({one.split(" of the product")[0].split(" before")[0] for one in products}) == len(reasons)


def test_products_are_followed_around_a_loop():
    """The accumulators are read at the top of a loop whose end leaves them in flight."""
    lines = [".L_x_0:", "FADD R0, R24, R25", SCORES, "@P0 BRA `(.L_x_0)", WAITS[0], "EXIT"]
    assert [(one.line, one.reason) for one in hazards(_sass(*lines))] == [(2, f"{READ} R24 of the product of line 3")]
    lines[3:4] = [WAITS[0], lines[3]]
    assert hazards(_sass(*lines)) == []


@pytest.mark.parametrize("target", [".L_x_0", ".L_x_1"])
def test_a_wait_counts_the_fewest_products_of_all_ways(target):
    """A wait for all but one covers the scores only if the product after them is always issued."""
    other = "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0"
    end = [other, ".L_x_0:", WAITS[1], "FADD R0, R24, R25", WAITS[0], "EXIT", ".L_x_1:", "BRA `(.L_x_0)"]
    found = hazards(_sass(SCORES, f"@P0 BRA `({target})", *end))
    assert [one.instruction for one in found] == ["FADD R0, R24, R25"]
    assert hazards(_sass(SCORES, *end)) == []


def test_a_product_that_goes_on_is_not_waited_for():
    lines = [SCORES.removesuffix(", gsb0"), WAITS[0], "FADD R0, R24, R25", "EXIT"]
    assert [one.line for one in hazards(_sass(*lines))] == [3]


def test_entry_of_a_loop_before_the_wait_is_found():
    lines = [FIRST, SECOND, ".L_x_0:", WAITS[0], "@P0 BRA `(.L_x_0)", "EXIT"]
    assert {(one.line, one.reason.split(" before")[0]) for one in hazards(_sass(*lines))} == {
        (4, "begins a basic block")
    }


def test_targets_of_an_indexed_branch_are_followed():
    branch = 'BRX R2 -0x1a0    (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'
    lines = [SCORES, branch, ".L_x_0:", "EXIT", ".L_x_1:", "FADD R0, R24, R25", "EXIT"]
    assert [one.line for one in hazards(_sass(*lines))] == [6]


def test_overlap_is_that_of_innermost_loops():
    """A wait that repeats at the end of the code jumps back into a loop, and is none itself."""
    retry = [".L_x_2:", "@!P1 BRA `(.L_x_2)", "BRA `(.L_x_1)"]
    inner = [".L_x_0:", "@!P1 BRA `(.L_x_2)", ".L_x_1:", SCORES, WAITS[0], "@P0 BRA `(.L_x_0)"]
    lines = [".L_x_3:", FIRST, SECOND, WAITS[0], *inner, "@P2 BRA `(.L_x_3)", "EXIT", *retry]
    assert overlap(_sass(*lines)) == [("1 ss", "wait 0")]
    assert hazards(_sass(*lines)) == []

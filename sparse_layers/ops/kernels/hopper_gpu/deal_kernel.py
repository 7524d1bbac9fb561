"""Items of work whose lengths are known at run time only, dealt to programs: see `schedule.dealt`. In plain Triton."""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import NamedTuple

import triton
import triton.language as tl


class Deal(NamedTuple):
    """What the kernel knows of its arrays."""

    ROUNDS: int
    PROGRAMS: int
    WIDTH: int  # PROGRAMS, rounded up to a power of two


@triton.jit
def deal_kernel(
    items,  # int32 [ROUNDS, PROGRAMS], in each round the longest first
    costs,  # int32, of each of them
    found,  # int32 [ROUNDS, PROGRAMS]: the items of each program
    D: tl.constexpr,
):
    """One program deals all: in each round the longest item goes to the program that has had least."""
    own = tl.arange(0, D.WIDTH)
    exists, had = own < D.PROGRAMS, own * 0
    for start in tl.range(0, D.ROUNDS * D.PROGRAMS, D.PROGRAMS):
        less = (had[None, :] < had[:, None]) | ((had[None, :] == had[:, None]) & (own[None, :] < own[:, None]))
        place = start + tl.sum((less & exists[None, :]).to(tl.int32), 1)
        tl.store(found + start + own, tl.load(items + place, mask=exists, other=0), mask=exists)
        had += tl.load(costs + place, mask=exists, other=0)

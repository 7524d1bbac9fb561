"""Gluon kernels for Hopper without a GPU: the machine code that they become, and whether it is sound.

Needs triton, which compiles Gluon to PTX and brings ptxas and nvdisasm. Nothing runs, so there are no times.

    kernel = bridge.compile_kernel(forward, ("*bf16", "i32"), {"D": 128}, 90, {"num_warps": 4})
    found = resources(kernel.asm["ptx"])
    assert found.spill_stores == 0 and not found.warnings and not hazards(found.sass)

A wgmma, HGMMA in SASS, runs on while the instructions after it are executed. It reads its left side from shared memory
or from registers, and adds to accumulators in registers, until a wait that covers it. ptxas has to keep other
instructions off those registers, and does not always: `hazards` looks.

How SASS tells what is in flight: HGMMAs up to one with ``gsb0`` are one group, here called a product, and
``WARPGROUP.DEPBAR.LE gsb0, N`` waits until N products at most are in flight.
"""

import dataclasses
import functools
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas


@dataclasses.dataclass(frozen=True)
class Resources:
    """The registers, memory and products of a kernel that ptxas assembled.

    Attributes:
      registers: registers of a thread at entry, before partitions take or give some.
      stack: bytes of local memory of a thread.
      spill_stores, spill_loads: bytes that a thread writes to local memory for want of registers, and reads back.
      warnings: what ptxas says about wgmma: that it waits for each product, mostly.
      products: HGMMA instructions.
      local_stores, local_loads: instructions, STL and LDL.
      seconds: of ptxas.
      sass: the machine code, for `hazards` and `overlap`.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    warnings: tuple[str, ...]
    products: int
    local_stores: int
    local_loads: int
    seconds: float
    sass: str = dataclasses.field(repr=False)


class Hazard(NamedTuple):
    """An instruction that may meet a product in flight.

    Attributes:
      line: of the SASS, from 1.
      instruction: its text.
      reason: what is wrong with it.
    """

    line: int
    instruction: str
    reason: str


def resources(ptx: str) -> Resources:
    """Returns the resources of PTX, assembled for its target by Triton's ptxas without the options that Triton adds."""
    ((arch, number),) = re.findall(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        start = time.perf_counter()
        log = _output(get_ptxas(int(number)).path, "-v", f"-arch={arch}", source, "-o", cubin)
        seconds = time.perf_counter() - start
        sass = _output(knobs.nvidia.nvdisasm.path, "-c", cubin)
    pattern = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    stack, stores, loads, registers = map(int, re.findall(pattern, log, re.DOTALL)[-1])
    warnings = tuple(line for line in log.splitlines() if re.search(r"\(C75\d\d\)|wgmma|serializ", line))
    products, local_stores, local_loads = (len(re.findall(rf"\b{name}\b", sass)) for name in ("HGMMA", "STL", "LDL"))
    spills = registers, stack, stores, loads
    return Resources(*spills, warnings, products, local_stores, local_loads, seconds, sass)


def hazards(sass: str) -> list[Hazard]:
    """The instructions that may meet a product in flight; none if the code is sound.

    While a product is in flight, no other instruction may read or write its accumulators, but for products that add to
    the same ones, which take turns. If it reads its left side from registers, nothing may write those, and the basic
    block may not end: ptxas then reuses those registers without a warning.

    Args:
      sass: as ``nvdisasm -c`` writes it.

    Raises:
      ValueError: if that is not SASS, or has a line that cannot be read.
    """
    code, labels = _parsed(sass)
    joins = {labels[name] for one in code for name in one.targets}
    hazards_in_order = []
    for i, (one, ages) in enumerate(zip(code, _in_flight(code, labels), strict=True)):
        for product in (code[j] for j in sorted(ages)):
            busy = product.accumulators if one.accumulators != product.accumulators else frozenset()
            reasons = {
                "writes the left side": one.writes & product.left,
                "writes accumulators": one.writes & busy,
                "reads accumulators": one.reads & busy,
            }
            hazards_in_order += [
                Hazard(one.line, one.text, f"{reason} R{min(common)} of the product of line {product.line}")
                for reason, common in reasons.items()
                if common
            ]
        left = [code[j].line for j in sorted(ages) if code[j].left]
        if left and (one.leaves or (i in joins and not code[i - 1].leaves)):
            reason = "ends a basic block" if one.leaves else "begins a basic block"
            hazards_in_order.append(
                Hazard(one.line, one.text, f"{reason} before the wait for the product of line {left[-1]}")
            )
    return hazards_in_order


def overlap(sass: str) -> list[tuple[str, ...]]:
    """Returns the products and waits of each innermost loop that has products, in the order of the code.

    A product is the number of its HGMMAs and where its left side is, in shared memory (ss) or registers (rs); a wait is
    the number of products that may still be in flight. ``("8 ss", "8 rs", "wait 1", "wait 0")`` has two products in
    flight at once; with a ``"wait 0"`` between them each would wait for the one before.

    Args:
      sass: as ``nvdisasm -c`` writes it.

    Raises:
      ValueError: if that is not SASS, or has a line that cannot be read.
    """
    code, labels = _parsed(sass)
    # A conditional jump backwards is a loop. Waits that repeat far from their code jump back to it unconditionally.
    jumps = {(labels[name], i) for i, one in enumerate(code) if not one.ends for name in one.targets}
    loops = {(first, last) for first, last in jumps if any(one.accumulators for one in code[first:last])}
    inner = {loop for loop in loops if not any(loop[0] <= a and b <= loop[1] for a, b in loops - {loop})}
    return [tuple(_events(code[first:last])) for first, last in sorted(inner)]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """A line of SASS.

    Attributes:
      line: of the text, from 1.
      text: without its address.
      reads, writes: numbers of registers. The accumulators of an HGMMA are among those that it writes.
      left: of an HGMMA, the registers of its left side.
      accumulators: of an HGMMA, their registers.
      commits: whether it is the last HGMMA of a product.
      wait: for a wait, the products that may still be in flight.
      targets: labels that it may jump to.
      leaves: whether a basic block ends with it.
      ends: whether the next instruction is never executed after it.
    """

    line: int
    text: str
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    accumulators: frozenset[int] = frozenset()
    commits: bool = False
    wait: int | None = None
    targets: tuple[str, ...] = ()
    leaves: bool = False
    ends: bool = False


_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+((?:(@!?U?P\w+)\s+)?([A-Z]\w*)((?:\.\w+)*)\s*(.*?))\s*;")
_JUMPS = {"BRA", "BRX", "JMP", "JMX", "CALL", "RET", "EXIT", "BSSY", "BSYNC"}
# What follows them may be executed after them, whatever their operands.
_RETURNS = {"CALL", "BSSY", "BSYNC"}
# Their first result may be a predicate.
_TWO_RESULTS = {"SHFL", "MATCH", "ATOM", "ATOMG", "ATOMS"}
# Their first operand is a register that they read.
_NO_RESULT = {"BAR", "WARPSYNC", "NANOSLEEP"}


def _output(*command: Any) -> str:
    """Returns the output of a command; the error of a command that fails has its output, too."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@functools.lru_cache(4)
def _parsed(sass: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The instructions, and the index of the one after each label."""
    code: list[_Instruction] = []
    labels = {}
    for number, line in enumerate(sass.splitlines(), 1):
        if match := _INSTRUCTION.match(line):
            code.append(_instruction(number, *match.groups()))
        elif match := re.match(r"([.$\w]+):", line):
            labels[match[1]] = len(code)
        elif re.match(r"\s*/\*[0-9a-f]", line):
            raise ValueError(f"sass must be what nvdisasm -c writes, got line {number}: {line.strip()}")
    if not code:
        raise ValueError(f"sass must be what nvdisasm -c writes, got no instruction in {len(sass)} characters")
    return code, labels


def _instruction(line: int, text: str, guard: str | None, name: str, suffixes: str, rest: str) -> _Instruction:
    """Returns the instruction of a line; `rest` is its operands."""
    modifiers = suffixes.split(".")[1:]
    operands = re.split(r",\s*", rest)
    if name.endswith("GMMA"):
        return _product(line, text, modifiers, operands)
    if name == "WARPGROUP" and modifiers[0] == "DEPBAR":
        return _Instruction(line, text, wait=int(operands[1], 16))
    if name in _JUMPS:
        targets = re.findall(r"`\(([^)]+)\)", rest) or re.findall(r"[.]L\w+", rest)
        # A branch on a predicate names it before its target, if not before itself.
        ends = name not in _RETURNS and not guard and (name != "BRA" or rest.startswith("`"))
        return _Instruction(line, text, _registers(operands), targets=tuple(targets), leaves=True, ends=ends)
    if name in _TWO_RESULTS:
        operands = [one for one in operands if not one.startswith("P")]
    width = _width(name, modifiers)
    results = 1 if operands[0].startswith("R") and name not in _NO_RESULT else 0
    addresses = [one for one in operands if "[" in one]
    values = [one for one in operands[results:] if "[" not in one]
    reads = _registers(addresses) | _registers(values, width if name.startswith("ST") else 1)
    if "WIDE" in modifiers:
        reads |= _registers(operands[-1:], width)
    return _Instruction(line, text, reads, _registers(operands[:results], width))


def _product(line: int, text: str, modifiers: list[str], operands: list[str]) -> _Instruction:
    """An HGMMA: of 64 x N accumulators each of 128 threads holds N / 2, in pairs if they are of 16 bits."""
    width = int(modifiers[0].split("x")[1]) // (4 if modifiers[1] == "F16" else 2)
    to, first, *others = operands
    accumulators = _registers([to, *others], width)
    # Whatever its type, a left side has 64 rows of 32 bytes: 4 registers of each thread.
    left = frozenset() if "desc" in first else _registers([first], 4)
    return _Instruction(line, text, left, accumulators, left, accumulators, commits="gsb0" in operands)


def _width(name: str, modifiers: list[str]) -> int:
    """The registers that an instruction loads, stores or computes."""
    if name in ("LDSM", "STSM"):
        return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
    if "128" in modifiers:
        return 4
    return 2 if "64" in modifiers or "WIDE" in modifiers or (name == "CS2R" and "32" not in modifiers) else 1


def _registers(operands: Iterable[str], width: int = 1) -> frozenset[int]:
    """The registers that operands name, each the first of so many."""
    named = re.findall(r"\bR(\d+)(\.64)?", " ".join(operands))
    return frozenset(r for first, pair in named for r in range(int(first), int(first) + (2 if pair else width)))


def _in_flight(code: list[_Instruction], labels: Mapping[str, int]) -> list[dict[int, int]]:
    """Before each instruction, the HGMMAs that may be in flight there: index, and how many products were issued since.

    That number is the smallest over all ways to get there, for a wait for N leaves the youngest N. It is -1 while the
    product of the HGMMA goes on.
    """
    before: list[dict[int, int]] = [{} for _ in code]
    waiting = list(range(len(code) - 1, -1, -1))
    while waiting:
        i = waiting.pop()
        one, after = code[i], before[i]
        if one.accumulators:
            after = after | {i: -1}
        if one.commits:
            after = {j: age + 1 for j, age in after.items()}
        if one.wait is not None:
            after = {j: age for j, age in after.items() if age < one.wait}
        following = [labels[name] for name in one.targets] + ([] if one.ends else [i + 1])
        for k in (k for k in following if k < len(code)):
            younger = {j: age for j, age in after.items() if age < before[k].get(j, age + 1)}
            if younger:
                before[k] |= younger
                waiting.append(k)
    return before


def _events(code: Iterable[_Instruction]) -> Iterable[str]:
    """The products and waits of a stretch of code, as `overlap` writes them."""
    instructions = 0
    for one in code:
        instructions += bool(one.accumulators)
        if one.commits:
            yield f"{instructions} {'rs' if one.left else 'ss'}"
            instructions = 0
        if one.wait is not None:
            yield f"wait {one.wait}"

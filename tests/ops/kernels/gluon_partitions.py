"""Partitions of an interpreted Gluon kernel: threads of which one runs at a time, and what they share."""

import itertools
import linecache
import pathlib
import sys
import threading
from typing import Any

import numpy as np

from tests.ops.kernels.numpy_types import KernelBug

# Frames between the line of a kernel that waits and the semaphore are the interpreter's and the library's.
INTERPRETER = ("gluon_partitions.py", "gluon_memory.py", "gluon_language.py", "gluon_interpreter.py")
FILES = {threading.__file__, *(str(pathlib.Path(__file__).with_name(name)) for name in INTERPRETER)}


class Stopped(BaseException):
    """Ends a partition because another has failed."""


class Partition:
    """A group of warps with a program of its own, and what it has begun and not waited for."""

    def __init__(self, name, unfenced=()):
        self.name, self.thread, self.turn = name, threading.current_thread(), threading.Semaphore(0)
        self.ready, self.lacks = lambda: True, str  # whether what it waits for has come; and what that is, in words
        self.ended, self.result = False, None
        self.products, self.stores, self.unfenced = [], [], dict(unfenced)
        self.copies = []  # whose barrier it has not named yet
        self.seen = {}  # of each barrier the last phase that it has waited for

    def wait(self, ready, lacks=str):
        self.ready, self.lacks = ready, lacks
        MACHINE.hand_on()

    def end(self):
        if self.copies:
            raise bug("ends without a word to anybody about what it copies: mbarrier_arrive is missing")
        if self.stores:
            raise bug("ends while TMA may still read what it stores: tma.store_wait(0) is missing")
        self.ended = True

    def __str__(self):
        frame: Any = sys._current_frames()[self.thread.ident or 0]
        while frame.f_code.co_filename in FILES:
            frame = frame.f_back
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return f"{self.name} waits for {self.lacks()} in {frame.f_code.co_name}, line {frame.f_lineno}: {line}"


class Machine:
    """What all partitions of a launch share."""

    def launch(self, kernel, grid, seed):
        self.kernel, self.grid, self.seed = kernel, grid, seed
        self.begin((0, 0, 0))

    def begin(self, program):
        self.program, self.barriers, self.meetings, self.failure = program, {}, {}, None
        self.current = Partition("the kernel")
        self.partitions = [self.current]

    def hand_on(self):
        """Lets the first partition run that can; returns when that is this one."""
        me, alive = self.current, [each for each in self.partitions if not each.ended]
        following = next((each for each in alive if each.ready()), None)
        if alive and not following:
            raise bug("deadlock: " + "; ".join(map(str, alive)))
        if following and following is not me:
            self.current = following
            following.turn.release()
            if not me.ended:
                me.turn.acquire()
            if self.failure:
                raise Stopped
        me.ready = lambda: True

    def specialize(self, functions):
        """Runs partitions to their ends; returns what the first one returns."""
        me = self.current
        all_of = [Partition(f"partition {i} ({each.__name__})", me.unfenced) for i, (each, _) in enumerate(functions)]
        for each, (function, arguments) in zip(all_of, functions, strict=True):
            each.thread = threading.Thread(target=self.live, args=(each, function, arguments), daemon=True)
            each.thread.start()
        # First the last one, for that is where producers stand: they use what is free as soon as they are told.
        orders = list(itertools.permutations(reversed(all_of)))
        self.partitions = orders[self.seed % len(orders)]
        self.current = self.partitions[0]
        self.current.turn.release()
        for each in all_of:
            each.thread.join()
        if self.failure:
            raise self.failure
        self.current, self.partitions = me, [me]
        return all_of[0].result

    def live(self, partition, function, arguments):
        partition.turn.acquire()
        try:
            if not self.failure:
                with np.errstate(all="ignore"):
                    partition.result = function(*arguments)
                partition.end()
                self.hand_on()
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
            for each in self.partitions:
                each.turn.release()


LOCK = threading.RLock()  # there is one machine, and JAX calls back from several threads
MACHINE = Machine()


def bug(text):
    return KernelBug(f"{MACHINE.kernel}, program {MACHINE.program}, {MACHINE.current.name}: {text}")

"""A cache of functions' results with a bound on bytes: results about a mask may take megabytes.

`functools.lru_cache` counts entries, and 256 plans of bool arrays [2048, 2048] are 7 GB. Here all functions share one
bound on the bytes of the arrays that their arguments and results hold. An array that several entries hold counts once.
"""

import dataclasses
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

# Bytes of all entries, and the number of entries that stay, however large they are: one call of a large mask needs
# several, and without them would be planned and compiled anew each time.
MAX_BYTES = 1 << 30
MIN_ENTRIES = 16
# Bytes counted for a compiled program. On a CPU one takes 3 to 6 MB, but recompiling costs more than memory.
PROGRAM_BYTES = 1 << 20

R = TypeVar("R")


class _Key:
    """The arguments of a call. Their hash is computed once: the hash of a mask takes longer than the look-up."""

    __slots__ = ("hash", "values")

    def __init__(self, *values: Any):
        self.values, self.hash = values, hash(values)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.values == other.values


class _Entry(NamedTuple):
    result: Any
    sizes: dict[int, int]  # bytes of each array by its id, and of all other things by the id of the key


class _Store:
    """The entries of all functions, least recently used first, and the arrays that they hold."""

    def __init__(self):
        self.entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self.holders: dict[int, int] = {}  # number of entries that hold an array, by its id
        self.bytes = 0
        self.lock = threading.RLock()

    def find(self, key: _Key) -> _Entry | None:
        """Returns the entry of a key, or None, and marks it as used."""
        with self.lock:
            entry = self.entries.get(key)
            if entry is not None:
                self.entries.move_to_end(key)
            return entry

    def add(self, key: _Key, result: Any, extra_bytes: int) -> Any:
        """Keeps a result, or the one that another thread kept first, and returns it; evicts old entries."""
        sizes = {id(x): x.nbytes for x in _arrays((*key.values[1:], result), set())}
        with self.lock:
            if (entry := self.find(key)) is not None:
                return entry.result
            self.entries[key] = entry = _Entry(result, sizes | {id(key): extra_bytes})
            for array, size in entry.sizes.items():
                self.bytes += 0 if self.holders.get(array) else size
                self.holders[array] = self.holders.get(array, 0) + 1
            while self.bytes > MAX_BYTES and len(self.entries) > MIN_ENTRIES:
                self.drop(next(iter(self.entries)))
        return result

    def drop(self, key: _Key) -> None:
        """Evicts an entry."""
        with self.lock:
            for array, size in self.entries.pop(key).sizes.items():
                self.holders[array] -= 1
                if not self.holders[array]:
                    del self.holders[array]
                    self.bytes -= size


STORE = _Store()


class BoundedCache(Generic[R]):
    """A function with cached results, see `bounded_cache`."""

    def __init__(self, function: Callable[..., R], extra_bytes: int):
        functools.update_wrapper(self, function)
        self.__wrapped__, self._extra_bytes = function, extra_bytes

    def __call__(self, *args: Hashable, **kwargs: Hashable) -> R:
        key = _Key(self, args, *sorted(kwargs.items()))
        if (entry := STORE.find(key)) is not None:
            return entry.result
        return STORE.add(key, self.__wrapped__(*args, **kwargs), self._extra_bytes)

    def cache_clear(self) -> None:
        """Evicts all results of this function."""
        with STORE.lock:
            for key in [key for key in STORE.entries if key.values[0] is self]:
                STORE.drop(key)


def bounded_cache(extra_bytes: int = 256) -> Callable[[Callable[..., R]], BoundedCache[R]]:
    """Decorates a function of hashable arguments to cache its results, within one bound on bytes for all such caches.

    Least recently used entries are evicted first. Threads may compute a result twice; all get the same object. An entry
    counts its arrays and ``extra_bytes``, such as those of a compiled program.
    """
    return lambda function: BoundedCache(function, extra_bytes)


def _arrays(value: Any, visited: set[int]) -> Iterator[Any]:
    """Yields the arrays that a value holds: in containers, closures, and attributes of dataclasses and classes here."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if hasattr(value, "nbytes"):
        while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):  # a view keeps its base
            value = value.base
        yield value
        return
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, tuple | list | set | frozenset):
        inner = value
    elif isinstance(value, types.FunctionType):
        inner = [cell.cell_contents for cell in value.__closure__ or ()]
    elif isinstance(value, functools.partial):
        inner = value.func, value.args, value.keywords
    elif dataclasses.is_dataclass(value) or type(value).__module__.partition(".")[0] == __name__.partition(".")[0]:
        inner = getattr(value, "__dict__", {}).values()
    else:
        return
    for x in inner:
        yield from _arrays(x, visited)

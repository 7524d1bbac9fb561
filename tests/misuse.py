"""A row of the tables of misuses in tests/misuses, and rules that several of them name."""

from typing import NamedTuple

INTEGER = "must be an integer >= 1"
FLAG = "must be true or false"
FLOAT = "must be a floating-point dtype"


class Misuse(NamedTuple):
    """A wrong call, and what its error must say.

    Attributes:
      call: an expression over the names of `tests.misuses.test_misuses.names`, the table's own among them.
      error: the type of the exception, exactly.
      argument, value, rule: pieces of its message: what is wrong, what was given, what would be right.
    """

    call: str
    error: type[Exception]
    argument: str
    value: str
    rule: str

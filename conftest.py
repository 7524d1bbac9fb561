"""Tests and doctests fail by a warning, wherever they lie; what plugins say at start and end does not count."""

import collections

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that runs a sample of the tests' cases."""
    parser.addoption("--every", type=int, default=1, metavar="N", help="of each test run the first case and each Nth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps each test's first case and each Nth, and makes warnings errors.

    A setting of the session would make errors of warnings in plugins, too.
    """
    every, counts, left_out = config.getoption("every"), collections.Counter(), []
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("error"), append=False)
        test = item.nodeid.partition("[")[0]
        if counts[test] % every:
            left_out.append(item)
        counts[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]

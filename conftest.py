"""Tests and doctests fail by a warning, wherever they lie; what plugins say at start and end does not count."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that runs a sample of the tests."""
    parser.addoption("--every", type=int, default=1, metavar="N", help="run each Nth test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps each Nth test of those that are selected, and makes warnings errors.

    A setting of the session would make errors of warnings in plugins, too.
    """
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("error"), append=False)
    every = config.getoption("every")
    if every > 1:
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % every])
        items[:] = items[::every]

"""A pytest plugin for slow checkers: `-p suites.checkers.sample --sample 3`.

Keeps at most so many cases of each test, spread over its parameters, first and last among them, so
that every test's kernels run with small and large sizes.
"""

from collections.abc import Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", type=int, metavar="N", help="at most N cases of each test, 1 or more"
    )


def spread(count: int, most: int) -> set[int]:
    """`most` of range(count), evenly, with both ends; all where there are no more."""
    if count <= most:
        return set(range(count))
    return {round(place * (count - 1) / max(most - 1, 1)) for place in range(most)}


@pytest.hookimpl(trylast=True)  # after options have left out what does not run at all
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("--sample")
    if most is None:
        return
    if most < 1:
        raise pytest.UsageError(f"--sample is {most}, expected 1 or more")
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(one) for group in cases.values() for one in _chosen(group, most)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _chosen(group: Sequence[pytest.Item], most: int) -> list[pytest.Item]:
    wanted = spread(len(group), most)
    return [item for place, item in enumerate(group) if place in wanted]

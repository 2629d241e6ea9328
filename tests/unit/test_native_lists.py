"""Traversal of linked lists of Python objects."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from vllm_tiered_kv.native.cpu import follow


@dataclass
class Link:
    number: int
    after: Link | None = None


def chain(length: int) -> list[Link]:
    links = [Link(number) for number in range(length)]
    for one, other in pairwise(links):
        one.after = other
    return links


@pytest.mark.parametrize(
    ("first", "last", "most", "found"),
    [
        (0, 5, 100, [0, 1, 2, 3, 4]),
        (0, 5, 3, [0, 1, 2]),
        (2, 2, 100, []),
        (3, 1, 100, [3, 4, 5]),  # to the end, because `last` is not in the list
        (0, 5, 0, []),
    ],
)
def test_follow_stops_at_limit_last_or_none(
    first: int, last: int, most: int, found: list[int]
) -> None:
    links = chain(6)
    assert follow(links[first], links[last], "after", "number", most) == found


def test_follow_none_is_empty_and_wrong_attribute_raises() -> None:
    assert follow(None, None, "after", "number", 9) == []
    with pytest.raises(AttributeError, match="before"):
        follow(chain(2)[0], None, "before", "number", 9)
    with pytest.raises(AttributeError, match="name"):
        follow(chain(2)[0], None, "after", "name", 9)

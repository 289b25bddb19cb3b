"""Which tensors of a model are exchanged together: whole tensors, in fragments of about equal size. Pure.

Every replica must come to the same answer, so it depends on nothing but the sizes and their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import ConfigError


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The indices of `sizes` in `count` groups: the largest first, each into the group that is smallest so far.

    Indices ascend within a group, and groups are in the order of their first index.
    """
    usable = sum(1 for size in sizes if size)
    if count > usable:
        raise ConfigError(
            f"fragments={count}: the model has {usable} tensors to exchange, and a fragment is made of whole tensors"
        )
    groups: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        smallest = totals.index(min(totals))
        groups[smallest].append(index)
        totals[smallest] += sizes[index]
    return sorted(sorted(group) for group in groups)

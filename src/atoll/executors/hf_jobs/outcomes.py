"""Why a job failed and with which exit code, from what its replica has stored: the service has no field for either."""

from __future__ import annotations

import json
from collections.abc import Collection

from atoll.context import RunContext
from atoll.errors import StoreError
from atoll.keys import RunKeys
from atoll.registry import open_store
from atoll.result import ReplicaOutcome
from atoll.status import ReplicaState
from atoll.stores.fast import with_retry_timeout

_RETRY_S = 5.0


def stored_failures(context: RunContext, places: Collection[int]) -> dict[int, ReplicaOutcome]:
    """The failures that these replicas have stored. Replicas are counted from the first of the part, 0."""
    store, keys = with_retry_timeout(open_store(context.store_uri), _RETRY_S), RunKeys(context.run_id, context.launch)
    newest: dict[int, str] = {}
    for key in store.list(keys.outcomes_prefix()):  # sorted, so a later attempt replaces an earlier one
        newest[keys.parse_outcome(key).rank - context.first_rank] = key
    found: dict[int, ReplicaOutcome] = {}
    for place in newest.keys() & set(places):
        key = newest[place]
        try:
            outcome = ReplicaOutcome.from_json(json.loads(bytes(store.get(key))))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise StoreError(f"`{key}` is damaged: {exc!r}", uri=store.uri, key=key, reason="damaged") from exc
        if outcome.state is ReplicaState.FAILED:
            found[place] = outcome
    return found

"""DataLoaders that fork, in a process that uses the store: they work; and a worker that uses it is told."""

from __future__ import annotations

from offspring import Nursery, Place


def test_forked_data_workers_do_not_disturb_the_rounds(place: Place, nursery: Nursery, run_id: str) -> None:
    common = {"uri": place.uri, "run_id": run_id, "world_size": 2, "rounds": 4}
    children = [nursery.start("torch_replica:train_with_workers", **common, rank=rank) for rank in range(2)]
    first, second = (child.wait().value for child in children)
    assert first["digest"] == second["digest"]
    assert all(len(one["losses"]) == 20 and one["losses"][-1] < one["losses"][0] for one in (first, second))


def test_a_forked_worker_that_uses_the_store_is_told_and_never_hangs(
    place: Place, nursery: Nursery, run_id: str
) -> None:
    child = nursery.start("torch_replica:read_in_workers", uri=place.uri, run_id=run_id).wait()
    if place.kind == "file":  # a folder may be used by anyone
        assert child.value == [0.0, 1.0, 2.0, 3.0]
    else:
        assert child.error == "StoreError"
        assert "multiprocessing_context='spawn'" in child.came["message"]

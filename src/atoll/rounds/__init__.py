"""Replicas that share nothing but a store agree on rounds and average their updates, to the same bits everywhere.

How a round goes, and where to read: `publish` encodes an update chunk by chunk and announces it with an offer; `watch`
looks for the others' offers; `quorum` (pure) says wait, commit or give up; `agree` creates the commit, the one atomic
step; `average` computes the mean on the chunk grid; `exchange` puts these together. `claims` decide who plays a rank,
`begin` what everyone starts from, `snapshots` and `retention` how to come late and how to forget.

All of it yields requests (`ops`) and leaves the doing to a driver: `drive` in real life, one thread in tests.
`client.RoundClient` is what training code uses. Objects and bytes are specified in FORMAT.md.
"""

"""Replicas that share only a store agree on rounds and average their updates, to the same bits on every replica.

One round, in order, and the file to read: `publish` encodes an update chunk by chunk and announces it with an offer;
`prefetch` averages chunks of the others meanwhile; `agree` watches for offers, asks `quorum` (pure) whether to wait,
commit or give up, and creates the commit, the one atomic step; `average` computes the mean on the chunk grid from the
`contributions`; `exchange` puts these together. `join` comes before the first round, `catch_up` after a late start,
and `retention` deletes old rounds.

Training code uses `client.RoundClient`. All steps yield store requests, which a driver performs (`io`). FORMAT.md
specifies the objects and their bytes.
"""

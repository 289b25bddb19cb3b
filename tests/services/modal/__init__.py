"""A peer of Modal for tests: gRPC over plaintext HTTP/2, real processes, faults on cue. See `server`."""

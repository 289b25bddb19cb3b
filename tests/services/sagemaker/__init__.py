"""A peer of Amazon SageMaker Training Jobs for tests: real sockets, real processes, faults on cue. See `server`."""

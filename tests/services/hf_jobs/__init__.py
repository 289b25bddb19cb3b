"""A peer of Hugging Face Jobs for tests: real sockets, real processes, faults on cue. See `server`."""

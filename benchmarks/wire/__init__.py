"""Parts of `benchmarks/exchange.py`: a wire-speed server, the peers we are compared with, and the ways to measure."""

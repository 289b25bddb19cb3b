"""What requests to object stores cost, and how many a second they take at first. Data, with its date and source.

Transfer between a bucket and machines in the same region is free with all three; storage of a few rounds is small.
"""

from __future__ import annotations

from dataclasses import dataclass

AS_OF = "2026-11"


@dataclass(frozen=True)
class Prices:
    """One service: dollars for one request of each kind."""

    name: str
    put: float
    get: float
    list: float
    """DELETE is free everywhere."""
    puts_per_s: int
    """Writes a second that it takes before it has adapted to more."""
    source: str

    def dollars(self, puts: float, gets: float, lists: float) -> float:
        return puts * self.put + gets * self.get + lists * self.list


SERVICES = (
    Prices(
        "S3", 5e-6, 4e-7, 5e-6, 3_500,
        "Standard, us-east-1 (docs): $0.005 per 1 000 PUT or LIST, $0.0004 per 1 000 GET; 3 500 writes/s on a prefix",
    ),
    Prices(
        "GCS", 5e-6, 4e-7, 5e-6, 1_000,
        "Standard, one region (from memory): $0.005 per 1 000 class A, $0.0004 class B; 1 000 writes/s at first (docs)",
    ),
    Prices(
        "Azure", 5.5e-6, 4.4e-7, 5.5e-6, 20_000,
        "Blob hot LRS (from memory): about $0.055 per 10 000 writes or lists, $0.0044 reads; 20 000 requests/s",
    ),
)  # fmt: skip

"""What we are compared with: torch's gloo all-reduce over loopback, and the exchange people write with boto3."""

from __future__ import annotations

import io
import os
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from wire.arms import Seat
from wire.server import BUCKET


class Gloo:
    """`torch.distributed.all_reduce` of the same array between the same processes, connected directly."""

    is_sum = True

    def open(self, seat: Seat) -> None:
        import torch
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._seat, self._dist = seat, dist
        meeting = f"file://{seat.scratch}/gloo"
        dist.init_process_group("gloo", init_method=meeting, rank=seat.rank, world_size=seat.replicas)
        self._tensor = torch.from_numpy(seat.out)

    def prepare(self, round_no: int) -> None:
        np.copyto(self._seat.out, self._seat.update)

    def run(self, round_no: int) -> None:
        self._dist.all_reduce(self._tensor)

    def tidy(self, round_no: int) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._dist.destroy_process_group()


class Naive:
    """`torch.save` into memory, `put_object`; `get_object` of everybody else, `torch.load`, add.

    Bodies are not signed, as over TLS; boto3's own checksum stays on, as it is by default.
    """

    is_sum = True

    def open(self, seat: Seat) -> None:
        import boto3
        import torch
        from botocore import UNSIGNED
        from botocore.config import Config

        self._seat, self._torch = seat, torch
        endpoint = dict(part.split("=", 1) for part in urlsplit(seat.endpoints["wire"]).query.split("&"))["endpoint"]
        config = Config(signature_version=UNSIGNED, s3={"addressing_style": "path"})
        self._s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
        self._tensor = torch.from_numpy(seat.update)

    def prepare(self, round_no: int) -> None:
        self._seat.out.fill(np.nan)

    def run(self, round_no: int) -> None:
        body = io.BytesIO()
        self._torch.save({"update": self._tensor}, body)
        self._s3.put_object(Bucket=BUCKET, Key=self._key(round_no, self._seat.rank), Body=body.getvalue())
        total = self._tensor.clone()
        for rank in range(self._seat.replicas):
            if rank != self._seat.rank:
                theirs = io.BytesIO(self._download(self._key(round_no, rank)))
                total += self._torch.load(theirs, weights_only=True)["update"]
        np.copyto(self._seat.out, total.numpy())

    def tidy(self, round_no: int) -> None:
        self._s3.delete_object(Bucket=BUCKET, Key=self._key(round_no, self._seat.rank))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._s3.close()

    def _key(self, round_no: int, rank: int) -> str:
        return f"naive/{round_no}/{rank}.pt"

    def _download(self, key: str) -> bytes:
        while True:
            try:
                found: bytes = self._s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
                return found
            except self._s3.exceptions.NoSuchKey:
                time.sleep(0.01)

"""Clients of the cluster that are not those of the package `kubernetes`, as a user may inject them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import urllib3

CALLS = {"batch_api": ("api_client",), "core_api": ("api_client",)}


def plain_clients() -> dict[str, Any]:
    """Constructor arguments of `EKSExecutor`: what it needs of a client, for the cluster of KUBECONFIG."""
    content = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
    cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
    pool = urllib3.PoolManager(
        ca_certs=cluster["certificate-authority"], cert_file=user["client-certificate"], key_file=user["client-key"]
    )
    client = SimpleNamespace(
        configuration=SimpleNamespace(host=cluster["server"], auth_settings=dict),
        rest_client=SimpleNamespace(pool_manager=pool),
        default_headers={},
    )
    return {keyword: SimpleNamespace(api_client=client) for keyword in CALLS}

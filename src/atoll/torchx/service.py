"""Pure: the headless Service through which replicas find each other by host name."""

from __future__ import annotations

from typing import Any

from atoll.torchx.container import object_labels
from atoll.torchx.names import INSTANCE, label_value
from atoll.torchx.options import LEGACY


def service_manifest(
    app_name: str, app_id: str, namespace: str, port: int, *, dialect: str = "", with_status: bool = False
) -> dict[str, Any]:
    """The Service. Its selector uses our own label: MCAD does not put the label of the wrapper on pods."""
    selector = {"appwrapper.mcad.ibm.com" if dialect == LEGACY else INSTANCE: label_value(app_id)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": app_id, "namespace": namespace, "labels": object_labels(app_name, app_id)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "ports": [{"protocol": "TCP", "port": port, "targetPort": port}],
            "selector": selector,
            "sessionAffinity": "None",
            "type": "ClusterIP",
        },
        **({"status": {"loadBalancer": {}}} if with_status else {}),
    }

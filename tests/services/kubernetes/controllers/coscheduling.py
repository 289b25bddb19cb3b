"""The scheduler with the Coscheduling plugin, as a second scheduler `coscheduling`: it places all pods of a PodGroup or
none. Its tests run by hand only (`pytest --coscheduling`); CI reads their transcripts."""

from __future__ import annotations

import json
from typing import Any

from services.kubernetes import build
from services.kubernetes.controllers import manifests
from services.kubernetes.controllers.installation import Installation, answers_securely

Object = dict[str, Any]
_USER = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:kube-scheduler"}
_NAME = "coscheduling"


class Coscheduling:
    """It is the user of the first scheduler, which may also read PodGroups."""

    program = build.COSCHEDULING

    def install(self, at: Installation) -> None:
        definition = manifests.read(at.built.manifests / "scheduling.x-k8s.io_podgroups.yaml")
        rule = {"apiGroups": ["scheduling.x-k8s.io"], "resources": ["podgroups", "podgroups/status"],
                "verbs": ["get", "list", "watch", "patch", "update"]}  # fmt: skip
        role = {"kind": "ClusterRole", "metadata": {"name": _NAME}, "rules": [rule]}
        reference = {"apiGroup": _USER["apiGroup"], "kind": "ClusterRole", "name": _NAME}
        binding = {"kind": "ClusterRoleBinding", "metadata": {"name": _NAME}, "roleRef": reference, "subjects": [_USER]}
        manifests.create(at.api, [*definition, role, binding])
        manifests.wait_until_established(at.api, [each["metadata"]["name"] for each in definition])

    def command(self, at: Installation, settings: Object) -> list[str]:
        """`settings` are arguments of the plugin."""
        config = at.plane.folder / "kube-scheduler.kubeconfig"
        sort = {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]}
        profile = {
            "schedulerName": _NAME,
            "plugins": {"multiPoint": {"enabled": [{"name": "Coscheduling"}]}, "queueSort": sort},
            "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 5, **settings}}],
        }
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(config)},
            "profiles": [profile],
        }
        path = at.folder / "configuration.json"
        path.write_text(json.dumps(configuration, indent=1))
        return [
            str(at.built.binary), f"--config={path}", "--bind-address=127.0.0.1", f"--secure-port={at.ports[0]}",
            f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}",
        ]  # fmt: skip

    def is_ready(self, at: Installation) -> bool:
        return answers_securely(at.ports[0], "/readyz")

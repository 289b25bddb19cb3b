"""Prints JSON: what the scheduler of TorchX 0.7.0 and ours build for the same apps. It runs with TorchX 0.7.0."""

from __future__ import annotations

import copy
import inspect
import json
import sys
import warnings
from unittest.mock import patch

from torchx import specs
from torchx.schedulers import kubernetes_mcad_scheduler as original

from atoll.torchx import kubernetes_mcad_scheduler as ours
from torchx_apps import app, role

MOUNTS = [
    specs.BindMount(src_path="/src", dst_path="/dst", read_only=True),
    specs.VolumeMount(src="claim", dst_path="/data"),
    specs.DeviceMount(src_path="/dev/a", dst_path="/dev/b", permissions="r"),
]
EFA = specs.Resource(cpu=4, memMB=4000, gpu=0, devices={"vpc.amazonaws.com/efa": 4})
INSTANCE = specs.Resource(cpu=4, memMB=4000, gpu=8, capabilities={"node.kubernetes.io/instance-type": "p4d"})
APPS = [
    app(),
    app(role(replicas=3, max_retries=3)),
    app(role("trainer_foo", 2, args=[specs.macros.replica_id, specs.macros.img_root], mounts=MOUNTS)),
    app(role(resource=specs.NULL_RESOURCE, port_map={})),
    app(role(resource=EFA)),
    app(role(resource=INSTANCE, port_map={"a": 1, "b": 2})),
]
NO_OPTIONS = dict.fromkeys(("service_account", "image_secret", "coscheduler_name", "priority_class_name", "network"))
ALL_OPTIONS = {**dict.fromkeys(NO_OPTIONS, "given"), "priority": 0}


def built(module, made, options):
    with patch.object(module, "make_unique", return_value="app-name"):
        resource = module.app_to_resource(copy.deepcopy(made), "team", **options)
    return resource, str(module.KubernetesMCADJob({}, resource))


def missing_names() -> list[str]:
    """What the original has and we lack, or have with another signature."""
    found = []
    for name, value in vars(original).items():
        is_own = getattr(value, "__module__", "") == original.__name__ or name.isupper()
        if name.startswith("_") or not is_own:
            continue
        if not hasattr(ours, name):
            found.append(name)
        elif inspect.isfunction(value):
            theirs, own = inspect.signature(value), inspect.signature(getattr(ours, name))
            shapes = [[(each.name, each.default) for each in s.parameters.values()] for s in (theirs, own)]
            found += [name] if shapes[0] != shapes[1] else []
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    different = [
        [text for _, text in pair]
        for made in APPS
        for options in (NO_OPTIONS, ALL_OPTIONS)
        if (pair := [built(module, made, options) for module in (original, ours)])[0] != pair[1]
    ]
    services = [module.mcad_svc(app(), "svc", "team", "1234") for module in (original, ours)]
    json.dump({"different": different, "missing": missing_names(), "services": services[0] == services[1]}, sys.stdout)


if __name__ == "__main__":
    main()

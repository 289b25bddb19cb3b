"""Components of TorchX: Atoll runs, for any scheduler of TorchX.

TorchX reads the annotations and the docstring of a component, so that both have the form that it wants.
"""

# No `from __future__ import annotations`: TorchX 0.7.0 reads annotations as they are.
import json
from typing import Dict, List, Optional  # noqa: UP035

from torchx import specs

from atoll.context import RANK, WORLD_SIZE
from atoll.torchx.mounts import parse_mounts


def diloco(
    entry: str,
    store: str,
    replicas: int = 2,
    image: str = "",
    name: str = "diloco",
    args: str = "{}",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803
    h: Optional[str] = None,  # noqa: UP045
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """Trains one model on replicas that agree only through an object store.

    Args:
        entry: the function that each replica calls, as module:function of the image
        store: the object store that all replicas reach, such as s3://bucket/experiment
        replicas: number of replicas
        image: image with Atoll and the code
        name: name of the app
        args: arguments of the function, as a JSON object
        cpu: number of processors for each replica
        gpu: number of GPUs for each replica
        memMB: memory for each replica, in MB
        h: a named resource instead of cpu, gpu and memMB
        env: further variables of the replicas
        max_retries: restarts of the app
        mounts: volumes of the replicas; types are bind, volume, device, secret, configmap and empty
    """
    module, colon, function = entry.partition(":")
    if not colon or not module or not function:
        raise ValueError(f"entry=`{entry}`: module:function, such as train:main")
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: at least 1")
    command = ["-m", "atoll.replica", "--rendezvous", store, "--world-size", str(replicas)]
    command += ["--run-id", specs.macros.app_id, "--trainer-module", module, "--trainer-fn", function]
    return specs.AppDef(
        name=name,
        roles=[
            specs.Role(
                name="replica",
                image=image,
                entrypoint="python",
                args=[*command, "--trainer-kwargs-json", _json_argument(args)],
                env={**(env or {}), RANK: specs.macros.replica_id, WORLD_SIZE: str(replicas)},
                num_replicas=replicas,
                max_retries=max_retries,
                resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
                mounts=parse_mounts(mounts) if mounts else [],
            )
        ],
    )


def _json_argument(args: str) -> str:
    """The JSON object without `$`, because TorchX and Kubernetes replace `$$`, `${x}` and `$(X)` in commands."""
    try:
        is_object = isinstance(json.loads(args), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ValueError(f"args=`{args}`: a JSON object")
    return args.replace("$", "\\u0024")

"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler on loopback, with certificates of their own.

They are children of the process that starts them, and the kernel kills them when it ends. Their logs are files in the
folder of the control plane. Nothing of a running control plane is kept in this process alone: `ControlPlane.load` opens
one that another process started, to make users of it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import ssl
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.kubernetes.api import Api, ApiError
from services.kubernetes.authority import Authority, Certificate
from services.programs import free_ports, running

CONTROLLERS = (
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "persistentvolume-binder-controller",
    "pod-garbage-collector-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "taint-eviction-controller",
    "ttl-after-finished-controller",
)
"""What Jobs, pods, nodes, quotas and namespaces need. Fewer controllers start sooner and take less memory."""
FAST_NODE_LIFECYCLE = ("--node-monitor-period=1s", "--node-monitor-grace-period=12s")
"""A node without a heartbeat is lost after 12 seconds, not 50."""
_KUBELET_ROLE = "system:kubelet-api-admin"


@dataclass(frozen=True)
class ControlPlane:
    """Where the API server is, and the authority that it trusts."""

    folder: Path
    server: str

    @classmethod
    def load(cls, folder: Path) -> ControlPlane:
        return cls(folder, json.loads((folder / "control-plane.json").read_text())["server"])

    @property
    def authority(self) -> Authority:
        return Authority(self.folder / "certificates")

    @property
    def admin(self) -> Path:
        """A kubeconfig whose user may do everything."""
        return self.folder / "kubeconfig"

    def admin_api(self) -> Api:
        folder = self.authority.folder
        return Api(self.server, self.authority.path, Certificate(folder / "admin.crt", folder / "admin.key"))

    def user(self, name: str, groups: Iterable[str] = (), *, folder: Path, server: str | None = None) -> Path:
        """A kubeconfig of a new user, who may do nothing until RBAC says so. `server` may name a proxy."""
        folder.mkdir(parents=True, exist_ok=True)
        issued = self.authority.client(name, *groups, file_name=f"user-{name}-{time.monotonic_ns()}")
        return kubeconfig(folder / f"kubeconfig-{name}", server or self.server, self.authority, issued)


def kubeconfig(path: Path, server: str, authority: Authority, certificate: Certificate, *, user: str = "user") -> Path:
    """Write a kubeconfig. JSON is YAML, too."""
    cluster = {"server": server, "certificate-authority": str(authority.path)}
    credentials = {"client-certificate": str(certificate.path), "client-key": str(certificate.key_path)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "atoll-test", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "atoll-test", "context": {"cluster": "atoll-test", "user": user}}],
        "current-context": "atoll-test",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=2))
    return path


def api_of(config: Path) -> Api:
    """A client for the user of a kubeconfig that `kubeconfig` wrote."""
    cluster = json.loads(config.read_text())["clusters"][0]["cluster"]
    return Api(cluster["server"], Path(cluster["certificate-authority"]), certificate_of(config))


def certificate_of(config: Path) -> Certificate:
    """The certificate of the user of a kubeconfig that `kubeconfig` wrote."""
    user = json.loads(config.read_text())["users"][0]["user"]
    return Certificate(Path(user["client-certificate"]), Path(user["client-key"]))


@contextmanager
def started(
    binary: Path,
    folder: Path,
    *,
    api_flags: Iterable[str] = (),
    controller_flags: Iterable[str] = FAST_NODE_LIFECYCLE,
    scheduler_flags: Iterable[str] = (),
    controllers: Iterable[str] = CONTROLLERS,
) -> Iterator[ControlPlane]:
    """Start a control plane in a new folder; it is ready when the block begins, and ends with it."""
    folder.mkdir(parents=True, exist_ok=True)
    etcd, etcd_peer, port, *others = free_ports(5)
    plane = ControlPlane(folder, f"https://127.0.0.1:{port}")
    files = _Files(plane)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder / "etcd", ignore_errors=True)

        def run(name: str, flags: list[str]) -> None:
            stack.enter_context(running([str(binary), name, *flags], log=folder / f"{name}.log"))

        run("etcd", _etcd_flags(folder / "etcd", etcd, etcd_peer))
        run("kube-apiserver", [*_api_flags(files, port, etcd), *api_flags])
        _wait_for_the_api_server(plane)
        run("kube-controller-manager", [*_controller_flags(files, controllers, others[0]), *controller_flags])
        run("kube-scheduler", [*_scheduler_flags(files, others[1]), *scheduler_flags])
        api = plane.admin_api()
        _let_the_api_server_use_the_kubelets(api)
        _wait_until_it_works(api, folder)
        (folder / "control-plane.json").write_text(json.dumps({"server": plane.server}))
        yield plane


class _Files:
    """Certificates and kubeconfigs of the four programs, and of the administrator."""

    def __init__(self, plane: ControlPlane) -> None:
        authority = plane.authority
        self.folder = plane.folder
        self.authority = authority
        self.serving = authority.server("kube-apiserver", "127.0.0.1", "localhost", "kubernetes.default.svc")
        self.accounts = authority.key_pair("service-accounts")
        self.kubelet_client = authority.client("kube-apiserver-kubelet-client", file_name="kubelet-client")
        self.front_proxy = authority.client("front-proxy")
        admin = authority.client("admin", "system:masters")
        kubeconfig(plane.admin, plane.server, authority, admin, user="admin")
        self.configs = {}
        for name in ("kube-controller-manager", "kube-scheduler"):
            path = plane.folder / f"{name}.kubeconfig"
            self.configs[name] = kubeconfig(path, plane.server, authority, authority.client(f"system:{name}"))


def _etcd_flags(data: Path, port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        f"--data-dir={data}", f"--listen-client-urls={client}", f"--advertise-client-urls={client}", "--name=etcd",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=etcd={peer}",
        "--unsafe-no-fsync", "--log-level=warn", "--snapshot-count=5000",
    ]  # fmt: skip


def _api_flags(files: _Files, port: int, etcd: int) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
        f"--secure-port={port}", "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/24",
        f"--tls-cert-file={files.serving.path}", f"--tls-private-key-file={files.serving.key_path}",
        f"--client-ca-file={files.authority.path}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={files.accounts.path}",
        f"--service-account-signing-key-file={files.accounts.key_path}",
        "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--profiling=false",
        f"--kubelet-client-certificate={files.kubelet_client.path}",
        f"--kubelet-client-key={files.kubelet_client.key_path}",
        f"--kubelet-certificate-authority={files.authority.path}",
        "--kubelet-preferred-address-types=InternalIP",
        # For API servers behind this one, such as that of Kueue's queues:
        f"--requestheader-client-ca-file={files.authority.path}", "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={files.front_proxy.path}", f"--proxy-client-key-file={files.front_proxy.key_path}",
    ]  # fmt: skip


def _controller_flags(files: _Files, controllers: Iterable[str], port: int) -> list[str]:
    config = files.configs["kube-controller-manager"]
    return [
        *_shared_flags(config, port), "--use-service-account-credentials", f"--root-ca-file={files.authority.path}",
        f"--service-account-private-key-file={files.accounts.key_path}", f"--controllers={','.join(controllers)}",
        "--kube-api-qps=200", "--kube-api-burst=400", "--profiling=false", "--concurrent-namespace-syncs=5",
    ]  # fmt: skip


def _scheduler_flags(files: _Files, port: int) -> list[str]:
    config = files.configs["kube-scheduler"]
    return [*_shared_flags(config, port), "--kube-api-qps=200", "--kube-api-burst=400", "--profiling=false"]


def _shared_flags(config: Path, port: int) -> list[str]:
    return [
        f"--kubeconfig={config}", f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1", f"--secure-port={port}", "--leader-elect=false",
    ]  # fmt: skip


def _wait_for_the_api_server(plane: ControlPlane, timeout_s: float = 60) -> None:
    context = ssl.create_default_context(cafile=str(plane.authority.path))
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"{plane.server}/readyz", timeout=5, context=context):
                return
        except OSError:
            if time.monotonic() > deadline:
                tail = (plane.folder / "kube-apiserver.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the API server did not come up:\n{tail}") from None
        time.sleep(0.1)


def _wait_until_it_works(api: Api, folder: Path, timeout_s: float = 60) -> None:
    """The service account `default` is what a first pod needs."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            api.get("/api/v1/namespaces/default/serviceaccounts/default")
            return
        except ApiError:
            if time.monotonic() > deadline:
                tail = (folder / "kube-controller-manager.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the controllers did not come up:\n{tail}") from None
        time.sleep(0.1)


def _let_the_api_server_use_the_kubelets(api: Api) -> None:
    group = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"name": "kube-apiserver-kubelets"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": _KUBELET_ROLE},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "kube-apiserver-kubelet-client"}],
    }
    api.create(f"/apis/{group}/v1/clusterrolebindings", binding)

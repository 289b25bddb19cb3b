"""The scheduler `kubernetes_mcad` of TorchX, which TorchX itself has dropped, for AppWrapper, MCAD and Kueue.

The module has the name, the functions and the signatures of `torchx.schedulers.kubernetes_mcad_scheduler` of TorchX
0.7.0. The functions called alone give the form of that version. The scheduler follows its options (`options.Options`).
Building and reading is in the other modules of this folder; here are the requests. Nothing of Kubernetes is imported
before it is needed.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torchx
from torchx.schedulers.api import (
    DescribeAppResponse,
    ListAppResponse,
    Scheduler,
    Stream,
    filter_regex,
)
from torchx.schedulers.ids import make_unique
from torchx.specs import NONE, AppDef, AppDryRunInfo, AppState, ReplicaStatus, Role, RoleStatus, runopts
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from atoll.errors import AtollError, ConfigError
from atoll.kube.appwrapper import components_of
from atoll.kube.client import path_to
from atoll.kube.connection import Connection
from atoll.kube.kueue import queue_of
from atoll.torchx import container, names, pods, status
from atoll.torchx.cluster import Cluster
from atoll.torchx.describing import get_role_information
from atoll.torchx.logs import shown, since_seconds
from atoll.torchx.models import model_of, plain, service_of
from atoll.torchx.names import cleanup_str, split_app_id
from atoll.torchx.options import DIALECTS, LEGACY, V1BETA1, V1BETA2, KubernetesMCADOpts, Options, option_type
from atoll.torchx.problems import InvalidApp, checked_wrapper, problems_of, raise_problems
from atoll.torchx.replica_log import ReplicaLog
from atoll.torchx.resources import RESERVED_MEMMB, RESERVED_MILLICPU
from atoll.torchx.service import service_manifest
from atoll.torchx.status import STATES as JOB_STATE
from atoll.torchx.status import TASKS as TASK_STATE
from atoll.torchx.status import tasks_description
from atoll.torchx.workspace import docker_explained, upload_workspace
from atoll.torchx.wrapping import RETRY_POLICIES, enable_retry

if TYPE_CHECKING:
    from docker import DockerClient
    from kubernetes.client import ApiClient
    from kubernetes.client.models import V1Pod, V1Service

__all__ = [
    "JOB_STATE",
    "RESERVED_MEMMB",
    "RESERVED_MILLICPU",
    "RETRY_POLICIES",
    "TASK_STATE",
    "InvalidApp",
    "KubernetesMCADJob",
    "KubernetesMCADOpts",
    "KubernetesMCADScheduler",
    "app_to_resource",
    "cleanup_str",
    "create_appwrapper_scheduler",
    "create_pod_group",
    "create_scheduler",
    "enable_retry",
    "get_appwrapper_status",
    "get_port_for_service",
    "get_role_information",
    "get_tasks_status_description",
    "get_unique_truncated_appid",
    "make_unique",
    "mcad_svc",
    "object_labels",
    "pod_labels",
    "role_to_pod",
    "sanitize_for_serialization",
]

logger: logging.Logger = logging.getLogger(__name__)

LABEL_VERSION = names.VERSION
LABEL_APP_NAME = names.APP_NAME
LABEL_ROLE_INDEX = names.ROLE_INDEX
LABEL_ROLE_NAME = names.ROLE_NAME
LABEL_REPLICA_ID = names.REPLICA_ID
LABEL_KUBE_APP_NAME = names.KUBE_APP_NAME
LABEL_ORGANIZATION = names.MANAGED_BY
LABEL_UNIQUE_NAME = names.INSTANCE
LABEL_INSTANCE_TYPE = names.INSTANCE_TYPE
ANNOTATION_ISTIO_SIDECAR = names.ISTIO_SIDECAR

_PLURAL = "appwrappers"
_ANY_DIALECT = (V1BETA1, V1BETA2, LEGACY)
"""Of a cluster that does not say what it serves."""
_LIST_TIMEOUT_S = 30
_LONGEST_WORDS = 500


def sanitize_for_serialization(obj: object) -> object:
    """The object as JSON values, also where it has models of the client."""
    return plain(obj)


def object_labels(app: AppDef, app_id: str) -> dict[str, str]:
    """The labels of every object of an app."""
    return container.object_labels(app.name, app_id)


def pod_labels(
    app: AppDef, role_idx: int, role: Role, replica_id: int, coscheduler_name: str | None, app_id: str
) -> dict[str, str]:
    """The labels of the pod of one replica."""
    group = {} if coscheduler_name is None else pods.group_label(app_id, role_idx, role.name, V1BETA1)
    return {**pods.pod_labels(app.name, role_idx, role.name, app_id, torchx.__version__, replica_id), **group}


def role_to_pod(
    name: str,
    unique_app_id: str,
    namespace: str,
    role: Role,
    service_account: str | None,
    image_secret: str | None,
    coscheduler_name: str | None,
    priority_class_name: str | None,
    network: str | None,
) -> V1Pod:
    """The pod of one replica, whose macros are replaced; without labels."""
    options = Options(
        layout="pods",
        namespace=namespace,
        service_account=service_account,
        image_secret=image_secret,
        coscheduler_name=coscheduler_name,
        priority_class_name=priority_class_name,
        network=network,
    )
    hosts = {names.hosts_variable(role.name): f"{unique_app_id}-0.{unique_app_id}"}
    made: V1Pod = model_of("V1Pod", pods.pod_manifest(name, unique_app_id, role, options, hosts))
    return made


def create_pod_group(app: AppDef, role: Role, role_idx: int, namespace: str, app_id: str) -> dict[str, Any]:
    """The item of MCAD with the PodGroup of a role."""
    return {"replicas": 1, "generictemplate": pods.pod_group(app.name, app_id, role_idx, role, namespace, V1BETA1)}


def mcad_svc(app: AppDef, svc_name: str, namespace: str, service_port: str) -> V1Service:
    """The headless Service of an app."""
    made: V1Service = service_of(service_manifest(app.name, svc_name, namespace, int(service_port), with_status=True))
    return made


def get_unique_truncated_appid(app: AppDef) -> str:
    """A new id for the app, short enough that the names of its objects fit. The app is not changed."""
    return _unique_id(app, "pods")


def _unique_id(app: AppDef, layout: str) -> str:
    sizes = [role.num_replicas for role in app.roles]
    name, size = names.app_id_parts(app.name, sizes, layout=layout)
    if name != app.name:
        warnings.warn(
            f"the name `{app.name}` is too long for objects of Kubernetes; its id begins with `{name}`", stacklevel=3
        )
    return names.valid_app_id(make_unique(name, size))


def get_port_for_service(app: AppDef) -> str:
    """The port of the Service: the last one of all roles, or 29500 if that is no port."""
    port = names.service_port([role.port_map for role in app.roles])
    if not 0 < port <= 65535:
        warnings.warn(f"port {port} is not between 1 and 65535; the Service gets {names.DEFAULT_PORT}", stacklevel=2)
        port = names.DEFAULT_PORT
    return str(port)


def app_to_resource(
    app: AppDef,
    namespace: str,
    service_account: str | None,
    image_secret: str | None,
    coscheduler_name: str | None,
    priority_class_name: str | None,
    network: str | None,
    priority: int | None = None,
) -> dict[str, Any]:
    """The AppWrapper of an app as TorchX 0.7.0 made it: one pod for each replica, for MCAD from 1.34.1 on.

    MCAD restarts the whole app; the number of restarts is the smallest one of the roles.
    """
    options = Options(
        layout="pods",
        namespace=namespace,
        service_account=service_account,
        image_secret=image_secret,
        coscheduler_name=coscheduler_name,
        priority_class_name=priority_class_name,
        network=network,
        priority=priority,
    )
    return _resource(app, _unique_id(app, "pods"), options, V1BETA1)


def _resource(app: AppDef, app_id: str, options: Options, dialect: str) -> dict[str, Any]:
    """The checked AppWrapper; in the layout `pods`, its pods and its Service are models of the client."""
    made = checked_wrapper(app, app_id, options, dialect, torchx.__version__)
    if options.layout == "pods":
        items = made["spec"].get("components") or made["spec"]["resources"]["GenericItems"]
        key = "template" if dialect == V1BETA2 else "generictemplate"
        for item in items:
            if item[key]["kind"] == "Pod":
                item[key] = model_of("V1Pod", item[key])
            elif item[key]["kind"] == "Service":
                item[key] = service_of(item[key])
    return made


def _default_dialect(options: Options) -> str:
    """The dialect for a cluster that cannot be asked."""
    return V1BETA1 if options.layout == "pods" else V1BETA2


def get_appwrapper_status(app: Mapping[str, Any]) -> AppState:
    """The state of an AppWrapper by itself; a state that is not known is UNKNOWN."""
    return status.wrapper_state(app)


def get_tasks_status_description(status: Mapping[str, Any]) -> dict[str, Any]:
    """The counters of MCAD in the status of an AppWrapper."""
    return tasks_description(status)


@dataclass
class KubernetesMCADJob:
    """The request of an app: images that are pushed before, and the AppWrapper. Its text is YAML."""

    images_to_push: dict[str, tuple[str, str]]
    resource: dict[str, Any]

    def __str__(self) -> str:
        import yaml

        copied = json.loads(json.dumps(sanitize_for_serialization(self.resource)))  # YAML would name shared parts
        return str(yaml.dump(copied))

    def __repr__(self) -> str:
        return str(self)


class KubernetesMCADScheduler(DockerWorkspaceMixin, Scheduler[KubernetesMCADOpts]):
    """Runs apps of TorchX as AppWrappers. `torchx runopts kubernetes_mcad` has the options.

    `context`, `dialect`, `log_timestamps` and `log_previous` apply to requests that have no options of a run, such as
    `describe`; `torchx` takes them from the variables TORCHX_CONTEXT, TORCHX_DIALECT, TORCHX_LOG_TIMESTAMPS and
    TORCHX_LOG_PREVIOUS.
    """

    def __init__(
        self,
        session_name: str,
        client: ApiClient | None = None,
        docker_client: DockerClient | None = None,
        *,
        context: str | None = None,
        dialect: str | None = None,
        log_timestamps: bool = True,
        log_previous: bool = False,
        backend: str = "kubernetes_mcad",
    ) -> None:
        if "/" in session_name:
            raise ValueError(f"session `{session_name}`: a `/` would make the handles of its apps ambiguous")
        super().__init__(backend, session_name, docker_client=docker_client)
        self._client = client
        self._context, self._log_timestamps, self._log_previous = context, log_timestamps, log_previous
        self._dialect = Options.of({"dialect": dialect or "auto"}).wanted_dialect
        self._connection: Connection | None = None
        self._found: Cluster | None = None
        self._no_config: ConfigError | None = None

    def _api_client(self) -> ApiClient:
        """The client of the cluster: the given one, that of the pod we run in, or that of the kubeconfig."""
        from kubernetes import client

        if self._client is None:
            connection = Connection(context=self._context)
            try:
                self._client = connection.client
                self._connection = connection
            except ConfigError as exc:
                # A command that needs no cluster, such as `--dryrun`, goes on. Requests say why they fail.
                warnings.warn(f"failed to load kube config: {exc.message}", stacklevel=2)
                self._no_config = exc
                self._client = client.ApiClient(client.Configuration(host="http://localhost"))
        return self._client

    def _cluster(self) -> Cluster:
        if self._found is None:
            made = self._api_client()
            self._found = Cluster(self._connection or Connection(api_client=made))
        return self._found

    def _custom_objects_api(self) -> Any:
        from kubernetes import client

        return client.CustomObjectsApi(self._api_client())

    def _get_active_context(self) -> dict[str, Any]:
        """The active context of the kubeconfig, as the client gives it; without a namespace, it is `default`."""
        from kubernetes import config

        contexts, active = config.list_kube_config_contexts()
        wanted = self._context
        found = next((each for each in contexts if each["name"] == wanted), None) if wanted else active
        return dict(found or active)

    def _use_context(self, context: str | None) -> None:
        """Talk to the cluster of this context from now on. `ValueError` if this scheduler talks to another one: the
        ids of apps do not say in which cluster they are."""
        if context is None or context == self._context:
            return
        if self._client is not None:
            there = "the current context, or a given client," if self._context is None else f"`{self._context}`"
            raise ValueError(f"context=`{context}`: this scheduler uses {there} already; make another one for it")
        self._context = context

    def _dialects(self) -> tuple[str, ...]:
        """The dialects to look for an app in. A cluster that cannot be asked is taken for one with MCAD first."""
        if self._dialect is not None:
            return (self._dialect,)
        served = self._cluster().served()
        return tuple(served) if served else _ANY_DIALECT

    def _dialect_for(self, options: Options) -> str:
        """The dialect of a new app: that of the options, or of the cluster, or of the layout."""
        if (wanted := options.wanted_dialect or self._dialect) is not None:
            return wanted
        default = _default_dialect(options)
        try:
            served = self._cluster().served()
        except (AtollError, ModuleNotFoundError) as exc:
            logger.debug("cannot ask the cluster for its dialect: %s", exc)
            served = None
        if not served:
            return default
        return default if default in served else served[0]

    def _checked_dialect(self, app: AppDef, app_id: str, options: Options) -> str:
        """The dialect of a new app. An app that no dialect can run is refused before the cluster is asked."""
        dialect = options.wanted_dialect or self._dialect
        version = torchx.__version__
        if dialect is None and all(any(problems_of(app, app_id, options, each, version)) for each in DIALECTS):
            dialect = _default_dialect(options)
        dialect = dialect or self._dialect_for(options)
        raise_problems(app, list(problems_of(app, app_id, options, dialect, version)))
        return dialect

    def run_opts(self) -> runopts:
        """The options of a run, with those of the workspace."""
        opts = runopts()
        for each in fields(Options):
            opts.add(each.name, type_=option_type(each.name), help=each.metadata["help"], default=each.default)
        for name, option in self.workspace_opts():
            if name not in Options.__dataclass_fields__:
                opts.add(name, type_=option.opt_type, help=option.help, default=option.default)
        return opts

    def _validate(self, app: AppDef, scheduler: str, cfg: Any = None) -> None:
        """Nothing: a role without a resource is allowed, and all other checks are part of the dry run."""

    def _pre_build_validate(self, app: AppDef, scheduler: str, cfg: Any = None) -> None:  # noqa: ARG002
        """Check the app before an image is built for it."""
        options = Options.of(cfg)
        self._use_context(options.context)
        self._checked_dialect(app, _unique_id(app, options.layout), options)

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:
        """Put the workspace into the image with docker, or into the store `code_store` without docker."""
        options = Options.of(cfg)
        if options.code_store is not None:
            upload_workspace(role, workspace, options.code_store)
        else:
            with docker_explained():
                super().build_workspace_and_update_role(role, workspace, cfg)

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[KubernetesMCADJob]:
        options = Options.of(cfg)
        own = copy.copy(app)
        own.roles = [copy.copy(role) for role in app.roles]
        images_to_push = self.dryrun_push_images(own, cfg)
        if options.image_secret is not None and options.service_account is not None:
            warnings.warn(
                "service_account and image_secret are both set; the service account may have a pull secret of its own",
                stacklevel=2,
            )
        self._use_context(options.context)
        app_id = _unique_id(own, options.layout)
        resource = _resource(own, app_id, options, self._checked_dialect(own, app_id, options))
        if "schedulingSpec" in resource["spec"]:
            warnings.warn(
                "MCAD does not keep the limit of restarts, and the first one comes after five minutes or more; "
                "AppWrapper (dialect v1beta2) does",
                stacklevel=2,
            )
        info: AppDryRunInfo[KubernetesMCADJob] = AppDryRunInfo(KubernetesMCADJob(images_to_push, resource), repr)
        is_old = hasattr(info, "_cfg")
        setattr(info, "_app" if is_old else "app", app)
        setattr(info, "_cfg" if is_old else "cfg", cfg)
        return info

    def schedule(self, dryrun_info: AppDryRunInfo[KubernetesMCADJob]) -> str:
        """Push the images and create the AppWrapper. Returns the id of the app."""
        from kubernetes.client.exceptions import ApiException

        request = dryrun_info.request
        resource: dict[str, Any] = request.resource
        cfg: Any = getattr(dryrun_info, "_cfg", None) or getattr(dryrun_info, "cfg", None) or {}
        namespace = (resource.get("metadata") or {}).get("namespace") or cfg.get("namespace") or "default"
        group, _, version = str(resource.get("apiVersion") or V1BETA1).partition("/")
        self._use_context(cfg.get("context"))
        self.push_images(request.images_to_push)
        try:
            with self._explained("create"):
                answer = self._custom_objects_api().create_namespaced_custom_object(
                    group=group, version=version, namespace=namespace, plural=_PLURAL, body=resource
                )
        except ApiException as exc:
            if exc.status == 409:
                name = (resource.get("metadata") or {}).get("name")
                raise ValueError(
                    f"an AppWrapper `{name}` exists in `{namespace}`; submit again, which makes a new name"
                ) from exc
            if exc.status == 404:
                if "namespaces" in _words_of(exc):
                    raise ValueError(f"the cluster has no namespace `{namespace}`") from exc
                raise ValueError(
                    f"the cluster has no AppWrappers of {group}/{version}: install the controller for them"
                ) from exc
            raise
        return f"{namespace}:{answer['metadata']['name']}"

    @contextmanager
    def _explained(self, verb: str, resource: str = _PLURAL) -> Any:
        """Turn refused credentials and permissions into one `ValueError` that names the verb and the resource."""
        from kubernetes.client.exceptions import ApiException

        try:
            yield
        except ApiException as exc:
            if exc.status in (401, 403):
                what = "is not logged in" if exc.status == 401 else "has no permission"
                raise ValueError(
                    f"cannot {verb} {resource}: the user of the kubeconfig {what} ({exc.status}: {_words_of(exc)})"
                ) from exc
            raise
        except Exception as exc:
            if self._no_config is not None:
                raise self._no_config from exc
            raise

    def _read(self, app_id: str) -> tuple[str, dict[str, Any]] | None:
        """The dialect and the AppWrapper of an app; None if there is none."""
        from kubernetes.client.exceptions import ApiException

        namespace, name = split_app_id(app_id)
        for dialect in self._dialects():
            group, _, version = dialect.partition("/")
            try:
                with self._explained("get"):
                    found = self._custom_objects_api().get_namespaced_custom_object(
                        group, version, namespace, _PLURAL, name
                    )
                return dialect, found
            except ApiException as exc:
                if exc.status != 404:
                    raise
        return None

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """The state of an app and of each replica; None if there is no such app."""
        read = self._read(app_id)
        if read is None:
            return None
        _, wrapper = read
        namespace, name = split_app_id(app_id)
        cluster = self._cluster()
        queue = cluster.queue_state(wrapper) if status.needs_workload(wrapper) else None
        own = cluster.pods(namespace, name) if wrapper else None
        jobs = cluster.jobs(namespace, name) if status.needs_jobs(wrapper, own) else None
        found = status.reading(wrapper, own, queue, jobs)
        roles = get_role_information(_as_items(wrapper))
        statuses = {role: RoleStatus(role, []) for role in roles}
        for each in found.replicas:
            statuses[each.role].replicas.append(
                ReplicaStatus(id=each.index, role=each.role, state=each.state, hostname=each.host)
            )
        return DescribeAppResponse(
            app_id=app_id,
            state=found.state,
            msg=found.message or NONE,
            num_restarts=found.restarts,
            roles=list(roles.values()),
            roles_statuses=[each for each in statuses.values() if each.replicas],
        )

    def list(self, cfg: Mapping[str, Any] | None = None) -> list[ListAppResponse]:
        """The apps of TorchX in a namespace: that of the options, or of the active context."""
        options = Options.of(cfg)
        self._use_context(options.context)
        namespace = (cfg or {}).get("namespace") or self._own_namespace()
        found = [item for item in self._listed(namespace) if options.all_apps or status.is_of_torchx(item)]
        pods = self._cluster().pods(namespace) if any(map(status.needs_pods, found)) else None
        needs_jobs = any(status.needs_jobs(item, status.of_app(item, pods)) for item in found)
        jobs = self._cluster().jobs(namespace) if needs_jobs else None
        return [
            ListAppResponse(
                app_id=f"{namespace}:{item['metadata']['name']}", state=status.listed_state(item, pods, jobs)
            )
            for item in found
        ]

    def _listed(self, namespace: str) -> Sequence[dict[str, Any]]:
        """The AppWrappers of a namespace, in every dialect that the cluster serves. If the cluster does not say which,
        the first one that it knows."""
        from kubernetes.client.exceptions import ApiException

        found: dict[str, Sequence[dict[str, Any]]] = {}
        dialects = self._dialects()
        for dialect in dialects:
            group, _, version = dialect.partition("/")
            if group in found or (found and dialects == _ANY_DIALECT):
                continue
            try:
                with self._explained("list"):
                    answer = self._custom_objects_api().list_namespaced_custom_object(
                        group=group,
                        version=version,
                        namespace=namespace,
                        plural=_PLURAL,
                        timeout_seconds=_LIST_TIMEOUT_S,
                    )
                found[group] = answer["items"]
            except ApiException as exc:
                if exc.status != 404:
                    raise
        if not found:
            # The original raised the exception of the client.
            kind = type("NoAppWrappers", (ApiException, ValueError), {})
            raise kind(status=404, reason=f"the cluster has no AppWrappers of {', '.join(dialects)}")
        return [item for items in found.values() for item in items]

    def _own_namespace(self) -> str:
        """The namespace of the active context; without a kubeconfig, that of the pod we run in; else `default`."""
        from kubernetes import config

        try:
            active = self._get_active_context()
        except config.ConfigException:
            is_given = self._client is not None and self._connection is None
            return "default" if is_given else Connection(context=self._context).place.namespace
        return str((active.get("context") or {}).get("namespace") or "default")

    def _cancel_existing(self, app_id: str) -> None:
        """Stop the app. An AppWrapper of v1beta2 is kept, suspended; MCAD can only delete its wrapper."""
        dialects = self._dialects()
        if V1BETA2 not in dialects or (len(dialects) > 1 and dialects[0] != V1BETA2):
            self._delete_existing(app_id)
            return
        read = self._read(app_id)
        if read is None or get_appwrapper_status(read[1]) in (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED):
            return
        dialect, wrapper = read
        if dialect != V1BETA2 or not self._suspended(app_id, wrapper):
            self._delete_existing(app_id)

    def _suspended(self, app_id: str, wrapper: Mapping[str, Any]) -> bool:
        """Suspend the app and mark it as cancelled; False if that is not possible."""
        namespace, name = split_app_id(app_id)
        cluster = self._cluster()
        mark = {"metadata": {"annotations": {names.CANCELLED: datetime.now(UTC).isoformat()}}}
        path = path_to(_PLURAL, namespace, name, api=f"/apis/{V1BETA2}")
        try:
            if queue_of(wrapper):  # Kueue undoes a suspension at once; an inactive Workload stays inactive
                if not cluster.deactivate(wrapper):
                    return False
                cluster.patch(path, "AppWrapper", mark)
            else:
                cluster.patch(path, "AppWrapper", {**mark, "spec": {"suspend": True}})
        except AtollError as exc:
            logger.warning("the app cannot be suspended, so that its AppWrapper is deleted: %s", exc.message)
            return False
        return True

    def delete(self, app_id: str) -> None:
        """Stop the app and remove its AppWrapper; quiet if there is none."""
        if self.exists(app_id):
            self._delete_existing(app_id)

    def _delete_existing(self, app_id: str) -> None:
        from kubernetes.client.exceptions import ApiException

        namespace, name = split_app_id(app_id)
        for dialect in self._dialects():
            group, _, version = dialect.partition("/")
            try:
                with self._explained("delete"):
                    self._custom_objects_api().delete_namespaced_custom_object(
                        group=group, version=version, namespace=namespace, plural=_PLURAL, name=name
                    )
                return
            except ApiException as exc:
                if exc.status != 404:
                    raise

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Lines of replica `k` of a role, each with a line feed, from its newest pod. A log is not followed beyond
        `until`. With `log_previous`, the lines are those of the attempt before, as far as the cluster has them."""
        if streams not in (None, Stream.COMBINED):
            raise ValueError("KubernetesMCADScheduler only has the COMBINED log stream")
        log = ReplicaLog(self._cluster(), app_id, role_name, k, since_seconds(since), self._explained)
        if should_tail and not self._log_previous and (until is None or until.astimezone(UTC) > datetime.now(UTC)):
            lines: Iterable[str] = log.followed(lambda: self._is_over(app_id))
        else:
            lines = log.printed(self._api_client(), is_previous=self._log_previous)
        lines = shown(lines, until=until, has_times=self._log_timestamps)
        return filter_regex(regex, lines) if regex else lines

    def _is_over(self, app_id: str) -> bool:
        described = self.describe(app_id)
        return described is None or described.state in _TERMINAL


_TERMINAL = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)


def _words_of(exc: Any) -> str:
    """The words of the API server; a webhook repeats the whole object, and says its reason at the end."""
    try:
        text = str(json.loads(exc.body)["message"])
    except (TypeError, ValueError, KeyError):
        text = str(exc.reason)
    return text if len(text) <= _LONGEST_WORDS else f"… {text[-_LONGEST_WORDS:]}"


def _as_items(wrapper: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of a wrapper of any dialect as items of MCAD."""
    return [{"generictemplate": each} for each in components_of(wrapper)]


def create_scheduler(
    session_name: str,
    client: ApiClient | None = None,
    docker_client: DockerClient | None = None,
    **kwargs: Any,
) -> KubernetesMCADScheduler:
    """The scheduler for a runner. `context`, `dialect`, `log_timestamps` and `log_previous` are used; other arguments
    are ignored."""

    def is_on(name: str, default: str) -> bool:
        return str(kwargs.get(name, default)).lower() not in ("0", "false", "no", "off")

    return KubernetesMCADScheduler(
        session_name=session_name,
        client=client,
        docker_client=docker_client,
        context=kwargs.get("context"),
        dialect=kwargs.get("dialect"),
        log_timestamps=is_on("log_timestamps", "1"),
        log_previous=is_on("log_previous", "0"),
        backend=kwargs.get("_backend", "kubernetes_mcad"),
    )


def create_appwrapper_scheduler(session_name: str, **kwargs: Any) -> KubernetesMCADScheduler:
    """The same scheduler under its second name, `appwrapper`."""
    return create_scheduler(session_name, **{**kwargs, "_backend": "appwrapper"})

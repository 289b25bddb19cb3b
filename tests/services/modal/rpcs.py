"""The answers of the peer, one method for each RPC that Atoll's use of the client needs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal._serialization import serialize, serialize_data_format
from services.modal.call import Call, Entry
from services.modal.deploy_rpcs import DeployRpcs
from services.modal.engine import Function

if TYPE_CHECKING:
    from services.modal.server import Peer

_STATUSES = {
    "PENDING": api_pb2.GenericResult.GENERIC_STATUS_UNSPECIFIED,
    "SUCCESS": api_pb2.GenericResult.GENERIC_STATUS_SUCCESS,
    "FAILURE": api_pb2.GenericResult.GENERIC_STATUS_FAILURE,
    "TERMINATED": api_pb2.GenericResult.GENERIC_STATUS_TERMINATED,
    "TIMEOUT": api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT,
    "INIT_FAILURE": api_pb2.GenericResult.GENERIC_STATUS_INIT_FAILURE,
    "INTERNAL_FAILURE": api_pb2.GenericResult.GENERIC_STATUS_INTERNAL_FAILURE,
    "KERNEL_OOM_KILL": api_pb2.GenericResult.GENERIC_STATUS_KERNEL_OOM_KILL,
}
_FORMATS = [api_pb2.DATA_FORMAT_PICKLE, api_pb2.DATA_FORMAT_CBOR]


class Rpcs(DeployRpcs):
    """Made for each request, so that it sees the peer as it is now."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._engine = peer, peer.engine

    async def ClientHello(self, _: Any) -> Any:
        return api_pb2.ClientHelloResponse()

    # ── functions ───────────────────────────────────────────────────────────────────────────────────────────────

    async def FunctionGet(self, request: Any) -> Any:
        found = self._engine.find(request.app_name, request.object_tag)
        if found is None:
            what = f"App '{request.app_name}' not found in environment '{request.environment_name}'"
            raise GRPCError(Status.NOT_FOUND, what)
        data = api_pb2.FunctionData(
            module_name=found.module, function_name=found.name, timeout_secs=int(found.timeout_s)
        )
        data.ranked_functions.add(rank=0, function=api_pb2.Function(timeout_secs=int(found.timeout_s)))
        return api_pb2.FunctionGetResponse(
            function_id=found.function_id, handle_metadata=self._metadata(found), function=data
        )

    async def FunctionBindParams(self, request: Any) -> Any:
        base = self._function(request.function_id)
        made = self._engine.bind(base, _options(request.function_options))
        return api_pb2.FunctionBindParamsResponse(
            bound_function_id=made.function_id, handle_metadata=self._metadata(made)
        )

    async def SecretGetOrCreate(self, request: Any) -> Any:
        name = request.deployment_name
        if name not in self._engine.secrets:
            raise GRPCError(Status.NOT_FOUND, f"Secret '{name}' not found in environment '{request.environment_name}'")
        missing = [key for key in request.required_keys if key not in self._engine.secrets[name]]
        if missing:
            raise GRPCError(Status.NOT_FOUND, f"Secret '{name}' is missing key(s): {', '.join(missing)}")
        return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{name}")

    async def VolumeGetOrCreate(self, request: Any) -> Any:
        name = request.deployment_name
        if name not in self._engine.volumes:
            raise GRPCError(Status.NOT_FOUND, f"Volume '{name}' not found in environment '{request.environment_name}'")
        return api_pb2.VolumeGetOrCreateResponse(volume_id=f"vo-{name}")

    def _metadata(self, function: Function) -> Any:
        return api_pb2.FunctionHandleMetadata(
            function_name=function.name,
            function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION,
            definition_id=f"de-{function.function_id}",
            app_id=self._engine.apps[function.app],
            supported_input_formats=_FORMATS,
            supported_output_formats=_FORMATS,
            max_object_size_bytes=2 << 20,
            max_async_object_size_bytes=8 << 10,
        )

    def _function(self, function_id: str) -> Function:
        if function_id not in self._engine.functions:
            raise GRPCError(Status.NOT_FOUND, f"Function {function_id} not found")
        return self._engine.functions[function_id]

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def BlobCreate(self, _: Any) -> Any:
        blob_id = self._engine.new_id("bl")
        address = self._peer.blobs.address(blob_id)
        urls = api_pb2.UploadUrlList(items=[address])
        return api_pb2.BlobCreateResponse(blob_ids=[blob_id], upload_urls=urls)

    async def FunctionMap(self, request: Any) -> Any:
        function = self._function(request.function_id)
        if not self._peer.pipelines:
            return api_pb2.FunctionMapResponse(function_call_id=self._engine.new_id("fc"))
        call = self._spawned(function, request.pipelined_inputs, "")
        response = api_pb2.FunctionMapResponse(function_call_id=call.call_id)
        response.pipelined_inputs.add(idx=0, input_id=call.input_id, input_jwt=f"jwt-{call.input_id}")
        return response

    async def FunctionPutInputs(self, request: Any) -> Any:
        response = api_pb2.FunctionPutInputsResponse()
        if self._peer.refused_inputs > 0:
            self._peer.refused_inputs -= 1
            return response
        known = self._engine.calls.get(request.function_call_id)
        call = known or self._spawned(self._function(request.function_id), request.inputs, request.function_call_id)
        response.inputs.add(idx=0, input_id=call.input_id, input_jwt=f"jwt-{call.input_id}")
        return response

    def _spawned(self, function: Function, inputs: Any, call_id: str) -> Call:
        (item,) = inputs
        data = item.input.args if not item.input.args_blob_id else self._peer.blobs.get(item.input.args_blob_id)
        return self._engine.spawn(function, data, item.input.data_format, call_id=call_id)

    async def FunctionGetOutputs(self, request: Any) -> Any:
        call = self._call(request.function_call_id)
        until = time.monotonic() + request.timeout
        while not call.is_over and time.monotonic() < until:
            await asyncio.sleep(0.01)
        response = api_pb2.FunctionGetOutputsResponse(last_entry_id="1-0")
        if not call.is_over:
            response.num_unfinished_inputs = 1
        elif not call.is_expired:
            data, data_format = _output(call)
            result = api_pb2.GenericResult(status=_STATUSES[call.status], exception=call.message, data=data)
            response.outputs.add(result=result, idx=0, input_id=call.input_id, data_format=data_format)
        return response

    async def FunctionGetCallGraph(self, request: Any) -> Any:
        call = self._call(request.function_call_id)
        response = api_pb2.FunctionGetCallGraphResponse()
        if self._peer.graph == "empty":
            return response
        if self._peer.graph == "refused":
            raise GRPCError(Status.NOT_FOUND, f"Call graph of {call.call_id} not found")
        is_shown = call.is_over and self._peer.graph != "late"
        status = _STATUSES[call.status if is_shown else "PENDING"]
        response.inputs.add(input_id=call.input_id, status=status, function_call_id=call.call_id, task_id=call.task_id)
        if self._peer.graph != "truncated":
            response.function_calls.add(
                function_call_id=call.call_id, function_name=call.function.name, module_name=call.function.module
            )
        return response

    async def FunctionCallCancel(self, request: Any) -> Any:
        from google.protobuf.empty_pb2 import Empty

        self._call(request.function_call_id).cancel(terminate=request.terminate_containers)
        return Empty()

    async def FunctionCallFromId(self, request: Any) -> Any:
        call = self._call(request.function_call_id)
        metadata = api_pb2.FunctionCallHandleMetadata(
            app_id=self._engine.apps[call.function.app], function_id=call.function.function_id
        )
        return api_pb2.FunctionCallFromIdResponse(function_call_id=call.call_id, num_inputs=1, metadata=metadata)

    async def FunctionCallGetInfo(self, request: Any) -> Any:
        call = self._call(request.function_call_id)
        info = api_pb2.FunctionCallInfo(function_call_id=call.call_id, created_at=call.created_at, total_inputs=1)
        if call.is_over:
            info.succeeded_inputs.total = 1
        return api_pb2.FunctionCallGetInfoResponse(info=info)

    def _call(self, call_id: str) -> Call:
        if call_id not in self._engine.calls:
            raise GRPCError(Status.NOT_FOUND, f"Function call {call_id} not found")
        return self._engine.calls[call_id]

    # ── logs ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def AppCountLogs(self, request: Any) -> Any:
        width = request.bucket_secs
        counts: dict[int, int] = {}
        for entry in self._entries(request):
            start = int(entry.at // width * width)
            counts[start] = counts.get(start, 0) + 1
        response = api_pb2.AppCountLogsResponse(app_id=request.app_id)
        for start, count in sorted(counts.items()):
            response.buckets.add(bucket_start_at=Timestamp(seconds=start), stdout_logs=count)
        return response

    async def AppFetchLogs(self, request: Any) -> Any:
        call = self._call(request.function_call_id)
        response = api_pb2.AppFetchLogsResponse()
        batch = response.batches.add(task_id=call.task_id, input_id=call.input_id)
        for entry in self._entries(request)[-request.limit :]:
            batch.items.add(
                data=entry.text,
                timestamp=entry.at,
                timestamp_ns=int(entry.at * 1e9),
                file_descriptor=entry.source,
                function_call_id=call.call_id,
            )
        return response

    def _entries(self, request: Any) -> list[Entry]:
        call = self._call(request.function_call_id)
        since = request.since.seconds + request.since.nanos / 1e9
        until = request.until.seconds + request.until.nanos / 1e9
        return [
            entry
            for entry in list(call.log)
            if since - 1e-6 <= entry.at <= until + 1e-6 and request.source in (0, entry.source)
        ]


def _options(given: Any) -> dict[str, Any]:
    """What a request binds, by short names."""
    found: dict[str, Any] = {"bound": True}
    if given.HasField("timeout_secs"):
        found["timeout"] = given.timeout_secs
    if given.secret_ids:
        found["secrets"] = [each.removeprefix("st-") for each in given.secret_ids]
    if given.volume_mounts:
        found["volumes"] = {each.mount_path: each.volume_id.removeprefix("vo-") for each in given.volume_mounts}
    if given.HasField("resources"):
        gpu = given.resources.gpu_config
        found |= {
            "gpu": (gpu.gpu_type, gpu.count),
            "cpu": given.resources.milli_cpu,
            "memory": given.resources.memory_mb,
        }
    if given.HasField("retry_policy"):
        found["retries"] = given.retry_policy.retries
    if given.HasField("scheduler_placement"):
        found["region"] = list(given.scheduler_placement.regions)
    return found


def _output(call: Call) -> tuple[bytes, int]:
    if call.status == "SUCCESS":
        return serialize_data_format(call.value, api_pb2.DATA_FORMAT_PICKLE), api_pb2.DATA_FORMAT_PICKLE
    if call.exception is not None:
        return serialize(call.exception), api_pb2.DATA_FORMAT_PICKLE
    return b"", api_pb2.DATA_FORMAT_UNSPECIFIED

"""The RPCs of a deployment: the app, its image (which exists at once), and the function that the app publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2

if TYPE_CHECKING:
    from services.modal.engine import Engine
    from services.modal.server import Peer


class DeployRpcs:
    """A part of `Rpcs`."""

    _peer: Peer
    _engine: Engine

    async def EnvironmentGetOrCreate(self, request: Any) -> Any:
        name = request.deployment_name or "main"
        if name not in self._engine.environments:
            raise GRPCError(Status.NOT_FOUND, f"Environment '{name}' not found")
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name=name, settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-peer", metadata=metadata)

    async def AppGetByDeploymentName(self, request: Any) -> Any:
        return api_pb2.AppGetByDeploymentNameResponse(app_id=self._engine.apps.get(request.name, ""))

    async def AppGetLayout(self, _: Any) -> Any:
        return api_pb2.AppGetLayoutResponse()

    async def AppCreate(self, request: Any) -> Any:
        app_id = self._engine.apps.setdefault(request.description, self._engine.new_id("ap"))
        return api_pb2.AppCreateResponse(app_id=app_id)

    async def AppHeartbeat(self, _: Any) -> Any:
        return Empty()

    async def AppClientDisconnect(self, _: Any) -> Any:
        return Empty()

    async def ImageGetOrCreate(self, request: Any) -> Any:
        self._engine.images.append(list(request.image.dockerfile_commands))
        result = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        return api_pb2.ImageGetOrCreateResponse(image_id=self._engine.new_id("im"), result=result)

    async def MountGetOrCreate(self, _: Any) -> Any:
        return api_pb2.MountGetOrCreateResponse(mount_id=self._engine.new_id("mo"))

    async def MountBatchedCheckExistence(self, _: Any) -> Any:
        return api_pb2.MountBatchedCheckExistenceResponse()

    async def MountPutFile(self, _: Any) -> Any:
        return api_pb2.MountPutFileResponse(exists=True)

    async def FunctionPrecreate(self, _: Any) -> Any:
        return api_pb2.FunctionPrecreateResponse(function_id=self._engine.new_id("fu"))

    async def FunctionCreate(self, request: Any) -> Any:
        given = request.function_data if request.HasField("function_data") else request.function
        app = next(name for name, app_id in self._engine.apps.items() if app_id == request.app_id)
        made = self._engine.deploy(
            app,
            given.function_name,
            given.module_name,
            implementation=given.implementation_name,
            timeout_s=float(given.timeout_secs),
            is_published=False,
            function_id=request.existing_function_id,
        )
        made.definition = given
        response = api_pb2.FunctionCreateResponse(function_id=made.function_id, handle_metadata=self._metadata(made))
        response.function.CopyFrom(request.function)
        response.function_data.CopyFrom(request.function_data)
        if not response.function_data.ranked_functions:
            response.function_data.ranked_functions.add(rank=0, function=request.function)
        return response

    async def AppPublish(self, request: Any) -> Any:
        self._engine.publish(request.function_ids.values(), tag=request.deployment_tag)
        return api_pb2.AppPublishResponse(url=f"https://modal.com/apps/peer/{request.name}")

    def _metadata(self, function: Any) -> Any:
        raise NotImplementedError

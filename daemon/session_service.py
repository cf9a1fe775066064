"""SessionService: create, read, list and delete sessions. All the work is the engine's; this checks and translates."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable

from google.protobuf.empty_pb2 import Empty

from colibri.daemon import requests
from colibri.daemon.engine_api import EngineApi, SessionView
from colibri.daemon.errors import SessionNotFoundError
from colibri.daemon.rpc import Rpc, invalid
from colibri.daemon.views import session_message
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2

DEFAULT_PAGE = 100
MAX_PAGE = 1000
MAX_NAME_CHARS = 256


class SessionRpcs:
    """The built methods of SessionService. `model` and `content_id` are those of the container that is served."""

    def __init__(self, engine: Callable[[], EngineApi], model: str, content_id: str) -> None:
        self._engine = engine
        self._model = model
        self._content_id = content_id

    def rpcs(self) -> dict[str, Rpc]:
        return {
            "CreateSession": Rpc(self.create_session),
            "GetSession": Rpc(self.get_session),
            "ListSessions": Rpc(self.list_sessions),
            "DeleteSession": Rpc(self.delete_session),
        }

    def _message(self, view: SessionView) -> types_pb2.Session:
        """A session of another container keeps its content id; the name of that model is not ours to tell."""
        return session_message(view, self._model if view.content_id == self._content_id else "")

    async def create_session(self, request: inference_pb2.CreateSessionRequest, _: float | None) -> types_pb2.Session:
        name = request.session.display_name
        if len(name) > MAX_NAME_CHARS:
            raise invalid(
                "session.display_name", f"{len(name)} characters, at most {MAX_NAME_CHARS}", limit=MAX_NAME_CHARS
            )
        view = await asyncio.to_thread(
            self._engine().create_session,
            requests.new_session_id(request.session_id),
            name,
            requests.labels(request.session.labels),
            requests.request_id(request.request_id) if request.request_id else "",
        )
        return self._message(view)

    async def get_session(self, request: inference_pb2.GetSessionRequest, _: float | None) -> types_pb2.Session:
        return self._message(await asyncio.to_thread(self._engine().session, requests.session_id(request.name)))

    async def list_sessions(
        self, request: inference_pb2.ListSessionsRequest, _: float | None
    ) -> inference_pb2.ListSessionsResponse:
        """By id. The page token is the last id shown, so sessions that come or go between pages move nothing."""
        if not 0 <= request.page_size <= MAX_PAGE:
            raise invalid("page_size", f"{request.page_size}; from 0 to {MAX_PAGE} is allowed", limit=MAX_PAGE)
        after = _decode_page_token(request.page_token)
        size = request.page_size or DEFAULT_PAGE
        views = [view for view in await asyncio.to_thread(self._engine().sessions) if view.session > after]
        response = inference_pb2.ListSessionsResponse(sessions=[self._message(view) for view in views[:size]])
        if len(views) > size:
            response.next_page_token = _encode_page_token(views[size - 1].session)
        return response

    async def delete_session(self, request: inference_pb2.DeleteSessionRequest, _: float | None) -> Empty:
        session = requests.session_id(request.name)
        try:
            await asyncio.to_thread(self._engine().delete_session, session, request.etag, request.force)
        except SessionNotFoundError:
            if not request.allow_missing:
                raise
        return Empty()


def _encode_page_token(session: str) -> str:
    return base64.urlsafe_b64encode(session.encode()).decode()


def _decode_page_token(token: str) -> str:
    """The id that a page token names, "" for none. Raises InvalidFieldError."""
    try:
        session = base64.b64decode(token, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        session = "?"
    if token and not requests.ID.fullmatch(session):
        raise invalid("page_token", "this is not a page token of ListSessions")
    return session

"""InferenceService: turns requests into generations and generations into streams.

Validates (requests.py), makes ids of text (chat/), submits to the engine, follows what it produces (stream.py), and
ends stateless generations whose last viewer has left. Holds no generation itself: they live in the engine, and a stream
that breaks loses nothing but its view.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeVar

from colibri.daemon import requests
from colibri.daemon.chat import TextError, TextModel
from colibri.daemon.engine_api import EngineApi
from colibri.daemon.errors import GenerationNotFoundError
from colibri.daemon.generation import Generation, GenerationSpec
from colibri.daemon.rpc import Rpc, invalid
from colibri.daemon.stream import GenerationStream, ViewOptions, hidden_ids
from colibri.daemon.views import generation_message
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2

log = logging.getLogger("colibri.daemon.service")

Result = TypeVar("Result")

MIN_DETOKENIZED = 1 << 16  # ids that Detokenize takes even where the context is shorter


@dataclass(frozen=True)
class Prompt:
    """What a request's input became. `position`: where the session stood when its end was looked at, None if it was
    not."""

    ids: list[int]
    position: int | None = None


async def in_thread(field: str, work: Callable[[], Result]) -> Result:
    """Runs text work (a tokenizer takes seconds for a book) off the loop; its complaints name the field."""
    try:
        return await asyncio.to_thread(work)
    except TextError as error:
        raise invalid(field, str(error)) from error


class InferenceRpcs:
    """The built methods of InferenceService. `engine` is asked anew per call: there is none while the model loads."""

    def __init__(self, engine: Callable[[], EngineApi], text: TextModel, max_context: int, heartbeat: float) -> None:
        self._engine = engine
        self._text = text
        self._max_context = max_context
        self._heartbeat = heartbeat
        self._defaults = requests.SamplingDefaults.of(text.generation_config)
        self._viewers: Counter[str] = Counter()
        self._orphans: set[asyncio.Task[Generation]] = set()

    def rpcs(self) -> dict[str, Rpc]:
        return {
            "Generate": Rpc(self.generate),
            "GetGeneration": Rpc(self.get_generation),
            "CancelGeneration": Rpc(self.cancel_generation),
            "Tokenize": Rpc(self.tokenize),
            "Detokenize": Rpc(self.detokenize),
            "RenderChat": Rpc(self.render_chat),
        }

    # ---- Generate

    async def generate(
        self, request: inference_pb2.GenerateRequest, _: float | None
    ) -> AsyncGenerator[types_pb2.GenerateEvent, None]:
        cancels = requests.cancels_on_disconnect(request)
        output = requests.output_spec(request, self._heartbeat)
        generation = await self._started_before(request)
        if generation is None:
            generation = await self._submit(await self._spec(request), cancels)
        text = requests.new_output(self._text, request.stop, at_start=_starts_text(request)) if output.text else None
        options = ViewOptions(
            output=text,
            token_ids=output.token_ids,
            heartbeat=output.heartbeat,
            hidden_ids=hidden_ids(request.stop, self._text.eos_ids),
        )
        self._viewers[generation.name] += 1
        events = GenerationStream(generation, options).events()
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()
            self._leave(generation, cancels)

    async def _started_before(self, request: inference_pb2.GenerateRequest) -> Generation | None:
        """The generation that this very request has started. Asked before the input is made into ids: what a chat's
        first turn may say (a system message, say) would be refused behind its own answer."""
        if not request.request_id:
            return None
        identifier = requests.request_id(request.request_id)
        session = requests.session_id(request.session, "session") if request.session else None
        return await asyncio.to_thread(self._engine().find, identifier, session, _body_hash(request))

    def _leave(self, generation: Generation, cancels: bool) -> None:
        """A view ends. With the last one goes a generation that was only made to be watched."""
        self._viewers[generation.name] -= 1
        if self._viewers[generation.name] > 0:
            return
        del self._viewers[generation.name]
        if cancels and not generation.finished:
            self._cancel_quietly(generation)

    def _cancel_quietly(self, generation: Generation) -> None:
        try:
            self._engine().cancel(generation.name)
        except GenerationNotFoundError:
            log.debug("%s was gone before it could be cancelled", generation.name)

    async def _submit(self, spec: GenerationSpec, cancels: bool) -> Generation:
        """Submits on a thread. If the client leaves meanwhile, the submit still happens, and its result is then
        treated as a stream without viewers."""
        submitting = asyncio.create_task(asyncio.to_thread(self._engine().submit, spec))
        self._orphans.add(submitting)
        submitting.add_done_callback(self._orphans.discard)
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda done: self._abandon(done, cancels))
            raise

    def _abandon(self, done: asyncio.Task[Generation], cancels: bool) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.info("a generation whose client had left was refused: %s", error)
        elif cancels and not self._viewers[done.result().name] and not done.result().finished:
            self._cancel_quietly(done.result())

    async def _spec(self, request: inference_pb2.GenerateRequest) -> GenerationSpec:
        """The engine's form of a request."""
        identifier = requests.request_id(request.request_id)
        session = requests.session_id(request.session, "session") if request.session else None
        if request.HasField("expected_position") and session is None:
            raise invalid("expected_position", "there is no session whose position could be compared")
        sampling = requests.sampling_spec(request.sampling, self._defaults)
        requests.check_stop(request.stop, self._text.vocab_rows)
        limit = None
        if request.stop.HasField("max_duration"):
            limit = requests.seconds(request.stop.max_duration, "stop.max_duration", 0.001)
        prompt = await self._prompt(request, session)
        expected = request.expected_position if request.HasField("expected_position") else prompt.position
        stops = requests.new_output(self._text, request.stop, at_start=_starts_text(request))
        return GenerationSpec(
            request_id=identifier,
            input_ids=tuple(prompt.ids),
            sampling=sampling,
            session=session,
            max_tokens=request.stop.max_tokens if request.stop.HasField("max_tokens") else None,
            eos_token_ids=frozenset() if request.stop.ignore_eos else frozenset(self._text.eos_ids),
            stop_token_ids=frozenset(request.stop.token_ids),
            expected_position=expected,
            position_named=request.HasField("expected_position"),
            body_hash=_body_hash(request),
            max_duration=limit,
            stop_check=requests.StopCheck(stops) if request.stop.sequences else None,
        )

    # ---- input to ids

    async def _prompt(self, request: inference_pb2.GenerateRequest, session: str | None) -> Prompt:
        given = request.input
        kind = given.WhichOneof("kind")
        if given.HasField("add_bos") and kind != "text":
            raise invalid("input.add_bos", "applies to text; a chat's template and token ids are taken as they are")
        if kind is None:
            raise invalid("input", "one of chat, text or tokens is needed")
        if kind == "tokens":
            requests.check_token_count(len(given.tokens.ids), self._max_context, "input.tokens.ids")
            requests.check_tokens(given.tokens.ids, self._text.vocab_rows, "input.tokens.ids")
            return self._started(Prompt(list(given.tokens.ids)), kind, session)
        requests.check_input_bytes(given.ByteSize(), self._max_context, f"input.{kind}")
        if kind == "text":
            prompt = await self._text_prompt(given, session)
        else:
            prompt = await self._chat_prompt(given.chat, session)
        return self._started(prompt, kind, session)

    @staticmethod
    def _started(prompt: Prompt, kind: str, session: str | None) -> Prompt:
        """Raises InvalidFieldError if there is nothing to start from; what a session needs, the engine knows."""
        if not prompt.ids and session is None:
            raise invalid("input", f"the {kind} is empty: it gives no token to start from")
        return prompt

    async def _text_prompt(self, given: types_pb2.Input, session: str | None) -> Prompt:
        add_bos = given.add_bos if given.HasField("add_bos") else None
        position = None
        if session is not None and add_bos is None:
            position, _ = await self._session_end(session)
        if position:  # in the middle of a session the text is only itself; BOS belongs to a beginning
            ids = await in_thread("input.text", lambda: self._text.tokenizer.encode(given.text))
        else:
            ids = await in_thread("input.text", lambda: self._text.encode(given.text, add_bos))
        return Prompt(ids, position=position)

    async def _chat_prompt(self, chat: types_pb2.Chat, session: str | None) -> Prompt:
        rendered = requests.chat_request(chat, "input.chat")
        if session is None:
            ids = await in_thread(
                "input.chat",
                lambda: self._text.chat_ids(
                    rendered.messages,
                    arguments=rendered.arguments or None,
                    add_generation_prompt=rendered.add_generation_prompt,
                ),
            )
            return Prompt(ids)
        position, last = await self._session_end(session)
        ids = await in_thread(
            "input.chat",
            lambda: self._text.append_ids(
                rendered.messages,
                last,
                arguments=rendered.arguments or None,
                add_generation_prompt=rendered.add_generation_prompt,
            ),
        )
        return Prompt(ids, position=position)

    async def _session_end(self, session: str) -> tuple[int, list[int]]:
        """The position of a session and its last token, which decide how a turn is appended. The generation is then
        bound to that position, so that two callers cannot interleave."""
        engine = self._engine()

        def look() -> tuple[int, list[int]]:
            position = engine.session(session).position
            return position, engine.session_tokens(session, position - 1, position) if position else []

        return await asyncio.to_thread(look)

    # ---- the other methods

    async def get_generation(
        self, request: inference_pb2.GetGenerationRequest, _: float | None
    ) -> types_pb2.Generation:
        generation = await asyncio.to_thread(self._engine().get, requests.generation_name(request.name))
        return generation_message(generation)

    async def cancel_generation(
        self, request: inference_pb2.CancelGenerationRequest, _: float | None
    ) -> types_pb2.Generation:
        """Returns when the engine has let go; cancelling what is finished changes nothing."""
        name = requests.generation_name(request.name)
        generation = await asyncio.to_thread(self._engine().cancel, name)
        view = generation.view()
        while not view.state.finished:
            view = await generation.wait(view.version)
        return generation_message(generation)

    async def tokenize(self, request: inference_pb2.TokenizeRequest, _: float | None) -> inference_pb2.TokenizeResponse:
        """`add_bos` false is what protobuf cannot tell from unset: the text is taken as it is."""
        requests.check_input_bytes(request.ByteSize(), self._max_context, "text")
        ids = await in_thread("text", lambda: self._text.encode(request.text, request.add_bos))
        return inference_pb2.TokenizeResponse(ids=ids)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, _: float | None
    ) -> inference_pb2.DetokenizeResponse:
        """Special tokens are written out, so that nothing is lost."""
        requests.check_token_count(len(request.ids), max(self._max_context, MIN_DETOKENIZED), "ids")
        requests.check_tokens(request.ids, self._text.vocab_rows, "ids")
        ids = list(request.ids)
        text = await in_thread("ids", lambda: self._text.decode(ids, skip_special=False))
        return inference_pb2.DetokenizeResponse(text=text)

    async def render_chat(
        self, request: inference_pb2.RenderChatRequest, _: float | None
    ) -> inference_pb2.RenderChatResponse:
        requests.check_input_bytes(request.ByteSize(), self._max_context, "chat")
        chat = requests.chat_request(request.chat, "chat")

        def render() -> tuple[str, list[int]]:
            text = self._text.render_chat(
                chat.messages,
                tools=chat.tools,
                arguments=chat.arguments or None,
                add_generation_prompt=chat.add_generation_prompt,
            )
            return text, self._text.tokenizer.encode(text)

        text, ids = await in_thread("chat", render)
        return inference_pb2.RenderChatResponse(text=text, ids=ids, renderer=self._text.renderer)


def _starts_text(request: inference_pb2.GenerateRequest) -> bool:
    """Whether the answer begins a text of its own (a reply), or continues the prompt's."""
    return bool(request.input.WhichOneof("kind") == "chat")


def _body_hash(request: inference_pb2.GenerateRequest) -> bytes:
    """SHA-256 of all that makes two requests the same but their id."""
    body = inference_pb2.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("request_id")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()

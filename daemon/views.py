"""The contract's messages, made from the daemon's own types: generations, sessions, sampling, errors.

Pure functions, no state, no I/O. Numbers of states and finish reasons are shared with the contract; a test holds them
equal.
"""

from __future__ import annotations

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from colibri.daemon.engine_api import SessionView
from colibri.daemon.errors import DaemonError
from colibri.daemon.generation import FinishReason, Generation, GenerationView, SamplingSpec, Usage
from colibri.v1 import types_pb2


def duration(nanoseconds: int) -> Duration:
    return Duration(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)


def timestamp(seconds: float) -> Timestamp:
    nanoseconds = int(seconds * 1e9)
    return Timestamp(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)


def sampling_message(sampling: SamplingSpec, *, with_seed: bool = True) -> types_pb2.SamplingParams:
    """Effective sampling: every honoured field is set."""
    message = types_pb2.SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    if with_seed:
        message.seed = sampling.seed
    return message


def usage_message(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        queue_time=duration(usage.queue_ns),
        prefill_time=duration(usage.prefill_ns),
        decode_time=duration(usage.decode_ns),
        time_to_first_token=duration(usage.time_to_first_token_ns),
        expert_loads=usage.expert_loads,
        expert_hits=usage.expert_hits,
        expert_bytes_read=usage.expert_bytes_read,
    )


def error_message(error: DaemonError) -> types_pb2.ErrorDetail:
    return types_pb2.ErrorDetail(
        code=grpc.StatusCode[error.code].value[0],
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
    )


def generation_message(generation: Generation, view: GenerationView | None = None) -> types_pb2.Generation:
    """One consistent look at a generation as the contract's resource."""
    view = view or generation.view()
    message = types_pb2.Generation(
        name=view.name,
        request_id=view.request_id,
        state=types_pb2.Generation.State.Name(view.state),
        start_position=view.start_position,
        next_offset=view.next_offset,
        durable_offset=view.durable_offset,
        finish_reason=types_pb2.FinishReason.Name(view.finish_reason),
        usage=usage_message(view.usage),
        seed=view.sampling.seed,
        create_time=timestamp(view.create_time),
        update_time=timestamp(view.update_time),
        sampling=sampling_message(view.sampling),
        re_prefilled=view.re_prefilled,
    )
    if view.expire_time is not None:
        message.expire_time.CopyFrom(timestamp(view.expire_time))
    if view.error is not None:
        message.error.CopyFrom(error_message(view.error))
    _add_stop_match(message, generation, view)
    return message


def _add_stop_match(message: types_pb2.Generation, generation: Generation, view: GenerationView) -> None:
    """Which stop ended it: an id, or the string that the matcher of this generation found."""
    if view.stop_token is not None:
        message.stop_match.token_id = view.stop_token
    elif view.finish_reason is FinishReason.STOP_SEQUENCE:
        matched = view.stop_sequence or getattr(generation.spec.stop_check, "matched", None)
        if matched:
            message.stop_match.sequence = matched


def session_message(view: SessionView, model: str) -> types_pb2.Session:
    """`model`: the name of the model that this daemon serves."""
    return types_pb2.Session(
        name=f"sessions/{view.session}",
        display_name=view.display_name,
        labels=view.labels,
        state=types_pb2.Session.State.Name(view.state),
        model=model,
        content_id=view.content_id,
        position=view.position,
        durable_position=view.durable_position,
        kv_position=view.kv_position,
        context_limit=view.context_limit,
        disk_bytes=view.disk_bytes,
        etag=view.etag,
        create_time=timestamp(view.create_time),
        last_used_time=timestamp(view.last_used_time),
        active_generation=view.active_generation,
        degraded=view.degraded,
    )

"""What the command line shows: the answer on standard output, everything about it on standard error.

A model's text is not trusted: on a terminal its control characters are shown, not obeyed.
"""

from __future__ import annotations

import sys
import unicodedata
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from colibri.client.events import Delta, Event, Finished, Progress, show_bytes
from colibri.v1 import admin_service_pb2, types_pb2


def printable(text: str) -> str:
    """`text` with control characters other than newline and tab written out, so that it cannot drive a terminal."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) != "Cc" else f"\\x{ord(letter):02x}"
        for letter in text
    )


class AnswerView:
    """Shows one answer as it comes: a progress line while there is no text, then the text, then the statistics line.

    Used as a context manager, so that the progress line never outlives the answer.
    """

    def __init__(self, out: TextIO | None = None, notes: Console | None = None) -> None:
        self._out = out or sys.stdout
        self._notes = notes or Console(stderr=True)
        self._status = Status("waiting for the daemon", console=self._notes)
        self._at_line_start = True

    def __enter__(self) -> Self:
        if self._notes.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()
        if not self._at_line_start:
            self._write("\n")

    def show(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._status.update(Text(progress_line(event)))
        elif isinstance(event, Delta) and event.text:
            self._status.stop()
            self._write(event.text)
        elif isinstance(event, Finished):
            self._status.stop()
            if not self._at_line_start:
                self._write("\n")
            self.note(f"[{event.statistics.line()}]")
            if event.finish_reason not in ("EOS", "STOP_SEQUENCE", "UNSPECIFIED"):
                self.note(f"[stopped: {event.finish_reason}]")

    def note(self, text: str) -> None:
        """A remark beside the answer."""
        self._notes.print(Text(printable(text), style="dim"), soft_wrap=True)

    def _write(self, text: str) -> None:
        self._out.write(printable(text) if self._out.isatty() else text)
        self._out.flush()
        self._at_line_start = text.endswith("\n")


def progress_line(event: Progress) -> str:
    """How far a generation is, in words."""
    if event.state == types_pb2.Generation.STATE_QUEUED:
        return f"queued, place {event.queue_position}"
    if event.state != types_pb2.Generation.STATE_PREFILLING:
        return types_pb2.Generation.State.Name(event.state).removeprefix("STATE_").lower()
    line = f"prefill {event.prompt_tokens_done}/{event.prompt_tokens_total} tokens"
    if event.tokens_per_second > 0:
        line += f", {event.tokens_per_second:.1f} tok/s"
    if event.eta_seconds is not None:
        line += f", {event.eta_seconds:.0f} s left"
    return line


def session_table(sessions: list[types_pb2.Session]) -> Table:
    """One row per session."""
    table = Table(box=None, pad_edge=False)
    longest = max((len(session.name.removeprefix("sessions/")) for session in sessions), default=0)
    table.add_column("session", min_width=longest)  # a name that is cut cannot be typed
    table.add_column("state")
    table.add_column("position", justify="right")
    table.add_column("disk", justify="right")
    table.add_column("last used")
    for session in sessions:
        used = session.last_used_time.ToDatetime() if session.HasField("last_used_time") else None
        table.add_row(
            Text(printable(session.name.removeprefix("sessions/"))),
            session_state(session),
            str(session.position),
            show_bytes(session.disk_bytes),
            f"{used:%Y-%m-%d %H:%M:%S} UTC" if used else "-",
        )
    return table


def session_state(session: types_pb2.Session) -> str:
    """In small letters, but for what nobody should overlook."""
    if session.state == types_pb2.Session.STATE_CORRUPT:
        return "CORRUPT"
    state = types_pb2.Session.State.Name(session.state).removeprefix("STATE_").lower()
    return f"{state}, degraded" if session.degraded else state


def session_lines(session: types_pb2.Session) -> str:
    """One session in full, one `name: value` per line."""
    rows = [
        ("session", session.name.removeprefix("sessions/")),
        ("display name", session.display_name),
        ("state", session_state(session)),
        ("model", session.model),
        ("content id", session.content_id),
        ("position", f"{session.position} of {session.context_limit}"),
        ("durable", f"{session.durable_position} tokens in the log, KV of {session.kv_position} positions on disk"),
        ("disk", show_bytes(session.disk_bytes)),
        ("active generation", session.active_generation),
        ("damage" if session.state == types_pb2.Session.STATE_CORRUPT else "degraded", session.degraded),
    ]
    return _rows(rows)


def status_lines(
    address: str,
    state: str,
    info: admin_service_pb2.GetServerInfoResponse,
    stats: admin_service_pb2.Stats | None = None,
) -> str:
    """The daemon's state and facts, one `name: value` per line; with `stats` its work, memory and drives too."""
    rows = [
        ("address", address),
        ("state", f"{state}, degraded" if info.degraded else state),
        ("version", info.version),
        ("model", f"{info.model} ({info.architecture})" if info.architecture else info.model),
        ("content id", info.content_id),
        ("vocabulary", str(info.vocab_size)),
        ("context", f"{info.max_context} tokens, {show_bytes(info.kv_bytes_per_token)} of KV per token"),
        ("chat", info.chat_renderer or "no chat template"),
        ("capabilities", ", ".join(info.capabilities)),
        ("boot id", info.boot_id),
        *(_stats_rows(stats) if stats is not None else []),
        ("degraded", "; ".join(info.degraded)),
    ]
    return _rows(rows)


def _stats_rows(stats: admin_service_pb2.Stats) -> list[tuple[str, str]]:
    speed = f", {stats.decode_tokens_per_second:.1f} tok/s" if stats.running else ""
    uses = stats.expert_hits + stats.expert_loads
    hits = f", {stats.expert_hit_ratio:.1%} of {uses} uses found there" if uses else ""
    return [
        ("work", f"{stats.running} running, {stats.queued} queued{speed}"),
        ("memory", f"{show_bytes(stats.resident_bytes)} in use, {show_bytes(stats.planned_bytes)} planned"),
        ("experts", f"{stats.expert_slots} of {stats.experts} in memory{hits}" if stats.experts else ""),
        ("expert reads", reads_line(stats)),
        ("lookahead", lookahead_line(stats.lookahead) if stats.expert_slots < stats.experts else ""),
        ("sessions", f"{show_bytes(stats.session_bytes)} on disk" if stats.session_bytes else ""),
        *((f"drive {drive.stripe}", drive_line(drive)) for drive in stats.devices),
    ]


_LOOKAHEAD = {
    admin_service_pb2.Lookahead.STATE_OFF: "off",
    admin_service_pb2.Lookahead.STATE_ON: "on",
    admin_service_pb2.Lookahead.STATE_TRYING: "auto, being tried",
    admin_service_pb2.Lookahead.STATE_WINNING: "auto, on since it won its last trial",
    admin_service_pb2.Lookahead.STATE_LOSING: "auto, off since it did not win its last trial",
}


def reads_line(stats: admin_service_pb2.Stats) -> str:
    """All that was read of experts, and on whose behalf; "" while nothing was."""
    if not stats.expert_read_bytes:
        return ""
    ahead = stats.expert_read_bytes - stats.expert_demand_bytes - stats.lookahead.read_bytes
    parts = (
        (stats.expert_demand_bytes, "on demand"),
        (stats.lookahead.read_bytes, "by lookahead"),
        (max(0, ahead), "by warm-up and otherwise ahead"),  # below 0 while reads of lookahead are under way
    )
    told = ", ".join(f"{show_bytes(count)} {what}" for count, what in parts if count)
    return f"{show_bytes(stats.expert_read_bytes)}: {told}"


def lookahead_line(lookahead: admin_service_pb2.Lookahead) -> str:
    """Where the switch stands, and what came of the experts read ahead; "" from a daemon that does not say."""
    state = _LOOKAHEAD.get(lookahead.state, "")
    if not state or not lookahead.predicted:
        return state
    recall = lookahead.right / lookahead.predicted
    return (
        f"{state}; {recall:.1%} of {lookahead.predicted} guesses right, {show_bytes(lookahead.read_bytes)} read ahead, "
        f"{show_bytes(lookahead.wasted_bytes)} of them wasted, about {lookahead.saved_seconds:.1f} s of waiting saved"
    )


def drive_line(drive: admin_service_pb2.Device) -> str:
    """One drive: where, how it is, how it reads, and what went wrong."""
    state = admin_service_pb2.Device.State.Name(drive.state).removeprefix("STATE_").lower()
    how = [drive.backend, "O_DIRECT" if drive.direct else "page cache", "mirrored" if drive.has_mirror else ""]
    numbers = [f"{show_bytes(drive.read_bytes)} read", f"{drive.read_mib_per_second:.1f} MiB/s"]
    if drive.reads:
        numbers.append(f"p99 {drive.latency_ms_p99:.1f} ms")
    counts = ((drive.errors, "errors"), (drive.checksum_errors, "wrong checksums"), (drive.retries, "retries"))
    numbers += [f"{count} {what}" for count, what in (*counts, (drive.mirror_reads, "mirror reads")) if count]
    mirror = f"its mirror {drive.mirror_path} is degraded: {drive.mirror_error}" if drive.mirror_error else ""
    notes = "".join(f"; {text}" for text in (drive.note, drive.last_error, mirror) if text)
    return f"{drive.path}: {state}, {', '.join(filter(None, how))}; {', '.join(numbers)}{notes}"


def _rows(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name + ':':<19}{printable(value)}" for name, value in rows if value)

"""A session's `meta.json`: what is known of it beside its tokens.

Owns the fields and their check; does no I/O. Everything that changes with each turn (position, last use) is read from
the log instead, so this file is written rarely.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

META_VERSION = 1


@dataclass(frozen=True)
class CorruptMark:
    """A part of the log failed its check: `position` tokens were readable, the damaged file is in quarantine. Stays
    until a turn names that position."""

    position: int
    reason: str
    quarantined: str


@dataclass(frozen=True)
class SessionMeta:
    session: str
    content_id: str  # hex SHA-256
    numerics_id: str  # of the KV that is stored
    create_time: float  # Unix seconds
    display_name: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    request_id: str = ""  # of the call that created it
    corrupt: CorruptMark | None = None

    def marked(self, mark: CorruptMark | None) -> SessionMeta:
        return replace(self, corrupt=mark)

    @property
    def etag(self) -> str:
        """Changes when a field that a caller can change does."""
        fields = json.dumps([self.session, self.create_time, self.display_name, sorted(self.labels.items())])
        return hashlib.sha256(fields.encode()).hexdigest()[:16]


def encode_meta(meta: SessionMeta) -> bytes:
    return json.dumps({"version": META_VERSION, **asdict(meta)}, indent=1, sort_keys=True).encode()


def decode_meta(session: str, data: bytes) -> SessionMeta:
    """Raises ValueError for whatever is not the metadata of this session."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ValueError(f"meta.json is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("version") != META_VERSION:
        raise ValueError(f"meta.json is not of version {META_VERSION}")
    meta = SessionMeta(
        session=_text(value, "session"),
        content_id=_text(value, "content_id"),
        numerics_id=_text(value, "numerics_id"),
        create_time=float(_typed(value, "create_time", (int, float))),
        display_name=_text(value, "display_name"),
        labels=_labels(value),
        request_id=_text(value, "request_id"),
        corrupt=_mark(value.get("corrupt")),
    )
    if meta.session != session:
        raise ValueError(f"meta.json is that of session {meta.session!r}")
    return meta


def _typed(value: dict[str, Any], key: str, kinds: type | tuple[type, ...]) -> Any:
    if not isinstance(value.get(key), kinds):
        raise ValueError(f"meta.json: {key} is {value.get(key)!r}")
    return value[key]


def _text(value: dict[str, Any], key: str) -> str:
    text: str = _typed(value, key, str)
    return text


def _labels(value: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = _typed(value, "labels", dict)
    if not all(isinstance(label, str) for label in labels.values()):
        raise ValueError("meta.json: labels are not all text")
    return labels


def _mark(value: Any) -> CorruptMark | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("meta.json: corrupt is not an object")
    return CorruptMark(_typed(value, "position", int), _text(value, "reason"), _text(value, "quarantined"))

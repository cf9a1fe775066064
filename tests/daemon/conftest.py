"""What the tests of the daemon share: a tiny packed model, made once per run, and a process of a daemon's size."""

import pytest

from colibri.daemon import opening
from testkit.models import Tiny, make_tiny

DAEMON_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def process_of_a_daemon_s_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans made in the process of the tests do not count what other tests, with their libraries, have left in it."""
    monkeypatch.setattr(opening, "anonymous_bytes", lambda: DAEMON_BYTES)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A glm4_moe as int4 and int8 over two stripes, with room for long prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny("glm4_moe", folder, precision="", weights=(2, 1), max_position_embeddings=8192)

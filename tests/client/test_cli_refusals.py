"""What the `colibri` command refuses by itself, before it asks the daemon for anything that could not be undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.v1 import types_pb2
from testkit.colibri_command import colibri, run
from testkit.fake_daemon import FakeDaemon

ANSWER = "The capital of France is Paris.\n"


def test_a_damaged_session_goes_on_only_when_the_loss_is_accepted(tmp_path: Path) -> None:
    async def body(daemon: FakeDaemon) -> None:
        reason = "a record is damaged; the damaged file is kept as /state/quarantine/x-tokens.log"
        corrupt = types_pb2.Session(name="sessions/alpha", state=types_pb2.Session.STATE_CORRUPT, degraded=reason)
        corrupt.position = 12
        daemon.sessions[corrupt.name] = corrupt
        assert "CORRUPT" in (await colibri(daemon, "sessions", "list")).out
        shown = (await colibri(daemon, "sessions", "show", "alpha")).out
        assert "state:             CORRUPT\n" in shown
        assert f"damage:            {reason}" in shown
        for flags, lines in ((["--message", "x"], ""), ([], "x\n")):
            refused = await colibri(daemon, "chat", "--session", "alpha", *flags, stdin=lines)
            assert (refused.code, refused.out) == (1, "")
            for part in ("session alpha is damaged", "positions 0 to 11 are left", reason, "--accept-loss"):
                assert part in refused.err
        assert daemon.requests == [], "nothing was asked of the daemon that acknowledges the loss"
        taken = await colibri(daemon, "chat", "--session", "alpha", "--accept-loss", "--message", "x")
        assert (taken.code, taken.out) == (0, ANSWER)
        assert daemon.requests[0].expected_position == 12
        senseless = await colibri(daemon, "chat", "--accept-loss", "--message", "x")
        assert senseless.code == 2
        assert "--accept-loss needs --session" in senseless.err

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-tokens", "-3"), "--max-tokens -3 is not between 1 and 4294967295"),
        (("--max-tokens", "0"), "--max-tokens 0 is not between 1 and 4294967295"),
        (("--top-k", "-1"), "--top-k -1 is not between 0 and 4294967295"),
        (("--session", "abc"), "'abc' cannot name a session: 4 to 63 characters are needed"),
        (("--session", "My_Chat"), "lower-case letters, digits and hyphens, a letter first"),
    ],
)
def test_what_no_daemon_would_take_is_refused_before_it_is_asked(
    tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    async def body(daemon: FakeDaemon) -> None:
        refused = await colibri(daemon, "chat", "--message", "x", *flags)
        assert refused.code == 2
        assert said in refused.err
        assert daemon.requests == []

    run(tmp_path, body)

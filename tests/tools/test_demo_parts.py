"""The parts of the demo that need no daemon: what it says when a step fails, and which process it takes for its own."""

import subprocess
import sys
import time
from pathlib import Path

import demo
import pytest


@pytest.fixture
def place(tmp_path: Path) -> demo.Place:
    return demo.Place(tmp_path, tmp_path / "model")


class TestRun:
    def test_stdout_is_kept_and_stderr_passed_on(self, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        code = "import sys; print('result'); print('progress', file=sys.stderr)"
        outcome = demo.run([sys.executable, "-c", code])
        assert (outcome.stdout, outcome.stderr) == ("result\n", "progress\n")
        assert capfdbinary.readouterr().err == b"progress\n"

    def test_an_answer_goes_straight_to_the_terminal(self, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        demo.run([sys.executable, "-c", "print('answer')"], capture=False)
        assert capfdbinary.readouterr().out == b"answer\n"

    def test_a_failure_shows_the_command_and_its_last_lines(self) -> None:
        code = "import sys; [print('line', i, file=sys.stderr) for i in range(50)]; sys.exit(3)"
        with pytest.raises(demo.DemoError) as failed:
            demo.run([sys.executable, "-c", code])
        text = str(failed.value)
        assert text.startswith("this command failed with code 3:")
        assert "for i in range(50)" in text
        assert text.endswith("line 49")
        assert "line 29\n" not in text


class TestPlace:
    def test_the_socket_has_a_name_that_the_kernel_takes(self, tmp_path: Path) -> None:
        long = demo.Place(tmp_path / ("deep" * 30), tmp_path)
        assert len(str(long.socket)) <= demo.MAX_SOCKET_PATH
        assert demo.Place(Path("/a"), tmp_path).socket == Path("/a/colibrid.sock")

    def test_two_long_places_have_two_sockets(self, tmp_path: Path) -> None:
        one, other = (demo.Place(tmp_path / (name * 120), tmp_path) for name in "ab")
        assert one.socket != other.socket


class TestRunningDaemon:
    def test_no_file_no_daemon(self, place: demo.Place) -> None:
        assert demo.running_daemon(place) is None
        assert not demo.stop_daemon(place)

    @pytest.mark.parametrize("text", ["", "not a number", "4194305"])
    def test_a_useless_file_is_no_daemon(self, place: demo.Place, text: str) -> None:
        place.pid_file.write_text(text)
        assert demo.running_daemon(place) is None

    def test_a_process_that_took_over_the_number_is_left_alone(self, place: demo.Place) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
            place.pid_file.write_text(str(stranger.pid))
            assert not demo.stop_daemon(place)
            assert stranger.poll() is None
            stranger.communicate(b"\n")
        assert stranger.returncode == 0

    def test_our_daemon_is_ended_by_sigterm(self, place: demo.Place) -> None:
        code = "import signal; signal.pause()"
        with subprocess.Popen([sys.executable, "-c", code, str(place.state)]) as daemon:
            place.pid_file.write_text(str(daemon.pid))
            wait_until_started(daemon.pid, place)
            assert demo.stop_daemon(place)
        assert not place.pid_file.exists()


def wait_until_started(pid: int, place: demo.Place) -> None:
    """Until exec has happened, the new process shows the command line of this one."""
    deadline = time.monotonic() + 30
    while demo.running_daemon(place) != pid:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestResumption:
    def test_all_but_the_last_token_must_be_on_disk(self) -> None:
        before = {"position": 40}
        assert demo.check_returned(before, {"position": 40, "kv_position": 39}) == 39
        assert demo.check_returned(before, {"position": 40, "kv_position": 40}) == 40
        with pytest.raises(demo.DemoError, match="only 38 of the session's 40"):
            demo.check_returned(before, {"position": 40, "kv_position": 38})

    def test_a_lost_session_is_an_error(self) -> None:
        with pytest.raises(demo.DemoError, match="came back as None"):
            demo.check_returned({"position": 40}, None)
        with pytest.raises(demo.DemoError, match="came back as"):
            demo.check_returned({"position": 40}, {"position": 12, "kv_position": 12})

    def test_recomputing_is_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        demo.check_nothing_recomputed(found=39, prompt=60, cached=39)
        assert capsys.readouterr().out == "earlier positions: 39, of which computed again: 0; new in this prompt: 21\n"
        with pytest.raises(demo.DemoError, match="7 of 39 earlier positions were computed again"):
            demo.check_nothing_recomputed(found=39, prompt=60, cached=32)


def test_the_session_that_the_user_is_told_of_is_not_the_one_that_every_run_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = demo.Place(tmp_path, tmp_path)
    commands: list[list[str]] = []

    def run(command: demo.Command) -> demo.Outcome:
        commands.append([str(word) for word in command])
        return demo.Outcome(f'[{{"name": "sessions/{demo.SESSION}"}}, {{"name": "sessions/{demo.USER_SESSION}"}}]', "")

    monkeypatch.setattr(demo, "run", run)
    demo.forget_session(place)
    removed = commands[-1][commands[-1].index("rm") + 1]
    assert removed == demo.SESSION
    assert f"--session {demo.USER_SESSION}\n" in demo.how_to_go_on(place, 1)
    assert removed != demo.USER_SESSION

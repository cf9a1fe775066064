"""Rules for every test: as root nothing is skipped but what tests/allowed_skips.txt lists; how workers share the tests.

A skipped test is a promise that nobody checks. The list names each one with its reason; an entry covers a test, its
parameters, or a whole file. A test that is expected to fail counts as skipped.

`make test` runs two workers (pytest-xdist). A file's tests stay together, because they share what its fixtures make,
and so do all tests of the small real model, which is built once.
"""

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # a plain pytest works without the plugin
    from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["testkit.small_model", "testkit.small_packs"]

# A busy machine is slow, not wrong; a failing example comes with what it takes to repeat it.
settings.register_profile("colibri", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("colibri")

SMALL_MODEL_FIXTURES = {"small_model", "fresh_small_model", "small_pack"}
SMALL_MODEL_FILES = {
    "tests/law1/test_small_model.py",
    "tests/oracle/test_oracle_small_model.py",
    "tests/tools/test_demo.py",
    "tests/tools/test_small_model.py",
}
ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
_skipped: pytest.StashKey[list[str]] = pytest.StashKey()


def allowed_skips(text: str) -> list[str]:
    """Return the node ids listed in `text`; each line is `node id  # reason`, and the reason is not optional."""
    entries = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            entry, _, reason = line.partition("#")
            if not reason.strip():
                raise pytest.UsageError(f"allowed_skips.txt: {entry.strip()!r} gives no reason")
            entries.append(entry.strip())
    return entries


def is_allowed(node: str, entries: list[str]) -> bool:
    return any(node == entry or node.startswith((entry + "[", entry + "::")) for entry in entries)


def scope(node: str) -> str:
    """Return what the tests that must run in the same worker as `node` have in common."""
    file = node.partition("::")[0]
    return "small model" if file in SMALL_MODEL_FILES else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the small real model first: what takes longest must not start last."""
    for item in items:
        uses = SMALL_MODEL_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if uses and scope(item.nodeid) != "small model":
            raise pytest.UsageError(f"{item.nodeid} uses {uses.pop()}: name its file in SMALL_MODEL_FILES")
    items.sort(key=lambda item: scope(item.nodeid) != "small model")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadScopeScheduling":
    from xdist.scheduler import LoadScopeScheduling

    class FilesTogether(LoadScopeScheduling):  # type: ignore[misc]  # the plugin has no types
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False  # in the order of collection
    return FilesTogether(config, log)


def heed_ctrl_c() -> None:
    """Undo an ignored SIGINT, which background jobs of a shell inherit and hand on to what the tests start."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    heed_ctrl_c()
    config.stash[_skipped] = []


class _Recorder:
    def __init__(self, nodes: list[str]) -> None:
        self._nodes = nodes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._nodes.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._nodes.append(report.nodeid)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(_Recorder(session.config.stash[_skipped]), "skip-recorder")


def _forbidden(config: pytest.Config) -> list[str]:
    entries = allowed_skips(ALLOWED_SKIPS.read_text())
    return [node for node in config.stash[_skipped] if os.geteuid() == 0 and not is_allowed(node, entries)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and _forbidden(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for node in _forbidden(config):
        terminalreporter.write_line(
            f"SKIPPED WITHOUT LEAVE {node}: as root it must run or stand in allowed_skips.txt", red=True
        )

"""`colibrid`: serve, plan and check, from a TOML file and flags.

Owns the command line and the exit codes: 0 done, 1 failed, 2 wrong usage, 75 try again later, 78 the configuration
or the container is at fault (systemd then does not start it again).
"""

from __future__ import annotations

import os

# Read by gRPC when it is first imported. Nothing here forks, and its fork handlers can deadlock.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import argparse
import asyncio
import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Sequence
from importlib import metadata

from colibri.daemon import check as checks
from colibri.daemon import trace
from colibri.daemon.config import KEYS, Config, ConfigError, add_flags, load_config
from colibri.daemon.endpoint import Endpoint, EndpointError
from colibri.daemon.journal import set_up_logging
from colibri.daemon.notify import Notifier
from colibri.daemon.opening import EXIT_CONFIG, EXIT_OK, EXIT_TEMPORARY, Opened, StartError, open_model
from colibri.daemon.requests import SamplingDefaults
from colibri.daemon.runtime import CoreRuntime
from colibri.daemon.server import Server

log = logging.getLogger("colibri.daemon")

_EXIT_CODES = """\
exit codes: 0 done; 1 the engine failed while running, or a trace cannot be read; 2 wrong usage; 75 try again later
(socket or state folder in use, a drive or memory not there now); 78 the configuration or the container is at fault.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibrid",
        description="Serves one packed Mixture-of-Experts model over gRPC and keeps sessions.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"colibrid {metadata.version('colibri')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    texts = {
        "serve": "run the daemon in the foreground",
        "plan": "print the memory table, or why it does not fit",
        "check": "say whether the daemon could start, and what stands in its way",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EXIT_CODES)
        add_flags(command)
        if name != "serve":
            command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    trace.add_parser(commands, _EXIT_CODES)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    options = make_parser().parse_args(arguments)
    if options.command == "trace":
        return trace.run(options)
    faulthandler.enable()
    try:
        config = load_config({name: getattr(options, name) for name in KEYS}, options.config)
    except ConfigError as error:
        return _fail(StartError(str(error)), getattr(options, "json", False))
    set_up_logging(config.log_level)
    if options.command == "serve":
        return serve(config)
    if options.command == "plan":
        return plan(config, options.json)
    return check(config, options.json)


def plan(config: Config, as_json: bool) -> int:
    try:
        with open_model(config) as opened:
            table = opened.table
            document = {**table.as_json(), "reading": opened.reading}
            print(json.dumps(document) if as_json else f"{table.text()}\n{opened.streamed}\n{opened.reading}")
            return EXIT_OK
    except StartError as error:
        return _fail(error, as_json)


def check(config: Config, as_json: bool) -> int:
    findings = checks.run_checks(config)
    print(json.dumps(checks.as_json(findings)) if as_json else checks.as_text(findings))
    return checks.exit_code(findings)


def serve(config: Config) -> int:
    """Runs the daemon until a signal. The locks of the state folder and the socket come before everything that costs
    time or memory."""
    endpoint = None
    try:
        endpoint = Endpoint(config.listen)
        with open_model(config) as opened:
            return _run(config, opened)
    except EndpointError as error:
        return _fail(StartError(str(error), EXIT_TEMPORARY if error.busy else EXIT_CONFIG), False)
    except StartError as error:
        return _fail(error, False)
    finally:
        if endpoint is not None:
            endpoint.release()


def _run(config: Config, opened: Opened) -> int:
    for note in (*opened.container.warnings, *opened.text.problems, *opened.text.notes):
        log.warning("%s", note)
    for setting in SamplingDefaults.of(opened.text.generation_config).ignored:
        log.warning("generation_config.json: %s is not applied by this version", setting)
    log.info("memory plan\n%s", opened.table.text())
    log.info("%s", opened.streamed)
    log.info("%s", opened.reading)
    runtime = CoreRuntime(config, opened)

    async def run() -> tuple[int, bool]:
        notifier = Notifier(warn=log.warning)
        server = Server(config.listen, opened.text, opened.facts, runtime, notifier, config.heartbeat)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
        return await server.run(), server.loading_abandoned

    code, abandoned = asyncio.run(run())
    if abandoned:
        # A thread is inside the core, reading weights. Waiting for it could take minutes, and freeing what it uses
        # would be wrong; nothing has been written, so the process can simply end.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


def _fail(error: StartError, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.as_json()))
    else:
        message = str(error)
        separator = "\n" if "\n" in message else " "  # a table keeps its columns
        print(f"colibrid:{separator}{message}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

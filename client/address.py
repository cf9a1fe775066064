"""Where the daemon is: the address given, else COLIBRI_ADDR, else the only socket under /run/colibri/*/.

Refuses to guess between several, and refuses TCP beyond the own machine: this client speaks no TLS. Tells what is wrong
with a socket's path, which gRPC reports as one and the same failure.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from colibri.client.errors import AddressError, NobodyThereError

RUN_FOLDER = Path("/run/colibri")
VARIABLE = "COLIBRI_ADDR"
CONNECT_SECONDS = 5.0


def resolve(
    given: str | None = None, *, environment: Mapping[str, str] = os.environ, run_folder: Path = RUN_FOLDER
) -> str:
    """A gRPC target, `unix:<path>` or `<host>:<port>`. Raises AddressError naming what was looked at."""
    address = given or environment.get(VARIABLE)
    return parse(address) if address else _only_socket(run_folder)


def parse(address: str) -> str:
    """Accepts `unix:<path>`, a path with a slash in it, or `<host>:<port>` of the own machine. A path may begin with
    `~/` or `~user/`: behind `unix:` no shell replaces it."""
    try:
        address.encode("utf-8")
    except UnicodeEncodeError:
        raise AddressError(f"address {address!r} is not UTF-8") from None
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        return f"unix:{_expanded(path)}" if path.startswith("~") else address
    if "/" in address and "://" not in address:
        return f"unix:{_expanded(address).absolute()}"
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AddressError(f"address {address!r} is neither unix:<path>, a socket's path nor <host>:<port>")
    if not _is_loopback(host):
        raise AddressError(f"address {address!r} is not on this machine: without TLS only loopback addresses are used")
    return address


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise AddressError(f"address {path!r}: there is no home folder for {path.partition('/')[0]}") from None


def check_socket(target: str) -> None:
    """Tries to connect to the path of a `unix:` target; other targets, and failures not named here, are left to gRPC.

    Raises NobodyThereError if nothing is there or nobody listens, AddressError if it is no socket or not for this user.
    """
    if not target.startswith("unix:"):
        return
    path = target.removeprefix("unix:").removeprefix("//")
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise AddressError(f"{path} is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_SECONDS)
            probe.connect(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NobodyThereError(f"no daemon at {path}") from None
    except ConnectionRefusedError:
        raise NobodyThereError(f"{path} is there, but nobody listens") from None
    except PermissionError:
        raise AddressError(f"no access to {path}: are you in its group?") from None
    except OSError:
        return


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _only_socket(run_folder: Path) -> str:
    sockets = [path for path in sorted(run_folder.glob("*/*")) if _is_socket(path)]
    if len(sockets) == 1:
        return f"unix:{sockets[0]}"
    found = "several sockets" if sockets else "no socket"
    names = "".join(f"\n  {path}" for path in sockets)
    raise AddressError(f"{found} under {run_folder}/*/: give --addr or set {VARIABLE}{names}")


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False

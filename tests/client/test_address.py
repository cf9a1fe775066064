"""Where the client looks for a daemon, and which addresses it refuses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from colibri.client import AddressError, NobodyThereError
from colibri.client.address import check_socket, parse, resolve


def listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


def test_given_goes_before_environment_goes_before_the_only_socket(tmp_path: Path) -> None:
    with listen(tmp_path / "glm" / "colibri.sock"):
        environment = {"COLIBRI_ADDR": "unix:/from/environment"}
        assert resolve("unix:/given", environment=environment, run_folder=tmp_path) == "unix:/given"
        assert resolve(environment=environment, run_folder=tmp_path) == "unix:/from/environment"
        assert resolve(environment={}, run_folder=tmp_path) == f"unix:{tmp_path}/glm/colibri.sock"


def test_no_socket_and_several_sockets_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "not-a-socket").touch()
    with pytest.raises(AddressError, match=f"no socket under {tmp_path}"):
        resolve(environment={}, run_folder=tmp_path)
    with listen(tmp_path / "one" / "a.sock"), listen(tmp_path / "two" / "b.sock"):
        with pytest.raises(AddressError, match="several sockets") as caught:
            resolve(environment={}, run_folder=tmp_path)
        assert f"{tmp_path}/one/a.sock" in str(caught.value)
        assert f"{tmp_path}/two/b.sock" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("unix:/a/b.sock", "unix:/a/b.sock"),
        ("/a/b.sock", "unix:/a/b.sock"),
        ("localhost:50051", "localhost:50051"),
        ("127.0.0.2:1", "127.0.0.2:1"),
        ("[::1]:65535", "[::1]:65535"),
    ],
)
def test_usable_addresses(address: str, target: str) -> None:
    assert parse(address) == target


def test_a_relative_path_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("./x.sock") == f"unix:{tmp_path}/x.sock"


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/people/ada")
    assert parse("unix:~/run/x.sock") == parse("~/run/x.sock") == "unix:/people/ada/run/x.sock"
    assert parse("unix:/a/~/x.sock") == "unix:/a/~/x.sock"
    for address in ("unix:~nobody-of-this-name/x.sock", "~nobody-of-this-name/x.sock"):
        with pytest.raises(AddressError, match=r"no home folder for ~nobody-of-this-name$"):
            parse(address)


@pytest.mark.parametrize("address", ["example.org:50051", "10.0.0.1:50051", "0.0.0.0:1", "[::]:1"])
def test_tcp_beyond_this_machine_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="only loopback"):
        parse(address)


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":50051", "localhost:0", "localhost:65536", "http://x/y"]
)
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(AddressError, match="neither"):
        parse(address)


def test_an_address_that_is_not_utf_8_is_refused() -> None:
    for address in ("unix:/run/\udcff.sock", "/run/\udcff.sock", "localhost\udcff:1"):
        with pytest.raises(AddressError, match="not UTF-8"):
            parse(address)


@contextmanager
def somebody_else() -> Iterator[None]:
    """Root may open everything: it tries as nobody."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


def test_what_is_wrong_with_a_socket_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    for target in (f"unix:{path}", f"unix:{path}/below"):
        with pytest.raises(NobodyThereError, match=f"^no daemon at {target.removeprefix('unix:')}$"):
            check_socket(target)
    with listen(path) as listener:
        with pytest.raises(NobodyThereError, match=f"^{path} is there, but nobody listens$"):
            check_socket(f"unix:{path}")
        listener.listen()
        check_socket(f"unix:{path}")
        check_socket(f"unix://{path}")
        path.chmod(0)
        with somebody_else(), pytest.raises(AddressError, match=f"^no access to {path}: are you in its group"):
            check_socket(f"unix:{path}")
    (tmp_path / "file").touch()
    with pytest.raises(AddressError, match=f"^{tmp_path}/file is not a socket$"):
        check_socket(f"unix:{tmp_path}/file")


def test_what_is_no_path_is_left_to_grpc() -> None:
    check_socket("localhost:1")

"""The daemon's configuration: a TOML file, every key of it also a flag, and nothing that is not understood.

Owns the keys, their types, limits and defaults. Knows nothing of what a container needs (plan.py) or whether the
folders exist (check.py). Flags override the file; a relative path in the file is relative to the file's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
MAX_SOCKET_PATH = 107  # sizeof(sockaddr_un.sun_path) - 1
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, **{letter + "b": 1000**power for power, letter in enumerate("kmgt", 1)}}
_UNITS |= {letter + "ib": 1024**power for power, letter in enumerate("kmgt", 1)}


class ConfigError(ValueError):
    """A configuration that cannot be used; the text names the file, the key and the limit."""


Parser = Callable[[Any, Path], Any]


def _path(value: Any, base: Path) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("a path is expected")
    try:
        return base / Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home folder for {Path(value).parts[0]}") from None


def _path_or_none(value: Any, base: Path) -> Path | None:
    return None if value == "" else _path(value, base)


def _paths(value: Any, base: Path) -> tuple[Path, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("a list of folders is expected")
    return tuple(_path(item, base) for item in value)


def _integer(low: int, high: int) -> Parser:
    def parse(value: Any, _: Path) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high} is expected")
        return value

    return parse


def _seconds(low: float, high: float) -> Parser:
    def parse(value: Any, _: Path) -> float:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
        if not low <= number <= high:  # false for NaN too
            raise ValueError(f"a number of seconds from {low:g} to {high:g} is expected")
        return number

    return parse


def _number(low: float, high: float) -> Parser:
    def parse(value: Any, _: Path) -> float:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
        if not low <= number <= high:  # false for NaN too
            raise ValueError(f"a number from {low:g} to {high:g} is expected")
        return number

    return parse


def _speed(value: Any, _: Path) -> float:
    """MB/s; 0 for "off"."""
    if value == "off":
        return 0.0
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if not 0.1 <= number <= 100_000:  # false for NaN too
        raise ValueError('a number of MB/s from 0.1 to 100000 is expected, or "off"')
    return number


def _choice(*allowed: str) -> Parser:
    def parse(value: Any, _: Path) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)} is expected")
        return str(value)

    return parse


def parse_size(text: str) -> int:
    """Bytes of "900 MiB", "1.5GB" or "1073741824". Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError('a size such as 24GiB or 900MB is expected, or "auto"')
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _memory(value: Any, _: Path) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if not isinstance(value, str) or (size := parse_size(value)) <= 0:
        raise ValueError('a size such as 24GiB or 900MB is expected, or "auto"')
    return size


@dataclass(frozen=True)
class Address:
    """Where to listen: a Unix socket, or a loopback address. `target` is what grpcio binds."""

    target: str
    path: Path | None = None  # of the Unix socket


def parse_address(value: Any, base: Path) -> Address:
    """Reads "unix:PATH" or "HOST:PORT" with a loopback host. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError('"unix:PATH" or "127.0.0.1:PORT" is expected')
    if value.startswith("unix:"):
        path = _path(value.removeprefix("unix:").removeprefix("//"), base).absolute()
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ValueError(f"{path} is longer than the {MAX_SOCKET_PATH} bytes that a socket's path may have")
        return Address(f"unix:{path}", path)
    host, separator, port = value.rpartition(":")
    if not separator or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError('"unix:PATH" or "127.0.0.1:PORT" is expected')
    if not _is_loopback(host):
        raise ValueError(
            f"{host or 'an empty host'} is not a loopback address; this version has neither TLS nor accounts, "
            "so it serves Unix sockets and loopback only"
        )
    return Address(value)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_UNIT = "needed, unless systemd gives "


def _ring(value: Any, base: Path) -> int:
    """0, or as many as the core needs at least, which is 2."""
    return 0 if value == 0 and not isinstance(value, bool) else int(_integer(2, 1024)(value, base))


def _about(parse: Parser, text: str) -> dict[str, Any]:
    return {"parse": parse, "help": text}


def _key(parse: Parser, text: str, default: Any) -> Any:
    return field(default=default, metadata=_about(parse, text))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every key of the configuration. `memory` None: as much as the machine and the cgroup leave."""

    container: Path = field(metadata=_about(_path, "folder with the container's manifest.json (needed)"))
    listen: Address = field(
        metadata=_about(parse_address, f"unix:PATH, or HOST:PORT on a loopback address ({_UNIT}RUNTIME_DIRECTORY)")
    )
    state: Path = field(metadata=_about(_path, f"folder for sessions ({_UNIT}STATE_DIRECTORY)"))
    stripes: tuple[Path, ...] = _key(_paths, "folders of the container's further stripes, in any order", ())
    memory: int | None = _key(
        _memory, "memory for all of the daemon, such as 24GiB; auto: most of what is available (default: auto)", None
    )
    expert_slots: int = _key(_integer(0, 2**32 - 1), "experts kept in memory; 0: as many as fit", 0)
    ring_slots: int = _key(
        _ring, "read buffers beside the expert slots, for prompts and cold experts; 0: 8, of few slots a third", 0
    )
    kv_dtype: str = _key(_choice("f16", "f32"), "number format of keys and values: f16, f32", "f16")
    max_context: int = _key(_integer(0, 2**31 - 1), "longest context in tokens; 0: the model's own limit", 8192)
    kv_tokens: int = _key(
        _integer(0, 2**40), "positions with KV in memory, all sequences together; 0: two full contexts", 0
    )
    pass_tokens: int = _key(_integer(1, 2**20), "longest piece of a prompt that is worked on at once", 512)
    max_sequences: int = _key(_integer(1, 1024), "generations that decode at the same time", 8)
    threads: int = _key(_integer(0, 1024), "compute threads; 0: one per core", 0)
    lookahead: str = _key(
        _choice("auto", "on", "off"),
        "experts read before their router has chosen: auto (decoding only where it is measured to win), on, off",
        "auto",
    )
    io_backend: str = _key(
        _choice("auto", "io_uring", "threads"),
        "how experts are read: auto (io_uring where the kernel allows it), io_uring, threads",
        "auto",
    )
    io_depth: int = _key(_integer(0, 256), "reads in flight per stripe with io_uring; 0: the core's default", 0)
    io_threads: int = _key(_integer(0, 64), "reading threads per stripe, where threads read; 0: four", 0)
    verify: str = _key(
        _choice("always", "first", "never"), "when the bytes of an expert are checked: always, first, never", "always"
    )
    direct: str = _key(_choice("auto", "on", "off"), "O_DIRECT for expert reads: auto, on, off", "auto")
    activation: str = _key(_choice("i16", "i8"), "activations against quantised weights: i16, i8", "i16")
    isa: str = _key(_choice("auto", "generic", "avx2"), "instruction set: auto, generic, avx2", "auto")
    queue_limit: int = _key(_integer(1, 100_000), "generations that may wait; one more is refused", 64)
    heartbeat: float = _key(_seconds(0.05, 3600), "seconds between signs of life on a silent stream", 5.0)
    fsync: str = _key(_choice("token", "turn", "off"), "when the token log is synced: token, turn, off", "token")
    retention: float = _key(
        _seconds(3600, 30 * 86400), "seconds for which a finished generation can be read again", 86400.0
    )
    heat_half_life: float = _key(
        _number(0, 1e9), "decode steps after which a use of an expert counts half; 0: the core's default", 0.0
    )
    pins: str = _key(
        _choice("auto", "on", "off"),
        "keep learned heat over restarts and read hot experts ahead: auto (where not all experts fit), on, off",
        "auto",
    )
    trace: Path | None = field(
        default=None, metadata=_about(_path_or_none, "file to record routing in; FILE.1, FILE.2 ... if it exists")
    )
    scrub: float = _key(_speed, "MB/s at which an idle daemon reads its container, once a week; or off", 16.0)
    log_level: str = _key(_choice(*LEVELS), "debug, info, warning, error", "info")


KEYS: dict[str, Field[Any]] = {key.name: key for key in fields(Config)}


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --config and one flag per key; a flag that is not given stays None."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; each of its keys is also a flag")
    group = parser.add_argument_group("keys of the configuration")
    for name, key in KEYS.items():
        repeated: dict[str, Any] = {"action": "append"} if name == "stripes" else {}
        group.add_argument(flag_of(name), dest=name, metavar=name.upper(), default=None, help=_help(key), **repeated)


def _help(key: Field[Any]) -> str:
    text = str(key.metadata["help"])
    if key.name == "stripes":
        return text + "; one --stripes for each (default: none)"
    if key.default in (MISSING, None):
        return text
    return (
        f"{text} (default: {key.default:g})" if isinstance(key.default, float) else f"{text} (default: {key.default})"
    )


def load_config(
    arguments: Mapping[str, Any] | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of file, flags (`arguments`: key to value, None where not given) and environment.

    systemd's STATE_DIRECTORY and RUNTIME_DIRECTORY stand in for `state` and `listen`. Raises ConfigError.
    """
    environment = os.environ if environment is None else environment
    values = _defaults_of_the_unit(environment)
    if file is not None:
        values |= _read_file(file)
    for name, value in (arguments or {}).items():
        if value is not None:
            values[name] = _parse(name, _of_flag(name, value), Path(), flag_of(name))
    for name, key in KEYS.items():
        if name not in values and key.default is MISSING:
            where = f" in {file}" if file else ""
            raise ConfigError(f"{name} is not set: give {flag_of(name)}, or the key {name}{where}")
    return Config(**values)


def _defaults_of_the_unit(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if state := environment.get("STATE_DIRECTORY"):
        values["state"] = _parse("state", state, Path(), "STATE_DIRECTORY")
    if runtime := environment.get("RUNTIME_DIRECTORY"):
        values["listen"] = _parse("listen", f"unix:{runtime}/colibrid.sock", Path(), "RUNTIME_DIRECTORY")
    return values


def _read_file(file: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    unknown = [name for name in raw if name not in KEYS]
    if unknown:
        raise ConfigError(f"{file}: unknown key {unknown[0]!r}; the keys are {', '.join(KEYS)}")
    return {name: _parse(name, value, file.absolute().parent, f"{file}: {name}") for name, value in raw.items()}


def _of_flag(name: str, value: Any) -> Any:
    """A flag's text as the number that its key is in a file; what is none stays text, which the key then refuses."""
    default = KEYS[name].default
    if isinstance(value, str) and isinstance(default, int) and re.fullmatch(r"[0-9]+", value):
        return int(value)
    if isinstance(value, str) and isinstance(default, float):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _parse(name: str, value: Any, base: Path, where: str) -> Any:
    try:
        return KEYS[name].metadata["parse"](value, base)
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r}: {error}") from error

"""The configuration: a TOML file, every key also a flag, nothing that is not understood."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from colibri.daemon.config import KEYS, Config, ConfigError, add_flags, flag_of, load_config, parse_size

NEEDED = {"container": "/c", "listen": "unix:/run/x.sock", "state": "/s"}
# A value of every key that differs from its default: as TOML, and as what the daemon gets.
OTHER: dict[str, tuple[str, str, Any]] = {
    "container": ('"/d"', "/d", Path("/d")),
    "state": ('"/t"', "/t", Path("/t")),
    "memory": ('"24GiB"', "24GiB", 24 << 30),
    "expert_slots": ("7", "7", 7),
    "ring_slots": ("5", "5", 5),
    "kv_dtype": ('"f32"', "f32", "f32"),
    "max_context": ("512", "512", 512),
    "kv_tokens": ("4096", "4096", 4096),
    "pass_tokens": ("64", "64", 64),
    "max_sequences": ("3", "3", 3),
    "threads": ("2", "2", 2),
    "lookahead": ('"off"', "off", "off"),
    "io_backend": ('"threads"', "threads", "threads"),
    "io_depth": ("9", "9", 9),
    "io_threads": ("3", "3", 3),
    "verify": ('"first"', "first", "first"),
    "heat_half_life": ("500", "500", 500.0),
    "pins": ('"off"', "off", "off"),
    "trace": ('"/t/trace"', "/t/trace", Path("/t/trace")),
    "scrub": ("2.5", "2.5", 2.5),
    "direct": ('"off"', "off", "off"),
    "activation": ('"i8"', "i8", "i8"),
    "isa": ('"generic"', "generic", "generic"),
    "queue_limit": ("9", "9", 9),
    "heartbeat": ("1.5", "1.5", 1.5),
    "fsync": ('"turn"', "turn", "turn"),
    "retention": ("7200", "7200", 7200.0),
    "log_level": ('"debug"', "debug", "debug"),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "colibri.toml"
    path.write_text(text)
    return path


def toml(values: dict[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in values.items())


def flags(*arguments: str) -> dict[str, Any]:
    """What the command line gives, without the keys that it leaves out."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = vars(parser.parse_args(arguments))
    return {key: given[key] for key in KEYS if given[key] is not None}


def needed(without: str = "") -> dict[str, str]:
    return {key: f'"{value}"' for key, value in NEEDED.items() if key != without}


@pytest.mark.parametrize(("text", "rate"), [('"off"', 0.0), ("5", 5.0), ("0.1", 0.1)])
def test_scrub_is_a_speed_or_off(tmp_path: Path, text: str, rate: float) -> None:
    assert load_config({}, write(tmp_path, toml(needed() | {"scrub": text})), {}).scrub == rate
    assert load_config(NEEDED | flags("--scrub", text.strip('"')), None, {}).scrub == rate


def test_an_empty_trace_is_none(tmp_path: Path) -> None:
    assert load_config({}, write(tmp_path, toml(needed() | {"trace": '""'})), {}).trace is None


@pytest.mark.parametrize("text", ['"on"', '"5"', "0", "0.05", "-1", "nan", "true", "1e9"])
def test_what_is_no_speed_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r'scrub: .*: a number of MB/s from 0.1 to 100000 is expected, or "off"'):
        load_config({}, write(tmp_path, toml(needed() | {"scrub": text})), {})


def test_every_key_is_tried_here() -> None:
    assert set(OTHER) | {"listen", "stripes"} == set(KEYS)


@pytest.mark.parametrize("key", OTHER)
def test_a_key_of_the_file_and_its_flag_mean_the_same(tmp_path: Path, key: str) -> None:
    written, given, expected = OTHER[key]
    from_file = load_config({}, write(tmp_path, toml(needed(key) | {key: written})), {})
    from_flag = load_config(NEEDED | flags(flag_of(key), given), None, {})
    assert getattr(from_file, key) == getattr(from_flag, key) == expected
    if key not in NEEDED:
        assert getattr(load_config(NEEDED, None, {}), key) != expected


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, toml(needed() | {"threads": "4"}))
    assert load_config(flags("--threads", "2"), file, {}).threads == 2
    assert load_config(flags(), file, {}).threads == 4


def test_stripes_are_a_list_in_the_file_and_a_repeated_flag(tmp_path: Path) -> None:
    file = write(tmp_path, toml(needed() | {"stripes": '["/a", "b"]'}))
    assert load_config({}, file, {}).stripes == (Path("/a"), tmp_path / "b")
    both = NEEDED | {"stripes": flags("--stripes", "/a", "--stripes", "/b")["stripes"]}
    assert load_config(both, None, {}).stripes == (Path("/a"), Path("/b"))


def test_relative_paths_of_the_file_start_at_its_folder(tmp_path: Path) -> None:
    config = load_config({}, write(tmp_path, 'container = "c"\nlisten = "unix:run/x"\nstate = "s"\n'), {})
    assert (config.container, config.state) == (tmp_path / "c", tmp_path / "s")
    assert config.listen.path == tmp_path / "run/x"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/people/ada")
    given = {"container": "~/c", "listen": "unix:~/run/x.sock", "state": "~/s"}
    from_file = load_config({}, write(tmp_path, toml({key: f'"{value}"' for key, value in given.items()})), {})
    for config in (from_file, load_config(given, None, {})):
        assert (config.container, config.state) == (Path("/people/ada/c"), Path("/people/ada/s"))
        assert config.listen.target == "unix:/people/ada/run/x.sock"
    for key in given:
        with pytest.raises(ConfigError, match=f"--{key}: .*: there is no home folder for ~nobody-of-this-name"):
            load_config(given | {key: given[key].replace("~", "~nobody-of-this-name")}, None, {})


def test_systemd_s_folders_stand_in(tmp_path: Path) -> None:
    config = load_config({"container": "/c"}, None, {"STATE_DIRECTORY": "/var/s", "RUNTIME_DIRECTORY": "/run/r"})
    assert config.state == Path("/var/s")
    assert config.listen.target == "unix:/run/r/colibrid.sock"
    file = write(tmp_path, toml(needed()))
    assert load_config({}, file, {"STATE_DIRECTORY": "/var/s"}).state == Path("/s")


@pytest.mark.parametrize("key", NEEDED)
def test_what_is_needed_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is not set: give --{key}"):
        load_config({}, write(tmp_path, toml(needed(key))), {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("experts_slots = 3\n", "colibri.toml: unknown key 'experts_slots'"),
        ("[memory]\nbudget = 3\n", "colibri.toml: memory: .*a size such as"),
        ("threads = 1\nthreads = 2\n", "colibri.toml: not valid TOML"),
        ("threads = true\n", "colibri.toml: threads: True: a whole number from 0 to 1024"),
        ("threads = -1\n", "threads: -1"),
        ("threads = 1.5\n", "threads: 1.5"),
        ('max_context = "8192"\n', "colibri.toml: max_context: '8192': a whole number"),
        ('heartbeat = "5"\n', "colibri.toml: heartbeat: '5': a number of seconds"),
        ("heartbeat = 0\n", "heartbeat: 0: a number of seconds from 0.05"),
        ("heartbeat = nan\n", "heartbeat: nan"),
        ('memory = "much"\n', "memory: 'much'"),
        ("memory = 0\n", "memory: 0"),
        ('memory = "0 GiB"\n', "memory: '0 GiB'"),
        ('kv_dtype = "f64"\n', "kv_dtype: 'f64': one of f16, f32"),
        ('fsync = "never"\n', "fsync: 'never': one of token, turn, off"),
        ("stripes = 3\n", "stripes: 3: a list of folders"),
        ('stripes = [""]\n', "a path is expected"),
        ("container = 3\n", "container: 3: a path is expected"),
        ("retention = 60\n", "retention: 60: .*from 3600"),
        ("ring_slots = 1\n", "ring_slots: 1: a whole number from 2"),
    ],
)
def test_what_is_not_understood_is_named_with_the_file(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(NEEDED, write(tmp_path, text), {})


@pytest.mark.parametrize(
    ("listen", "named"),
    [
        ("0.0.0.0:50051", "0.0.0.0 is not a loopback address"),
        ("[::]:50051", r"\[::\] is not a loopback address"),
        ("example.org:1", "example.org is not a loopback"),
        (":50051", "an empty host"),
        ("127.0.0.1", "HOST:PORT|127.0.0.1:PORT"),
        ("127.0.0.1:99999", "is expected"),
        ("unix:", "a path is expected"),
        ("unix:/" + "x" * 107, "longer than the 107 bytes"),
    ],
)
def test_only_unix_sockets_and_loopback_are_served(listen: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(NEEDED | {"listen": listen}, None, {})


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.1.2.3:50051", "[::1]:50051", "localhost:50051"])
def test_loopback_addresses_are_taken(listen: str) -> None:
    config = load_config(NEEDED | {"listen": listen}, None, {})
    assert (config.listen.target, config.listen.path) == (listen, None)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("2 KiB", 2048), ("2kb", 2000), ("1.5GiB", 3 << 29), ("3MB", 3_000_000), ("1TiB", 1 << 40), ("7B", 7)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load_config(NEEDED, tmp_path / "absent.toml", {})
    (tmp_path / "bad.toml").write_bytes(b"threads = 1\n\xff")
    with pytest.raises(ConfigError, match=r"bad\.toml: not UTF-8 at byte 12"):
        load_config(NEEDED, tmp_path / "bad.toml", {})


def test_the_defaults_are_legal_values() -> None:
    config = load_config(NEEDED, None, {})
    for name, key in KEYS.items():
        value = getattr(config, name)
        if name not in NEEDED and value is not None:
            assert key.metadata["parse"](value, Path()) == value
    assert config == Config(**{name: getattr(config, name) for name in NEEDED})

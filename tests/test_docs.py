"""The documents speak of what is there: links, files, commands, flags, keys, exit codes, make targets, the example."""

import argparse
import asyncio
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

from colibri.client import cli as client_cli
from colibri.daemon import cli as daemon_cli
from colibri.daemon import opening
from colibri.daemon.config import KEYS
from colibri.packer import cli as packer_cli
from colibri.packer.families import FAMILIES
from testkit.fake_daemon import fake_daemon
from testkit.repository import PACKAGES, ROOT, relative, source_files

DOCUMENTS = tuple(source_files(".md"))
FOLDERS = "client|csrc|daemon|docs|packer|proto|systemd|tests|tools"
NEEDED = {"container", "listen", "state"}
CLIENT_CODES = {value for name, value in vars(client_cli).items() if name.startswith("EX_")}
DAEMON_CODES = {value for name, value in vars(opening).items() if name.startswith("EXIT_")}

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=relative)


# ---- reading a document


def code(text: str) -> Iterator[str]:
    """The lines of code blocks (fenced, or indented by four), and the code spans of everything else."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            yield line
        elif line.startswith("    "):
            yield line.strip()
        else:
            yield from re.findall(r"`([^`]+)`", line)


def lines_of_prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def tables(text: str, first_heading: str) -> Iterator[list[list[str]]]:
    """The rows of every table whose first column has that heading."""
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            if rows[0][0] == first_heading:
                yield rows[2:]
            rows = []


def anchors(text: str) -> set[str]:
    """What GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", lines_of_prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- links and files


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", lines_of_prose(document.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = document if not path else document.parent / path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target


def missing_paths(text: str) -> list[str]:
    found = [path for part in code(text) for path in re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./@*-]*)", part)]
    return [path for path in found if not any(ROOT.glob(path.rstrip("/.")))]


@documents
def test_files_that_are_named_exist(document: Path) -> None:
    assert missing_paths(document.read_text()) == []


def tree_of_the_readme() -> Iterator[tuple[str, str]]:
    """(folder, name) of everything that the README's tree names."""
    (tree,) = re.findall(r"^```\n(proto/.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    folder = ""
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if not line.startswith(" "):
            (folder,) = names
            names = [""]
        yield from ((folder, name) for name in names)


def test_the_tree_shows_what_is_there() -> None:
    assert [
        f"{folder}{name}" for folder, name in tree_of_the_readme() if not any((ROOT / folder).glob(name or "*"))
    ] == []
    shown = {folder.rstrip("/") for folder, _ in tree_of_the_readme()}
    assert shown == {*PACKAGES.values(), "systemd", "tools", "tests", "docs"}


def test_every_document_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in sorted((ROOT / "docs").glob("*.md")) if f"(docs/{path.name})" not in readme] == []


# ---- commands and flags


def flags_of(words: list[str]) -> set[str]:
    """The flags that a command line which begins with `words` may have. Raises ValueError for an unknown command."""
    if words[0] == "colibri-pack":
        parser = packer_cli._parser(words[1] if words[1:] and words[1] in packer_cli._COMMANDS else "pack")
        return set(parser._option_string_actions)
    parser = client_cli.parser() if words[0] == "colibri" else daemon_cli.make_parser()
    for word in words[1:]:
        choices = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
        if choices is None or word.startswith("-"):
            break
        if word not in choices:
            raise ValueError(f"{words[0]} has no command {word}")
        parser = choices[word]
    return set(parser._option_string_actions)


def wrong_flags(text: str) -> list[str]:
    wrong = []
    for part in code(text):
        if "\\" in part:
            continue  # bytes, not a command
        for command, rest in re.findall(r"(?:^|[$;&/] ?)(colibri-pack|colibrid|colibri)\b((?: [^#&;]*)?)", part):
            words = re.sub(r"[\[\]|]|\.\.\.", " ", rest).split()
            known = (
                flags_of([command, *words])
                if words and words[0].isalpha() and words[0].islower()
                else flags_of([command])
            )
            wrong += [
                f"{command}: {flag}" for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest) if flag not in known
            ]
    return wrong


def every_flag() -> set[str]:
    commands = [["colibri-pack", command] for command in packer_cli._COMMANDS]
    commands += [["colibrid", command] for command in ("serve", "plan", "check")]
    commands.append(["colibrid", "trace", "replay"])
    commands += [["colibri", *words] for words in (["chat"], ["generate"], ["status"], *_sessions_commands())]
    return set().union(*map(flags_of, commands))


def benchmarks_flags() -> set[str]:
    """The flags that some benchmark takes."""
    text = "".join(path.read_text() for path in source_files(".py", under="tests/bench"))
    return set(re.findall(r'add_argument\("(--[a-z][a-z-]*)"', text))


def _sessions_commands() -> list[list[str]]:
    return [["sessions", action] for action in ("list", "show", "rm")]


@documents
def test_flags_that_are_shown_exist(document: Path) -> None:
    text = document.read_text()
    assert wrong_flags(text) == []
    if document.parent.name == "tools":
        return  # its flags are the tools' own
    alone = {flag for part in code(text) for flag in re.findall(r"^(--[a-z][a-z-]*)", part)}
    known = every_flag() | (benchmarks_flags() if document.name == "benchmarks.md" else set())
    assert alone - known == set()


@pytest.mark.parametrize("words", [[command] for command in packer_cli._COMMANDS if command != "pack"] + [["--json"]])
def test_the_readme_shows_every_command_of_the_packer(words: list[str]) -> None:
    assert any(words[0] in part for path in DOCUMENTS for part in code(path.read_text()))


# ---- keys, codes, targets, families


def test_the_documented_keys_are_the_daemon_s() -> None:
    found = [(path, rows) for path in DOCUMENTS for rows in tables(path.read_text(), "key")]
    for path, rows in found:
        documented = {row[0].strip("`"): row[1] for row in rows}
        assert list(documented) == list(KEYS), path.name
        for name, cell in documented.items():
            default: Any = KEYS[name].default
            if default is MISSING:
                assert name in NEEDED, name
                assert cell.startswith("needed"), name
                continue
            shown = tomllib.loads(f"value = {cell.strip('`')}")["value"]
            without = {"memory": "auto", "trace": ""}  # what stands for None, which TOML does not have
            expected = without.get(name, list(default) if isinstance(default, tuple) else default)
            assert shown == expected, f"{path.name}: {name}"
    assert {path.name for path, _ in found} == {path.name for path in (ROOT / "docs").glob("operating.md")}


@documents
def test_examples_of_a_configuration_have_real_keys(document: Path) -> None:
    for example in re.findall(r"^```toml\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        assert set(tomllib.loads(example)) <= set(KEYS)


@documents
def test_tables_of_exit_codes_are_whole(document: Path) -> None:
    for rows in tables(document.read_text(), "exit code"):
        assert {int(row[0]) for row in rows} in (CLIENT_CODES, DAEMON_CODES)


@pytest.mark.parametrize(
    ("epilog", "codes"), [(client_cli._EXIT_CODES, CLIENT_CODES), (daemon_cli._EXIT_CODES, DAEMON_CODES)]
)
def test_help_texts_name_every_exit_code(epilog: str, codes: set[int]) -> None:
    assert {int(number) for number in re.findall(r"(?:: |; )(\d+) ", epilog.replace("\n", " "))} == codes


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@documents
def test_make_targets_exist(document: Path) -> None:
    wanted = {t for part in code(document.read_text()) for t in re.findall(r"(?:^|[$&] ?)make ([a-z][a-z-]*)", part)}
    assert wanted - targets() == set()


def test_make_help_names_targets_and_benchmarks_that_exist() -> None:
    text = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^make ([a-z][a-z-]*)", text, re.MULTILINE)) <= targets()
    (names,) = re.findall(r"one benchmark: ([\w, ]+);", text)
    usage = subprocess.run(
        [sys.executable, str(ROOT / "tests/bench/run.py")], capture_output=True, text=True, check=False
    ).stderr
    assert sorted(names.split(", ")) == re.findall(r"\w+", usage.partition("BENCH=<")[2].partition(">")[0])


def test_the_readme_lists_the_families() -> None:
    (line,) = re.findall(r"^Families: (.*?) from ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", line)) == set(FAMILIES)


# ---- the example


def test_the_example_of_the_client_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    program = example.replace("asyncio.run(main())", "")
    assert program != example

    async def whole() -> None:
        async with fake_daemon(tmp_path) as daemon:
            names: dict[str, Any] = {}
            exec(program.replace("unix:/tmp/qwen.sock", daemon.address), names)
            await asyncio.wait_for(names["main"](), 30)

    asyncio.run(whole())
    assert capsys.readouterr().out == "The capital of France is Paris."


class TestTheRulesThemselves:
    """A rule that cannot fail is worth nothing: each is shown something it must find."""

    def test_code_is_found_in_blocks_and_spans(self) -> None:
        text = "one `two` three\n\n    four\n\n```\nfive `six`\n```\nseven\n"
        assert list(code(text)) == ["two", "four", "five `six`"]

    @pytest.mark.parametrize(
        ("text", "wrong"),
        [
            ("`colibrid serve --no-such-thing`", ["colibrid: --no-such-thing"]),
            ("    colibri chat --stripe x # --json", ["colibri: --stripe"]),
            ("`colibri-pack verify DIR --out x`", ["colibri-pack: --out"]),
            ("`colibri-pack SOURCE --out DIR [--stripe DIR[:WEIGHT] ...]`", []),
            ("`pip install --no-deps colibri`", []),
        ],
    )
    def test_a_wrong_flag_is_found(self, text: str, wrong: list[str]) -> None:
        assert wrong_flags(text) == wrong

    def test_a_wrong_command_is_found(self) -> None:
        with pytest.raises(ValueError, match="no command chatter"):
            wrong_flags("`colibri chatter --json`")

    def test_a_wrong_path_is_found(self) -> None:
        assert missing_paths("`csrc/colibri.h` `csrc/kernels_*.c` `tests/nowhere.py`") == ["tests/nowhere.py"]

    def test_a_table_is_found_by_its_heading(self) -> None:
        assert list(tables("| key | x |\n|---|---|\n| a | 1 |\n\n| other |\n|---|\n| b |\n", "key")) == [[["a", "1"]]]

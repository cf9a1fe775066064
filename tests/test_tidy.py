"""House rules that a machine can check: lengths, banned calls, and words that have no business in a repository."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.repository import (
    PACKAGES,
    ROOT,
    c_code_lines,
    c_functions,
    python_code_lines,
    relative,
    source_files,
    strip_c,
)

LINE_LENGTH = 120
FUNCTION_LINES = 70
FILE_LINES = {".py": 400, ".c": 800, ".h": 800}

# Files over the limit: path -> code lines. An entry equals the file's length, so it can only be lowered or removed.
LONG_FILES: dict[str, int] = {}

C_BANNED = {
    *("_exit", "_Exit", "abort", "exit", "longjmp", "quick_exit", "setjmp", "system"),
    *("alloca", "atoi", "gets", "sprintf", "strcat", "strcpy", "strtok", "vsprintf"),
}
TEXT_BANNED = {
    "left-over marker": r"\b(TO(?:)DO|FIX(?:)ME|XX(?:)X)\b",
    "path of one machine": r"(?<![\w.$}])/(?:work|root|home/\w+)/",
    "package registry": r"\b(pypi\.o(?:)rg|pythonho(?:)sted|download\.pyt(?:)orch)\b",
}
TEXT_SUFFIXES = (".py", ".pyi", ".c", ".h", ".sh", ".md", ".toml", ".proto", ".txt", ".service", ".conf", "Makefile")


def code_files() -> list[Path]:
    return list(source_files(".py", ".c", ".h"))


def code_length(path: Path) -> int:
    text = path.read_text()
    return len(python_code_lines(text)) if path.suffix == ".py" else c_code_lines(text)


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    code = python_code_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
            yield node.name, node.lineno, len(code.intersection(body))


def test_lines_fit_the_page() -> None:
    long = [
        f"{relative(path)}:{number}"
        for path in source_files(".py", ".pyi", ".c", ".h", ".sh", ".proto")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LINE_LENGTH
    ]
    assert long == []


def test_files_stay_short() -> None:
    lengths = {relative(path): code_length(path) for path in code_files()}
    over = {name: length for name, length in lengths.items() if length > FILE_LINES[Path(name).suffix]}
    assert over == LONG_FILES


def test_functions_stay_short() -> None:
    long = []
    for path in code_files():
        functions = python_functions if path.suffix == ".py" else c_functions
        for name, line, length in functions(path.read_text()):
            if length > FUNCTION_LINES:
                long.append(f"{relative(path)}:{line} {name} has {length} code lines")
    assert long == []


def test_every_file_opens_by_saying_what_it_is() -> None:
    for path in code_files():
        text = path.read_text()
        if path.suffix == ".py":
            assert ast.get_docstring(ast.parse(text)), f"{relative(path)} has no docstring"
        else:
            assert text.startswith(("/*", "//")), f"{relative(path)} has no opening comment"


@pytest.mark.parametrize("what", TEXT_BANNED)
def test_no_banned_text(what: str) -> None:
    pattern = re.compile(TEXT_BANNED[what])
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in source_files(*TEXT_SUFFIXES)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def banned_c_calls(text: str) -> list[str]:
    pattern = re.compile(rf"(?<![\w.>])({'|'.join(sorted(C_BANNED))})\s*\(")
    return [match.group(1) for match in pattern.finditer(strip_c(text))]


def test_the_core_never_ends_the_process_nor_overruns_a_string() -> None:
    found = {relative(path): banned_c_calls(path.read_text()) for path in source_files(".c", ".h", under="csrc")}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_core_is_built_for_any_processor_and_without_openmp() -> None:
    for path in source_files(".c", ".h", ".py", under="csrc"):
        assert not re.search(r"-march=|-mtune=|-ffast-math|-fopenmp|#\s*pragma\s+omp", path.read_text()), relative(path)


def test_no_callbacks_from_c() -> None:
    for folder in PACKAGES.values():
        for path in source_files(".py", under=folder):
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (
                    isinstance(node, ast.Attribute) and node.attr in {"callback", "def_extern"} and _is_ffi(node)
                ), f"{relative(path)}:{node.lineno}"


def _is_ffi(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "ffi"


def test_skips_are_listed_for_tests_that_exist() -> None:
    for line in (ROOT / "tests" / "allowed_skips.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            assert (ROOT / "tests" / line.split("::")[0].split("#")[0].strip().removeprefix("tests/")).exists(), line


class TestTheRulesThemselves:
    """A rule that cannot fail is worth nothing: each is shown something it must find."""

    C_SOURCE = """/* a { comment */
struct pair {
  int a;
};
static const int table[] = {
  1, 2,
};
#define LOOP(n) \\
  for (;;) { \\
  }
static int
first(int (*f)(int), const char *text) {
  if (text[0] == '{') {
    exit(1); /* abort() */
  }

  return f("}");
}
int second(void) { return 0; }
"""

    def test_c_functions_are_found_and_measured(self) -> None:
        assert [(name, length) for name, _, length in c_functions(self.C_SOURCE)] == [("first", 4), ("second", 0)]

    def test_banned_calls_are_found_in_code_only(self) -> None:
        assert banned_c_calls(self.C_SOURCE) == ["exit"]

    def test_python_lines_leave_out_docstrings_comments_and_blanks(self) -> None:
        assert python_code_lines(
            '"""doc\nmore"""\n\n# note\nx = 1\n\ndef f():\n    """doc"""\n    return """a\nb"""\n'
        ) == {
            5,
            7,
            9,
            10,
        }

    @pytest.mark.parametrize(
        ("what", "text"),
        [
            ("left-over marker", "# TO" + "DO: later"),
            ("path of one machine", "open('/wo" + "rk/x')"),
            ("package registry", "https:/" + "/py" + "pi.o" + "rg/simple"),
        ],
    )
    def test_banned_text_is_found(self, what: str, text: str) -> None:
        assert re.search(TEXT_BANNED[what], text)

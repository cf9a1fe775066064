"""The repository as a set of text files: where it is, what belongs to it, and how its code lines are counted."""

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# Installed package -> folder. Held equal to pyproject.toml by tests/test_architecture.py.
PACKAGES = {
    "colibri.core": "csrc",
    "colibri.v1": "proto/colibri/v1",
    "colibri.packer": "packer",
    "colibri.daemon": "daemon",
    "colibri.client": "client",
}

_PRUNED = {"build", "dist", "out", "__pycache__", "node_modules"}
_GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def source_files(*suffixes: str, under: str = ".") -> Iterator[Path]:
    """Yield the hand-written files below `under` (relative to the root) with one of `suffixes`, in sorted order.

    Left out: what is hidden, built, or generated from the protos.
    """
    for folder, folders, names in os.walk(ROOT / under):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _PRUNED and not name.endswith(".egg-info")
        )
        for name in sorted(names):
            if name.endswith(suffixes) and not _GENERATED.search(name):
                yield Path(folder) / name


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_code_lines(text: str) -> set[int]:
    """Return the 1-based numbers of the lines that hold code: not blank, not only a comment, not in a docstring."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def strip_c(text: str) -> str:
    """Return C source with comments, string and character literals blanked out; line numbers stay the same."""
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return ('""' if found[0] == '"' else "0" if found[0] == "'" else " ") + "\n" * found.count("\n")

    return pattern.sub(blank, text)


def c_code_lines(text: str) -> int:
    return sum(1 for line in strip_c(text).splitlines() if line.strip())


def c_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, number of code lines of the body) of every function defined in C source `text`."""
    lines = strip_c(text).splitlines()
    depth, head, name, start, body = 0, "", "", 0, 0
    continued = False
    for number, line in enumerate(lines, 1):
        preprocessor = continued or line.lstrip().startswith("#")
        continued = preprocessor and line.rstrip().endswith("\\")
        if preprocessor:
            body += depth > 0
            continue
        before = depth
        for position, character in enumerate(line):
            if character == "{":
                if depth == 0:
                    name, start, body = _defined_name(head + line[:position]), number, 0
                depth += 1
            elif character == "}":
                depth -= 1
                if depth == 0:
                    if name:
                        yield name, start, body
                    head = ""
            elif character == ";" and depth == 0:
                head = ""
        if depth == 0 and before == 0:
            head = "" if line.rstrip().endswith((";", "}")) else head + line + " "
        body += before > 0 and depth > 0 and bool(line.strip())


def _defined_name(head: str) -> str:
    """Return the name of the function that opens after the text `head`; '' for a struct or an initialiser."""
    head = head.split(";")[-1].rstrip()
    match = re.search(r"(\w+)\s*\((?:[^()]|\([^()]*\))*\)$", head)
    return match.group(1) if match and "=" not in head else ""

"""The size of the code, and what in it is too large: printed by `make check`, which fails if there is any.

Counted is what ships: lines of code, which are none that are blank, a comment or part of a docstring.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

from radon.complexity import cc_visit

LINES, FUNCTION, COMPLEXITY, CODE = 350, 40, 15, 5500
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    """The files of the package, each once: two of its folders are links to folders beside it."""
    found = [f for folder in ("decomps", "passes") for f in Path(folder).rglob("*.py")]
    return sorted([*found, *(f for f in Path("src/torch_batchnorm").rglob("*.py") if f.resolve() == Path.cwd() / f)])


def code_lines(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def too_large(path: Path, source: str) -> list[str]:
    """What in a file is larger than the limits allow."""
    total = len(source.splitlines())
    found = [f"{path}: {total} lines, at most {LINES}"] if total > LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS) and (n := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION:
            found.append(f"{path}:{node.lineno}: {node.name} has {n} lines, at most {FUNCTION}")
    for block in cc_visit(source):
        if block.letter != "C" and block.complexity > COMPLEXITY:
            found.append(f"{path}:{block.lineno}: {block.name} has complexity {block.complexity}, at most {COMPLEXITY}")
    return found


def main() -> int:
    rooms: Counter[str] = Counter()
    found = []
    for path in sources():
        source = path.read_text()
        room = "/".join(path.parts[:2]) if path.parts[0] == "passes" and len(path.parts) > 2 else path.parts[0]
        rooms[room] += code_lines(source)
        found += too_large(path, source)
    for room, lines in sorted(rooms.items()):
        print(f"{lines:6} {room}")
    print(f"{rooms.total():6} lines of code, about {CODE} allowed")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

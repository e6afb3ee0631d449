"""What can be counted in the code: `python tests/counts.py`; of another checkout, `python tests/counts.py FOLDER`."""

import ast
import collections
import io
import pathlib
import re
import sys
import tokenize

LEFT_OUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
HOLDS_FUNCTION = re.compile(r"\bCallable\b")


def code_lines(text: str) -> int:
    """Lines with a token that is no comment, less those of docstrings."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in LEFT_OUT]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, node.end_lineno + 1)}
    return len(lines)


def function_typed(tree: ast.AST) -> int:
    """Fields and parameters whose annotation is a function's type."""
    annotated = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign | ast.arg)]
    return sum(bool(HOLDS_FUNCTION.search(ast.unparse(annotation))) for annotation in annotated if annotation)


def counts(root: pathlib.Path) -> dict[str, collections.Counter]:
    """Counts by folder of the package, as "pipeline"; modules beside the folders are under ""."""
    found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for path in sorted((root / "parallax").rglob("*.py")):
        text, (*folders, _) = path.read_text(encoding="utf-8"), path.relative_to(root / "parallax").parts
        tree = ast.parse(text)
        nodes = [*ast.walk(tree)]
        calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
        found[folders[0] if folders else ""] += collections.Counter(
            {
                "code lines": code_lines(text),
                "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
                "function types": function_typed(tree),
                "partials": sum(call in ("partial", "functools.partial") for call in calls),
            }
        )
    return found


def words(root: pathlib.Path) -> dict[str, int]:
    """Words of pages for users, and of those with measurements."""
    pages = {path: len(path.read_text(encoding="utf-8").split()) for path in (root / "docs").rglob("*.md")}
    measured = sum(count for path, count in pages.items() if path.parent.name == "measured")
    return {"docs/": sum(pages.values()) - measured, "docs/measured/": measured}


def main(argv: list[str]) -> int:
    root = pathlib.Path(argv[0]) if argv else pathlib.Path(__file__).parents[1]
    found = counts(root)
    found["all"] = sum(found.values(), collections.Counter())
    print(f"{'':14}{'code lines':>11}{'classes':>9}{'function types':>16}{'partials':>10}")
    for folder, count in found.items():
        cells = f"{count['code lines']:11,}{count['classes']:9}{count['function types']:16}{count['partials']:10}"
        print(f"{folder or 'beside them':14}{cells}")
    print(*(f"{folder} {count:,} words" for folder, count in words(root).items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the site adds to the pages of docs/: those from elsewhere, notebooks, and the names of the package."""

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from notebook_pages import page as notebook_page

ROOT = Path(__file__).resolve().parents[1]
# Where a page of the site lies in the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
NOTEBOOKS = {f"{file.stem}.md": f"notebooks/{file.name}" for file in sorted(ROOT.glob("notebooks/*.ipynb"))}
PAGE_OF = {source: page for page, source in {**ELSEWHERE, **NOTEBOOKS}.items()}
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
NAMES = "<!-- every name of px -->"


def on_files(files: Files, config: Any) -> Files:
    """Pages from elsewhere in the repository, and notebooks with their pictures."""
    for name, source in ELSEWHERE.items():
        text = relinked((ROOT / source).read_text(encoding="utf-8"), (ROOT / source).parent)
        files.append(File.generated(config, name, content=text))
    for name, source in NOTEBOOKS.items():
        markdown, pictures = notebook_page(ROOT / source, lambda text: relinked(text, ROOT / "notebooks"))
        for file, content in {name: markdown, **pictures}.items():
            files.append(File.generated(config, file, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that lead out of docs/, as the site has them; the names of the package where a page asks for them."""
    if page.file.generated_by is None:
        markdown = relinked(markdown, (ROOT / "docs" / page.file.src_uri).parent)
    return markdown.replace(NAMES, "\n\n".join(f"::: {name}" for name in public_names()))


def relinked(markdown: str, folder: Path) -> str:
    """A text of the repository with its links as the site has them; `folder` is where the text lies."""
    below_docs = folder.relative_to(ROOT / "docs") if folder.is_relative_to(ROOT / "docs") else "."

    def moved(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if not target:
            return found[0]
        path = (folder / target).resolve().relative_to(ROOT).as_posix()
        page = PAGE_OF.get(path, path.removeprefix("docs/"))
        return f"]({Path(os.path.relpath(page, below_docs)).as_posix()}{anchor})"

    return LINK.sub(moved, markdown)


def public_names() -> list[str]:
    """What `import parallax as px` offers, by full name."""
    tree = ast.parse((ROOT / "parallax" / "__init__.py").read_text(encoding="utf-8"))
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    home = ast.literal_eval(values["HOME"])
    return [f"parallax.{module}" + ("" if name == module else f".{name}") for name, module in home.items()]

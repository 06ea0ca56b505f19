"""Pages of the site that have no file in docs/: the README, the other texts of the root, and the API.

mkdocs.yml names this file twice: as a hook of MkDocs (`on_files`), and as an extension of Griffe, which reads
the docstrings for mkdocstrings.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TEXTS = {
    **{"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"},
    **{"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"},
}
PACKAGES = ("jaxddp", "torch_ref")
NOT_MODULES = ("__init__.py", "__main__.py")
PACKAGE_ONLY = "{members: false, show_root_heading: false, show_root_toc_entry: false}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    for name, page in TEXTS.items():
        files.append(File.generated(config, page, content=with_site_links((ROOT / name).read_text())))
    for package in sorted(path.parent for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")):
        name = ".".join(package.relative_to(ROOT).parts)
        files.append(File.generated(config, f"api/{name}.md", content=api_page(name, package)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add a link to the file from which a page is made, in the repository around the site's folder."""
    path = page.file.src_uri
    source = {site: name for name, site in TEXTS.items()}.get(path, f"docs/{path}")
    if path.startswith("api/"):
        source = path.removeprefix("api/").removesuffix(".md").replace(".", "/")
    up = "../" * (1 + path.count("/"))
    return f'{markdown}\n\n<p class="source">Source: <a href="{up}{source}">{source}</a></p>\n'


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the script with which search works from the disk from the site, and not from another server."""
    here = "../" * page.file.dest_uri.count("/")
    return re.sub(r"https://[\w./]*iframe-worker/shim", f"{here}javascripts/iframe-worker.js", output)


def with_site_links(text: str) -> str:
    """Return a text of the repository's root with links as the site has them."""
    for name, page in TEXTS.items():
        text = text.replace(f"]({name}", f"]({page}")
    return text.replace("](docs/", "](").replace("](LICENSE)", "](https://www.apache.org/licenses/LICENSE-2.0)")


def api_page(name: str, package: Path) -> str:
    """Return the page of a package: its docstring, then its modules with their members."""
    files = [path for path in package.glob("*.py") if path.name not in NOT_MODULES]
    modules = sorted(path.stem for path in files if "import *" not in path.read_text())  # else another's public name
    head = f"# {name}\n\n::: {name}\n    options: {PACKAGE_ONLY}\n"
    return "\n".join([head, *(f"::: {name}.{module}\n" for module in modules)])


class Doctests(griffe.Extension):
    """Put the doctests of a docstring into fences: to Markdown, `>>>` is a quotation of quotations."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return the docstring with each unindented block that starts with `>>>` in a fence.

    >>> print(fenced("Add.\\n\\n>>> 1 + 1\\n2"))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return re.sub(r"^>>> .*(?:\n.+)*", lambda block: f"```pycon\n{block[0]}\n```", docstring, flags=re.MULTILINE)

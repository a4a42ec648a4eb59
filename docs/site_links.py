"""Hook of mkdocs.yml: the repository's Markdown as a site, written for people who read it in the repository.

README.md is the site's first page. What pages link to outside of docs/ (sources, results, the changelog) is shown below
`repository/`, and so on from there; a folder is the list of what is in it. Links keep their anchors; one that leads
nowhere stays as it is, so that MkDocs refuses it. Lists and tables may follow a paragraph without a blank line.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
ITEM = re.compile(r" *(?:[-*]|\d+\.) +\S")
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^\s\"'>]+|url\([\"']?https?:"
)
LANGUAGES = {".py": "python", ".toml": "toml", ".proto": "protobuf", ".service": "ini"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, and all that is linked to from a page."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + ["README.md"]
    shown = set(pages)
    add(files, config, "README.md")
    while pages:
        page = pages.pop()
        if page.endswith(".md"):
            for target in targets(page):
                if target not in shown:
                    shown.add(target)
                    if not (target.startswith("docs/") and (ROOT / target).is_file()):
                        add(files, config, target)
                    pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Markdown of a page as MkDocs reads it."""
    return "\n".join(lines(markdown, source(page.file.src_uri)))


def on_post_build(config: MkDocsConfig) -> None:
    """Check that no page or style sheet loads something from another host.

    Raises:
        PluginError: naming what does.
    """
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in {".html", ".css"} and (loads := LOADED.search(path.read_text())):
            raise PluginError(f"{path} loads from another host: {loads[0]}")


def add(files: Files, config: MkDocsConfig, target: str) -> None:
    """Add a page of something that is not a page of docs/."""
    path = ROOT / target
    if path.is_dir():
        named = sorted(p.name for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        of = "docs" if target.startswith("docs/") else ""
        rows = [f"- [{title(path / name)}]({name})" if of else f"- `{name}`" for name in named]
        text = f"# {path.name}\n\n" + "\n".join(rows) + "\n"
    elif path.suffix == ".md":
        text = path.read_text()
    else:
        text = f"---\nsearch: {{exclude: true}}\n---\n# {target}\n\n``````{LANGUAGES.get(path.suffix, 'text')}\n"
        text += f"{path.read_text()}``````\n"
    files.append(File.generated(config, uri(target), content=text))


def title(path: Path) -> str:
    """Title of a page: its first heading."""
    return next(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# "))


def uri(target: str) -> str:
    """Where something of the repository is in the site's sources."""
    if target == "README.md":
        return "index.md"
    own = target.startswith("docs/")
    inside = target.removeprefix("docs/") if own else f"repository/{target}"
    if (ROOT / target).is_dir():
        return f"{inside}/index.md"
    return inside if own or target.endswith(".md") else f"{inside}.md"


def source(src_uri: str) -> str:
    """What of the repository a page of the site is: the inverse of `uri`."""
    if src_uri == "index.md":
        return "README.md"
    inside = src_uri.removeprefix("repository/") if src_uri.startswith("repository/") else f"docs/{src_uri}"
    for known in (inside, inside.removesuffix(".md"), str(PurePosixPath(inside).parent)):
        if (ROOT / known).exists():
            return f"{known}/index.md" if (ROOT / known).is_dir() else known
    raise FileNotFoundError(src_uri)


def targets(page: str) -> Iterator[str]:
    """What of the repository a page of it links to."""
    if (ROOT / page).is_file():
        for line in (ROOT / page).read_text().splitlines():
            for link, _ in LINK.findall(line):
                if target := found(page, link):
                    yield target


def found(page: str, link: str) -> str:
    """What of the repository a link means; "": nothing that is there."""
    target = normpath(str(PurePosixPath(page).parent / link))
    return target if not target.startswith("..") and (ROOT / target).exists() else ""


def lines(markdown: str, page: str) -> Iterator[str]:
    """Lines with links as the site has them, and a blank line before lists and tables that follow a paragraph."""
    here = PurePosixPath(uri(page) if not page.endswith("/index.md") else uri(page.removesuffix("/index.md"))).parent
    fence, before = "", ""

    def linked(match: re.Match[str]) -> str:
        target = found(page, match[1])
        return f"]({relpath(uri(target), here)}{match[2] or ''})" if target else match[0]

    for line in markdown.split("\n"):
        mark = re.match(r" *(`{3,})", line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        elif not fence:
            begins = (ITEM.match(line) and not ITEM.match(before) and not before.startswith("  ")) or (
                line.startswith("|") and not before.startswith("|")
            )
            if begins and before.strip():
                yield ""
            line = LINK.sub(linked, line)
        yield line
        before = line

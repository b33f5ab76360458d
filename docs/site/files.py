"""A page for each file that a document links to and that is no document: examples, sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.osutil import relative_uri

SHOWN = {".py", ".c", ".h", ".toml", ".txt"}


class LinksToFiles(SphinxPostTransform):
    """What would be a download is a link to the file's page."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(addnodes.download_reference)):
            source = Path(self.app.srcdir)
            found = (source / self.env.docname).parent / node["reftarget"]
            path = found.resolve().relative_to(source)
            if path.suffix not in SHOWN:
                continue
            page = f"files/{path}"
            self.env.metadata[self.env.docname].setdefault("files", set()).add(str(path))
            uri = self.app.builder.get_target_uri(self.env.docname)
            link = nodes.reference("", "", internal=True, refuri=relative_uri(uri, f"{page}.html"))
            link += node.children
            node.replace_self(link)


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    linked = {path for about in app.env.metadata.values() for path in about.get("files", ())}
    for name in sorted(linked):
        try:
            lexer = get_lexer_for_filename(name)
        except ClassNotFound:
            lexer = TextLexer()
        text = (Path(app.srcdir) / name).read_text(encoding="utf-8")
        shown = highlight(text, lexer, HtmlFormatter())
        body = f"<h1>{name}</h1>\n{shown}"
        yield f"files/{name}", {"title": name, "body": body}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(LinksToFiles)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True, "parallel_write_safe": False}

"""Dead links of the built site: python docs/site/links.py build/site

Each link has to lead to a file of the site, and to a place in it. Nothing that a page shows may
come from a network. Links to other sites are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page has: places, links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = {name: value or "" for name, value in attrs}
        self.places.update(about[name] for name in ("id", "name") if name in about)
        if tag == "a" and "href" in about:
            self.links.append(about["href"])
        elif tag == "link" and about.get("rel") == "stylesheet":
            self.loaded.append(about["href"])
        elif tag in ("script", "img", "iframe", "object") and (
            about.get("src") or about.get("data")
        ):
            self.loaded.append(about.get("src") or about["data"])


def problems(site: Path) -> list[str]:
    """One line for each link that leads nowhere."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if link in page.loaded:
                    found.append(f"{here}: is loaded from a network: {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{here}: no such file: {link}")
            elif target in pages and unquote(parts.fragment) not in {*pages[target].places, ""}:
                found.append(f"{here}: no such place: {link}")
    return found


if __name__ == "__main__":
    site = Path(sys.argv[1]).resolve()
    dead = problems(site)
    print("\n".join(dead) or f"{site}: {len(list(site.rglob('*.html')))} pages, no dead link")
    sys.exit(bool(dead))

"""Links between the documents: files and headings exist, and the index names every page."""

import re
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)


def text_of(page: Path) -> str:
    """A page without blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text_of(page))
    }


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(page))):
            name, _, anchor = unquote(link).partition("#")
            target = (page.parent / name).resolve() if name else page
            if "://" in link or link.startswith("mailto:"):
                continue
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_the_index_names_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs/README.md").read_text(encoding="utf-8")))
    missing = {page.name for page in ROOT.glob("docs/*.md")} - {link.partition("#")[0] for link in linked}
    assert missing == {"README.md"}

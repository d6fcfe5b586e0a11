"""Markdown into pieces: paragraphs, items of lists, blocks of code, tables, one after the other.

A list is as many pieces as it has items, so that an answer under way changes one of them and not the whole list.
What a model writes is text of a stranger: HTML stays text, control characters become visible, and a link shows
where it leads. Knows nothing of widgets.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.content import Content, Span
from textual.style import Style

from localllm.formatting import printable

PARSER: Final = MarkdownIt("gfm-like", {"html": False})
BULLETS = "•◦▪"
QUOTE_MARK = "▎ "
EMPHASIS_STYLES = {"em_open": "italic", "strong_open": "bold", "s_open": "strike"}
CODE_STYLE, LINK_STYLE, ADDRESS_STYLE = "$text-primary", "underline", "dim"
URL_SCHEMES = ("http://", "https://")
MAX_PARSED_CHARACTERS = 60_000  # of one block; a longer one is shown as it is, as parsing one may take its square
PLAIN_CHUNK_CHARACTERS = 2_000  # of a piece of such text
LINE_PATTERN: Final = re.compile(
    r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+"
)  # as Markdown has them: str.splitlines ends more

EMPTY: Final = Content()


class PieceType(StrEnum):
    TEXT = "text"
    HEADING = "heading"
    CODE = "code"
    RULE = "rule"
    TABLE = "table"


@dataclass(frozen=True)
class MarkdownPiece:
    """`first` and `rest` stand before its first line and before all others: bullets, quotes, indentation."""

    piece_type: PieceType
    content: Content = EMPTY
    first: str = ""
    rest: str = ""
    is_apart: bool = True  # a blank line stands above it
    language: str = ""  # of code, as the model named it
    rows: tuple[tuple[Content, ...], ...] = ()  # of a table, its heads first

    def looks_like(self, other: "MarkdownPiece") -> bool:
        return _key(self) == _key(other)


def _key(piece: MarkdownPiece) -> tuple[object, ...]:
    """All that is seen of it; texts that differ in their spans alone are equal to Textual."""
    texts = [(text.plain, text.spans) for row in ((piece.content,), *piece.rows) for text in row]
    return (
        piece.piece_type,
        piece.first,
        piece.rest,
        piece.is_apart,
        piece.language,
        [*map(len, piece.rows)],
        texts,
    )


def split_markdown(source: str) -> tuple[list[MarkdownPiece], int, int]:
    """The pieces of a text; how many of them no later text can change, and how many characters of the text these
    are."""
    if len(source) > MAX_PARSED_CHARACTERS:
        return _split_plain(source)
    tokens = PARSER.parse(source)
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map]
    if not starts:
        return [], 0, 0
    lines = LINE_PATTERN.findall(source)
    last = starts[-1]
    place = next(i for i, token in enumerate(tokens) if token.level == 0 and token.map and token.map[0] == last)
    settled = _TokenReader(tokens[:place]).pieces
    return settled + _TokenReader(tokens[place:]).pieces, len(settled), sum(map(len, lines[:last]))


def _split_plain(source: str) -> tuple[list[MarkdownPiece], int, int]:
    parts = re.findall(rf"(?s).{{1,{PLAIN_CHUNK_CHARACTERS}}}(?:\n|$)|.{{{PLAIN_CHUNK_CHARACTERS}}}|.+", source)
    pieces = [
        MarkdownPiece(PieceType.TEXT, Content(printable(part).rstrip("\n")), is_apart=i == 0)
        for i, part in enumerate(parts)
    ]
    return pieces, len(pieces) - 1, sum(map(len, parts[:-1]))


class _TokenReader:
    """Walks along the tokens, and remembers what stands around the one that it is at."""

    def __init__(self, tokens: Iterable[Token]):
        self.pieces: list[MarkdownPiece] = []
        self.prefixes: list[str] = []  # what each quote and item puts before a line
        self.bullet: str | None = None  # of an item whose first piece has not come
        self.counts: list[int | None] = []  # of the lists around: the next number, None where they have bullets
        self.is_new = False  # the list around has no piece yet
        self.tight = False
        self.rows: list[list[Content]] = []
        self.piece_type = PieceType.TEXT
        for token in tokens:
            self.read(token)

    def read(self, token: Token) -> None:
        match token.type:
            case "bullet_list_open" | "ordered_list_open":
                self.is_new = self.is_new or not self.counts
                start = int(token.attrs.get("start", 1))
                self.counts.append(start if token.type == "ordered_list_open" else None)
            case "bullet_list_close" | "ordered_list_close":
                self.counts.pop()
            case "list_item_open":
                self.open_item()
            case "list_item_close":
                if self.bullet is not None:  # an item of nothing
                    self.add(PieceType.TEXT, EMPTY)
                self.prefixes.pop()
            case "blockquote_open":
                self.prefixes.append(QUOTE_MARK)
            case "blockquote_close":
                self.prefixes.pop()
            case "heading_open":
                self.piece_type = PieceType.HEADING
            case "heading_close":
                self.piece_type = PieceType.TEXT
            case "paragraph_open":
                self.tight = token.hidden
            case "paragraph_close":
                self.tight = False
            case "fence" | "code_block":
                language = printable(token.info.split()[0]) if token.info.split() else ""
                self.add(PieceType.CODE, Content(printable(token.content.rstrip("\n"))), language)
            case "hr":
                self.add(PieceType.RULE, EMPTY)
            case "table_open":
                self.rows = []
            case "tr_open":
                self.rows.append([])
            case "table_close":
                rows = tuple(map(tuple, self.rows))
                self.pieces.append(MarkdownPiece(PieceType.TABLE, rest="".join(self.prefixes), rows=rows))
                self.rows = []
            case "inline" if self.rows:
                self.rows[-1].append(inline_content(token.children or []))
            case "inline":
                self.add(self.piece_type, inline_content(token.children or []))

    def open_item(self) -> None:
        count = self.counts[-1]
        if count is None:
            self.bullet = BULLETS[(len(self.counts) - 1) % len(BULLETS)] + " "
        else:
            self.bullet = f"{count}. "
            self.counts[-1] = count + 1
        self.prefixes.append(" " * len(self.bullet))

    def add(self, form: PieceType, content: Content, language: str = "") -> None:
        first = rest = "".join(self.prefixes)
        if self.bullet is not None:
            first = rest[: len(rest) - len(self.bullet)] + self.bullet
        # Items of a tight list stand line under line; above the list is a blank one.
        is_apart = self.is_new or not (self.tight and self.counts)
        self.bullet, self.is_new = None, False
        self.pieces.append(MarkdownPiece(form, content, first, rest, is_apart, language))


def inline_content(tokens: Iterable[Token]) -> Content:
    """Text with emphasis, code and links; a link is followed by its address, where its text is not that."""
    text: list[str] = []
    spans: list[Span] = []
    opened: list[tuple[str | Style, int]] = []
    link = ("", 0)
    length = 0

    def write(words: str) -> None:
        nonlocal length
        words = printable(words)
        text.append(words)
        length += len(words)

    for token in tokens:
        match token.type:
            case "text" | "html_inline":
                write(token.content)
            case "softbreak":
                write(" ")
            case "hardbreak":
                write("\n")
            case "code_inline":
                spans.append(Span(length, length + len(token.content), CODE_STYLE))
                write(token.content)
            case "em_open" | "strong_open" | "s_open":
                opened.append((EMPHASIS_STYLES[token.type], length))
            case "em_close" | "strong_close" | "s_close" if opened:
                style, start = opened.pop()
                spans.append(Span(start, length, style))
            case "link_open":
                link = (str(token.attrs.get("href", "")), length)
            case "link_close":
                href, start = link
                said = "".join(text)[start:]
                spans.append(Span(start, length, link_style(href)))
                if said not in (
                    href,
                    href.removeprefix("mailto:"),
                    *(href.removeprefix(web) for web in URL_SCHEMES),
                ):
                    shown = f" ({printable(href)})"
                    spans.append(Span(length, length + len(shown), ADDRESS_STYLE))
                    write(shown)
            case "image":
                write(f"[{token.content or 'image'}] ({token.attrs.get('src', '')})")
            case _:
                pass
    return Content("".join(text), spans)


def link_style(href: str) -> Style | str:
    """A click copies the address, as the browser that it is for may run on another machine."""
    return (
        Style(underline=True) + Style.from_meta({"@click": f"screen.copy_address({href!r})"})
        if href
        else LINK_STYLE
    )

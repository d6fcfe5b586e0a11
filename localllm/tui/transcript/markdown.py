"""Splits Markdown into pieces: paragraphs, list items, code blocks and tables.

Each list item is a piece, so that a growing list changes one piece only. Model output is untrusted: HTML stays
text, control characters become visible, and links show their addresses. Independent of widgets.

Textual's own `Markdown.append` is not used because it mounts a widget per block and lays out all of them again:
one more token at the end of an answer of 28,000 characters takes 290 ms of processor time there and 10 ms here
(paragraphs, code and lists; AMD EPYC, 100x40 cells). With paragraphs only it is 21 ms against 2.4 ms; within one
list of 200 items, which is parsed as a whole in both, it is the same 20 ms.
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
EMPTY: Final = Content()
EMPHASIS_STYLES = {"em_open": "italic", "strong_open": "bold", "s_open": "strike"}
CODE_STYLE, LINK_STYLE, ADDRESS_STYLE = "$text-primary", "underline", "dim"
URL_SCHEMES = ("http://", "https://")
MAX_PARSED_CHARACTERS = 60_000  # of one block: parsing may take quadratic time, so a longer one is shown as text
PLAIN_CHUNK_CHARACTERS = 2_000  # of a piece of such text
LINE_PATTERN: Final = re.compile(
    r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+"
)  # lines of Markdown; str.splitlines also splits at other characters


class PieceType(StrEnum):
    TEXT = "text"
    HEADING = "heading"
    CODE = "code"
    RULE = "rule"
    TABLE = "table"


@dataclass(frozen=True)
class MarkdownPiece:
    """A block of Markdown. `first` precedes its first line and `rest` all others: bullets, quotes, indentation."""

    piece_type: PieceType
    content: Content = EMPTY
    first: str = ""
    rest: str = ""
    is_apart: bool = True  # below a blank line
    language: str = ""  # of code, as named by the model
    rows: tuple[tuple[Content, ...], ...] = ()  # of a table, header first

    def looks_like(self, other: "MarkdownPiece") -> bool:
        return _key(self) == _key(other)


def _key(piece: MarkdownPiece) -> tuple[object, ...]:
    """Return everything visible in a piece; Textual compares contents without their spans."""
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
    """Return the pieces, how many of them no later text can change, and the length of their source."""
    if len(source) > MAX_PARSED_CHARACTERS:
        return _split_plain(source)
    tokens = PARSER.parse(source)
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map]
    if not starts:
        return [], 0, 0
    lines = LINE_PATTERN.findall(source)
    last_line = starts[-1]
    last = next(
        i for i, token in enumerate(tokens) if token.level == 0 and token.map and token.map[0] == last_line
    )
    settled = _TokenReader(tokens[:last]).pieces
    return settled + _TokenReader(tokens[last:]).pieces, len(settled), sum(map(len, lines[:last_line]))


def _split_plain(source: str) -> tuple[list[MarkdownPiece], int, int]:
    parts = re.findall(rf"(?s).{{1,{PLAIN_CHUNK_CHARACTERS}}}(?:\n|$)|.{{{PLAIN_CHUNK_CHARACTERS}}}|.+", source)
    pieces = [
        MarkdownPiece(PieceType.TEXT, Content(printable(part).rstrip("\n")), is_apart=i == 0)
        for i, part in enumerate(parts)
    ]
    return pieces, len(pieces) - 1, sum(map(len, parts[:-1]))


class _TokenReader:
    """Turns markdown-it tokens into pieces, tracking the lists and quotes around the current token."""

    def __init__(self, tokens: Iterable[Token]):
        self.pieces: list[MarkdownPiece] = []
        self.prefixes: list[str] = []  # of lines in the enclosing quotes and list items
        self.bullet: str | None = None  # of the current item, until its first piece
        self.counts: list[int | None] = []  # next number of each enclosing list, None for bullets
        self.is_new = False  # whether the outermost list has no piece yet
        self.tight = False  # whether the current paragraph is in a tight list
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
                if self.bullet is not None:  # an empty item
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
        # Items of a tight list have no blank lines between them, but one above the list.
        is_apart = self.is_new or not (self.tight and self.counts)
        self.bullet, self.is_new = None, False
        self.pieces.append(MarkdownPiece(form, content, first, rest, is_apart, language))


def inline_content(tokens: Iterable[Token]) -> Content:
    """Return text with emphasis, code and links; a link whose text is not its address is followed by it."""
    text: list[str] = []
    spans: list[Span] = []
    opened: list[tuple[str | Style, int]] = []
    link = ("", 0)
    length = 0

    def write(part: str) -> None:
        nonlocal length
        part = printable(part)
        text.append(part)
        length += len(part)

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
                label = "".join(text)[start:]
                spans.append(Span(start, length, link_style(href)))
                if label not in (
                    href,
                    href.removeprefix("mailto:"),
                    *(href.removeprefix(scheme) for scheme in URL_SCHEMES),
                ):
                    address = f" ({printable(href)})"
                    spans.append(Span(length, length + len(address), ADDRESS_STYLE))
                    write(address)
            case "image":
                write(f"[{token.content or 'image'}] ({token.attrs.get('src', '')})")
            case _:
                pass
    return Content("".join(text), spans)


def link_style(href: str) -> Style | str:
    """Return a style whose click copies the address, since the user's browser may run on another machine."""
    return (
        Style(underline=True) + Style.from_meta({"@click": f"screen.copy_address({href!r})"})
        if href
        else LINK_STYLE
    )

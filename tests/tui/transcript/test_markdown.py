"""Markdown is split into separately rendered pieces."""

import pytest

from localllm.tui.transcript.markdown import MAX_PARSED_CHARACTERS, PieceType, split_markdown

SAMPLE = """# Title

Hello *you*, see [here](http://elsewhere.example/a) or https://plain.example.

- one
- two
  1. first
  2. second

> said
> somebody

```python
def f(): pass
```

| a | b |
|---|---|
| 1 | **2** |

---
the end
"""


def shown(source):
    pieces, _, _ = split_markdown(source)
    return [(piece.first + piece.content.plain, piece.is_apart) for piece in pieces]


def test_each_item_and_paragraph_is_a_piece():
    assert shown(SAMPLE)[:8] == [
        ("Title", True),
        ("Hello you, see here (http://elsewhere.example/a) or https://plain.example.", True),
        ("• one", True),
        ("• two", False),
        ("  1. first", False),
        ("  2. second", False),
        ("▎ said somebody", True),
        ("def f(): pass", True),
    ]


def test_code_tables_and_rules_keep_their_form():
    pieces, _, _ = split_markdown(SAMPLE)
    code, table, rule = pieces[7:10]
    assert (code.piece_type, code.language) == (PieceType.CODE, "python")
    assert (table.piece_type, [[cell.plain for cell in row] for row in table.rows]) == (
        PieceType.TABLE,
        [["a", "b"], ["1", "2"]],
    )
    assert rule.piece_type == PieceType.RULE


@pytest.mark.parametrize("cut", range(0, len(SAMPLE), 7))
def test_incremental_parsing_gives_the_same_pieces(cut):
    _, settled, read = split_markdown(SAMPLE[:cut])
    whole, _, _ = split_markdown(SAMPLE)
    rest, _, _ = split_markdown(SAMPLE[read:])
    assert len(whole) == settled + len(rest)
    assert all(piece.looks_like(other) for piece, other in zip(whole[settled:], rest, strict=True))


@pytest.mark.parametrize("end", ["\f", "\v", "\x1c", "\x85", "\u2028", "\r", "\r\n"])
def test_unusual_line_separators_do_not_shift_blocks(end):
    source = f"one{end}two{end}three\n\nfour\n\nfive"
    _, _, read = split_markdown(source)
    assert source[read:] == "five"


def test_html_and_control_characters_are_text():
    assert shown("a <b>bold</b> \x1b]0;title\x07 word\n\n<script>x</script>") == [
        ("a <b>bold</b> ␛]0;title␇ word", True),
        ("<script>x</script>", True),
    ]


def test_a_misleading_link_shows_its_real_address():
    assert shown("[https://bank.example](https://thief.example)") == [
        ("https://bank.example (https://thief.example)", True)
    ]


def test_two_texts_that_differ_in_emphasis_alone_are_not_the_same():
    (plain,), _, _ = split_markdown("word")
    (bold,), _, _ = split_markdown("**word**")
    assert plain.content.plain == bold.content.plain
    assert not plain.looks_like(bold)


def test_a_block_too_long_to_parse_is_shown_as_it_is():
    source = "[" * (MAX_PARSED_CHARACTERS + 1)
    pieces, settled, read = split_markdown(source)
    assert "".join(piece.content.plain for piece in pieces) == source
    assert settled == len(pieces) - 1
    assert read < len(source)

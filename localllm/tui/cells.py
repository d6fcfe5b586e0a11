"""Text of one line in so many cells of the screen: East Asian letters and emoji take two."""

from rich.cells import cell_len, set_cell_size

from localllm.formatting import one_line


def truncate(text: str, width: int) -> str:
    """At most `width` cells; what was left out is an ellipsis at the end."""
    text = one_line(text)
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""


def align_left(text: str, width: int) -> str:
    """Exactly `width` cells, with blanks behind."""
    return set_cell_size(truncate(text, width), width)


def align_right(text: str, width: int) -> str:
    """Exactly `width` cells, with blanks before."""
    text = truncate(text, width)
    return " " * (width - cell_len(text)) + text

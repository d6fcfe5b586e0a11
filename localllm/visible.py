"""The words of strangers on a terminal: shown as what they are, never obeyed."""

# They must not move the cursor or set the title: ESC is shown as ␛ and so on.
CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
CONTROL_PICTURES |= {code: 0xFFFD for code in range(0x80, 0xA0)}
ONE_LINE_PICTURES = CONTROL_PICTURES | {ord("\t"): " ", ord("\n"): " ", 0x2028: " ", 0x2029: " "}


def printable(text: str) -> str:
    """With its tabs and lines as they are."""
    return text.translate(CONTROL_PICTURES)


def one_line(text: str) -> str:
    """A name or a title, whatever stands in it."""
    return text.translate(ONE_LINE_PICTURES)

from localllm.formatting import one_line, printable


def test_control_codes_are_made_visible():
    assert printable("a\x1b[2Jb\x7fc\x9bd\te\nf") == "a␛[2Jb␡c\ufffdd\te\nf"


def test_a_name_stays_in_its_line():
    assert one_line("a\nb\tc\r\u2028d\x1b]0;title\x07") == "a b c␍ d␛]0;title␇"

from localllm.formatting import format_columns, format_table


def test_cells_are_aligned_as_requested():
    rows = [("NAME", "COUNT", "STATE"), ("a", "1,000", "decode"), ("longer", "2", "-")]
    assert format_table(rows) == "NAME    COUNT  STATE\na       1,000  decode\nlonger  2      -"
    assert format_table(rows, "<>") == "NAME    COUNT  STATE\na       1,000  decode\nlonger      2  -"


def test_name_columns_are_wider():
    assert format_columns([("a", "1"), ("bc", "2")]) == "a    1\nbc   2"

from localllm.formatting import format_columns, format_table


def test_cells_stand_on_the_side_that_is_asked_for():
    rows = [("NAME", "COUNT", "STATE"), ("a", "1,000", "decode"), ("longer", "2", "-")]
    assert format_table(rows) == "NAME    COUNT  STATE\na       1,000  decode\nlonger  2      -"
    assert format_table(rows, "<>") == "NAME    COUNT  STATE\na       1,000  decode\nlonger      2  -"


def test_names_have_more_room_than_columns():
    assert format_columns([("a", "1"), ("bc", "2")]) == "a    1\nbc   2"

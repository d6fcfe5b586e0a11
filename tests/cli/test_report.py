from localllm.cli.report import table


def test_columns_are_as_wide_as_their_widest_cell():
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"

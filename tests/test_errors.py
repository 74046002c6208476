"""What messages are made of: one line, whatever an error says."""

import pytest

from minilm.errors import ConfigError, first_line, installed, one_line


def test_a_text_of_many_lines_is_one():
    assert one_line(ValueError(" a\n\n  b\tc ")) == "a b c"


@pytest.mark.parametrize(("says", "line"), [("a\nb", "a"), ("\n a", "a"), ("", "ValueError")])
def test_the_first_line_is_one_that_says_something(says, line):
    assert first_line(ValueError(says)) == line


def test_a_package_that_is_missing_is_told_as_asked():
    assert installed("json", "-").loads("1") == 1
    with pytest.raises(ConfigError, match=r"^it needs nothing_of_the_kind$"):
        installed("nothing_of_the_kind.at_all", "it needs nothing_of_the_kind")

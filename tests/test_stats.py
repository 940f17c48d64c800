"""Statistics of the evaluation."""
import doctest

import pytest

from runtime import stats


@pytest.mark.parametrize("answers, index", [
    (["4", "5", "5"], 1),
    (["4", "5", "5", "4"], 0),  # a tie: the answer seen first
    ([None, "5", "4", "4", "5"], 1),
    ([None, None, None, "7"], 3),  # None is no vote, however often it occurs
    ([None, None], None),
    ([], None),
])
def test_the_most_frequent_answer_wins_the_first_seen_wins_a_tie_and_none_does_not_vote(answers, index):
    assert stats.majority_vote(answers) == index


def test_docstring_examples():
    result = doctest.testmod(stats)
    assert result.failed == 0 and result.attempted >= 1

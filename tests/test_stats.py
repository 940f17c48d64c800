"""Statistics of the evaluation."""
import pytest

from runtime.stats import majority_vote


@pytest.mark.parametrize("answers, index", [
    (["4", "5", "5"], 1),
    (["4", "5", "5", "4"], 0),  # a tie: the answer seen first
    ([None, "5", "4", "4", "5"], 1),
    ([None, None, None, "7"], 3),  # no answer is no vote, however many there are
    ([None, None], None),
    ([], None),
])
def test_the_most_frequent_answer_wins_the_first_seen_wins_a_tie_and_none_does_not_vote(answers, index):
    assert majority_vote(answers) == index

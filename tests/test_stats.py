"""Statistics of the evaluation."""
import doctest

import pytest

import nano_rlvr as nr
import rewards
from runtime import stats


@pytest.mark.exercise_13
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


def votes(*texts, truncated=False):
    """The different votes of completions; None is no vote."""
    rollouts = [nr.Rollout([0], [0], text, truncated, [0.0]) for text in texts]
    return {stats.vote_of(r, rewards.final_answer) for r in rollouts}


@pytest.mark.parametrize("texts", [
    ("<answer>72</answer>", r"\boxed{72.0}", "The answer is $72$.", r"\boxed{\$72}", "#### 72",
     r"\boxed{\(72\)}", r"\boxed{72\%}"),
    (r"\boxed{1,000}", r"\boxed{1000}", r"\boxed{1{,}000}", r"\boxed{1\,000}", r"\boxed{1000.00}"),
    (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{\dfrac12}", r"\boxed{1/2}", r"\boxed{$.5$}"),
    (r"\boxed{(1, 2)}", r"\boxed{(1,2)}", r"\boxed{$(1,2)$}"),
])
def test_equal_answers_in_another_form_are_one_vote(texts):
    assert len(votes(*texts)) == 1 and None not in votes(*texts)


def test_different_answers_are_different_votes():
    answers = ["72", "-72", "7", "72.5", "1,2", "2,1", "12", "(1,2)", "[1,2]", "72x", "72!",
               "7/2", "2/7", "x=72", "72^2", "72+1", "7-2", "A", "f(72)", r"\sqrt{72}",
               r"72\pi", "1/0", "2/0"]
    assert len(votes(*(rf"\boxed{{{a}}}" for a in answers))) == len(answers)


@pytest.mark.parametrize("text", [
    r"\boxed{7", r"\boxed{1} and \boxed{7", "<answer>7", "#### 7", "It is 7", "The answer is 7",
    "<answer>7</answ", "<think>\\boxed{7}", "", r"\boxed{7} or \boxed{"])
def test_an_answer_that_is_cut_off_does_not_vote(text):
    assert votes(text, truncated=True) == {None}


@pytest.mark.parametrize("text", [
    r"so \boxed{7}", r"\boxed{7}. Let me check: 8", "<answer>7</answer>",
    "<answer>7</answer> as 3 + 4", "#### 7\nI", "The answer is 7.\nNow"])
def test_a_complete_answer_of_a_truncated_completion_votes(text):
    assert votes(text, truncated=True) == {7}


def test_a_stop_string_that_vllm_removed_does_not_cut_an_answer_off():
    assert votes("<answer>7") == {7}


def test_cut_off_answers_do_not_outvote_a_complete_one_and_equal_ones_are_counted_together():
    def rollout(text, right, truncated=False):
        return nr.Rollout([0], [0], text, truncated, [0.0], parts={"math": float(right)})
    cut = [rollout(r"\boxed{7", 0, True), rollout("<answer>7", 0, True)] * 2
    assert stats.sample_values([*cut, rollout(r"\boxed{72}", 1)], rewards.final_answer)["maj@5"]
    forms = [rollout(rf"\boxed{{{a}}}", a != "5") for a in ("5", "5", "72", "72.0", "$72$")]
    assert stats.sample_values(forms, rewards.final_answer)["maj@5"]


@pytest.mark.parametrize("n, ks", [(1, [1]), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]),
                                   (8, [2, 4, 8]), (9, [2, 4, 8, 9])])
def test_pass_at_k_is_given_for_powers_of_two_and_for_n(n, ks):
    group = [nr.Rollout([0], [0], "", False, [0.0], parts={"math": float(i == 0)})
             for i in range(n)]
    values = stats.sample_values(group, rewards.final_answer)
    assert [name for name in values if "pass" in name] == [f"pass@{k}" for k in ks]
    assert values[f"pass@{n}"] == 1.0 and values.get("pass@2", 1.0) == pytest.approx(min(2 / n, 1))


def test_docstring_examples():
    result = doctest.testmod(stats)
    assert result.failed == 0 and result.attempted >= 1

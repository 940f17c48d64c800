"""examples/process_rewards.py: which tokens get which advantages of which steps."""
import math
from types import SimpleNamespace

import pytest

import nano_rlvr as nr
from conftest import close, make_config
from examples import process_rewards
from runtime.messages import RunError

REAL = [  # completions of the bundled model: question, text, the ends of the steps and their values
    ("13-2-3-1+6-13", "<think></think><answer>0</answer>", [("</answer>", 1)]),  # a right guess
    # the left side does not count; a total after a wrong one may be right again
    ("4+15+2+18", "<think>4+15=19\n18+2=+2\n19+18=39</think><answer>44</answer>",
     [("4+15=19", 1), ("18+2=", 0), ("=39", 1), ("</answer>", 0)]),
    # one total too many
    ("17-10-4+17",
     "<think>17-1\ufffd<think>17-10=7\n7-4=3\n3+17=20\n20+17=20</think><answer>20</answer>",
     [("=7", 1), ("=3", 1), ("=20", 1), ("+17=20", 0), ("</answer>", 1)]),
    ("9+18-16", "<think>9+18=27<think>9-16=11", [("=27", 1), ("=11", 0)]),  # cut off: no answer
]


@pytest.mark.exercise_12
def test_steps_judges_running_totals_and_the_answer():
    for question, text, wanted in REAL:
        (steps,) = process_rewards.steps_reward([text], question=[question])
        found = [(text[:end][-len(tail):], value) for (end, value), (tail, _) in zip(steps, wanted)]
        assert found == wanted and len(steps) == len(wanted), (
            f"{text!r}: your steps {steps}, wanted steps that end with {wanted}")
        assert steps[-1][0] == len(text)
        # spaces in the question, TRL's messages and an equal answer change nothing
        message = [{"role": "assistant", "content": text}]
        assert process_rewards.steps_reward([message], " ".join(question)) == [steps]


def test_steps_has_no_reward_for_a_question_that_is_no_sum_and_0_for_an_empty_text():
    questions = ["Why?", "2*3", "", "5", "2+", "+2+3", "9" * 5000 + "+1", "1+2"]
    found = process_rewards.steps_reward([""] * 8, question=questions)
    assert found == [None] * 7 + [0.0]


@pytest.mark.parametrize("text", ["12+3=15\n", "1×2=2, 3÷3=1 \U0001f600."])
def test_a_step_ends_with_the_token_that_completes_its_last_character(tokenizer, text):
    """× has two tokens, a byte each. A step that covers the whole text covers the end of the
    sequence too, which has no text."""
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    prefixes = [tokenizer.decode(ids[:k], skip_special_tokens=True) for k in range(len(ids) + 1)]
    ends = range(1, len(text) + 1)
    wanted = [next(k for k, x in enumerate(prefixes) if x[:end] == text[:end]) for end in ends]
    r = nr.Rollout([0], ids, text, False, [0.0] * len(ids))
    found = process_rewards.in_tokens([(end, end / 8) for end in ends], r, tokenizer)
    assert found == [(k, end / 8) for k, end in zip([*wanted[:-1], len(ids)], ends)]


def trained(monkeypatch, tokenizer, function):
    """The advantages that train() gives to two completions of a sum, with these step rewards."""
    texts, outcomes = ["1+2=3\n3+4=8", "7"], [0.0, 1.0]
    group = []
    for text, reward in zip(texts, outcomes):
        ids = tokenizer.encode(text, add_special_tokens=False)
        group.append(nr.Rollout([5, 6], ids, text, False, [0.0] * len(ids), reward=reward))
    cfg = make_config(samples=2, scale="none")
    run = SimpleNamespace(llm=SimpleNamespace(get_tokenizer=lambda: tokenizer),
                          train_set=[{"prompt_ids": [5, 6], "question": "1+2+4"}])
    monkeypatch.setattr(nr, "train", lambda run, assign_advantages: assign_advantages(
        [group], cfg, math.nan))
    process_rewards.train(run, function, "mine.py:f")
    return group


def test_a_token_gets_the_advantages_of_the_steps_that_end_at_it_or_later(
        in_float64, tokenizer, monkeypatch):
    """The second completion has no steps: its outcome is one."""
    def function(texts, question, **columns):
        assert question == ["1+2+4"] * 2
        return [[(5, 0.3), (11, 0.0)], None]

    group = trained(monkeypatch, tokenizer, function)
    n = len(group[0].completion)
    assert n == 11  # a token per character
    mean = (0.3 + 0.0 + 1.0) / 3
    close(group[0].advantages, [0.3 - 2 * mean] * 5 + [-mean] * 6)
    close(group[1].advantages, [1.0 - mean])


@pytest.mark.parametrize("steps", [
    [(0, 1.0)], [(12, 1.0)], [(2, 1.0), (2, 1.0)], [(2, math.nan)], [(2,)], [2.0]])
def test_malformed_steps_end_the_run_with_one_line(tokenizer, monkeypatch, steps):
    with pytest.raises(RunError, match="^--step_rewards mine.py:f: (Value|Type)Error: .+") as e:
        trained(monkeypatch, tokenizer, lambda texts, **columns: [steps, None])
    assert "\n" not in str(e.value)

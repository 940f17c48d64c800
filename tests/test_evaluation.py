"""The evaluation: several sets, templates, examples/test_time.py."""
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest

import data
import nano_rlvr as nr
import rewards
import runtime.flags
from conftest import make_config, write_rows
from examples import test_time as example
from examples.process_rewards import steps_reward
from runtime import evaluation, stats
from runtime.report.text import evaluation_text

ROWS = [{"question": "3+4+5", "answer": "12"}, {"question": "3+4-5", "answer": "2"}]


def test_each_set_keeps_its_name(tmp_path, tokenizer):
    own = write_rows(tmp_path / "own.jsonl", ROWS * 600)
    cfg = make_config(eval_data=f"arithmetic, countdown,{own}", eval_size=8, max_prompt=400)
    _, examples = data.load_splits(cfg, tokenizer, notify=pytest.fail)
    assert [(e["eval_set"], e["eval_of"]) for e in examples] == (  # functions make 8
        [("arithmetic", 8)] * 8 + [("countdown", 8)] * 8 + [("own", 1200)] * 8)


def test_gold_answers_of_an_evaluation_that_the_reward_cannot_read_are_said(group):
    rows, said = [{"question": "q", "answer": x} for x in (r"\\frac{x}{2}", "5")], []
    rewards.start_verifier(make_config(), rows[1:], rows, said.append).close()
    assert "reward gsm8k: 1 of 2 answers cannot be read" in said[0]


def test_names_of_sets_differ(tokenizer):
    cfg = make_config(eval_data="x/a.jsonl,y/a.jsonl")
    with pytest.raises(ValueError, match="^--eval_data .*: two sets have one name, or"):
        data.load_splits(cfg, tokenizer, notify=lambda _: None)


def test_the_mean_over_sets_counts_each_set_once_and_has_no_interval():
    one = evaluation.set_metrics([{"accuracy": i < 3, "length": 2 * i} for i in range(10)])
    assert (one["accuracy"], one["n"], one["length"]) == (0.3, 10, 9)
    assert (one["low"], one["high"]) == stats.wilson_interval(3, 10)
    examples = [{"question": "q", "eval_set": name, "eval_of": 1200} for name in "aab"]
    greedy = [nr.Rollout([0], [0], "", False, [0.0], parts={"x": x}) for x in (1.0, 1.0, 0.0)]
    metrics, rows = evaluation.summary(examples, [0, 1, 2], greedy, [], make_config())
    assert [(row["set"], row["right"]) for row in rows] == [("a", True), ("a", True), ("b", False)]
    assert (metrics["eval/a/accuracy"], metrics["eval/accuracy"], metrics["eval/n"]) == (1, 0.5, 3)
    assert "eval/a/low" in metrics and "eval/low" not in metrics
    a, _, mean = evaluation_text(metrics).splitlines()
    assert re.match(r"a: accuracy 100.0% \(95 % interval .*, over 2 of 1,200\)", a)
    assert mean.startswith("mean: accuracy 50.0% (n = 3)")


def test_a_run_keeps_the_text_of_its_template_and_a_trained_model_brings_it(tmp_path, tokenizer):
    path = tmp_path / "t.txt"
    path.write_text("1+1\n2\n{question}\nA:\n")  # the last line break ends the file
    cfg = nr.parse_config(["--template", str(path)])
    prompt = data.encode({"question": "{x}"}, tokenizer, cfg.template)
    assert tokenizer.decode(prompt) == "1+1\n2\n{x}\nA:"
    (tmp_path / "run").mkdir()
    config = json.dumps({"config": vars(cfg) | {"name": "run"}})
    for file in "run/config.json", runtime.flags.RECORD:
        (tmp_path / file).write_text(config)
    assert nr.parse_config(["--model", str(tmp_path)]).template == cfg.template
    resume = ["--resume", str(tmp_path / "run"), "--template", str(path)]
    assert nr.parse_config(resume).template == cfg.template
    for text, says in (("Question: {question}\nA:", r"Question: \{question\} A: \(was 1\+1 2 "),
                       ("Answer!", ".*t.txt: not one of .*it needs {question}")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"--template {says}"):
            nr.parse_config(resume)


# ---- examples/test_time.py

def test_a_completion_is_cut_at_the_budget_and_has_to_answer(llm, tokenizer):
    prompt = data.encode({"question": "3+4"}, tokenizer, "chat")
    thoughts = tokenizer.encode("<think>3+4=7", add_special_tokens=False) * 3
    short, long = (nr.Rollout(prompt, ids, "x", False, [0.0] * len(ids))
                   for ids in (thoughts[:5], thoughts))
    opener = tokenizer.encode(example.OPENER, add_special_tokens=False)
    same, forced = example.force_answers(llm, [short, long], 5)
    assert same is short and forced.prompt == prompt
    assert forced.completion[:5 + len(opener)] == thoughts[:5] + opener
    assert forced.text == tokenizer.decode(forced.completion, skip_special_tokens=True)
    assert len(forced.completion) - len(opener) == forced.length <= 5 + example.ANSWER


def sums(tokenizer, *questions):
    """Examples as data.py makes them. The gold answers are wrong, so nobody may look at them."""
    examples = [{"question": question, "answer": "-1"} for question in questions]
    for e in examples:
        e["prompt_ids"] = data.encode(e, tokenizer, "chat")
    return examples


class Recorded(example.Sampling):
    """Keeps what each call gets, (question, text) per example, and the groups that it gives."""

    def __init__(self, llm, temperature):
        super().__init__(llm, make_config(), temperature)
        self.taken, self.given = [], []

    def __call__(self, examples, texts, n=1, until=None):
        groups = super().__call__(examples, texts, n, until)
        self.taken.append([(e["question"], text) for e, text in zip(examples, texts)])
        self.given.append([list(group) for group in groups])
        return groups


def completions(*texts):
    return [nr.Rollout([0], [0], text, False, [0.0]) for text in texts]


QUESTIONS = ["14+2+9", "3+4-5", "12-7+5+8", "16-14+16", "9+10-13-5", "4+6+8+1+3+5"]


def test_a_text_is_continued_up_to_a_string_and_every_sampled_token_is_counted(llm, tokenizer):
    greedy = Recorded(llm, 0.0)
    examples = sums(tokenizer, "14+2+9", "3+4-5")
    texts = ["<think>14+2=", "<think>3+4=7\n7-5="]
    until = greedy(examples, texts, until="\n")
    assert [r.text for [r] in until] == [
        "<think>14+2=16\n", "<think>3+4=7\n7-5=2</think><answer>2</answer>"]
    assert [example.is_open(r, "\n") for [r] in until] == [True, False]
    # 1 6 \n, and 2 </think> <answer> 2 </answer> <|endoftext|>
    assert greedy.tokens == 3 + 6
    prompt = examples[0]["prompt_ids"] + tokenizer.encode(texts[0], add_special_tokens=False)
    [plain] = nr.rollout(greedy.llm, [prompt], 1, 0.0, 96)
    [[whole]] = greedy(examples[:1], texts[:1])
    assert whole.text == texts[0] + plain.text
    assert whole.prompt + whole.completion == prompt + plain.completion
    greedy.cfg = make_config(max_tokens=len(whole.completion) - 2)  # less than it needs
    [[cut]] = greedy(examples[:1], ["<think>14+2=16\n16+9=25"], until="</answer>")
    assert cut.truncated and not example.is_open(cut, "</answer>")


def test_waiting_puts_a_text_in_the_place_of_the_end_of_thinking(llm, tokenizer):
    greedy = Recorded(llm, 0.0)
    examples = sums(tokenizer, *QUESTIONS)
    plain = nr.rollout(greedy.llm, [e["prompt_ids"] for e in examples], 1, 0.0, 96)
    assert [r.text for r in example.force_thinking(greedy, examples, 0)] == [r.text for r in plain]
    greedy.taken.clear()
    waited = example.force_thinking(greedy, examples, 2, wait=" 1+1=2\n")
    start, first, second, answer = greedy.taken
    assert {text for _, text in start} == {""}
    for i, r in enumerate(plain):
        thoughts = r.text.partition("</think>")[0]
        assert first[i] == (QUESTIONS[i], thoughts + " 1+1=2\n")
        assert second[i][1].startswith(first[i][1]) and second[i][1].endswith(" 1+1=2\n")
        assert answer[i][1].startswith(second[i][1]) and answer[i][1].count("</think>") == 1
        assert answer[i][1].endswith("</think>") and waited[i].text.startswith(answer[i][1])
        assert waited[i].text.endswith("</answer>")


def test_the_steps_before_the_first_wrong_one_are_kept(tokenizer):
    [e] = sums(tokenizer, "14+2+9")
    kept = {"<think>14+2=16\n16+9=26</think><answer>26</answer>": "<think>14+2=16",
            "<think>14+2=16\n16+9=25</think><answer>26</answer>": "<think>14+2=16\n16+9=25",
            "<think>14+2=17\n17+9=25</think><answer>25</answer>": "", "": ""}
    found = [example.right_steps(r, e, steps_reward) for r in completions(*kept)]
    assert found == [*kept.values()]


@pytest.mark.parametrize("selector", [  # the second is never content, and knows no steps
    steps_reward, lambda texts, question: [-len(text) for text in texts]])
def test_an_answer_with_a_wrong_step_is_revised_from_there_and_the_better_one_is_kept(
        llm, tokenizer, selector):
    sample, examples = Recorded(llm, 1.0), sums(tokenizer, *QUESTIONS)
    best = example.refine(sample, examples, 3, selector)
    [drafts, *revised], asked = sample.given, sample.taken[1:]
    former = {e["question"]: draft for e, [draft] in zip(examples, drafts)}
    for texts, groups in zip(asked, revised, strict=True):
        wrong = [e for e in examples if example.values_of(
            [former[e["question"]]], e, selector) != [1.0]]
        for (q, text), [new], e in zip(texts, groups, wrong, strict=True):
            assert q == e["question"] and text == example.right_steps(former[q], e, selector)
            former[q] = example.best_of([former[q], new], e, selector)
    assert len(revised) == 3 and any(asked) and best == [former[q] for q in QUESTIONS]
    unknown = example.refine(sample, examples, 1, lambda texts, question: [None] * len(texts))
    assert len(unknown) == len(examples) and sample.taken[-1] == []  # nothing to revise


def test_samples_are_shared_out_by_the_doubts_about_the_probes(llm, tokenizer):
    sample = Recorded(llm, 1.0)
    examples = sums(tokenizer, "1+2+3", "4+5+6", "7+8+9", "2+2+2")
    values = {"1+2+3": [1.0, 1.0], "4+5+6": [1.0, 0.0], "7+8+9": [0.5, 0.0], "2+2+2": [0.25, None]}

    def selector(texts, question):
        return values[question[0]] + [2.0] * (len(texts) - 2)
    best = example.by_difficulty(sample, examples, 5, 2, selector)
    # difficulty 0, 0.5, 0.75, 0.875: of 4 * 3 = 12 samples 0, 2.82, 4.24, 4.94. The sums of these
    # from the first question on, 0, 2.82, 7.06, 12, are rounded to 0, 3, 7, 12
    assert [q for q, _ in sample.taken[1]] == ["4+5+6"] * 3 + ["7+8+9"] * 4 + ["2+2+2"] * 5
    more = [r for [r] in sample.given[1]]
    assert best == [sample.given[0][0][0], more[0], more[3], more[7]]  # the first with 2.0
    example.by_difficulty(sample, examples, 5, 2, lambda texts, question: [1.0] * len(texts))
    assert sample.taken[3] == []  # nothing is hard


def test_a_text_that_goes_on_is_not_judged_by_the_answer_that_it_does_not_have(tokenizer):
    """Of an answer and of step rewards the mean counts, and of equal means the first."""
    [e] = sums(tokenizer, "14+2+9")
    group = completions("<think>14+2=16\n", "<think>14+2=16\n16+9=26\n", "<think>\n", *2 * [
        "<think>14+2=16\n16+9=25</think><answer>1</answer>"])
    found = example.values_of(group, e, steps_reward, until="\n")
    assert found == [1, 1 / 2, None, 2 / 3, 2 / 3]
    assert example.values_of(group, e, steps_reward) == [1 / 2, 1 / 3, 0, 2 / 3, 2 / 3]
    assert example.best_of(group, e, steps_reward) is group[3]
    for values, best in (([None, 0.4, 0.5, 0.1, 0.2], 2), ([None] * 5, 0)):
        assert example.best_of(group, e, lambda texts, question: list(values)) is group[best]


def test_the_likeliest_sample_has_the_highest_mean_log_prob_of_its_sampled_tokens():
    def likeliest(*samples):
        group = [nr.Rollout([0], [0] * len(logps), "", False, logps, sampled)
                 for logps, sampled in samples]
        return group.index(example.highest(group, map(example.mean_logp, group)))

    # the sum would choose the first
    assert likeliest(([-1.0, -1.0], None), ([-0.5, -1.0, -0.75], None)) == 1
    # three tokens of a tool's output
    assert likeliest(([-1.0] * 4, None), ([-3.0, 0.0, 0.0, 0.0], [True, False, False, False])) == 0


def patience(text):
    """Likes the first step of a calculation better than an answer, and its next ones less."""
    return 1.2 - 0.4 * text.count("\n") if text.endswith("\n") else 0.5


def test_a_tree_search_keeps_the_steps_that_the_verifier_likes_best(llm, tokenizer):
    """Against a search written out per question, from the same samples."""
    sample, examples = Recorded(llm, 1.0), sums(tokenizer, *QUESTIONS)
    found = example.tree_search(sample, examples, 2, 3, lambda texts, question: [
        patience(text) for text in texts])

    def goes_on(r):
        return r.text.endswith("\n")
    for i, (q, result) in enumerate(zip(QUESTIONS, found)):
        candidates = sample.given[0][i]
        assert len(candidates) == 6
        for asked, groups in [*zip(sample.taken[1:], sample.given[1:]), ([], [])]:
            beam = sorted(candidates, key=lambda r: (-patience(r.text), goes_on(r)))[:2]
            candidates = [r for r in beam if not goes_on(r)]
            children = [(text, group) for (own, text), group in zip(asked, groups) if own == q]
            if not goes_on(beam[0]):  # the search of this question has ended
                assert not children
                break
            assert [text for text, _ in children] == [r.text for r in beam if goes_on(r)]
            candidates += [r for _, group in children for r in group]
        assert result.text == beam[0].text and result.text.endswith("</answer>")


def test_a_tree_search_keeps_a_complete_beam_beside_one_that_goes_on():
    """The step that goes on is liked best, but then it ends badly."""
    drawn = iter([completions("bad\n", "done"), completions("worse")])
    found = example.tree_search(
        lambda examples, texts, *_: [next(drawn) for _ in texts], [{"question": "q"}], 2, 1,
        lambda texts, question: [{"bad\n": 0.9, "done": 0.5}.get(text, 0.1) for text in texts])
    assert [r.text for r in found] == ["done"]


CHAT = "<|user|>1+1<|assistant|>"
WRONG = {"completion": "<answer>3</answer>", "parts": {"gsm8k": 0.0, "format": 1.0}, "right": False,
         "finish": "stop", "answer": "2"}


def looked(tokenizer, answers, prompt=CHAT, **changes):
    """What first_look says."""
    said = []
    run = SimpleNamespace(
        cfg=dataclasses.replace(make_config(), **changes), log=SimpleNamespace(say=said.append),
        llm=SimpleNamespace(get_tokenizer=lambda: tokenizer),
        eval_set=[{"prompt_ids": tokenizer(prompt)["input_ids"]}] * 3)
    evaluation.first_look(run, answers)
    assert all(line.startswith(evaluation.FIRST_LOOK) for line in said)
    return [line.removeprefix(evaluation.FIRST_LOOK) for line in said]


def test_the_first_look_shows_two_prompts_and_three_completions_with_their_rewards(tokenizer):
    said = looked(tokenizer, [WRONG | {"completion": "I think " * 99 + "so.", "right": True,
                                       "parts": {"graded": 0.5}}, *[WRONG] * 9])
    assert said[:2] == [f"a prompt: '{CHAT}'"] * 2
    long, *short, shares = said[2:]
    assert long.startswith("a completion (graded 0.5; gold answer '2'): 'I think ")
    assert " [...] " in long and long.endswith("I think so.'") and len(long) < 320
    assert short == ["a completion (gsm8k 0.0, format 1.0; gold answer '2'): "
                     "'<answer>3</answer>'"] * 2
    assert shares == "of 10 answers 10% are rewarded, and 0% were cut off at --max_tokens 96"


REASONS = {  # answers, other arguments -> the only reason
    "cut": ([WRONG | {"finish": "length"}, WRONG], {}, "50% were cut off: see --max_tokens"),
    "no final answer": ([WRONG, WRONG, WRONG, WRONG | {"completion": "7?"}], {},
                        "25% mark no final answer: see --template"),
    "gold": ([WRONG, WRONG | {"parts": {"math": None}, "answer": "{x"}], {},
             "50% have no reward. The reward failed or cannot read the gold answer, one is '{x'"),
    "template": ([WRONG], dict(model="x/y-Instruct", template="none", prompt="1+1"),
                 "--template none is not this model's chat format: try chat"),
    "none of them": ([WRONG, WRONG | {"parts": {"signed": -1.0}}], {},
                     "no usual reason is present: compare completions and gold")}


@pytest.mark.parametrize("kind", REASONS)
def test_where_no_answer_is_rewarded_the_first_look_names_the_reason(tokenizer, kind):
    answers, changes, reason = REASONS[kind]
    (said,) = looked(tokenizer, answers, **changes)[3 + min(3, len(answers)):]
    assert said.startswith(f"no answer is rewarded: {reason}")


@pytest.mark.parametrize("changes", [
    dict(model="x/y"), dict(template="chat"),
    dict(template="r1", prompt="<|user|>{question}<|assistant|>")])  # the format, by a file
def test_a_base_model_and_a_prompt_in_the_chat_format_are_no_reason(tokenizer, changes):
    changes = dict(model="x/y-Instruct", template="none", prompt="1+1") | changes
    assert "no usual reason" in looked(tokenizer, [WRONG], **changes)[-1]

"""Models that think, as they are published: tags that are special tokens, and prompts that end with
<think>. The bundled model with another tokenizer or another chat template stands for them."""
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

import data
import nano_rlvr as nr
import rewards
from conftest import ENV, ROOT, make_config, read_rows
from examples import agents, process_rewards, python_tool, sft
from examples import test_time as example
from runtime.verify.answer import final_answer

TINY = ROOT / "models/tiny"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
SUMS = ["14+2+9", "3+4-5", "12-7+5+8"]


def special(tokenizer):
    """The bundled tokenizer, whose four tags are special tokens."""
    tokenizer.add_special_tokens({"additional_special_tokens": TAGS})
    assert tokenizer.decode(tokenizer.encode("<think>1"), skip_special_tokens=True) == "1"
    return tokenizer


def opening(tokenizer):
    """The bundled tokenizer, whose chat template ends with <think>."""
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|assistant|>", "<|assistant|><think>\n")
    return tokenizer


@pytest.fixture(params=[special, opening, lambda tokenizer: special(opening(tokenizer))],
                ids=["special", "opening", "both"])
def published(request):
    return request.param(AutoTokenizer.from_pretrained(TINY))


@pytest.fixture
def engine(llm, published, monkeypatch):
    """vLLM with this tokenizer, which its own text for stop strings comes from, too."""
    monkeypatch.setattr(type(llm._llm), "get_tokenizer", lambda self: published)
    processor = llm.llm_engine.output_processor
    monkeypatch.setattr(processor, "tokenizer", published)
    return llm


def sums(tokenizer):
    examples = [{"question": question, "answer": str(eval(question))} for question in SUMS]
    for row in examples:
        row["prompt_ids"] = data.encode(row, tokenizer, "chat")
    return examples


def run(folder, change, *flags):
    """Two steps of a copy of the bundled model. Returns the answers before training and the
    completions of step 1."""
    model = shutil.copytree(TINY, folder / "model")
    change(AutoTokenizer.from_pretrained(TINY)).save_pretrained(model)
    argv = ("--steps 2 --prompts 8 --samples 4 --eval_size 64 --eval_every 2 --kl_coef 0 "
            "--rewards gsm8k:1,format:0 --name run --mismatch_bound 20").split()
    done = subprocess.run(
        [sys.executable, "nano_rlvr.py", "--model", model, "--out", folder, *argv, *flags],
        env=ENV | {"VLLM_CPU_KVCACHE_SPACE": "1"}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    answers = [row for row in read_rows(folder / "run/eval.jsonl") if row["step"] == 0]
    return answers, read_rows(folder / "run/rollouts.jsonl")


def test_tags_that_are_special_tokens_reach_the_rewards_of_a_whole_run(llm, tokenizer, tmp_path):
    """The same answers and rewards as with tags that are text."""
    answers, sampled = run(tmp_path, special)
    examples = data.load("arithmetic", "test", 64)
    prompts = [data.encode(example, tokenizer, "chat") for example in examples]
    texts = [r.text for r in nr.rollout(llm, prompts, 1, 0.0, 96)]
    assert [row["completion"] for row in answers] == texts
    gold = [example["answer"] for example in examples]
    assert [row["parts"]["gsm8k"] for row in answers] == rewards.gsm8k_reward(texts, answer=gold)
    finished = [row["parts"]["format"] for row in answers if row["finish"] == "stop"]
    assert sum(finished) > 0.9 * len(finished)
    assert any("<think>" in row["completion"] for row in sampled)


def test_a_thinking_that_the_prompt_opened_and_nobody_closed_has_no_answer_in_a_whole_run(tmp_path):
    answers, sampled = run(tmp_path, opening, "--max_tokens", "24")
    open_ended = []
    for row in answers + sampled:
        text = row["completion"]
        assert text.startswith("<think>")
        if "</think>" not in text:
            assert row["parts"]["gsm8k"] == 0.0
            open_ended.append(text)
    gold = [row["answer"] for row in data.load("arithmetic", "test", 64)]
    without = [row["completion"].removeprefix("<think>") for row in answers]
    unseen = rewards.gsm8k_reward(without, answer=gold)  # if nobody knew of the prompt's tag
    assert sum(unseen) > sum(row["parts"]["gsm8k"] for row in answers)
    assert any(row["parts"]["format"] for row in answers)


def test_a_completion_that_does_not_end_the_thinking_of_its_prompt_has_no_answer(tokenizer):
    def texts(prompt, *completions):
        encode = tokenizer.encode
        made = [nr.Rollout(encode(prompt), encode(text), "", False, []) for text in completions]
        return data.completion_texts(made, tokenizer)

    for prompt in "<|assistant|><think>\n", "</think> <think>", "9" * 99 + "<think>":
        cut_off, done, tags = texts(
            prompt, r"Adding gives \boxed{5}. Hmm, let me verify by",
            "2+3=5.\n</think>\n\n\\boxed{5}", "a</think><answer>5</answer>")
        assert not final_answer(cut_off) and final_answer(done) == "5"
        assert rewards.gsm8k_reward([cut_off, done], answer=["5"] * 2) == [0.0, 1.0]
        assert rewards.format_reward([tags]) == [1.0]
    for prompt in "", "<|assistant|>", "<think>\n\n</think>\n\n", "<think>\nOkay, ":
        assert texts(prompt, r"\boxed{5}") == [r"\boxed{5}"]


def test_what_ends_a_text_and_is_no_tag_is_left_out(tokenizer):
    tagged = special(AutoTokenizer.from_pretrained(TINY))
    ids = tagged.encode("<answer>1</answer>")
    for end, truncated, text in ([], False, ""), ([256, 256], True, ""), ([257], False, ""), (
            [257], True, "<|user|>"), ([257, 256], False, "<|user|>"):
        r = nr.Rollout([1], ids + end, "", truncated, [])
        assert data.completion_texts([r], tagged) == ["<answer>1</answer>" + text], end


def test_steps_end_at_the_tokens_that_complete_them(published):
    [row] = sums(published)[:1]
    written = "<think>14+2=16\n16+9=25</think><answer>25</answer>"
    r = sft.as_rollout(row, written, published, "chat")
    [text] = data.completion_texts([r], published)
    opened = data.opened_thinking(r.prompt, published)
    assert text == r.text == written
    [steps] = process_rewards.steps_reward([text], question=[row["question"]])
    found = process_rewards.in_tokens(steps, r, published)
    assert [value for _, value in found] == [1.0, 1.0, 1.0]
    for (end, _), (tokens, _) in zip(steps[:2], found):
        assert opened + published.decode(r.completion[:tokens]) == text[:end]
    assert found[-1][0] == len(r.completion)


def test_a_text_is_stopped_and_continued_with_its_tags(engine, published):
    """The greedy completion, cut at a string and continued, is the greedy completion."""
    examples = sums(published)
    plain = nr.rollout(engine, [row["prompt_ids"] for row in examples], 1, 0.0, 96)
    sample = example.Sampling(engine, make_config(), 0.0)
    for until in "\n", "</think>":
        begun = [r for [r] in sample(examples, [""] * len(SUMS), until=until)]
        assert all(r.text.startswith("<think>") for r in begun)
        on = [i for i, r in enumerate(begun) if example.is_open(r, until)]
        assert on == [i for i, r in enumerate(plain) if until in r.text]
        again = sample([examples[i] for i in on], [begun[i].text for i in on])
        assert [r.text for [r] in again] == [plain[i].text for i in on] != []
        assert [r.completion for [r] in again] == [plain[i].completion for i in on]
    [forced, *_] = example.force_answers(engine, plain, 5)
    assert "</think><answer>" in forced.text and forced.text.startswith("<think>")


def test_a_call_is_seen_although_its_tags_are_special(engine, published, monkeypatch):
    monkeypatch.setattr(python_tool, "OPEN", "<think>")
    monkeypatch.setattr(python_tool, "CLOSE", "</think>")
    monkeypatch.setattr(python_tool, "run_python", lambda program: "7")
    prompts = [row["prompt_ids"] for row in sums(published)]
    for r in python_tool.python_rollout(engine, prompts, 1, 0.0, 96):
        assert "</think><output>7</output>" in r.text


def test_the_checker_reads_the_writer_with_its_tags(engine, published):
    examples = sums(published)
    prompts = [row["prompt_ids"] for row in examples]
    alone = nr.rollout(engine, prompts, 1, 0.0, 90)
    rollouts = agents.two_turns(engine, prompts, 1, 0.0, 200)
    for r, written, row in zip(rollouts, alone, examples):
        assert r.text.startswith(written.text) and "</think>" in written.text
        of_writer = agents.answers(r.text, row["question"])[0]
        assert of_writer == rewards.final_number(written.text)

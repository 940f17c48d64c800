"""The tasks of examples/programs.py, follow.py and walkthrough.py, and IFEval's instructions."""
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import data
import nano_rlvr as nr
import rewards
from conftest import ENV, EXACT, ROOT, close, make_config, read_rows, write_rows
from examples import code_reward, follow, instructions, jail, programs, walkthrough

needs_jail = pytest.mark.skipif(not jail.isolates(), reason="this machine cannot build a jail")

# ---- instructions

# IFEval's id: (arguments, a text that follows the instruction, one that does not)
TEXTS = {
    "change_case:english_lowercase": ({}, "small 1", "Small 1"),
    "change_case:english_capital": ({}, "LARGE 1", "LARGe 1"),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "less than"}, "ONE two", "ONE TWO"),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"}, "it is mother-in-law", "two words"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "less than"}, "It is 3.5 m.", "It is. So!"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "They"},
        "One.\n\n'they, too", "They.\n\nOne"),
    "keywords:existence": ({"keywords": ["old", "far"]}, "Far and old", "Far and older"),
    "keywords:forbidden_words": ({"forbidden_words": ["old"]}, "Far and older", "far and OLD"),
    "keywords:frequency": (
        {"keyword": "old", "frequency": 2, "relation": "at least"}, "Old, old", "old, older"),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, "Eve", "odd one"),
    "detectable_format:json_format": ({}, '```JSON {"a": 1} ```', "{a: 1}"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2}, "*a* and **b**", "*a* and * *"),
    "detectable_format:title": ({}, "<<A title>> a", "<a title> a"),
    "detectable_format:constrained_response": ({}, "So: My answer is no.", "My answer is no"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2}, "Section 1 a\nSection2 b",
        "Section 1 a\nSection two"),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b]", "[a] [b"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "a\np.s. b", "a\nPS b"),
    "combination:two_responses": ({}, "******a******b", "a******a"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say a."}, " say A. a", "So: say a. a"),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
    "startend:end_checker": ({"end_phrase": "That is all."}, "a. that is ALL.", "That is all. a"),
    "startend:quotation": ({}, '"a"', '"'),
    "language:response_language": (
        {"language": "de"}, "Die Enten schwimmen auf dem See.", "The ducks swim on the lake."),
}


@pytest.mark.parametrize("name", instructions.INSTRUCTIONS)
def test_each_kind_of_instruction_has_a_text_that_follows_it_and_one_that_does_not(name):
    arguments, right, wrong = TEXTS[name]
    assert instructions.follows(right, name, arguments)
    assert not instructions.follows(wrong, name, arguments)
    assert not instructions.follows(" ", name, arguments)


@pytest.mark.parametrize("text, follows", [
    ("a\n\nThey b\n\n ", True), ("\n\nThey b", False), ("a\n\n\n\nThey b", False),
    ("They", False)])
def test_empty_paragraphs_count_for_the_place_of_a_paragraph_and_not_for_their_number(
        text, follows):
    name = "length_constraints:nth_paragraph_first_word"
    arguments = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "they"}
    assert instructions.follows(text, name, arguments) == follows


@pytest.mark.parametrize("text, follows", [
    ("a******b", True), ("a******b******", True), ("a******", False), ("a", False),
    ("a******b******c", False), ("a************b", False)])
def test_two_responses_have_six_stars_between_them_and_perhaps_around(text, follows):
    assert instructions.follows(text, "combination:two_responses") == follows


def test_a_run_says_at_its_start_which_instructions_it_cannot_judge():
    words = "length_constraints:number_words"
    rows = [
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {"instruction_id_list": ["be:nice"], "kwargs": [{}]},
        {"instruction_id_list": [words], "kwargs": [{"relation": "at least"}]},
        {"instruction_id_list": [words], "kwargs": [{"num_words": 3, "relation": "more than"}]}]
    said = []
    with rewards.Verifier(f"{ROOT}/examples/instructions.py:instruction", timeout=20) as verify:
        verify.count_unreadable(rows, said.append)
        verify.count_unreadable(rows[:1], said.append)
        with pytest.raises(ValueError, match="1 of 1 .* missing .* 'num_words'"):
            verify.count_unreadable(rows[2:3])
        with pytest.raises(ValueError, match="1 of 1 .* unknown relation 'more than'"):
            verify.count_unreadable(rows[3:])
    [text] = said
    assert "3 of 4 answers cannot be read, ValueError: unknown instruction 'be:nice'" in text


def topics_and_kinds(rows):
    rows = list(rows)
    return {row["topic"] for row in rows}, {row["instruction_id_list"][0] for row in rows}


def test_follow_asks_for_all_kinds_and_its_new_topics_and_kinds_are_not_trained():
    assert {*follow.TRAINED, *follow.NEW} == {*follow.KINDS} == {*instructions.INSTRUCTIONS}
    trained_topics, kinds = topics_and_kinds(follow.make("train", 2000, 0))
    assert kinds == {*follow.TRAINED} and len(trained_topics) == 30
    new_topics, kinds = topics_and_kinds(follow.make("test", 2000, 0))
    assert kinds == {*follow.TRAINED} and len(new_topics) == 10
    assert not trained_topics & new_topics
    assert topics_and_kinds(follow.new_kinds("test", 2000, 0)) == (new_topics, {*follow.NEW})
    assert follow.on_topic(["<think>owls</think> Cats", "Owls"], ["owls"] * 2) == [0.0, 1.0]


def test_a_question_of_follow_names_every_argument_and_the_reward_reads_it():
    for row in [*follow.make("train", 2000, 0), *follow.new_kinds("train", 500, 0)]:
        [arguments] = row["kwargs"]
        named = str([row["question"], "de"])  # German is not named by its code
        for value in arguments.values():
            parts = value if isinstance(value, list) else [value]
            assert all(str(part) in named for part in parts), row
        assert instructions.instruction([""], [row["instruction_id_list"]], [[arguments]]) == [0]


# ---- programs

BY_HAND = {  # kind: (k, an argument, what the text of the kind says of it)
    "count_above": (2, [1, 2, 3, 4], 2),
    "scaled": (3, [1, -2], [3, -6]),
    "multiples": (2, [1, -2, 0], [-2, 0]),
    "clipped": (2, [1, 2, 3, -4], [1, 2, 2, -4]),
    "largest": (2, [3, 9, 5], [9, 5]),
    "gaps": (2, [1, 2, 5, 9], [4, 7]),
    "rotated": (2, [1, 2, 3], [3, 1, 2]),
    "repeated": (2, "ab", "ab-ab"),
    "shifted": (3, "ayz", "dbc"),
    "every": (2, "abcde", "ace"),
    "chunks": (2, "abcde", ["ab", "cd", "e"]),
    "long_words": (2, "a bee is far", ["bee", "far"]),
    "initials": (2, "a bee far", "abefa"),
    "digit_powers": (2, 34, 25),
    "steps": (4, 13, [4, 8, 12]),
}


@pytest.mark.parametrize("kind", programs.KINDS)
def test_a_solution_does_what_the_question_says(kind):
    k, argument, value = BY_HAND[kind]
    names = {}
    exec(programs.solution(kind, k), names)
    assert names[kind](argument) == value


@needs_jail
def test_a_right_program_of_each_kind_passes_and_one_that_returns_its_argument_fails():
    rows = {}
    for row in [*programs.make("train", 300, 0), *programs.new_kinds("test", 100, 0)]:
        rows[row["kind"]] = row
    assert rows.keys() == programs.KINDS.keys() and len(rows) == 15
    right, wrong, tests = [], [], []
    for name, row in rows.items():
        argument = programs.KINDS[name][0]
        assert f"{name}({argument})" in row["question"] and len(row["tests"]) == 3
        right.append(programs.solution(name, row["k"]))
        wrong.append(f"def {name}({argument}):\n    return {argument}")
        tests.append("\n".join(row["tests"]))  # one text passes if its three tests pass
    assert jail.run_asserts("\n".join(right), tests, 30) == [True] * 15
    assert jail.run_asserts("\n".join(wrong), tests, 30) == [False] * 15
    completions = [f"Here:\n```python\n{program}\n```" for program in (right[0], wrong[0])]
    assert code_reward.code(completions, [row["tests"] for row in [*rows.values()][:1] * 2],
                            timeout=20) == [1.0, 0.0]


def test_no_question_of_programs_is_in_both_splits_and_new_kinds_are_not_trained():
    train, test, new = [list(make(split, 500, 0)) for make, split in (
        (programs.make, "train"), (programs.make, "test"), (programs.new_kinds, "test"))]
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert {row["kind"] for row in new} == {*programs.NEW}
    assert {row["kind"] for row in train} == {*programs.KINDS} - {*programs.NEW}


# ---- the walkthrough

RIGHT = "<reasoning>3 * 4 = 12</reasoning>\n<answer> 12 </answer>"
GROUP = [RIGHT, "<answer>12</answer>", "12", "<reasoning>a</reasoning><answer>1</answer>",
         "<answer>12.0</answer>", "<answer>12", "", RIGHT + " or 13"]


def test_the_walkthrough_pays_1_for_the_answer_as_it_is_written_and_minus_1_for_others():
    found = walkthrough.correctness(GROUP, ["12"] * 8)
    assert found == [1, 1, -1, -1, -1, 1, -1, 1]
    assert walkthrough.formatted(GROUP) == [0.5, 0, 0, 0.5, 0, 0, 0, 0]


def test_plus_and_minus_1_have_the_advantages_of_1_and_0_up_to_eps():
    ones = torch.tensor(walkthrough.correctness(GROUP, ["12"] * 8)).double()[None]
    zeros = (ones + 1) / 2  # (1, 8)
    close(nr.group_advantages(ones, eps=0.0), nr.group_advantages(zeros, eps=0.0))
    eps = 1e-4
    # (r - m) / (s + eps/2) and (r - m) / (s + eps): their ratio is at most 1 + eps / (2 s)
    bound = eps / (2 * zeros.std(correction=0).item())
    close(nr.group_advantages(ones, eps=eps), nr.group_advantages(zeros, eps=eps), bound)


def test_a_constant_reward_changes_no_advantage():
    correct = torch.tensor(walkthrough.correctness(GROUP, ["12"] * 8)).double()[None]
    constant = torch.tensor(walkthrough.constant(GROUP)).double()[None]  # (1, 8)
    assert constant.tolist() == [[0.5] * 8]
    close(nr.group_advantages(correct + constant), nr.group_advantages(correct))
    formatted = torch.tensor(walkthrough.formatted(GROUP)).double()[None]  # (1, 8)
    changed = nr.group_advantages(correct + formatted) - nr.group_advantages(correct)
    assert changed.abs().max() > EXACT


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
    """A folder with two questions per split, of which the walkthrough makes its rows."""
    for split in ("train", "test"):
        rows = [{"question": f"{split}: {n} pens and 4 more?", "answer": f"It is.\n#### {n + 4}"}
                for n in range(2)]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    monkeypatch.setenv("GSM8K", str(tmp_path))
    return tmp_path


def test_a_prompt_of_the_walkthrough_is_a_system_message_and_a_question(gsm8k, tokenizer):
    [row, _] = data.load(f"{ROOT}/examples/walkthrough.py:make", "test")
    assert row["answer"] == "4"
    prompt = tokenizer.decode(data.encode(row, tokenizer, "chat"))
    assert prompt == (f"<|system|>{walkthrough.SYSTEM}<|user|>test: 0 pens and 4 more?"
                      "<|assistant|>")


def test_the_walkthroughs_adapters_have_rank_8_alpha_16_and_dropout(monkeypatch):
    model = nr.load_model(make_config(lora_rank=8))
    loops = []
    monkeypatch.setattr(nr, "train", loops.append)
    run = SimpleNamespace(policy=model)
    walkthrough.train(run, dropout=0.05)
    layers = [module for module in model.modules() if hasattr(module, "lora_dropout")]
    assert layers and loops == [run]
    for layer in layers:
        assert layer.lora_alpha["default"] == 16 and layer.r["default"] == 8
        assert layer.lora_dropout["default"].p == 0.05


def test_the_walkthrough_runs(gsm8k):
    flags = "--model models/tiny --steps 1 --prompts 2 --samples 2 --max_tokens 8 --eval_size 2"
    command = [sys.executable, "-m", "examples.walkthrough", *flags.split(), "--out", str(gsm8k),
               "--name", "run"]
    subprocess.run(command, cwd=ROOT, env=ENV | {"GSM8K": str(gsm8k)}, check=True)
    last = read_rows(gsm8k / "run/metrics.jsonl")[-1]
    assert last["step"] == 1 and last["eval/n"] == 2

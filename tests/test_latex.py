"""What answers in LaTeX are equal: by kind, by chance, and by 300 digits."""
import json
import re

import pytest

import rewards
from bench import search_math
from conftest import ROOT
from runtime.verify import formula, latex
from runtime.verify.answer import read_number
from runtime.verify.latex import same_math

VERDICTS = {"==": True, "≠": False, "??": None}


def kinds():
    """tests/kinds.txt -> [(gold, answer, verdict), ...]."""
    pairs = []
    for line in (ROOT / "tests/kinds.txt").read_text().splitlines():
        gold, *rest = re.split(r"   (==|≠|\?\?) ", line)
        for mark, answers in zip(rest[0::2], rest[1::2]):
            pairs += [(gold, answer, VERDICTS[mark]) for answer in answers.split(" ¦ ")]
    return pairs


def test_answers_of_one_kind_are_compared_and_others_differ():
    assert len(kinds()) > 240 and {verdict for *_, verdict in kinds()} == {True, False, None}
    wrong = [(gold, answer, verdict) for gold, answer, verdict in kinds()
             if latex.same_math(gold, answer) is not verdict]
    assert wrong == []


def test_a_gold_answer_equals_itself_and_no_answer_that_says_nothing():
    for gold in {gold for gold, *_ in kinds()}:
        if latex.same_math(gold, "") is not None:
            assert latex.same_math(gold, gold), gold
            said = [text for text in search_math.UNIVERSAL
                    if text != gold and latex.same_math(gold, text)]
            assert said == [], gold


def test_of_answers_with_one_change_none_earns_and_of_those_in_other_forms_all(tmp_path, capsys):
    golds = {gold for gold, _, verdict in kinds() if verdict}
    golds.remove(r"\sin^2 x+\cos^2 x=1")  # it always holds, so twice of it is another equation
    rows = [json.dumps({"answer": gold}) for gold in sorted(golds) if "text" not in gold]
    (tmp_path / "golds.jsonl").write_text("\n".join(rows))
    search_math.main(["--data", str(tmp_path / "golds.jsonl"), "--pairs", "400"])
    said = capsys.readouterr().out
    counts = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in
              said.splitlines() if line.startswith("| ")}
    assert counts["changed"][0] == counts["universal"][0] == "0", said
    assert counts["rewritten"][1] == "0", said


@pytest.mark.parametrize("answer", [
    "9^{9^{9^9}}", "10^{10^{10^{10}}}", "(10^9)!", r"\binom{10^9}{5*10^8}", "(x+1)^{10^6}",
    "((((x^9)^9)^9)^9)^{999}", r"\sin(10^{10^{10}})", "{" * 900 + "1" + "}" * 900,
    "1+" * 400 + "1", "x!!!!!!!", ",".join(f"{n}x" for n in range(180)), r"\pm" * 300])
def test_no_answer_keeps_math_busy(answer):
    """It is judged without a process that can be killed, so this test would not end."""
    for gold in "5", "x+1", "(1,2)", "1,2", "x=1", "[0,1)":
        assert latex.same_math(gold, answer) is False


@pytest.mark.parametrize("a, b, equal", [
    (r"\frac{1}{20!}", "0", False), ("e^{-1000}", "0", False), (r"\sin \pi", "0", True),
    (r"\pi + 10^{-250}", r"\pi", False), (r"\sqrt{10^{90}+1} - 10^{45}", "0", False),
    (r"\sqrt{2}\sqrt{3}", r"\sqrt{6}", True), ("|x-20|", "20-x", False),
    (r"\ln|x|", r"\ln x", False), (r"\ln x", r"\ln|x|", True), ("x", r"\sqrt{x^2}", False),
    (r"\sqrt[3]{x^3}", "x", True), ("(-1)^{n+2}", "(-1)^n", True), (r"0^0", "1", False)])
def test_formulas_are_equal_where_their_values_are(a, b, equal):
    trees = [formula.read(formula.tokens_of(text)) for text in (a, b)]
    assert formula.equal(*trees) is equal


def test_the_noise_of_floats_is_taken_off_gold_numbers_only():
    noisy, plain = "3244047.0999999996", "3244047.1"
    for reward in rewards.gsm8k_reward, rewards.math_reward:
        texts = [f"<answer>{text}</answer>" for text in (plain, noisy, "3244047.2", "3244047.099")]
        assert reward(texts, answer=[noisy] * 4) == [1.0, 1.0, 0.0, 0.0]
        assert reward(texts[1:2], answer=[plain]) == [0.0]
        assert reward(["<answer>0.3</answer>"], answer=["0.3000001"]) == [0.0]
    assert read_number(noisy) != read_number(plain)


@pytest.mark.parametrize("text", [
    r"\begin{cases}\end{cases}", r"\{\begin{cases}", r"\begin{array}\end{array}", r"\approx",
    "1A_{10}", "1.2.3_{10}", r"\mathbb{R}\setminus 3", r"\mathbb{R}-x",
    r"\mathbb{R}\setminus\{(1,2)\}"])
def test_a_text_that_is_no_mathematics_is_wrong_as_an_answer_and_unknown_as_a_gold(text):
    assert same_math("5", text) is False
    assert same_math(text, "5") in (None, False)


def test_a_range_with_letters_as_bounds_is_not_guessed():
    assert not same_math(r"x>1 \text{ and } x<a", r"x<b \text{ and } x>7")


@pytest.mark.parametrize("a, b, equal", [
    (r"\emptyset", r"\text{no real solution}", True), (r"\text{No solution}", "no solutions", True),
    (r"\mathbb{R}", "all real numbers", True), (r"\text{all reals}", r"(-\infty,\infty)", True),
    (r"x \in \mathbb{R}", r"\text{all real numbers}", True), ("0", r"\text{no solution}", False),
    (r"\text{all real numbers except } 0", r"\text{all real numbers}", False),
    ("x^2+1=0", r"\text{no solution}", False), (r"\text{no}", r"\text{no solution}", False)])
def test_a_set_in_words_is_the_set(a, b, equal):
    assert (same_math(a, b), same_math(b, a)) == (equal, equal)

r"""Completions that have fooled a verifier somewhere, or would: (reward, completion, columns, expected, why).

Columns hold the value for this one completion. Each line is a test of its own in test_rewards.py.
"""

H = "#### 72"  # GSM8K's gold as it is in the data
THINK = "<think>first 5, then 6</think>"


def gsm8k(gold, expected, why, *completions):
    return [("gsm8k", text, {"answer": gold}, expected, why) for text in completions]


def math(gold, expected, why, *answers):
    return [("math", rf"So \boxed{{{a}}}." if "<" not in a and "boxed" not in a else a, {"answer": gold}, expected, why)
            for a in answers]


def countdown(expected, why, *answers, numbers=(3, 5, 2), target=21):
    return [("countdown", f"<answer>{a}</answer>", {"numbers": list(numbers), "target": target}, expected, why)
            for a in answers]


def form(expected, why, *texts, **settings):
    return [("format", text, settings, expected, why) for text in texts]


def instruct(name, arguments, expected, why, *texts):
    return [("instruction", text, {"instruction_id_list": [name], "kwargs": [arguments]}, expected, why) for text in texts]


CASES = [
    # ---- gsm8k: how 72 may be written
    *gsm8k(H, 1, "every mark is read", "<answer>72</answer>", r"\boxed{72}", "#### 72", "The answer is 72.", "A: 72", "Answer: 72",
           "**Final answer:** 72", "The final answer is: 72", "so she sold 72", "The answer is:\n\n72"),
    *gsm8k(H, 1, "dress around the number", "<answer>$72</answer>", r"<answer>\$72</answer>", "<answer>$72$</answer>", r"\boxed{\$72}",
           r"<answer>\(72\)</answer>", "<answer>**72**</answer>", "<answer>`72`</answer>", "<answer> 72\n</answer>", "<answer>72.</answer>",
           "<answer>72.00</answer>", "<answer>+72</answer>", "<answer>72%</answer>", r"<answer>72\%</answer>", "<answer>72 clips</answer>",
           "<answer>72 km/h</answer>", "<answer>72km</answer>", r"\boxed{72\text{ m}^2}", r"\boxed{72 \mathrm{~kg}}", r"\boxed{72^\circ}",
           "<answer>072</answer>", "<answer>€72</answer>", "<answer>72!</answer>"),
    *gsm8k(H, 1, "the value of an equation is behind its last sign", "<answer>x = 72</answer>", "<answer>8 * 9 = 72</answer>",
           r"\boxed{6\cdot 12 = 72}", r"<answer>\approx 72</answer>"),
    *gsm8k(H, 1, "nested marks: the innermost is the answer", r"<answer>\boxed{72}</answer>", r"\boxed{\boxed{72}}",
           "<answer>The answer is 72</answer>", "<answer><answer>72</answer></answer>", "<answer>#### 72</answer>"),
    *gsm8k(H, 1, "vLLM strips the stop string </answer>", "<answer>72"),
    *gsm8k(H, 1, "typography: full-width digits, zero-width space, right-to-left mark, no-break space",
           "<answer>７２</answer>", "<answer>7\u200b2</answer>", "<answer>\u200f72\u200e</answer>", "<answer>72\u00a0eggs</answer>"),
    *gsm8k("-5", 1, "signs, also typographic and before a currency", "<answer>-5</answer>", "<answer>−5</answer>", "<answer>-$5</answer>",
           "<answer>$-5</answer>", r"\boxed{-5}", "#### -5", "so it is -5"),
    *gsm8k("-5", 0, "a lost sign", "<answer>5</answer>", "<answer>10-5</answer>", "<answer>x-5</answer>"),
    *gsm8k("5", 0, "an invented sign", "<answer>-5</answer>", "<answer>−5</answer>", "<answer>–5</answer>"),
    # ---- gsm8k: thousands and decimals
    *gsm8k("1000", 1, "1,000 is not 000", "<answer>1,000</answer>", "<answer>1000</answer>", "<answer>1 000</answer>",
           r"\boxed{1{,}000}", r"\boxed{1,\!000}", "<answer>$1,000.00</answer>", "<answer>1\u202f000</answer>", "<answer>1k</answer>",
           "<answer>1 thousand</answer>", "<answer>1e3</answer>", "so 1,000"),
    *gsm8k("#### 1,000,000", 1, "gold with separators", "<answer>1000000</answer>", "<answer>1 million</answer>", "#### 1,000,000"),
    *gsm8k("0", 0, "1,000 read as its end", "<answer>1,000</answer>", "<answer>$1,000</answer>", "1,000"),
    *gsm8k("1000", 0, "separators in the wrong places are no number", "<answer>10,00</answer>", "<answer>1,0000</answer>", "<answer>1,00</answer>",
           "<answer>1.000.0</answer>"),
    *gsm8k("5", 0, "size words count", "<answer>5k</answer>", "<answer>5 million</answer>", "<answer>5 hundred</answer>"),
    *gsm8k("0.3", 1, "exact fractions, not floats (0.1 + 0.2)", "<answer>0.3</answer>", "<answer>.3</answer>", "<answer>0.30</answer>", "<answer>3/10</answer>",
           r"\boxed{\frac{3}{10}}", r"\boxed{\dfrac{3}{10}}", "<answer>3e-1</answer>"),
    *gsm8k("0.3", 0, "near is not equal", "<answer>0.30000000000000004</answer>", "<answer>0.299999</answer>", "<answer>0.333</answer>", "<answer>30%</answer>"),
    *gsm8k("1.5", 1, "mixed numbers", "<answer>1 1/2</answer>", r"\boxed{1\frac{1}{2}}", "<answer>3/2 hours</answer>"),
    *gsm8k("0.5", 1, "fractions", r"\boxed{\frac12}", "<answer>1 / 2</answer>"),
    # ---- gsm8k: what must not pay
    *gsm8k(H, 0, "no answer", "", " ", "<answer></answer>", r"\boxed{}", "####", "<answer>", "I do not know.", "<answer>seventy-two</answer>"),
    *gsm8k(H, 0, "gold as a substring", "<answer>172</answer>", "<answer>720</answer>", "<answer>7 2</answer>", "<answer>72.5</answer>", "<answer>0.72</answer>",
           "<answer>72,5</answer>", "<answer>A72</answer>", "<answer>m72x</answer>", "<answer>1/72</answer>", "<answer>72/5</answer>", "<answer>72:30</answer>",
           "<answer>72^2</answer>", "<answer>2^72</answer>", "<answer>72e9</answer>", "<answer>1.72</answer>", "<answer>v1.72</answer>"),
    *gsm8k(H, 0, "several answers are a hedge", "<answer>71 or 72</answer>", "<answer>71, 72</answer>", "<answer>72 73</answer>", "<answer>70-74</answer>",
           "<answer>72 eggs in 3 days</answer>", r"\boxed{71 \text{ or } 72}", "<answer>not 72</answer>", "<answer>between 71 and 72</answer>",
           "<answer>" + ",".join(map(str, range(200))) + "</answer>"),
    *gsm8k(H, 0, "bounds and expressions are not the number", "<answer>> 72</answer>", r"<answer>\le 72</answer>", "<answer>±72</answer>", "<answer>8*9</answer>",
           "<answer>72 + 0</answer>", r"\boxed{\sqrt{72}}", r"\boxed{72\pi}", "<answer>x + 72</answer>", r"\boxed{72_8}"),
    *gsm8k(H, 0, "the last answer wins", "<answer>72</answer> No: <answer>5</answer>", r"\boxed{72} … \boxed{5}", "#### 72\n#### 5",
           "<answer>72</answer> or rather \\boxed{5}", "The answer is 72. The answer is 5.", "72 5", "<answer>72<answer>"),
    *gsm8k(H, 1, "the last answer wins", "<answer>5</answer> No: <answer>72</answer>", r"\boxed{5} … \boxed{72}", "#### 5\n#### 72", "5 72"),
    *gsm8k(H, 1, "words behind a marked answer change nothing", "<answer>72</answer> I checked it 3 times.", r"\boxed{72}. Done in 5 steps.",
           "#### 72\nThat took 3 lines.", r"\boxed{72} Therefore the answer is correct, 100%.", "<answer>72</answer><|im_end|>", "The answer is 72.\nBye for 1 day"),
    *gsm8k(H, 0, "a thought is not an answer", "<think>72</think>", "<think>the answer is 72", r"<think>\boxed{72}</think>", "<think><answer>72</answer></think>",
           r"<think>\boxed{72}</think><answer>5</answer>", "<think>a</think><think>72"),
    *gsm8k(H, 1, "only what follows the thinking counts", THINK + "<answer>72</answer>", THINK + r"\boxed{72}", THINK + "72",
           "x</think><answer>72</answer>", "<think>a</think></think><answer>72</answer>", r"<think>\boxed{5}</think>\boxed{72}"),
    *gsm8k(H, 0, "cut off inside the box: it may have been going to be 720", r"\boxed{72", r"\boxed{72 and then"),
    *gsm8k(H, 0, "the gold's own reasoning is no answer to it", "<answer>Natalia sold 48/2 = 24 clips in May. 48+24 = 72 in 2 months</answer>"),
    *gsm8k("no number here", None, "no gold, no verdict", "<answer>72</answer>", "", "no number here"),
    *gsm8k(H, 0, "numbers too long to be one", "<answer>" + "9" * 10**6 + "</answer>", "9" * 10**6, r"\boxed{" + "1" * 5000 + "}", "<answer>1e999999999</answer>",
           "<answer>9**9**9</answer>", "<answer>9^9^9</answer>", "<answer>" + "1/" * 400 + "1</answer>", "<answer>72/0</answer>"),
    *gsm8k(H, 0, "a megabyte of this or that", "<think>" * 150_000, "</think>" * 120_000, r"\boxed{" * 150_000, "{" * 10**6, r"\boxed{" + "{" * 10**6,
           "answer:" * 140_000, "answer is" + " " * 10**6, "#" * 10**6, "A:\n" * 300_000, "1," * 500_000, "1 " * 500_000, "\n" * 10**6, "<answer>" + "-" * 10**6,
           "<answer>" * 120_000, "\\" * 10**6, "72" + " " * 10**6, "1/" * 500_000, "$" * 10**6, "\\frac" * 200_000, "\\text{" * 170_000, "`" * 10**6),
    *gsm8k(H, 1, "a megabyte of padding before the answer", "x " * 500_000 + "<answer>72</answer>", "<think>" + "y" * 10**6 + "</think>72"),
    *gsm8k(H, 0, "bytes that break pipes, files and JSON", "\0", "\ud800", "\udfff\ud800", "\x1b[2J", "\ud83d", "\ufeff", "\u202e27", "a\0" * 1000),
    *gsm8k(H, 1, "and an answer in spite of them", "\0<answer>72</answer>", "\ud800<answer>72</answer>\udc00", "<answer>7\u00ad2</answer>", "<answer>\ufeff72</answer>"),
    # ---- math
    *math(r"\frac{1}{2}", 1, "equal forms", r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", r"\tfrac12", "1/2", "0.5", ".5", "2/4", r"\frac{3}{6}", r"x=\frac{1}{2}",
          "$1/2$", r"\left(\frac{1}{2}\right)", r"2^{-1}", r"\frac{1}{2}.", r"<answer>\frac{1}{2}</answer>", "<answer>$0.5$</answer>", r"\fbox{\frac12}"),
    *math(r"\frac{1}{2}", 0, "unequal or no answer", r"\frac{1}{3}", "2", "1", "-0.5", "0.51", "", "0.5, 0.6", r"\frac{1}{2}x", r"\{0.5, 2\}", "not 1/2", "1/2 or 1/3",
          "12", r"\frac{1}{2}+1", "<answer></answer>"),
    *math("1,2", 1, "a set in any order", "1,2", "2,1", r"\{1,2\}", r"\{2,1\}"),
    *math(r"\{1,2\}", 0, "another set", "1", r"\{1,2,3\}", r"\{1,3\}", "[1,2]"),
    *math("(3,4]", 1, "an interval, spaced", "(3,4]", r"\left(3, 4\right]", "( 3 , 4 ]"),
    *math("(3,4]", 0, "its ends matter", "(3,4)", "[3,4]", "[3,4)", "(3,5]", "(4,3]"),
    *math(r"\left( 3, \frac{\pi}{2} \right)", 1, "a point", r"(3,\pi/2)", r"\left(3,\frac{\pi}{2}\right)"),
    *math(r"\left( 3, \frac{\pi}{2} \right)", 0, "its order matters", r"(\pi/2, 3)", r"(3,\pi)", "3"),
    *math(r"(-\infty, 2) \cup (3, \infty)", 1, "a union", r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    *math(r"(-\infty, 2) \cup (3, \infty)", 0, "half of it", r"(-\infty, 2)", r"(-\infty, 2] \cup (3, \infty)"),
    *math(r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", 1, "a matrix", r"\begin{pmatrix}-7\\16\\5\end{pmatrix}", r"\begin{bmatrix} -7 \\ 16 \\ 5 \end{bmatrix}"),
    *math(r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", 0, "another matrix", r"\begin{pmatrix} -7 \\ 5 \\ 16 \end{pmatrix}", "-7, 16, 5 and more", "-7"),
    *math(r"\text{east}", 1, "a word", "east", r"\text{East}", r"\text{ east }", r"\textbf{east}", "<answer>East</answer>", "east."),
    *math(r"\text{east}", 0, "another word, or more words", "west", "northeast", "east or west", r"\text{not east}", "e", ""),
    *math(r"\text{(B)}", 1, "a letter of choice", "B", "(B)", r"\text{B}", r"\text{(B)}", r"\mathrm{B}"),
    *math(r"\text{(B)}", 0, "another choice, or all of them", "A", "(C)", "A, B", "ABCDE", "B or C"),
    *math(r"5.4 \text{ cents}", 1, "a unit", r"5.4 \text{ cents}", r"5.4\text{ cents}", "5.4"),
    *math(r"5.4 \text{ cents}", 0, "a unit is not all of it", r"54 \text{ cents}", "cents", r"5.5 \text{ cents}"),
    *math("Evelyn", 1, "a name", "Evelyn", r"\text{Evelyn}", "evelyn"),
    *math("58,500", 1, "thousands", "58500", "58,500", r"58{,}500", r"58,\!500", "58500.0"),
    *math("58,500", 0, "not its pieces", "58", "500", "5850"),
    *math("x^2+2x+1", 1, "an expression, rearranged", "1+2x+x^2", "(x+1)^2", "x^{2}+2x+1"),
    *math("x^2+2x+1", 0, "another expression", "x^2+2x", "(x-1)^2", "x^2+2x+2", "4"),
    *math("30^\\circ", 1, "degrees may be left out", "30^\\circ", "30", r"30^{\circ}"),
    *math("2220", 1, "the last box counts", r"\boxed{5} or \boxed{2220}", r"\boxed{\boxed{2220}}", r"<answer>\boxed{2220}</answer>"),
    *math("2220", 0, "the last box counts", r"\boxed{2220} or \boxed{5}", r"<think>\boxed{2220}</think>", r"\boxed{2220", r"\boxed{}", r"boxed{2220}"),
    *math(r"so \boxed{7} and hence \boxed{\frac{7}{2}}", 1, "a whole solution as gold", r"\frac72", "3.5"),
    *math("5", 0, "no number is looked for inside an answer", "5 eggs or so, 6", "I think that it is 5", "x > 5", "5x", "5!", "5^2", "(5)(1,2)", "15", "5,6"),
    *math("", None, "no gold, no verdict", "5", ""),
    *math("5", 0, "deep nesting and length", "{" * 9 + "6" + "}" * 9, "(" * 9 + "6" + ")" * 9, r"\frac{" * 9 + "6" + "}{1}" * 9, "1+" * 90 + "1", "9" * 999),
    ("math", r"\boxed{5" + "}" * 10**6, {"answer": "5"}, 1, "a megabyte of braces behind the answer"),
    ("math", "The answer is 5.", {"answer": "5"}, 1, "an answer that is only said"),
    ("math", "It is 5.", {"answer": "5"}, 0, "for math a bare number is no answer"),
    # ---- countdown: 3, 5, 2 -> 21 = (5 + 2) * 3
    *countdown(1, "each number once", "(5+2)*3", "3 * (2 + 5)", "(5 + 2) × 3", r"(5+2) \times 3", r"3 \cdot (5 + 2)", "((5+2))*(3)", "$(5+2)*3$", "(5+2)*3 = 21", " (5+2)*3 "),
    *countdown(0, "numbers left out, used twice, or others", "21", "7*3", "(5+2)*3*1", "5*3+3*2", "(5+2)*3+0", "5*5-2*2", "3+5+2", "", "(5+2)*(3)+2-2"),
    *countdown(0, "no other operators", "3**2+5", "5//2*3", "-3*-(5+2)", "+(5+2)*3", "(5+2)*+3", "5%2*3", "3<<5|2", "(5,2)*3", "max(5,2)*3", "5 2 3"),
    *countdown(0, "no other ways to write a number", "(5.0+2)*3", "(5+2)*3e0", "(0x5+2)*3", "(5+2)*0b11", "(5+2)*3_", "(05+2)*3", "(٥+2)*3", "(5+2)*3j"),
    *countdown(0, "no Python", "__import__('os').system('x')", "(lambda: 21)()", "[3,5,2]", "21 if 3 else 5+2", "(5+2)*3#", "(5+2)*3;", "(5+2)\n*3", "'3'*5+2", "(5+2)*3\0"),
    *countdown(0, "a value that is not the target", "(5+2)*3 = 22", "(5+2)*3=21=21", "(3+2)*5", "(5+2)*3 = x"),
    *countdown(0, "malformed", "(5+2*3", "5+2)*3", "(5+2)3", "(5+)2*3", "()(5+2)*3", "*(5+2)*3", "=21", "(" * 10**5, "1+" * 10**5, "(5+2)*3" * 1000),
    *countdown(0, "division by zero", "3/(5-5)", "2/(5-3-2)", "5/(2-2)*3", numbers=(2, 5, 3), target=5),
    *countdown(1, "division is exact: 8 / (3 - 8 / 3) is 24", "8/(3-8/3)", "8 ÷ (3 − 8 ÷ 3)", numbers=(3, 3, 8, 8), target=24),
    *countdown(0, "and 1/3*3 is not 0", "8/(3-8/3)", numbers=(3, 3, 8, 8), target=23),
    ("countdown", r"\boxed{(5+2)*3}", {"numbers": [3, 5, 2], "target": 21}, 1, "a box will do"),
    ("countdown", "(5+2)*3", {"numbers": [3, 5, 2], "target": 21}, 0, "an expression that is not marked as the answer"),
    ("countdown", "<think><answer>(5+2)*3</answer></think>", {"numbers": [3, 5, 2], "target": 21}, 0, "an answer that was only thought of"),
    # ---- format
    *form(1, "R1's form", "<think>a</think><answer>b</answer>", "<think>a</think>\n<answer>b</answer>\n", " <think>\na\n</think>\n\n<answer>\nb\n</answer>", "<think></think><answer>b</answer>"),
    *form(1, "the prompt ended with <think>", "a</think><answer>b</answer>", "\na\n</think>\n<answer>b</answer>"),
    *form(0, "tags missing", "", "b", "<answer>b</answer>", "<think>a</think>", "<think>a</think>b", "<think>a<answer>b</answer>", "<think>a</think><answer>b", "a</think>b</answer>"),
    *form(0, "tags twice", "<think>a</think><think>a</think><answer>b</answer>", "<think>a</think><answer>b</answer><answer>c</answer>", "<think><think>a</think><answer>b</answer>",
          "<think>a</think></think><answer>b</answer>", "<think>a</think><answer>b</answer></answer>"),
    *form(0, "tags out of order or nested", "<answer>b</answer><think>a</think>", "<think>a<answer>b</answer></think>", "<think>a</think></answer>b<answer>", "</think>a<think><answer>b</answer>"),
    *form(0, "something before, between or behind", "Hi <think>a</think><answer>b</answer>", "<think>a</think> so <answer>b</answer>", "<think>a</think><answer>b</answer> done",
          "<think>a</think><answer>b</answer><|im_end|>", "<think>a</think><answer>b</answer>\0"),
    *form(0, "an empty answer", "<think>a</think><answer></answer>", "<think>a</think><answer> \n </answer>"),
    *form(0, "not quite the tags", "<THINK>a</THINK><ANSWER>b</ANSWER>", "<think>a</think ><answer>b</answer>", "<think>a</think><answer >b</answer>"),
    *form(0, "a megabyte of tags", "<think>" * 150_000, "<think></think><answer>" * 40_000, "<think>" + "<" * 10**6),
    *form(0.8, "four tags in the wrong order, partial credit", "<answer>b</answer><think>a</think>", format_partial=True),
    *form(0.0, "nothing at all, partial credit", "", "b", format_partial=True),
    *form(0.6000000000000001, "three of four, partial credit", "<think>a</think><answer>b", format_partial=True),
    *form(0.0, "repeated tags earn nothing, partial credit", "<think></think><answer></answer>" * 2, format_partial=True),
    # ---- instructions
    *instruct("change_case:english_lowercase", {}, 1, "lower case", "all of this is lower.", "<think>NOT this</think>but this"),
    *instruct("change_case:english_lowercase", {}, 0, "upper case, or nothing that has a case", "Not This", "", "123", "   "),
    *instruct("change_case:english_capital", {}, 1, "capitals", "ALL CAPS, 3 TIMES!"),
    *instruct("change_case:english_capital", {}, 0, "not capitals", "Most CAPS", "123", ""),
    *instruct("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, 1, "words", "one two three", "don't stop now", "one-two two three"),
    *instruct("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, 0, "too few words", "one two", ". . . .", "", "one-two-three"),
    *instruct("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, 1, "less than", "one two"),
    *instruct("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, 0, "less than, but not nothing", "one two three", ""),
    *instruct("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, 1, "sentences", "One. Two.", "Is it? It is!", "One.\nTwo"),
    *instruct("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, 0, "dots that end no sentence", "It is 3.5 m.", "Mr. Smith ate.", "Well...", "...", ". . ."),
    *instruct("keywords:existence", {"keywords": ["cat", "dog"]}, 1, "whole words, any case", "A cat and a dog.", "CAT, Dog"),
    *instruct("keywords:existence", {"keywords": ["cat", "dog"]}, 0, "not parts of words", "A category of dogma", "a cat", "<think>cat dog</think>none"),
    *instruct("keywords:forbidden_words", {"forbidden_words": ["cat"]}, 1, "parts of words are allowed", "a category", "<think>cat</think>dog"),
    *instruct("keywords:forbidden_words", {"forbidden_words": ["cat"]}, 0, "the word is not", "the CAT", "cat.", "", "(cat)"),
    *instruct("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": "at least"}, 1, "a keyword is text, not a pattern", "a.b and a.b"),
    *instruct("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": "at least"}, 0, "a keyword is text, not a pattern", "axb and ayb", "a.b"),
    *instruct("detectable_format:json_format", {}, 1, "JSON, also fenced", '{"a": 1}', "[1, 2]", '```json\n{"a": [1]}\n```'),
    *instruct("detectable_format:json_format", {}, 0, "not JSON", "{'a': 1}", '{"a": 1', 'Here: {"a": 1}', "", "7", "[" * 10**5, '{"a": ' + "9" * 5000 + "}"),
    *instruct("detectable_format:json_format", {"json_schema": {"type": "object", "required": ["a"]}}, 1, "JSON with a schema", '{"a": 1}'),
    *instruct("detectable_format:json_format", {"json_schema": {"type": "object", "required": ["a"]}}, 0, "JSON of another schema", "{}", "[1]", '{"b": 1}'),
    *instruct("detectable_format:number_bullet_lists", {"num_bullets": 2}, 1, "bullets", "* a\n* b", "- a\n  - b", "Look:\n- a\n- b\nBye"),
    *instruct("detectable_format:number_bullet_lists", {"num_bullets": 2}, 0, "not two bullets", "* a", "* a\n* b\n* c", "a * b * c", "**a**\n**b**", "---\n---", "*\n*"),
    *instruct("punctuation:no_comma", {}, 1, "no comma", "a; b"),
    *instruct("punctuation:no_comma", {}, 0, "a comma, or nothing", "a, b", ""),
    *instruct("startend:end_checker", {"end_phrase": "The end."}, 1, "ends so", "It was late. The end.", "the END.\n"),
    *instruct("startend:end_checker", {"end_phrase": "The end."}, 0, "does not end so", "The end. Or not", "The end"),
    *instruct("startend:quotation", {}, 1, "quoted", '"all of it"'),
    *instruct("startend:quotation", {}, 0, "not quoted", '"', '"a', "a", ""),
    *instruct("language:response_language", {"language": "de"}, 1, "German", "Die Enten legen jeden Tag sechzehn Eier."),
    *instruct("language:response_language", {"language": "de"}, 0, "not German", "The ducks lay sixteen eggs every day.", "16", ""),
    *instruct("detectable_format:title", {}, 1, "a title", "<<A title>>\ntext"),
    *instruct("detectable_format:title", {}, 0, "no title", "<<>>", "<A title>", "<< >>", "<<" * 10**5),
    *instruct("detectable_content:number_placeholders", {"num_placeholders": 2}, 1, "placeholders", "[name] and [address]"),
    *instruct("detectable_content:number_placeholders", {"num_placeholders": 2}, 0, "too few", "[name]", "[] []", "[" * 10**5),
    *instruct("detectable_format:number_highlighted_sections", {"num_highlights": 2}, 1, "highlights", "*a* and **b**"),
    *instruct("detectable_format:number_highlighted_sections", {"num_highlights": 2}, 0, "no highlights", "*a*", "****", "* *", "*" * 10**5),
    # ---- a megabyte where a careless pattern would need hours
    *[("instruction", text, {"instruction_id_list": [name], "kwargs": [arguments]}, 0, "a megabyte against " + name)
      for name, arguments, texts in [
          ("detectable_format:number_highlighted_sections", {"num_highlights": 3}, ["*" + "a" * 10**6, "* " * 500_000]),
          ("detectable_format:title", {}, ["<<" + "a" * 10**6, "<< " * 300_000]),
          ("detectable_format:json_format", {}, ["x" + " " * 10**6 + "x", "```" + " " * 10**6 + "x", "[" * 10**6, "{" * 10**6]),
          ("length_constraints:number_sentences", {"num_sentences": 10**7, "relation": "at least"}, ["a" * 10**6 + ".b", "." * 10**6 + "b", "a." * 500_000, "Mr" * 500_000]),
          ("length_constraints:number_words", {"num_words": 10**7, "relation": "at least"}, ["a-" * 500_000, "'" * 10**6, "a" * 10**6]),
          ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, [" " * 10**6 + "***", "*" * 10**6 + "a"]),
          ("detectable_format:number_bullet_lists", {"num_bullets": 3}, ["\n" * 10**6 + "a", " " * 10**6 + "-", "-" * 10**6]),
          ("detectable_content:number_placeholders", {"num_placeholders": 3}, ["[" * 10**6, "[" + "a" * 10**6]),
          ("keywords:existence", {"keywords": ["a a"]}, ["a" * 10**6, "a\u00a0" * 500_000]),
          ("language:response_language", {"language": "de"}, ["\u0301" * 10**6 + "a", "1" * 10**6]),
      ] for text in texts],
    *[("language", text, {"question": "Why is it so?"}, None, "a megabyte without words") for text in ("." * 10**6, "1.\n" * 300_000, "\n" * 10**6)],
]

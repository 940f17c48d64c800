"""Instructions as a task: a request about a topic and one of IFEval's 25 kinds of instructions.

    F=examples/follow.py
    python nano_rlvr.py --model SmolLM2-360M-Instruct --template chat --data $F:make \\
        --eval_data $F:make,$F:new_kinds --answer_key none --max_prompt 256 --max_tokens 256 \\
        --rewards examples/instructions.py:instruction,$F:on_topic:0

For evaluation, `make` has new topics, and `new_kinds` has new topics and new kinds. A text about
nothing follows many instructions: on_topic shows whether the model finds that out.
"""
import random

from rewards import after_thinking, each

TOPICS = """apples bees bicycles birds boats books bread bridges butterflies cats chess clouds dogs
elephants fish football gardens horses islands kites lakes libraries maps markets mountains music
owls pianos rain rivers robots schools ships snow stars tea trains trees whales windmills""".split()
REQUESTS = ["Write a short text about {topic}.", "Explain {topic} to a child."]
FEW = [2, 3, 4]
BOTH = ["at least", "less than"]
KINDS = {  # IFEval's id: the instruction, and the choices for each of its arguments
    "change_case:english_lowercase": ("Use small letters only.", {}),
    "change_case:english_capital": ("Use capital letters only.", {}),
    "change_case:capital_word_frequency": (
        "Write {capital_relation} {capital_frequency} words in capital letters.",
        {"capital_relation": BOTH, "capital_frequency": FEW}),
    "length_constraints:number_words": (
        "Use {relation} {num_words} words.", {"relation": BOTH, "num_words": [20, 30, 40]}),
    "length_constraints:number_sentences": (
        "Use {relation} {num_sentences} sentences.", {"relation": BOTH, "num_sentences": FEW}),
    "length_constraints:number_paragraphs": (
        "Write {num_paragraphs} paragraphs with *** between them.", {"num_paragraphs": FEW}),
    "length_constraints:nth_paragraph_first_word": (
        "Write {num_paragraphs} paragraphs with an empty line between them. Paragraph "
        "{nth_paragraph} begins with the word {first_word}.",
        {"num_paragraphs": FEW, "nth_paragraph": [1, 2], "first_word": ["today", "they"]}),
    "keywords:existence": (
        "Use the words {keywords[0]} and {keywords[1]}.",
        {"keywords": [["old", "far"], ["hand", "year"]]}),
    "keywords:forbidden_words": (
        "Do not use the word {forbidden_words[0]}.", {"forbidden_words": [["and"], ["the"]]}),
    "keywords:frequency": (
        "Use the word {keyword} {relation} {frequency} times.",
        {"keyword": ["and", "friend", "small"], "relation": ["at least"], "frequency": FEW}),
    "keywords:letter_frequency": (
        "The letter {letter} appears {let_relation} {let_frequency} times.",
        {"letter": ["e", "k", "z"], "let_relation": BOTH, "let_frequency": FEW}),
    "detectable_format:json_format": ("Answer with JSON only.", {}),
    "detectable_format:number_bullet_lists": (
        "Answer with exactly {num_bullets} bullet points that begin with *.", {"num_bullets": FEW}),
    "detectable_format:number_highlighted_sections": (
        "Highlight at least {num_highlights} parts *in this way*.", {"num_highlights": FEW}),
    "detectable_format:title": ("Give the text a title <<in these brackets>>.", {}),
    "detectable_format:constrained_response": ("Say: My answer is yes. Or: My answer is no.", {}),
    "detectable_format:multiple_sections": (
        "Write {num_sections} sections that begin with {section_spliter} 1 and so on.",
        {"section_spliter": ["Section", "PART"], "num_sections": FEW}),
    "detectable_content:number_placeholders": (
        "Use at least {num_placeholders} placeholders like [name].", {"num_placeholders": FEW}),
    "detectable_content:postscript": ("Add a P.S. at the end.", {"postscript_marker": ["P.S."]}),
    "combination:two_responses": ("Give two different answers with ****** between them.", {}),
    "combination:repeat_prompt": (
        "Before you do it, repeat the sentence before this one.", {"prompt_to_repeat": REQUESTS}),
    "punctuation:no_comma": ("Use no commas.", {}),
    "startend:end_checker": ("End with: {end_phrase}", {"end_phrase": ["That is all.", "Bye."]}),
    "startend:quotation": ("Put the whole answer in double quotation marks.", {}),
    "language:response_language": ("Answer in German.", {"language": ["de"]}),
}
NEW = ["change_case:english_capital", "length_constraints:nth_paragraph_first_word",
       "keywords:forbidden_words", "detectable_format:title", "combination:two_responses",
       "startend:quotation"]  # the kinds that are held out
TRAINED = [name for name in KINDS if name not in NEW]


def make(split, size, seed, kinds=TRAINED):
    """Yields rows. A quarter of the topics is for evaluation."""
    rng = random.Random(f"{split}/{seed}")
    held_out = TOPICS[::4]
    topics = held_out if split == "test" else [x for x in TOPICS if x not in held_out]
    for _ in range(size):
        topic = rng.choice(topics)
        request = rng.choice(REQUESTS).format(topic=topic)
        name = rng.choice(kinds)
        text, choices = KINDS[name]
        arguments = {key: rng.choice(values) for key, values in choices.items()}
        if "prompt_to_repeat" in arguments:
            arguments["prompt_to_repeat"] = request
        yield {"question": f"{request} {text.format(**arguments)}", "topic": topic,
               "instruction_id_list": [name], "kwargs": [arguments]}


def new_kinds(split, size, seed):
    """Yields rows of the held-out kinds."""
    return make(split, size, seed, NEW)


@each
def on_topic(text, topic):
    """1.0 if the text after </think> names the topic."""
    return float(topic in after_thinking(text).lower())

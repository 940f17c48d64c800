"""Tasks and prompts: a name, file, function or hub set -> examples -> prompt token ids -> batches.

    >>> load("arithmetic", "test", size=1)
    [{'question': '16+16-3-17+10+18', 'answer': '40', 'terms': 6}]

An example is a dict with `question` (str), `answer` (str) and all other columns of its source; the
reward functions receive every column. Nothing here keeps state: the examples are a function of
(source, split, seed), and a batch is a function of (examples, its number, seed, rank).
"""
import csv
import datetime
import functools
import itertools
import json
import math
import os
import random
import re
import zlib
from collections import namedtuple
from pathlib import Path

from tqdm import tqdm

from runtime import messages
from runtime.verify import user_code
from runtime.verify.verifier import ADDED_COLUMNS, SETTINGS

with_bar = functools.partial(tqdm, delay=5, mininterval=5, leave=False,  # after 5 s, on rank 0
                             disable=os.environ.get("RANK", "0") != "0")


# ------------------------------------------------------------------------------- the built-in tasks

def generate(draw, split, size, seed):
    """Yields `size` distinct examples from draw(rng). The checksum of a question decides its split:
    whatever the seed, no test question is in the training split."""
    rng = random.Random(f"{draw.__name__}/{split}/{seed}")
    seen = set()
    while len(seen) < size:
        example = draw(rng)
        question = example["question"]
        is_test = zlib.crc32(question.encode()) % 8 == 0
        if is_test == (split == "test") and question not in seen:
            seen.add(question)
            yield example


def arithmetic(rng):
    """A sum of 3 to 6 terms such as 14+2+9. Every running total is in 0..99."""
    total = rng.randint(1, 20)
    question = str(total)
    terms = 1
    for _ in range(rng.randint(2, 5)):
        x = rng.choice([x for x in range(-20, 21) if x and 0 <= total + x <= 99])
        total += x
        question += f"{x:+d}"
        terms += 1
    return {"question": question, "answer": str(total), "terms": terms}


def countdown(rng):
    """Make `target` from 3 or 4 numbers, each used once (TinyZero's task)."""
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 4))]
        value = numbers[0]
        text = str(value)
        for x in numbers[1:]:
            operator = rng.choice([op for op in "+-*/" if op != "/" or value % x == 0])
            value = {"+": value + x, "-": value - x, "*": value * x, "/": value // x}[operator]
            text = f"({text} {operator} {x})"
        if 10 <= value <= 99:
            break
    shuffled = rng.sample(numbers, len(numbers))
    question = (f"Combine the numbers {shuffled} with + - * / and brackets, each number exactly "
                f"once, so that the result is {value}. Put the expression between <answer> and "
                "</answer>.")
    return {"question": question, "answer": text[1:-1], "numbers": shuffled, "target": value}


PRODUCT_FORMS = (
    "What is {} times {}?", "What is {} multiplied by {}?", "Compute {} x {}.",
    "How much is {} times {}?", "Calculate the product of {} and {}.", "Multiply {} by {}.",
    "Find {} x {}.", "What do you get if you multiply {} by {}?", "{} x {} = ?")


def products(split, size, seed):
    """Products of two numbers from 2 to 12, asked in words. A quarter of the pairs is for
    evaluation: no training question multiplies these two numbers, in either order."""
    rng = random.Random(0)  # not the seed: the split must be the same in every run
    pairs = list(itertools.combinations_with_replacement(range(2, 13), 2))
    rng.shuffle(pairs)
    held_out = len(pairs) // 4
    return ask_products(pairs[:held_out] if split == "test" else pairs[held_out:], rng)[:size]


def ask_products(pairs, rng):
    """The questions about pairs of numbers in all forms and both orders, shuffled."""
    both_orders = sorted({*pairs, *[(b, a) for a, b in pairs]})
    rows = []
    for form, (a, b) in itertools.product(PRODUCT_FORMS, both_orders):
        question = f"{form.format(a, b)} Answer with the number only."
        rows.append({"question": question, "answer": str(a * b)})
    rng.shuffle(rows)
    return rows


# source: make(split, size, seed) -> rows, or a hub dataset. rewards: the default of --rewards
Task = namedtuple("Task", "source rewards test_only", defaults=[False])
TASKS = {
    "arithmetic": Task(functools.partial(generate, arithmetic), "gsm8k:1"),
    "countdown": Task(functools.partial(generate, countdown), "countdown:1,format:0.1"),
    "products": Task(products, "right:1,anywhere:0"),
    "gsm8k": Task("openai/gsm8k:main", "gsm8k:1"),
    "math": Task("DigitalLearningGmbH/MATH-lighteval", "math:1"),
    "math500": Task("HuggingFaceH4/MATH-500", "math:1", test_only=True),
    "aime24": Task("HuggingFaceH4/aime_2024", "math:1", test_only=True),
    "amc23": Task("math-ai/amc23", "math:1", test_only=True),
}

# ------------------------------------------------------------------------------- files and hub sets

FILES = (".jsonl", ".json", ".csv", ".parquet")


def read_rows(path):
    """The rows of a file, with their places in it for messages: an iterator of (location, row).

    Raises ValueError with one line if the file cannot be read."""
    kind = path.suffix.lower()
    location = path
    rows = None
    try:
        if kind == ".jsonl":
            for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
                location = f"{path}:{number}"
                if line.strip():
                    yield location, json.loads(line)
            return
        if kind == ".json":
            rows = json.loads(path.read_bytes())
            if isinstance(rows, dict):
                rows = rows.get("data")
        elif kind == ".csv":
            csv.field_size_limit(2**31 - 1)  # characters in a field; the default is 131,072
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file, strict=True))
        elif kind == ".parquet":
            from pyarrow import parquet
            rows = parquet.read_table(path).to_pylist()
    except Exception as e:  # each format has error types of its own
        raise ValueError(f"{location}: cannot be read ({messages.first_line(e)}); a .jsonl file "
                         "has an object per line, a .json file one list of objects") from e
    if not isinstance(rows, list):
        raise ValueError(f"{path}: not a jsonl, csv or parquet file, nor a .json file with a list "
                         "of objects (or one under 'data')")
    yield from numbered(path, rows)


def numbered(name, rows):
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))


def hub_rows(repo, name, split):
    """A split of a hub dataset, or its only one: an iterator of (location, row)."""
    messages.hub_answers()  # before datasets is imported: it looks only once whether it is offline
    from datasets import load_dataset
    try:
        splits = load_dataset(repo, name)
    except Exception as e:  # gated, renamed, damaged: datasets raises many types
        raise ValueError(
            f"{repo}: not a file here and not loadable from the hub "
            f"({messages.first_line(e, repo)}); --data and --eval_data can name a file") from e
    if split not in splits and len(splits) > 1:
        raise ValueError(f"{repo} has no split '{split}' (it has {', '.join(splits)})")
    rows = splits[split if split in splits else next(iter(splits))]
    yield from numbered(f"{repo}[{split}]", rows)


def is_made(source):
    """Whether the rows of a source come from a function make(split, size, seed)."""
    if source in TASKS:
        return callable(TASKS[source].source)
    return bool(re.fullmatch(r".+\.py:\w+", source))


def function_rows(source, split, size, seed):
    """The rows of a task or of my_file.py:make: an iterator of (location, row)."""
    make = TASKS[source].source if source in TASKS else user_code.load(source, kind="data")
    try:
        for location, row in numbered(source, make(split, size, seed)):
            json.dumps(row)  # a TypeError for what no file holds: a set's order is never the same
            yield location, row
    except (Exception, SystemExit) as e:  # a user's file: any type
        raise ValueError(f"data {source}: {user_code.user_error(e, source)}") from e


# ----------------------------------------------------------------------------------- row to example

# without --question_key and --answer_key, the first of these columns that a source has
ASKED = ("question", "problem", "prompt")
KEYS = {"question": (*ASKED, "messages", "conversations"),
        "answer": ("answer", "solution", "ground_truth")}
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names -> those of chats
MAKE = ("; or yield {'question': text, 'answer': text} per row from def make(split, size, seed) in "
        "a file of yours, --data my_file.py:make (docs/data_and_rewards.md has one)")


def read_chat(turns):
    """A list of messages -> {role: text}. It has the role user, perhaps system before it and
    assistant after it. {} for all other lists, for other values, and for a text in parts."""
    chat = {}
    for turn in turns if isinstance(turns, list) else ():
        match turn:
            case ({"role": str(role), "content": str(text)}
                  | {"from": str(role), "value": str(text)}
                  | {"from": str(role), "ground_truth": {"value": text}}):
                role = ROLES.get(role, role)
            case _:
                return {}
        if role in chat:
            return {}
        chat[role] = text
    order = [role for role in ("system", "user", "assistant") if role in chat]
    return chat if "user" in chat and list(chat) == order else {}


def spread(row):
    """A row as others publish it -> with `question` and `answer`, unless it has such columns.

    They come from verl's reward_model; or from a chat with an answer, as chats (messages), ShareGPT
    (conversations) and Open-Reasoner-Zero have it. The rows of the last are lists of two messages;
    on the hub, {"0": ..., "1": ...}. Raises ValueError if the row has no columns."""
    match row:
        case [{}, *_]:
            row = {"messages": row}
        case {"0": {} as user, "1": {} as assistant}:
            row = row | {"messages": [user, assistant]}
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object with named columns{MAKE}")
    added = {}
    chat = read_chat(row.get("messages", row.get("conversations")))
    if "assistant" in chat and not row.keys() & {*ASKED}:
        added = {"question": chat["user"], "answer": chat["assistant"]}
        if "system" in chat:
            added["system_prompt"] = chat["system"]
    match row:
        case {"reward_model": {"ground_truth": gold}}:
            added["answer"] = gold
    return added | row


def is_empty(value):
    """Also True for NaN, pandas' missing value, and for infinity, as JSON reads 1e400."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return value is None or str(value).strip().lower() in ("", "nan")


def example_of(row, keys):
    """A row -> an example. keys: the columns of {"question": ..., "answer": ...}. A system message
    before the question becomes the column system_prompt. Raises ValueError with what is wrong."""
    if None in row:  # where csv puts surplus fields
        raise ValueError("more fields than the header has")
    for kind, name in keys.items():
        if name != "none" and is_empty(row.get(name)):
            problem = f"'{name}' is empty, NaN or infinite"
            if name not in row:  # in quotes, which show a blank in a name
                problem = f"no '{name}' (it has {', '.join(map(repr, row))})"
            raise ValueError(f"{problem}; --{kind}_key names another column{MAKE}")
    question = row.get(keys["question"])
    chat = {"user": question} if isinstance(question, str) else read_chat(question)
    if "user" not in chat or "assistant" in chat:
        raise ValueError(f"'{keys['question']}' must be text, or messages: one of the role user, "
                         f"before it at most one of the role system, not {question!r:.150}{MAKE}")
    chat["user"].encode()  # a ValueError for half a surrogate pair, which no tokenizer takes
    example = row | {"question": chat["user"]}
    if "system" in chat:
        example["system_prompt"] = chat["system"]
    if keys["answer"] != "none":
        answer = row[keys["answer"]]
        if isinstance(answer, (dict, list)):
            raise ValueError(f"'{keys['answer']}' must be text or a number; --answer_key none "
                             f"hands it to the rewards as it is{MAKE}")
        example["answer"] = str(answer)
    return example


def load(source, split="train", size=0, seed=0, question_key="", answer_key=""):
    """Examples of a task, a file, a function or a hub dataset.

    source: a name in TASKS, a path (.jsonl .json .csv .parquet), a function in a file
        (my_file.py:make, see function_rows) or a hub dataset (org/name, org/name:config)
    split: "train" or "test"; ignored for files. size: 0 = all (a function is asked for 8192)
    question_key, answer_key: columns of the rows; those of a task are known. "none" for rows
        without an answer, whose reward reads other columns (code)
    Returns a list of dicts with `question` and, unless answer_key is "none", `answer` as strings.
    Raises ValueError with one line that names file, row and column."""
    if source in TASKS:
        question_key = answer_key = ""
        if not is_made(source):
            source = TASKS[source].source  # on the hub
    if is_made(source):
        rows = function_rows(source, split, size or 8192, seed)
    elif Path(source).is_file():
        rows = read_rows(Path(source))
    elif source.count("/") == 1 and Path(source).suffix.lower() not in FILES:
        repo, _, name = source.partition(":")
        rows = hub_rows(repo, name or None, split)
    else:
        raise ValueError(f"{source}: no such file, no task ({', '.join(TASKS)}), no function "
                         "(my_file.py:make) and no hub dataset (org/name)")
    keys = {"question": question_key, "answer": answer_key}
    examples = []
    for location, row in with_bar(rows, source):
        try:
            row = spread(row)
            for kind, names in KEYS.items():  # the first row decides which columns they are
                keys[kind] = keys[kind] or next((name for name in names if name in row), kind)
            examples.append(example_of(row, keys))
        except ValueError as e:
            # in one line: a column may have a line break in its name
            raise ValueError(f"{location}: {' '.join(str(e).split())}") from None
        if len(examples) == size:
            break
    return examples


# ------------------------------------------------------------------------------ prompts and batches

TEMPLATES = {  # "{question}" is replaced by the question
    "chat": "",  # the prompt comes from the tokenizer's own chat template
    "none": "{question}",
    "r1": (  # DeepSeek-R1, arXiv:2501.12948, table 1
        "A conversation between User and Assistant. The user asks a question, and the Assistant "
        "solves it. The assistant first thinks about the reasoning process in the mind and then "
        "provides the user with the answer. The reasoning process and answer are enclosed within "
        "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning "
        "process here </think> <answer> answer here </answer>. User: {question}. Assistant:"),
    "qwen_math": (  # Qwen2.5-Math's own prompt (its model card)
        "<|im_start|>system\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n"
        "{question}<|im_end|>\n"
        "<|im_start|>assistant\n"),
}
AT_ONCE = 256  # texts that the tokenizer gets in one call, which is faster than one by one
TODAY = datetime.datetime(2024, 7, 26)  # Llama 3.1's; see chat_text


def read_template(template):
    """--template, a name or a file -> the name, or the file's text without its last line break. A
    run stores the text: one with "{question}" is taken as it is. Raises ValueError for others."""
    if template in TEMPLATES or "{question}" in template:
        return template
    problem = "it needs {question} where the question belongs"
    try:
        text = Path(template).read_text(encoding="utf-8-sig").removesuffix("\n")
        if "{question}" in text:
            return text
    except (OSError, ValueError) as e:
        problem = e
    raise ValueError(f"--template {template}: not one of {', '.join(TEMPLATES)}, and no file that "
                     f"can be used ({problem})")


@functools.lru_cache(maxsize=2)
def added_prefix(tokenizer):
    """The token ids that a tokenizer puts before every text: its BOS, or none. Some tokenizers put
    an EOS behind the text as well, which a prompt must not have: it would end before the answer."""
    first = tokenizer("1+1", add_special_tokens=False)["input_ids"][0]
    ids = tokenizer("1+1")["input_ids"]
    return ids[:ids.index(first)]


def encode(example, tokenizer, template):
    """Token ids (list[int]) of an example's prompt: see encode_all."""
    [ids] = encode_all([example], tokenizer, template)
    return ids


def encode_all(examples, tokenizer, template):
    """Token ids (list[int]) of each example's prompt. template: what read_template returns. The
    system_prompt of an example, if it has one, is a text before the question. Raises ValueError
    for the template `chat`, see chat_text."""
    texts = [prompt_text(example, tokenizer, template) for example in examples]
    prefix = [] if template == "chat" else added_prefix(tokenizer)  # a chat's text has its BOS
    prompts = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        # the template of a file may begin with the BOS
        prompts.append(ids if ids[:len(prefix)] == prefix else prefix + ids)
    return prompts


def prompt_text(example, tokenizer, template):
    """The text of an example's prompt: see encode_all."""
    system = example.get("system_prompt")
    if not isinstance(system, str):  # a gap
        system = ""
    question = example["question"]
    if template == "chat":
        return chat_text(system, question, tokenizer)
    if system:
        question = f"{system}\n\n{question}"
    return TEMPLATES.get(template, template).replace("{question}", question)


def chat_text(system, question, tokenizer):
    """A prompt by the tokenizer's own chat template. It sees one date on every day, because a
    resumed run must have the same prompts. Raises ValueError if there is no chat template, or if it
    fails or leaves out a text."""
    chat = [{"role": "user", "content": question}]
    if system:
        chat.insert(0, {"role": "system", "content": system})
    advice = "use --template r1, qwen_math or none"
    try:
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, strftime_now=TODAY.strftime)
    except Exception as e:  # a template is a program: any type can come
        raise ValueError(f"the chat template fails ({messages.first_line(e)}); {advice}") from e
    for message in chat:  # some published templates have no place for a system message
        if message["content"].strip() not in text:
            raise ValueError(f"the chat template omits the message of the {message['role']}; "
                             f"{advice}")
    return text


def opened_thinking(prompt, tokenizer):
    """"<think>" if a prompt (token ids) ends with it, as the chat templates of some thinking models
    do, else "". With it before a completion, a completion that never closes it has no answer."""
    text = tokenizer.decode(prompt[-16:]).rstrip()
    return "<think>" if text.endswith("<think>") else ""


def completion_texts(rollouts, tokenizer):
    """The texts of completions as the rewards read them, one per rollout.

    EOS, BOS and padding are left out. A special token at the end, which has stopped vLLM, is left
    out too, unless it is a tag such as </answer>. Other special tokens stay, because some
    tokenizers have <think> or <answer> as a special token. A text begins with what opened_thinking
    returns for its prompt.
    """
    left_out = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    ends = set()  # special tokens that are no tags
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special and not token.content.startswith("</"):
            ends.add(i)
    opened = {}  # prompt -> "<think>" or ""
    completions = []
    for r in rollouts:
        ids = list(r.completion)
        if not r.truncated and ids and ids[-1] in ends:
            ids.pop()
        completions.append([token for token in ids if token not in left_out])
        end = tuple(r.prompt[-16:])
        if end not in opened:
            opened[end] = opened_thinking(end, tokenizer)
    texts = tokenizer.batch_decode(completions)
    return [opened[tuple(r.prompt[-16:])] + text for r, text in zip(rollouts, texts)]


def request_seed(*key):
    """A seed for one vLLM request from (run seed, step, index of the prompt, ...).

    vLLM gives sample j of a request the seed + j. The seeds of requests must therefore be far
    apart: with one seed for all prompts, or with seed + step, they would share their noise."""
    return random.Random(repr(key)).getrandbits(48)


@functools.lru_cache(maxsize=2)
def epoch_order(length, seed, epoch):
    """A permutation of range(length): a function of (seed, epoch)."""
    return random.Random(f"{seed}/{epoch}").sample(range(length), length)


def batch_at(dataset, number, size, seed=0, rank=0, world=1):
    """The examples of one rank in batch `number` of `size` examples (size % world == 0).

    Every epoch is a new permutation, and a batch may span two epochs, as the third one here.
    >>> [batch_at("abcde", number, 2) for number in (0, 1, 2)]
    [['c', 'd'], ['e', 'b'], ['a', 'e']]
    """
    per_rank = size // world
    first = number * size + rank * per_rank
    places = [divmod(first + i, len(dataset)) for i in range(per_rank)]
    return [dataset[epoch_order(len(dataset), seed, epoch)[i]] for epoch, i in places]


# -------------------------------------------------------------------------------- the sets of a run

def load_eval_sets(cfg, **keys):
    """The examples of --eval_data or else of --task, --eval_size of each set. keys: as in load.

    With several sets an example has its set in `eval_set`: a task's name, or a file's without its
    ending. `eval_of` is the number of examples of the whole set; a function makes --eval_size.
    Raises ValueError if two sets have the same name."""
    sources = [source.strip() for source in (cfg.eval_data or cfg.task).split(",")]
    names = []
    for path in map(Path, sources):
        name = path.stem if path.suffix.lower() in FILES else path.name
        names.append(re.sub(r"[^\w.-]", "-", name))  # it becomes a part of metrics' names
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(f"--eval_data {cfg.eval_data}: two sets have one name, or a set has none")
    examples = []
    for source, name in zip(sources, names):
        # a function makes no more rows than are needed
        rows = load(source, "test", cfg.eval_size if is_made(source) else 0, **keys)
        columns = {"eval_of": len(rows)}
        if len(sources) > 1:
            columns["eval_set"] = name
        examples += [row | columns for row in rows[:cfg.eval_size or None]]
    return examples


def load_sets(cfg):
    """Training and held-out examples. --data without --eval_data: up to a tenth of its examples (of
    a function: for seed 0) is held out, for all seeds the same."""
    source = cfg.data or cfg.task
    keys = {"question_key": cfg.question_key, "answer_key": cfg.answer_key}
    train_set = load(source, "train", seed=cfg.seed, **keys)
    if cfg.eval_data or not cfg.data:
        return train_set, load_eval_sets(cfg, **keys)
    rows = load(source, "train", **keys) if is_made(source) else train_set
    size = min(cfg.eval_size or len(rows), max(1, len(rows) // 10))
    order = epoch_order(len(rows), 0, "held out")
    return train_set, [rows[i] for i in sorted(order[:size])]


def load_splits(cfg, tokenizer, at_least=1, notify=print):
    """Training and held-out examples of a run, each with its token ids in `prompt_ids`.

    Examples with a prompt longer than --max_prompt are left out, and so are training examples whose
    question is held out, whatever its white space; notify(text) is called with their number.
    Raises ValueError or OSError with one line."""
    if not cfg.data and TASKS[cfg.task].test_only:
        raise ValueError(f"--task {cfg.task} has no training examples; evaluate on it: --task math "
                         f"--eval_data {cfg.task}")
    train_set, eval_set = load_sets(cfg)
    taken = ADDED_COLUMNS | SETTINGS | {"prompt_ids", "completions"}
    for name in sorted(taken & set().union(*train_set, *eval_set)):
        notify(f"note: rewards get the trainer's column '{name}', not that of the data")
    note_control_tokens(train_set + eval_set, tokenizer, notify)
    everything = len(train_set)
    if cfg.steps:  # --steps 0 trains on nothing
        held_out = {without_space(example) for example in eval_set}
        train_set = [e for e in train_set if without_space(e) not in held_out]
    if left_out := everything - len(train_set):
        notify(f"{left_out} of {everything} training examples left out: their questions are "
               "held out")
    return (fitting("training", train_set, cfg, tokenizer, at_least, notify),
            fitting("evaluation", eval_set, cfg, tokenizer, at_least, notify))


def without_space(example):
    return "".join(example["question"].split())


def note_control_tokens(examples, tokenizer, notify):
    """Says how many questions have the text of a control token, such as the EOS: it reaches the
    model as this token."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    written = []
    for example in examples:
        written += [token for token in tokens if token in example["question"]][:1]
    if written:
        notify(f"note: {len(written)} of {len(examples)} questions have a control token of the "
               f"tokenizer in their text, such as {written[0]}")


def fitting(kind, examples, cfg, tokenizer, at_least, notify):
    """The examples with `prompt_ids` of at most --max_prompt tokens. kind: for messages."""
    for first in with_bar(range(0, len(examples), AT_ONCE), f"{kind} prompts"):
        part = examples[first:first + AT_ONCE]
        for example, ids in zip(part, encode_all(part, tokenizer, cfg.template)):
            example["prompt_ids"] = ids
    kept = [example for example in examples if len(example["prompt_ids"]) <= cfg.max_prompt]
    limit = f"--max_prompt {cfg.max_prompt}"
    if len(kept) < at_least:
        raise ValueError(f"{cfg.data or cfg.task}: {len(kept)} {kind} prompts are left, {at_least} "
                         f"needed: held out questions and those beyond {limit} tokens do not count")
    if left_out := len(examples) - len(kept):
        notify(f"{left_out} of {len(examples)} {kind} prompts left out: longer than {limit}")
    return kept

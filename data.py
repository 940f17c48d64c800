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
import os
import pickle
import random
import re
import signal
import zlib
from collections import namedtuple
from pathlib import Path
from resource import RLIMIT_DATA, getrlimit, setrlimit
from statistics import mode

from tqdm import tqdm

from runtime import messages
from runtime.verify import pool, user_code
from runtime.verify.verifier import ADDED_COLUMNS, SETTINGS

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

# without --question_key and --answer_key, the first of these columns that a source has
ASKED = ("question", "problem", "prompt")
KEYS = {"question": (*ASKED, "messages", "conversations"),
        "answer": ("answer", "solution", "ground_truth")}
FILES = (".jsonl", ".json", ".csv", ".parquet")
# "\frac" in a text of JSON, or of Python that is not raw, is a form feed and "rac"
LOST_BACKSLASH = re.compile(
    r"[\a\b\f\v][a-z]|[\t\r](?:heta|imes|frac|ext\w*(?=\{)|ight(?:arrow)?|ho|au|riangle)(?![a-z])")
TAKEN = {"eval_set": "the trainer uses this name",  # columns that a row may not have
         "eval_of": "the trainer uses this name",
         "reward": "rows cannot name rewards, see docs/data_and_rewards.md"}
with_bar = functools.partial(tqdm, delay=5, mininterval=5, leave=False,  # after 5 s, on rank 0
                             disable=os.environ.get("RANK", "0") != "0")
MAKE = ("; or yield {'question': text, 'answer': text} per row from def make(split, size, seed) in "
        "a file of yours, --data my_file.py:make (docs/data_and_rewards.md has one)")


def unique(pairs):
    """dict(pairs). Raises ValueError if a key is there twice: its first value would be lost."""
    names = [name for name, _ in pairs if name]
    if len(set(names)) < len(names):
        raise ValueError(f"'{mode(names)}' is there twice")
    return dict(pairs)


def numbered(name, rows):
    return ((f"{name}, row {n}", row) for n, row in enumerate(rows, 1))


def read_rows(path):
    """jsonl, json, csv or parquet file -> iterator of (location, row), the former for messages."""
    kind, location, rows = path.suffix.lower(), path, None
    try:
        if kind == ".jsonl":
            for n, line in enumerate(path.read_bytes().split(b"\n"), 1):
                location = f"{path}:{n}"
                if line.strip():
                    yield location, json.loads(line, object_pairs_hook=unique)
            return
        if kind == ".json":
            rows = json.loads(path.read_bytes(), object_pairs_hook=unique)
            rows = rows.get("data") if isinstance(rows, dict) else rows
        elif kind == ".csv":
            csv.field_size_limit(2**31 - 1)  # of a field, in characters; its default is 131,072
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                unique([(name, "") for name in reader.fieldnames or ()])
                rows = list(reader)
        elif kind == ".parquet":
            from pyarrow import parquet
            rows = parquet.read_table(path).to_pylist()
    except Exception as e:  # each format has error types of its own
        raise ValueError(f"{location}: cannot be read ({messages.first_line(e)})") from e
    if not isinstance(rows, list):
        raise ValueError(f"{path}: not a jsonl, csv or parquet file, nor a .json file with a list "
                         "of objects (or one under 'data')")
    yield from numbered(path, rows)


def hub_rows(repo, name, split):
    """A split of a hub dataset (or its only one) -> iterator of (location, row)."""
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
    """Whether a function makes the rows of a source."""
    if source in TASKS:
        return callable(TASKS[source].source)
    return bool(re.fullmatch(r".+\.py:\w+", source))


def function_rows(source, split, size, seed):
    """Rows of a task or of my_file.py:make -> iterator of (location, row)."""
    make = TASKS[source].source if source in TASKS else user_code.load(source, kind="data")
    room = 2**30
    try:
        for location, row in numbered(source, make(split, size, seed)):
            room -= 1000 + len(json.dumps(row))  # only what a file can hold: plain values
            if room < 0:
                raise ValueError(f"{size} rows are needed; a million, or a GiB, is too much")
            yield location, row
    except (Exception, SystemExit) as e:  # a user's file: any type
        raise ValueError(f"data {source}: {user_code.user_error(e, source)}") from e


def spread(row):
    """A row as others publish it -> with `question` and `answer`, unless it has such columns: from
    verl's reward_model; or from two turns, of the user and with the answer, as chats, ShareGPT and
    Open-Reasoner-Zero have them. Its rows are lists; on the hub, {"0": ..., "1": ...}."""
    match row:
        case [{}, *_]:
            row = {"messages": row}
        case {"0": {} as asked, "1": {} as answered}:
            row = row | {"messages": [asked, answered]}
    match row:
        case {"reward_model": {"ground_truth": gold}}:
            return {"answer": gold} | row
        case {"messages": turns} | {"conversations": turns}:
            match turns:
                case [{"role": "user", "content": question} | {"from": "human", "value": question},
                      {"role": "assistant", "content": gold} | {"from": "gpt", "value": gold}
                      | {"ground_truth": {"value": gold}}] if not {*ASKED} & row.keys():
                    return {"question": question, "answer": gold} | row
    return row


def example_of(row, keys):
    """A row of a file or hub dataset -> example. keys: columns of {"question": ..., "answer": ...}.
    Raises ValueError that says what is wrong."""
    if not all(isinstance(name, str) for name in row):  # csv names surplus fields None
        raise ValueError("more fields than the header has, or a column whose name is not text")
    for name in row.keys() & TAKEN:
        raise ValueError(f"rename or remove the column '{name}': {TAKEN[name]}")
    # JSON can write half a surrogate pair, which no tokenizer takes: encode raises a ValueError
    json.dumps(row, ensure_ascii=False, default=str).encode()
    pickle.dumps([[[[[[[[row]]]]]]]])  # as for the rewards, and deeper: a RecursionError
    for kind, name in keys.items():
        value = row.get(name)
        if name != "none" and (  # pandas' missing value is NaN
                value is None or str(value).strip().lower() in ("", "nan")):
            fault = f"'{name}' is empty or NaN" if name in row else (
                f"no '{name}' (it has {', '.join(map(str, row))})")
            raise ValueError(f"{fault}; --{kind}_key names another column{MAKE}")
    match row.get(keys["question"]):
        case (str(question) | [{"role": "user", "content": str(question)}]
              | [{"from": "human", "value": str(question)}]):
            example = row | {"question": question}
        case other:
            raise ValueError(f"'{keys['question']}' must be text, or messages with one of the role "
                             f"user and no other, not {other!r:.150}{MAKE}")
    name = keys["answer"]
    if name != "none":
        if isinstance(row[name], (dict, list)):
            raise ValueError(f"'{name}' must be text or a number; --answer_key none hands it "
                             f"to the rewards as it is{MAKE}")
        example["answer"] = str(row[name])
        if LOST_BACKSLASH.search(example["answer"]):
            raise ValueError(f"'{name}' is {example['answer'][:99]!r}: a LaTeX command lost "
                             r"its backslash; JSON needs \\frac, Python r'\frac'")
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
            source = TASKS[source].source
    keys = {"question": question_key, "answer": answer_key}
    path = Path(source)
    if path.is_file() and source not in TASKS:
        rows = read_rows(path)
    elif is_made(source):
        rows = function_rows(source, split, size or 8192, seed)
    elif source.count("/") == 1 and path.suffix.lower() not in FILES:
        repo, _, name = source.partition(":")
        rows = hub_rows(repo, name or None, split)
    else:
        raise ValueError(f"{source}: no such file, no task ({', '.join(TASKS)}), no function "
                         "(my_file.py:make) and no hub dataset (org/name)")
    examples = []
    for location, row in with_bar(rows, source):
        try:
            row = spread(row)
            if not isinstance(row, dict):
                raise ValueError(f"a row must be an object with named columns{MAKE}")
            for kind, names in KEYS.items():  # the first row decides which columns they are
                keys[kind] = keys[kind] or next((name for name in names if name in row), kind)
            examples.append(example_of(row, keys))
        except (ValueError, RecursionError) as e:
            # in one line: a column may have a line break in its name
            raise ValueError(f"{location}: {' '.join(str(e).split())}") from None
        if len(examples) == size:
            break
    if not examples:
        raise ValueError(f"{source}: no examples in it")
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
# for a chat template that writes today's date: --resume must not see other prompts. Llama 3.1's
TODAY = datetime.datetime(2024, 7, 26)


def read_template(template):
    """--template, a name or a file -> the name, or the file's text without its last line break. A
    run stores the text: one with "{question}" is taken as it is. Raises ValueError for others."""
    if template in TEMPLATES or "{question}" in template:
        return template
    try:
        text = Path(template).read_text(encoding="utf-8-sig").removesuffix("\n")
        if "{question}" not in text:
            raise ValueError("it needs {question} where the question belongs")
        return text
    except (OSError, ValueError) as e:
        raise ValueError(f"--template {template}: not one of {', '.join(TEMPLATES)}, and no file "
                         f"that can be used ({e})") from None


def _too_long(*_):
    raise TimeoutError("no end after 2 s")


def encode(example, tokenizer, template):
    """Token ids (list[int]) of an example's prompt. template: what read_template returns. `chat`
    raises ValueError if the tokenizer has no chat template, or one that fails, does not end in 2 s
    of CPU time and 1 GiB, omits the question or multiplies it."""
    question = example["question"]
    if template != "chat":
        prompt = TEMPLATES.get(template, template).replace("{question}", question)
        ids = tokenizer(prompt)["input_ids"]
        # the template of a file may begin with the BOS, which the tokenizer adds too
        return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids
    advice = "use --template r1, qwen_math or none"
    limits = getrlimit(RLIMIT_DATA)
    try:
        signal.signal(signal.SIGPROF, _too_long)
        signal.setitimer(signal.ITIMER_PROF, 2)
        setrlimit(RLIMIT_DATA, (pool.data_bytes() + 2**30, limits[1]))
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True,
            strftime_now=TODAY.strftime)
    except Exception as e:  # none, or a template that fails: it is a program, any type can come
        raise ValueError(f"the chat template fails ({messages.first_line(e)}); {advice}") from e
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        setrlimit(RLIMIT_DATA, limits)
    if question.strip() not in text or len(text) - len(question) > 10**6:
        raise ValueError(f"the chat template omits or multiplies the question; {advice}")
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the text has its BOS


def completion_texts(rollouts, tokenizer):
    """The texts of completions as the rewards read them, one per rollout.

    EOS, BOS and padding are left out, and also another special token at the end, which has stopped
    vLLM. Other special tokens stay, because some tokenizers have <think> or <answer> as a special
    token. If the prompt ends with <think>, as the chat templates of some thinking models do, the
    text begins with <think>: a completion that never closes it has no answer.
    """
    left_out = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    special = set(tokenizer.all_special_ids)
    opened = {}  # prompt -> "<think>" or ""
    completions = []
    for r in rollouts:
        ids = list(r.completion)
        if not r.truncated and ids and ids[-1] in special:
            ids.pop()
        completions.append([token for token in ids if token not in left_out])
        prompt = tuple(r.prompt[-16:])
        if prompt not in opened:
            end = tokenizer.decode(prompt).rstrip()
            opened[prompt] = "<think>" if end.endswith("<think>") else ""
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
    examples, sources = [], [x.strip() for x in (cfg.eval_data or cfg.task).split(",")]
    names = [path.stem if path.suffix.lower() in FILES else path.name
             for path in map(Path, sources)]
    names = [re.sub(r"[^\w.-]", "-", name) for name in names]  # it becomes a part of metrics' names
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(f"--eval_data {cfg.eval_data}: two sets have one name, or a set has none")
    for source, name in zip(sources, names):
        # a function makes no more rows than are needed
        rows = load(source, "test", cfg.eval_size if is_made(source) else 0, **keys)
        own = {"eval_of": len(rows)}
        if len(sources) > 1:
            own["eval_set"] = name
        examples += [row | own for row in rows[:cfg.eval_size or None]]
    return examples


def load_splits(cfg, tokenizer, at_least=1, notify=print):
    """Training and held-out examples of a run, each with its token ids in `prompt_ids`.

    --data without --eval_data: up to a tenth of its examples (of a function: for seed 0) is held
    out, for all seeds the same. Examples with a prompt longer than --max_prompt are left out, and
    so are training examples whose question is held out; notify(text) is called with their number.
    Raises ValueError or OSError with one line."""
    if not cfg.data and TASKS[cfg.task].test_only:
        raise ValueError(f"--task {cfg.task} has no training examples; evaluate on it: --task math "
                         f"--eval_data {cfg.task}")
    source = cfg.data or cfg.task
    keys = {"question_key": cfg.question_key, "answer_key": cfg.answer_key}
    train_set = load(source, "train", seed=cfg.seed, **keys)
    if cfg.eval_data or not cfg.data:
        eval_set = load_eval_sets(cfg, **keys)
    else:
        rows = load(source, "train", **keys) if is_made(source) else train_set
        size = min(cfg.eval_size or len(rows), max(1, len(rows) // 10))
        order = epoch_order(len(rows), 0, "held out")
        eval_set = [rows[i] for i in sorted(order[:size])]

    taken = ADDED_COLUMNS | SETTINGS | {"prompt_ids", "completions"}
    for name in sorted(taken & set().union(*train_set, *eval_set)):
        notify(f"note: rewards get the trainer's column '{name}', not that of the data")
    held_out = {example["question"] for example in eval_set if cfg.steps}  # --steps 0: no training
    new = [example for example in train_set if example["question"] not in held_out]
    if left_out := len(train_set) - len(new):
        notify(f"{left_out} of {len(train_set)} training examples left out: their questions are "
               "held out")
    from runtime.memory import empty_model  # late: it imports torch
    config = empty_model(cfg.model, cfg.trust_remote_code).config.get_text_config()
    limit = f"--max_prompt {cfg.max_prompt}"

    def fitting(name, examples):
        for example in with_bar(examples, f"{name} prompts"):
            ids = example["prompt_ids"] = encode(example, tokenizer, cfg.template)
            if max(ids, default=0) >= config.vocab_size:
                raise ValueError(f"--model {cfg.model}: its vocabulary of {config.vocab_size} has "
                                 f"no token {max(ids)}: is this another model's tokenizer?")
        kept = [e for e in examples if len(e["prompt_ids"]) <= cfg.max_prompt]
        if len(kept) < at_least:
            raise ValueError(f"{source}: {len(kept)} {name} prompts are left, {at_least} needed: "
                             f"held out questions and those beyond {limit} tokens do not count")
        if left_out := len(examples) - len(kept):
            notify(f"{left_out} of {len(examples)} {name} prompts left out: longer than {limit}")
        if lost := {e.get("eval_set") for e in examples} - {e.get("eval_set") for e in kept}:
            raise ValueError(f"--eval_data {min(lost)}: no prompt of it fits into {limit} tokens")
        return kept

    return fitting("training", new), fitting("evaluation", eval_set)

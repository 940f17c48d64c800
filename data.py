"""Tasks and prompts: a name, a file or a hub set -> examples -> prompt token ids -> the batch of a step.

    >>> load("arithmetic", "test", size=1)
    [{'question': '16+16-3-17+10+18', 'answer': '40', 'terms': 6}]

An example is a dict: `question` (str), `answer` (str) and whatever other columns its source has; every column reaches
the reward functions. Nothing here keeps state: examples are a function of (source, split, seed), and the batch of a
step is a function of (examples, step, seed, rank), whatever came before.
"""
import csv
import functools
import json
import random
import zlib
from pathlib import Path

# ------------------------------------------------------------------------------------------------ generated tasks


def arithmetic(rng):
    """A chain of 3 to 6 terms such as 14+2+9; every running total lies in 0..99, so each step is one small sum."""
    terms = [total] = [rng.randint(1, 20)]
    question = str(total)
    for _ in range(rng.randint(2, 5)):
        x = rng.choice([x for x in range(-20, 21) if x and 0 <= total + x <= 99])
        total, question, terms = total + x, question + f"{x:+d}", terms + [x]
    return {"question": question, "answer": str(total), "terms": len(terms)}


def countdown(rng):
    """Reach `target` from 3 or 4 numbers, each used once (the task of TinyZero); `answer` is one solution."""
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 4))]
        value, text = numbers[0], str(numbers[0])
        for x in numbers[1:]:
            op = rng.choice([op for op in "+-*/" if op != "/" or value % x == 0])
            value, text = {"+": value + x, "-": value - x, "*": value * x, "/": value // x}[op], f"({text} {op} {x})"
        if 10 <= value <= 99:
            shown = rng.sample(numbers, len(numbers))
            question = (f"Combine the numbers {shown} with + - * / and brackets, each number exactly once, so that the "
                        f"result is {value}. Put the expression between <answer> and </answer>.")
            return {"question": question, "answer": text[1:-1], "numbers": shown, "target": value}


# name -> where it comes from (`make`: one example from a random generator; `hub`: repository, configuration) and the
# rewards it is judged by unless --rewards says otherwise; the first reward is the one evaluation counts
TASKS = {
    "arithmetic": {"make": arithmetic, "rewards": "gsm8k:1"},
    "countdown": {"make": countdown, "rewards": "countdown:1,format:0.1"},
    "gsm8k": {"hub": ("openai/gsm8k", "main"), "rewards": "gsm8k:1"},
    "math": {"hub": ("DigitalLearningGmbH/MATH-lighteval", None), "rewards": "math:1"},
    "math500": {"hub": ("HuggingFaceH4/MATH-500", None), "rewards": "math:1", "test_only": True},
    "aime24": {"hub": ("HuggingFaceH4/aime_2024", None), "rewards": "math:1", "test_only": True},
    "amc23": {"hub": ("math-ai/amc23", None), "rewards": "math:1", "test_only": True},
}
QUESTION_KEYS = ("question", "problem", "prompt")  # the first that a source has is its question …
ANSWER_KEYS = ("answer", "solution", "ground_truth")  # … and its answer, unless --question_key / --answer_key say more


def generate(make, split, size, seed):
    """`size` distinct examples. A question's checksum says which split it is in: no seed puts a test question in train."""
    rng, seen = random.Random(f"{make.__name__}/{split}/{seed}"), {}
    while len(seen) < size:
        example = make(rng)
        if (zlib.crc32(example["question"].encode()) % 8 == 0) == (split == "test"):
            seen.setdefault(example["question"], example)
    return list(seen.values())


# ------------------------------------------------------------------------------------------------ files and hub sets


def read_rows(path):
    """jsonl, json, csv or parquet file -> iterator of (place, row); `place` names the line for an error message."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        for n, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):  # splitlines() would cut at U+2028
            if line.strip():
                try:
                    yield f"{path}:{n}", json.loads(line)
                except json.JSONDecodeError as e:
                    raise ValueError(f"{path}:{n}: not JSON ({e.msg})") from None
    elif kind == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}:{e.lineno}: not JSON ({e.msg}); one object a line is .jsonl") from None
        rows = rows["data"] if isinstance(rows, dict) and isinstance(rows.get("data"), list) else rows
        if not isinstance(rows, list):
            raise ValueError(f"{path}: a .json file must hold a list of objects (or one under 'data')")
        yield from ((f"{path}, item {n}", row) for n, row in enumerate(rows, 1))
    elif kind == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as f:
            reader = csv.DictReader(f)
            yield from ((f"{path}:{reader.line_num}", row) for row in reader)
    elif kind == ".parquet":
        from pyarrow import parquet
        yield from ((f"{path}, row {n}", row) for n, row in enumerate(parquet.read_table(path).to_pylist(), 1))
    else:
        raise ValueError(f"{path}: cannot read '{kind or 'no suffix'}' (jsonl, json, csv and parquet are read)")


def hub_rows(repo, name, split):
    """A split of a hub set -> iterator of (place, row); a set without a `train` or `test` split gives its only one."""
    from datasets import load_dataset
    try:
        splits = load_dataset(repo, name)
    except Exception as e:  # offline, gated, renamed, moved: datasets raises many types; the reader needs one line
        reason = str(e).strip().split("\n")[0]
        raise ValueError(f"{repo}: not a file here and not loadable from the hub ({type(e).__name__}: {reason})") from e
    if split not in splits and len(splits) > 1:
        raise ValueError(f"{repo} has no split '{split}' (it has {', '.join(splits)})")
    rows = splits[split if split in splits else next(iter(splits))]
    yield from ((f"{repo}[{split}], row {n}", row) for n, row in enumerate(rows, 1))


def load(source, split="train", size=0, seed=0, question_key="", answer_key=""):
    """Examples of a task, a file or a hub set.

    source: a name in TASKS, a path (.jsonl .json .csv .parquet) or a hub set ("org/name" or "org/name:config").
    size: number of examples, 0 = all (a generated task: 8192). Files have no split of their own: `split` is ignored.
    answer_key "none": the rows have no answer, their reward reads other columns (code, instruction, judge).
    Returns a list of dicts with at least `question` and (but for "none") `answer` as strings.
    Raises ValueError or FileNotFoundError with one line that names the file, the line and the key.
    """
    task = TASKS.get(source, {})
    if "make" in task:
        return generate(task["make"], split, size or 8192, seed)
    path = Path(source)
    if path.is_file():
        rows = read_rows(path)
    elif task:
        rows = hub_rows(*task["hub"], split)
    elif path.suffix.lower() in (".jsonl", ".json", ".csv", ".parquet") or path.is_dir():
        raise FileNotFoundError(f"{source}: no such file")
    elif source.count("/") == 1:
        repo, _, name = source.partition(":")
        rows = hub_rows(repo, name or None, split)
    else:
        raise ValueError(f"'{source}' is no task ({', '.join(TASKS)}), no file and no hub set (org/name)")
    examples = []
    for place, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{place}: a row must be an object with named columns, this is {type(row).__name__}")
        if None in row:  # csv.DictReader's name for what is too much
            raise ValueError(f"{place}: more fields than the header has")
        if not examples:  # the first row decides which columns are the question and the answer
            question_key = question_key or next((k for k in QUESTION_KEYS if k in row), QUESTION_KEYS[0])
            answer_key = answer_key or next((k for k in ANSWER_KEYS if k in row), ANSWER_KEYS[0])
        for key, flag in ((question_key, "--question_key"), (answer_key, "--answer_key")):
            if (flag, key) != ("--answer_key", "none") and (row.get(key) is None or row[key] == ""):
                raise ValueError(f"{place}: no '{key}' (it has {', '.join(map(str, row))}); {flag} names another column")
        if not isinstance(row[question_key], str):
            raise ValueError(f"{place}: '{question_key}' must be text, this is {type(row[question_key]).__name__}")
        answer = {} if answer_key == "none" else {"answer": str(row[answer_key])}
        examples.append({**row, "question": row[question_key], **answer})
        if len(examples) == size:
            break
    if not examples:
        raise ValueError(f"{source}: no examples in it")
    return examples


# ------------------------------------------------------------------------------------------------ prompts and batches

TEMPLATES = {  # how a question becomes the prompt; "{question}" is replaced, nothing else is touched
    "chat": None,  # the tokenizer's own chat template
    "none": "{question}",
    # DeepSeek-R1, arXiv:2501.12948, table 1
    "r1": "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
          "assistant first thinks about the reasoning process in the mind and then provides the user with the answer. "
          "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, "
          "respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. "
          "User: {question}. Assistant:",
    # what Qwen2.5-Math was trained on (its model card)
    "qwen_math": "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
                 "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
}


def encode(example, tokenizer, template):
    """The token ids (list[int]) of an example's prompt. Raises ValueError: `chat` without a chat template."""
    if template != "chat":
        return tokenizer(TEMPLATES[template].replace("{question}", example["question"]))["input_ids"]
    if not tokenizer.chat_template:
        raise ValueError("--template chat: this tokenizer has no chat template (r1, qwen_math and none need none)")
    message = [{"role": "user", "content": example["question"]}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote its own BOS


@functools.lru_cache(maxsize=2)
def epoch_order(length, seed, epoch):
    return random.Random(f"{seed}/{epoch}").sample(range(length), length)


def batch_at(dataset, step, size, seed=0, rank=0, world=1):
    """The examples that `rank` of `world` works on at `step`: its share of `size` examples in all (size % world == 0).

    Every epoch is a fresh permutation, a batch may span two; a function of the arguments alone.
    >>> [batch_at("abcde", step, 2) for step in (0, 1, 2)]  # the third batch ends epoch 0 and begins epoch 1
    [['c', 'd'], ['e', 'b'], ['a', 'e']]
    """
    share = size // world
    first = step * size + rank * share
    places = (divmod(i, len(dataset)) for i in range(first, first + share))
    return [dataset[epoch_order(len(dataset), seed, epoch)[i]] for epoch, i in places]

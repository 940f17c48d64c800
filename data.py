"""Tasks and prompts: a name, a file or a hub set -> examples -> prompt token ids -> the batch of a step.

    >>> load("arithmetic", "test", size=1)
    [{'question': '16+16-3-17+10+18', 'answer': '40', 'terms': 6}]

An example is a dict with `question` (str), `answer` (str) and all other columns of its source; the reward
functions receive every column. Nothing here keeps state: the examples are a function of (source, split,
seed), and the batch of a step is a function of (examples, step, seed, rank).
"""
import csv
import functools
import io
import json
import random
import re
import zlib
from pathlib import Path

from runtime import shape
from verify.verifier import ADDED_COLUMNS

# -------------------------------------------------------------------------------------------- generated tasks


def arithmetic(rng):
    """A sum of 3 to 6 terms such as 14+2+9. Every running total is in 0..99: each step is one small sum."""
    terms = [total] = [rng.randint(1, 20)]
    question = str(total)
    for _ in range(rng.randint(2, 5)):
        x = rng.choice([x for x in range(-20, 21) if x and 0 <= total + x <= 99])
        total, question, terms = total + x, question + f"{x:+d}", terms + [x]
    return {"question": question, "answer": str(total), "terms": len(terms)}


def countdown(rng):
    """Make `target` from 3 or 4 numbers, each used once (TinyZero's task). `answer` is one solution."""
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 4))]
        value, text = numbers[0], str(numbers[0])
        for x in numbers[1:]:
            op = rng.choice([op for op in "+-*/" if op != "/" or value % x == 0])
            value = {"+": value + x, "-": value - x, "*": value * x, "/": value // x}[op]
            text = f"({text} {op} {x})"
        if 10 <= value <= 99:
            shown = rng.sample(numbers, len(numbers))
            question = (f"Combine the numbers {shown} with + - * / and brackets, each number exactly once, "
                        f"so that the result is {value}. Put the expression between <answer> and </answer>.")
            return {"question": question, "answer": text[1:-1], "numbers": shown, "target": value}


# name -> where its examples come from (`make`: a function of a random generator; `hub`: repository and
# configuration), and its default for --rewards, the first of which the evaluation counts
TASKS = {
    "arithmetic": {"make": arithmetic, "rewards": "gsm8k:1"},
    "countdown": {"make": countdown, "rewards": "countdown:1,format:0.1"},
    "gsm8k": {"hub": ("openai/gsm8k", "main"), "rewards": "gsm8k:1"},
    "math": {"hub": ("DigitalLearningGmbH/MATH-lighteval", None), "rewards": "math:1"},
    "math500": {"hub": ("HuggingFaceH4/MATH-500", None), "rewards": "math:1", "test_only": True},
    "aime24": {"hub": ("HuggingFaceH4/aime_2024", None), "rewards": "math:1", "test_only": True},
    "amc23": {"hub": ("math-ai/amc23", None), "rewards": "math:1", "test_only": True},
}
# without --question_key and --answer_key, the first of these columns that a source has
QUESTION_KEYS = ("question", "problem", "prompt")
ANSWER_KEYS = ("answer", "solution", "ground_truth")
FILES = (".jsonl", ".json", ".csv", ".parquet")


def generate(make, split, size, seed):
    """`size` distinct examples. The checksum of a question decides its split: whatever the seed, no test
    question is in the training split."""
    rng, seen = random.Random(f"{make.__name__}/{split}/{seed}"), {}
    while len(seen) < size:
        example = make(rng)
        if (zlib.crc32(example["question"].encode()) % 8 == 0) == (split == "test"):
            seen.setdefault(example["question"], example)
    return list(seen.values())


# ----------------------------------------------------------------------------------------- files and hub sets


def read_text(path):
    """The text of a UTF-8 file, also with a byte order mark. ValueError names the line of a bad byte."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise ValueError(f"{path}: cannot be read ({e.strerror})") from e
    try:
        text = raw.decode("utf-8-sig")
        bad = raw.find(b"\0")
    except UnicodeDecodeError as e:
        bad = e.start
    if bad >= 0:
        line = raw.count(b"\n", 0, bad) + 1
        raise ValueError(f"{path}:{line}: byte {raw[bad]:#04x} is no UTF-8 text: this is a binary file or "
                         "another encoding (to convert it: iconv -f UTF-16 -t UTF-8)")
    return text


def unique(pairs):
    """dict(pairs). Raises ValueError if a key is there twice: the first value would be lost."""
    found = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key '{name}' is there twice")
        found[name] = value
    return found


def parse_json(text, path, line=1):
    """json.loads with the file and the line in its ValueError. `line`: number of the first line of `text`."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}:{line + e.lineno - 1}: not JSON ({e.msg})") from None
    except (ValueError, RecursionError) as e:  # a number of 4,301 digits; brackets in brackets in ...
        raise ValueError(f"{path}:{line}: not readable as JSON ({e})") from None


def read_rows(path):
    """jsonl, json, csv or parquet file -> iterator of (location, row). The location is for error messages."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        lines = read_text(path).split("\n")  # splitlines() would also split at U+2028
        yield from ((f"{path}:{n}", parse_json(line, path, n)) for n, line in enumerate(lines, 1)
                    if line.strip())
    elif kind == ".json":
        rows = parse_json(read_text(path), path)
        if isinstance(rows, dict) and isinstance(rows.get("data"), list):
            rows = rows["data"]
        if not isinstance(rows, list):
            raise ValueError(f"{path}: a .json file must hold a list of objects (or one under 'data')")
        yield from ((f"{path}, item {n}", row) for n, row in enumerate(rows, 1))
    elif kind == ".csv":
        csv.field_size_limit(2**31 - 1)  # of a field, in characters; its default is 131,072
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
        try:
            # without empty names: many files end in columns without one
            names = [name for name in reader.fieldnames or () if name]
            if len(set(names)) < len(names):
                twice = max(names, key=names.count)
                raise ValueError(f"{path}:1: two columns have the name '{twice}'")
            yield from ((f"{path}:{reader.line_num}", row) for row in reader)
        except csv.Error as e:  # for example a quotation mark that is never closed
            raise ValueError(f"{path}:{reader.line_num}: not CSV ({e})") from None
    elif kind == ".parquet":
        import pyarrow
        from pyarrow import parquet
        try:
            rows = parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{path}: not a readable parquet file ({shape.first_line(e)})") from None
        yield from ((f"{path}, row {n}", row) for n, row in enumerate(rows, 1))
    else:
        raise ValueError(f"{path}: cannot read '{kind or 'no suffix'}' (jsonl, json, csv or parquet)")


def hub_rows(repo, name, split):
    """A split of a hub dataset (or its only one) -> iterator of (location, row)."""
    shape.hub_answers()  # before datasets is imported: it looks only once whether it is offline
    from datasets import load_dataset
    try:
        splits = load_dataset(repo, name)
    except Exception as e:  # gated, renamed, damaged: datasets raises many types; the user gets one line
        raise ValueError(f"{repo}: not a file here and not loadable from the hub "
                         f"({shape.first_line(e, repo)}); --data and --eval_data can name a file") from e
    if split not in splits and len(splits) > 1:
        raise ValueError(f"{repo} has no split '{split}' (it has {', '.join(splits)})")
    rows = splits[split if split in splits else next(iter(splits))]
    yield from ((f"{repo}[{split}], row {n}", row) for n, row in enumerate(rows, 1))


def check_text(value, name, location):
    """Raises ValueError for half a character (JSON can write one as \\ud83d), which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{location}: '{name}' has {value[e.start]!a}, half of a surrogate pair, which is "
                         "no character") from None


def load(source, split="train", size=0, seed=0, question_key="", answer_key=""):
    """Examples of a task, a file or a hub dataset.

    source: a name in TASKS, a path (.jsonl .json .csv .parquet) or a hub dataset (org/name, org/name:config)
    split: "train" or "test"; ignored for files, which have no splits
    size: number of examples, 0 = all (8192 for a generated task)
    answer_key: "none" for rows without an answer, whose reward reads other columns (code, instruction, judge)

    Returns a list of dicts with `question` and, unless answer_key is "none", `answer` as strings. A row with
    text in the column `reward` is judged by this spec instead of --rewards; it needs no answer.
    Raises ValueError or FileNotFoundError with one line that names the file, the line and the column.
    """
    task = TASKS.get(source, {})
    if "make" in task:
        return generate(task["make"], split, size or 8192, seed)
    path = Path(source)
    if path.is_file():
        rows = read_rows(path)
    elif task:
        rows = hub_rows(*task["hub"], split)
    elif path.is_dir():
        raise ValueError(f"{source}: a folder; name a file in it (jsonl, json, csv or parquet)")
    elif path.suffix.lower() in FILES:
        raise FileNotFoundError(f"{source}: no such file")
    elif source.count("/") == 1:
        repo, _, name = source.partition(":")
        rows = hub_rows(repo, name or None, split)
    else:
        raise ValueError(f"'{source}' is no task ({', '.join(TASKS)}), no file and no hub dataset (org/name)")
    examples = []
    for location, row in rows:
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ValueError(f"{location}: a row must be an object with named columns, this is {kind}")
        if None in row:  # csv.DictReader's key for surplus fields
            raise ValueError(f"{location}: more fields than the header has")
        if not examples:  # the first row decides which columns are the question and the answer
            question_key = question_key or next((k for k in QUESTION_KEYS if k in row), QUESTION_KEYS[0])
            answer_key = answer_key or next((k for k in ANSWER_KEYS if k in row), ANSWER_KEYS[0])
        if "eval_set" in row:
            raise ValueError(f"{location}: rename the column 'eval_set': the name is taken by the trainer")
        empty = {key: row.get(key) is None or not str(row[key]).strip()
                 for key in (question_key, answer_key, "reward")}
        if "reward" in row and empty["reward"]:
            row = {**row, "reward": None}
        if not isinstance(row.get("reward"), (str, type(None))):
            kind = type(row["reward"]).__name__
            raise ValueError(f"{location}: 'reward' must be text, the --rewards of this row, this is {kind}; "
                             "rename a column with another meaning")
        no_answer = answer_key == "none" or empty[answer_key] and row.get("reward")
        for key, flag in ((question_key, "--question_key"), (answer_key, "--answer_key")):
            if empty[key] and not (no_answer and flag == "--answer_key"):
                fault = f"'{key}' is empty" if key in row else (
                    f"no '{key}' (it has {', '.join(map(str, row))})")
                raise ValueError(f"{location}: {fault}; {flag} names another column")
        if not isinstance(row[question_key], str):
            kind = type(row[question_key]).__name__
            raise ValueError(f"{location}: '{question_key}' must be text, this is {kind}")
        for key, value in row.items():
            if isinstance(value, str):
                check_text(value, key, location)
        if not no_answer and isinstance(row[answer_key], (dict, list)):
            kind = type(row[answer_key]).__name__
            raise ValueError(f"{location}: '{answer_key}' must be text or a number, this is {kind}; "
                             "--answer_key none hands it to the rewards as it is")
        answer = {} if no_answer else {"answer": str(row[answer_key])}
        examples.append({**row, "question": row[question_key], **answer})
        if len(examples) == size:
            break
    if not examples:
        raise ValueError(f"{source}: no examples in it")
    columns = dict.fromkeys(key for example in examples for key in example)  # in their order
    return [dict.fromkeys(columns) | example for example in examples]  # None where a row lacks a column


# ---------------------------------------------------------------------------------------- prompts and batches

# "{question}" is replaced by the question. With --eval_budget, the text after "{opener}" is appended to a
# completion that was cut off while thinking, to force an answer. Without "{opener}" it is DEFAULT_OPENER.
TEMPLATES = {
    "chat": "{opener}</think><answer>",  # the prompt comes from the tokenizer's own chat template
    "none": "{question}",
    # DeepSeek-R1, arXiv:2501.12948, table 1
    "r1": "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
          "The assistant first thinks about the reasoning process in the mind and then provides the user "
          "with the answer. The reasoning process and answer are enclosed within <think> </think> and "
          "<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
          "<answer> answer here </answer>. User: {question}. Assistant:{opener}</think> <answer>",
    # Qwen2.5-Math's own prompt (its model card)
    "qwen_math": "<|im_start|>system\n"
                 "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
                 "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                 "{opener}\n\nThe final answer is \\boxed{",
}
DEFAULT_OPENER = "\n\nThe final answer is "


def read_template(template):
    """--template, a name or a file -> the name, or the text of the file without its last line break.

    A run stores the text, not the path; a text with "{question}" is therefore taken as it is.
    Raises ValueError with one line if there is no such file or its prompt has no "{question}".
    """
    if template in TEMPLATES:
        return template
    text, path = template, Path(template)
    if "{question}" not in template:
        if not path.is_file():
            raise ValueError(f"--template {template}: no such file, and not one of {', '.join(TEMPLATES)}")
        text = read_text(path).removesuffix("\n")
    if "{question}" not in split_template(text)[0]:
        raise ValueError(f"--template {path.name}: the prompt needs {{question}} where the question belongs, "
                         "and before {opener}")
    return text


def split_template(template):
    """The name or text of a template -> (text of the prompt, opener of an answer)."""
    prompt, marked, opener = TEMPLATES.get(template, template).partition("{opener}")
    return prompt, opener if marked else DEFAULT_OPENER


def encode(example, tokenizer, template):
    """Token ids (list[int]) of an example's prompt. template: a name in TEMPLATES, or the text of a file.

    `chat` raises ValueError if the tokenizer has no chat template or one that fails or omits the question.
    """
    if template != "chat":
        prompt, _ = split_template(template)
        return tokenizer(prompt.replace("{question}", example["question"]))["input_ids"]
    if not tokenizer.chat_template:
        raise ValueError("--template chat: this tokenizer has no chat template; use r1, qwen_math or none")
    message = [{"role": "user", "content": example["question"]}]
    try:
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except Exception as e:  # a template is a program: any type can come
        raise ValueError("--template chat: the tokenizer's chat template fails "
                         f"({shape.first_line(e)}); use r1, qwen_math or none") from e
    if example["question"].strip() not in text:
        raise ValueError("--template chat: the tokenizer's chat template leaves the question out; "
                         "use r1, qwen_math or none")
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template adds the BOS itself


def request_seed(*key):
    """A seed for one vLLM request from (run seed, step, index of the prompt, ...).

    vLLM gives sample j of a request the seed + j. The seeds of requests must therefore be far apart: with one
    seed for all prompts, or with seed + step, different requests would share their noise.
    """
    return random.Random(repr(key)).getrandbits(48)


@functools.lru_cache(maxsize=2)
def epoch_order(length, seed, epoch):
    """A permutation of range(length): a function of (seed, epoch)."""
    return random.Random(f"{seed}/{epoch}").sample(range(length), length)


def batch_at(dataset, step, size, seed=0, rank=0, world=1):
    """The examples of one rank at `step`: its part of a batch of `size` examples (size % world == 0).

    Every epoch is a new permutation, and a batch may span two epochs.
    >>> [batch_at("abcde", step, 2) for step in (0, 1, 2)]  # the third batch ends epoch 0 and begins epoch 1
    [['c', 'd'], ['e', 'b'], ['a', 'e']]
    """
    per_rank = size // world
    first = step * size + rank * per_rank
    batch = []
    for position in range(first, first + per_rank):
        epoch, i = divmod(position, len(dataset))
        batch.append(dataset[epoch_order(len(dataset), seed, epoch)[i]])
    return batch


# ------------------------------------------------------------------------------------------ the sets of a run

def load_eval_sets(cfg, **keys):
    """The examples of the sets in --eval_data, --eval_size of each. keys: columns of files and hub sets.

    With several sets an example has its set in `eval_set`: a task's name, or a file's without its ending.
    The examples of a task get the task's rewards in `reward`, if the run has others and the row has none.
    Raises ValueError if two sets have the same name.
    """
    sources, examples = [source.strip() for source in cfg.eval_data.split(",")], []
    if "" in sources:
        raise ValueError(f"--eval_data {cfg.eval_data}: no set before or after a comma")
    names = [path.stem if path.suffix.lower() in FILES else path.name for path in map(Path, sources)]
    names = [re.sub(r"[^\w.-]", "-", name) for name in names]  # the name becomes a part of metrics' names
    for source, name in zip(sources, names):
        if names.count(name) > 1:
            raise ValueError(f"--eval_data {cfg.eval_data}: two sets have the name {name}; rename a file")
        own = {} if len(sources) == 1 else {"eval_set": name}
        spec = TASKS.get(source, {}).get("rewards", cfg.rewards)
        for example in load(source, "test", size=cfg.eval_size, **({} if source in TASKS else keys)):
            reward = {"reward": spec} if spec != cfg.rewards and not example.get("reward") else {}
            examples.append(example | own | reward)
    return examples


def load_splits(cfg, tokenizer, at_least=1, notify=print):
    """Training and held-out examples of a run, each with its token ids in `prompt_ids`.

    --data without --eval_data: up to a tenth of its examples are held out. --eval_data may name several sets:
    load_eval_sets. Examples with a prompt longer than --max_prompt are left out, and so are training examples
    whose question is held out; notify(text) is called with their number. Raises ValueError or OSError with
    one line, also if fewer than `at_least` examples or none of a set are left, or if a token is not in the
    model's vocabulary.
    """
    if not cfg.data and TASKS[cfg.task].get("test_only"):
        raise ValueError(
            f"--task {cfg.task} has no training examples; evaluate on it: --task math --eval_data {cfg.task}")
    keys = {"question_key": cfg.question_key, "answer_key": cfg.answer_key}  # of files and hub datasets
    train_set = load(cfg.data or cfg.task, "train", seed=cfg.seed, **(keys if cfg.data else {}))
    if cfg.data and not cfg.eval_data:
        if len(train_set) == 1:
            raise ValueError(f"{cfg.data}: one example cannot be trained on and held out; add --eval_data")
        size = min(cfg.eval_size or len(train_set), max(1, len(train_set) // 10))
        order = epoch_order(len(train_set), cfg.seed, "held out")
        eval_set = [train_set[i] for i in sorted(order[:size])]
        train_set = [train_set[i] for i in sorted(order[size:])]
    elif cfg.eval_data:
        eval_set = load_eval_sets(cfg, **keys)
    else:
        eval_set = load(cfg.task, "test", size=cfg.eval_size)

    taken = ADDED_COLUMNS | {"prompt_ids", "completions"}
    for name in sorted(taken & set().union(*train_set, *eval_set)):
        notify(f"note: rewards do not see the column '{name}' of the data, but the trainer's")
    held_out = {example["question"] for example in eval_set if cfg.steps}  # --steps 0 only evaluates
    new = [example for example in train_set if example["question"] not in held_out]
    if not new:
        raise ValueError(f"{cfg.data or cfg.task}: nothing is left to train on: all {len(train_set)} "
                         "training questions are also held out for evaluation")
    if left_out := len(train_set) - len(new):
        notify(f"{left_out} of {len(train_set)} training examples left out: their questions are held out")
    vocabulary = shape.empty_model(cfg.model, cfg.trust_remote_code).config.get_text_config().vocab_size

    def with_prompts(examples, name):
        for example in examples:
            ids = example["prompt_ids"] = encode(example, tokenizer, cfg.template)
            if max(ids, default=0) >= vocabulary:
                raise ValueError(f"--model {cfg.model}: its tokenizer made token {max(ids)} of a prompt, but "
                                 f"its vocabulary has {vocabulary}: is this another model's tokenizer?")
        kept = [example for example in examples if len(example["prompt_ids"]) <= cfg.max_prompt]
        limit = f"--max_prompt {cfg.max_prompt}"
        if len(kept) < at_least:
            raise ValueError(f"{len(kept)} {name} prompts fit into {limit} tokens, {at_least} needed")
        if left_out := len(examples) - len(kept):
            notify(f"{left_out} of {len(examples)} {name} prompts left out: longer than {limit}")
        for lost in {e.get("eval_set") for e in examples} - {e.get("eval_set") for e in kept}:
            raise ValueError(f"--eval_data {lost}: none of its prompts fits into {limit} tokens")
        return kept

    return with_prompts(new, "training"), with_prompts(eval_set, "evaluation")

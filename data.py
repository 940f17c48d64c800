"""Tasks and prompts: a name, a file or a hub set -> examples -> prompt token ids -> batches.

    >>> load("arithmetic", "test", size=1)
    [{'question': '16+16-3-17+10+18', 'answer': '40', 'terms': 6}]

An example is a dict with `question` (str), `answer` (str) and all other columns of its source; the
reward functions receive every column. Nothing here keeps state: the examples are a function of
(source, split, seed), and the batch of a step is a function of (examples, step, seed, rank).
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

# ---------------------------------------------------------------------------------- generated tasks


def arithmetic(rng):
    """A sum of 3 to 6 terms such as 14+2+9. Every running total is in 0..99."""
    terms = [total] = [rng.randint(1, 20)]
    question = str(total)
    for _ in range(rng.randint(2, 5)):
        x = rng.choice([x for x in range(-20, 21) if x and 0 <= total + x <= 99])
        total, question, terms = total + x, question + f"{x:+d}", terms + [x]
    return {"question": question, "answer": str(total), "terms": len(terms)}


def countdown(rng):
    """Make `target` from 3 or 4 numbers, each used once (TinyZero's task)."""
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 4))]
        value, text = numbers[0], str(numbers[0])
        for x in numbers[1:]:
            op = rng.choice([op for op in "+-*/" if op != "/" or value % x == 0])
            value = {"+": value + x, "-": value - x, "*": value * x, "/": value // x}[op]
            text = f"({text} {op} {x})"
        if 10 <= value <= 99:
            shown = rng.sample(numbers, len(numbers))
            question = (f"Combine the numbers {shown} with + - * / and brackets, each number "
                        f"exactly once, so that the result is {value}. Put the expression between "
                        "<answer> and </answer>.")
            return {"question": question, "answer": text[1:-1], "numbers": shown, "target": value}


# name -> where its examples come from (`make`: a function of a random generator; `hub`: repository
# and configuration), and its default for --rewards, the first of which the evaluation counts
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
    """`size` distinct examples. The checksum of a question decides its split: whatever the seed, no
    test question is in the training split."""
    rng, seen = random.Random(f"{make.__name__}/{split}/{seed}"), {}
    while len(seen) < size:
        example = make(rng)
        if (zlib.crc32(example["question"].encode()) % 8 == 0) == (split == "test"):
            seen.setdefault(example["question"], example)
    return list(seen.values())


# ------------------------------------------------------------------------------- files and hub sets


def read_text(path):
    """The text of a UTF-8 file. ValueError names the line of a bad byte."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise ValueError(f"{path}: cannot be read ({e.strerror})") from e
    try:
        text, bad = raw.decode("utf-8-sig"), raw.find(b"\0")
    except UnicodeDecodeError as e:
        bad = e.start
    if bad >= 0:
        line = raw.count(b"\n", 0, bad) + 1
        raise ValueError(f"{path}:{line}: byte {raw[bad]:#04x} is no UTF-8 text: this is a binary "
                         "file or another encoding (to convert it: iconv -f UTF-16 -t UTF-8)")
    return text


def unique(pairs):
    """dict(pairs). Raises ValueError if a key is there twice: the first value would be lost."""
    found = dict(pairs)
    names = [name for name, _ in pairs]
    if len(found) < len(names):
        raise ValueError(f"the key '{max(names, key=names.count)}' is there twice")
    return found


def parse_json(text, path, line=1):
    """json.loads with the file and the line in its ValueError. `line`: of the start of `text`."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}:{line + e.lineno - 1}: not JSON ({e.msg})") from None
    except (ValueError, RecursionError) as e:  # a number of 4,301 digits; brackets in brackets
        raise ValueError(f"{path}:{line}: not readable as JSON ({e})") from None


def read_rows(path):
    """jsonl, json, csv or parquet file -> iterator of (location, row), the former for messages."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        # splitlines() would also split at U+2028
        for n, line in enumerate(read_text(path).split("\n"), 1):
            if line.strip():
                yield f"{path}:{n}", parse_json(line, path, n)
    elif kind == ".json":
        rows = parse_json(read_text(path), path)
        rows = rows.get("data") if isinstance(rows, dict) else rows
        if not isinstance(rows, list):
            raise ValueError(f"{path}: a .json file must hold a list of objects (or one under "
                             "'data')")
        yield from ((f"{path}, item {n}", row) for n, row in enumerate(rows, 1))
    elif kind == ".csv":
        csv.field_size_limit(2**31 - 1)  # of a field, in characters; its default is 131,072
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
        try:  # many files end in columns without a name
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
            reason = shape.first_line(e)
            raise ValueError(f"{path}: not a readable parquet file ({reason})") from None
        yield from ((f"{path}, row {n}", row) for n, row in enumerate(rows, 1))
    else:
        suffix = kind or "no suffix"
        raise ValueError(f"{path}: cannot read '{suffix}' (jsonl, json, csv or parquet)")


def hub_rows(repo, name, split):
    """A split of a hub dataset (or its only one) -> iterator of (location, row)."""
    shape.hub_answers()  # before datasets is imported: it looks only once whether it is offline
    from datasets import load_dataset
    try:
        splits = load_dataset(repo, name)
    except Exception as e:  # gated, renamed, damaged: datasets raises many types
        raise ValueError(
            f"{repo}: not a file here and not loadable from the hub "
            f"({shape.first_line(e, repo)}); --data and --eval_data can name a file") from e
    if split not in splits and len(splits) > 1:
        raise ValueError(f"{repo} has no split '{split}' (it has {', '.join(splits)})")
    rows = splits[split if split in splits else next(iter(splits))]
    yield from ((f"{repo}[{split}], row {n}", row) for n, row in enumerate(rows, 1))


def example_of(row, question_key, answer_key):
    """A row of a file or hub dataset -> example. Raises ValueError that says what is wrong."""
    empty = {name for name in (question_key, answer_key, "reward")
             if row.get(name) is None or not str(row[name]).strip()}
    kind = {name: type(value).__name__ for name, value in row.items()}
    example = row | {"reward": None} if "reward" in row.keys() & empty else dict(row)
    no_answer = answer_key == "none" or answer_key in empty and example.get("reward")
    keys = {question_key: "--question_key"} | ({} if no_answer else {answer_key: "--answer_key"})
    if None in row:  # csv.DictReader's key for surplus fields
        raise ValueError("more fields than the header has")
    if "eval_set" in row:
        raise ValueError("rename the column 'eval_set': the name is taken by the trainer")
    if not isinstance(example.get("reward"), (str, type(None))):
        raise ValueError(f"'reward' must be text, the --rewards of this row, this is "
                         f"{kind['reward']}; rename a column with another meaning")
    for name in [name for name in keys if name in empty]:
        fault = f"'{name}' is empty" if name in row else (
            f"no '{name}' (it has {', '.join(map(str, row))})")
        raise ValueError(f"{fault}; {keys[name]} names another column")
    for name, value in row.items():  # JSON can write half a character; no tokenizer takes it
        if half := re.search("[\ud800-\udfff]", value) if isinstance(value, str) else None:
            raise ValueError(f"'{name}' has {half[0]!a}, half of a surrogate pair, which is no "
                             "character")
    if not isinstance(row[question_key], str):
        raise ValueError(f"'{question_key}' must be text, this is {kind[question_key]}")
    example["question"] = row[question_key]
    if not no_answer:
        if isinstance(row[answer_key], (dict, list)):
            raise ValueError(
                f"'{answer_key}' must be text or a number, this is {kind[answer_key]}; "
                "--answer_key none hands it to the rewards as it is")
        example["answer"] = str(row[answer_key])
    return example


def load(source, split="train", size=0, seed=0, question_key="", answer_key=""):
    """Examples of a task, a file or a hub dataset.

    source: a name in TASKS, a path (.jsonl .json .csv .parquet) or a hub dataset (org/name,
        org/name:config)
    split: "train" or "test"; ignored for files, which have no splits
    size: number of examples, 0 = all (8192 for a generated task)
    answer_key: "none" for rows without an answer, whose reward reads other columns (code, judge)

    Returns a list of dicts with `question` and, unless answer_key is "none", `answer` as strings. A
    row with text in the column `reward` is judged by this spec instead of --rewards; it needs no
    answer. Raises ValueError or FileNotFoundError with one line that names file, line and column.
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
        raise ValueError(f"'{source}' is no task ({', '.join(TASKS)}), no file and no hub dataset "
                         "(org/name)")
    examples = []
    for location, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{location}: a row must be an object with named columns, this is "
                             f"{type(row).__name__}")
        # the first row decides which columns are the question and the answer
        question_key = question_key or next((k for k in QUESTION_KEYS if k in row), "question")
        answer_key = answer_key or next((k for k in ANSWER_KEYS if k in row), "answer")
        try:
            examples.append(example_of(row, question_key, answer_key))
        except ValueError as e:
            raise ValueError(f"{location}: {e}") from None
        if len(examples) == size:
            break
    if not examples:
        raise ValueError(f"{source}: no examples in it")
    columns = dict.fromkeys(name for example in examples for name in example)  # in their order
    return [dict.fromkeys(columns) | example for example in examples]  # None where a row lacks one


# ------------------------------------------------------------------------------ prompts and batches

# "{question}" is replaced by the question. With --eval_budget, the text after "{opener}" (or
# DEFAULT_OPENER) is appended to a completion that was cut off while thinking, to get an answer.
TEMPLATES = {
    "chat": "{opener}</think><answer>",  # the prompt comes from the tokenizer's own chat template
    "none": "{question}",
    # DeepSeek-R1, arXiv:2501.12948, table 1
    "r1": "A conversation between User and Assistant. The user asks a question, and the Assistant "
          "solves it. The assistant first thinks about the reasoning process in the mind and then "
          "provides the user with the answer. The reasoning process and answer are enclosed within "
          "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning "
          "process here </think> <answer> answer here </answer>. User: {question}. Assistant:"
          "{opener}</think> <answer>",
    # Qwen2.5-Math's own prompt (its model card)
    "qwen_math": "<|im_start|>system\n"
                 "Please reason step by step, and put your final answer within \\boxed{}."
                 "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                 "{opener}\n\nThe final answer is \\boxed{",
}
DEFAULT_OPENER = "\n\nThe final answer is "


def read_template(template):
    """--template, a name or a file -> the name, or the file's text without its last line break.

    A run stores the text, not the path; a text with "{question}" is therefore taken as it is.
    Raises ValueError if there is no such file or its prompt has no "{question}".
    """
    if template in TEMPLATES:
        return template
    text, path = template, Path(template)
    if "{question}" not in template:
        if not path.is_file():
            raise ValueError(f"--template {template}: no such file, and not one of "
                             f"{', '.join(TEMPLATES)}")
        text = read_text(path).removesuffix("\n")
    if "{question}" not in split_template(text)[0]:
        raise ValueError(f"--template {path.name}: the prompt needs {{question}} where the "
                         "question belongs, and before {opener}")
    return text


def split_template(template):
    """The name or text of a template -> (text of the prompt, opener of an answer)."""
    prompt, marked, opener = TEMPLATES.get(template, template).partition("{opener}")
    return prompt, opener if marked else DEFAULT_OPENER


def encode(example, tokenizer, template):
    """Token ids (list[int]) of an example's prompt. template: what read_template returns.

    `chat` raises ValueError if the tokenizer has no chat template or one that fails or omits the
    question.
    """
    question, text = example["question"], ""
    if template != "chat":
        prompt, _ = split_template(template)
        return tokenizer(prompt.replace("{question}", question))["input_ids"]
    fault = "this tokenizer has no chat template"
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": question}],
                                                 tokenize=False, add_generation_prompt=True)
            fault = "the tokenizer's chat template leaves the question out"
        except Exception as e:  # a template is a program: any type can come
            fault = f"the tokenizer's chat template fails ({shape.first_line(e)})"
    if not text or question.strip() not in text:
        raise ValueError(f"--template chat: {fault}; use r1, qwen_math or none")
    # the template adds the BOS itself
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def request_seed(*key):
    """A seed for one vLLM request from (run seed, step, index of the prompt, ...).

    vLLM gives sample j of a request the seed + j. The seeds of requests must therefore be far
    apart: with one seed for all prompts, or with seed + step, they would share their noise.
    """
    return random.Random(repr(key)).getrandbits(48)


@functools.lru_cache(maxsize=2)
def epoch_order(length, seed, epoch):
    """A permutation of range(length): a function of (seed, epoch)."""
    return random.Random(f"{seed}/{epoch}").sample(range(length), length)


def batch_at(dataset, step, size, seed=0, rank=0, world=1):
    """The examples of one rank at `step`: its part of a batch of `size` (size % world == 0).

    Every epoch is a new permutation, and a batch may span two epochs, as the third one here.
    >>> [batch_at("abcde", step, 2) for step in (0, 1, 2)]
    [['c', 'd'], ['e', 'b'], ['a', 'e']]
    """
    per_rank = size // world
    first = step * size + rank * per_rank
    batch = []
    for position in range(first, first + per_rank):
        epoch, i = divmod(position, len(dataset))
        batch.append(dataset[epoch_order(len(dataset), seed, epoch)[i]])
    return batch


# -------------------------------------------------------------------------------- the sets of a run

def load_eval_sets(cfg, **keys):
    """The examples of the sets in --eval_data, --eval_size of each. keys: columns, as in load.

    With several sets an example has its set in `eval_set`: a task's name, or a file's without its
    ending. The examples of a task get the task's rewards in `reward`, if the run has others and the
    row has none. Raises ValueError if two sets have the same name.
    """
    sources, examples = [source.strip() for source in cfg.eval_data.split(",")], []
    if "" in sources:
        raise ValueError(f"--eval_data {cfg.eval_data}: no set before or after a comma")
    paths = map(Path, sources)
    names = [path.stem if path.suffix.lower() in FILES else path.name for path in paths]
    names = [re.sub(r"[^\w.-]", "-", name) for name in names]  # it becomes a part of metrics' names
    for source, name in zip(sources, names):
        if names.count(name) > 1:
            raise ValueError(f"--eval_data {cfg.eval_data}: two sets have the name {name}; rename "
                             "a file")
        own = {} if len(sources) == 1 else {"eval_set": name}
        spec = TASKS.get(source, {}).get("rewards", cfg.rewards)
        columns = {} if source in TASKS else keys
        for example in load(source, "test", size=cfg.eval_size, **columns):
            if spec != cfg.rewards and not example.get("reward"):
                example["reward"] = spec
            examples.append(example | own)
    return examples


def load_splits(cfg, tokenizer, at_least=1, notify=print):
    """Training and held-out examples of a run, each with its token ids in `prompt_ids`.

    --data without --eval_data: up to a tenth of its examples are held out. Examples with a prompt
    longer than --max_prompt are left out, and so are training examples whose question is held out;
    notify(text) is called with their number. Raises ValueError or OSError with one line, also if
    fewer than `at_least` examples or none of a set are left, or if a token is not in the model's
    vocabulary.
    """
    if not cfg.data and TASKS[cfg.task].get("test_only"):
        raise ValueError(f"--task {cfg.task} has no training examples; evaluate on it: --task math "
                         f"--eval_data {cfg.task}")
    source = cfg.data or cfg.task
    keys = {"question_key": cfg.question_key, "answer_key": cfg.answer_key}
    train_set = load(source, "train", seed=cfg.seed, **(keys if cfg.data else {}))
    if cfg.eval_data:
        eval_set = load_eval_sets(cfg, **keys)
    elif not cfg.data:
        eval_set = load(cfg.task, "test", size=cfg.eval_size)
    else:
        if len(train_set) == 1:
            raise ValueError(f"{cfg.data}: one example cannot be trained on and held out; add "
                             "--eval_data")
        size = min(cfg.eval_size or len(train_set), max(1, len(train_set) // 10))
        order = epoch_order(len(train_set), cfg.seed, "held out")
        eval_set = [train_set[i] for i in sorted(order[:size])]
        train_set = [train_set[i] for i in sorted(order[size:])]

    taken = ADDED_COLUMNS | {"prompt_ids", "completions"}
    for name in sorted(taken & set().union(*train_set, *eval_set)):
        notify(f"note: rewards do not see the column '{name}' of the data, but the trainer's")
    held_out = {example["question"] for example in eval_set if cfg.steps}  # 0: evaluates only
    new = [example for example in train_set if example["question"] not in held_out]
    if not new:
        raise ValueError(f"{source}: nothing is left to train on: all {len(train_set)} training "
                         "questions are also held out for evaluation")
    if left_out := len(train_set) - len(new):
        notify(f"{left_out} of {len(train_set)} training examples left out: their questions are "
               "held out")
    model = shape.empty_model(cfg.model, cfg.trust_remote_code)
    vocabulary = model.config.get_text_config().vocab_size
    limit, kept = f"--max_prompt {cfg.max_prompt}", {}
    for name, examples in (("training", new), ("evaluation", eval_set)):
        for example in examples:
            ids = example["prompt_ids"] = encode(example, tokenizer, cfg.template)
            if max(ids, default=0) >= vocabulary:
                raise ValueError(
                    f"--model {cfg.model}: its tokenizer made token {max(ids)} of a prompt, but "
                    f"its vocabulary has {vocabulary}: is this another model's tokenizer?")
        kept[name] = [e for e in examples if len(e["prompt_ids"]) <= cfg.max_prompt]
        count = len(kept[name])
        if count < at_least:
            raise ValueError(f"{count} {name} prompts fit into {limit} tokens, {at_least} needed")
        if count < len(examples):
            notify(f"{len(examples) - count} of {len(examples)} {name} prompts left out: longer "
                   f"than {limit}")
        for lost in {e.get("eval_set") for e in examples} - {e.get("eval_set") for e in kept[name]}:
            raise ValueError(f"--eval_data {lost}: none of its prompts fits into {limit} tokens")
    return kept["training"], kept["evaluation"]

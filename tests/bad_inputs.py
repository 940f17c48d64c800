"""Bad inputs, and a part of the line that each must give. tests/test_config.py runs them all.

Each is given to the first function of main() that must refuse it; some go through main() itself.
"""
import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import typing
from pathlib import Path
from typing import Callable, NamedTuple
from unittest import mock

import data
import nano_rlvr as nr
import runtime.flags

TINY = Path(__file__).resolve().parents[1] / "models/tiny"
USAGE = "usage"  # tyro's own message and exit code 2
ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(40)]
LINES = "\n".join(json.dumps(row) for row in ROWS)


class Case(NamedTuple):
    id: str
    call: Callable  # function of an empty folder that must fail
    says: str  # a part of the line, or USAGE


def flags():
    """Every numeric flag outside its range or not finite, every flag with another word."""
    for names, low, high in runtime.flags.RANGES:
        for name in names.split():
            below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
            for value in (below, above, math.nan, math.inf, -math.inf):
                def check(_, change={name: value}):
                    runtime.flags.check(dataclasses.replace(nr.Config(), **change))
                yield Case(f"{name}={value}", check, f"--{name} {value}: must be")
    for name, hint in typing.get_type_hints(nr.Config).items():
        if hint is not str:
            yield Case(name, lambda _, x=f"--{name}=x": nr.parse_config([x]), USAGE)


FLAGS = [  # a command line, a part of the line
    ("--seed -1", "--seed -1: must be from 0 to 4294967295"),
    ("--samples 1 --baseline none", "--samples 1 needs --baseline none --scale none"),
    ("--top_p 0.9", "--top_p needs --correction none --temperature 1"),
    ("--delta 2 --clip_high 1.5", "--delta 2: must be above 1 + clip_high = 2.5"),
    ("--algo grpo --resample 1", "it needs --drop_flat_groups"),
    ("--rollout my_rollout", "--rollout my_rollout: must be a file and a function in it"),
    ("--lora_rank 4 --zero_stage 3", "--lora_rank needs --zero_stage 1 or 2"),
    ("--prompts 6 --minibatches 4", "--minibatches 4 must divide the 6 prompts"),
    ("--tp 2", "--tp 2: must divide the number of ranks, 1"),
    ("--task chess", "--task chess: choose one of arithmetic"),
    ("--algo=", "--algo : choose one of grpo"),
    ("--template nowhere.txt", "--template nowhere.txt: not one of chat, none"),
    ("--rewards gsm9k", "unknown reward 'gsm9k'"),
    *((f"--name {name}", "must be the plain name of a folder") for name in (
        "a/b", "..", "a\0b", "a\nb")),
    ("--out a\0b", "created in --out 'a\\x00b'"),
    ("--name mine --resume {dir}/run", "are two runs; leave --name out"),
    ("--resume", "--resume needs the folder of a run, or --name"),
    ("--resume {dir}/run", "run/config.json cannot be read"),
    ("--learning_rate 1", USAGE), ("--steps", USAGE), ("--model", USAGE), ("train", USAGE),
]
MAIN = [  # a command line, a part of the line: later checks, by main() itself
    ("--gate foo", USAGE),
    ("--clip_low 2", "--clip_low 2.0: must be from 0 to 1"),
    ("--rollout nowhere.py:f", "rollout file 'nowhere.py' does not exist"),
    ("--data nowhere.py:make", "data file 'nowhere.py' does not exist"),
    ("--eval_data arithmetic,nowhere.py:make", "data file 'nowhere.py' does not exist"),
    ("--name mine", "holds a run; choose another --name"),
    ("--out {dir}/a.jsonl/x", "Not a directory"),
    ("--name " + "x" * 300, "File name too long"),
    ("--memory_gb 0.001", "this run may use 0.0"),
    ("--max_prompt 3", "0 training prompts fit"),
    ("--task aime24", "--task aime24 has no training examples"),
    ("--data {dir}", "{dir}: no such file, no task"),
    ("--eval_data {dir}/a.jsonl,", "no such file, no task (arithmetic"),
    ("--data {dir}/a.jsonl --answer_key gold", "a.jsonl:1: no 'gold'"),
    ("--data {dir}/a.jsonl --eval_data {dir}/a.jsonl", "nothing is left to train on"),
    ("--rewards os:getcwd", "--rewards getcwd: it is no reward function"),
    ("--rewards code", "reward code: it reads the column 'tests', which arithmetic does"),
    ("--model Qwen2.5-Math-99B", "--model Qwen/Qwen2.5-Math-99B: its config.json cannot"),
    ("--model {dir}", "its config.json cannot be loaded"),
]
UNREADABLE = "cannot be read (UnicodeDecodeError"
THIRD = "def make(*_): return [{'question': '1', 'answer': answer} for answer in ('2', '2', '')]"
DATA = [  # name, content of the file, a part of the line
    ("other.py:make", "def made(): pass", "data {dir}/other.py:make: AttributeError: module"),
    ("syntax.py:make", "def make(", "syntax.py:make: SyntaxError: '(' was never closed"),
    ("short.py:make", "def make(split): return []", "takes 1 positional argument but 3 were given"),
    ("none.py:make", "def make(*_): pass", "none.py:make: TypeError: 'NoneType' object is not"),
    ("empty.py:make", "def make(*_): return []", "empty.py:make: no examples in it"),
    ("fails.py:make", "def make(*_):\n    yield {}\n    raise OSError('a\\nb')",
     "fails.py:make: OSError: a b (line 3)"),
    ("exits.py:make", "def make(*_): raise SystemExit(3)", "exits.py:make: SystemExit: 3 (line 1)"),
    ("texts.py:make", "def make(*_): return ['1+1']", "texts.py:make, row 1: a row must be an obj"),
    ("third.py:make", THIRD, "third.py:make, row 3: 'answer' is empty; --answer_key names"),
    ("keys.py:make", "def make(*_): return [{1: 2}]", "keys.py:make, row 1: more fields than the "
     "header has, or a column whose name is not text"),
    ("set.py:make", "def make(*_): return [{'question': '1', 'answer': {1}}]",
     "set.py:make: TypeError: Object of type set is not JSON"),
    ("blank.jsonl", "\n \n\n", "blank.jsonl: no examples in it"),
    ("null.jsonl", '{"question": null, "answer": 1}', "null.jsonl:1: 'question' is empty"),
    ("number.jsonl", '{"question": 3, "answer": 1}', "number.jsonl:1: 'question' must be text"),
    ("list.jsonl", '{"question": "1+1", "answer": [2]}', "list.jsonl:1: 'answer' must be text or"),
    ("array.jsonl", LINES + "\n[1, 2]", "array.jsonl:41: a row must be an object"),
    ("names.jsonl", '{"ask": "1", "gold": 2}', "names.jsonl:1: no 'question' (it has ask, gold)"),
    *((f"twice.{kind}", text, "'answer' is there twice") for kind, text in (
        ("jsonl", '{"question": "1+1", "answer": "2", "answer": "3"}'),
        ("csv", "question,answer,answer\n1+1,2,3\n"))),
    ("broken.jsonl", LINES + '\n{"question": ', "broken.jsonl:41: cannot be read (JSON"),
    ("deep.jsonl", "[" * 100_000, "deep.jsonl:1: cannot be read (RecursionError: maximum"),
    ("half.jsonl", '{"question": "\\ud83d", "answer": 1}', "half.jsonl:1: 'utf-8' codec"),
    ("utf16.jsonl", LINES.encode("utf-16"), "utf16.jsonl:2: " + UNREADABLE),
    ("object.json", json.dumps(ROWS[0]), "object.json: not a jsonl, csv or parquet file, nor"),
    ("wide.csv", "question,answer\n1+1,2,3\n", "wide.csv, row 1: more fields than"),
    ("short.csv", "question,answer\n1+1,2\n1+2\n", "short.csv, row 2: 'answer' is empty;"),
    ("quote.csv", 'question,answer\n1+1,2\n"1+2,3\n', "quote.csv: cannot be read (Error: "),
    ("junk.parquet", b"PAR1 junk PAR1", "junk.parquet: cannot be read (ArrowInvalid"),
]


def config(**changes):
    """A fault of a model folder: other values in config.json; None removes a field."""
    def plant(folder):
        fields = json.loads((folder / "config.json").read_text()) | changes
        fields = {name: value for name, value in fields.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(fields))
    return plant


def weights(change):
    """A fault of a model folder: change(tensors) edits the dict of tensors in place."""
    def plant(folder):
        from safetensors.torch import load_file, save_file
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return plant


def content(name, text):
    """A fault of a model folder: a file with other content."""
    return lambda folder: (folder / name).write_text(text)


CHAT = "chat_template.jinja"
UP = "model.layers.1.mlp.up_proj.weight"
BUILD, READ = "its config.json cannot be loaded", "its weights cannot be loaded"
TOKENIZER, FIT = "its tokenizer cannot be loaded", "its weights do not fit its config.json"
MODELS = [  # id, fault of a copy of the bundled model, a part of the line
    ("weights truncated", lambda f: os.truncate(f / "model.safetensors", 100_000), READ),
    ("only a .bin", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), READ),
    ("a tensor missing", weights(lambda t: t.pop(UP)), FIT + ": 1 tensors are missing"),
    ("a tensor too many", weights(lambda t: t.update(extra=t[UP].clone())), "one is extra"),
    ("more layers", config(num_hidden_layers=5, layer_types=None), FIT + ": 12 tensors"),
    ("untied embeddings", config(tie_word_embeddings=False), "one is lm_head.weight"),
    ("an unknown model type", config(model_type="qwen99"), BUILD),
    ("code of its own", config(auto_map={"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"},
                               model_type="own"), "code of its own needs --trust_remote_code"),
    ("a sliding window", config(sliding_window=64, use_sliding_window=True, max_window_layers=0,
                                layer_types=["sliding_attention"] * 4), "sliding window are 64"),
    ("few positions", config(max_position_embeddings=95), "or its sliding window are 95"),
    ("config.json a list", content("config.json", "[]"), BUILD),
    ("tokenizer.json broken", content("tokenizer.json", "{"), TOKENIZER),
    ("no tokenizer.json", lambda f: (f / "tokenizer.json").unlink(), "(ValueError: it has no"),
    ("no chat template", lambda f: (f / CHAT).unlink(), "chat_template is not set"),
    ("a broken template", content(CHAT, "{% for m in %}"), "chat template fails"),
    ("no question", content(CHAT, "Hello"), "leaves the question out"),
    ("a damaged record", content(runtime.flags.RECORD, "{}"), runtime.flags.RECORD + " is damaged"),
]


def cases():
    """All bad inputs."""
    yield from flags()
    for table, function in (FLAGS, nr.parse_config), (MAIN, nr.main):
        for line, says in table:
            def call(folder, line=line, function=function):
                words = line.replace("{dir}", str(folder)).split(" ")
                function(["--out", str(folder), *words])
            yield Case(line, call, says)
    for name, text, says in DATA:
        def load(folder, name=name, text=text):
            file = folder / name.partition(":")[0]
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            data.load(str(folder / name))
        yield Case(name, load, says)
    for fault, plant, says in MODELS:
        def load_model(folder, plant=plant):
            shutil.copytree(TINY, folder / "model")
            plant(folder / "model")
            argv = f"--model {folder}/model --template chat --max_prompt 64 --max_tokens 32"
            cfg = nr.parse_config(argv.split())
            tokenizer = runtime.flags.load_tokenizer(cfg)
            data.encode(ROWS[0], tokenizer, cfg.template)
        yield Case(fault, load_model, says)


def accepted(*_):
    raise AssertionError("accepted: vLLM would be loaded now")


def fault_of(case, folder):
    """What is wrong with the answer to a bad input, or ""."""
    (folder / "mine").mkdir(parents=True)
    (folder / "mine/metrics.jsonl").write_text("{}")
    (folder / "run").mkdir()
    (folder / "run/config.json").write_text("{")
    (folder / "a.jsonl").write_text(LINES)
    err, line = io.StringIO(), "accepted"
    with mock.patch.object(nr, "Sampler", accepted), contextlib.redirect_stderr(err), \
            contextlib.redirect_stdout(io.StringIO()):
        try:
            case.call(folder)
        except SystemExit as e:
            line = USAGE if e.code == 2 else str(e.code)
        except Exception as e:  # main() makes a line of ValueError and OSError, nothing else
            line = str(e) if isinstance(e, (ValueError, OSError)) else repr(e)
    says = case.says.replace("{dir}", str(folder))
    more = [text for text in err.getvalue().splitlines() if not text.startswith("note: ")]
    left = [path.name for path in folder.glob("tiny-*")]  # the folder of a run without a name
    if says not in line or len(line.splitlines()) != 1 or len(line) > 900:
        return f"{case.id}: without {says!r}, or not one line: {line[:2000]!r}"
    if line is not USAGE and (more or left):
        return f"{case.id}: more lines on stderr: {more}, or left behind: {left}"
    return ""


def faults(folder):
    """What is wrong with the answers to all bad inputs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = [fault_of(case, folder / str(i)) for i, case in enumerate(cases())]
    return [fault for fault in found if fault]

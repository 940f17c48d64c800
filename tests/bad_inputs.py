"""Bad inputs, enumerated by rule, and a part of the line that each must give.

tests/test_config.py runs them all.
"""
import contextlib
import io
import json
import math
import os
import shutil
import time
import typing
from pathlib import Path
from typing import Callable, NamedTuple
from unittest import mock

import nano_rlvr as nr
import runtime.flags

TINY = Path(__file__).resolve().parents[1] / "models/tiny"
USAGE = "usage"  # tyro's own message and exit code 2
SMALL = ("--task arithmetic --template chat --max_prompt 64 --max_tokens 32 --prompts 4 --samples 4 "
         "--eval_size 16").split()  # flags for a copy of the bundled model
ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(40)]
LINES = "\n".join(json.dumps(row) for row in ROWS)


class Case(NamedTuple):
    group: str
    id: str
    build: Callable  # empty folder -> argv; it may write files into the folder
    says: str  # a part of the line, or USAGE


def flags():
    """Every numeric flag outside its range or not finite, every choice and switch with an unknown value."""
    for name, hint in typing.get_type_hints(nr.Config).items():
        values = {}
        if hint in (int, float):
            interval = runtime.flags.range_of(name)[0]
            low, high = map(float, interval[1:-1].split(","))
            if hint is int:
                below, above = int(low) - 1, int(high) + 1
            else:
                below = low if interval[0] == "(" else math.nextafter(low, -math.inf)
                above = high if interval[-1] == ")" else math.nextafter(high, math.inf)
            values = {value: f"--{name} {hint(value)}: must be" for value in (below, above, 10**18)}
            for value in ("nan", "inf", "-inf"):
                values[value] = f"--{name} {value}: must be" if hint is float else USAGE
            values |= {"many": USAGE, "": USAGE}
        elif typing.get_origin(hint) is typing.Literal:
            values = {"unknown": USAGE, "": USAGE}
        elif hint is bool:
            values = {"maybe": USAGE}
        for value, says in values.items():
            yield Case("flags", f"{name}={value}", lambda _, flag=f"--{name}={value}": [flag], says)


COMBINATIONS = [  # argv, a part of the line
    ("--samples 1", "--samples 1: a group of one has no mean or deviation"),
    ("--samples 1 --baseline none", "--samples 1: a group of one has no mean or deviation"),
    ("--top_p 0.9", "the importance correction would be wrong"),
    ("--top_k 20", "the importance correction would be wrong"),
    ("--top_k 20 --correction none --temperature 0.7", "--temperature 1 with them"),
    ("--top_p 0.5 --correction token_mask", "the importance correction would be wrong"),
    ("--delta 1.1", "--delta 1.1: must be above 1 + clip_high = 1.2"),
    ("--delta 2 --clip_high 1.5", "--delta 2: must be above 1 + clip_high = 2.5"),
    ("--resample 2", "it needs --drop_flat_groups"),
    ("--rollout my_rollout", "--rollout my_rollout: must be a file and a function in it"),
    ("--eval_n 2 --eval_select gsm9k", "--eval_select gsm9k: unknown reward 'gsm9k'"),
    ("--eval_n 2 --eval_select os:getcwd", "--eval_select getcwd: it is no reward function"),
    ("--rewards gsm9k", "--rewards gsm9k: unknown reward 'gsm9k'"),
    ("--rollout nowhere.py:f", "rollout file 'nowhere.py' does not exist"),
    ("--algo grpo --resample 1", "it needs --drop_flat_groups"),
    ("--lora_rank 4 --zero_stage 3", "--lora_rank needs --zero_stage 1 or 2"),
    ("--lora_rank 4 --ref_reset_every 5", "--ref_reset_every needs a separate reference"),
    ("--prompts 6 --minibatches 4", "--minibatches 4 must divide"),
    ("--prompts 4 --minibatches 8", "--minibatches 8 must divide"),
    ("--task aime24", "--task aime24 has no training examples"),
    ("--task math500", "--task math500 has no training examples"),
    ("--task chess", "--task chess: choose one of arithmetic"),
    ("--algo ppo", "--algo ppo: choose one of grpo"),
    ("--algo=", "--algo : choose one of grpo"),
    ("--max_tokens 4000", "more than the 2048 positions"),
    ("--max_prompt 2048", "more than the 2048 positions"),
    ("--max_prompt 3", "0 training prompts fit"),
    ("--memory_gb 0.001", "this run may use 0.0"),
    ("--eval_data nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("--data nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("--data nowhere.csv", "nowhere.csv: no such file"),
    ("--data nowhere", "'nowhere' is no task"),
    ("--data a/b/c", "'a/b/c' is no task"),
    ("--data no/such-set", "no/such-set is not in the local cache"),
    ("--data no/such-set:main", "no/such-set is not in the local cache"),
    ("--task gsm8k", "openai/gsm8k: not a file here and not loadable from the hub"),
    ("--model no/such-model", "no/such-model is not in the local cache); --model can be a local folder"),
    ("--model Qwen2.5-Math-99B", "--model Qwen/Qwen2.5-Math-99B: no folder and not loadable from the hub"),
    ("--model a/b/c", "--model a/b/c: no folder and not loadable from the hub"),
    ("--model=", "--model .: no model can be built from its config.json"),
    ("--learning_rate 1", USAGE),
    ("--steps", USAGE),
    ("train", USAGE),
]
REWARDS = [  # spec, a part of the line
    ("gsm9k", "gsm8k"),
    ("gsm8k,gsm8k", "named twice"),
    ("gsm8k:nan", "is not a weight"),
    ("gsm8k:inf", "is not a weight"),
    ("gsm8k:much", "is not a weight"),
    (",", "unknown reward ''"),
    ("no_such_file.py:f", "no_such_file.py"),
    ("no_such_module:f", "no_such_module"),
    ("os:no_such_function", "no_such_function"),
    ("os:getcwd", "--rewards getcwd: it is no reward function, which is f(completions, **columns)"),
    ("os:sep", "is not a function"),
    ("time:sleep", "--rewards sleep: it is no reward function"),
    ("builtins:print", "--rewards print: it is no reward function"),
    ("builtins:dict", "--rewards dict: it is no reward function"),
    ("json:dumps", "--rewards dumps: it reads the column 'obj', which arithmetic does not have"),
    ("code", "--rewards code: it reads the column 'tests', which arithmetic does not have (it has question"),
    ("gsm8k,code:0.1", "--rewards code: it reads the column 'tests'"),
    ("countdown", "--rewards countdown: it reads the column 'numbers'"),
    ("instruction", "--rewards instruction: it reads the column 'instruction_id_list'"),
    ("{dir}/r.py:no_completions", "--rewards no_completions: it is no reward function"),
    ("{dir}/r.py:needs_gold", "--rewards needs_gold: it reads the column 'gold'"),
    ("{dir}/r.py:each_needs_gold", "--rewards each_needs_gold: it reads the column 'gold'"),
    ("{dir}/r.py:number", "is not a function"),
    ("{dir}/r.py:missing", "missing"),
]
REWARD_FILE = """
from rewards import each
number = 3
def no_completions(texts): return [0.0] * len(texts)
def needs_gold(completions, gold): return [0.0] * len(completions)
@each
def each_needs_gold(text, gold): return 0.0
"""
OUT = [  # argv, a part of the line
    ("--name ../x", "--name '../x': must be the plain name of a folder"),
    ("--name /tmp/x", "--name '/tmp/x': must be the plain name of a folder"),
    ("--name a/b", "--name 'a/b': must be the plain name of a folder"),
    ("--name ..", "--name '..': must be the plain name of a folder"),
    ("--name .", "--name '.': must be the plain name of a folder"),
    ("--name a\0b", "must be the plain name of a folder"),
    ("--name a\nb", "must be the plain name of a folder"),
    ("--name " + "x" * 300, "must be the plain name of a folder"),
    ("--name mine --out {dir}", "holds a run already; choose another --name"),
    ("--resume {dir}/mine", "no folder of a run"),
    ("--resume nowhere", "--resume nowhere: no folder of a run"),
    ("--resume", "--resume needs the folder of a run, or --name"),
    ("--out {dir}/a.jsonl", "cannot write into {dir}/a.jsonl (Not a directory)"),
    ("--out {dir}/a.jsonl/x", "cannot write into {dir}/a.jsonl (Not a directory)"),
    ("--out /proc/x", "cannot write into /proc"),
    ("--out a\0b", "--out 'a\\x00b': has a character that cannot be printed"),
]
NO_UTF8 = "is no UTF-8 text"
DATA = [  # name, content of the file, a part of the line
    ("empty.jsonl", "", "empty.jsonl: no examples in it"),
    ("blank.jsonl", "\n \n\n", "blank.jsonl: no examples in it"),
    ("one.jsonl", json.dumps(ROWS[0]), "one.jsonl: one example cannot be trained on and held out"),
    ("same.jsonl", "\n".join([json.dumps(ROWS[0])] * 9), "same.jsonl: nothing is left to train on"),
    ("hole.jsonl", LINES + '\n{"question": "1+1"}', "hole.jsonl:41: no 'answer'"),
    ("null.jsonl", '{"question": null, "answer": 1}', "null.jsonl:1: 'question' is empty; --question_key"),
    ("space.jsonl", '{"question": " ", "answer": 1}', "space.jsonl:1: 'question' is empty"),
    ("number.jsonl", '{"question": 3, "answer": 1}', "number.jsonl:1: 'question' must be text, this is int"),
    ("chat.jsonl", '{"question": [{"role": "user"}], "answer": 1}', "must be text, this is list"),
    ("dict.jsonl", '{"question": "1+1", "answer": {"value": 2}}', "dict.jsonl:1: 'answer' must be text or"),
    ("list.jsonl", '{"question": "1+1", "answer": [2]}', "list.jsonl:1: 'answer' must be text or a number"),
    ("array.jsonl", LINES + "\n[1, 2]", "array.jsonl:41: a row must be an object with named columns"),
    ("names.jsonl", '{"ask": "1+1", "gold": 2}', "names.jsonl:1: no 'question' (it has ask, gold); --ques"),
    ("broken.jsonl", LINES + '\n{"question": ', "broken.jsonl:41: not JSON"),
    ("python.jsonl", "{'question': '1+1'}", "python.jsonl:1: not JSON"),
    ("twice.jsonl", '{"question": "1", "answer": 1, "answer": 2}', "twice.jsonl:1: not readable as JSON (the "
     "key 'answer' is there twice)"),
    ("digits.jsonl", '{"question": "1", "answer": ' + "9" * 5000 + "}", "digits.jsonl:1: not readable as JS"),
    ("deep.jsonl", "[" * 100_000, "deep.jsonl:1: not readable as JSON (maximum recursion depth"),
    ("half.jsonl", LINES + '\n{"question": "\\ud83d", "answer": 1}', "half.jsonl:41: 'question' has '\\ud"),
    ("half2.jsonl", '{"question": "a", "answer": "\\udfff"}', "half2.jsonl:1: 'answer' has '\\udfff'"),
    ("half3.jsonl", '{"question": "a", "answer": "1", "x": "\\udfff"}', "half3.jsonl:1: 'x' has '\\udfff'"),
    ("utf16.jsonl", LINES.encode("utf-16"), "utf16.jsonl:1: byte 0xff " + NO_UTF8),
    ("utf16le.jsonl", LINES.encode("utf-16-le"), "utf16le.jsonl:1: byte 0x00 " + NO_UTF8),
    ("utf32.jsonl", LINES.encode("utf-32-be"), "utf32.jsonl:1: byte 0x00 " + NO_UTF8),
    ("latin.jsonl", LINES.encode() + b'\n{"question": "caf\xe9"}', "latin.jsonl:41: byte 0xe9 " + NO_UTF8),
    ("nul.jsonl", LINES.encode() + b"\n\0", "nul.jsonl:41: byte 0x00 " + NO_UTF8),
    ("zip.jsonl", b"PK\x03\x04" + bytes(range(256)), "zip.jsonl:2: byte 0x80 "),
    ("gzip.jsonl", b"\x1f\x8b\x08\x00", "gzip.jsonl:1: byte 0x8b " + NO_UTF8),
    ("object.json", json.dumps(ROWS[0]), "object.json: a .json file must hold a list of objects"),
    ("string.json", '"text"', "string.json: a .json file must hold a list of objects"),
    ("lines.json", LINES, "lines.json:2: not JSON (Extra data)"),
    ("broken.json", '[\n{"question": \n', "broken.json:3: not JSON"),
    ("none.json", "[]", "none.json: no examples in it"),
    ("text.json", '["1+1"]', "text.json, item 1: a row must be an object with named columns, this is str"),
    ("latin.json", b'[\n"caf\xe9"]', "latin.json:2: byte 0xe9 " + NO_UTF8),
    ("empty.csv", "", "empty.csv: no examples in it"),
    ("header.csv", "question,answer\n", "header.csv: no examples in it"),
    ("wide.csv", "question,answer\n1+1,2,3\n", "wide.csv:2: more fields than the header has"),
    ("short.csv", "question,answer\n1+1,2\n1+2\n", "short.csv:3: 'answer' is empty; --answer_key"),
    ("quote.csv", 'question,answer\n1+1,2\n"1+2,3\n', "quote.csv:2: not CSV (unexpected end of data)"),
    ("twice.csv", "question,answer,x,answer\n1+1,2,3,4\n", "two columns have the name 'answer'"),
    ("latin.csv", b"question,answer\n1+1,2\ncaf\xe9,3\n", "latin.csv:3: byte 0xe9 " + NO_UTF8),
    ("nul.csv", b"question,answer\n1+1,\x002\n", "nul.csv:2: byte 0x00 " + NO_UTF8),
    ("semicolon.csv", "question;answer\n1+1;2\n", "semicolon.csv:2: no 'question'"),
    ("junk.parquet", b"PAR1 junk PAR1", "junk.parquet: not a readable parquet file"),
    ("empty.parquet", b"", "empty.parquet: not a readable parquet file"),
    ("data.txt", "1+1=2", "data.txt: cannot read '.txt'"),
    ("data", "1+1=2", "data: cannot read 'no suffix'"),
    ("data.jsonl.gz", b"\x1f\x8b", "data.jsonl.gz: cannot read '.gz'"),
]
DATA_FLAGS = [  # argv, a part of the line
    ("--data {dir}/mem.jsonl", "mem.jsonl: cannot be read (Input/output error)"),
    ("--data {dir}", "{dir}: a folder; name a file in it"),
    ("--eval_data {dir}/a.jsonl,", "a.jsonl,: no set before or after a comma"),
    ("--eval_data ,{dir}/a.jsonl", "a.jsonl: no set before or after a comma"),
    ("--eval_data {dir}", "{dir}: a folder; name a file in it"),
    ("--data {dir}/a.jsonl --question_key none", "a.jsonl:1: no 'none'"),
    ("--data {dir}/a.jsonl --question_key Question", "a.jsonl:1: no 'Question' (it has question, answer)"),
    ("--data {dir}/a.jsonl --answer_key gold", "a.jsonl:1: no 'gold'"),
    ("--data {dir}/a.jsonl --rewards code", "code: it reads the column 'tests', which {dir}/a.jsonl"),
    ("--data {dir}/a.jsonl --eval_data {dir}/a.jsonl", "nothing is left to train on: all 40"),
    ("--task countdown --eval_data {dir}/a.jsonl", "countdown: it reads the column 'numbers', which {dir}"),
    ("--data {dir}/ask.jsonl --question_key ask --answer_key none", "gsm8k: it reads the column 'answer'"),
    ("--data {dir}/a.jsonl --max_prompt 1", "0 training prompts fit into --max_prompt 1 tokens"),
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
    """A fault of a model folder: a file with other content; None removes it, a function changes its bytes."""
    def plant(folder):
        path = folder / name
        if text is None:
            path.unlink()
        elif callable(text):
            path.write_bytes(text(path.read_bytes()))
        else:
            path.write_text(text)
    return plant


def both(*faults):
    """Several faults of a model folder."""
    return lambda folder: [plant(folder) for plant in faults]


def shard(folder):
    """An index of two weight files, one of which is missing."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors",
                                            "model.embed_tokens.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
LACK, MORE = "its weights lack tensors of the model: ", "its weights have tensors that the model lacks: "
SHAPES, READ = "its weights have other shapes than config.json says", "its weights cannot be read"
BUILD, TOKENIZER = "no model can be built from its config.json", "no tokenizer can be loaded from it"
MODELS = [  # id, fault of a copy of the bundled model, a part of the line
    ("weights truncated", content("model.safetensors", lambda b: b[:len(b) // 2]), READ),
    ("weights one byte short", content("model.safetensors", lambda b: b[:-1]), READ),
    ("weights empty", content("model.safetensors", lambda b: b""), READ),
    ("weights junk", content("model.safetensors", lambda b: b"junk" * 99), READ),
    ("weights missing", content("model.safetensors", None), READ),
    ("a pointer of git-lfs", content("model.safetensors", "version https://git-lfs.github.com/spec"), READ),
    ("a shard missing", shard, READ),
    ("only a .bin", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "to convert one"),
    ("a tensor missing", weights(lambda t: t.pop(UP)), LACK + UP),
    ("many tensors missing", weights(lambda t: [t.pop(n) for n in list(t) if "layers" in n]), " more"),
    ("a tensor too many", weights(lambda t: t.update({"model.extra": t[UP].clone()})), MORE + "model.extra"),
    ("a tensor of another shape", weights(lambda t: t.update({UP: t[UP][1:].clone()})),
     UP + " [383, 128] instead of [384, 128]"),
    ("more layers than weights", config(num_hidden_layers=5, layer_types=None), LACK + "model.layers.4"),
    ("fewer layers than weights", config(num_hidden_layers=3, layer_types=None), MORE + "model.layers.3"),
    ("another hidden size", config(hidden_size=256), SHAPES),
    ("another MLP", config(intermediate_size=400), SHAPES),
    ("a larger vocabulary", config(vocab_size=300), "[263, 128] instead of [300, 128]"),
    ("untied embeddings", config(tie_word_embeddings=False), LACK + "lm_head.weight"),
    ("a smaller vocabulary", config(vocab_size=200, pad_token_id=0), SHAPES),
    ("the pad id outside", config(pad_token_id=263), BUILD),
    ("no heads", config(num_attention_heads=0), BUILD),
    ("three heads", config(num_attention_heads=3), "attention heads of size 42 are not supported"),
    ("an unknown activation", config(hidden_act="softplus9"), BUILD),
    ("a size in words", config(hidden_size="large"), BUILD),
    ("a negative size", config(hidden_size=-128), BUILD),
    ("no model type", config(model_type=None), BUILD),
    ("an unknown model type", config(model_type="qwen99"), BUILD),
    ("a recurrent model", config(model_type="mamba", layer_types=None), "are not supported"),
    ("code of its own", config(auto_map={"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"},
                               model_type="own"), "--trust_remote_code runs it"),
    ("heads of size 8", config(num_attention_heads=16), "attention heads of size 8 are not supported"),
    ("a sliding window", config(sliding_window=64, use_sliding_window=True, max_window_layers=0,
                                layer_types=["sliding_attention"] * 4), "sliding window of"),
    ("a window in half of the layers", config(
        sliding_window=512, use_sliding_window=True, max_window_layers=2,
        layer_types=["full_attention"] * 2 + ["sliding_attention"] * 2), "a sliding window in some layers"),
    ("few positions", config(max_position_embeddings=95), "more than the 95 positions"),
    ("config.json missing", content("config.json", None), BUILD),
    ("config.json empty", content("config.json", ""), BUILD),
    ("config.json broken", content("config.json", "{"), BUILD),
    ("config.json a list", content("config.json", "[]"), BUILD),
    ("config.json binary", content("config.json", lambda b: bytes(range(128, 256))), BUILD),
    ("no tokenizer", lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
     TOKENIZER + " (it has no tokens)"),
    ("tokenizer.json broken", content("tokenizer.json", "{"), TOKENIZER),
    ("tokenizer.json missing", content("tokenizer.json", None), TOKENIZER + " (it has no tokens)"),
    ("no chat template", content("chat_template.jinja", None), "no chat template"),
    ("an empty chat template", content("chat_template.jinja", ""), "no chat template"),
    ("a blank chat template", content("chat_template.jinja", " "), "leaves the question out"),
    ("a broken chat template", content("chat_template.jinja", "{% for m in %}"), "chat template fails"),
    ("an undefined name", content("chat_template.jinja", "{{ a.b }}"), "fails (UndefinedError: "),
    ("a division by zero", content("chat_template.jinja", "{{ 1 / 0 }}"), "fails (ZeroDivisionError: "),
    ("a refusing template", content("chat_template.jinja", "{{ raise_exception('x') }}"), "TemplateError: x"),
    ("a template without the question", content("chat_template.jinja", "Hello"), "leaves the question out"),
    ("another model's tokenizer", both(config(vocab_size=200, pad_token_id=0), weights(lambda t: t.update(
        {EMBEDDING: t[EMBEDDING][:200].clone()}))), "is this another model's tokenizer?"),
    ("a damaged record", content(runtime.flags.RECORD, "{"), runtime.flags.RECORD + " is damaged"),
    ("a record without config", content(runtime.flags.RECORD, "{}"), runtime.flags.RECORD + " is damaged"),
    ("a record with lr inf", content(runtime.flags.RECORD, '{"config": {"lr": Infinity}}'), "--lr inf: must be"),
    ("a record of the wrong type", content(runtime.flags.RECORD, '{"config": {"steps": "many"}}'), "is damaged"),
]


def cases():
    """All bad inputs."""
    yield from flags()
    for group, table in (("combinations", COMBINATIONS), ("output folder", OUT), ("data flags", DATA_FLAGS)):
        for argv, says in table:
            yield Case(group, repr(argv[:50])[1:-1], lambda folder, argv=argv: [
                word.format(dir=folder) for word in argv.split(" ")], says)
    for spec, says in REWARDS:
        yield Case("rewards", spec, lambda folder, spec=spec: ["--rewards", spec.format(dir=folder)], says)
    for name, text, says in DATA:
        def write(folder, name=name, text=text):
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
            return ["--data", str(folder / name)]
        yield Case("data files", name, write, says)
    for fault, plant, says in MODELS:
        def copy(folder, plant=plant):
            shutil.copytree(TINY, folder / "model")
            plant(folder / "model")
            return ["--model", str(folder / "model"), *SMALL]
        yield Case("model folder", fault, copy, says)


def accepted(*_):
    raise AssertionError("accepted: vLLM would be loaded now")


def run(case, folder):
    """Gives a bad input to main(). Returns (what is wrong with its answer or "", the line, seconds)."""
    folder.mkdir()
    (folder / "mine").mkdir()
    (folder / "mine/metrics.jsonl").write_text("{}")
    (folder / "a.jsonl").write_text(LINES)
    (folder / "ask.jsonl").write_text("\n".join('{"ask": "1+%d"}' % i for i in range(9)))
    (folder / "mem.jsonl").symlink_to("/proc/self/mem")  # a file that nobody can read from its start
    (folder / "r.py").write_text(REWARD_FILE)
    argv = ["--out", str(folder / "runs"), *case.build(folder)]
    before = set(folder.rglob("*"))
    start, err = time.perf_counter(), io.StringIO()
    with mock.patch.object(nr, "make_llm", accepted), contextlib.redirect_stderr(err), \
            contextlib.redirect_stdout(io.StringIO()):
        try:
            nr.main(argv)
            code = None
        except SystemExit as e:
            code = e.code
        except BaseException as e:  # reported by the caller
            code = e
    seconds = time.perf_counter() - start
    says = case.says.format(dir=folder) if "{dir}" in case.says else case.says
    wrong = ""
    if case.says is USAGE:
        wrong = "" if code == 2 and err.getvalue() else f"no usage error: {code!r}"
    elif not isinstance(code, str):
        wrong = f"no line, but {code!r}"
    elif not code.startswith("nano_rlvr: ") or len(code.strip().splitlines()) != 1 or len(code) > 700:
        wrong = f"not one line: {code[:2000]!r}"
    elif says not in code:
        wrong = f"without {says!r}: {code}"
    elif more := [line for line in err.getvalue().splitlines() if not line.startswith("note: ")]:
        wrong = f"more lines on stderr: {more}"
    new = {path for path in folder.rglob("*") if not {"__pycache__", "lock"} & {*path.parts}} - before
    if new:
        wrong += f"; left behind: {new}"
    return wrong, str(code), seconds


def run_all(folder, only=""):
    """run() for each case whose group and id contain `only`: yields (case, wrong, line, seconds)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for i, case in enumerate(cases()):
        if only in f"{case.group} {case.id}":
            yield case, *run(case, folder / str(i))

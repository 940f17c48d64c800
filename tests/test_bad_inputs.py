"""Bad inputs, and a part of the line that each must give."""
import contextlib
import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

import data
import nano_rlvr as nr
from conftest import ROOT
from runtime.messages import RunError

ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(40)]
LINES = "\n".join(json.dumps(row) for row in ROWS)
FLAGS = [  # a command line, perhaps after variables of the environment; a part of the line
    ("WORLD_SIZE=3; --name a", "--prompts 32 cannot be shared evenly by 3 ranks"),
    *((f"--samples 1 {flags}", "--samples 1 needs --baseline batch, running or none, --scale")
      for flags in ("--baseline none", "--baseline leave_one_out --scale none", "--algo maxrl",
                    "--algo reinforce++ --scale group", "--algo rft --filter_groups")),
    ("--top_p 0.9", "--top_p needs --correction none --temperature 1"),
    ("--delta 2 --clip_high 1.5", "--delta 2: must be above 1 + clip_high = 2.5"),
    ("--algo grpo --resample 1", "it needs --filter_groups"),
    ("--lora_rank 4 --zero_stage 3", "--lora_rank needs --zero_stage 1 or 2"),
    ("--prompts 6 --minibatches 4", "--minibatches 4 must divide the 6 prompts"),
    ("--resume {dir}/older", "this run is of version 0.3.0, and its flags have other names in"),
    ("--task chess", "--task chess: choose one of arithmetic"),
    ("--template nowhere.txt", "--template nowhere.txt: not one of chat, none"),
    ("--rewards gsm9k", "unknown reward 'gsm9k'"),
    ("--name ..", "must be the plain name of a folder"),
    ("--name mine --resume {dir}/run", "are two runs; leave --name out"),
    ("--resume", "--resume needs the folder of a run, or --name"),
    ("--resume {dir}/run", "run/config.json is damaged"),
]
MAIN = [  # a command line, a part of the line: later checks, by main() itself
    ("--rollout nowhere.py:f", "rollout file 'nowhere.py' does not exist"),
    ("--name mine", "holds a run; choose another --name"),
    ("--out {dir}/a.jsonl/x", "Not a directory"),
    ("--memory_gb 0.001", "this run may use 0.0"),
    ("--max_prompt 3", "0 training prompts are left"),
    ("--data {dir}/blank.jsonl", "blank.jsonl: 0 training prompts are left, 1 needed"),
    ("--task aime24", "--task aime24 has no training examples"),
    ("--data {dir}", "{dir}: no such file, no task"),
    ("--eval_data {dir}/a.jsonl,", "two sets have one name, or a set has none"),
    ("--rewards types:SimpleNamespace", "no signature found for builtin type"),
    ("--rollout my_rollout", "rollout file '' does not exist (it is named my_file.py:my_rollout)"),
    ("--rewards os:getcwd", "--rewards getcwd: it is no reward function"),
    ("--rewards examples/code_reward.py:code", "reward code: it reads the column 'tests', which"),
    ("--model Qwen2.5-Math-99B", "--model Qwen/Qwen2.5-Math-99B: its config.json cannot"),
]
THIRD = "def make(*_): return [{'question': '1', 'answer': answer} for answer in '22 ']"
DATA = [  # name, content of the file, a part of the line
    ("fails.py:make", "def make(*_):\n    yield %s\n    raise OSError('a\\nb')" % ROWS[0],
     "fails.py:make: OSError: a b (line 3)"),
    ("third.py:make", THIRD, "third.py:make, row 3: 'answer' is empty, NaN or infinite; --answer"),
    ("set.py:make", "def make(*_): return [{'question': '1', 'answer': {1}}]",
     "set.py:make: TypeError: Object of type set is not JSON"),
    ("number.jsonl", '{"question": 3, "answer": 1}', "number.jsonl:1: 'question' must be text"),
    ("list.jsonl", '{"question": "1+1", "answer": [2]}',
     "list.jsonl:1: 'answer' must be text or a number; --answer_key none hands it to the rewards"),
    *(("float.jsonl", '{"question": "1+1", "answer": %s}' % number,
       "float.jsonl:1: 'answer' is empty, NaN or infinite; --answer_key names another column")
      for number in ("NaN", "1e400", "-1e400", "Infinity", "null", '" "', '"nan"')),
    ("verl.jsonl", '{"question": "1+1", "reward_model": {"ground_truth": 1e999}}',
     "verl.jsonl:1: 'answer' is empty, NaN or infinite"),
    ("half.jsonl", '{"question": "\\ud83d", "answer": 1}', "half.jsonl:1: 'utf-8' codec"),
    ("array.jsonl", LINES + "\n[1, 2]", "array.jsonl:41: a row must be an object"),
    ("names.jsonl", '{"ask": "1", "gold": 2}', "names.jsonl:1: no 'question' (it has 'ask', "),
    ("blanks.csv", "question, answer\n1+1,2\n",
     "blanks.csv, row 1: no 'answer' (it has 'question', ' answer')"),
    *(("lines.json", text, "; a .jsonl file has an object per line, a .json file one list")
      for text in (LINES, "[1]\n[2]\n", "\n\n" + LINES)),
    ("list.jsonl", json.dumps(ROWS, indent=1),
     "list.jsonl:1: cannot be read (JSONDecodeError: Expecting value: line 1 column 2 (char 1)); a "
     ".jsonl file has an object per line"),
    ("broken.jsonl", LINES + '\n{"question": ', "broken.jsonl:41: cannot be read (JSON"),
    ("object.json", json.dumps(ROWS[0]), "object.json: not a jsonl, csv or parquet file, nor"),
    ("wide.csv", "question,answer\n1+1,2,3\n", "wide.csv, row 1: more fields than"),
]


def config(**changes):
    """A fault of a model folder: other values in config.json."""
    def plant(folder):
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | changes))
    return plant


def weights(change):
    """A fault of a model folder: change(tensors) edits the dict of tensors in place."""
    def plant(folder):
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
    ("code of its own", config(auto_map={"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"},
                               model_type="own"), "or --trust_remote_code for its own code"),
    ("no tokenizer.json", lambda f: (f / "tokenizer.json").unlink(), "(ValueError: it has no"),
    ("a failing template", content(CHAT, "{{ messages[1] + 1 }}"), "template fails (Undefined"),
    ("no chat template", lambda f: (f / CHAT).unlink(), "chat_template is not set"),
    ("no question", content(CHAT, "Hello"), "omits the message of the user; use --template"),
]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(says): a block that must end with one line with this text, and leave nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(nr, "Sampler", None)  # vLLM is not reached
    monkeypatch.setattr(data, "with_bar", lambda items, text: items)  # shown on a slow machine

    @contextlib.contextmanager
    def block(says):
        with pytest.raises((ValueError, OSError, RunError, SystemExit)) as e:
            yield
        line, notes = str(e.value), capsys.readouterr().err.splitlines()
        assert says.replace("{dir}", str(tmp_path)) in line
        assert len(line.splitlines()) == 1 and len(line) <= 900
        assert all(text.startswith("note: ") for text in notes)
        assert not [*tmp_path.glob("tiny-*")]  # the folder of a run without a name

    return block


@pytest.mark.parametrize("function, line, says", [
    *((nr.parse_config, *row) for row in FLAGS), *((nr.main, *row) for row in MAIN)])
def test_a_bad_command_line_is_refused(function, line, says, tmp_path, refused, monkeypatch):
    *environment, line = line.split("; ")
    for name, value in (variable.split("=") for variable in environment):
        monkeypatch.setenv(name, value)
    for file, text in (("mine/metrics.jsonl", "{}"), ("run/config.json", "{"), ("a.jsonl", LINES),
                       ("blank.jsonl", "\n \n\n"),
                       ("older/config.json", '{"version": "0.3.0", "config": {}}')):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    with refused(says):
        function(["--out", str(tmp_path), *line.replace("{dir}", str(tmp_path)).split(" ")])


@pytest.mark.parametrize("name, text, says", DATA)
def test_a_bad_data_file_is_refused(name, text, says, tmp_path, refused):
    file = tmp_path / name.partition(":")[0]
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(says):
        data.load(str(tmp_path / name))


@pytest.mark.parametrize("fault, plant, says", MODELS, ids=[row[0] for row in MODELS])
def test_a_bad_model_folder_is_refused(fault, plant, says, tmp_path, refused):
    shutil.copytree(ROOT / "models/tiny", folder := tmp_path / "model")
    plant(folder)
    argv = f"--model {folder} --template chat --max_prompt 64 --max_tokens 32"
    with refused(says):
        cfg = nr.parse_config(argv.split())
        data.encode(ROWS[0], nr.load_tokenizer(cfg), cfg.template)
        nr.load_model(cfg)

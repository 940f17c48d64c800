"""The tracks and the rules of bench/speedrun.py: what a record may do, and what its file must say.

A track is frozen: a change makes its records void.
"""
import ast
import hashlib
import itertools
import platform
import random
import re
import zlib
from collections import namedtuple
from pathlib import Path

import torch

import data
from bench import common
from learn.lab import sums
from runtime import log, stats

# parameters: of the model. weights: its checksum at the start. bound: the lower end of the 95 %
# interval of the accuracy must be above it. flags: of every run. second(size, seed): the questions
# that decide; size: their number; max_tokens: of an answer; rewards: says what is right.
# is_held_out(question): whether no recipe may train on it
Track = namedtuple(
    "Track", "parameters weights bound flags second size max_tokens rewards is_held_out")
SEEDS = [0, 1, 2]
TOLERANCE = 0.1  # share by which tokens may differ on another machine: a rule of the game
FREE = set(  # the flags that a recipe may set
    "--algo --baseline --scale --ratio --surrogate --aggregate --clip_low --clip_high --delta "
    "--tau --tau_neg --kl_coef --correction --correction_cap --filter_groups --resample --epochs "
    "--mask_truncated --overlong_buffer --minibatches --lr --lr_end --warmup --beta2 --steps "
    "--weight_decay --max_grad_norm --prompts --samples --temperature --max_tokens --lora_rank "
    "--data --rewards".split())
MODULES = {"data", "rewards", "random", "math", "re", "itertools", "functools"}  # for recipe.py
FORBIDDEN = {"open", "exec", "eval", "compile", "getattr", "setattr", "globals", "vars", "locals"}
SOURCES = ("*.py", "runtime/**/*.py", "bench/speedrun.py", "bench/tracks.py", "learn/lab/sums.py")


# ---- tracks

def is_test_sum(question):
    """data.generate keeps these questions for evaluations."""
    return zlib.crc32(question.encode()) % 8 == 0


def second_six(size, seed):
    """Held-out sums of six terms. `seed` is made of the final weights, so nobody knows them before
    the run has ended."""
    return list(sums.six("test", size, seed))


def second_longer(size, seed):
    return list(sums.longer("test", size, seed))


def product_pairs():
    """{set: its pairs of two numbers from 2 to 12}; half of the pairs decide."""
    pairs = list(itertools.combinations_with_replacement(range(2, 13), 2))
    random.Random(0).shuffle(pairs)  # the same sets in all runs
    return {"train": pairs[:16], "test": pairs[16:33], "second": pairs[33:]}


def one_question_each(pairs, seed):
    """A question about each pair, in an order and a wording that are drawn. The other wordings of a
    pair would say nearly the same again, and an interval counts what is independent."""
    rng = random.Random(seed)
    return [rng.choice(data.ask_products([pair], rng)) for pair in pairs]


def products(split, size, seed):
    """The training questions of a recipe, and the set that it may look at."""
    pairs = product_pairs()[split]
    if split == "train":
        return data.ask_products(pairs, random.Random(seed))
    return one_question_each(pairs, 0)[:size]


def second_products(size, seed):
    """`seed` is made of the final weights, as that of the sums."""
    return one_question_each(product_pairs()["second"], seed)


def is_test_product(question):
    """Whether both numbers of a held-out pair are in a question, in whatever words."""
    pairs = product_pairs()
    numbers = sorted(map(int, re.findall(r"\d+", question)))
    held_out = {*pairs["test"], *pairs["second"]}
    return any(pair in held_out for pair in itertools.combinations(numbers, 2))


def track_of_sums(function, second, bound):
    task = f"learn/lab/sums.py:{function}"
    flags = (f"--model models/tiny --data {task} --eval_data {task} --rewards gsm8k --eval_size 64 "
             "--max_prompt 256 --max_tokens 128")
    return Track(822_272, TINY, bound, flags, second, 512, 128, "gsm8k", is_test_sum)


TINY = "3c26e42b4fbd28d8"  # see speedrun.digest
SMOLLM2 = "1c8751ff99ee896a"  # of the folder that models/smollm2.py makes
TRACKS = {
    "sums": track_of_sums("six", second_six, bound=0.9),
    "long_sums": track_of_sums("longer", second_longer, bound=0.5),
    "products": Track(
        134_515_008, SMOLLM2, 0.5,
        "--model models/smollm2 --data bench/tracks.py:products "
        "--eval_data bench/tracks.py:products --eval_size 17 --rewards right --max_prompt 64 "
        "--max_tokens 48 --pack_tokens 1024",
        second_products, 33, 48, "right", is_test_product),
}


# ---- what a record says

def source():
    """SHA-256 of the code that makes a run."""
    paths = []
    for pattern in SOURCES:
        paths += sorted(common.ROOT.glob(pattern))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def recipe(folder):
    """SHA-256 of recipe.py, "" without one."""
    path = folder / "recipe.py"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def tokens(result):
    """[sampled, trained] tokens of a run."""
    steps = result["steps"]
    return [sum(step["sampled"] for step in steps), sum(step["trained"] for step in steps)]


def low(result):
    """The lower end of the 95 % interval of the accuracy."""
    return stats.wilson_interval(result["right"], result["n"])[0]


def score(track, results):
    """(sampled + trained tokens) * parameters of the dearest of the runs."""
    return max(sum(tokens(result)) for result in results) * track.parameters


def machine():
    """What must be equal for equal bits."""
    text = Path("/proc/cpuinfo").read_text()
    name = text.partition("model name\t: ")[2].partition("\n")[0]
    return {"cpu": name or platform.processor(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "versions": log.provenance()["versions"]}


# ---- rules

def flag_problems(folder, flags):
    """Yields what is wrong with the flags of a recipe."""
    own = f"{folder.relative_to(common.ROOT)}/recipe.py:"
    for word, value in zip(flags, [*flags[1:], ""]):
        if word.startswith("--") and word not in FREE:
            yield f"a recipe may not set {word}"
        for part in value.split(",") if word in ("--data", "--rewards") else ():
            if ("/" in part or ".py" in part) and not part.startswith(own):
                yield f"{word} {part} is not in the record's recipe.py"


def recipe_problems(folder):
    """Yields what recipe.py may not do. This finds what is easily seen and is no jail: who accepts
    a record reads its file."""
    path = folder / "recipe.py"
    tree = ast.parse(path.read_text() if path.exists() else "")
    for node in ast.walk(tree):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            imported = [node.module]
        for name in imported:
            if name not in MODULES:
                yield f"recipe.py imports {name}"
        name = getattr(node, "id", "") or getattr(node, "attr", "")
        if name in FORBIDDEN or name.startswith("__"):
            yield f"recipe.py uses {name}"


def run_problems(track, result):
    """Yields what is wrong with what a record says of one run."""
    name = f"seed {result['seed']}"
    if result["steps"][0]["weights"] != track.weights:
        yield f"{name} begins with another model"
    if result["n"] != track.size:
        yield f"{name} answers {result['n']} questions, not {track.size}"
    if low(result) <= track.bound:
        yield f"{name}: the lower end {low(result):.3f} is not above {track.bound}"


def problems(folder, record):
    """Yields what is wrong with a record, without a run."""
    track = TRACKS[folder.parent.name]
    results = record["runs"]
    if record["source"] != source():
        yield "the source is not that of the record"
    if record["recipe"] != recipe(folder):
        yield "recipe.py is not that of the runs"
    yield from flag_problems(folder, record["flags"])
    yield from recipe_problems(folder)
    if [result["seed"] for result in results] != SEEDS:
        yield f"the runs must have the seeds {SEEDS}"
    for result in results:
        yield from run_problems(track, result)
    if record["score"] != score(track, results):
        yield f"the score is not that of the steps, {score(track, results):.4g}"


def differences(claimed, replay, same_machine):
    """Yields how a run differs from its replay. On another machine bits may differ: there only
    tokens beyond TOLERANCE count, beside the replay's own accuracy, which `verify` judges."""
    if not same_machine:
        made, said = sum(tokens(replay)), sum(tokens(claimed))
        if abs(made - said) > TOLERANCE * made:
            yield f"the replay takes {made} tokens, the record says {said}"
        return
    for number, (said, made) in enumerate(zip(claimed["steps"], replay["steps"])):
        for name in made:
            if said[name] != made[name]:
                yield f"step {number}, {name}: {made[name]}, the record says {said[name]}"
    if len(claimed["steps"]) != len(replay["steps"]):
        yield f"{len(replay['steps'])} steps, the record says {len(claimed['steps'])}"
    for name in ("final", "right", "n"):
        if claimed[name] != replay[name]:
            yield f"{name}: {replay[name]}, the record says {claimed[name]}"

"""A speedrun for laptops: the fewest tokens with which a recipe passes a bound: docs/speedrun.md.

    OMP_NUM_THREADS=1 python -m bench.speedrun run bench/records/sums/mine --lr 4e-4 --steps 20
    OMP_NUM_THREADS=1 python -m bench.speedrun verify bench/records/sums/mine
    python -m bench.speedrun table

A record is a folder bench/records/<track>/<name>/ with record.json and, if the recipe needs one,
recipe.py with functions for --data and --rewards. `run` makes a run with each of three seeds. All
their flags are the track's, but for those after the folder. `verify` makes one of them again, drawn
by chance, from its first step: checksums, tokens and answers must be those of the record.
"""
import ast
import hashlib
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import data
import nano_rlvr as nr
from bench import common
from bench.tracks import TRACKS
from runtime import evaluation, log, stats, trainer
from runtime.batch import flatten
from runtime.sync import checksum

SEEDS = (0, 1, 2)
TOLERANCE = 0.1  # share by which tokens may differ on another kind of CPU: a rule of the game
FREE = set(  # the flags that a recipe may set
    "algo baseline scale ratio surrogate aggregate clip_low clip_high delta tau tau_neg kl_coef "
    "correction correction_cap filter_groups resample mask_truncated overlong_buffer epochs "
    "minibatches lr lr_end warmup beta2 weight_decay max_grad_norm steps prompts samples "
    "temperature max_tokens lora_rank data rewards".split())
MODULES = {"data", "rewards", "random", "math", "re", "itertools", "functools"}  # for recipe.py
FORBIDDEN = {"open", "exec", "eval", "compile", "getattr", "setattr", "globals", "vars", "locals"}
RECORDS = common.ROOT / "bench/records"


# ---- a run

def digest(policy):
    """The sum of the checksums of all weights, as text."""
    total = sum(checksum(tensor).item() for _, tensor in trainer.named_weights(policy))
    return f"{total % 2**64:016x}"


def train(run, track, path):
    """The script's loop; writes what it used, and how it answers the second set, to a file."""
    for row in run.train_set:
        if track.is_held_out(row["question"]):
            raise SystemExit(f"refused: it trains on a held-out question, {row['question']!r}")
    steps, start = [], time.perf_counter()

    def collect_rollouts(run, step):
        weights = digest(run.policy)
        split, sampled = nr.collect_rollouts(run, step)
        tokens = sum(r.length for r in flatten(sampled))
        steps.append({"weights": weights, "sampled": tokens, "trained": 0})
        return split, sampled

    def policy_loss(logp, old, ref, batch, cfg):
        steps[-1]["trained"] += len(logp)
        return nr.policy_loss(logp, old, ref, batch, cfg)

    nr.train(run, collect_rollouts=collect_rollouts, policy_loss=policy_loss)
    result = {"seed": run.cfg.seed, "steps": steps, "seconds": round(time.perf_counter() - start)}
    result["final"] = digest(run.policy)
    path.write_text(json.dumps(result | judge(run, track, result["final"])))


def judge(run, track, final):
    """{right, n} of greedy answers to the second set, by the track's reward, not the recipe's."""
    rows = track.second(track.size, int(final, 16))
    for row in rows:
        row["prompt_ids"] = data.encode(row, run.llm.get_tokenizer(), run.cfg.template)
    run.cfg = replace(run.cfg, rewards=track.rewards, max_tokens=track.max_tokens, eval_n=0)
    run.eval_set = rows
    run.verifier = nr.rewards.start_verifier(run.cfg, rows, rows)
    _, answers = evaluation.evaluate(run, nr.score)
    run.verifier.close()
    return {"right": sum(answer["right"] for answer in answers), "n": len(answers)}


def make_run(folder, flags, seed):
    """A run in a process of its own -> its result. Raises ValueError with its last line."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "result.json")
        command = [sys.executable, "-m", "bench.speedrun", "one", str(folder), str(path), str(seed)]
        done = subprocess.run([*command, *flags], cwd=common.ROOT, text=True, capture_output=True)
        if done.returncode or not path.exists():
            words = done.stderr.strip().splitlines() or ["no message"]
            raise ValueError(words[-1].removeprefix("refused: "))
        return json.loads(path.read_text())


def one(folder, path, seed, *flags):
    """Makes a run in this process. The recipe's flags come last, so they count."""
    track = TRACKS[folder.parent.name]
    argv = [*track.flags.split(), *flags, "--seed", seed, "--eval_every", "100000", "--save_every",
            "-1", "--out", str(path.parent), "--name", "run"]
    nr.main(argv, lambda run: train(run, track, path))


# ---- what a record says, and whether it may

def machine():
    """What must be equal for equal bits."""
    about = Path("/proc/cpuinfo")
    text = about.read_text() if about.exists() else platform.processor()
    return {"cpu": text.partition("model name\t: ")[2].partition("\n")[0] or text[:60],
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(), "versions": log.provenance()["versions"]}


def source():
    """SHA-256 of the code that makes a run."""
    files = [*common.ROOT.glob("*.py"), *common.ROOT.glob("runtime/**/*.py")]
    files += [common.ROOT / name for name in (
        "bench/speedrun.py", "bench/tracks.py", "learn/lab/sums.py")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(files))).hexdigest()


def recipe(folder):
    """SHA-256 of recipe.py, "" without one."""
    path = folder / "recipe.py"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def tokens(result):
    """(sampled, trained) tokens of a run."""
    return [sum(step[kind] for step in result["steps"]) for kind in ("sampled", "trained")]


def low(result):
    """The lower end of the 95 % interval of the accuracy."""
    return stats.wilson_interval(result["right"], result["n"])[0]


def score(track, results):
    """(sampled + trained tokens) * parameters of the dearest of the runs."""
    return max(sum(tokens(result)) for result in results) * track.parameters


def flag_problems(folder, flags):
    """Yields what is wrong with the flags of a recipe."""
    files = ("recipe.py:", f"{folder.relative_to(common.ROOT)}/recipe.py:")
    for word, value in zip(flags, [*flags[1:], ""]):
        if word.startswith("-") and word[2:3].isalpha() and word.removeprefix("--") not in FREE:
            yield f"a recipe may not set {word}"
        if word in ("--data", "--rewards"):
            for part in value.split(","):
                if ".py" in part and not part.startswith(files):
                    yield f"{word} {part} is no function of the record's recipe.py"


def recipe_problems(folder):
    """Yields what recipe.py may not do. It is a list of cheats that are easily seen, and no jail:
    who takes over a record reads its file."""
    path = folder / "recipe.py"
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    for node in ast.walk(tree):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            imported = [node.module or "."]
        yield from (f"recipe.py imports {name}" for name in imported if name not in MODULES)
        name = getattr(node, "id", "") or getattr(node, "attr", "")
        if name in FORBIDDEN or name.startswith("__"):
            yield f"recipe.py uses {name}"


def problems(folder, record):
    """Yields what is wrong with a record, without a run."""
    track, results = TRACKS[folder.parent.name], record["runs"]
    if record["source"] != source():
        yield (f"its source is not this one: verify it at its commit, {record['commit']} (git "
               "worktree add ../then COMMIT)")
    if record["recipe"] != recipe(folder):
        yield "recipe.py is not the one of the runs"
    yield from flag_problems(folder, record["flags"])
    yield from recipe_problems(folder)
    if [result["seed"] for result in results] != list(SEEDS):
        yield f"its runs must have the seeds {SEEDS}"
    for result in results:
        name = f"seed {result['seed']}"
        if result["steps"][0]["weights"] != track.weights:
            yield f"{name} begins with another model"
        if result["n"] != track.size:
            yield f"{name} answers {result['n']} questions, not {track.size}"
        if low(result) <= track.bound:
            yield f"{name}: the lower end {low(result):.3f} is not above {track.bound}"
    if record["score"] != score(track, results):
        yield f"its score is not that of its steps, {score(track, results):.4g}"


def differences(claimed, replay, same_machine):
    """Yields how a run differs from its replay: in bits on the same kind of machine, else in tokens
    beyond TOLERANCE. There the replay's own accuracy is judged, by verify."""
    if not same_machine:
        ours, theirs = sum(tokens(replay)), sum(tokens(claimed))
        if abs(ours - theirs) > TOLERANCE * ours:
            yield f"it takes {ours} tokens, the record says {theirs}"
        return
    if len(claimed["steps"]) != len(replay["steps"]):
        yield f"it has {len(replay['steps'])} steps, the record {len(claimed['steps'])}"
    for number, (said, made) in enumerate(zip(claimed["steps"], replay["steps"])):
        for name in made:
            if said[name] != made[name]:
                yield f"step {number}, {name}: {made[name]}, the record says {said[name]}"
    for name in ("final", "right", "n"):
        if claimed[name] != replay[name]:
            yield f"{name}: {replay[name]}, the record says {claimed[name]}"


# ---- commands

def verify(folder):
    """Prints what is wrong with a record; exits with 1 if anything is."""
    record, track = json.loads((folder / "record.json").read_text()), TRACKS[folder.parent.name]
    found = list(problems(folder, record))
    if not found:
        claimed = random.SystemRandom().choice(record["runs"])
        same = record["machine"] == machine()
        print(f"makes the run of seed {claimed['seed']} again ..." if same else
              "another machine, version or number of threads than the record's: bits may differ, "
              "so only tokens and accuracy are compared. " + str(machine()))
        replay = make_run(folder, record["flags"], claimed["seed"])
        found = list(differences(claimed, replay, same))
        if low(replay) <= track.bound:
            found.append(f"the replay's lower end {low(replay):.3f} is not above {track.bound}")
        print(f"seed {replay['seed']}: {tokens(replay)} tokens sampled and trained, "
              f"{replay['right']} of {replay['n']} right, lower end {low(replay):.3f}")
    if found:
        raise ValueError("; ".join(found[:3]))
    print(f"accepted: {folder.name}, {record['score']:.4g}")


def run(folder, flags):
    """Makes the three runs of a record and writes it, or says why it is none."""
    found = [*flag_problems(folder, flags), *recipe_problems(folder)]
    if found:
        raise ValueError("; ".join(found))
    results = [make_run(folder, flags, seed) for seed in SEEDS]
    about = log.provenance()
    record = {"flags": flags, "cause": "", "source": source(), "recipe": recipe(folder),
              "commit": about["commit"], "machine": machine(), "runs": results,
              "score": score(TRACKS[folder.parent.name], results)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record))
    print(*problems(folder, record), f"score {record['score']:.4g}", sep="\n")


def table():
    """A row per record, by track; the best first."""
    rows = []
    for path in RECORDS.glob("*/*/record.json"):
        record = json.loads(path.read_text())
        runs = record["runs"]
        worst, spent = min(map(low, runs)), max(runs, key=lambda result: sum(tokens(result)))
        rows.append((path.parts[-3], record["score"], [
            path.parts[-3], path.parts[-2], f"{record['score']:.3g}", *tokens(spent),
            f"{worst:.1%}", max(result["seconds"] for result in runs), record["cause"]]))
    head = ["track", "record", "score", "sampled", "trained", "lower end, worst seed", "seconds",
            "cause"]
    return common.table(head, [row for *_, row in sorted(rows)])


def main(argv):
    """Raises ValueError with one line."""
    command, *words = argv or ["help"]
    if command == "table" and not words:
        print(table())
    elif command == "one":
        one(Path(words[0]), Path(words[1]), words[2], *words[3:])
    elif command in ("run", "verify") and words:
        folder = Path(words[0]).resolve()
        if folder.parent.parent != RECORDS or folder.parent.name not in TRACKS:
            raise ValueError(f"{words[0]}: a record is bench/records/<{'|'.join(TRACKS)}>/<name>")
        run(folder, words[1:]) if command == "run" else verify(folder)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, KeyError) as e:
        sys.exit(f"refused: {e}")

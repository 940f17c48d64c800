"""A speedrun for laptops: the fewest tokens with which a recipe passes a bound: docs/speedrun.md.

    OMP_NUM_THREADS=1 python -m bench.speedrun run bench/records/sums/mine --lr 4e-4 --steps 20
    OMP_NUM_THREADS=1 python -m bench.speedrun verify bench/records/sums/mine [--all]
    python -m bench.speedrun table

A record is a folder bench/records/<track>/<name>/ with record.json, a README.md whose first line
says why the recipe is cheaper and, if the recipe needs it, recipe.py with functions for --data and
--rewards. `run` makes a run with each of three seeds. All their flags are the track's, but for
those after the folder. `verify` makes one of them again, drawn by chance (--all: each), from its
first step: checksums, tokens and answers must be those of the record. bench/tracks.py has the
tracks and the rules.
"""
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import data
import nano_rlvr as nr
from bench import common, tracks
from bench.tracks import TRACKS, low, tokens
from runtime import evaluation, log, trainer
from runtime.batch import flatten
from runtime.sync import checksum

RECORDS = common.ROOT / "bench/records"


# ---- a run

def digest(policy):
    """The sum of the checksums of all weights, as text."""
    total = 0
    for _, tensor in trainer.named_weights(policy):
        total += checksum(tensor).item()
    return f"{total % 2**64:016x}"


def check_data(track, rows):
    for row in rows:
        if track.is_held_out(row["question"]):
            raise SystemExit(f"refused: it trains on a held-out question, {row['question']!r}")


def train(run, track, path):
    """The script's loop; writes what it used, and how it answers the second set, to a file."""
    check_data(track, run.train_set)
    steps = []
    start = time.perf_counter()

    def collect_rollouts(run, step):
        weights = digest(run.policy)
        split, sampled = nr.collect_rollouts(run, step)
        length = sum(r.length for r in flatten(sampled))
        made = {"weights": weights, "sampled": length, "trained": 0}
        steps.append(made)
        return split, sampled

    def policy_loss(logp, old, ref, pack, cfg):
        steps[-1]["trained"] += len(logp)
        return nr.policy_loss(logp, old, ref, pack, cfg)

    nr.train(run, collect_rollouts=collect_rollouts, policy_loss=policy_loss)
    seconds = round(time.perf_counter() - start)
    final = digest(run.policy)
    result = judge(run, track, int(final, 16))
    result |= {"seed": run.cfg.seed, "steps": steps, "seconds": seconds, "final": final}
    path.write_text(json.dumps(result))


def judge(run, track, seed):
    """{right, n} of greedy answers to the second set, by the track's reward, not the recipe's."""
    rows = track.second(track.size, seed)
    tokenizer = run.llm.get_tokenizer()
    for row in rows:
        row["prompt_ids"] = data.encode(row, tokenizer, run.cfg.template)
    run.cfg = replace(run.cfg, rewards=track.rewards, max_tokens=track.max_tokens)
    run.eval_set = rows
    with nr.rewards.start_verifier(run.cfg, rows, rows) as run.verifier:
        _, answers = evaluation.evaluate(run, nr.score)
    right = [answer["right"] for answer in answers]
    return {"right": sum(right), "n": len(right)}


def make_run(folder, flags, seed):
    """A run in a process of its own -> its result. Raises ValueError with the process's last line.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "result.json")
        command = [sys.executable, "-m", "bench.speedrun", "one", folder, path, str(seed), *flags]
        done = subprocess.run(command, cwd=common.ROOT, text=True, capture_output=True)
        if not path.exists():
            last = done.stderr.strip().splitlines()[-1:]
            raise ValueError("".join(last).removeprefix("refused: "))
        return json.loads(path.read_text())


def one(folder, path, seed, *flags):
    """Makes a run in this process."""
    track = TRACKS[folder.parent.name]
    fixed = ["--seed", seed, "--out", str(path.parent), "--name", "run"]
    rare = ["--eval_every", "100000", "--save_every", "-1"]
    nr.main([*track.flags.split(), *flags, *fixed, *rare], lambda run: train(run, track, path))


# ---- a record

def read(folder):
    return json.loads((folder / "record.json").read_text())


def verify(folder, everything=False):
    """Prints that a record holds. Raises ValueError with what is wrong."""
    record = read(folder)
    if record["source"] != tracks.source():
        return verify_at(record["commit"], folder, everything)
    track = TRACKS[folder.parent.name]
    found = list(tracks.problems(folder, record))
    if found:
        raise ValueError("; ".join(found[:3]))
    is_same = record["machine"] == tracks.machine()
    if not is_same:
        print(f"this is another machine than the record's, {tracks.machine()}: bits may differ, "
              "so only tokens and accuracy are compared")
    chosen = record["runs"]
    if not everything:
        chosen = random.SystemRandom().sample(chosen, 1)
    for claimed in chosen:
        replay = make_run(folder, record["flags"], claimed["seed"])
        found += tracks.differences(claimed, replay, is_same)
        if low(replay) <= track.bound:
            found.append(f"the replay's lower end {low(replay):.3f} is not above {track.bound}")
        print(f"seed {replay['seed']}: {tokens(replay)} tokens sampled and trained, "
              f"{replay['right']} of {replay['n']} right, lower end {low(replay):.3f}")
    if found:
        raise ValueError("; ".join(found[:3]))
    print(f"accepted: {folder.name}, {record['score']:.4g}")


def link_models(made, models):
    """Links what was made here, as SmolLM2's folder, which git does not have, into older code."""
    for model in made.iterdir():
        if not (models / model.name).exists():
            (models / model.name).symlink_to(model)


def verify_at(commit, folder, everything):
    """Verifies a record with the code of its commit, which must be in the history of this one."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=common.ROOT, capture_output=True).returncode

    if git("merge-base", "--is-ancestor", commit, "HEAD"):
        raise ValueError("the source is not that of the record, and the record's commit "
                         f"{commit} is not in this history")
    print(f"with the code of the record's commit, {commit}:", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        git("worktree", "add", "--detach", str(tree), commit)
        link_models(common.ROOT / "models", tree / "models")
        copy = tree / folder.relative_to(common.ROOT)
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        words = ["--all"] * everything
        command = [sys.executable, "-m", "bench.speedrun", "verify", str(copy), *words]
        done = subprocess.run(command, cwd=tree, text=True, capture_output=True)
        git("worktree", "remove", "--force", str(tree))
    print(done.stdout, end="")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ValueError("".join(last).removeprefix("refused: "))


def run(folder, flags):
    """Makes the runs of a record, writes it and prints why it is none, if it is none."""
    found = [*tracks.flag_problems(folder, flags), *tracks.recipe_problems(folder)]
    if found:
        raise ValueError("; ".join(found))
    folder.mkdir(parents=True, exist_ok=True)
    results = [make_run(folder, flags, seed) for seed in tracks.SEEDS]
    record = {
        "flags": flags,
        "source": tracks.source(),
        "recipe": tracks.recipe(folder),
        "commit": log.provenance()["commit"],
        "machine": tracks.machine(),
        "score": tracks.score(TRACKS[folder.parent.name], results),
        "runs": results,
    }
    (folder / "record.json").write_text(json.dumps(record))
    for result in results:
        print(f"seed {result['seed']}: {tokens(result)}, lower end {low(result):.3f}")
    print(*tracks.problems(folder, record), f"score {record['score']:.4g}", sep="\n")


def table():
    """A row per record, by track; the best first."""
    rows = []
    for path in RECORDS.glob("*/*/record.json"):
        folder = path.parent
        record = read(folder)
        runs = record["runs"]
        dearest = max(map(tokens, runs), key=sum)
        worst = min(map(low, runs))
        seconds = max(result["seconds"] for result in runs)
        cause = (folder / "README.md").read_text().splitlines()[0]
        rows.append([folder.parent.name, record["score"], folder.name, *dearest, f"{worst:.1%}",
                     seconds, cause])
    rows.sort()
    for row in rows:
        row[1] = f"{row[1]:.3g}"
    head = ["track", "score", "record", "sampled", "trained", "worst lower end", "seconds", "cause"]
    return common.table(head, rows)


def main(argv):
    """Raises ValueError with one line."""
    command, *words = argv or [""]
    if command == "one":
        one(Path(words[0]), Path(words[1]), *words[2:])
    elif command == "table":
        print(table())
    elif command in ("run", "verify") and words:
        folder = Path(words[0]).resolve()
        if folder.parent.parent != RECORDS or folder.parent.name not in TRACKS:
            raise ValueError(f"{words[0]}: a record is bench/records/<track>/<name>, with a track "
                             f"of {', '.join(TRACKS)}")
        run(folder, words[1:]) if command == "run" else verify(folder, words[1:] == ["--all"])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"refused: {e}")

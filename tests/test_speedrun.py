"""bench/speedrun.py: what the rules refuse, what a replay finds, and one replay of a real run."""
import copy
import json
import re
from types import SimpleNamespace

import pytest

import data
from bench import common, speedrun, tracks
from bench.tracks import TRACKS
from conftest import ROOT, make_config
from runtime.model import load_model

SUMS = TRACKS["sums"]
RECORDS = sorted((ROOT / "bench/records").glob("*/*/record.json"))


def a_run(seed):
    """What a record says of a run of two steps."""
    steps = [{"weights": weights, "sampled": 100, "trained": 40}
             for weights in (SUMS.weights, f"{seed:016x}")]
    return {"seed": seed, "steps": steps, "seconds": 9, "final": "f" * 16, "right": 500, "n": 512}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A record that breaks no rule, in a repository of its own."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "nano_rlvr.py").write_text("lr = 1")
    folder = tmp_path / "bench/records/sums/mine"
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text("import data\n\n\ndef make(split, size, seed):\n    ...\n")
    runs = [a_run(seed) for seed in (0, 1, 2)]
    record = {"flags": ["--lr", "3e-4", "--data", "bench/records/sums/mine/recipe.py:make"],
              "source": tracks.source(), "recipe": tracks.recipe(folder), "commit": "c",
              "machine": tracks.machine(), "runs": runs, "score": 280 * SUMS.parameters}
    (folder / "record.json").write_text(json.dumps(record))
    return folder


def add_flags(*words):
    return lambda folder, record: record["flags"].extend(words)


def write_recipe(text):
    def forge(folder, record):
        (folder / "recipe.py").write_text(text)
        record["recipe"] = tracks.recipe(folder)
    return forge


def set_in_run(name, value):
    return lambda folder, record: record["runs"][1].update({name: value})


def another_model(folder, record):
    record["runs"][2]["steps"][0]["weights"] = "0" * 16


FORGERIES = {  # cheat -> (how a record is changed, how the refusal begins)
    "changed source": (
        lambda folder, record: (common.ROOT / "nano_rlvr.py").write_text("lr = 2"),
        "the source is not that of the record"),
    "changed recipe": (
        lambda folder, record: (folder / "recipe.py").write_text("import data"),
        "recipe.py is not that of the runs"),
    "another model, by its flag": (
        add_flags("--model", "larger"), "a recipe may not set --model"),
    "another model, by its weights": (another_model, "seed 2 begins with another model"),
    "other questions": (
        add_flags("--eval_data", "easy.jsonl"), "a recipe may not set --eval_data"),
    "a flag that is written with =": (add_flags("--seed=7"), "a recipe may not set --seed=7"),
    "training data from a file": (
        add_flags("--data", "second.jsonl.py"), "--data second.jsonl.py is not in the record's"),
    "a reward that leaks": (
        add_flags("--rewards", "learn/lab/faulty_rewards.py:leaky:1"),
        "--rewards learn/lab/faulty_rewards.py:leaky:1 is not in the record's recipe.py"),
    "reads the second set": (
        write_recipe("from bench.tracks import second_six"), "recipe.py imports bench.tracks"),
    "reads a file": (write_recipe("rows = open('second')"), "recipe.py uses open"),
    "imports by a detour": (
        write_recipe("import data\nx = data.__loader__"), "recipe.py uses __loader__"),
    "fewer questions": (set_in_run("n", 504), "seed 1 answers 504 questions, not 512"),
    "a seed chosen for its luck": (set_in_run("seed", 7), "the runs must have the seeds [0, 1, 2]"),
    "too few right": (
        set_in_run("right", 470), "seed 1: the lower end 0.891 is not above 0.9"),
    "a lower score": (
        lambda folder, record: record.update(score=9), "the score is not that of the steps"),
}


@pytest.mark.parametrize("cheat", FORGERIES)
def test_a_rule_refuses_each_cheat(folder, cheat):
    forge, words = FORGERIES[cheat]
    record = speedrun.read(folder)
    assert not list(tracks.problems(folder, record))
    forge(folder, record)
    [problem] = tracks.problems(folder, record)
    assert problem.startswith(words)


def fewer_tokens(record):
    for run in record["runs"]:
        run["steps"][1]["sampled"] -= 60
    record["score"] = 220 * SUMS.parameters


def forged_checksum(record):
    record["runs"][0]["steps"][1]["weights"] = "0" * 16


FORGED_LOGS = {  # what no rule sees -> (change, what the replay of seed 0 says)
    "fewer tokens reported than used": (
        fewer_tokens, "step 1, sampled: 100, the record says 40"),
    "checksums of no run": (
        forged_checksum, "step 1, weights: 0000000000000000, the record says 1000000000000000"),
    "more right answers": (
        lambda record: record["runs"][0].update(right=512), "right: 500, the record says 512"),
    "steps left out": (
        lambda record: record["runs"][0]["steps"].append(record["runs"][0]["steps"][0]),
        "2 steps, the record says 3"),
}


@pytest.mark.parametrize("forgery", FORGED_LOGS)
def test_a_replay_refuses_forged_logs(folder, monkeypatch, forgery):
    change, words = FORGED_LOGS[forgery]
    record = speedrun.read(folder)
    change(record)
    if forgery == "checksums of no run":
        record["runs"][0]["steps"][1]["weights"] = "1000000000000000"
    record["score"] = tracks.score(SUMS, record["runs"])
    (folder / "record.json").write_text(json.dumps(record))
    monkeypatch.setattr(speedrun, "make_run", lambda folder, flags, seed: a_run(seed))
    with pytest.raises(ValueError) as refused:
        speedrun.verify(folder, everything=True)
    assert words in str(refused.value)


def test_an_honest_record_is_accepted_and_one_run_is_made_again(folder, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(speedrun, "make_run", lambda folder, flags, seed: made.append(seed)
                        or a_run(seed))
    speedrun.verify(folder)
    assert len(made) == 1 and "accepted: mine" in capsys.readouterr().out
    monkeypatch.setattr(speedrun, "make_run", lambda *_: a_run(0) | {"right": 300})
    with pytest.raises(ValueError, match="the replay's lower end 0.543 is not above 0.9"):
        speedrun.verify(folder)


def test_on_another_machine_only_tokens_and_accuracy_count():
    claimed, replay = a_run(0), copy.deepcopy(a_run(0))
    replay["steps"][1] = {"weights": "1" * 16, "sampled": 110, "trained": 50}
    replay["right"] = 490
    assert not list(tracks.differences(claimed, replay, same_machine=False))
    assert len(list(tracks.differences(claimed, replay, same_machine=True))) == 4
    replay["steps"][1]["sampled"] = 140
    assert list(tracks.differences(claimed, replay, same_machine=False)) == [
        "the replay takes 330 tokens, the record says 280"]


def test_another_machine_is_said_plainly(folder, monkeypatch, capsys):
    monkeypatch.setattr(speedrun, "make_run", lambda folder, flags, seed: a_run(seed))
    monkeypatch.setattr(tracks, "machine", lambda: {"cpu": "another"})
    speedrun.verify(folder)
    assert "bits may differ, so only tokens and accuracy" in capsys.readouterr().out


def test_training_on_a_held_out_question_ends_the_run():
    sources = {"sums": "learn/lab/sums.py:six", "products": "bench/tracks.py:products"}
    for name, source in sources.items():
        source = str(ROOT / source)
        track = TRACKS[name]
        trained = data.load(source, "train", 100)
        speedrun.check_data(track, trained)
        for held_out in (data.load(source, "test", 1), track.second(1, 0)):
            with pytest.raises(SystemExit, match="refused: it trains on a held-out question"):
                speedrun.check_data(track, [*trained, *held_out])


def test_the_second_sets_are_held_out_and_follow_from_the_seed():
    for name, track in TRACKS.items():
        rows = track.second(track.size, 5)
        assert len(rows) == track.size, name
        assert all(track.is_held_out(row["question"]) for row in rows)
        assert rows != track.second(track.size, 6)


def test_each_pair_of_numbers_is_in_one_set_of_products():
    """The second set has a question about each of its pairs, in whatever order and words."""
    parts = list(map(set, tracks.product_pairs().values()))
    assert len(set.union(*parts)) == sum(map(len, parts)) == 66
    rows = tracks.second_products(None, 7)
    pairs = [sorted(map(int, re.findall(r"\d+", row["question"]))) for row in rows]
    assert sorted(map(tuple, pairs)) == sorted(parts[2])
    for row, (a, b) in zip(rows, pairs):
        assert row["answer"] == str(a * b)
    assert tracks.is_test_product("{1}, {0} and 1?".format(*min(parts[2])))
    assert not tracks.is_test_product("{1}, {0}?".format(*min(parts[0])))


def test_the_judge_takes_the_reward_of_the_track_and_not_that_of_the_recipe(llm, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def always(completions, **_):\n    return [1.0] * len(completions)\n")
    run = SimpleNamespace(cfg=make_config(rewards=f"{reward}:always"), llm=llm,
                          rollout=speedrun.nr.rollout, verifier=None)
    track = SUMS._replace(size=64)
    result = speedrun.judge(run, track, 0)
    assert result["n"] == 64 and 0 < result["right"] < 64


def test_older_code_finds_the_models_that_were_made_here(tmp_path):
    for folder in ("here/smollm2", "here/tiny", "older/tiny"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here/smollm2/config.json").write_text("made")
    speedrun.link_models(tmp_path / "here", tmp_path / "older")
    assert (tmp_path / "older/smollm2/config.json").read_text() == "made"
    assert not (tmp_path / "older/tiny").is_symlink()


def test_the_digest_of_the_bundled_model_is_that_of_its_tracks(monkeypatch):
    model = load_model(make_config())
    monkeypatch.setattr(speedrun.trainer, "named_weights", lambda _: model.state_dict().items())
    assert speedrun.digest(None) == SUMS.weights


def test_a_real_run_is_made_again_bit_for_bit(folder, monkeypatch):
    """Two processes of one step each."""
    monkeypatch.setattr(common, "ROOT", ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = "--steps 1 --prompts 2 --samples 8 --max_tokens 48".split()
    made, again = (speedrun.make_run(folder, flags, seed=1) for _ in range(2))
    assert not list(tracks.differences(made, again, same_machine=True))
    assert made["steps"][0]["weights"] == SUMS.weights != made["final"]
    assert tracks.tokens(made)[0] >= tracks.tokens(made)[1] > 0 and made["n"] == SUMS.size
    with pytest.raises(ValueError, match="--steps"):
        speedrun.make_run(folder, ["--steps", "-1"], seed=0)


def test_code_that_the_project_never_had_is_refused(folder):
    (common.ROOT / "nano_rlvr.py").write_text("lr = 2")
    with pytest.raises(ValueError, match="the record's commit c is not in this history"):
        speedrun.verify(folder)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_record_of_the_repository_breaks_no_rule(path):
    """Its source may be that of an earlier commit."""
    found = list(tracks.problems(path.parent, speedrun.read(path.parent)))
    assert not [problem for problem in found if not problem.startswith("the source is not")]


def test_the_table_of_records_is_in_the_page():
    assert RECORDS
    assert speedrun.table() in (ROOT / "docs/speedrun.md").read_text()


def test_a_folder_that_is_no_record_ends_in_one_line():
    with pytest.raises(ValueError, match="a record is bench/records/<track>/<name>, with a track"):
        speedrun.main(["verify", "elsewhere"])
    with pytest.raises(SystemExit, match="A speedrun for laptops"):
        speedrun.main([])

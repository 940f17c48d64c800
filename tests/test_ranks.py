"""One process and two give the same numbers, with the real DeepSpeed; and the script runs under torchrun."""
import itertools
import json
import random
import subprocess
import sys

import pytest
import torch

import nano_rlvr as nr
import zero_worker
from conftest import ENV, EPS, EXACT, ROOT, close, make_config, within
import runtime.batch
import runtime.model
from runtime.shape import ModelShape

pytestmark = pytest.mark.numeric
ENV = ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize("aggregate, stage, tied, first, balanced", [
    ("sequence", 2, True, 12, 1), ("token", 3, True, 16, 1), ("token", 3, False, 12, 0),
    ("constant", 1, True, 16, 0)])
def test_two_ranks_take_the_step_of_one(tmp_path, aggregate, stage, tied, first, balanced):
    """In float64 (rank_worker.py), with 12 + 4 rollouts or 16 + none, which are redistributed or not.

    Each tensor differs by at most EXACT times the distance it moved.
    """
    path, results = make_config().model, []
    model = runtime.model.load_model(make_config())
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.save_pretrained(path := str(tmp_path / "untied"))
    for launcher, name in (([sys.executable], "one"), (TORCHRUN, "two")):
        worker = [ROOT / "tests/rank_worker.py", tmp_path / name, path, aggregate, str(stage), "2", "",
                  str(first), str(balanced)]
        subprocess.run(launcher + worker, check=True, env=ENV)
        results.append(torch.load(tmp_path / name))
    (one, one_metrics), (two, two_metrics) = results
    assert one_metrics.keys() == two_metrics.keys()
    for name, x in one_metrics.items():
        close(two_metrics[name], x)
    start = model.state_dict()
    for name, w in one.items():
        within((w - two[name]).norm(), EXACT * (w - start[name]).norm())


@pytest.fixture(scope="module")
def after_five_steps(tmp_path_factory):
    """{ranks: {setting: weights}} from zero_worker.py, for the bundled model cut to one layer."""
    out, folder = {}, tmp_path_factory.mktemp("zero")
    model = runtime.model.load_model(make_config())
    model.model.layers, model.config.layer_types = model.model.layers[:1], ["full_attention"]
    model.config.num_hidden_layers = 1
    model.save_pretrained(folder)
    for ranks in (1, 2, 4):
        launcher = TORCHRUN[:-1] + [str(ranks)] if ranks > 1 else [sys.executable]
        command = [*launcher, ROOT / "tests/zero_worker.py", folder / "weights", folder]
        subprocess.run(command, check=True, env=ENV)
        out[ranks] = torch.load(folder / "weights")
    return out


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("setting", zero_worker.SETTINGS)
def test_five_steps_do_not_depend_on_the_number_of_ranks_or_the_zero_stage(after_five_steps, ranks, setting):
    """In float64. Each tensor differs by at most EXACT times the distance it moved."""
    start = runtime.model.load_model(make_config()).state_dict()
    one, several = after_five_steps[1][setting], after_five_steps[ranks][setting]
    of_stage = after_five_steps[1]["stage 1"] if setting.startswith("stage") else one
    for name, w in of_stage.items():
        assert (w - start[name]).norm() > 0.01 * 1e-3 * w.numel() ** 0.5
        within((w - several[name]).norm(), EXACT * (w - start[name]).norm())


@pytest.mark.parametrize("failure, first", [
    ("raise LookupError('of rank 1')", "LookupError: of rank 1"),
    ("raise RunError('of rank 1')", "nano_rlvr: of rank 1"),
    ("os.kill(os.getpid(), 9)", "")])
def test_a_rank_that_fails_ends_all_ranks_and_its_error_comes_first(failure, first):
    """The other rank waits for it in a collective call, but not for the 10 minutes of --timeout."""
    code = f"""if True:
        import os, torch
        from runtime import dist, stop
        from runtime.dist import RunError
        with stop.on_signals(), stop.with_one_line():
            dist.init_process_group()
            dist.all_gather([0])
            if dist.rank() == 1:
                {failure}
            dist.all_gather([1])
        """
    done = subprocess.run([*TORCHRUN, "--no-python", sys.executable, "-c", code], env=ENV, cwd=ROOT,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 1
    assert (first in done.stdout if first else "Signal 9 (SIGKILL)" in done.stdout), done.stdout[-3000:]
    lost = done.stdout.find("another rank has ended")
    assert lost == -1 or done.stdout.find(first) < lost
    assert "rank      : 1" in done.stdout


def test_groups_that_libraries_make_wait_no_longer_than_timeout():
    """DeepSpeed reduces gradients in a copy of the group of all ranks. PyTorch's own limit is 30 minutes."""
    code = """if True:
        import time, torch
        from runtime import dist, stop
        with stop.on_signals(), stop.with_one_line():
            dist.init_process_group(timeout=0.05)
            group = torch.distributed.new_group([0, 1])
            torch.distributed.all_reduce(torch.ones(3), group=group)
            if dist.rank() == 1:
                time.sleep(600)
            torch.distributed.all_reduce(torch.ones(3), group=group)
        """
    done = subprocess.run([*TORCHRUN, "--no-python", sys.executable, "-c", code], env=ENV, cwd=ROOT,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    line = "nano_rlvr: another rank has ended, or has not answered for --timeout minutes"
    assert done.stdout.count(line) == 1


def test_a_sync_from_zero_3_gathers_one_tensor_at_a_time(fresh_llm, monkeypatch):
    """DeepSpeed gathers the largest tensor at most. vLLM keeps what it gets until all parts of a fused matrix
    have come, here gate_proj and up_proj, and an embedding to the end."""
    import deepspeed
    from torch.multiprocessing.reductions import StorageWeakRef
    initialize = deepspeed.initialize

    def without_threshold(config, **others):
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # small tensors are sharded too
        return initialize(config=config, **others)

    monkeypatch.setattr(deepspeed, "initialize", without_threshold)
    policy = nr.make_policy(make_config(zero_stage=3))
    parameters = list(policy.module.parameters())
    named_weights, gathered, alive, handed_out = nr.named_weights, [], [], []

    def watched(engine):
        for name, w in named_weights(engine):
            handed_out.append((StorageWeakRef(w.untyped_storage()), w.numel()))
            gathered.append(sum(p.numel() for p in parameters if p.ds_status.name == "AVAILABLE"))
            alive.append(sum(size for storage, size in handed_out if not storage.expired()))
            yield name, w
            del w

    monkeypatch.setattr(nr, "named_weights", watched)
    nr.sync_weights(policy, fresh_llm)
    largest = max(p.ds_numel for p in parameters)
    assert max(gathered) == largest == 384 * 128 and len(gathered) > len(parameters)
    assert largest <= max(alive) <= 3 * largest


def sequences(lengths):
    """Rollouts of prompts of (prompt tokens, [completion tokens, ...])."""
    return [nr.Rollout([i] * prompt, [0] * n, f"{i}.{j}", False, [0.0] * n)
            for i, (prompt, completions) in enumerate(lengths) for j, n in enumerate(completions)]


def texts(rollouts):
    return sorted(r.text for r in rollouts)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_division_keeps_all_rollouts_and_balances_where_single_sequences_allow_it(ranks):
    """The bound of largest first: the ranks' mean, prompts repeated, plus the costliest sequence."""
    cost, rng = ModelShape.of(make_config().model).forward_flops, random.Random(ranks)
    reached = 0
    for _ in range(50):
        lengths = [(rng.randint(1, 100), [min(3000, 1 + int(rng.lognormvariate(4, 1))) for _ in range(4)])
                   for _ in range(ranks * rng.randint(1, 8))]
        rollouts = sequences(lengths)
        cuts = sorted(rng.randint(0, len(rollouts)) for _ in range(ranks - 1))
        parts = [rollouts[a:b] for a, b in itertools.pairwise([0, *cuts, len(rollouts)])]
        divided = runtime.batch.divide(parts, cost)
        assert len(divided) == ranks and texts(itertools.chain(*divided)) == texts(rollouts)
        for part in divided:  # completions of a prompt are neighbours: pack() looks for them there
            prompts = [prompt for prompt, _ in itertools.groupby(r.prompt for r in part)]
            assert len(prompts) == len({tuple(prompt) for prompt in prompts})
        single = [cost([r]) for r in rollouts]
        most, mean = max(map(cost, divided)), cost(rollouts) / ranks
        assert most <= max(map(cost, parts))
        assert most <= max(runtime.batch.TOLERANCE * mean, sum(single) / ranks + max(single))
        reached += most <= runtime.batch.TOLERANCE * mean
    assert reached >= 25


def test_a_division_moves_nothing_or_whole_prompts_where_that_is_enough():
    cost = ModelShape.of(make_config().model).forward_flops
    a, b, c, d = (sequences([(1, [])] * i + [(9, [50, 50])]) for i in range(4))
    assert runtime.batch.divide([a + b, c + d], cost) == [a + b, c + d]
    assert [len({r.prompt[0] for r in part}) for part in runtime.batch.divide([a + b + c + d, []], cost)] == [2, 2]
    assert [len(part) for part in runtime.batch.divide([a, []], cost)] == [1, 1]  # one prompt for two ranks
    assert runtime.batch.divide([[], []], cost) == [[], []]


def test_a_run_continues_on_another_number_of_ranks_and_in_another_zero_stage(tmp_path):
    """Two ranks, one, and two again take the steps that one rank takes in one go."""
    (tmp_path / "runs/run").mkdir(parents=True)

    def worker(launcher, stage, steps, runs):
        arguments = [tmp_path / "out", make_config().model, "token", str(stage), str(steps), runs, "12", "1"]
        subprocess.run([*launcher, ROOT / "tests/rank_worker.py", *arguments], check=True, env=ENV)
        return torch.load(tmp_path / "out")[0]

    whole = worker([sys.executable], 2, 3, "")
    for launcher, stage in ((TORCHRUN, 3), ([sys.executable], 1), (TORCHRUN, 2)):
        continued = worker(launcher, stage, 1, str(tmp_path / "runs"))
    assert (tmp_path / "runs/run/step-3").exists()
    start = runtime.model.load_model(make_config()).state_dict()
    for name, w in whole.items():
        within((w - continued[name]).norm(), EXACT * (w - start[name]).norm())


def test_the_script_under_torchrun_has_the_same_first_step(tmp_path):
    """In float32: sums of a few hundred terms of size 1, with rounding of some EPS.

    vLLM samples the same tokens for batches of another size, unless one of 700 draws falls between two
    roundings of a probability (EPS wide each: 1 machine in 10,000).
    """
    flags = "--steps 1 --prompts 4 --samples 4 --eval_size 9 --max_prompt 64".split()
    for launcher, name in (([sys.executable], "one"), (TORCHRUN, "two")):
        command = [*launcher, ROOT / "nano_rlvr.py", *flags, "--out", tmp_path, "--name", name]
        subprocess.run(command, check=True, env=ENV)
    one, two = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
                for name in ("one", "two"))
    assert len(one) == len(two) == 2
    for name in ("reward/mean", "completion/length", "loss", "grad_norm", "entropy", "eval/accuracy",
                 "eval/length", "eval/n"):
        within(abs(one[0][name] - two[0][name]), 100 * EPS * max(1, abs(one[0][name])))
    assert one[1]["eval/accuracy"] == two[1]["eval/accuracy"]
    assert "seconds/wait" in two[0] and "seconds/wait" not in one[0]

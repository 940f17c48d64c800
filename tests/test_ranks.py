"""One and three processes give the same numbers with the real DeepSpeed; two end together."""
import subprocess
import sys

import pytest
import torch

import rank_worker
import runtime.batch
import runtime.model
from conftest import ENV, EXACT, ROOT, TORCHRUN, close, make_config, save_untied, within

ENV = ENV | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def trained(group, tmp_path_factory):
    """{ranks: {setting: (weights, metrics)}} of rank_worker.py, and the weights at the start.

    The models are the bundled one cut to one layer, once with a head of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    model = runtime.model.load_model(make_config())
    model.model.layers, model.config.layer_types = model.model.layers[:1], ["full_attention"]
    model.config.num_hidden_layers = 1
    model.save_pretrained(folder / "tied")
    save_untied(model, folder / "untied")
    (folder / "run").mkdir()
    command = [*TORCHRUN, "3", ROOT / "tests/rank_worker.py", folder]
    subprocess.run(command, check=True, env=ENV)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_worker, "FOLDER", folder)
        found = {1: rank_worker.main(patch.setattr), 3: torch.load(folder / "found")}
    return found, model.state_dict()


def check_weights(got, wanted, start):
    """Each tensor differs by at most EXACT times the distance it moved: all is in float64."""
    assert got.keys() == wanted.keys()
    for name, w in wanted.items():
        assert (w - start[name]).norm() > 0.01 * 1e-3 * w.numel() ** 0.5
        within((w - got[name]).norm(), EXACT * (w - start[name]).norm())


@pytest.mark.numeric
@pytest.mark.parametrize("setting", rank_worker.SETTINGS)
def test_two_steps_do_not_depend_on_the_number_of_ranks_or_the_zero_stage(trained, setting):
    found, start = trained
    weights, metrics = found[1][setting]
    check_weights(found[3][setting][0], weights, start)
    assert found[3][setting][1].keys() == metrics.keys()
    for name, x in metrics.items():
        close(found[3][setting][1][name], x)


@pytest.mark.numeric
def test_a_run_continues_on_another_number_of_ranks_and_in_another_zero_stage(trained):
    """Three ranks take two steps in two starts, then one rank a third: those that one rank takes in
    one go. ZeRO-3 pads the shards of three ranks."""
    found, start = trained
    check_weights(found[3]["continued"][0], found[1]["two steps"][0], start)
    check_weights(found[1]["continued"][0], found[1]["three steps"][0], start)


PROGRAM = """if True:
    import os, sys, time, torch
    from pathlib import Path
    from runtime import ranks, stop
    from runtime.messages import RunError
    with stop.on_signals(), stop.with_one_line(folder=Path(sys.argv[1])):
        ranks.init_process_group(timeout=float(sys.argv[2]))
        group = torch.distributed.new_group([0, 1])
        torch.distributed.all_reduce(torch.ones(3), group=group)
        if ranks.rank() == 1:
            exec(sys.argv[3])
        try:
            torch.distributed.all_reduce(torch.ones(3), group=group)
        except RuntimeError:
            print("no answer in the group of a library")
        ranks.all_gather([1])
"""


@pytest.mark.parametrize("failure, timeout, said", [  # of the second rank, minutes
    ("raise RunError('of rank 1')", 10, "nano_rlvr: of rank 1 (traceback: {}/errors/rank-1.txt)"),
    ("while not stop.received: time.sleep(0.1)", 0.05, "no answer in the group of a library")])
def test_a_rank_that_fails_or_does_not_answer_ends_all_ranks_and_its_error_comes_first(
        tmp_path, failure, timeout, said):
    """Also in groups that libraries make: DeepSpeed reduces gradients in a copy of the group of all
    ranks, for which PyTorch's own limit is 30 minutes."""
    command = [*TORCHRUN, "2", "--no-python", sys.executable, "-c", PROGRAM]
    done = subprocess.run([*command, tmp_path, str(timeout), failure], env=ENV, cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 1
    first, *others = done.stdout.split("nano_rlvr: another rank has ended, or has not answered")
    assert said.format(tmp_path) in first and len(others) == 1, done.stdout

"""What examples/blame.py does with a run, for tests/test_what_if.py: prints a line of JSON."""
import json
import sys
from argparse import Namespace
from pathlib import Path

import torch

from bench import replay
from examples import blame

SHARE = 0.05  # of a rollout's gradient that is left out, so that second order is small


def inspect(run, args):
    """The gradients of single rollouts against the moments, and replays against the first one."""
    [answer] = replay.answers_of(args.run, [1], run.cfg, run.eval_set, run.llm.get_tokenizer())
    blame.go_on(run, args.first)
    snapshots = blame.record(run, args.last + 1)
    [after] = blame.logprobs(run, [answer])
    last = snapshots[args.last]
    moments = [blame.moments_of(s)[0] for s in (last, snapshots[args.last + 1])]
    before, first = (torch.cat(parts).double() for parts in moments)  # (N,), (N,)
    whole = (first - 0.9 * before) / 0.1  # (N,)
    replay.put(run, last)
    summed = torch.zeros_like(whole)  # (N,)
    for _, parts in blame.rollout_gradients(run, last):
        summed += last.clip * torch.cat(parts)  # (N,)
    wanted = blame.vectors(run, snapshots, answer, ["end"])["end"]
    found = blame.scores(run, snapshots, [wanted])
    key = max((k for k in found if k[0] == args.last), key=lambda k: abs(found[k][0]))
    blame.without(run, snapshots, [key], share=SHARE)
    slope = (after - blame.logprobs(run, [answer])[0]) / SHARE
    exact = []
    for is_sampled in (True, False):
        blame.without(run, snapshots, [key], is_sampled)
        exact.append(after - blame.logprobs(run, [answer])[0])
    replay.put(run, snapshots[args.first])
    blame.go_on(run, args.last + 1)
    again = blame.logprobs(run, [answer])[0]
    apart = ((summed - whole).norm() / whole.norm()).item()
    print(json.dumps({"apart": apart, "clip": last.clip, "score": found[key][0], "slope": slope,
                      "exact": exact, "after": after, "again": again}))


if __name__ == "__main__":
    blame.start(Namespace(run=Path(sys.argv[1]), first=2, last=3), inspect)

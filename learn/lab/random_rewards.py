"""Random rewards: can they raise accuracy, and is it the clip that does it?"""
import lab

CLIPPED, FREE = "random, clipped", "random, no clip"


def judge(values):
    _, low, _ = lab.gain(values, CLIPPED, "mean@4")
    return low > 0 and lab.above(values, CLIPPED, FREE, "mean@4")


FINDING = lab.Finding(
    claim="Random rewards raise the accuracy of a model whose frequent habit is the right one "
          "(Qwen2.5-Math-7B on MATH-500: +21.4 points, +29.1 with true rewards); without clipping "
          "the gain is gone.",
    source="2506.10947",
    rule="With a coin as reward and PPO's clip, mean@4 rises, and ends above that without a clip.",
    arms={"true": "nano_rlvr.py", CLIPPED: "nano_rlvr.py --rewards gsm8k:0,random:1",
          FREE: "nano_rlvr.py --rewards gsm8k:0,random:1 --clip_low 1 --clip_high 1000"},
    flags="--minibatches 4",
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS,
    judge=judge,
    panels={"mean@4": "eval/mean@4", "entropy": "entropy",
            "tokens of a sample": "completion/length"},
    reading="A coin does not help here: one of its six runs ends 3 points above its start, the "
            "others end at it or below. The claim is about a model whose frequent habit, to write "
            "code, is mostly right. The frequent habit of the bundled model is to guess, which is "
            "mostly wrong, so a drift towards it cannot raise the accuracy. How far a run drifts "
            "depends on the seed: the greedy accuracy ends between 24 and 55 %. The two random "
            "arms differ little, because the clip stops only 0.1 % of the tokens.",
    exercises=(
        "Start from a model that works most sums out: `--model` with the checkpoint of a true "
        "run after 10 steps. Predict the sign of the gain.",
        "Keep only one side of the clip: `--clip_low 1`. Which side would push a frequent "
        "habit further?"))

if __name__ == "__main__":
    lab.main(FINDING)

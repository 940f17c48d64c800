"""Environments of several turns: games, tools, users. The model acts, reads the reply and goes on.

    play = player(MyEnvironment, max_turns=8)       in my_file.py, beside the class
    python nano_rlvr.py --rollout my_file.py:play --rewards examples/environment.py:outcome ...

An environment plays one episode. It has two methods:

    reset(row) -> the text of the prompt, which must be the question of the row
    step(text of the model's turn) -> (observation, reward of the turn, whether the episode is done)

All episodes take a turn together: one call of vLLM, then one step of each environment. Sampled ids
are the context of the next turn and are trained, never decoded and encoded again. An observation is
a user's message, with loss_mask False. An episode ends when its environment is done, after
max_turns, and at --max_tokens, which counts observations too. A turn that is cut there is not
played. The outcome is the sum of the rewards, or None, "no reward", if the environment raised or
took too long. The whole episode gets it; examples/turn_credit.py credits each turn.
"""
import threading
import time

from data import completion_texts, request_seed
from nano_rlvr import Rollout, rollout
from rewards import each
from runtime import ranks


@each
def outcome(text, outcome=None):
    """The sum of an episode's rewards. None if its environment failed."""
    return outcome


def message_ids(tokenizer, text, last):
    """Token ids between two turns of the model: a user's message in the model's chat template. The
    token that ends a turn comes first, unless the model sampled it as the `last` one."""
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the turn
    turns = [("user", "?"), ("assistant", mark), ("user", text)]
    chat = [{"role": role, "content": content} for role, content in turns]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    after = whole.rpartition(mark)[2]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    return ids[1:] if ids[0] == last else ids


def at_once(calls, seconds):
    """The results of functions without arguments, each in a thread, which Python cannot end. An
    exception is a result, too: TimeoutError for a call that has not returned after `seconds`."""
    results = [TimeoutError(f"no reply after {seconds:g} s") for _ in calls]

    def work(i, call):
        try:
            results[i] = call()
        except (Exception, SystemExit) as e:  # a user's code: any type
            results[i] = e

    end = time.monotonic() + seconds
    threads = []
    for i, call in enumerate(calls):
        thread = threading.Thread(target=work, args=[i, call], daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(results)  # a late thread does not write into this copy


class Episode:
    """An environment and its Rollout. extra["reward"] has a turn's reward at its last token."""

    def __init__(self, make, row, prompt):
        self.make = make
        self.row = row
        self.rollout = Rollout(prompt, [], "", False, [], extra={"reward": []})
        self.is_on = True

    def reset(self):
        self.env = self.make()
        text = self.env.reset(self.row)
        if text != self.row["question"]:
            raise ValueError("reset returned another text than the question of the row")

    def step(self):
        observation, reward, done = self.env.step(self.text)
        return str(observation), float(reward), done

    def append(self, ids, logps, sampled):
        r = self.rollout
        r.completion += ids
        r.vllm_logps += logps
        r.loss_mask += [sampled] * len(ids)
        r.extra["reward"] += [0.0] * len(ids)

    def add_turn(self, turn, max_tokens):
        """Appends what the model sampled. The episode ends if max_tokens cut it."""
        r = self.rollout
        room = max_tokens - len(r.completion)
        self.append(turn.completion[:room], turn.vllm_logps[:room], True)
        self.text = turn.text
        r.truncated = turn.truncated or len(turn.completion) > room
        self.is_on = not r.truncated and self.error is None

    def add_reply(self, reply, tokenizer, max_tokens):
        """Appends the observation of what `step` returned, if it leaves room for another turn."""
        r = self.rollout
        if isinstance(reply, BaseException):
            self.error = reply
            self.is_on = False
            return
        observation, reward, done = reply
        r.extra["reward"][-1] = reward
        ids = message_ids(tokenizer, observation, r.completion[-1])
        is_full = len(r.completion) + len(ids) >= max_tokens
        r.truncated = is_full and not done
        self.is_on = not is_full and not done
        if self.is_on:
            self.append(ids, [0.0] * len(ids), False)


def player(make, max_turns, seconds=30.0):
    """A function for --rollout. make() -> an environment. seconds: for all steps of a turn."""
    def play(llm, prompts, n, temperature, max_tokens, seeds=None, examples=(), **sampling):
        tokenizer = llm.get_tokenizer()
        episodes = []
        for prompt, row in zip(prompts, examples):
            episodes += [Episode(make, row, prompt) for _ in range(n)]
        for e, error in zip(episodes, at_once([e.reset for e in episodes], seconds)):
            e.error = error  # its first turn is sampled all the same: a Rollout must have a token
        for number in range(max_turns):  # on every rank, also if no episode is on
            on = [i for i, e in enumerate(episodes) if e.is_on]
            playing = [episodes[i] for i in on]
            contexts = [e.rollout.prompt + e.rollout.completion for e in playing]
            turn_seeds = seeds and [request_seed(seeds[i // n], i % n, number) for i in on]
            turns = rollout(llm, contexts, 1, temperature, max_tokens, turn_seeds, **sampling)
            for e, turn in zip(playing, turns):
                e.add_turn(turn, max_tokens)
            whole = [e for e in playing if e.is_on]
            room = 0 if number + 1 == max_turns else max_tokens  # nothing follows the last turn
            for e, reply in zip(whole, at_once([e.step for e in whole], seconds)):
                e.add_reply(reply, tokenizer, room)
        rollouts = [e.rollout for e in episodes]
        texts = completion_texts(rollouts, tokenizer)
        for e, r, text in zip(episodes, rollouts, texts):
            r.text = text
            if e.error is None:
                r.outcome = sum(r.extra["reward"])
            else:
                ranks.print_each_once(f"note: an environment failed, no reward: {e.error!r}")
        return rollouts

    return play

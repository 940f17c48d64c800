"""The real GRPOTrainer of TRL on given completions, in float64: what is compared with it."""
import os
from unittest import mock

import torch

import nano_rlvr as nr
from conftest import ENV


def make_trainer(folder, model, tokenizer, prompts, rollout_func, reward, **options):
    """The trainer, with its model in training mode. options: of its configuration."""
    import trl
    from datasets import Dataset
    common = dict(
        use_cpu=True, bf16=False, model_init_kwargs={"dtype": torch.float64},
        gradient_checkpointing=False, optim="adamw_torch", report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, shuffle_dataset=False, num_generations=4,
        per_device_train_batch_size=4 * len(prompts))
    # ENV: accelerate would set up distributed training in our process group
    with mock.patch.dict(os.environ, ENV, clear=True):
        trainer = trl.GRPOTrainer(
            model=str(model), args=trl.GRPOConfig(str(folder), **common | options),
            processing_class=tokenizer, reward_funcs=reward, rollout_func=rollout_func,
            train_dataset=Dataset.from_dict({"prompt": prompts}))
    trainer.model.train()
    return trainer


def rollouts_of(inputs):
    """The rows of one of TRL's padded micro-batches, with its advantages and old log-probs."""
    rollouts, old = [], inputs.get("old_per_token_logps")
    for i, advantage in enumerate(inputs["advantages"].tolist()):
        prompt, completion = (inputs[f"{part}_ids"][i][inputs[f"{part}_mask"][i].bool()].tolist()
                              for part in ("prompt", "completion"))
        n = len(completion)
        logps = [0.0] * n if old is None else old[i, :n].tolist()
        rollouts.append(nr.Rollout(
            prompt, completion, "", False, logps, reward=0.0, advantages=[advantage] * n))
    return rollouts

"""What judging a completion needs. Nothing in here imports nano_rlvr.py, rewards.py or data.py."""

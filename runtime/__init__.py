"""What running needs. Nothing here imports nano_rlvr.py, rewards.py or data.py: what it needs is handed in."""

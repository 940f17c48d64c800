"""What running needs. Nothing in here imports nano_rlvr.py, rewards.py or data.py."""
__version__ = "0.3.0"  # the newest heading of CHANGELOG.md

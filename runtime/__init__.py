"""What running needs. A module imports only modules of a lower floor: tests/test_house.py."""
__version__ = "0.3.0"  # the newest heading of CHANGELOG.md

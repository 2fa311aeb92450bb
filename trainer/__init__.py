"""SFT, reward model and PPO on `ppokern`'s ops: `python -m trainer --help`."""

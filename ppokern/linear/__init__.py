"""Log-probs and the PPO loss from hidden states."""

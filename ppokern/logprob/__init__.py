"""Log-probs of selected tokens from logits."""

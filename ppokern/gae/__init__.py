"""Advantages and their whitening."""

"""KL estimates and shaped rewards."""

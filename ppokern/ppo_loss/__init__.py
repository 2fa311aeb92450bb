"""The clipped PPO losses."""

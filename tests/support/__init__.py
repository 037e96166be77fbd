"""What tests share: tiny models, trajectories, and the oracle."""

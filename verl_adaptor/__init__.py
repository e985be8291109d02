"""One argument swaps the framework under an RL post-training loop."""

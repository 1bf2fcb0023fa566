"""Checkpoints on the Hugging Face Hub, read at one pinned commit, in as few bytes as will do."""

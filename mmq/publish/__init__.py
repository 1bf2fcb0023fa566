"""A verified output as a model repository on the Hugging Face Hub."""

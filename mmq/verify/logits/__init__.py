"""Level logits: perplexity and parity with the source, layer by layer, with a verdict."""

"""KV scales, activation scales and channel importance from data."""

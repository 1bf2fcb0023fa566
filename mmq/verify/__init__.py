"""Is a converted checkpoint right? Structure, then weights against the source, then a verdict."""

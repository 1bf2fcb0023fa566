"""Is it right? Structure and weights of a converted checkpoint, judged against its source."""

"""The same few operations several ways; `ops` dispatches to a backend."""

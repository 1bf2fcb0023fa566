"""What this machine has, what of mmq works on it, and what to do about the rest: `mmq doctor`."""

"""Commands of the command line: parse, call one library function, render."""

"""What clients can ask over HTTP, one file for each API: how its requests are read, how its answers look."""

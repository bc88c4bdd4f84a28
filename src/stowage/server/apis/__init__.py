"""The HTTP APIs, one file for each: how its requests are read, and what its answers look like."""

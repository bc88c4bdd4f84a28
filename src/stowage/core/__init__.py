"""What is stored and when: pure arithmetic and state machines. No torch, no I/O, no clock, no threads."""

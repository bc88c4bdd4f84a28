"""What makes a token's arithmetic independent of its neighbours and of where its prompt was cut."""

"""Tables, family queues, floors and sequences, pure."""
